//! Reads everything that the way depends on.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use capstan_core::Clock;
use capstan_core::adopt::{self, Definition, Deployment, Facts, Lease, Operator, Peer, WebhookKind, Webhooks};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, RuleWithOperations, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::apps::v1 as apps;
use k8s_openapi::api::coordination::v1 as coordination;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Client, ResourceExt};

use super::execute::ROLE;
use super::preflight;

/// The Deployment of Capstan, as all its installations name and label it.
const CAPSTAN: &str = "capstan";
const LABEL: &str = "app.kubernetes.io/name=capstan";
/// The container of controllers that Cluster API manages.
pub const MANAGER: &str = "manager";
/// A page of a list.
const PAGE: u32 = 500;

/// The kinds of machines that are counted: group, kind, plural.
const KINDS: [(&str, &str, &str); 10] = [
    (
        "infrastructure.cluster.x-k8s.io",
        "AzureMachinePool",
        "azuremachinepools",
    ),
    ("infrastructure.cluster.x-k8s.io", "AzureMachine", "azuremachines"),
    (
        "infrastructure.cluster.x-k8s.io",
        "AzureManagedCluster",
        "azuremanagedclusters",
    ),
    (
        "infrastructure.cluster.x-k8s.io",
        "AzureManagedControlPlane",
        "azuremanagedcontrolplanes",
    ),
    (
        "infrastructure.cluster.x-k8s.io",
        "AzureManagedMachinePool",
        "azuremanagedmachinepools",
    ),
    ("infrastructure.cluster.x-k8s.io", "AzureCluster", "azureclusters"),
    ("infrastructure.cluster.x-k8s.io", "VSphereCluster", "vsphereclusters"),
    ("infrastructure.cluster.x-k8s.io", "VSphereVM", "vspherevms"),
    ("machine.openshift.io", "Machine", "machines"),
    ("machine.openshift.io", "MachineSet", "machinesets"),
];

pub async fn facts(client: &Client, capstan_namespace: &str) -> Result<Facts> {
    let deployments = deployments(client).await?;
    let mut peers: BTreeMap<Peer, Deployment> = BTreeMap::new();
    let mut more_peers = Vec::new();
    for peer in Peer::ALL {
        let mut found = deployments
            .iter()
            .filter(|found| found.name == peer.deployment())
            .cloned();
        peers.extend(found.next().map(|first| (peer, first)));
        more_peers.extend(found.map(|other| (peer, other)));
    }
    let is_peer = |deployment: &Deployment| Peer::ALL.iter().any(|peer| deployment.name == peer.deployment());
    let capstan: Vec<Deployment> = deployments.iter().filter(|other| !is_peer(other)).cloned().collect();
    let namespaces: Vec<String> = peers.values().map(|deployment| deployment.namespace.clone()).collect();
    let mut leases = Vec::new();
    let mut granted = Vec::new();
    for (peer, deployment) in &peers {
        let namespace = &deployment.namespace;
        for name in deployment.leases(*peer) {
            leases.extend(lease(client, namespace, &name).await?);
        }
        if is_granted(client, namespace, capstan_namespace).await? {
            granted.push(namespace.clone());
        }
    }
    let (mut objects, mut finalizers) = (BTreeMap::new(), BTreeMap::new());
    let listed: Api<CustomResourceDefinition> = Api::all(client.clone());
    let listed = listed
        .list(&ListParams::default())
        .await
        .context("cannot list definitions")?
        .items;
    for (group, kind, plural) in KINDS {
        let Some(resource) = stored(&listed, group, kind, plural) else {
            continue;
        };
        objects.insert(kind.to_owned(), count(client, &resource, &mut finalizers).await?);
    }
    let azure = preflight::azure(client, &listed).await?;
    let vsphere_clusters = preflight::vsphere(client, &listed, capstan_namespace).await?;
    Ok(Facts {
        capstan,
        capstan_namespace: capstan_namespace.to_owned(),
        leases,
        webhooks: webhooks(client, &namespaces).await?,
        definitions: definitions(listed),
        objects,
        finalizers,
        more_peers,
        vsphere_clusters,
        workload_identities: azure.workload_identities,
        without_azure_json: azure.without_azure_json,
        waiting_for_azure_json: azure.waiting_for_azure_json,
        without_identity: azure.without_identity,
        ungranted: azure.ungranted,
        cluster_version_operator: has_cluster_version(client).await?,
        granted,
        peers,
    })
}

