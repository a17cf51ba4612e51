//! Carries out the steps for the Secret of a pool.

use capstan_api::azure::AzureMachinePool;
use capstan_core::cluster::azure_json::Step;
use capstan_kube::runtime::{Outcome, Scope};
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;

use crate::error::Error;

pub async fn apply(step: Step, scope: &mut Scope<AzureMachinePool>) -> Result<Outcome, Error> {
    let api = scope.api_of::<Secret>();
    let written = match &step {
        Step::Create(secret) => api.create(&PostParams::default(), &secret.0).await,
        Step::Replace(secret) => api.replace(secret.name(), &PostParams::default(), &secret.0).await,
    };
    match written.map_err(capstan_kube::Error::from) {
        Ok(_) => Ok(Outcome::Done),
        // Another client has created or changed it since it was read.
        Err(error) if error.is_conflict() => Ok(Outcome::Observe),
        Err(error) => Err(error.into()),
    }
}
