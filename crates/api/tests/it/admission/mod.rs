//! Every rule in the definitions, on a real kube-apiserver: the objects that it accepts and rejects, with the messages of
//! its answers.

mod azure;
mod case;
mod coverage;
mod openshift;
mod vsphere;

use anyhow::{Context, Result, bail};
use capstan_api::azure::AzureMachinePoolMachine;
use capstan_testkit::{ControlPlane, manifests};
use case::{CRDS, Case};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PostParams},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, time::Duration};

/// For all cases of one group together; they take a few seconds.
const TIMEOUT: Duration = Duration::from_secs(300);
const PARALLEL: usize = 8;

fn resource(kind: &str) -> (ApiResource, bool) {
    let crd = CRDS
        .iter()
        .find(|crd| crd.spec.names.kind == kind)
        .expect("a kind of ours");
    let version = &crd.spec.versions[0].name;
    let resource = ApiResource {
        api_version: format!("{}/{version}", crd.spec.group),
        version: version.clone(),
        kind: kind.to_owned(),
        plural: crd.spec.names.plural.clone(),
        group: crd.spec.group.clone(),
    };
    (resource, crd.spec.scope == "Namespaced")
}

fn object(resource: &ApiResource, name: &str, spec: &Value) -> DynamicObject {
    let mut object = DynamicObject::new(name, resource);
    object.data = json!({ "spec": spec });
    object
}

fn api(client: &Client, namespace: &str, kind: &str) -> (Api<DynamicObject>, ApiResource) {
    let (resource, namespaced) = resource(kind);
    let api = match namespaced {
        true => Api::namespaced_with(client.clone(), namespace, &resource),
        false => Api::all_with(client.clone(), &resource),
    };
    (api, resource)
}

/// Objects that are there before they are changed; cases that start alike share one, since changes are dry runs.
type Made = BTreeMap<(&'static str, String), DynamicObject>;

async fn make(client: &Client, namespace: &str, cases: &[Case]) -> Result<Made> {
    let mut made = Made::new();
    for (case, before) in cases.iter().filter_map(|case| Some((case, case.before.as_ref()?))) {
        let key = (case.kind, before.to_string());
        if made.contains_key(&key) {
            continue;
        }
        let (api, resource) = api(client, namespace, case.kind);
        let first = object(&resource, &format!("{namespace}-{}", made.len()), before);
        let created = api.create(&PostParams::default(), &first).await;
        let created = created.with_context(|| format!("{}: the first form is refused: {before}", case.kind))?;
        made.insert(key, created);
    }
    Ok(made)
}

/// A case, and the API server's words, or nothing when it accepts.
type Answer<'a> = (&'a Case, Option<String>);

async fn answer<'a>(client: &Client, namespace: &str, made: &Made, case: &'a Case) -> Result<Answer<'a>> {
    let (api, resource) = api(client, namespace, case.kind);
    let dry = PostParams {
        dry_run: true,
        ..Default::default()
    };
    let mut after = object(&resource, case.name.unwrap_or("case"), &case.spec);
    let result = match &case.before {
        None => api.create(&dry, &after).await,
        Some(before) => {
            after.metadata = made[&(case.kind, before.to_string())].metadata.clone();
            api.replace(&after.name_any(), &dry, &after).await
        }
    };
    match result {
        Ok(_) => Ok((case, None)),
        Err(kube::Error::Api(status)) => Ok((case, Some(status.message))),
        Err(other) => Err(other.into()),
    }
}

/// Fails when the answer is not the one that the case names.
fn check(case: &Case, answer: Option<&str>) -> Result<()> {
    match answer {
        None if case.refusal.is_empty() => Ok(()),
        None => bail!(
            "{} is accepted, not refused with {:?}: {}",
            case.kind,
            case.refusal,
            case.spec
        ),
        Some(words) if case.refusal.is_empty() => bail!("{} is refused: {words}: {}", case.kind, case.spec),
        Some(words) => match case.refusal.iter().find(|part| !words.contains(part.as_str())) {
            None => Ok(()),
            Some(part) => bail!("{}: the refusal lacks {part:?}: {words}", case.kind),
        },
    }
}

