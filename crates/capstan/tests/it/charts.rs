//! The Helm charts: lint, schema, and the same objects as the kustomize variants of deploy/.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, parts};
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
        ("overlays/vsphere", off(&["openshift", "azurePools"])),
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
