//! Metrics of pools: how many machines they should have, and how many are ready.

use std::fmt;

use capstan_api::azure::AzureMachinePool;
use capstan_kube::{Cache, capi};
use kube::ResourceExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::gauge::ConstGauge;

/// Not `namespace`: Prometheus has that label for the pod that it scrapes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    pool: String,
    pool_namespace: String,
}

/// All pools, read from the caches for each scrape.
pub struct Pools {
    pub machine_pools: Cache<capi::MachinePool>,
    pub pools: Cache<AzureMachinePool>,
}

impl fmt::Debug for Pools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pools")
    }
}

impl Pools {
    /// Returns desired and ready machines of the pools that are not deleted.
    fn counts(&self) -> Vec<(Labels, i64, i64)> {
        let owners = self
            .machine_pools
            .select(None, |pool| pool.metadata.deletion_timestamp.is_none());
        let counts = owners.iter().flat_map(|owner| {
            crate::infrastructure(owner).into_iter().filter_map(|reference| {
                let pool = self.pools.get(reference.namespace.as_deref(), &reference.name)?;
                let labels = Labels {
                    pool: pool.name_any(),
                    pool_namespace: pool.namespace()?,
                };
                let ready = pool.status.as_ref().map_or(0, |status| status.replicas);
                Some((labels, i64::from(owner.spec.replicas.unwrap_or(1)), i64::from(ready)))
            })
        });
        counts.collect()
    }
}

impl Collector for Pools {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let counts = self.counts();
        let kind = ConstGauge::new(0_i64).metric_type();
        let mut family = encoder.encode_descriptor(
            "capstan_pool_replicas_desired",
            "Machines that a pool should have",
            None,
            kind,
        )?;
        for (labels, desired, _) in &counts {
            ConstGauge::new(*desired).encode(family.encode_family(labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "capstan_pool_replicas_ready",
            "Machines of a pool that are ready",
            None,
            kind,
        )?;
        for (labels, _, ready) in &counts {
            ConstGauge::new(*ready).encode(family.encode_family(labels)?)?;
        }
        Ok(())
    }
}