/// Returns a kind in the version that its objects are stored in: they are read without the webhook that converts them, which may
/// be down.
pub fn stored(definitions: &[CustomResourceDefinition], group: &str, kind: &str, plural: &str) -> Option<ApiResource> {
    let name = format!("{plural}.{group}");
    let definition = definitions.iter().find(|definition| definition.name_any() == name)?;
    let version = definition.spec.versions.iter().find(|version| version.storage)?;
    let gvk = GroupVersionKind::gvk(group, &version.name, kind);
    Some(ApiResource::from_gvk_with_plural(&gvk, plural))
}

/// Whether the answer says that there is no such kind or object.
pub fn is_absent(error: &kube::Error) -> bool {
    capstan_kube::error::code(error) == Some(404)
}

/// Whether Capstan may use leases in this namespace. A Role without its binding grants nothing.
async fn is_granted(client: &Client, namespace: &str, capstan_namespace: &str) -> Result<bool> {
    let roles: Api<Role> = Api::namespaced(client.clone(), namespace);
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
    let role = roles.get_opt(ROLE).await.context("cannot read Roles")?;
    let binding = bindings.get_opt(ROLE).await.context("cannot read RoleBindings")?;
    let subjects = binding.and_then(|binding| binding.subjects).unwrap_or_default();
    let bound = subjects
        .iter()
        .any(|subject| subject.namespace.as_deref() == Some(capstan_namespace));
    Ok(role.is_some() && bound)
}

async fn deployments(client: &Client) -> Result<Vec<Deployment>> {
    let api: Api<apps::Deployment> = Api::all(client.clone());
    let names = Peer::ALL.iter().map(|peer| peer.deployment()).chain([CAPSTAN]);
    let by_name = names.map(|name| ListParams::default().fields(&format!("metadata.name={name}")));
    let mut found: Vec<Deployment> = Vec::new();
    for params in by_name.chain([ListParams::default().labels(LABEL)]) {
        let listed = api.list(&params).await.context("cannot list Deployments")?;
        for listed in listed.iter().filter_map(deployment) {
            let same = |other: &Deployment| (&other.namespace, &other.name) == (&listed.namespace, &listed.name);
            if !found.iter().any(same) {
                found.push(listed);
            }
        }
    }
    Ok(found)
}

/// Returns what decides whether the pods of a Deployment act.
pub fn deployment(deployment: &apps::Deployment) -> Option<Deployment> {
    let spec = deployment.spec.as_ref();
    let status = deployment.status.clone().unwrap_or_default();
    let stopping = status.terminating_replicas.unwrap_or_default();
    let pods = status.replicas.unwrap_or_default();
    let observed = status.observed_generation >= deployment.metadata.generation;
    Some(Deployment {
        pods: pods + stopping,
        rolled_out: observed && stopping == 0 && status.updated_replicas.unwrap_or_default() == pods,
        namespace: deployment.namespace()?,
        name: deployment.name_any(),
        // The API server's own default.
        replicas: spec.and_then(|spec| spec.replicas).unwrap_or(1),
        args: spec.map(args).unwrap_or_default(),
        operator: Operator::of(
            deployment
                .labels()
                .keys()
                .chain(deployment.annotations().keys())
                .map(String::as_str),
            deployment
                .owner_references()
                .iter()
                .map(|owner| owner.api_version.as_str()),
        ),
    })
}

/// Returns the arguments of the controller's container.
pub fn args(spec: &apps::DeploymentSpec) -> Vec<String> {
    let containers = spec
        .template
        .spec
        .as_ref()
        .map(|pod| pod.containers.as_slice())
        .unwrap_or_default();
    let container = containers
        .iter()
        .find(|container| container.name == MANAGER)
        .or(containers.first());
    container
        .and_then(|container| container.args.clone())
        .unwrap_or_default()
}

async fn lease(client: &Client, namespace: &str, name: &str) -> Result<Option<Lease>> {
    let api: Api<coordination::Lease> = Api::namespaced(client.clone(), namespace);
    let Some(found) = api.get_opt(name).await.context("cannot read Leases")? else {
        return Ok(None);
    };
    let spec = found.spec.unwrap_or_default();
    let renewed = spec.renew_time.map(|time| time.0);
    let lasts = i64::from(spec.lease_duration_seconds.unwrap_or_default());
    let until = renewed.and_then(|renewed| renewed.checked_add(jiff::SignedDuration::from_secs(lasts)).ok());
    Ok(Some(Lease {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        holder: spec.holder_identity.unwrap_or_default(),
        expired: until.is_none_or(|until| until < Clock::system().now()),
    }))
}

