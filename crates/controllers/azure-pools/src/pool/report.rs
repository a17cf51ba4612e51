//! Writes the status of a pool and of its machines, in as few writes as that takes.
//!
//! Invariant: everything that is true for longer than a moment is written. What is over within a moment (an instance of a
//! rollout that is being made, a drain without obstacles, the steps of many) is written together with what follows it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use capstan_api::azure::{AzureCluster, AzureMachinePool};
use capstan_kube::patch;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::Actor;
use super::apply::WRITES;
use super::member::Member;
use super::state::{Pace, provider_id};
use super::status::Draft;
use crate::error::Error;

/// What lasts no longer than this, of a machine that comes or goes in a rollout, is not told on its own.
const MOMENT: Duration = Duration::from_secs(30);
/// While much happens, a pool's status is written so long after the first thing that it has not said yet.
const STATUS_PACE: Duration = Duration::from_secs(10);
/// The same when a drain is held up: somebody may have to do something.
const STUCK_PACE: Duration = Duration::from_secs(5);
/// The same for its list of provider ids, which nobody waits for in the middle of a rollout.
const IDS_PACE: Duration = Duration::from_secs(60);
/// A pool at rest tells at once, but no more often than this: nodes may flap.
const REST_PACE: Duration = Duration::from_secs(2);

/// The names of the tags that the scale set was last given because a spec has them: only these are ever taken away.
const TAGS_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/appliedTags";

pub(super) fn applied_tags(pool: &AzureMachinePool) -> BTreeSet<String> {
    let noted = pool.annotations().get(TAGS_ANNOTATION);
    noted
        .and_then(|noted| serde_json::from_str(noted).ok())
        .unwrap_or_default()
}

/// Notes the tags that the scale set has from its pool and from its cluster.
fn note_tags(pool: &mut AzureMachinePool, cluster: &AzureCluster) {
    let own = pool.spec.additional_tags.keys();
    let names: BTreeSet<String> = own.chain(cluster.spec.additional_tags.keys()).cloned().collect();
    if names != applied_tags(pool) {
        let noted = serde_json::to_string(&names).unwrap_or_default();
        pool.annotations_mut().insert(TAGS_ANNOTATION.to_owned(), noted);
    }
}

impl Pace {
    /// When a change that was first seen now, or earlier, is to be written.
    fn due(&mut self, pace: Duration, at_rest: bool, now: Instant) -> Instant {
        let since = *self.pending.get_or_insert(now);
        match at_rest {
            true => self.written.map_or(now, |written| written + REST_PACE),
            false => since + pace,
        }
    }

    /// All is said.
    fn settle(&mut self, now: Option<Instant>) {
        self.pending = None;
        self.written = now.or(self.written);
    }
}

/// Whether a machine's status is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    Now,
    /// Not before it has lasted.
    After(Duration),
}

