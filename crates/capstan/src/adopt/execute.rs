//! Carries out the steps that can be undone, and undoes them.
//!
//! Invariant: the record in the ConfigMap names a change before the change is made, with everything that undoing it takes. To
//! undo a change that was not made changes nothing.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use capstan_core::adopt::{self, Action, Facts, Step, WebhookKind};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, ValidatingWebhook, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceConversion, CustomResourceDefinition, ServiceReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::observe;

/// The record of what was carried out, in the namespace of Capstan.
const RECORD: &str = "capstan-adoption";
/// Its only key.
const KEY: &str = "steps.json";
/// The Role and the RoleBinding that let Capstan hold a peer's leases.
pub const ROLE: &str = "capstan-peer-leases";
/// The service account of Capstan.
const ACCOUNT: &str = "capstan";

/// A change, and what it takes to undo it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    #[serde(flatten)]
    action: Action,
    /// The replicas, the arguments or the whole object, as they were.
    before: Value,
}

/// Carries out every step that is not done, in order; nothing at all while something is in the way.
pub async fn execute(client: &Client, facts: &Facts) -> Result<Vec<String>> {
    let steps: Vec<Step> = adopt::ways(facts).into_iter().flat_map(|way| way.steps).collect();
    for step in &steps {
        match &step.obstacle {
            Some(obstacle) if step.action.is_some() => bail!("cannot {}: {obstacle}", step.text),
            Some(obstacle) => bail!("{obstacle}: {} first", step.text),
            None => {}
        }
    }
    let mut done = Vec::new();
    for step in steps {
        let Some(action) = step.action.filter(|_| !step.done) else {
            continue;
        };
        let before = before(client, &action).await?;
        let entry = Entry {
            action: action.clone(),
            before,
        };
        record(client, facts, entry).await?;
        carry_out(client, facts, &action)
            .await
            .with_context(|| step.text.clone())?;
        done.push(step.text);
    }
    Ok(done)
}

/// Undoes what was recorded, last change first.
pub async fn revert(client: &Client, facts: &Facts) -> Result<Vec<String>> {
    if let Some(obstacle) = adopt::revert_obstacle(facts) {
        bail!("cannot revert: {obstacle}");
    }
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), &facts.capstan_namespace);
    let mut entries = entries(api.get_opt(RECORD).await.context("cannot read the record")?.as_ref())?;
    let mut done = Vec::new();
    while let Some(entry) = entries.pop() {
        let what = match undo(client, &entry).await {
            Ok(()) => undone(&entry.action),
            // Somebody has removed it since; the rest can be given back all the same.
            Err(error) if is_gone(&error) => format!("nothing, as it does not exist any more: {:?}", entry.action),
            Err(error) => return Err(error.context(format!("undo {:?}", entry.action))),
        };
        write(&api, &entries).await?;
        done.push(what);
    }
    if api.get_opt(RECORD).await?.is_some() {
        api.delete(RECORD, &DeleteParams::default()).await?;
    }
    Ok(done)
}

/// Whether the API server answers that an object does not exist.
fn is_gone(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<kube::Error>();
    error.and_then(capstan_kube::error::code) == Some(404)
}

fn undone(action: &Action) -> String {
    match action {
        Action::GrantLeases { namespace, .. } => format!("took the leases in {namespace} away from Capstan"),
        Action::DisableGate { deployment, gate, .. } => {
            format!("gave feature gate {gate} of {deployment} back its value")
        }
        Action::ScaleDown { deployment, .. } => format!("gave {deployment} back its replicas"),
        Action::DropWebhooks { kind, name, .. } => format!("gave {kind} {name} back its webhooks"),
        Action::StopInjection { definitions } => {
            format!("gave {} definitions back their conversion", definitions.len())
        }
        Action::RemoveWebhooks { kind, name } => format!("created {kind} {name} again"),
    }
}

fn entries(record: Option<&ConfigMap>) -> Result<Vec<Entry>> {
    let text = record.and_then(|record| record.data.as_ref()?.get(KEY));
    text.map_or_else(
        || Ok(Vec::new()),
        |text| serde_json::from_str(text).context("the record cannot be read"),
    )
}

