//! Writes the status of a pool's machines and the provider ids of the pool, in as few writes as that takes.
//!
//! Invariant: everything that is true for longer than a moment is written. What is over within a moment (an instance of a
//! rollout that is being created, a drain without obstacles, the steps of many) is written together with what follows it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use capstan_api::azure::{AzureCluster, AzureMachinePool};
use capstan_azure::model::Tags;
use capstan_core::pool::Mode;
use capstan_kube::patch::Lock;
use capstan_kube::runtime::Outcome;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, Time};
use kube::ResourceExt;

use super::Actor;
use super::apply::WRITES;
use super::member::Member;
use super::observe::Observed;
use super::snapshot::provider_id;
use super::state::Pace;
use super::status::is_settled;
use crate::error::Error;

/// A state of a machine in a rollout that lasts no longer than this is not written on its own.
const MOMENT: Duration = Duration::from_secs(30);
/// That a machine of a rollout has not got the new model is written once the rollout has gone on for so long: the pool's condition
/// counts those machines, and most of them are replaced before anybody reads it.
const OUTDATED_PACE: Duration = Duration::from_secs(300);
/// In a rollout the list of provider ids is written this long after its first change: nobody waits for it.
const IDS_PACE: Duration = Duration::from_secs(60);
/// A settled pool writes them at once, but no more often than this: nodes may flap.
const SETTLED_PACE: Duration = Duration::from_secs(2);

/// The names of the tags that Capstan set on the scale set from a spec. Capstan removes only these tags.
const TAGS_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/appliedTags";

pub(super) fn applied_tags(pool: &AzureMachinePool) -> BTreeSet<String> {
    let noted = pool.annotations().get(TAGS_ANNOTATION);
    noted
        .and_then(|noted| serde_json::from_str(noted).ok())
        .unwrap_or_default()
}

/// Records the tags that the scale set has from its pool and from its cluster. One that they had and the scale set still has
/// stays on record until it is gone.
fn note_tags(pool: &mut AzureMachinePool, cluster: &AzureCluster, present: Option<&Tags>) {
    let (own, applied) = (pool.spec.additional_tags.keys(), applied_tags(pool));
    let left = applied
        .iter()
        .filter(|name| present.is_some_and(|tags| tags.contains_key(*name)));
    let names = own.chain(cluster.spec.additional_tags.keys()).chain(left);
    let names: BTreeSet<String> = names.cloned().collect();
    if names != applied {
        let noted = serde_json::to_string(&names).unwrap_or_default();
        pool.annotations_mut().insert(TAGS_ANNOTATION.to_owned(), noted);
    }
}

/// Keeps `clusterctl move` waiting. Capstan removes it where the provider that ran the pool before has set it.
const BLOCK_MOVE_ANNOTATION: &str = "clusterctl.cluster.x-k8s.io/block-move";
/// The names of that provider in `managedFields`.
const PEERS: [&str; 2] = ["cluster-api-provider-azure-manager", "manager"];

/// Whether the provider that ran the pool before has set an annotation, and nobody else has.
fn is_annotated_by_peer(metadata: &ObjectMeta, annotation: &str) -> bool {
    let field = format!("f:{annotation}");
    let owns = |entry: &&ManagedFieldsEntry| {
        let fields = entry
            .fields_v1
            .as_ref()
            .map(|fields| &fields.0["f:metadata"]["f:annotations"]);
        fields.is_some_and(|fields| fields.get(&field).is_some())
    };
    let owners: Vec<&ManagedFieldsEntry> = metadata.managed_fields.iter().flatten().filter(owns).collect();
    let is_peer = |entry: &&ManagedFieldsEntry| entry.manager.as_deref().is_some_and(|name| PEERS.contains(&name));
    !owners.is_empty() && owners.iter().all(is_peer)
}

impl Pace {
    /// Returns when a change that was first noticed now, or earlier, is to be written.
    fn due(&mut self, settled: bool, now: Instant) -> Instant {
        let since = *self.pending.get_or_insert(now);
        match settled {
            true => self.written.map_or(now, |written| written + SETTLED_PACE),
            false => since + IDS_PACE,
        }
    }

    /// Nothing is pending any more.
    fn settle(&mut self, written: Option<Instant>) {
        self.pending = None;
        self.written = written.or(self.written);
    }
}

