//! The Helm charts: lint, schema, and the same objects as the kustomize variants of deploy/.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, Options, parts};
use serde_json::{Value, json};

use crate::deploy::{build, named};
use crate::program::scratch;

/// Runs helm; returns its output, or an error with what it wrote.
async fn helm(args: &[&str]) -> Result<String> {
    let helm = tokio::task::spawn_blocking(|| parts::HELM.path()).await??;
    let home = scratch("helm-home");
    let charts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../charts");
    let out = Command::new(helm)
        .args(args)
        .current_dir(charts)
        .env("HELM_CACHE_HOME", home.join("cache"))
        .env("HELM_CONFIG_HOME", home.join("config"))
        .env("HELM_DATA_HOME", home.join("data"))
        .output()?;
    let text = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "helm {}: {text}", args.join(" "));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Returns the objects of a chart with these values.
async fn template(chart: &str, values: &[&str]) -> Result<Vec<Value>> {
    let mut args = vec!["template", "capstan", chart, "--namespace", "capstan-system"];
    for value in values {
        args.extend(["--set", value]);
    }
    Ok(serde_saphyr::from_multiple(&helm(&args).await?)?)
}

/// Sorts lists whose items have names: the order of variables and volumes has no meaning, and kustomize has its own.
fn sort_named(value: &mut Value) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(sort_named),
        Value::Array(items) => {
            items.iter_mut().for_each(sort_named);
            if items.iter().all(|item| item["name"].is_string()) {
                items.sort_by_key(|item| item["name"].to_string());
            }
        }
        _ => {}
    }
}