/// Adds a change to the record. A change that is there keeps what it was before the first time.
async fn record(client: &Client, facts: &Facts, entry: Entry) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    if namespaces.get_opt(&facts.capstan_namespace).await?.is_none() {
        let namespace = Namespace {
            metadata: meta(&facts.capstan_namespace, None),
            ..Namespace::default()
        };
        namespaces.create(&PostParams::default(), &namespace).await?;
    }
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), &facts.capstan_namespace);
    let mut entries = entries(api.get_opt(RECORD).await.context("cannot read the record")?.as_ref())?;
    if entries.iter().all(|known| known.action != entry.action) {
        entries.push(entry);
        write(&api, &entries).await?;
    }
    Ok(())
}

async fn write(api: &Api<ConfigMap>, entries: &[Entry]) -> Result<()> {
    let record = ConfigMap {
        metadata: meta(RECORD, None),
        data: Some([(KEY.to_owned(), serde_json::to_string_pretty(entries)?)].into()),
        ..ConfigMap::default()
    };
    let params = PatchParams::apply("capstan-adopt").force();
    api.patch(RECORD, &params, &Patch::Apply(&record))
        .await
        .context("cannot write the record")?;
    Ok(())
}

fn meta(name: &str, namespace: Option<&str>) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: namespace.map(str::to_owned),
        ..ObjectMeta::default()
    }
}

/// Returns everything that undoing the action takes.
async fn before(client: &Client, action: &Action) -> Result<Value> {
    Ok(match action {
        Action::GrantLeases { .. } => Value::Null,
        Action::DisableGate {
            namespace, deployment, ..
        } => {
            let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
            let found = api.get(deployment).await?;
            serde_json::to_value(found.spec.as_ref().map(observe::args).unwrap_or_default())?
        }
        Action::ScaleDown { namespace, deployment } => {
            let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
            let found = api.get(deployment).await?;
            serde_json::to_value(found.spec.and_then(|spec| spec.replicas).unwrap_or(1))?
        }
        Action::StopInjection { definitions } => {
            let api: Api<CustomResourceDefinition> = Api::all(client.clone());
            let mut before = BTreeMap::new();
            for name in definitions {
                let found = api.get(name).await?;
                let conversion = Conversion {
                    injected: found.annotations().get(adopt::INJECT_CA).cloned(),
                    conversion: found.spec.conversion,
                };
                before.insert(name.clone(), conversion);
            }
            serde_json::to_value(before)?
        }
        Action::RemoveWebhooks { kind, name } | Action::DropWebhooks { kind, name, .. } => match kind {
            WebhookKind::Mutating => kept::<MutatingWebhookConfiguration>(client, name).await?,
            WebhookKind::Validating => kept::<ValidatingWebhookConfiguration>(client, name).await?,
        },
    })
}

/// Returns an object as it can be created again.
async fn kept<K>(client: &Client, name: &str) -> Result<Value>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Serialize,
{
    let mut found = Api::<K>::all(client.clone()).get(name).await?;
    let old = found.meta().clone();
    *found.meta_mut() = ObjectMeta {
        labels: old.labels,
        annotations: old.annotations,
        ..meta(name, None)
    };
    Ok(serde_json::to_value(found)?)
}

async fn carry_out(client: &Client, facts: &Facts, action: &Action) -> Result<()> {
    match action {
        Action::GrantLeases { namespace, leases } => grant(client, facts, namespace, leases).await,
        Action::DisableGate {
            namespace,
            deployment,
            gate,
        } => {
            set_gate(client, namespace, deployment, |args| {
                adopt::with_gate(args, gate, false)
            })
            .await
        }
        Action::ScaleDown { namespace, deployment } => scale(client, namespace, deployment, 0).await,
        Action::StopInjection { definitions } => {
            for name in definitions {
                set_conversion(client, name, &Conversion::default()).await?;
            }
            Ok(())
        }
        Action::DropWebhooks { kind, name, webhooks } => match kind {
            WebhookKind::Mutating => drop_webhooks::<MutatingWebhookConfiguration>(client, name, webhooks).await,
            WebhookKind::Validating => drop_webhooks::<ValidatingWebhookConfiguration>(client, name, webhooks).await,
        },
        Action::RemoveWebhooks { kind, name } => match kind {
            WebhookKind::Mutating => remove::<MutatingWebhookConfiguration>(&Api::all(client.clone()), name).await,
            WebhookKind::Validating => remove::<ValidatingWebhookConfiguration>(&Api::all(client.clone()), name).await,
        },
    }
}