/// When a machine's status is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Now,
    /// Not before it has lasted.
    After(Duration),
}

fn due_report(member: &Member, rolling: bool, now: Timestamp) -> Due {
    let Some(object) = &member.object else {
        return Due::Now;
    };
    let lasting = |since: Option<&Time>| {
        let age = since.and_then(|since| Duration::try_from(now.duration_since(since.0)).ok());
        let left = MOMENT.saturating_sub(age.unwrap_or_default());
        if left.is_zero() { Due::Now } else { Due::After(left) }
    };
    if member.leaving() && !member.stuck {
        let owner = member
            .owner
            .as_ref()
            .and_then(|o| o.metadata.deletion_timestamp.as_ref());
        return lasting(object.metadata.deletion_timestamp.as_ref().or(owner));
    }
    let failed = member.instance.as_ref().is_some_and(|instance| instance.is("Failed"));
    if rolling && object.status.is_none() && !member.leaving() && !member.node.is_ready() && !failed {
        return lasting(object.metadata.creation_timestamp.as_ref());
    }
    Due::Now
}

impl Actor<'_> {
    /// Writes the status of the machines and the provider ids of the pool.
    pub(super) async fn report(
        &mut self,
        observed: &mut Observed,
        rolling: bool,
        waiting: Option<String>,
    ) -> Result<Outcome, Error> {
        observed.waiting = waiting;
        self.sync_members(observed);
        match observed.mode() {
            Mode::Orphaned => {}
            Mode::Teardown => self.write_drains(observed).await?,
            Mode::Full | Mode::FinishOnly | Mode::WithoutCloud => self.write_machines(observed, rolling).await?,
        }
        if matches!(observed.mode(), Mode::Full | Mode::FinishOnly) && !observed.created {
            self.note_success(observed);
            observed.cloud = self.state.summary(&self.owners.set);
            self.write_provider_ids(observed).await?;
        }
        Ok(Outcome::Done)
    }

    /// Brings the members up to what the steps have changed.
    fn sync_members(&self, observed: &mut Observed) {
        let instances = self.state.snapshot.iter().flat_map(|snapshot| &snapshot.instances);
        let known: BTreeMap<&str, _> = instances
            .map(|instance| (instance.provider_id.as_str(), instance))
            .collect();
        for instance in observed
            .members
            .iter_mut()
            .filter_map(|member| member.instance.as_mut())
        {
            if let Some(now) = known.get(instance.provider_id.as_str()) {
                (instance.latest, instance.state) = (now.latest, now.state.clone());
            }
        }
    }

    /// Writes why drains of a pool that is deleted take long.
    async fn write_drains(&mut self, observed: &Observed) -> Result<(), Error> {
        let writer = self.writer();
        for member in observed.existing().filter(|member| member.stuck) {
            let status = member.object.as_ref().and_then(|object| object.status.as_ref());
            let latest = status.is_some_and(|status| status.latest_model_applied);
            let written = writer.report(member, latest, None).await?;
            self.note(written);
        }
        Ok(())
    }

    /// Writes every machine's status that is worth a write.
    async fn write_machines(&mut self, observed: &mut Observed, rolling: bool) -> Result<(), Error> {
        let set = self.scale_set().unwrap_or_default();
        let wanted = observed.model.as_ref().map(|model| model.hash.clone());
        let wanted = wanted.or_else(|| self.state.wanted_model.clone());
        let Some(wanted) = wanted.or_else(|| set.model.clone()) else {
            return Ok(());
        };
        let version = self.owners.machine_pool.spec.template.spec.version.clone();
        let (writer, now) = (self.writer(), self.scope.now());
        let (mut reports, mut wait) = (Vec::new(), Duration::MAX);
        let outdated = self.outdated_for(rolling);
        for member in observed.existing() {
            match due_report(member, rolling, now) {
                Due::Now => {
                    let latest = member.model(&set) == Some(&wanted);
                    let left = OUTDATED_PACE.saturating_sub(outdated);
                    if rolling && !latest && !left.is_zero() && writer.is_written(member, true, version.as_deref()) {
                        wait = wait.min(left);
                        continue;
                    }
                    reports.push(writer.report(member, latest, version.as_deref()));
                }
                Due::After(left) => wait = wait.min(left),
            }
        }
        let written: Vec<_> = futures::stream::iter(reports).buffer_unordered(WRITES).collect().await;
        self.note_all(written)?;
        observed.requeue(wait);
        Ok(())
    }

    /// Returns how long a rollout has gone on.
    fn outdated_for(&mut self, rolling: bool) -> Duration {
        let since = self.state.rolling_since.unwrap_or(self.now());
        self.state.rolling_since = rolling.then_some(since);
        self.since(since)
    }

    /// Whether the provider that ran the pool before keeps `clusterctl move` waiting. Caches do not keep who wrote what.
    async fn is_move_blocked_by_peer(&self) -> Result<bool, Error> {
        if !self.pool().annotations().contains_key(BLOCK_MOVE_ANNOTATION) {
            return Ok(false);
        }
        let live = self.scope.api_of::<AzureMachinePool>();
        let live = live.get_metadata(&self.pool().name_any()).await?;
        Ok(is_annotated_by_peer(&live.metadata, BLOCK_MOVE_ANNOTATION))
    }

    /// Writes `providerID`, `providerIDList` and the record of our tags; not at every step of many.
    async fn write_provider_ids(&mut self, observed: &mut Observed) -> Result<(), Error> {
        let mut after = self.pool().clone();
        let set = observed.cloud.set.as_ref().filter(|set| !set.id.is_empty());
        let own = set.map(|set| provider_id(&set.id));
        let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
        let kept = after.spec.provider_id.take();
        after.spec.provider_id = match (own, kept) {
            (Some(own), Some(kept)) if same(&own, &kept) => Some(kept),
            (own, _) => own,
        };
        // Cluster API deletes the Nodes of ids that leave the list, and compares them byte by byte.
        let known = &self.pool().spec.provider_id_list;
        let id = |member: &Member| {
            let id = member.provider_id();
            let known = known.iter().find(|known| same(known, id)).cloned();
            known.unwrap_or_else(|| id.to_owned())
        };
        let mut ids: Vec<String> = observed.members.iter().map(id).collect();
        ids.sort();
        after.spec.provider_id_list = ids;
        if self.is_move_blocked_by_peer().await? {
            after.annotations_mut().remove(BLOCK_MOVE_ANNOTATION);
        }
        note_tags(&mut after, &self.owners.azure_cluster, set.map(|set| &set.tags));
        if after.spec == self.pool().spec && after.metadata == self.pool().metadata {
            self.state.ids_pace.settle(None);
            return Ok(());
        }
        // Without any id yet, others wait for the first.
        let at_once = is_settled(observed) || self.pool().spec.provider_id.is_none();
        let now = self.now();
        let due = self.state.ids_pace.due(at_once, now);
        if due > now {
            observed.requeue(due - now);
            return Ok(());
        }
        self.scope.write_object(&after, Lock::Open).await?;
        self.state.ids_pace.settle(Some(now));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::member::NodeState;
    use crate::pool::snapshot::InstanceSnapshot;
    use capstan_api::azure::AzureMachinePoolMachine;
    use capstan_core::pool::Drain;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[test]
    fn provider_ids_are_written_a_while_after_their_first_change_and_at_once_when_the_pool_is_settled() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(pace.due(false, begun), begun + IDS_PACE);
        assert_eq!(pace.due(false, begun + second), begun + IDS_PACE);
        assert_eq!(pace.due(true, begun + second), begun + second);
        pace.settle(Some(begun + second));
        assert_eq!(pace.due(true, begun + 2 * second), begun + second + SETTLED_PACE);
        pace.settle(None);
        let later = begun + 60 * second;
        assert_eq!(pace.due(false, later), later + IDS_PACE);
    }

    #[rstest]
    #[case::the_provider_of_cluster_api(&["cluster-api-provider-azure-manager"], true)]
    #[case::a_person(&["kubectl-annotate"], false)]
    #[case::both(&["cluster-api-provider-azure-manager", "kubectl-annotate"], false)]
    #[case::nobody(&[], false)]
    fn only_the_peer_s_own_annotation_counts_as_its_own(#[case] managers: &[&str], #[case] expected: bool) {
        let fields =
            json!({ "f:metadata": { "f:annotations": { ".": {}, (format!("f:{BLOCK_MOVE_ANNOTATION}")): {} } } });
        let owns = |manager: &&str| json!({ "manager": manager, "operation": "Update", "fieldsV1": fields });
        let entries: Vec<Value> = managers.iter().map(owns).collect();
        let others = json!({ "manager": "manager", "fieldsV1": { "f:spec": {} } });
        let all: Vec<Value> = entries.into_iter().chain([others]).collect();
        let metadata = serde_json::from_value(json!({ "managedFields": all })).unwrap();
        assert_eq!(is_annotated_by_peer(&metadata, BLOCK_MOVE_ANNOTATION), expected);
    }

    fn member(state: &str, stuck: bool, metadata: Value, status: Value) -> Member {
        let object: AzureMachinePoolMachine =
            serde_json::from_value(json!({ "metadata": metadata, "spec": { "providerID": "p" }, "status": status }))
                .unwrap();
        let instance = InstanceSnapshot {
            id: "1".into(),
            state: state.into(),
            ..InstanceSnapshot::default()
        };
        Member {
            name: "m".into(),
            instance: Some(instance),
            object: Some(std::sync::Arc::new(object)),
            owner: None,
            guarded: false,
            node: NodeState::Missing,
            drain: match stuck {
                true => Drain::Running {
                    why: "a pod".to_owned(),
                },
                false => Drain::NotRun,
            },
            stuck,
            failed: false,
            confirmed_missing: false,
            joining: None,
        }
    }

    #[test]
    fn the_tags_of_pool_and_cluster_are_recorded_and_none_need_no_record() {
        let mut cluster: AzureCluster = serde_json::from_value(
            json!({ "metadata": {}, "spec": { "location": "l", "additionalTags": { "team": "a" } } }),
        )
        .unwrap();
        let mut pool: AzureMachinePool = serde_json::from_value(json!({
            "metadata": { "name": "p" },
            "spec": { "location": "l", "additionalTags": { "cost": "1" }, "template": { "vmSize": "s", "osDisk": {} } }
        }))
        .unwrap();
        note_tags(&mut pool, &cluster, None);
        assert_eq!(applied_tags(&pool), ["cost".to_owned(), "team".to_owned()].into());
        pool.spec.additional_tags.clear();
        cluster.spec.additional_tags.clear();
        let present = Tags::from([
            ("cost".to_owned(), "1".to_owned()),
            ("other".to_owned(), "2".to_owned()),
        ]);
        note_tags(&mut pool, &cluster, Some(&present));
        assert_eq!(applied_tags(&pool), ["cost".to_owned()].into(), "until it is gone");
        note_tags(&mut pool, &cluster, Some(&Tags::new()));
        assert_eq!(applied_tags(&pool), BTreeSet::new());
        pool.annotations_mut().clear();
        note_tags(&mut pool, &cluster, None);
        assert!(pool.annotations().is_empty());
    }

    const BEGIN: &str = "2026-01-01T00:00:00Z";

    #[rstest]
    #[case::a_new_one_of_a_growing_pool("Creating", false, false, false, 1, true)]
    #[case::a_new_one_of_a_rollout("Creating", false, false, true, 1, false)]
    #[case::made_but_not_joined_yet("Succeeded", false, false, true, 1, false)]
    #[case::unless_it_takes_long("Creating", false, false, true, 31, true)]
    #[case::one_that_failed("Failed", false, false, true, 1, true)]
    #[case::one_that_goes("Succeeded", true, false, true, 1, false)]
    #[case::one_that_is_held_up("Succeeded", true, true, true, 1, true)]
    #[case::one_that_goes_slowly("Deleting", true, false, false, 31, true)]
    fn a_state_that_lasts_only_a_moment_is_not_written(
        #[case] state: &str,
        #[case] going: bool,
        #[case] stuck: bool,
        #[case] rolling: bool,
        #[case] age: i64,
        #[case] written: bool,
    ) {
        let mut metadata = json!({ "name": "m", "creationTimestamp": BEGIN });
        if going {
            metadata["deletionTimestamp"] = json!(BEGIN);
        }
        let now = BEGIN.parse::<Timestamp>().unwrap() + Duration::from_secs(age as u64);
        let due = due_report(&member(state, stuck, metadata, Value::Null), rolling, now);
        assert_eq!(due == Due::Now, written, "{due:?}");
    }
}
