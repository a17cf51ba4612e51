//! Reads how clusters sign in to their clouds, as far as Capstan is stricter than its peers.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use capstan_api::azure::{AzureCluster, AzureClusterIdentity, AzureMachinePool, IdentityType};
use capstan_api::capi::CLUSTER_NAME_LABEL;
use capstan_core::adopt::{Place, Ungranted, VsphereCluster, VsphereIdentity};
use capstan_kube::grant;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use kube::core::DynamicObject;
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt};

use super::observe::{is_absent, stored};

/// The key of the CA in the Secret of an identity.
const CA: &str = "ca.crt";
/// On a VSphereClusterIdentity: the servers that Capstan may send its password to, separated by commas; `*` for every server.
const ALLOWED_SERVERS: &str = "capstan.dev/allowed-servers";
const GROUP: &str = "infrastructure.cluster.x-k8s.io";

/// Returns the VSphereClusters, in the version in which they are stored.
pub async fn vsphere(
    client: &Client,
    definitions: &[CustomResourceDefinition],
    capstan_namespace: &str,
) -> Result<Vec<VsphereCluster>> {
    let Some(resource) = stored(definitions, GROUP, "VSphereCluster", "vsphereclusters") else {
        return Ok(Vec::new());
    };
    let identities = match stored(definitions, GROUP, "VSphereClusterIdentity", "vsphereclusteridentities") {
        Some(resource) => list(Api::<DynamicObject>::all_with(client.clone(), &resource)).await?,
        None => Vec::new(),
    };
    let mut found = Vec::new();
    for cluster in list(Api::<DynamicObject>::all_with(client.clone(), &resource)).await? {
        let Some(namespace) = cluster.namespace() else {
            continue;
        };
        let name = text(&cluster, "/spec/identityRef/name");
        let identity = match text(&cluster, "/spec/identityRef/kind").as_str() {
            "" => VsphereIdentity::Unset,
            "VSphereClusterIdentity" => {
                let shared = identities.iter().find(|identity| identity.name_any() == name);
                let secret_name = shared
                    .map(|shared| text(shared, "/spec/secretName"))
                    .unwrap_or_default();
                let servers = shared.and_then(|shared| shared.annotations().get(ALLOWED_SERVERS));
                VsphereIdentity::Shared {
                    ca: has_ca(client, capstan_namespace, &secret_name).await?,
                    servers: servers.map(|servers| servers.split(',').map(|server| server.trim().to_owned()).collect()),
                    name,
                    secret_name,
                }
            }
            _ => VsphereIdentity::Secret {
                ca: has_ca(client, &namespace, &name).await?.unwrap_or_default(),
            },
        };
        found.push(VsphereCluster {
            name: cluster.name_any(),
            server: text(&cluster, "/spec/server"),
            thumbprint: !text(&cluster, "/spec/thumbprint").trim().is_empty(),
            namespace,
            identity,
        });
    }
    Ok(found)
}

fn text(object: &DynamicObject, pointer: &str) -> String {
    let value = object.data.pointer(pointer).and_then(|value| value.as_str());
    value.unwrap_or_default().to_owned()
}

/// Returns whether a Secret has a CA; `None` if there is no Secret.
async fn has_ca(client: &Client, namespace: &str, name: &str) -> Result<Option<bool>> {
    if name.is_empty() {
        return Ok(None);
    }
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let found = secrets.get_opt(name).await.context("cannot read Secrets")?;
    Ok(found.map(|secret| secret.data.is_some_and(|data| data.contains_key(CA))))
}

/// What the way of the pools depends on.
#[derive(Default)]
pub struct Azure {
    pub workload_identities: Vec<String>,
    pub without_azure_json: Vec<String>,
    pub waiting_for_azure_json: Vec<Place>,
    pub without_identity: Vec<Place>,
    pub ungranted: Vec<Ungranted>,
}

