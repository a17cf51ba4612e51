//! deploy/ as users apply it: every variant builds, the API server accepts it, and its rights are narrow.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, parts};
use serde_json::{Value, json};

use crate::program::scratch;

const NAMESPACES: [&str; 3] = ["capstan-system", "openshift-machine-api", "capv-system"];
/// What users apply.
const VARIANTS: [&str; 6] = [
    "",
    "overlays/azure-pools",
    "overlays/azure-pools-beside-capz",
    "overlays/vsphere",
    "overlays/vsphere-after-capv",
    "overlays/openshift",
];

/// Kinds that kube-apiserver alone does not serve.
const ONLY_ON_OPENSHIFT: [&str; 2] = ["ServiceMonitor", "PrometheusRule"];

fn folder(variant: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(variant)
}

/// Returns the objects of a variant, as kustomize builds them.
pub async fn build(variant: &str) -> Result<Vec<Value>> {
    let kubectl = tokio::task::spawn_blocking(|| parts::KUBECTL.path()).await??;
    let out = Command::new(kubectl).arg("kustomize").arg(folder(variant)).output()?;
    ensure!(
        out.status.success(),
        "{variant}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(serde_saphyr::from_multiple(&String::from_utf8_lossy(&out.stdout))?)
}

pub fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

fn strings(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Returns the rules of all roles.
fn rules(objects: &[Value]) -> impl Iterator<Item = &Value> {
    let roles = objects
        .iter()
        .filter(|object| matches!(object["kind"].as_str(), Some("Role" | "ClusterRole")));
    roles.flat_map(|role| role["rules"].as_array().into_iter().flatten())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_variant_has_a_wildcard_or_a_right_on_foreign_webhooks_and_one_namespace_gets_a_role() -> Result<()> {
    for variant in VARIANTS {
        let objects = build(variant).await?;
        for rule in rules(&objects) {
            for field in ["apiGroups", "resources", "verbs", "nonResourceURLs"] {
                ensure!(!strings(&rule[field]).contains(&"*"), "{variant}: a wildcard in {rule}");
            }
            let (resources, verbs) = (strings(&rule["resources"]), strings(&rule["verbs"]));
            // Capstan creates these itself, and names those that it deletes in one call by the ids of their VMs.
            let own = resources == ["azuremachinepoolmachines"];
            ensure!(own || !verbs.contains(&"deletecollection"), "{variant}: {rule}");
            let webhooks = resources
                .iter()
                .any(|resource| resource.ends_with("webhookconfigurations"));
            let named = !strings(&rule["resourceNames"]).is_empty();
            ensure!(!webhooks || named, "{variant}: any webhook configuration: {rule}");
            // Only those who may delete a Secret may give it an owner, and the Secret of a vCenter is its cluster's.
            let owns = variant.is_empty() || variant.starts_with("overlays/vsphere");
            let written = verbs
                .iter()
                .any(|verb| matches!(*verb, "create" | "update") || *verb == "delete" && !owns);
            // Secrets of pools, whose names depend on the pools.
            let makes = variant.ends_with("beside-capz") && verbs == ["create", "update"];
            ensure!(
                !resources.contains(&"secrets") || named || makes || !written,
                "{variant}: {rule}"
            );
            ensure!(!resources.contains(&"configmaps"), "{variant}: {rule}");
            // Only whether the controllers run that Capstan replaces.
            ensure!(
                !resources.contains(&"deployments") || named && verbs == ["list", "watch"],
                "{variant}: {rule}"
            );
        }
        let nodes = rules(&objects).any(|rule| strings(&rule["resources"]).contains(&"nodes"));
        let drains = variant.is_empty() || variant.ends_with("openshift");
        ensure!(
            nodes == drains,
            "{variant}: only OpenShift's machines are those of this cluster"
        );
    }
    let objects = build("overlays/openshift").await?;
    ensure!(named(&objects, "ClusterRole", "capstan-openshift").is_none());
    let role = named(&objects, "Role", "capstan-openshift").context("no Role")?;
    ensure!(role["metadata"]["namespace"] == "openshift-machine-api", "{role}");
    let binding = named(&objects, "RoleBinding", "capstan-openshift").context("no RoleBinding")?;
    ensure!(binding["roleRef"]["kind"] == "Role", "{binding}");
    // The name that `capstan run --namespace` gives them.
    let webhook = "capstan-machine-api-openshift-machine-api";
    for kind in ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"] {
        ensure!(named(&objects, kind, webhook).is_some(), "no {kind} {webhook}");
    }
    let names = rules(&objects).flat_map(|rule| strings(&rule["resourceNames"]));
    ensure!(names.into_iter().any(|name| name == webhook), "no right on {webhook}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_accepts_every_variant_and_its_pod_under_the_restricted_level() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let dir = scratch("deploy");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("objects.json");
    let path = file.display().to_string();
    let apply = async |objects: &[Value], dry: bool| {
        std::fs::write(
            &file,
            json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string(),
        )?;
        let dry = if dry { "--dry-run=server" } else { "--dry-run=none" };
        plane
            .kubectl(&["apply", "--server-side", "--force-conflicts", dry, "-f", &path])
            .await
    };
    for variant in VARIANTS {
        let objects = build(variant).await?;
        // Everything else is in a namespace, or nothing that the shared control plane should keep.
        let mut first: Vec<Value> = objects
            .iter()
            .filter(|object| matches!(object["kind"].as_str(), Some("Namespace" | "ServiceAccount")))
            .cloned()
            .collect();
        let others = NAMESPACES
            .iter()
            .filter(|name| named(&objects, "Namespace", name).is_none());
        first.splice(
            0..0,
            others.map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})),
        );
        apply(&first, false).await?;
        let served: Vec<Value> = objects
            .iter()
            .filter(|object| !ONLY_ON_OPENSHIFT.contains(&object["kind"].as_str().unwrap_or_default()))
            .cloned()
            .collect();
        apply(&served, true).await.with_context(|| variant.to_owned())?;
        let deployment = named(&objects, "Deployment", "capstan").context("no Deployment")?;
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "capstan", "namespace": "capstan-system"},
            "spec": deployment["spec"]["template"]["spec"],
        });
        apply(&[pod], true).await.context("the pod is refused")?;
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openshift_overlay_signs_in_with_the_token_that_it_mounts_and_waits_for_the_trusted_certificates()
-> Result<()> {
    let objects = build("overlays/openshift").await?;
    // Its alerts, without those that machine-api-operator has itself.
    let alerts = named(&objects, "PrometheusRule", "capstan").context("no PrometheusRule")?;
    let groups = alerts["spec"]["groups"].as_array().into_iter().flatten();
    let groups: Vec<&Value> = groups.map(|group| &group["name"]).collect();
    ensure!(groups == ["capstan", "ultra-disks"], "{groups:?}");
    let deployment = named(&objects, "Deployment", "capstan").context("no Deployment")?;
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let find = |list: &Value, name: &str| {
        let found = list
            .as_array()
            .into_iter()
            .flatten()
            .find(|one| one["name"] == name)
            .cloned();
        found.with_context(|| format!("no {name}"))
    };
    // A credentials Secret of OpenShift names this very file, and Capstan reads no other.
    let file = find(&container["env"], "AZURE_FEDERATED_TOKEN_FILE")?["value"].clone();
    let mount = find(&container["volumeMounts"], "azure-token")?["mountPath"].clone();
    let token = find(&pod["volumes"], "azure-token")?["projected"]["sources"][0]["serviceAccountToken"].clone();
    let mounted = format!(
        "{}/{}",
        mount.as_str().unwrap_or_default(),
        token["path"].as_str().unwrap_or_default()
    );
    ensure!(file == mounted.as_str(), "{file} is not {mounted}");
    ensure!(file == "/var/run/secrets/openshift/serviceaccount/token", "{file}");
    let items = find(&pod["volumes"], "trusted-ca")?["configMap"]["items"].clone();
    ensure!(
        items == json!([{"key": "ca-bundle.crt", "path": "ca-bundle.crt"}]),
        "{items}"
    );
    // ccoctl would let the identity trust an account of the Secret's namespace, where Capstan has none.
    let request = std::fs::read_to_string(folder("overlays/openshift/credentials-request.yaml"))?;
    let request: Value = serde_saphyr::from_str(&request)?;
    ensure!(request["spec"]["serviceAccountNames"].is_null(), "{request}");
    Ok(())
}

