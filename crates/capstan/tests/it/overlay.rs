//! The overlay for OpenShift, on a cluster that says of itself that it is one: Capstan takes the leases and makes a machine with
//! exactly the rights of the overlay. It reaches Azure by its public names, through the cluster's proxy alone.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use capstan_sim::azure::{Azure, Config, joiner};
use capstan_testkit::peers::tunnel_to;
use capstan_testkit::{ControlPlane, Options};
use serde_json::{Value, json};

use crate::deploy::build;
use crate::program::{LIMIT, Started, build_parts, capstan, kubectl, kubectl_until, scratch, signal, until, wait};
use crate::rights::{ACCOUNT, audit, right};

const MACHINES: &str = "openshift-machine-api";
const HOLDER: &str = "capstan/capstan-system/capstan";
const WEBHOOK: &str = "capstan-machine-api-openshift-machine-api";
const LEASES: [&str; 3] = [
    "cluster-api-provider-azure-leader",
    "cluster-api-provider-machineset-leader",
    "cluster-api-provider-nodelink-leader",
];

/// Whether an object of the overlay is there before Capstan's pod starts.
fn comes_first(object: &Value) -> bool {
    matches!(
        object["kind"].as_str(),
        Some(
            "Namespace"
                | "ServiceAccount"
                | "Role"
                | "RoleBinding"
                | "ClusterRole"
                | "ClusterRoleBinding"
                | "Secret"
                | "MutatingWebhookConfiguration"
                | "ValidatingWebhookConfiguration"
        )
    )
}

/// The cluster as OpenShift's installer leaves it, as far as Capstan reads it.
fn openshift() -> [Value; 3] {
    let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": MACHINES}});
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "infrastructures.config.openshift.io"},
        "spec": {
            "group": "config.openshift.io", "scope": "Cluster",
            "names": {"kind": "Infrastructure", "plural": "infrastructures", "singular": "infrastructure"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": open}}],
        },
    });
    let platform =
        json!({"type": "Azure", "azure": {"resourceGroupName": "capstan", "networkResourceGroupName": "capstan"}});
    let infrastructure = json!({
        "apiVersion": "config.openshift.io/v1", "kind": "Infrastructure", "metadata": {"name": "cluster"},
        "status": {"infrastructureName": "ocp-x7", "platformStatus": platform},
    });
    [namespace, definition, infrastructure]
}

