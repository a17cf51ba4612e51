//! Reads what the Secret of a pool is made of, and the Secret.

use capstan_api::azure::{AzureCluster, AzureClusterIdentity, AzureMachinePool, VmIdentity};
use capstan_azure::identities::is_identity;
use capstan_azure::{Cloud, ResourceId};
use capstan_core::cluster::azure_json::{self, Input, NodeIdentity};
use capstan_core::cluster::secrets::NamedSecret;
use capstan_kube::runtime::Scope;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;

use super::{Observed, Of, State};
use crate::Controller;
use crate::error::Error;
use crate::identity;
use crate::pool::CREDENTIAL_AGE;
use crate::pool::owners::{self, Found, Owners};

/// Returns what the plan depends on; `None` for a pool that gets no Secret now: it is deleted or paused, or lacks its cluster.
pub async fn observe(
    controller: &Controller,
    scope: &Scope<AzureMachinePool>,
    state: &mut State,
) -> Result<Option<Observed>, Error> {
    let Found::All(owners) = owners::find(controller, &scope.object) else {
        return Ok(None);
    };
    if scope.is_deleting() {
        return Ok(None);
    }
    let cluster = &owners.azure_cluster.metadata;
    let of = Of {
        pool: scope.object.metadata.generation,
        cluster: (cluster.uid.clone(), cluster.generation),
    };
    let is_settled = state
        .settled
        .as_ref()
        .is_some_and(|(at, settled)| *settled == of && scope.context.clock.since(*at) < CREDENTIAL_AGE);
    if is_settled && !scope.live {
        return Ok(Some(Observed::Settled));
    }
    state.settled = None;
    let identity = node_identity(controller, &scope.object, &owners).await?;
    let has_credential =
        matches!(&identity.node, NodeIdentity::OfCluster { secret, .. } if !secret.reveal().is_empty());
    let wanted = wanted(controller, &scope.object, &owners, &identity)?;
    let found = scope.api_of::<Secret>().get_opt(wanted.name()).await?;
    let secret = azure_json::Observed {
        cluster_name: owners.cluster.name_any(),
        wanted,
        found: found.map(NamedSecret::new),
    };
    if azure_json::plan(&secret).steps.is_empty() {
        state.settled = Some((scope.instant(), of));
    }
    Ok(Some(Observed::Secret { secret, has_credential }))
}

/// How nodes sign in, and in which tenant.
struct Identity {
    tenant: String,
    node: NodeIdentity,
}

fn wanted(
    controller: &Controller,
    pool: &AzureMachinePool,
    owners: &Owners,
    identity: &Identity,
) -> Result<NamedSecret, Error> {
    let cluster = &owners.azure_cluster;
    let cloud = match cluster.spec.azure_environment.as_deref().unwrap_or_default() {
        "" => controller.azure.of(cluster)?.cloud().name.clone(),
        named => Cloud::named(named).map_or_else(|_| named.to_owned(), |cloud| cloud.name),
    };
    let input = Input {
        pool,
        cluster,
        cluster_name: &owners.cluster.name_any(),
        group: &owners.set.group,
        subscription: &controller.options.sign_in.subscription(cluster)?,
        tenant: &identity.tenant,
        cloud: &cloud,
        identity: &identity.node,
    };
    azure_json::secret(&input)
        .map_err(|error| Error::Invalid(format!("cannot write the settings of the nodes: {error}")))
}

async fn node_identity(controller: &Controller, pool: &AzureMachinePool, owners: &Owners) -> Result<Identity, Error> {
    let (client, cluster) = (&controller.context.client, &owners.azure_cluster);
    let found = identity::identity(client, cluster).await?.ok_or_else(|| {
        Error::Invalid(format!(
            "AzureCluster {}: spec.identityRef: Required value: Secret {}-azure-json names the tenant of an AzureClusterIdentity",
            cluster.name_any(),
            pool.name_any()
        ))
    })?;
    let node = match &pool.spec.identity {
        Some(VmIdentity::SystemAssigned) => NodeIdentity::SystemAssigned,
        Some(VmIdentity::UserAssigned) => NodeIdentity::UserAssigned {
            client_id: user_assigned(controller, pool, cluster).await?,
        },
        _ => NodeIdentity::OfCluster {
            client_id: found.spec.client_id.clone(),
            secret: client_secret(controller, pool, &found).await?,
        },
    };
    Ok(Identity {
        tenant: found.spec.tenant_id,
        node,
    })
}

/// Returns the client secret of the cluster's identity, if the namespace of the pool has it; nothing for an identity without one.
async fn client_secret(
    controller: &Controller,
    pool: &AzureMachinePool,
    found: &AzureClusterIdentity,
) -> Result<capstan_azure::Secret, Error> {
    let Some((home, secret)) = identity::client_secret(found)? else {
        return Ok(capstan_azure::Secret::default());
    };
    if pool.namespace().as_ref() != Some(&home) {
        return Err(Error::Invalid(format!(
            "AzureMachinePool {0}: spec.identity: Invalid value: \"None\": Secret {0}-azure-json would hold the client secret of Secret \
             {home}/{secret}, which is in another namespace: set SystemAssigned or UserAssigned, or create Secret {0}-azure-json",
            pool.name_any()
        )));
    }
    identity::read_client_secret(&controller.context.client, found).await
}

/// Returns the client id of the first user-assigned identity of a pool, as Azure has it.
async fn user_assigned(
    controller: &Controller,
    pool: &AzureMachinePool,
    cluster: &AzureCluster,
) -> Result<String, Error> {
    let written = pool.spec.user_assigned_identities.first();
    let written = written
        .map(|identity| identity.provider_id.as_str())
        .unwrap_or_default();
    let id = written.parse::<ResourceId>().ok().filter(is_identity).ok_or_else(|| {
        Error::Invalid(format!(
            "AzureMachinePool {}: spec.userAssignedIdentities[0].providerID: Invalid value: {written:?}: name an identity, as \
             azure:///subscriptions/…/resourceGroups/…/providers/Microsoft.ManagedIdentity/userAssignedIdentities/…",
            pool.name_any()
        ))
    })?;
    let credential = controller
        .options
        .sign_in
        .credential(&controller.context.client, cluster)
        .await?;
    let client = controller.azure.of(cluster)?.client(&credential, &id.subscription);
    let found = client.get_user_assigned_identity(&id.group, id.name()).await?;
    let client_id = found.map(|identity| identity.properties.client_id).unwrap_or_default();
    match client_id.is_empty() {
        true => Err(Error::NotReady(format!("user-assigned identity {id} does not exist"))),
        false => Ok(client_id),
    }
}
