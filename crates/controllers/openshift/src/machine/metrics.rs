//! Metrics of machines, under the names that dashboards and alerts already use.

use super::spec::provider_spec;
use super::status;
use capstan_api::openshift::Machine;
use capstan_core::Clock;
use capstan_core::disks::azure::ultra_enabled;
use capstan_kube::Cache;
use kube::ResourceExt as _;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use std::sync::Arc;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Failure {
    name: String,
    namespace: Option<String>,
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MachineLabels {
    name: String,
    namespace: Option<String>,
    spec_provider_id: String,
    node: String,
    api_version: &'static str,
    phase: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CapabilityLabels {
    name: String,
    namespace: Option<String>,
    node: String,
}

#[derive(Clone)]
pub struct Metrics {
    clock: Clock,
    // They only ever rise, but a counter's name would get an ending that dashboards do not know.
    create_failed: Family<Failure, Gauge>,
    update_failed: Family<Failure, Gauge>,
    delete_failed: Family<Failure, Gauge>,
    transitions: Family<Phase, Histogram>,
}

impl Metrics {
    /// `has_operator`: machine-api-operator runs beside us and exports the metrics of all machines itself.
    pub fn new(shared: &capstan_kube::Metrics, machines: Cache<Machine>, clock: Clock, has_operator: bool) -> Self {
        // From a quick test to a machine that took most of an hour.
        let buckets = || {
            Histogram::new([
                5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 600.0, 1200.0,
            ])
        };
        let metrics = Self {
            clock,
            create_failed: Family::default(),
            update_failed: Family::default(),
            delete_failed: Family::default(),
            transitions: Family::new_with_constructor(buckets),
        };
        shared.register(|registry| {
            let failures = [
                (
                    "mapi_instance_create_failed",
                    "Failed attempts to create",
                    &metrics.create_failed,
                ),
                (
                    "mapi_instance_update_failed",
                    "Failed attempts to update",
                    &metrics.update_failed,
                ),
                (
                    "mapi_instance_delete_failed",
                    "Failed attempts to delete",
                    &metrics.delete_failed,
                ),
            ];
            for (name, help, family) in failures {
                registry.register(name, help, family.clone());
            }
            let help = "Seconds from a machine's creation to each of its phases";
            registry.register(
                "mapi_machine_phase_transition_seconds",
                help,
                metrics.transitions.clone(),
            );
            registry.register_collector(Box::new(Machines { machines, has_operator }));
        });
        metrics
    }

    /// Notes a failure under its event's name.
    pub fn failed(&self, event: &str, machine: &Machine, reason: &str) {
        let family = match event {
            "FailedCreate" => &self.create_failed,
            "FailedDelete" => &self.delete_failed,
            _ => &self.update_failed,
        };
        let labels = Failure {
            name: machine.name_any(),
            namespace: machine.namespace(),
            reason: reason.to_owned(),
        };
        family.get_or_create(&labels).inc();
    }

    /// Notes that a machine has come to another phase.
    pub fn phase(&self, before: &Machine, machine: &Machine) {
        let phase = status::of(machine).phase.unwrap_or_default();
        if status::of(before).phase.unwrap_or_default() == phase {
            return;
        }
        let since = if phase == capstan_core::machine::phase::DELETING {
            machine.metadata.deletion_timestamp.as_ref()
        } else {
            machine.metadata.creation_timestamp.as_ref()
        };
        if let Some(since) = since {
            let seconds = self.clock.now().duration_since(since.0).as_secs_f64().max(0.0);
            self.transitions.get_or_create(&Phase { phase }).observe(seconds);
        }
    }
}

/// All machines, read from the cache for each scrape.
struct Machines {
    machines: Cache<Machine>,
    has_operator: bool,
}

impl std::fmt::Debug for Machines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Machines")
    }
}

impl Collector for Machines {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let machines = self.machines.select(None, |_| true);
        if !self.has_operator {
            // Else every alert on them would fire twice.
            encode_all(&machines, &mut encoder)?;
        }
        let name = "capstan_machine_ultra_ssd_capability";
        let help = "Whether a machine takes Ultra disks (1) or not (0)";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for machine in &machines {
            let enabled = provider_spec(machine).is_ok_and(|spec| ultra_enabled(&spec) == Some(true));
            let MachineLabels {
                name, namespace, node, ..
            } = labels(machine);
            let labels = CapabilityLabels { name, namespace, node };
            ConstGauge::new(i64::from(enabled)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Encodes the metrics that machine-api-operator exports where it runs.
fn encode_all(machines: &[Arc<Machine>], encoder: &mut DescriptorEncoder) -> Result<(), std::fmt::Error> {
    let items = ConstGauge::new(i64::try_from(machines.len()).unwrap_or(i64::MAX));
    let kind = items.metric_type();
    items.encode(encoder.encode_descriptor("mapi_machine_items", "Machines that there are", None, kind)?)?;
    let name = "mapi_machine_created_timestamp_seconds";
    let mut family = encoder.encode_descriptor(name, "When a machine was created", None, kind)?;
    for machine in machines {
        let created = machine
            .metadata
            .creation_timestamp
            .as_ref()
            .map_or(0, |time| time.0.as_second());
        ConstGauge::new(created).encode(family.encode_family(&labels(machine))?)?;
    }
    Ok(())
}

fn labels(machine: &Machine) -> MachineLabels {
    let status = status::of(machine);
    MachineLabels {
        name: machine.name_any(),
        namespace: machine.namespace(),
        spec_provider_id: machine.spec.provider_id.clone().unwrap_or_default(),
        node: status.node_ref.and_then(|node| node.name).unwrap_or_default(),
        api_version: Machine::API_VERSION,
        phase: status.phase.unwrap_or_default(),
    }
}
