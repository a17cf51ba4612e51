//! What the API server itself accepts and refuses: every rule in the definitions, on a real kube-apiserver, with
//! the words of the answer.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod azure;
mod openshift;
mod vsphere;

use anyhow::{Context, Result, bail};
use capstan_api::{azure::AzureMachinePoolMachine, crds};
use capstan_testkit::ControlPlane;
use futures::{StreamExt, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PostParams},
};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
    time::Duration,
};

/// For all cases of one group together; they take a few seconds.
const TIMEOUT: Duration = Duration::from_secs(120);
const PARALLEL: usize = 8;

/// One object, as it was and as it is to be, and the API server's answer.
pub struct Case {
    kind: &'static str,
    name: Option<&'static str>,
    before: Option<Value>,
    spec: Value,
    /// Parts of the refusal, all of which must be there; none when it is accepted.
    refusal: Vec<String>,
}

/// A spec that is created.
pub fn creating(kind: &'static str, spec: Value) -> Case {
    Case {
        kind,
        name: None,
        before: None,
        spec,
        refusal: Vec::new(),
    }
}

/// A spec that takes the place of another.
pub fn changing(kind: &'static str, before: Value, spec: Value) -> Case {
    Case {
        kind,
        name: None,
        before: Some(before),
        spec,
        refusal: Vec::new(),
    }
}

impl Case {
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    pub fn refused(mut self, parts: &[&str]) -> Self {
        self.refusal = parts.iter().map(|part| (*part).to_owned()).collect();
        self
    }
}

/// `base` with the value at a JSON pointer replaced, or removed when it is null; missing objects are made.
pub fn with(base: &Value, pointer: &str, value: Value) -> Value {
    let mut changed = base.clone();
    let mut keys: Vec<_> = pointer.split('/').skip(1).collect();
    let last = keys.pop().expect("a pointer to a field");
    let mut node = &mut changed;
    for key in keys {
        node = match node {
            Value::Array(list) => &mut list[key.parse::<usize>().expect("an index")],
            _ => node
                .as_object_mut()
                .expect("an object")
                .entry(key)
                .or_insert_with(|| json!({})),
        };
    }
    let fields = node.as_object_mut().expect("an object");
    match value {
        Value::Null => _ = fields.remove(last),
        value => _ = fields.insert(last.to_owned(), value),
    }
    changed
}

/// Made once: schemas of fourteen kinds take a while without optimisation.
static CRDS: LazyLock<Vec<CustomResourceDefinition>> = LazyLock::new(crds);

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

/// The API server's words, or nothing when it accepts.
async fn answer(client: &Client, namespace: &str, made: &Made, case: &Case) -> Result<Option<String>> {
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
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message)),
        Err(other) => Err(other.into()),
    }
}

async fn check(client: &Client, namespace: &str, made: &Made, case: &Case) -> Result<()> {
    let answer = answer(client, namespace, made, case).await?;
    match &answer {
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

async fn run(prefix: &str, cases: Vec<Case>) -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace(prefix).await?;
    let client = plane.client().await?;
    let made = make(&client, &namespace, &cases).await?;
    let answers = stream::iter(&cases)
        .map(|case| check(&client, &namespace, &made, case))
        .buffer_unordered(PARALLEL);
    let faults = answers
        .filter_map(async |answer| answer.err().map(|fault| format!("{fault:#}")))
        .collect::<Vec<_>>();
    let faults = tokio::time::timeout(TIMEOUT, faults)
        .await
        .context("the cases took too long")?;
    for ((kind, _), object) in &made {
        let (api, _) = api(&client, &namespace, kind);
        api.delete(&object.name_any(), &DeleteParams::default()).await?;
    }
    anyhow::ensure!(
        faults.is_empty(),
        "{} of {} cases:\n{}",
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

/// All rules below a schema, as the text that their refusal shows.
fn rules(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(fields) => {
            for rule in fields
                .get("x-kubernetes-validations")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
            {
                let message = rule["message"].as_str().unwrap_or_default();
                let path = rule["fieldPath"].as_str().unwrap_or_default();
                // A message made from the object is looked for by its fixed end.
                let spoken = rule["messageExpression"].as_str().map(|_| "Allowed values are: 'None'");
                found.insert(format!("{path}|{}", spoken.unwrap_or(message)));
            }
            fields.values().for_each(|value| rules(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| rules(value, found)),
        _ => {}
    }
}

#[test]
fn every_rule_has_a_case_that_it_refuses() {
    let cases: Vec<_> = [openshift::cases(), azure::cases(), vsphere::cases()]
        .into_iter()
        .flatten()
        .collect();
    let mut count = 0;
    for crd in CRDS.iter() {
        let kind = &crd.spec.names.kind;
        let mut found = BTreeSet::new();
        rules(&serde_json::to_value(&crd.spec.versions[0].schema).unwrap(), &mut found);
        for rule in &found {
            let (path, message) = rule.split_once('|').unwrap();
            let field = path.rsplit('.').next().unwrap_or_default();
            let covered = cases.iter().filter(|case| case.kind == kind).any(|case| {
                let words = case.refusal.join(" ");
                words.contains(message) && words.contains(field)
            });
            assert!(covered, "{kind}: no case is refused by the rule at {path:?}: {message}");
        }
        count += found.len();
    }
    assert!(count > 60, "only {count} rules were found");
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
        for crd in CRDS.iter() {
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
