//! Manifests in a cluster: parses them, waits for CRDs, and applies the other objects with server-side apply.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::discovery::{Discovery, Scope};
use kube::runtime::conditions::is_crd_established;
use kube::runtime::wait::await_condition;
use kube::{Client, ResourceExt};

use crate::gobuild;

/// The name under which manifests are applied.
pub const FIELD_MANAGER: &str = "capstan-local";
/// A CRD is established within a second on an idle machine; so much more means that it has a problem.
const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(180);
/// Maximum time until discovery lists an established kind.
const LISTED_TIMEOUT: Duration = Duration::from_secs(20);
/// The interval at which deleted objects are checked.
const LOOK: Duration = Duration::from_millis(250);

/// All objects of a YAML file; empty documents are skipped.
pub fn parse(text: &str) -> Result<Vec<DynamicObject>> {
    let documents: Vec<Option<serde_json::Value>> =
        serde_saphyr::from_multiple(text).context("cannot parse the YAML")?;
    documents
        .into_iter()
        .flatten()
        .map(|document| serde_json::from_value(document).context("an object without apiVersion, kind or metadata"))
        .collect()
}

/// All objects of a folder's YAML files.
pub fn read_dir(dir: &Path) -> Result<Vec<DynamicObject>> {
    let mut objects = Vec::new();
    for file in gobuild::yaml_files(dir)? {
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        objects.extend(parse(&text).with_context(|| format!("cannot read {}", file.display()))?);
    }
    Ok(objects)
}

/// Applies CRDs and waits until they are served.
pub async fn install_crds(client: &Client, crds: Vec<DynamicObject>) -> Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let (api, params) = (&api, &params);
    try_join_all(crds.iter().map(|crd| async move {
        let name = crd.name_any();
        let mut crd = crd.clone();
        keep_conversion_url(&mut crd, api.get_opt(&name).await?)?;
        api.patch(&name, params, &Patch::Apply(&crd))
            .await
            .with_context(|| format!("cannot install CRD {name}"))?;
        let established = await_condition(api.clone(), &name, is_crd_established());
        match tokio::time::timeout(ESTABLISH_TIMEOUT, established).await {
            Ok(result) => result.map(|_| ()).with_context(|| format!("cannot watch CRD {name}")),
            Err(_) => bail!(
                "CRD {name} was not established within {} s",
                ESTABLISH_TIMEOUT.as_secs()
            ),
        }
    }))
    .await?;
    Ok(())
}

/// Keeps the conversion of a definition that controllers outside of the cluster have pointed at their own address. The manifest
/// names a Service, and the API server rejects a definition with both. A manifest with an address of its own wins.
fn keep_conversion_url(crd: &mut DynamicObject, existing: Option<CustomResourceDefinition>) -> Result<()> {
    let Some(conversion) = existing.and_then(|existing| existing.spec.conversion) else {
        return Ok(());
    };
    let client = conversion
        .webhook
        .as_ref()
        .and_then(|webhook| webhook.client_config.as_ref());
    let names_its_own = crd.data["spec"]["conversion"]["webhook"]["clientConfig"]["url"].is_string();
    if client.is_some_and(|client| client.url.is_some()) && !names_its_own {
        crd.data["spec"]["conversion"] = serde_json::to_value(conversion)?;
    }
    Ok(())
}

/// Applies objects in the order given. An object without a namespace gets `namespace` when its kind has one.
pub async fn apply(client: &Client, namespace: &str, objects: &[DynamicObject]) -> Result<()> {
    let discovery = discover(client, objects).await?;
    let params = PatchParams::apply(FIELD_MANAGER).force();
    for object in objects {
        let (api, kind) = api_of(client, &discovery, object, namespace)?;
        let name = object.name_any();
        let applied = api.patch(&name, &params, &Patch::Apply(object)).await;
        applied.with_context(|| format!("cannot apply {kind} {name}"))?;
    }
    Ok(())
}

/// As [`apply`], but does not change existing objects: a user may have changed them. `created` gets the created
/// objects, also when a later one could not be created.
pub async fn create_missing(
    client: &Client,
    namespace: &str,
    objects: &[DynamicObject],
    created: &mut Vec<DynamicObject>,
) -> Result<()> {
    let discovery = discover(client, objects).await?;
    for object in objects {
        let (api, kind) = api_of(client, &discovery, object, namespace)?;
        match api.create(&PostParams::default(), object).await {
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {}
            made => {
                made.with_context(|| format!("cannot create {kind} {}", object.name_any()))?;
                created.push(object.clone());
            }
        }
    }
    Ok(())
}

/// Deletes objects, each after its dependents, and waits until they do not exist any more. Returns those that still
/// exist after `patience`, as `Kind name`.
pub async fn delete(
    client: &Client,
    namespace: &str,
    objects: &[DynamicObject],
    patience: Duration,
) -> Result<Vec<String>> {
    let discovery = discover(client, objects).await?;
    let mut left = Vec::new();
    for object in objects {
        let (api, kind) = api_of(client, &discovery, object, namespace)?;
        let name = object.name_any();
        match api.delete(&name, &DeleteParams::foreground()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            asked => {
                asked.with_context(|| format!("cannot delete {kind} {name}"))?;
                left.push((api, kind, name));
            }
        }
    }
    let deadline = Instant::now() + patience;
    while !left.is_empty() && Instant::now() < deadline {
        let mut still = Vec::new();
        for (api, kind, name) in left {
            if api.get_metadata_opt(&name).await?.is_some() {
                still.push((api, kind, name));
            }
        }
        left = still;
        if !left.is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    }
    Ok(left
        .into_iter()
        .map(|(_, kind, name)| format!("{kind} {name}"))
        .collect())
}

/// The cluster's kinds. One that was just installed is listed a moment after it is established.
async fn discover(client: &Client, objects: &[DynamicObject]) -> Result<Discovery> {
    let since = Instant::now();
    loop {
        let discovery = Discovery::new(client.clone())
            .run()
            .await
            .context("cannot discover the cluster's kinds")?;
        let is_known = |object: &DynamicObject| {
            let types = object.types.clone().unwrap_or_default();
            kube::core::GroupVersionKind::try_from(&types).is_ok_and(|gvk| discovery.resolve_gvk(&gvk).is_some())
        };
        if since.elapsed() > LISTED_TIMEOUT || objects.iter().all(is_known) {
            return Ok(discovery);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn api_of(
    client: &Client,
    discovery: &Discovery,
    object: &DynamicObject,
    namespace: &str,
) -> Result<(Api<DynamicObject>, String)> {
    let types = object.types.clone().unwrap_or_default();
    let gvk = kube::core::GroupVersionKind::try_from(&types).context("cannot read apiVersion and kind")?;
    let Some((resource, capabilities)) = discovery.resolve_gvk(&gvk) else {
        bail!(
            "the cluster has no kind {} in {}: install its CRD first",
            types.kind,
            types.api_version
        );
    };
    let api = match capabilities.scope {
        Scope::Cluster => Api::all_with(client.clone(), &resource),
        Scope::Namespaced => {
            let namespace = object.namespace().unwrap_or_else(|| namespace.to_owned());
            Api::namespaced_with(client.clone(), &namespace, &resource)
        }
    };
    Ok((api, types.kind))
}
