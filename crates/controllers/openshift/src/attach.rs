//! A metric of Ultra disks that could not be attached for a pod, so that an alert can name the machine whose pod waits.
//! Invariant: it is read from Events alone; nothing is written.

use capstan_kube::{Cache, Context};
use k8s_openapi::api::core::v1::Event;
use kube::Api;
use kube::runtime::watcher;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;

/// The reason that the attach/detach controller gives.
const REASON: &str = "FailedAttachVolume";
const METRIC: &str = "capstan_ultra_attach_failed_timestamp_seconds";

/// A pod that waits for an Ultra disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Waiting {
    /// The machine that the disk could not be attached to.
    name: String,
    pod: String,
    pod_namespace: String,
}

/// Exports the Events of all namespaces; they leave the metric when the API server drops them.
pub fn export(ctx: &Context) {
    let config = watcher::Config::default().fields(&format!("reason={REASON}"));
    let events = Cache::start(Api::all(ctx.client.clone()), config, trim, ctx.shutdown.clone());
    ctx.metrics
        .register(|registry| registry.register_collector(Box::new(Failures(events))));
}

fn trim(event: &mut Event) {
    capstan_kube::cache::trim(event);
    if waiting(event).is_none() {
        event.message = None;
    }
}

/// Returns the pod and the machine of a failed Ultra attach; nothing for other failures.
fn waiting(event: &Event) -> Option<Waiting> {
    let message = event.message.as_deref()?;
    if event.reason.as_deref() != Some(REASON) || !message.contains("UltraSSD") {
        return None;
    }
    let pod = &event.involved_object;
    Some(Waiting {
        name: instance(message).unwrap_or_default().to_owned(),
        pod: pod.name.clone().unwrap_or_default(),
        pod_namespace: pod.namespace.clone().unwrap_or_default(),
    })
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

struct Failures(Cache<Event>);

impl std::fmt::Debug for Failures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Failures")
    }
}

impl Collector for Failures {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let mut latest = std::collections::BTreeMap::new();
        for event in self.0.select(None, |event| waiting(event).is_some()) {
            if let Some(Waiting {
                name,
                pod,
                pod_namespace,
            }) = waiting(&event)
            {
                let seen = latest.entry((name, pod, pod_namespace)).or_insert(0);
                *seen = last_seen(&event).max(*seen);
            }
        }
        let kind = ConstGauge::new(0i64).metric_type();
        let help = "When an Ultra disk could last not be attached to a machine for a pod";
        let mut family = encoder.encode_descriptor(METRIC, help, None, kind)?;
        for ((name, pod, pod_namespace), seen) in latest {
            ConstGauge::new(seen).encode(family.encode_family(&Waiting {
                name,
                pod,
                pod_namespace,
            })?)?;
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

    #[rstest::rstest]
    #[case(REFUSED)]
    #[case(UNQUOTED)]
    #[case(BATCHED)]
    fn a_refused_ultra_attach_names_machine_and_pod(#[case] message: &str) {
        let found = waiting(&event(REASON, message)).unwrap();
        assert_eq!(
            found,
            Waiting {
                name: "worker-x".into(),
                pod: "db-0".into(),
                pod_namespace: "shop".into()
            }
        );
    }

    #[test]
    fn other_events_are_passed_over() {
        assert_eq!(waiting(&event(REASON, "Multi-Attach error for volume \"pvc-1\"")), None);
        assert_eq!(waiting(&event("FailedMount", REFUSED)), None);
    }
}
