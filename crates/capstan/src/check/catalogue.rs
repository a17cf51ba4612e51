//! What only Azure knows about a manifest: whether its VM size exists where it is wanted and can do what is asked of it.
//! Invariant: the words are the controllers' own, for they are asked.

use anyhow::{Context, Result};
use capstan_api::azure::AzureMachinePool;
use capstan_api::capi::MachinePool;
use capstan_api::openshift::{AzureMachineProviderSpec, Machine, MachineSet};
use capstan_azure::{Client, Clients, Credential, Settings};
use capstan_azure_pools::model;
use capstan_core::validate::openshift::is_azure;
use capstan_openshift::sizes;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::filled_spec;
use crate::manifest::Object;

/// A subscription's catalogue.
pub struct Catalogue(Client);

/// What the catalogue says of one object.
#[derive(Default)]
pub struct Verdict {
    pub refusals: Vec<String>,
    pub warnings: Vec<String>,
}

/// Signs in by the variables that Azure's own SDKs read. `who` needs them.
pub fn client(who: &str) -> Result<Client> {
    let var = |name: &str| std::env::var(name).ok();
    let subscription = var("AZURE_SUBSCRIPTION_ID").filter(|id| !id.is_empty());
    let subscription = subscription.with_context(|| {
        format!(
            "{who} needs AZURE_SUBSCRIPTION_ID, and AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET or one of \
             the SDKs' other ways to sign in"
        )
    })?;
    let clients = Clients::new(Settings::from_env()?)?;
    Ok(clients.client(&Credential::from_vars(var)?, &subscription))
}

impl Catalogue {
    pub fn from_env() -> Result<Self> {
        Ok(Self(client("--azure")?))
    }

    /// `all`: everything that was given, for a pool's zones stand in its MachinePool.
    pub async fn ask(&self, object: &Object, all: &[Object]) -> Result<Verdict> {
        match object.kind() {
            Machine::KIND if object.group() == Machine::GROUP => {
                let machine: Machine = object.typed()?;
                self.raw(&machine.metadata, machine.spec.provider_spec.value).await
            }
            MachineSet::KIND if object.group() == Machine::GROUP => {
                let set: MachineSet = object.typed()?;
                self.raw(&set.metadata, set.spec.template.spec.provider_spec.value)
                    .await
            }
            AzureMachinePool::KIND => self.pool(object, all).await,
            _ => Ok(Verdict::default()),
        }
    }

    /// Asks about a provider spec. Azure knows nothing of the machines of other platforms.
    async fn raw(&self, metadata: &ObjectMeta, value: Option<Value>) -> Result<Verdict> {
        if !value.as_ref().is_none_or(is_azure) {
            return Ok(Verdict::default());
        }
        self.spec(&filled_spec(metadata, value)?).await
    }

    async fn spec(&self, spec: &AzureMachineProviderSpec) -> Result<Verdict> {
        let Some(location) = spec.location.as_deref().filter(|location| !location.is_empty()) else {
            let text =
                "providerSpec.location is empty: the credentials secret names the location, so the size is not checked";
            return Ok(Verdict {
                warnings: vec![text.to_owned()],
                ..Verdict::default()
            });
        };
        let verdict = sizes::look_up(&self.0.at(location), spec, location).await?;
        Ok(Verdict {
            refusals: verdict.refusals,
            ..Verdict::default()
        })
    }

    async fn pool(&self, object: &Object, all: &[Object]) -> Result<Verdict> {
        let pool: AzureMachinePool = object.typed()?;
        let owner = |other: &&Object| {
            let reference = other.value.pointer("/spec/template/spec/infrastructureRef/name");
            other.kind() == MachinePool::KIND
                && other.namespace() == object.namespace()
                && reference.and_then(|name| name.as_str()) == Some(object.name())
        };
        let owner = all.iter().find(owner).map(Object::typed::<MachinePool>).transpose()?;
        let zones = owner.as_ref().map(model::zones).unwrap_or_default();
        let (location, wanted) = (&pool.spec.location, &pool.spec.template.vm_size);
        let size = self.0.at(location).size(location, wanted).await?;
        let refusal = match &size {
            Some(size) => model::size_refusal(&pool.spec, &zones, size),
            None => Some(format!(
                "vm size {wanted} is not available in location {location}. select a different vm size"
            )),
        };
        Ok(Verdict {
            refusals: refusal.into_iter().collect(),
            ..Verdict::default()
        })
    }
}