/// Returns the objects by kind, namespace and name.
fn sorted(mut objects: Vec<Value>) -> BTreeMap<String, Value> {
    objects.iter_mut().for_each(sort_named);
    let name = |object: &Value| {
        let meta = &object["metadata"];
        format!("{} {}/{}", object["kind"], meta["namespace"], meta["name"])
    };
    objects.into_iter().map(|object| (name(&object), object)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_chart_renders_the_objects_of_every_kustomize_variant() -> Result<()> {
    let off =
        |names: &[&str]| -> Vec<String> { names.iter().map(|name| format!("controllers.{name}=false")).collect() };
    let variants = [
        ("", vec![]),
        ("overlays/azure-pools", off(&["openshift", "vsphere"])),
        ("overlays/azure-pools-beside-capz", {
            let mut values = off(&["openshift", "vsphere"]);
            values.push("azure.azureJson=true".to_owned());
            values
        }),
        ("overlays/vsphere", off(&["openshift", "azurePools"])),
        ("overlays/vsphere-after-capv", {
            let mut values = off(&["openshift", "azurePools"]);
            values.push("holdLeases={capv-system/capv-controller-manager-runtime}".to_owned());
            values
        }),
        ("overlays/openshift", {
            let mut values = off(&["azurePools", "vsphere"]);
            values.push("namespace=openshift-machine-api".to_owned());
            values.push("openshift.platform=true".to_owned());
            values
        }),
    ];
    for (variant, values) in variants {
        let mut values: Vec<&str> = values.iter().map(String::as_str).collect();
        values.push("createNamespace=true");
        let (ours, theirs) = (
            sorted(template("capstan", &values).await?),
            sorted(build(variant).await?),
        );
        let (left, right): (Vec<_>, Vec<_>) = (ours.keys().collect(), theirs.keys().collect());
        assert_eq!(left, right, "{variant:?}");
        for (name, object) in theirs {
            assert_eq!(ours[&name], object, "{variant:?}: {name}");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_charts_pass_lint_and_their_schema_refuses_wrong_values() -> Result<()> {
    for chart in ["capstan", "capstan-crds"] {
        helm(&["lint", "--strict", chart]).await?;
    }
    let wrong = [
        "replicas=two",
        "controllers.openShift=true",
        "image.digest=latest",
        "extraArgs={run}",
        "namespace=Team_A",
        "holdLeases={capv-controller-manager-runtime}",
        "azure.azureJson=yes",
    ];
    for value in wrong {
        let refused = template("capstan", &[value]).await.err().context(value)?.to_string();
        let field = value.split(['=', '.']).next().unwrap_or_default();
        ensure!(refused.contains(field), "{value}: {refused}");
    }
    let off = ["openshift", "azurePools", "vsphere"].map(|name| format!("controllers.{name}=false"));
    let refused = template("capstan", &off.each_ref().map(String::as_str)).await;
    let refused = refused.err().context("no controller at all")?.to_string();
    ensure!(refused.contains("turn at least one controller on"), "{refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_accepts_the_charts_with_their_options() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let dir = scratch("charts");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("objects.json");
    let path = file.display().to_string();
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "capstan-system"}});
    let apply = async |objects: &[Value], dry: &str| {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(&file, list.to_string())?;
        plane
            .kubectl(&["apply", "--server-side", "--force-conflicts", dry, "-f", &path])
            .await
    };
    apply(&[namespace], "--dry-run=none").await?;
    let options = [
        "azure.workloadIdentity=true",
        "image.digest=sha256:0000000000000000000000000000000000000000000000000000000000000000",
        "podLabels.team=a",
        "podAnnotations.a=b",
        "serviceAccountAnnotations.a=b",
        "priorityClassName=system-cluster-critical",
        "nodeSelector.a=b",
        "env[0].name=AZURE_ENVIRONMENT",
        "env[0].value=AzurePublicCloud",
        "extraArgs={--resync=5m}",
        "resources.limits.memory=1Gi",
        "podDisruptionBudget.enabled=false",
        "networkPolicy.enabled=false",
    ];
    let objects = template("capstan", &options).await?;
    apply(&objects, "--dry-run=server").await?;
    let deployment = named(&objects, "Deployment", "capstan").context("no Deployment")?;
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    ensure!(
        container["args"]
            .as_array()
            .is_some_and(|args| args.contains(&json!("--resync=5m"))),
        "{container}"
    );
    let mounts = container["volumeMounts"].to_string();
    ensure!(
        mounts.contains("/var/run/secrets/azure/tokens") && mounts.contains("serviceaccount"),
        "{mounts}"
    );
    let off = template("capstan", &["azure.workloadIdentity=false"]).await?;
    let off = named(&off, "Deployment", "capstan").context("no Deployment")?;
    ensure!(!off.to_string().contains("azure-identity-token"), "{off}");
    for kind in ["PodDisruptionBudget", "NetworkPolicy"] {
        ensure!(named(&objects, kind, "capstan").is_none(), "{kind} is off");
    }
    let monitoring = template(
        "capstan",
        &[
            "serviceMonitor.enabled=true",
            "prometheusRule.enabled=true",
            "prometheusRule.runbooks=https://docs.internal/capstan/runbooks.html",
            "dashboards.enabled=true",
        ],
    )
    .await?;
    let rules = named(&monitoring, "PrometheusRule", "capstan")
        .context("no PrometheusRule")?
        .to_string();
    ensure!(
        rules.contains("https://docs.internal/capstan/runbooks.html#capstanhasnoleader")
            && !rules.contains("example.com"),
        "{rules}"
    );
    for kind in ["ServiceMonitor", "PrometheusRule", "ConfigMap"] {
        ensure!(monitoring.iter().any(|object| object["kind"] == kind), "no {kind}");
    }

    let definitions = template("capstan-crds", &[]).await?;
    ensure!(definitions.len() == capstan_api::crds().len());
    apply(&definitions, "--dry-run=server").await?;
    let some = template("capstan-crds", &["azure=false", "vsphere=false", "keep=false"]).await?;
    let groups: Vec<_> = some.iter().map(|object| object["spec"]["group"].clone()).collect();
    ensure!(groups == ["machine.openshift.io", "machine.openshift.io"], "{groups:?}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// Definitions of the Prometheus operator, as far as the API server needs them to take objects.
const MONITORING: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  names: {kind: KIND, plural: PLURAL}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
";

#[tokio::test(flavor = "multi_thread")]
async fn helm_installs_upgrades_and_uninstalls_the_packages_and_definitions_stay() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let dir = scratch("charts-installed");
    std::fs::create_dir_all(&dir)?;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let folder = dir.display().to_string();
    helm(&["package", "capstan", "capstan-crds", "--destination", &folder]).await?;
    let package = |chart: &str| format!("{folder}/{chart}-0.1.0.tgz");
    for (kind, plural) in [
        ("ServiceMonitor", "servicemonitors"),
        ("PrometheusRule", "prometheusrules"),
    ] {
        let file = dir.join("definition.yaml");
        std::fs::write(&file, MONITORING.replace("PLURAL", plural).replace("KIND", kind))?;
        plane.kubectl(&["apply", "-f", &file.display().to_string()]).await?;
        let crd = format!("crd/{plural}.monitoring.coreos.com");
        plane.kubectl(&["wait", "--for=condition=Established", &crd]).await?;
    }
    let there = ["--namespace", "capstan-system", "--kubeconfig", &kubeconfig];
    let (definitions, program) = (package("capstan-crds"), package("capstan"));
    let install = ["install", "capstan-crds", &definitions, "--create-namespace"];
    helm(&[&install[..], &there].concat()).await?;
    let values = "serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true";
    helm(&[&["install", "capstan", &program, "--set", values][..], &there].concat()).await?;
    let read = async |what: &[&str]| plane.kubectl(&[&["get", "-n", "capstan-system"], what].concat()).await;
    let converted = "jsonpath={.spec.conversion.webhook.clientConfig.service.namespace}";
    let crd = "crd/vspherevms.infrastructure.cluster.x-k8s.io";
    ensure!(read(&[crd, "-o", converted]).await? == "capstan-system");
    read(&["servicemonitor/capstan", "prometheusrule/capstan", "deployment/capstan"]).await?;

    helm(&[&["upgrade", "capstan-crds", &definitions][..], &there].concat()).await?;
    ensure!(read(&[crd, "-o", converted]).await? == "capstan-system");
    helm(&[&["upgrade", "capstan", &program, "--set", "replicas=3"][..], &there].concat()).await?;
    ensure!(read(&["deployment/capstan", "-o", "jsonpath={.spec.replicas}"]).await? == "3");
    ensure!(
        read(&["servicemonitors", "-o", "name"]).await?.is_empty(),
        "it is off now"
    );

    for release in ["capstan", "capstan-crds"] {
        helm(&[&["uninstall", release][..], &there].concat()).await?;
    }
    ensure!(
        read(&["deployments,clusterroles", "-o", "name"])
            .await?
            .lines()
            .all(|name| !name.contains("capstan"))
    );
    let kept = read(&["crds", "-o", "name"]).await?;
    let kept = kept.lines().filter(|name| !name.contains("monitoring")).count();
    ensure!(kept == capstan_api::crds().len(), "{kept} definitions are left");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
