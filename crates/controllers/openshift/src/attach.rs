//! A metric of Ultra disks that could not be attached for a pod, so that an alert can name the machine whose pod waits.
//! Invariant: it is read from Events alone; nothing is written.

use capstan_api::openshift::Machine;
use capstan_kube::cache::Change;
use capstan_kube::{Cache, Context};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::watcher;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The reason that the attach/detach controller gives.
const REASON: &str = "FailedAttachVolume";
const METRIC: &str = "capstan_ultra_attach_failed_timestamp_seconds";

/// A pod that waits for an Ultra disk, or for another one that takes no caching.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct Waiting {
    /// The machine that the disk could not be attached to.
    name: String,
    pod: String,
    pod_namespace: String,
    cause: &'static str,
}

/// The Nodes of pods that wait, by the uid of the Event about the pod.
type Nodes = Arc<Mutex<HashMap<String, String>>>;

/// Exports the Events of all namespaces until the context's shutdown; they leave the metric when the API server drops them.
pub async fn run(ctx: &Context) {
    let config = watcher::Config::default().fields(&format!("reason={REASON}"));
    let events = Cache::start(Api::all(ctx.client.clone()), config, trim, ctx.shutdown.clone());
    let (machines, nodes) = (ctx.cache::<Machine>(), Nodes::default());
    let changes = events.subscribe();
    let failures = Failures {
        events,
        machines,
        nodes: nodes.clone(),
    };
    ctx.metrics
        .register(|registry| registry.register_collector(Box::new(failures)));
    tokio::select! {
        () = changes.for_each(|change| note(&ctx.client, &nodes, change)) => {}
        () = ctx.shutdown.cancelled() => {}
    }
}

fn trim(event: &mut Event) {
    capstan_kube::cache::trim(event);
    if cause(event).is_none() {
        event.message = None;
    }
}

/// Notes the Node of the pod that an Event is about. A pod that waits for a disk has its Node for good, so it is read once; one
/// that cannot be read is read again with the next Event of its kind.
async fn note(client: &kube::Client, nodes: &Nodes, Change { object: event, gone }: Change<Event>) {
    let Some(uid) = event.uid() else { return };
    if gone {
        nodes.lock().remove(&uid);
        return;
    }
    if cause(&event).is_none() || nodes.lock().contains_key(&uid) {
        return;
    }
    match node(client, &event).await {
        Ok(Some(node)) => drop(nodes.lock().insert(uid, node)),
        Ok(None) => {}
        Err(error) => tracing::debug!(event = event.name_any(), %error, "cannot read the pod of the event"),
    }
}

/// Returns the Node of the pod that an Event is about. Drivers word the event in their own ways, and some name no machine.
async fn node(client: &kube::Client, event: &Event) -> Result<Option<String>, kube::Error> {
    let about = &event.involved_object;
    let (Some(namespace), Some(name)) = (&about.namespace, &about.name) else {
        return Ok(None);
    };
    // A list, because the drain's right to list pods is enough for it.
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let listed = api
        .list(&ListParams::default().fields(&format!("metadata.name={name}")))
        .await?;
    // A StatefulSet makes pods of the same name again.
    let is_same = |pod: &Pod| about.uid.is_none() || pod.metadata.uid == about.uid;
    let pod = listed.items.into_iter().find(is_same);
    Ok(pod.and_then(|pod| pod.spec?.node_name))
}

/// Returns why Azure refuses an Ultra disk, or another one that takes no caching; nothing for other failures.
fn cause(event: &Event) -> Option<&'static str> {
    let message = event.message.as_deref()?;
    let is = |part: &str| message.contains(part);
    if event.reason.as_deref() != Some(REASON) {
        None
    } else if is("not supported with caching type") && (is("UltraSSD") || is("PremiumV2_LRS")) {
        Some("caching")
    } else if is("ultraSSDEnabled") {
        Some("capability")
    } else {
        is("UltraSSD").then_some("other")
    }
}

/// Returns the machine that the disk could not be attached to: that of the pod's Node, else the one that the driver names.
fn machine(event: &Event, node: Option<String>, machines: &Cache<Machine>) -> String {
    let of_node = |machine: &Machine| {
        let linked = machine.status.as_ref().and_then(|status| status.node_ref.as_ref());
        node.is_some() && linked.and_then(|linked| linked.name.as_ref()) == node.as_ref()
    };
    let linked = machines.select(None, of_node).first().map(|machine| machine.name_any());
    let named = || event.message.as_deref().and_then(instance).map(str::to_owned);
    linked.or_else(named).or(node.clone()).unwrap_or_default()
}

/// Returns the instance that the driver names: `… to instance NAME failed …`. Drivers until 2022 put the name in quotes. A
/// machine's virtual machine has the machine's name.
fn instance(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("to instance ")?;
    let name = rest.split_whitespace().next()?.trim_matches('"');
    (!name.is_empty()).then_some(name)
}

