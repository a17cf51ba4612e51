//! `capstan run --azure-json` with the account and the rights of deploy/overlays/azure-pools-beside-capz, on a real API server.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, Options};
use serde_json::{Value, json};

use crate::deploy::build;
use crate::program::{LIMIT, Started, capstan, kubectl, kubectl_until, scratch, signal, wait};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const RIGHTS: [&str; 6] = [
    "Namespace",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
];

/// A pool that waits for its bootstrap data, and nothing that calls Azure: the client secret is enough.
fn objects() -> Vec<Value> {
    let group = "infrastructure.cluster.x-k8s.io";
    let identity = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": "sp"});
    vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}),
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "sp", "namespace": "team"},
            "stringData": {"clientSecret": "of-the-team"}}),
        json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": {"name": "sp", "namespace": "team"},
            "spec": {"type": "ServicePrincipal", "tenantID": "00000000-0000-0000-0000-000000000002",
                "clientID": "00000000-0000-0000-0000-000000000003",
                "clientSecret": {"name": "sp", "namespace": "team"}, "allowedNamespaces": {}}}),
        json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": {"name": "dock", "namespace": "team"},
            "spec": {"location": "eastus", "subscriptionID": "00000000-0000-0000-0000-000000000001", "identityRef": identity,
                "networkSpec": {"vnet": {"name": "yard"}, "subnets": [{"name": "nodes", "role": "node"}]}}}),
        json!({"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "metadata": {"name": "dock", "namespace": "team"},
            "spec": {"infrastructureRef": {"apiGroup": group, "kind": "AzureCluster", "name": "dock"}}}),
        json!({"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": {"name": "workers", "namespace": "team"},
            "spec": {"clusterName": "dock", "replicas": 1, "template": {"spec": {"clusterName": "dock", "version": "v1.36.0",
                "bootstrap": {"configRef": {"apiGroup": "bootstrap.cluster.x-k8s.io", "kind": "KubeadmConfig", "name": "workers"}},
                "infrastructureRef": {"apiGroup": group, "kind": "AzureMachinePool", "name": "workers"}}}}}),
        json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": {"name": "workers", "namespace": "team"},
            "spec": {"location": "eastus", "template": {"vmSize": "Standard_D2s_v3", "osDisk": {"osType": "Linux"},
                "sshPublicKey": ""}}}),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overlay_beside_capz_gives_the_rights_to_make_and_update_the_settings_of_nodes() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    plane.install_crds().await?;
    plane.install_cluster_api_crds().await?;
    let (dir, kubeconfig) = (scratch("azure-json"), plane.kubeconfig().to_owned());
    std::fs::create_dir_all(&dir)?;
    let mut all = build("overlays/azure-pools-beside-capz").await?;
    all.retain(|object| object["kind"].as_str().is_some_and(|kind| RIGHTS.contains(&kind)));
    all.extend(objects());
    let file = dir.join("objects.json");
    std::fs::write(
        &file,
        json!({"apiVersion": "v1", "kind": "List", "items": all}).to_string(),
    )?;
    kubectl(&kubeconfig, &["apply", "-f", &file.display().to_string()]).await?;

    let token = plane
        .kubectl(&["create", "token", "capstan", "-n", "capstan-system", "--duration=1h"])
        .await?;
    let mut account: Value = serde_saphyr::from_str(&std::fs::read_to_string(&kubeconfig)?)?;
    account["users"][0]["user"] = json!({"token": token.trim()});
    account["contexts"][0]["context"]["namespace"] = json!("capstan-system");
    let (account_file, log_file) = (dir.join("account.kubeconfig"), dir.join("log"));
    std::fs::write(&account_file, account.to_string())?;
    let child = capstan()
        .args([
            "run",
            "--controllers",
            "azure-pools",
            "--azure-json",
            "--log-format",
            "json",
        ])
        .args(["--health", "0", "--metrics", "0", "--webhook", "0", "--kubeconfig"])
        .arg(&account_file)
        // Nobody answers there.
        .env("AZURE_AUTHORITY_HOST", "https://127.0.0.1:1")
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", "https://127.0.0.1:1")
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log_file)?)
        .spawn()?;
    let mut child = Started(child);
    let log = || std::fs::read_to_string(&log_file).unwrap_or_default();

    let read = [
        "get",
        "secret",
        "workers-azure-json",
        "-n",
        "team",
        "--ignore-not-found",
        "-o",
    ];
    let network = [
        &read[..],
        &["go-template={{index .data \"azure.json\" | base64decode}}"],
    ]
    .concat();
    kubectl_until(&kubeconfig, &network, |text| text.contains("\"vnetName\": \"yard\""))
        .await
        .with_context(log)?;
    let balancer = json!({"spec": {"networkSpec": {"nodeOutboundLB": {"name": "gate", "type": "Public"}}}}).to_string();
    let patch = [
        "patch",
        "azurecluster",
        "dock",
        "-n",
        "team",
        "--type=merge",
        "-p",
        &balancer,
    ];
    kubectl(&kubeconfig, &patch).await?;
    kubectl_until(&kubeconfig, &network, |text| {
        text.contains("\"loadBalancerName\": \"gate\"")
    })
    .await
    .with_context(log)?;
    let meta = [
        &read[..],
        &["jsonpath={.metadata.labels} {.metadata.ownerReferences[0].kind}"],
    ]
    .concat();
    let meta = kubectl(&kubeconfig, &meta).await?;
    ensure!(meta == "{\"dock\":\"owned\"} AzureMachinePool", "{meta}");

    signal(&child.0, "-TERM")?;
    ensure!(wait(&mut child.0, LIMIT)?.success(), "{}", log());
    let log = log();
    let forbidden = log.lines().find(|line| line.contains("is forbidden"));
    ensure!(forbidden.is_none(), "the overlay lacks a right: {forbidden:?}");
    ensure!(!log.contains("of-the-team"), "the log shows a password");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
