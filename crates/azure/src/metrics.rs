//! The client's figures for Prometheus: calls by policy and outcome, the budget's state, sign-ins.
//!
//! Invariant: the number of series is bounded. Users write subscriptions and locations, so only those that Azure has
//! answered for become labels, and only so many of them; the rest is counted as `other`.

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Distinct subscriptions among the labels.
const MOST_SUBSCRIPTIONS: usize = 32;

/// Distinct locations among the labels: Azure has about as many.
const MOST_LOCATIONS: usize = 64;

/// The label of all others.
const OTHER: &str = "other";

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

#[derive(Debug, Default)]
struct Admitted {
    subscriptions: BTreeSet<String>,
    locations: BTreeSet<String>,
}

/// Cheap to clone; all clones count into the same place.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    admitted: Arc<Mutex<Admitted>>,
    pub calls: Family<CallLabels, Counter>,
    pub held: Family<BucketLabels, Counter>,
    pub throttled: Family<BucketLabels, Counter>,
    pub tokens: Family<BucketLabels, Gauge>,
    pub waiting: Gauge,
    pub sign_ins: Counter,
}

impl Metrics {
    /// Azure has answered for this subscription and location: they may become labels.
    pub(crate) fn admit(&self, subscription: &str, location: &str) {
        let mut admitted = self.admitted.lock();
        let Admitted {
            subscriptions,
            locations,
        } = &mut *admitted;
        for (all, value, most) in [
            (subscriptions, subscription, MOST_SUBSCRIPTIONS),
            (locations, location, MOST_LOCATIONS),
        ] {
            if all.len() < most && !all.contains(value) {
                all.insert(value.to_owned());
            }
        }
    }

    pub(crate) fn labels(&self, subscription: &str, location: &str, policy: &'static str) -> BucketLabels {
        let admitted = self.admitted.lock();
        let label = |all: &BTreeSet<String>, value: &str| {
            let known = all.contains(value);
            if known { value.to_owned() } else { OTHER.to_owned() }
        };
        BucketLabels {
            subscription: label(&admitted.subscriptions, subscription),
            location: label(&admitted.locations, location),
            policy,
        }
    }

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
        azure.register(
            "sign_ins",
            "Requests for tokens to the authority",
            self.sign_ins.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answered_subscriptions_become_labels_and_only_so_many() {
        let metrics = Metrics::default();
        let label = |subscription: &str| metrics.labels(subscription, "eastus", "p");
        assert_eq!(label("written-by-a-user").subscription, OTHER);
        for n in 0..MOST_SUBSCRIPTIONS * 2 {
            metrics.admit(&format!("s{n}"), &format!("l{n}"));
        }
        assert_eq!(label("s0").subscription, "s0");
        let last = format!("s{}", MOST_SUBSCRIPTIONS * 2 - 1);
        assert_eq!(label(&last).subscription, OTHER);
        assert_eq!(metrics.labels("s0", "l999", "p").location, OTHER);
    }
}