async fn undo(client: &Client, entry: &Entry) -> Result<()> {
    match &entry.action {
        Action::GrantLeases { namespace, .. } => {
            remove::<RoleBinding>(&Api::namespaced(client.clone(), namespace), ROLE).await?;
            remove::<Role>(&Api::namespaced(client.clone(), namespace), ROLE).await
        }
        Action::DisableGate {
            namespace,
            deployment,
            gate,
        } => {
            let before: Vec<String> = serde_json::from_value(entry.before.clone())?;
            set_gate(client, namespace, deployment, |now| {
                adopt::with_gate_of(&before, now, gate)
            })
            .await
        }
        Action::ScaleDown { namespace, deployment } => {
            let replicas = serde_json::from_value(entry.before.clone())?;
            scale(client, namespace, deployment, replicas).await
        }
        Action::StopInjection { .. } => {
            let before: BTreeMap<String, Conversion> = serde_json::from_value(entry.before.clone())?;
            for (name, mut conversion) in before {
                // A definition that had one version only got others since, which need a webhook.
                conversion.conversion.take_if(|conversion| conversion.webhook.is_none());
                match set_conversion(client, &name, &conversion).await {
                    Err(error) if is_gone(&error) => {}
                    result => result?,
                }
            }
            Ok(())
        }
        Action::RemoveWebhooks { kind, .. } | Action::DropWebhooks { kind, .. } => match kind {
            WebhookKind::Mutating => restore::<MutatingWebhookConfiguration>(client, &entry.before).await,
            WebhookKind::Validating => restore::<ValidatingWebhookConfiguration>(client, &entry.before).await,
        },
    }
}

/// How a definition converts its versions, and whose CA cert-manager writes into it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Conversion {
    injected: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    conversion: Option<CustomResourceConversion>,
}

#[derive(Debug, Serialize)]
struct DefinitionPatch<'a> {
    metadata: Annotations<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<SpecPatch<'a>>,
}

#[derive(Debug, Serialize)]
struct Annotations<'a> {
    /// A key without a value is removed.
    annotations: BTreeMap<&'a str, &'a Option<String>>,
}

#[derive(Debug, Serialize)]
struct SpecPatch<'a> {
    conversion: ConversionPatch<'a>,
}

#[derive(Debug, Serialize)]
struct ConversionPatch<'a> {
    strategy: &'a str,
    webhook: Option<WebhookPatch<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct WebhookPatch<'a> {
    client_config: Option<ClientPatch<'a>>,
    conversion_review_versions: &'a [String],
}

/// The API server refuses a definition with both addresses: what is not there is removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ClientPatch<'a> {
    ca_bundle: Option<&'a ByteString>,
    service: Option<&'a ServiceReference>,
    url: Option<&'a str>,
}

impl<'a> ConversionPatch<'a> {
    fn of(conversion: &'a CustomResourceConversion) -> Self {
        let webhook = conversion.webhook.as_ref().map(|webhook| WebhookPatch {
            client_config: webhook.client_config.as_ref().map(|client| ClientPatch {
                ca_bundle: client.ca_bundle.as_ref(),
                service: client.service.as_ref(),
                url: client.url.as_deref(),
            }),
            conversion_review_versions: &webhook.conversion_review_versions,
        });
        Self {
            strategy: &conversion.strategy,
            webhook,
        }
    }
}

/// Sets or removes cert-manager's annotation of a definition, and sets its conversion where there is one.
async fn set_conversion(client: &Client, name: &str, conversion: &Conversion) -> Result<()> {
    let patch = DefinitionPatch {
        metadata: Annotations {
            annotations: [(adopt::INJECT_CA, &conversion.injected)].into(),
        },
        spec: conversion.conversion.as_ref().map(|conversion| SpecPatch {
            conversion: ConversionPatch::of(conversion),
        }),
    };
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

/// Lets Capstan's account read, take and renew these leases.
async fn grant(client: &Client, facts: &Facts, namespace: &str, leases: &[String]) -> Result<()> {
    let rule = |verbs: &[&str], names: Option<&[String]>| PolicyRule {
        api_groups: Some(vec!["coordination.k8s.io".to_owned()]),
        resources: Some(vec!["leases".to_owned()]),
        resource_names: names.map(<[String]>::to_vec),
        verbs: verbs.iter().map(ToString::to_string).collect(),
        ..PolicyRule::default()
    };
    let role = Role {
        metadata: meta(ROLE, Some(namespace)),
        // The name of an object that is created is not known to the API server's authorization.
        rules: Some(vec![rule(&["get", "update"], Some(leases)), rule(&["create"], None)]),
    };
    let binding = RoleBinding {
        metadata: meta(ROLE, Some(namespace)),
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "Role".to_owned(),
            name: ROLE.to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: ACCOUNT.to_owned(),
            namespace: Some(facts.capstan_namespace.clone()),
            ..Subject::default()
        }]),
    };
    let params = PatchParams::apply("capstan-adopt").force();
    let roles: Api<Role> = Api::namespaced(client.clone(), namespace);
    roles.patch(ROLE, &params, &Patch::Apply(&role)).await?;
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
    bindings.patch(ROLE, &params, &Patch::Apply(&binding)).await?;
    Ok(())
}