/// Returns the webhook configurations whose Services are in these namespaces.
async fn webhooks(client: &Client, namespaces: &[String]) -> Result<Vec<Webhooks>> {
    let params = ListParams::default();
    let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let mutating = mutating
        .list(&params)
        .await
        .context("cannot list webhook configurations")?;
    let validating = validating
        .list(&params)
        .await
        .context("cannot list webhook configurations")?;
    let mutating = mutating.into_iter().filter_map(|configuration| {
        let webhooks = configuration.webhooks.iter().flatten().map(|webhook| Webhook {
            name: &webhook.name,
            config: &webhook.client_config,
            failure_policy: webhook.failure_policy.as_deref(),
            rules: webhook.rules.as_deref().unwrap_or_default(),
        });
        let webhooks: Vec<_> = webhooks.collect();
        answered(WebhookKind::Mutating, configuration.name_any(), &webhooks)
    });
    let validating = validating.into_iter().filter_map(|configuration| {
        let webhooks = configuration.webhooks.iter().flatten().map(|webhook| Webhook {
            name: &webhook.name,
            config: &webhook.client_config,
            failure_policy: webhook.failure_policy.as_deref(),
            rules: webhook.rules.as_deref().unwrap_or_default(),
        });
        let webhooks: Vec<_> = webhooks.collect();
        answered(WebhookKind::Validating, configuration.name_any(), &webhooks)
    });
    let mut found: Vec<Webhooks> = mutating.chain(validating).collect();
    found.retain(|webhooks| namespaces.contains(&webhooks.service));
    found.sort();
    Ok(found)
}

/// What mutating and validating webhooks have in common.
struct Webhook<'a> {
    name: &'a str,
    config: &'a WebhookClientConfig,
    failure_policy: Option<&'a str>,
    rules: &'a [RuleWithOperations],
}

impl Webhook<'_> {
    /// Whether CAPZ answers it only with its feature gate for machine pools.
    fn is_gated(&self) -> bool {
        let mut resources = self.rules.iter().flat_map(|rule| rule.resources.iter().flatten());
        !self.rules.is_empty() && resources.all(|resource| adopt::is_gated(resource))
    }
}

fn answered(kind: WebhookKind, name: String, webhooks: &[Webhook<'_>]) -> Option<Webhooks> {
    let service = webhooks
        .iter()
        .find_map(|webhook| webhook.config.service.as_ref())?
        .namespace
        .clone();
    // The API server's default is Fail.
    let closed = webhooks
        .iter()
        .filter(|webhook| webhook.failure_policy != Some("Ignore"));
    let gated = webhooks.iter().filter(|webhook| webhook.is_gated());
    Some(Webhooks {
        kind,
        name,
        service,
        fail_closed: closed.count(),
        gated: gated.map(|webhook| webhook.name.to_owned()).collect(),
    })
}

/// Returns the definitions of the kinds that Capstan manages.
fn definitions(listed: Vec<CustomResourceDefinition>) -> Vec<Definition> {
    let prefixes: Vec<&str> = Peer::ALL.iter().flat_map(|peer| peer.definitions()).copied().collect();
    let ours = listed.into_iter().filter(|definition| {
        let name = definition.name_any();
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    });
    let found = ours.map(|definition| {
        let served = definition.spec.versions.iter().filter(|version| version.served);
        let webhook = definition
            .spec
            .conversion
            .as_ref()
            .and_then(|conversion| conversion.webhook.as_ref());
        let service = webhook.and_then(|webhook| webhook.client_config.as_ref()?.service.as_ref());
        Definition {
            name: definition.name_any(),
            injected: definition.annotations().get(adopt::INJECT_CA).cloned(),
            served: served.map(|version| version.name.clone()).collect(),
            conversion: service.map(|service| service.namespace.clone()),
            stored: definition
                .status
                .and_then(|status| status.stored_versions)
                .unwrap_or_default(),
        }
    });
    found.collect()
}

/// Returns how many objects of a kind there are, and counts their finalizers; none of a kind that is not served.
async fn count(client: &Client, resource: &ApiResource, finalizers: &mut BTreeMap<String, usize>) -> Result<usize> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), resource);
    let mut params = ListParams::default().limit(PAGE);
    let mut count = 0;
    loop {
        let page = match api.list_metadata(&params).await {
            Ok(page) => page,
            Err(error) if is_absent(&error) => return Ok(0),
            Err(error) => return Err(error).with_context(|| format!("cannot list {}", resource.plural)),
        };
        count += page.items.len();
        for finalizer in page.items.iter().flat_map(|item| item.finalizers()) {
            *finalizers.entry(finalizer.clone()).or_default() += 1;
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(count),
        }
    }
}

async fn has_cluster_version(client: &Client) -> Result<bool> {
    let gvk = GroupVersionKind::gvk("config.openshift.io", "v1", "ClusterVersion");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "clusterversions");
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    match api.get_opt("version").await {
        Ok(found) => Ok(found.is_some()),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(error).context("cannot read ClusterVersion"),
    }
}