pub async fn azure(client: &Client, definitions: &[CustomResourceDefinition]) -> Result<Azure> {
    let identities: Vec<AzureClusterIdentity> = list(Api::all(client.clone())).await?;
    let clusters: Vec<AzureCluster> = list(Api::all(client.clone())).await?;
    let pools = pools(client).await?;
    let mut found = Azure::default();
    let workload = identities
        .iter()
        .filter(|identity| identity.spec.type_ == IdentityType::WorkloadIdentity);
    found.workload_identities = workload
        .filter_map(|identity| Some(format!("{}/{}", identity.namespace()?, identity.name_any())))
        .collect();
    let read = secrets_of_bootstrap(client, definitions).await?;
    for pool in &pools {
        let (Some(namespace), name) = (pool.namespace(), pool.name_any()) else {
            continue;
        };
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let json = format!("{name}-azure-json");
        let secret = secrets.get_metadata_opt(&json).await;
        if secret.context("cannot read Secrets")?.is_none() {
            if read.contains(&(namespace.clone(), json)) {
                let (namespace, name) = (namespace.clone(), name.clone());
                found.waiting_for_azure_json.push(Place { namespace, name });
            }
            found.without_azure_json.push(format!("{namespace}/{name}"));
        }
    }
    // Capstan signs in only for clusters that have pools.
    let of_pools: BTreeSet<(String, String)> = pools
        .iter()
        .filter_map(|pool| Some((pool.namespace()?, pool.labels().get(CLUSTER_NAME_LABEL)?.clone())))
        .collect();
    let mut used = BTreeSet::new();
    for cluster in clusters {
        let Some(namespace) = cluster.namespace() else {
            continue;
        };
        let owner = cluster.labels().get(CLUSTER_NAME_LABEL).cloned();
        if !of_pools.contains(&(namespace.clone(), owner.unwrap_or_else(|| cluster.name_any()))) {
            continue;
        }
        match &cluster.spec.identity_ref {
            Some(identity) => {
                let home = identity.namespace.clone().filter(|home| !home.is_empty());
                used.insert((home.unwrap_or(namespace), identity.name.clone().unwrap_or_default()));
            }
            None => found.without_identity.push(Place {
                name: cluster.name_any(),
                namespace,
            }),
        }
    }
    for (namespace, name) in used {
        let same = |identity: &&AzureClusterIdentity| {
            identity.name_any() == name && identity.namespace().as_ref() == Some(&namespace)
        };
        if let Some(identity) = identities.iter().find(same) {
            found.ungranted.extend(ungranted(client, identity).await?);
        }
    }
    Ok(found)
}

/// Returns the Secrets that KubeadmConfigs put into files of their nodes, by namespace and name.
async fn secrets_of_bootstrap(
    client: &Client,
    definitions: &[CustomResourceDefinition],
) -> Result<BTreeSet<(String, String)>> {
    let group = "bootstrap.cluster.x-k8s.io";
    let Some(resource) = stored(definitions, group, "KubeadmConfig", "kubeadmconfigs") else {
        return Ok(BTreeSet::new());
    };
    let configs = list(Api::<DynamicObject>::all_with(client.clone(), &resource)).await?;
    let read = configs.iter().flat_map(|config| {
        let files = config.data.pointer("/spec/files").and_then(|files| files.as_array());
        let names = files.into_iter().flatten();
        names.filter_map(move |file| {
            let name = file.pointer("/contentFrom/secret/name")?.as_str()?;
            Some((config.namespace()?, name.to_owned()))
        })
    });
    Ok(read.collect())
}

/// Returns the identity if its Secret is in another namespace and not granted to it.
async fn ungranted(client: &Client, identity: &AzureClusterIdentity) -> Result<Option<Ungranted>> {
    let spec = &identity.spec;
    let Some(own) = identity.namespace() else {
        return Ok(None);
    };
    let home = spec.client_secret.namespace.clone().filter(|home| !home.is_empty());
    let reads = match spec.type_ {
        IdentityType::ServicePrincipal | IdentityType::ManualServicePrincipal => true,
        IdentityType::ServicePrincipalCertificate => spec.cert_path.as_deref().unwrap_or_default().is_empty(),
        _ => false,
    };
    let Some(home) = home.filter(|home| reads && *home != own) else {
        return Ok(None);
    };
    let name = spec.client_secret.name.clone().unwrap_or_default();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), &home);
    let secret = secrets.get_opt(&name).await.context("cannot read Secrets")?;
    let granted = secret.is_some_and(|secret| grant::allows(&secret, &own));
    Ok((!granted).then(|| Ungranted {
        identity: Place {
            namespace: own,
            name: identity.name_any(),
        },
        secret: Place { namespace: home, name },
    }))
}

async fn pools(client: &Client) -> Result<Vec<PartialObjectMeta<AzureMachinePool>>> {
    let pools: Api<AzureMachinePool> = Api::all(client.clone());
    match pools.list_metadata(&ListParams::default()).await {
        Ok(listed) => Ok(listed.items),
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        Err(error) => Err(error).context("cannot list AzureMachinePools"),
    }
}

/// Returns all objects of a kind; none of a kind that is not served.
async fn list<K>(api: Api<K>) -> Result<Vec<K>>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    match api.list(&ListParams::default()).await {
        Ok(listed) => Ok(listed.items),
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        Err(error) => Err(error).context("cannot read the clusters and their identities"),
    }
}