/// The steps of the page about OpenShift name what the overlay has.
#[tokio::test(flavor = "multi_thread")]
async fn the_openshift_overlay_runs_beside_the_controllers_that_it_replaces_and_is_scraped() -> Result<()> {
    let page = include_str!("../../../../docs/openshift.md");
    let objects = build("overlays/openshift").await?;
    let deployment = named(&objects, "Deployment", "capstan").context("no Deployment")?;
    let pod = &deployment["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    // Control plane nodes are there before any other machine.
    ensure!(
        pod["nodeSelector"] == json!({"node-role.kubernetes.io/master": ""}),
        "{pod}"
    );
    let tolerations = pod["tolerations"].as_array().context("no tolerations")?;
    for taint in ["control-plane", "master"] {
        let key = format!("node-role.kubernetes.io/{taint}");
        let tolerated = tolerations
            .iter()
            .any(|one| one["key"] == key.as_str() && one["operator"] == "Exists" && one["effect"] == "NoSchedule");
        ensure!(tolerated, "{key}: {tolerations:?}");
    }
    ensure!(
        strings(&container["args"]).contains(&"--namespace=openshift-machine-api"),
        "{container}"
    );
    let one = |list: &Value, name: &str| {
        let found = list.as_array().into_iter().flatten().find(|one| one["name"] == name);
        found.cloned().unwrap_or_default()
    };
    let token = one(&pod["volumes"], "azure-token")["projected"]["sources"][0]["serviceAccountToken"].clone();
    ensure!(
        token["audience"] == "openshift" && page.contains("--audiences openshift"),
        "{token}"
    );
    // The proxy is optional, the certificates are not.
    let proxy = json!([{"configMapRef": {"name": "capstan-proxy", "optional": true}}]);
    ensure!(container["envFrom"] == proxy, "{container}");
    ensure!(page.contains("create configmap capstan-proxy"));
    let (file, mount) = (
        one(&container["env"], "SSL_CERT_FILE"),
        one(&container["volumeMounts"], "trusted-ca"),
    );
    let folder = mount["mountPath"].as_str().unwrap_or_default();
    ensure!(file["value"] == format!("{folder}/ca-bundle.crt"), "{file}");
    let bundle = named(&objects, "ConfigMap", "capstan-trusted-ca").context("no ConfigMap")?;
    let injected = &bundle["metadata"]["labels"]["config.openshift.io/inject-trusted-cabundle"];
    ensure!(*injected == "true", "{bundle}");

    let account = named(&objects, "ServiceAccount", "capstan").context("no account")?;
    let namespace = account["metadata"]["namespace"].as_str().unwrap_or_default();
    ensure!(
        page.contains(&format!("--subject system:serviceaccount:{namespace}:capstan")),
        "{namespace}"
    );
    let leases = named(&objects, "Role", "capstan-openshift-leases").context("no Role")?;
    for lease in strings(&leases["rules"][0]["resourceNames"]) {
        ensure!(page.contains(&format!("| `{lease}` |")), "{lease}");
    }

    let monitor = named(&objects, "ServiceMonitor", "capstan").context("no ServiceMonitor")?;
    let port = &monitor["spec"]["endpoints"][0]["port"];
    let selected = &monitor["spec"]["selector"]["matchLabels"];
    let service = named(&objects, "Service", "capstan-metrics").context("no Service")?;
    ensure!(service["metadata"]["labels"] == *selected, "{service}");
    ensure!(service["spec"]["ports"][0]["name"] == *port, "{service}");
    let ports = one(&container["ports"], port.as_str().unwrap_or_default());
    ensure!(!ports.is_null(), "{container}");
    let watched = named(&objects, "Namespace", namespace).context("no Namespace")?;
    let label = &watched["metadata"]["labels"]["openshift.io/cluster-monitoring"];
    ensure!(
        *label == "true",
        "the cluster's Prometheus looks into labelled namespaces only: {watched}"
    );
    Ok(())
}