/// Installs the definitions that the cases are judged by.
pub async fn install(client: &Client) -> Result<()> {
    let definitions: Result<Vec<DynamicObject>, _> = CRDS
        .iter()
        .map(|crd| serde_json::from_value(serde_json::to_value(crd)?))
        .collect();
    manifests::install_crds(client, definitions?).await
}

/// Asks for every case, and looks whether every rule of the kinds has been seen to accept and to refuse.
async fn run(prefix: &str, cases: Vec<Case>) -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let (namespace, client) = (plane.namespace(prefix).await?, plane.client().await?);
    install(&client).await?;
    let made = make(&client, &namespace, &cases).await?;
    let answers = stream::iter(&cases)
        .map(|case| answer(&client, &namespace, &made, case))
        .buffer_unordered(PARALLEL);
    let answers: Vec<Answer> = tokio::time::timeout(TIMEOUT, answers.try_collect())
        .await
        .context("the cases took too long")??;
    for ((kind, _), object) in &made {
        let (api, _) = api(&client, &namespace, kind);
        api.delete(&object.name_any(), &DeleteParams::default()).await?;
    }
    let wrong = answers
        .iter()
        .filter_map(|(case, answer)| check(case, answer.as_deref()).err());
    let mut faults: Vec<_> = wrong.map(|fault| format!("{fault:#}")).collect();
    faults.extend(coverage::missing(&answers));
    anyhow::ensure!(
        faults.is_empty(),
        "{} faults in {} cases:\n{}",
        faults.len(),
        cases.len(),
        faults.join("\n")
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_and_machine_sets_are_judged_by_the_api_server() -> Result<()> {
    run("admission-openshift", openshift::cases()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn azure_pools_and_clusters_are_judged_by_the_api_server() -> Result<()> {
    run("admission-azure", azure::cases()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn vsphere_machines_and_clusters_are_judged_by_the_api_server() -> Result<()> {
    run("admission-vsphere", vsphere::cases()).await
}

/// The API server publishes a new definition's documentation a moment after it serves it.
async fn explain(plane: &ControlPlane, name: &str) -> String {
    loop {
        match plane.kubectl(&["explain", name]).await {
            Ok(text) => return text,
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_explains_and_gets_every_kind() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("kubectl").await?;
    let run = async {
        let mut names = Vec::new();
        for crd in capstan_api::crds() {
            let name = format!("{}.{}", crd.spec.names.plural, crd.spec.group);
            let explained = explain(&plane, &name).await;
            assert!(
                explained.contains(&crd.spec.names.kind) && explained.contains("spec"),
                "{name}: {explained}"
            );
            names.push(name);
            names.extend(crd.spec.names.short_names.iter().flatten().cloned());
        }
        names.push("cluster-api".to_owned());
        plane
            .kubectl(&["get", &names.join(","), "-n", &namespace, "-o", "wide"])
            .await
    };
    tokio::time::timeout(TIMEOUT, run)
        .await
        .context("kubectl took too long")??;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_get_tells_how_a_machine_is_doing() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("columns").await?;
    let client = plane.client().await?;
    let mut pool_machine = AzureMachinePoolMachine::new("pool-0", Default::default());
    pool_machine.spec.provider_id = "azure:///pool/0".to_owned();
    let api: Api<AzureMachinePoolMachine> = Api::namespaced(client, &namespace);
    api.create(&PostParams::default(), &pool_machine).await?;
    let status = json!({ "status": {
        "version": "v1.36.3", "ready": true, "provisioningState": "Succeeded", "latestModelApplied": true,
        "nodeRef": { "name": "node-7" },
    } });
    api.patch_status("pool-0", &Default::default(), &Patch::Merge(status))
        .await?;
    let shown = plane.kubectl(&["get", "ampm", "-n", &namespace]).await?;
    for word in [
        "VERSION",
        "v1.36.3",
        "STATE",
        "Succeeded",
        "LATEST",
        "true",
        "NODE",
        "node-7",
        "AGE",
    ] {
        assert!(shown.contains(word), "{word} is not in:\n{shown}");
    }
    Ok(())
}
