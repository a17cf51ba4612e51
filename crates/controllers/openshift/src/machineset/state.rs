//! The state of a MachineSet between reconciles: what a machine of it offers, looked up in Azure's catalogue of sizes.

use std::time::Instant;

use capstan_api::openshift::MachineSet;
use capstan_core::machineset::capacity::Capacity;
use capstan_kube::runtime::Scope;

use super::Controller;
use crate::machine::spec;
use crate::sizes;

/// What is known of a set's machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    Known(Capacity),
    /// Azure does not have this size in the region.
    UnknownSize(String),
    Failed,
}

/// The last lookup for one set.
#[derive(Debug, Default)]
pub struct State(Option<(i64, Instant, Lookup)>);

impl Controller {
    /// Returns what a machine of the set offers. Whatever fails here keeps no machine from being made.
    pub(super) async fn capacity(&self, scope: &Scope<MachineSet>, state: &mut State) -> Lookup {
        let generation = scope.object.metadata.generation.unwrap_or_default();
        let now = scope.instant();
        if let Some((of, at, known)) = &state.0 {
            // An account gets its rights, a catalogue its sizes.
            let is_young = now.saturating_duration_since(*at) < scope.context.resync;
            let fresh = matches!(known, Lookup::Known(_)) || is_young;
            if *of == generation && fresh {
                return known.clone();
            }
        }
        let found = self.look_up(scope).await;
        state.0 = Some((generation, now, found.clone()));
        found
    }

    async fn look_up(&self, scope: &Scope<MachineSet>) -> Lookup {
        let Some(spec) = spec::of_template(&scope.object) else {
            return Lookup::Failed;
        };
        let secret = spec.credentials_secret.as_ref();
        let account = match self.accounts.get(secret, &scope.key.namespace).await {
            Ok(account) => account,
            Err(error) => {
                tracing::info!(%error, "cannot read the capacity of the set's machines for the autoscaler");
                return Lookup::Failed;
            }
        };
        let location = spec.location.filter(|location| !location.is_empty());
        let region = sizes::region(&location.unwrap_or_else(|| account.place.location.clone()));
        let wanted = spec.vm_size.unwrap_or_default();
        match account.client.size(&region, &wanted).await {
            Ok(Some(size)) => match (size.v_cpus, size.memory_mib) {
                (Some(v_cpus), Some(memory_mib)) => Lookup::Known(Capacity {
                    v_cpus,
                    memory_mib,
                    gpus: size.gpus.unwrap_or_default(),
                    architecture: size.architecture,
                }),
                _ => Lookup::UnknownSize(wanted),
            },
            Ok(None) => Lookup::UnknownSize(wanted),
            Err(error) => {
                tracing::info!(%error, "cannot read the capacity of the set's machines for the autoscaler");
                Lookup::Failed
            }
        }
    }
}
