//! Rewrites objects that are stored in an old version, once for each version, and removes that version from `status.storedVersions`.
//!
//! Invariant: the old version leaves `status.storedVersions` only after every object was rewritten since the definition was read. A
//! later version of Capstan may then stop to serve it.

use std::time::Duration;

use capstan_api::vsphere::v1beta2::{CONVERTED, CONVERTED_LABEL};
use capstan_core::Class;
use capstan_kube::{Context, Error, backoff};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt};
use serde::Serialize;

/// Objects in one list. The API server converts all objects of a list in one request to the webhook.
const PAGE: u32 = 100;
/// How long to wait after a failure where the error says nothing.
const RETRY: Duration = Duration::from_secs(60);

/// Migrates all definitions that Capstan converts, until the context shuts down: somebody may apply definitions later that store
/// another version.
///
/// A manager of one namespace migrates nothing: the others' objects are not its own.
pub async fn run(context: &Context) {
    if context.namespace.is_some() {
        return;
    }
    let mut failures = 0;
    loop {
        let wait = match migrate_labeled(&context.client, CONVERTED).await {
            Ok(()) => {
                failures = 0;
                context.resync
            }
            Err(error) => {
                failures += 1;
                tracing::warn!(%error, "cannot rewrite objects in the stored version");
                backoff::delay(Class::Transient, failures, 1.0).unwrap_or(RETRY)
            }
        };
        tokio::select! {
            () = context.shutdown.cancelled() => return,
            () = context.clock.sleep(wait) => {}
        }
    }
}

/// Migrates the definitions whose label [`CONVERTED_LABEL`] has this value.
pub async fn migrate_labeled(client: &Client, value: &str) -> Result<(), Error> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let labeled = ListParams::default().labels(&format!("{CONVERTED_LABEL}={value}"));
    for definition in definitions.list(&labeled).await? {
        migrate(client, &definitions, &definition).await?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct StatusPatch<'a> {
    metadata: Version<'a>,
    status: Stored<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Version<'a> {
    resource_version: Option<&'a str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored<'a> {
    stored_versions: [&'a str; 1],
}

async fn migrate(
    client: &Client,
    definitions: &Api<CustomResourceDefinition>,
    definition: &CustomResourceDefinition,
) -> Result<(), Error> {
    let status = definition.status.as_ref();
    let stored = status
        .and_then(|status| status.stored_versions.as_deref())
        .unwrap_or_default();
    let current = definition.spec.versions.iter().find(|version| version.storage);
    let Some(current) = current.map(|version| version.name.as_str()) else {
        return Ok(());
    };
    if stored.iter().all(|version| version == current) {
        return Ok(());
    }
    let name = definition.name_any();
    let rewritten = rewrite_all(client, definition, current).await?;
    tracing::info!(
        crd = name,
        version = current,
        objects = rewritten,
        "rewrote all objects in the stored version"
    );
    let patch = StatusPatch {
        metadata: Version {
            resource_version: definition.metadata.resource_version.as_deref(),
        },
        status: Stored {
            stored_versions: [current],
        },
    };
    let params = PatchParams::default();
    definitions.patch_status(&name, &params, &Patch::Merge(&patch)).await?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct Untouched<'a> {
    metadata: Identity<'a>,
}

#[derive(Debug, Serialize)]
struct Identity<'a> {
    uid: Option<&'a str>,
}

/// Writes every object as it is. The API server stores it in the current version. Returns the number of objects.
async fn rewrite_all(client: &Client, definition: &CustomResourceDefinition, version: &str) -> Result<usize, Error> {
    let spec = &definition.spec;
    let resource = ApiResource {
        group: spec.group.clone(),
        version: version.to_owned(),
        api_version: format!("{}/{version}", spec.group),
        kind: spec.names.kind.clone(),
        plural: spec.names.plural.clone(),
    };
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let mut params = ListParams::default().limit(PAGE);
    let mut rewritten = 0;
    loop {
        let page = all.list_metadata(&params).await?;
        for object in &page.items {
            let api = match object.namespace() {
                Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
                None => all.clone(),
            };
            rewrite(&api, object).await?;
        }
        rewritten += page.items.len();
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(rewritten),
        }
    }
}

async fn rewrite(api: &Api<DynamicObject>, object: &PartialObjectMeta<DynamicObject>) -> Result<(), Error> {
    let patch = Untouched {
        metadata: Identity {
            uid: object.metadata.uid.as_deref(),
        },
    };
    let params = PatchParams::default();
    let written = api
        .patch_metadata(&object.name_any(), &params, &Patch::Merge(&patch))
        .await;
    match written.map_err(Error::from) {
        Ok(_) => Ok(()),
        // Deleted meanwhile, or created again and so stored in the current version.
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
        Err(error) => Err(error),
    }
}