/// Replaces the arguments of the controller's container.
async fn set_gate(
    client: &Client,
    namespace: &str,
    name: &str,
    change: impl Fn(&[String]) -> Vec<String>,
) -> Result<()> {
    let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let mut found = api.get(name).await?;
    let pod = found.spec.as_mut().and_then(|spec| spec.template.spec.as_mut());
    let containers = pod.map(|pod| pod.containers.as_mut_slice()).unwrap_or_default();
    let at = containers
        .iter()
        .position(|container| container.name == observe::MANAGER);
    let Some(container) = containers.get_mut(at.unwrap_or_default()) else {
        bail!("Deployment {namespace}/{name} has no containers");
    };
    container.args = Some(change(container.args.as_deref().unwrap_or_default()));
    // With the version that was read: somebody else's change is not overwritten.
    api.replace(name, &PostParams::default(), &found).await?;
    Ok(())
}

async fn scale(client: &Client, namespace: &str, name: &str, replicas: i32) -> Result<()> {
    let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let mut scale = api.get_scale(name).await?;
    scale.spec.get_or_insert_default().replicas = Some(replicas);
    api.replace_scale(name, &PostParams::default(), &scale).await?;
    Ok(())
}

async fn remove<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(error) if capstan_kube::error::code(&error) == Some(404) => Ok(()),
        result => Ok(result.map(drop)?),
    }
}

/// A webhook configuration of either kind.
trait Configuration:
    Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Serialize + Send + Sync + 'static
{
    type Webhook;
    fn webhooks(&mut self) -> &mut Vec<Self::Webhook>;
    fn name_of(webhook: &Self::Webhook) -> &str;
}

impl Configuration for MutatingWebhookConfiguration {
    type Webhook = MutatingWebhook;
    fn webhooks(&mut self) -> &mut Vec<MutatingWebhook> {
        self.webhooks.get_or_insert_default()
    }
    fn name_of(webhook: &MutatingWebhook) -> &str {
        &webhook.name
    }
}

impl Configuration for ValidatingWebhookConfiguration {
    type Webhook = ValidatingWebhook;
    fn webhooks(&mut self) -> &mut Vec<ValidatingWebhook> {
        self.webhooks.get_or_insert_default()
    }
    fn name_of(webhook: &ValidatingWebhook) -> &str {
        &webhook.name
    }
}

async fn drop_webhooks<K: Configuration>(client: &Client, name: &str, webhooks: &[String]) -> Result<()> {
    let api = Api::<K>::all(client.clone());
    let mut found = api.get(name).await?;
    found
        .webhooks()
        .retain(|webhook| !webhooks.iter().any(|dropped| dropped == K::name_of(webhook)));
    // With the version that was read: somebody else's change is not overwritten.
    api.replace(name, &PostParams::default(), &found).await?;
    Ok(())
}

/// Creates a webhook configuration again, or gives it back the webhooks that it lacks. Those that it has stay as they are: their
/// certificate may have changed since.
async fn restore<K: Configuration>(client: &Client, before: &Value) -> Result<()> {
    let mut before: K = serde_json::from_value(before.clone())?;
    let (api, name) = (Api::<K>::all(client.clone()), before.name_any());
    let Some(mut found) = api.get_opt(&name).await? else {
        api.create(&PostParams::default(), &before).await?;
        return Ok(());
    };
    let mut present = std::mem::take(found.webhooks());
    let mut all = std::mem::take(before.webhooks());
    for webhook in &mut all {
        let same = |other: &K::Webhook| K::name_of(other) == K::name_of(webhook);
        if let Some(at) = present.iter().position(same) {
            *webhook = present.remove(at);
        }
    }
    all.append(&mut present);
    *found.webhooks() = all;
    api.replace(&name, &PostParams::default(), &found).await?;
    Ok(())
}
