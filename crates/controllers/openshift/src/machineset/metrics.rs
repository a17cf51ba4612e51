//! Metrics of MachineSets, under the names that dashboards already use.

use capstan_api::openshift::MachineSet;
use capstan_kube::Cache;
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    name: String,
    namespace: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CreatedLabels {
    name: String,
    namespace: Option<String>,
    api_version: &'static str,
}

/// All MachineSets, read from the cache for each scrape.
pub struct Sets(pub Cache<MachineSet>);

impl std::fmt::Debug for Sets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sets")
    }
}

type Count = fn(&MachineSet) -> i32;

const COUNTS: [(&str, &str, Count); 3] = [
    ("mapi_machine_set_status_replicas", "Machines of a set", |set| {
        status(set, |status| Some(status.replicas))
    }),
    (
        "mapi_machine_set_status_replicas_ready",
        "Machines of a set whose node is ready",
        |set| status(set, |status| status.ready_replicas),
    ),
    (
        "mapi_machine_set_status_replicas_available",
        "Machines of a set that are available",
        |set| status(set, |status| status.available_replicas),
    ),
];

fn status(set: &MachineSet, count: fn(&capstan_api::openshift::MachineSetStatus) -> Option<i32>) -> i32 {
    set.status.as_ref().and_then(count).unwrap_or_default()
}

impl Collector for Sets {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let sets = self.0.select(None, |_| true);
        let items = ConstGauge::new(i64::try_from(sets.len()).unwrap_or(i64::MAX));
        let kind = items.metric_type();
        items.encode(encoder.encode_descriptor(
            "mapi_machineset_items",
            "Machine sets that there are",
            None,
            kind,
        )?)?;
        let name = "mapi_machineset_created_timestamp_seconds";
        let mut family = encoder.encode_descriptor(name, "When a set was created", None, kind)?;
        for set in &sets {
            let created = set.creation_timestamp().map_or(0, |time| time.0.as_second());
            let Labels { name, namespace } = labels(set);
            let labels = CreatedLabels {
                name,
                namespace,
                api_version: MachineSet::API_VERSION,
            };
            ConstGauge::new(created).encode(family.encode_family(&labels)?)?;
        }
        for (name, help, count) in COUNTS {
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for set in &sets {
                ConstGauge::new(i64::from(count(set))).encode(family.encode_family(&labels(set))?)?;
            }
        }
        Ok(())
    }
}

fn labels(set: &MachineSet) -> Labels {
    Labels {
        name: set.name_any(),
        namespace: set.namespace(),
    }
}