fn due_report(member: &Member, rolling: bool, now: Timestamp) -> Report {
    let Some(object) = &member.object else {
        return Report::Now;
    };
    let lasting = |since: Option<&Time>| {
        let age = since.and_then(|since| Duration::try_from(now.duration_since(since.0)).ok());
        let left = MOMENT.saturating_sub(age.unwrap_or_default());
        if left.is_zero() {
            Report::Now
        } else {
            Report::After(left)
        }
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
    Report::Now
}

impl Actor<'_> {
    /// Writes the pool's status: at once when others wait for it or when something is wrong; else a little later. The
    /// answer is when what is left pending may be said.
    pub(super) async fn write_status(&mut self, draft: &Draft, urgent: bool) -> Result<Option<Instant>, Error> {
        let (now, ids) = (Instant::now(), self.ids_again);
        if !draft.differs() {
            self.state.status_pace.settle(None);
            return Ok(ids);
        }
        let pace = if draft.is_stuck() { STUCK_PACE } else { STATUS_PACE };
        let due = self.state.status_pace.due(pace, draft.at_rest(), now);
        if due > now && !urgent && !draft.is_urgent() {
            return Ok([Some(due), ids].into_iter().flatten().min());
        }
        let written = draft.write(self.controller).await?;
        self.state.status_pace.settle(written.then_some(now));
        Ok(ids)
    }

    /// Writes every machine's status that is worth a write. The answer is when to look at the others again.
    pub(super) async fn report(&mut self, members: &[Member], wanted: &str, rolling: bool) -> Result<Duration, Error> {
        let set = self.scale_set().unwrap_or_default();
        let version = self.owners.machine_pool.spec.template.spec.version.clone();
        let (writer, now) = (self.writer(), Timestamp::now());
        let (mut reports, mut wait) = (Vec::new(), self.controller.options.resync);
        for member in members {
            match due_report(member, rolling, now) {
                Report::Now => {
                    let latest = member.model(&set) == Some(wanted);
                    reports.push(writer.report(member, latest, version.as_deref()));
                }
                Report::After(left) => wait = wait.min(left),
            }
        }
        let written: Vec<_> = futures::stream::iter(reports).buffer_unordered(WRITES).collect().await;
        written.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(wait)
    }

    /// Keeps `providerID`, `providerIDList` and the note of our tags as they are; not at every step of many.
    pub(super) async fn spec(&mut self, members: &[Member], at_rest: bool) -> Result<(), Error> {
        let mut after = self.pool.clone();
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let own = set.filter(|set| !set.id.is_empty()).map(|set| provider_id(&set.id));
        let same = |one: &str, other: &str| one.eq_ignore_ascii_case(other);
        let kept = self.pool.spec.provider_id.clone();
        after.spec.provider_id = match (own, kept) {
            (Some(own), Some(kept)) if same(&own, &kept) => Some(kept),
            (own, _) => own,
        };
        // Cluster API deletes the Nodes of ids that leave the list, and compares them byte by byte.
        let known = &self.pool.spec.provider_id_list;
        let id = |member: &Member| {
            let id = member.provider_id();
            known
                .iter()
                .find(|known| same(known, id))
                .cloned()
                .unwrap_or_else(|| id.to_owned())
        };
        let mut ids: Vec<String> = members.iter().map(id).collect();
        ids.sort();
        after.spec.provider_id_list = ids;
        note_tags(&mut after, &self.owners.azure_cluster);
        let now = Instant::now();
        if after.spec == self.pool.spec && after.metadata == self.pool.metadata {
            self.state.ids_pace.settle(None);
            return Ok(());
        }
        // Without any id yet, others wait for the first.
        let rest = at_rest || self.pool.spec.provider_id.is_none();
        let due = self.state.ids_pace.due(IDS_PACE, rest, now);
        if due > now {
            self.ids_again = Some(due);
            return Ok(());
        }
        let api = self
            .controller
            .context
            .api(self.pool.metadata.namespace.as_deref().unwrap_or_default());
        let written = patch::object(&api, self.pool, &after, patch::Lock::Open).await?;
        self.state.ids_pace.settle(Some(now));
        self.controller.wrote(self.pool, written.as_ref());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::member::NodeState;
    use crate::pool::state::InstanceSnapshot;
    use capstan_api::azure::AzureMachinePoolMachine;
    use capstan_core::pool::Drain;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[test]
    fn a_pool_in_motion_tells_a_while_after_the_first_news_and_a_pool_at_rest_at_once() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(pace.due(STATUS_PACE, false, begun), begun + STATUS_PACE);
        assert_eq!(pace.due(STATUS_PACE, false, begun + second), begun + STATUS_PACE);
        assert_eq!(pace.due(STATUS_PACE, true, begun + second), begun + second);
        pace.settle(Some(begun + second));
        assert_eq!(
            pace.due(STATUS_PACE, true, begun + 2 * second),
            begun + second + REST_PACE
        );
        pace.settle(None);
        let later = begun + 60 * second;
        assert_eq!(pace.due(STATUS_PACE, false, later), later + STATUS_PACE);
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
        }
    }

    #[test]
    fn the_tags_of_pool_and_cluster_are_noted_and_none_are_worth_no_note() {
        let mut cluster: AzureCluster = serde_json::from_value(
            json!({ "metadata": {}, "spec": { "location": "l", "additionalTags": { "team": "a" } } }),
        )
        .unwrap();
        let mut pool: AzureMachinePool = serde_json::from_value(json!({
            "metadata": { "name": "p" },
            "spec": { "location": "l", "additionalTags": { "cost": "1" }, "template": { "vmSize": "s", "osDisk": {} } }
        }))
        .unwrap();
        note_tags(&mut pool, &cluster);
        assert_eq!(applied_tags(&pool), ["cost".to_owned(), "team".to_owned()].into());
        pool.spec.additional_tags.clear();
        cluster.spec.additional_tags.clear();
        note_tags(&mut pool, &cluster);
        assert_eq!(applied_tags(&pool), BTreeSet::new());
        pool.annotations_mut().clear();
        note_tags(&mut pool, &cluster);
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
    fn what_lasts_only_a_moment_is_not_told(
        #[case] state: &str,
        #[case] going: bool,
        #[case] stuck: bool,
        #[case] rolling: bool,
        #[case] age: i64,
        #[case] told: bool,
    ) {
        let mut metadata = json!({ "name": "m", "creationTimestamp": BEGIN });
        if going {
            metadata["deletionTimestamp"] = json!(BEGIN);
        }
        let now = BEGIN.parse::<Timestamp>().unwrap() + Duration::from_secs(age as u64);
        let said = due_report(&member(state, stuck, metadata, Value::Null), rolling, now);
        assert_eq!(said == Report::Now, told, "{said:?}");
    }
}