fn last_seen(event: &Event) -> i64 {
    let series = event
        .series
        .as_ref()
        .and_then(|series| series.last_observed_time.as_ref())
        .map(|time| time.0);
    let once = event.event_time.as_ref().map(|time| time.0);
    let counted = event
        .last_timestamp
        .as_ref()
        .or(event.first_timestamp.as_ref())
        .map(|time| time.0);
    series.or(counted).or(once).map_or(0, |time| time.as_second())
}

struct Failures {
    events: Cache<Event>,
    machines: Cache<Machine>,
    nodes: Nodes,
}

impl std::fmt::Debug for Failures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Failures")
    }
}

impl Failures {
    /// Returns the pods that wait, and when each was last reported.
    fn latest(&self) -> BTreeMap<Waiting, i64> {
        let mut latest = BTreeMap::new();
        for event in self.events.select(None, |event| cause(event).is_some()) {
            let Some(cause) = cause(&event) else { continue };
            let node = event.uid().and_then(|uid| self.nodes.lock().get(&uid).cloned());
            let pod = &event.involved_object;
            let waiting = Waiting {
                name: machine(&event, node, &self.machines),
                pod: pod.name.clone().unwrap_or_default(),
                pod_namespace: pod.namespace.clone().unwrap_or_default(),
                cause,
            };
            let seen = latest.entry(waiting).or_insert(0);
            *seen = last_seen(&event).max(*seen);
        }
        latest
    }
}

impl Collector for Failures {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let kind = ConstGauge::new(0i64).metric_type();
        let help = "When an Ultra disk could last not be attached to a machine for a pod";
        let mut family = encoder.encode_descriptor(METRIC, help, None, kind)?;
        for (waiting, seen) in self.latest() {
            ConstGauge::new(seen).encode(family.encode_family(&waiting)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ObjectReference;

    fn event(reason: &str, message: &str) -> Event {
        Event {
            reason: Some(reason.into()),
            message: Some(message.into()),
            involved_object: ObjectReference {
                name: Some("db-0".into()),
                namespace: Some("shop".into()),
                ..Default::default()
            },
            ..Default::default()
        }
    }

    const REFUSED: &str = "AttachVolume.Attach failed for volume \"pvc-1\" : rpc error: code = Unknown desc = Attach volume \
        \"/subscriptions/s/disks/pvc-1\" to instance \"worker-x\" failed with Retriable: false, RawError: {\"error\": {\"message\": \
        \"StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.\"}}";

    /// As drivers of the last years write it.
    const UNQUOTED: &str = "AttachVolume.Attach failed for volume \"pvc-1\" : rpc error: code = Internal desc = Attach volume \
        pvc-1 to instance worker-x failed with PUT https://management.azure.com/subscriptions/s/virtualMachines/worker-x \
        RESPONSE 400: 400 Bad Request ERROR CODE: InvalidParameter {\"message\": \"StorageAccountType UltraSSD_LRS can be \
        used only when additionalCapabilities.ultraSSDEnabled is set.\"}";

    /// As the driver writes it while it batches attachments.
    const BATCHED: &str = "AttachVolume.Attach failed for volume \"pvc-1\" : rpc error: code = Unknown desc = Attach volume \
        /subscriptions/s/disks/pvc-1 to instance worker-x failed with Retriable: false, HTTPStatusCode: 400, RawError: \
        StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set.";

    const CACHED: &str = "AttachVolume.Attach failed for volume \"pvc-1\" : rpc error: code = Internal desc = Attach volume \
        pvc-1 to instance worker-x failed with Storage Account type UltraSSD_LRS is not supported with caching type ReadOnly. \
        Please use caching type None.";

    const UNNAMED: &str = "AttachVolume.Attach failed for volume \"pvc-1\" : Storage Account type PremiumV2_LRS is not \
        supported with caching type ReadOnly. Please use caching type None.";

    #[rstest::rstest]
    #[case(REFUSED, Some("capability"), Some("worker-x"))]
    #[case(UNQUOTED, Some("capability"), Some("worker-x"))]
    #[case(BATCHED, Some("capability"), Some("worker-x"))]
    #[case(CACHED, Some("caching"), Some("worker-x"))]
    #[case(UNNAMED, Some("caching"), None)]
    #[case("UltraSSD_LRS is not available in this zone", Some("other"), None)]
    #[case("Multi-Attach error for volume \"pvc-1\"", None, None)]
    fn a_refused_attach_tells_its_cause_and_often_the_machine(
        #[case] message: &str,
        #[case] expected: Option<&str>,
        #[case] named: Option<&str>,
    ) {
        assert_eq!(cause(&event(REASON, message)), expected);
        assert_eq!(instance(message), named);
        assert_eq!(cause(&event("FailedMount", message)), None);
    }
}
