//! One registry for the whole program. Invariant: cloning shares it; nothing is registered twice under one name. A
//! controller that may be started again registers in a section, which ends with it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    code: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReconcileLabels {
    controller: String,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ControllerLabels {
    controller: String,
}

/// A pod that blocks the drain of its node.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BlockedLabels {
    pub node: String,
    pub namespace: String,
    pub pod: String,
    pub reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvictionLabels {
    result: &'static str,
}

/// The shared registry and the metrics that every controller has.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    sections: Arc<Mutex<Vec<Weak<Mutex<Registry>>>>>,
    requests: Family<RequestLabels, Counter>,
    reconciles: Family<ReconcileLabels, Counter>,
    durations: Family<ControllerLabels, Histogram>,
    evictions: Family<EvictionLabels, Counter>,
    blocked: Family<BlockedLabels, Gauge>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        // From a reconcile without effect to one that waits for a cloud: 1 ms to about a minute.
        let buckets = || Histogram::new([0.001, 0.004, 0.016, 0.064, 0.25, 1.0, 4.0, 16.0, 64.0]);
        let metrics = Self {
            registry: Arc::default(),
            sections: Arc::default(),
            requests: Family::default(),
            reconciles: Family::default(),
            durations: Family::new_with_constructor(buckets),
            evictions: Family::default(),
            blocked: Family::default(),
        };
        metrics.register(|registry| metrics.add_to(registry));
        metrics
    }
}

impl Metrics {
    fn add_to(&self, registry: &mut Registry) {
        let requests = self.requests.clone();
        registry.register(
            "capstan_kube_requests",
            "Requests sent to Kubernetes API servers",
            requests,
        );
        registry.register("capstan_reconciles", "Reconciles by outcome", self.reconciles.clone());
        let durations = self.durations.clone();
        registry.register(
            "capstan_reconcile_duration_seconds",
            "Duration of a reconcile",
            durations,
        );
        registry.register(
            "capstan_drain_evictions",
            "Evictions requested, by answer",
            self.evictions.clone(),
        );
        let blocked = self.blocked.clone();
        registry.register(
            "capstan_drain_pod_in_the_way",
            "Pods that keep a node from being drained",
            blocked,
        );
    }

    /// Adds metrics to the shared registry.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.lock())
    }

    /// Returns metrics of which everything that is registered ends with the last clone.
    pub fn section(&self) -> Self {
        let section = Self {
            registry: Arc::default(),
            ..self.clone()
        };
        self.sections.lock().push(Arc::downgrade(&section.registry));
        section
    }

    /// Returns the registry in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut sections = self.sections.lock();
        sections.retain(|section| section.strong_count() > 0);
        let registries = sections.iter().filter_map(Weak::upgrade);
        let mut text = String::new();
        let mut encoded = Ok(());
        for registry in std::iter::once(self.registry.clone()).chain(registries) {
            encoded = encoded.and_then(|()| text::encode_registry(&mut text, &registry.lock()));
        }
        match encoded.and_then(|()| text::encode_eof(&mut text)) {
            Ok(()) => text,
            Err(error) => format!("# encoding failed: {error}\n"),
        }
    }

    /// Counts one answered (or, with code 0, unanswered) request.
    pub fn kube_request(&self, verb: &'static str, code: u16) {
        let code = if code == 0 { "none".to_owned() } else { code.to_string() };
        self.requests.get_or_create(&RequestLabels { verb, code }).inc();
    }

    /// Returns the number of requests with this verb, whatever the answer.
    pub fn kube_requests(&self, verb: &str) -> u64 {
        let text = self.encode();
        let prefix = format!("capstan_kube_requests_total{{verb=\"{verb}\"");
        text.lines()
            .filter(|l| l.starts_with(&prefix))
            .filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    pub fn reconciled(&self, controller: &str, result: &'static str, took: Duration) {
        let controller = controller.to_owned();
        self.reconciles
            .get_or_create(&ReconcileLabels {
                controller: controller.clone(),
                result,
            })
            .inc();
        self.durations
            .get_or_create(&ControllerLabels { controller })
            .observe(took.as_secs_f64());
    }

    pub fn evicted(&self, result: &'static str) {
        self.evictions.get_or_create(&EvictionLabels { result }).inc();
    }

    /// Replaces the pods that block one node's drain.
    pub fn blocked_pods(&self, before: &[BlockedLabels], now: &[BlockedLabels]) {
        for labels in before.iter().filter(|labels| !now.contains(labels)) {
            self.blocked.remove(labels);
        }
        for labels in now {
            self.blocked.get_or_create(labels).set(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_ends_with_the_controller_that_registered_in_it() {
        let metrics = Metrics::default();
        for _ in 0..2 {
            let section = metrics.section();
            section.register(|registry| registry.register("machines", "Machines", Gauge::<i64>::default()));
            section.kube_request("get", 200);
            assert_eq!(metrics.encode().matches("machines 0").count(), 1);
        }
        assert!(!metrics.encode().contains("machines"));
        assert_eq!(metrics.kube_requests("get"), 2);
    }

    #[test]
    fn requests_are_counted_by_verb_and_code() {
        let metrics = Metrics::default();
        metrics.kube_request("patch", 200);
        metrics.kube_request("patch", 409);
        metrics.kube_request("get", 200);
        assert_eq!(metrics.kube_requests("patch"), 2);
        assert!(
            metrics
                .encode()
                .contains(r#"capstan_kube_requests_total{verb="get",code="200"} 1"#)
        );
    }
}
