//! What the client tells Prometheus: calls by policy and outcome, the budget's state, sign-ins.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CallLabels {
    pub policy: &'static str,
    pub method: String,
    /// HTTP status; 0 where no answer came.
    pub code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BucketLabels {
    pub subscription: String,
    pub location: String,
    pub policy: &'static str,
}

/// Cheap to clone; all clones count into the same place.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub calls: Family<CallLabels, Counter>,
    pub held: Family<BucketLabels, Counter>,
    pub throttled: Family<BucketLabels, Counter>,
    pub tokens: Family<BucketLabels, Gauge>,
    pub waiting: Gauge,
    pub sign_ins: Counter,
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        let azure = registry.sub_registry_with_prefix("capstan_azure");
        azure.register(
            "requests",
            "Calls to Azure Resource Manager by policy, method and status",
            self.calls.clone(),
        );
        azure.register(
            "held",
            "Calls not sent because their bucket was stopped",
            self.held.clone(),
        );
        azure.register("throttled", "Answers 429 by bucket", self.throttled.clone());
        azure.register(
            "budget_tokens",
            "Calls that a bucket still allows at once",
            self.tokens.clone(),
        );
        azure.register("budget_waiting", "Calls waiting for their turn", self.waiting.clone());
        azure.register("sign_ins", "Tokens asked from the authority", self.sign_ins.clone());
    }
}
