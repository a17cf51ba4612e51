//! Admission beside that of machine-api-operator, which knows fewer fields.

use std::sync::Arc;

use super::*;

use axum::routing::post;
use axum::{Json, Router};
use capstan_api::openshift::MachineSet;
use capstan_kube::webhook::{Address, Error, Hook, Place, Proof};
use futures::future::BoxFuture;
use kube::api::PostParams;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};

/// The name of the operator's configuration: the API server asks in the order of names, so it comes after Capstan's.
const OPERATORS: &str = "machine-api";
/// An unknown field, by which a test sees that the operator's admission is asked.
const UNKNOWN: &str = "fieldOfNobody";
const DISK_FIELDS: [&str; 6] = [
    "nameSuffix",
    "diskSizeGB",
    "managedDisk",
    "lun",
    "cachingType",
    "deletionPolicy",
];

/// A stand-in for the operator's mutating admission: it reads the provider spec into the types that it knows, and writes it
/// back.
struct Operator;

fn without_unknown_fields(mut value: Value) -> Value {
    let keep = |object: Option<&mut Value>, known: &[&str]| {
        if let Some(fields) = object.and_then(Value::as_object_mut) {
            fields.retain(|name, _| known.contains(&name.as_str()));
        }
    };
    for disk in value["dataDisks"].as_array_mut().into_iter().flatten() {
        keep(Some(disk), &DISK_FIELDS);
    }
    keep(value.pointer_mut("/osDisk/diskSettings"), &["ephemeralStorageLocation"]);
    value.as_object_mut().map(|fields| fields.remove(UNKNOWN));
    value
}

async fn mutate(Json(review): Json<AdmissionReview<DynamicObject>>) -> Json<AdmissionReview<DynamicObject>> {
    let request: AdmissionRequest<DynamicObject> = review.try_into().unwrap();
    let response = AdmissionResponse::from(&request);
    let object = serde_json::to_value(&request.object).unwrap();
    let paths = ["/spec/providerSpec/value", "/spec/template/spec/providerSpec/value"];
    let found = paths.iter().find_map(|path| Some((path, object.pointer(path)?)));
    let (path, value) = found.unwrap();
    let patch = json!([{"op": "replace", "path": path, "value": without_unknown_fields(value.clone())}]);
    let patched = response.with_patch(serde_json::from_value(patch).unwrap()).unwrap();
    Json(patched.into_review())
}

impl Hook for Operator {
    fn routes(&self, _: &Proof) -> Router {
        Router::new().route("/mutate-operator", post(mutate))
    }

    fn register<'a>(&'a self, client: &'a kube::Client, place: Place<'a>) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let Address::Url(host) = place.address else {
                return Ok(());
            };
            let bundle = k8s_openapi::ByteString(place.bundle.as_bytes().to_vec());
            let webhook = json!({"name": "default.machine.machine.openshift.io", "admissionReviewVersions": ["v1"],
                "clientConfig": {"url": format!("https://{host}/mutate-operator"), "caBundle": bundle},
                "sideEffects": "None", "failurePolicy": "Fail", "rules": [{"apiGroups": ["machine.openshift.io"],
                    "apiVersions": ["v1beta1"], "operations": ["CREATE"], "resources": ["machines", "machinesets"]}]});
            let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration", "metadata": {"name": OPERATORS}, "webhooks": [webhook]});
            let api: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
            let params = PatchParams::apply("operator").force();
            let patched = api.patch(OPERATORS, &params, &Patch::Apply(configuration)).await;
            patched.map_err(capstan_kube::Error::from)?;
            Ok(())
        })
    }

    fn remove<'a>(&'a self, _client: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

/// A cluster of OpenShift with Capstan's admission. It is one of its own: the others are not OpenShift.
async fn openshift() -> Result<World> {
    drop(ControlPlane::shared().await?);
    let plane = ControlPlane::start(capstan_testkit::Options::default()).await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("webhook").await?;
    let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "infrastructures.config.openshift.io"}, "spec": {
        "group": "config.openshift.io", "scope": "Cluster",
        "names": {"kind": "Infrastructure", "plural": "infrastructures", "singular": "infrastructure"},
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open}}]}});
    let infrastructure = json!({"apiVersion": "config.openshift.io/v1", "kind": "Infrastructure",
        "metadata": {"name": "cluster"},
        "status": {"infrastructureName": "ocp-x7", "platformStatus": {"type": "Azure"}}});
    let world = World::within(plane, namespace).await?;
    world.apply(&definition).await?;
    let crd = "crd/infrastructures.config.openshift.io";
    world
        .plane
        .kubectl(&["wait", "--for=condition=Established", "--timeout=120s", crd])
        .await?;
    world.apply(&infrastructure).await?;
    world.serve(&world.context);
    world.registered().await?;
    Ok(world)
}

fn set(value: Value) -> Value {
    json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": "told"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"providerSpec": {"value": value}}},
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn on_openshift_kubectl_is_told_of_fields_that_the_operators_admission_drops() -> Result<()> {
    let world = openshift().await?;
    let operator = server::Options {
        secret_namespace: None,
        ..world.server()
    };
    tokio::spawn(server::run(world.another().await?, operator, vec![Arc::new(Operator)]));
    let dry = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let mut value = good();
    value[UNKNOWN] = json!(true);
    let probe: Machine = serde_json::from_value(machine("probe", value))?;
    let value_of = |machine: &Machine| machine.spec.provider_spec.value.clone().unwrap_or_default();
    let began = std::time::Instant::now();
    while !value_of(&world.machines().create(&dry, &probe).await?)[UNKNOWN].is_null() {
        assert!(
            began.elapsed() < support::PATIENCE,
            "the operator's admission was never asked"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    let create = async |object: &Value| {
        let file = world.dir.join("told.json");
        std::fs::write(&file, object.to_string())?;
        let path = file.display().to_string();
        let args = ["-n", &world.namespace, "create", "--warnings-as-errors", "-f", &path];
        world.plane.kubectl(&args).await
    };
    // The API server itself warns of the name of OpenShift's finalizer.
    let warned = create(&machine("good", good())).await.err().context("no warning")?;
    assert!(!warned.to_string().contains("machine-api-operator"), "{warned}");

    let mut value = good();
    value["dataDisks"][0]["diskIOPSReadWrite"] = json!(500);
    value["osDisk"]["cachingType"] = json!("ReadOnly");
    value["osDisk"]["diskSettings"] = json!({"ephemeralStorageLocation": "Local", "placement": "CacheDisk"});
    for object in [machine("told", value.clone()), set(value)] {
        let warned = create(&object).await.err().context("no warning")?.to_string();
        for dropped in [
            "providerSpec.dataDisks[0]: the admission of machine-api-operator drops diskIOPSReadWrite and diskMBpsReadWrite",
            "providerSpec.osDisk.diskSettings: the admission of machine-api-operator drops placement",
        ] {
            assert!(warned.contains(dropped), "{warned}");
        }
    }
    let sets: Api<MachineSet> = Api::namespaced(world.client.clone(), &world.namespace);
    let set = sets.get("told").await?.spec.template.spec.provider_spec.value;
    for stored in [value_of(&world.machines().get("told").await?), set.unwrap_or_default()] {
        assert_eq!(
            stored["dataDisks"][0]["diskIOPSReadWrite"],
            Value::Null,
            "it was dropped: {stored}"
        );
        assert_eq!(
            stored["osDisk"]["diskSettings"],
            json!({"ephemeralStorageLocation": "Local"})
        );
        assert_eq!(stored["dataDisks"][0]["nameSuffix"], "etcd");
    }
    world.end().await
}
