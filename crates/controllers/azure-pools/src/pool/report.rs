//! What a pool and its machines say of themselves, in as few writes as that takes.
//!
//! Invariant: everything that is true for longer than a moment is told. What is over within a moment (an instance of a
//! rollout that is being made, a drain without obstacles, the steps of many) is told together with what follows it.

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
use super::memory::Pace;
use super::observe::Member;
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
        let since = *self.unsaid.get_or_insert(now);
        match at_rest {
            true => self.written.map_or(now, |written| written + REST_PACE),
            false => since + pace,
        }
    }

    /// All is said.
    fn said(&mut self, now: Option<Instant>) {
        self.unsaid = None;
        self.written = now.or(self.written);
    }
}

/// Whether a machine's status is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Words {
    Now,
    /// Not before it has lasted.
    After(Duration),
}

fn words(member: &Member, rolling: bool, now: Timestamp) -> Words {
    let Some(object) = &member.object else {
        return Words::Now;
    };
    let lasting = |since: Option<&Time>| {
        let age = since.and_then(|since| Duration::try_from(now.duration_since(since.0)).ok());
        let left = MOMENT.saturating_sub(age.unwrap_or_default());
        if left.is_zero() { Words::Now } else { Words::After(left) }
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
    Words::Now
}

impl Actor<'_> {
    /// Writes the pool's status: at once when others wait for it or when something is wrong; else a little later. The
    /// answer is when what is left unsaid may be said.
    pub(super) async fn tell(&mut self, draft: &Draft, urgent: bool) -> Result<Option<Instant>, Error> {
        let (now, ids) = (Instant::now(), self.ids_again);
        if !draft.differs() {
            self.memory.status_pace.said(None);
            return Ok(ids);
        }
        let pace = if draft.is_stuck() { STUCK_PACE } else { STATUS_PACE };
        let due = self.memory.status_pace.due(pace, draft.at_rest(), now);
        if due > now && !urgent && !draft.is_urgent() {
            return Ok([Some(due), ids].into_iter().flatten().min());
        }
        let written = draft.write(self.world).await?;
        self.memory.status_pace.said(written.then_some(now));
        Ok(ids)
    }

    /// Writes every machine's status that is worth a write. The answer is when to look at the others again.
    pub(super) async fn report(&mut self, members: &[Member], wanted: &str, rolling: bool) -> Result<Duration, Error> {
        let set = self.memory.look.as_ref().and_then(|look| look.set.as_ref());
        let model = set.and_then(|set| set.model.as_deref());
        let version = self.owners.machine_pool.spec.template.spec.version.clone();
        let (writer, now) = (self.writer(), Timestamp::now());
        let (mut reports, mut wait) = (Vec::new(), self.world.options.resync);
        for member in members {
            match words(member, rolling, now) {
                Words::Now => {
                    let latest = member.model(model) == Some(wanted);
                    reports.push(writer.report(member, latest, version.as_deref()));
                }
                Words::After(left) => wait = wait.min(left),
            }
        }
        let written: Vec<_> = futures::stream::iter(reports).buffer_unordered(WRITES).collect().await;
        written.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(wait)
    }

    /// Keeps `providerID`, `providerIDList` and the note of our tags as they are; not at every step of many.
    pub(super) async fn spec(&mut self, members: &[Member], at_rest: bool) -> Result<(), Error> {
        let mut after = self.pool.clone();
        let set = self.memory.look.as_ref().and_then(|look| look.set.as_ref());
        after.spec.provider_id = set
            .filter(|set| !set.id.is_empty())
            .map(|set| format!("azure://{}", set.id));
        let mut ids: Vec<String> = members.iter().map(|member| member.provider_id().to_owned()).collect();
        ids.sort();
        after.spec.provider_id_list = ids;
        note_tags(&mut after, &self.owners.azure_cluster);
        let now = Instant::now();
        if after.spec == self.pool.spec && after.metadata == self.pool.metadata {
            self.memory.ids_pace.said(None);
            return Ok(());
        }
        // Without any id yet, others wait for the first.
        let rest = at_rest || self.pool.spec.provider_id.is_none();
        let due = self.memory.ids_pace.due(IDS_PACE, rest, now);
        if due > now {
            self.ids_again = Some(due);
            return Ok(());
        }
        let api = self
            .world
            .context
            .api(self.pool.metadata.namespace.as_deref().unwrap_or_default());
        let written = patch::object(&api, self.pool, &after, patch::Lock::Open).await?;
        self.memory.ids_pace.said(Some(now));
        self.world.wrote(self.pool, written.as_ref());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::memory::Seen;
    use crate::pool::observe::NodeState;
    use capstan_api::azure::AzureMachinePoolMachine;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[test]
    fn a_pool_in_motion_tells_a_while_after_the_first_news_and_a_pool_at_rest_at_once() {
        let (mut pace, begun) = (Pace::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(pace.due(STATUS_PACE, false, begun), begun + STATUS_PACE);
        assert_eq!(pace.due(STATUS_PACE, false, begun + second), begun + STATUS_PACE);
        assert_eq!(pace.due(STATUS_PACE, true, begun + second), begun + second);
        pace.said(Some(begun + second));
        assert_eq!(
            pace.due(STATUS_PACE, true, begun + 2 * second),
            begun + second + REST_PACE
        );
        pace.said(None);
        let later = begun + 60 * second;
        assert_eq!(pace.due(STATUS_PACE, false, later), later + STATUS_PACE);
    }

    fn member(state: &str, stuck: bool, metadata: Value, status: Value) -> Member {
        let object: AzureMachinePoolMachine =
            serde_json::from_value(json!({ "metadata": metadata, "spec": { "providerID": "p" }, "status": status }))
                .unwrap();
        let instance = Seen {
            id: "1".into(),
            state: state.into(),
            ..Seen::default()
        };
        Member {
            name: "m".into(),
            instance: Some(instance),
            object: Some(std::sync::Arc::new(object)),
            owner: None,
            node: NodeState::Missing,
            blocked: stuck.then(|| "a pod".to_owned()),
            stuck,
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
        let said = words(&member(state, stuck, metadata, Value::Null), rolling, now);
        assert_eq!(said == Words::Now, told, "{said:?}");
    }
}