fn machine() -> Value {
    let value = json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "AzureMachineProviderSpec", "vmSize": "Standard_D4s_v3",
        "vnet": "capstan-vnet", "subnet": "worker-subnet", "zone": "1",
        "image": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        "userDataSecret": {"name": "worker-user-data"}, "credentialsSecret": {"name": "azure-cloud-credentials"},
    });
    json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine",
        "metadata": {"name": "m", "namespace": MACHINES, "labels": {"machine.openshift.io/cluster-api-cluster": "ocp-x7"}},
        "spec": {"providerSpec": {"value": value}},
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_rights_of_the_overlay_capstan_takes_the_leases_and_makes_a_machine() -> Result<()> {
    build_parts().await?;
    let dir = scratch("overlay");
    std::fs::create_dir_all(&dir)?;
    let (policy, log) = (dir.join("policy.yaml"), dir.join("audit.log"));
    std::fs::write(
        &policy,
        "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n",
    )?;
    let plane = ControlPlane::start(Options {
        dir: Some(dir.join("plane")),
        apiserver_flags: vec![
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", log.display()),
        ],
        ..Options::default()
    })
    .await?;
    plane.install_crds().await?;
    let kubeconfig = plane.kubeconfig().to_owned();
    let apply = async |objects: &[Value]| {
        let file = dir.join("objects.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(&file, list.to_string())?;
        let path = file.display().to_string();
        kubectl(&kubeconfig, &["apply", "--server-side", "-f", &path]).await
    };
    let [namespace, definition, infrastructure] = openshift();
    apply(&[namespace, definition]).await?;
    let crd = "crd/infrastructures.config.openshift.io";
    kubectl(
        &kubeconfig,
        &["wait", "--for=condition=Established", "--timeout=120s", crd],
    )
    .await?;
    apply(&[infrastructure]).await?;
    let objects = build("overlays/openshift").await?;
    let (namespaces, first): (Vec<Value>, Vec<Value>) = objects
        .into_iter()
        .filter(comes_first)
        .partition(|object| object["kind"] == "Namespace");
    apply(&namespaces).await?;
    apply(&first).await?;
    let sim = Azure::start(Config {
        joiner: Some(joiner::Options::client(plane.client().await?)),
        public_hosts: true,
        ..Config::quick()
    })
    .await?;
    let secret = |name: &str, data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": MACHINES}, "stringData": data});
    let credentials = json!({"azure_subscription_id": sim.subscription, "azure_tenant_id": sim.tenant,
        "azure_client_id": sim.client_id, "azure_client_secret": sim.client_secret, "azure_region": "eastus"});
    let user_data = json!({"userData": r#"{"ignition":{"version":"3.2.0"}}"#});
    apply(&[
        secret("azure-cloud-credentials", credentials),
        secret("worker-user-data", user_data),
    ])
    .await?;

    let text = std::fs::read_to_string(&kubeconfig)?;
    let text = text.replace("user:\n", &format!("user:\n    as: {ACCOUNT}\n"));
    let text = text.replace("context:\n", "context:\n    namespace: capstan-system\n");
    ensure!(text.contains(ACCOUNT), "no user to impersonate with:\n{text}");
    let (account, said) = (dir.join("account.kubeconfig"), dir.join("run.log"));
    std::fs::write(&account, text)?;
    let child = capstan()
        .args([
            "run",
            "--controllers=openshift",
            "--namespace=openshift-machine-api",
            "--log-format",
            "json",
        ])
        .args(["--health", "0", "--metrics", "0", "--webhook", "127.0.0.1:0"])
        .args(["--webhook-service", "capstan-system/capstan-webhook", "--kubeconfig"])
        .arg(&account)
        // As the overlay's ConfigMaps say: the proxy, what needs none, and the certificates that the cluster trusts.
        .env("HTTPS_PROXY", tunnel_to(sim.address).await?)
        .env("NO_PROXY", "127.0.0.1")
        .env("SSL_CERT_FILE", &sim.ca_file)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&said)?)
        .spawn()?;
    let mut child = Started(child);
    let said = || std::fs::read_to_string(&said).unwrap_or_default();
    until(|| said().contains("\"message\":\"starting\"")).with_context(said)?;
    let bundle = "jsonpath={.webhooks[*].clientConfig.caBundle}";
    for kind in ["mutating", "validating"] {
        let kind = format!("{kind}webhookconfiguration/{WEBHOOK}");
        let get = ["get", &kind, "-o", bundle];
        kubectl_until(&kubeconfig, &get, |text| !text.is_empty())
            .await
            .with_context(said)?;
        // Nobody serves the Service here.
        kubectl(&kubeconfig, &["delete", &kind]).await?;
    }
    for lease in LEASES {
        let lease = format!("lease/{lease}");
        let get = ["get", &lease, "-n", MACHINES, "-o", "jsonpath={.spec.holderIdentity}"];
        kubectl_until(&kubeconfig, &get, |holder| holder == HOLDER)
            .await
            .with_context(said)?;
    }
    apply(&[machine()]).await?;
    let name = "machine.machine.openshift.io/m";
    let phase = ["get", name, "-n", MACHINES, "-o", "jsonpath={.status.phase}"];
    kubectl_until(&kubeconfig, &phase, |phase| phase == "Running")
        .await
        .with_context(said)?;
    kubectl(&kubeconfig, &["delete", name, "-n", MACHINES, "--wait=false"]).await?;
    let rest = ["get", name, "-n", MACHINES, "-o", "name", "--ignore-not-found"];
    kubectl_until(&kubeconfig, &rest, str::is_empty)
        .await
        .with_context(said)?;
    ensure!(sim.ids("virtualMachines").is_empty() && sim.ids("networkInterfaces").is_empty());
    signal(&child.0, "-TERM")?;
    ensure!(wait(&mut child.0, LIMIT)?.success(), "{}", said());
    drop(plane);

    let audit = audit(&log)?;
    ensure!(
        audit.refused.is_empty(),
        "rights are missing:\n{}",
        audit.refused.join("\n")
    );
    for (group, resource, verbs) in [
        ("config.openshift.io", "infrastructures", ["get", "list", "watch"]),
        ("coordination.k8s.io", "leases", ["get", "create", "update"]),
    ] {
        for verb in verbs {
            ensure!(
                audit.used.contains(&right(group, resource, verb)),
                "{verb} {resource} is not used"
            );
        }
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
