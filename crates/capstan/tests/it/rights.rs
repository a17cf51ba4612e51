//! The rights that deploy/ gives each controller. Invariant: an end-to-end run under exactly these rights is refused nothing, and
//! it uses every one of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::program::{self, LIMIT, Started, Up, build_parts, capstan, kubectl, kubectl_until, scratch, signal, wait};

pub const ACCOUNT: &str = "system:serviceaccount:capstan-system:capstan";
const BASE: &str = include_str!("../../../../deploy/base/rbac.yaml");
const WEBHOOK: &str = include_str!("../../../../deploy/base/webhook.yaml");
/// For Prometheus; Capstan does not have it.
const READER: &str = "capstan-metrics-reader";

/// Rights that not every run shows, each with the reason. The API server itself checks the first four while it admits another
/// request. The runs enable the plugin OwnerReferencesPermissionEnforcement, so without the first three they are refused.
const CHECKED: [(&str, &str, &str); 5] = [
    // When an owner reference blocks the deletion of the owner.
    ("machine.openshift.io", "machinesets/finalizers", "update"),
    (
        "infrastructure.cluster.x-k8s.io",
        "azuremachinepools/finalizers",
        "update",
    ),
    // When an object gets an owner.
    ("", "secrets", "delete"),
    // OpenShift's admission of Pods checks this; no other API server does.
    ("security.openshift.io", "securitycontextconstraints", "use"),
    // Capstan counts up an event that repeats. The runs of pools and of vSphere machines show that; OpenShift's admission refuses the
    // objects whose events would repeat.
    ("", "events", "patch"),
];

/// API group, resource with its subresource, verb.
pub type Right = (String, String, String);

pub fn right(group: &str, resource: &str, verb: &str) -> Right {
    (group.to_owned(), resource.to_owned(), verb.to_owned())
}

fn texts(value: &Value, field: &str) -> Vec<String> {
    let items = value[field].as_array().into_iter().flatten();
    items.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Returns the rights in the roles of these manifests.
fn granted(manifests: &[&str]) -> Result<BTreeSet<Right>> {
    let mut rights = BTreeSet::new();
    for manifest in manifests {
        let documents: Vec<Value> = serde_saphyr::from_multiple(manifest)?;
        let roles = documents
            .iter()
            .filter(|object| matches!(object["kind"].as_str(), Some("Role" | "ClusterRole")));
        for role in roles.filter(|role| role["metadata"]["name"] != READER) {
            for rule in role["rules"].as_array().into_iter().flatten() {
                for group in texts(rule, "apiGroups") {
                    for resource in texts(rule, "resources") {
                        let verbs = texts(rule, "verbs");
                        rights.extend(verbs.iter().map(|verb| right(&group, &resource, verb)));
                    }
                }
            }
        }
    }
    Ok(rights)
}

/// The requests of Capstan in kube-apiserver's audit log.
pub struct Audit {
    pub used: BTreeSet<Right>,
    pub refused: Vec<String>,
}

pub fn audit(log: &Path) -> Result<Audit> {
    let mut audit = Audit {
        used: BTreeSet::new(),
        refused: Vec::new(),
    };
    for line in std::fs::read_to_string(log)?.lines() {
        // The API server may be killed in the middle of a line.
        let Ok(event) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let user = event["impersonatedUser"]["username"].as_str();
        if user.or(event["user"]["username"].as_str()) != Some(ACCOUNT) {
            continue;
        }
        let object = &event["objectRef"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut resource = text(&object["resource"]);
        if let Some(sub) = object["subresource"].as_str() {
            resource = format!("{resource}/{sub}");
        }
        let verb = text(&event["verb"]);
        if event["responseStatus"]["code"] == 403 {
            let reason = &event["responseStatus"]["message"];
            audit.refused.push(format!("{verb} {}: {reason}", event["requestURI"]));
        }
        audit.used.insert((text(&object["apiGroup"]), resource, verb));
    }
    Ok(audit)
}

fn list(rights: impl Iterator<Item = Right>) -> String {
    let lines: Vec<String> = rights
        .map(|(group, resource, verb)| format!("  {verb} {resource} of {group:?}"))
        .collect();
    lines.join("\n")
}

fn vsphere_definitions() -> Vec<String> {
    let all = capstan_api::crds().into_iter();
    let converted = all.filter(|crd| crd.spec.conversion.is_some());
    converted.filter_map(|crd| crd.metadata.name).collect()
}

/// Runs `capstan run` with the controllers' own account until it leads: the Lease, and the webhooks of an installation.
async fn lead(up: &Up, controller: &str) -> Result<()> {
    let text = std::fs::read_to_string(up.kubeconfig())?;
    let text = text.replace("user:\n", &format!("user:\n    as: {ACCOUNT}\n"));
    let text = text.replace("context:\n", "context:\n    namespace: capstan-system\n");
    let (file, log) = (up.dir.join("account.kubeconfig"), up.dir.join("run.log"));
    ensure!(
        text.contains(ACCOUNT),
        "the kubeconfig has no user to impersonate with:\n{text}"
    );
    std::fs::write(&file, text)?;
    let child = capstan()
        .args(["run", "--controllers", controller, "--log-format", "json"])
        .args(["--health", "0", "--metrics", ":0"])
        .args([
            "--webhook",
            "127.0.0.1:0",
            "--webhook-service",
            "capstan-system/capstan-webhook",
            "--kubeconfig",
        ])
        .arg(&file)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?)
        .spawn()?;
    let mut child = Started(child);
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    program::until(|| text().contains("\"message\":\"starting\"")).with_context(text)?;
    if controller == "vsphere" {
        // A definition is rewritten again if its webhook is registered at the same time.
        let is_rewritten = |definition: &String| {
            let named = format!("\"crd\":\"{definition}\"");
            let rewritten = |line: &str| line.contains("rewrote all objects") && line.contains(&named);
            text().lines().any(rewritten)
        };
        program::until(|| vsphere_definitions().iter().all(is_rewritten)).with_context(text)?;
        for definition in vsphere_definitions() {
            let crd = format!("crd/{definition}");
            let bundle = "jsonpath={.spec.conversion.webhook.clientConfig.caBundle}";
            kubectl_until(&up.kubeconfig(), &["get", &crd, "-o", bundle], |text| !text.is_empty()).await?;
        }
    }
    if controller == "openshift" {
        let secret = [
            "get",
            "secret/capstan-webhook",
            "-n",
            "capstan-system",
            "-o",
            "jsonpath={.data}",
        ];
        kubectl_until(&up.kubeconfig(), &secret, |data| data.contains("tls.key")).await?;
        let bundle = "jsonpath={.webhooks[*].clientConfig.caBundle}";
        for kind in ["mutating", "validating"] {
            let kind = format!("{kind}webhookconfiguration/capstan-machine-api");
            kubectl_until(&up.kubeconfig(), &["get", &kind, "-o", bundle], |text| !text.is_empty()).await?;
        }
    }
    // A scraper without the right: Capstan asks the API server who it is and whether it may.
    let token = kubectl(
        &up.kubeconfig(),
        &["create", "token", "default", "-n", "capstan-system"],
    )
    .await?;
    let client = reqwest::Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .no_proxy()
        .build()?;
    let port = program::port(&text(), "metrics").with_context(text)?;
    let scrape = client.get(format!("https://127.0.0.1:{port}/metrics"));
    let answer = scrape.bearer_auth(token.trim()).send().await?;
    ensure!(answer.status() == reqwest::StatusCode::FORBIDDEN, "{}", text());
    signal(&child.0, "-TERM")?;
    ensure!(wait(&mut child.0, LIMIT)?.success(), "{}", text());
    Ok(())
}

/// Compares the rights in these manifests with those that the run in `up` used.
async fn compare(up: Up, controller: &str, manifests: &[&str]) -> Result<()> {
    let dir = up.dir.clone();
    ensure!(up.end("-INT").await?.success());
    let audit = audit(&dir.join("audit.log"))?;
    ensure!(
        audit.refused.is_empty(),
        "rights are missing:\n{}",
        audit.refused.join("\n")
    );
    let granted = granted(&[&[BASE], manifests].concat())?;
    let checked: BTreeSet<Right> = CHECKED.iter().map(|(g, r, v)| right(g, r, v)).collect();
    let unused = granted
        .iter()
        .filter(|right| !is_used(&audit.used, right) && !checked.contains(right));
    let unused = list(unused.cloned());
    ensure!(
        unused.is_empty(),
        "deploy/controllers/{controller} gives rights that nothing uses:\n{unused}"
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// Whether the run used a right. Who may list objects may read each of them, so `list` stands for `get`.
fn is_used(used: &BTreeSet<Right>, (group, resource, verb): &Right) -> bool {
    let has = |verb: &str| used.contains(&right(group, resource, verb));
    has(verb) || verb == "get" && has("list")
}

/// Starts a cluster with one controller and no objects, so that a second process may lead for a moment.
async fn start(controller: &str, flags: &[&str]) -> Result<Up> {
    build_parts().await?;
    let dir = scratch(&format!("rights-{controller}"));
    let own = ["--controllers", controller, "--audit", "--no-examples"];
    let variables = [("POD_NAMESPACE", "capstan-system"), ("EXP_NODE_ANTI_AFFINITY", "true")];
    Up::start_with(&dir, &[&own[..], flags].concat(), &variables).await
}

/// Applies a manifest; `${NAME}` stands for a variable of clouds.env.
async fn apply(up: &Up, manifest: &str) -> Result<()> {
    let mut text = manifest.to_owned();
    for line in std::fs::read_to_string(up.dir.join("clouds.env"))?.lines() {
        if let Some((name, value)) = line.split_once('=') {
            text = text.replace(&format!("${{{name}}}"), value);
        }
    }
    let file = up.dir.join("manifest.yaml");
    std::fs::write(&file, text)?;
    let file = file.display().to_string();
    kubectl(&up.kubeconfig(), &["apply", "--server-side", "-f", &file]).await?;
    Ok(())
}

/// Waits until a field of an object is as `wanted`, and returns it.
async fn field(up: &Up, namespace: &str, object: &str, path: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
    let path = format!("jsonpath={path}");
    let args = ["get", object, "-n", namespace, "-o", &path];
    kubectl_until(&up.kubeconfig(), &args, wanted).await?;
    kubectl(&up.kubeconfig(), &args).await
}

async fn gone(up: &Up, namespace: &str, object: &str) -> Result<()> {
    let args = ["get", object, "-n", namespace, "-o", "name", "--ignore-not-found"];
    kubectl_until(&up.kubeconfig(), &args, str::is_empty).await
}

/// Applies an object that Capstan refuses, and changes it: Capstan records the same event again, and counts it up.
async fn refused_twice(up: &Up, manifest: &str, namespace: &str, object: &str) -> Result<()> {
    apply(up, manifest).await?;
    let name = object.rsplit('/').next().unwrap_or_default();
    let selector = format!("involvedObject.name={name}");
    let counts = "jsonpath={.items[*].count}";
    let events = [
        "get",
        "events",
        "-n",
        namespace,
        "--field-selector",
        &selector,
        "-o",
        counts,
    ];
    for times in 1..=2 {
        let label = format!("refused={times}");
        let changed = ["label", "--overwrite", object, "-n", namespace, &label];
        kubectl(&up.kubeconfig(), &changed).await?;
        let is_counted = |count: &str| count.parse().is_ok_and(|count: u32| count >= times);
        kubectl_until(&up.kubeconfig(), &events, |counts| {
            counts.split_whitespace().any(is_counted)
        })
        .await?;
    }
    kubectl(&up.kubeconfig(), &["delete", object, "-n", namespace]).await?;
    Ok(())
}

/// A cluster without an identity.
const NOBODY: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureCluster
metadata: {name: nobody, namespace: default}
spec: {location: eastus, resourceGroup: capstan, subscriptionID: \"${AZURE_SUBSCRIPTION_ID}\"}
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: nobody, namespace: default}
spec: {infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: AzureCluster, name: nobody}}
";

/// A cluster whose server is more than a host and a port.
const NOWHERE: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereCluster
metadata: {name: nowhere, namespace: vsphere}
spec: {server: \"http://127.0.0.1/path\", identityRef: {kind: VSphereClusterIdentity, name: shared}}
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: nowhere, namespace: vsphere}
spec: {infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: VSphereCluster, name: nowhere}}
";

/// The namespace of the OpenShift examples.
const MACHINES: &str = "openshift-machine-api";

/// Pods on `NODE`: one that a disruption budget keeps, and one of a DaemonSet.
const PODS: &str = "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: web, namespace: default}
spec: {minAvailable: 1, selector: {matchLabels: {app: web}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent, namespace: default}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {nodeSelector: {drained: soon}, containers: [{name: agent, image: agent}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default, labels: {app: web}}
spec: {nodeName: NODE, automountServiceAccountToken: false, containers: [{name: web, image: web}]}
";

/// Puts Pods on a node, as users and the scheduler do.
async fn fill(up: &Up, node: &str) -> Result<()> {
    let kubeconfig = up.kubeconfig();
    kubectl(&kubeconfig, &["label", "node", node, "drained=soon"]).await?;
    apply(up, &PODS.replace("NODE", node)).await?;
    let name = "jsonpath={.items[*].metadata.name}";
    let agents = ["get", "pods", "-n", "default", "-l", "app=agent", "-o", name];
    kubectl_until(&kubeconfig, &agents, |names| !names.is_empty()).await?;
    let agent = kubectl(&kubeconfig, &agents).await?;
    let (binding, path) = (
        json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": agent}, "target": {"kind": "Node", "name": node}}),
        format!("/api/v1/namespaces/default/pods/{agent}/binding"),
    );
    let file = up.dir.join("binding.json");
    std::fs::write(&file, binding.to_string())?;
    let file = file.display().to_string();
    kubectl(&kubeconfig, &["create", "--raw", &path, "-f", &file]).await?;
    field(up, "default", "pod/web", "{.status.phase}", |phase| phase == "Running").await?;
    field(up, "default", "pdb/web", "{.status.currentHealthy}", |healthy| {
        healthy == "1"
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_openshift_controller_has_the_rights_that_it_uses_and_no_more() -> Result<()> {
    let up = start("openshift", &[]).await?;
    let kubeconfig = up.kubeconfig();
    let webhook = include_str!("../../../../deploy/controllers/openshift/webhook.yaml");
    apply(&up, webhook).await?;
    lead(&up, "openshift").await?;
    // Nobody serves the Service here.
    for kind in ["mutating", "validating"] {
        let kind = format!("{kind}webhookconfiguration/capstan-machine-api");
        kubectl(&kubeconfig, &["delete", &kind]).await?;
    }
    apply(&up, include_str!("../../../../examples/openshift.yaml")).await?;
    let (machine, set) = (
        "machine.machine.openshift.io/archive",
        "machineset.machine.openshift.io/workers",
    );
    field(&up, MACHINES, set, "{.status.readyReplicas}", |ready| ready == "2").await?;
    field(&up, MACHINES, machine, "{.status.phase}", |phase| phase == "Running").await?;
    let node = field(&up, MACHINES, machine, "{.status.nodeRef.name}", |node| {
        !node.is_empty()
    })
    .await?;
    fill(&up, &node).await?;
    // The simulated Azure deletes the Node with its VM. Somebody's finalizer keeps it for Capstan to delete.
    let (node, kept) = (
        format!("node/{node}"),
        r#"{"metadata":{"finalizers":["example.com/kept"]}}"#,
    );
    kubectl(&kubeconfig, &["patch", &node, "--type=merge", "-p", kept]).await?;
    kubectl(&kubeconfig, &["delete", machine, "-n", MACHINES, "--wait=false"]).await?;
    let messages = "{.status.conditions[*].message}";
    field(&up, MACHINES, machine, messages, |text| text.contains("web")).await?;
    kubectl(&kubeconfig, &["delete", "pdb/web", "-n", "default"]).await?;
    gone(&up, MACHINES, machine).await?;
    kubectl(&kubeconfig, &["scale", set, "-n", MACHINES, "--replicas=1"]).await?;
    field(&up, MACHINES, set, "{.status.replicas}", |replicas| replicas == "1").await?;
    compare(
        up,
        "openshift",
        &[
            include_str!("../../../../deploy/controllers/openshift/rbac.yaml"),
            WEBHOOK,
        ],
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pool_controller_has_the_rights_that_it_uses_and_no_more() -> Result<()> {
    let up = start("azure-pools", &["--cluster-api"]).await?;
    let kubeconfig = up.kubeconfig();
    lead(&up, "azure-pools").await?;
    let example = include_str!("../../../../examples/azure-pool/pool.yaml");
    let selector = "allowedNamespaces: {selector: {matchLabels: {kubernetes.io/metadata.name: default}}}";
    let example = example.replace("allowedNamespaces: {}", selector);
    apply(&up, &example.replace("nodeDrainTimeout: 10m", "nodeDrainTimeout: 10s")).await?;
    refused_twice(&up, NOBODY, "default", "azurecluster/nobody").await?;
    let (pool, owner) = ("azuremachinepool/workers", "machinepool/workers");
    field(&up, "default", pool, "{.status.replicas}/{.status.ready}", |state| {
        state == "5/true"
    })
    .await?;
    let nodes = [
        "get",
        "machines.cluster.x-k8s.io",
        "-o",
        "jsonpath={.items[*].status.nodeRef.name}",
    ];
    kubectl_until(&kubeconfig, &nodes, |names| names.split_whitespace().count() == 5).await?;
    // One machine less by Cluster API, one by the pool.
    let names = "jsonpath={.items[*].metadata.name}";
    let machines = kubectl(&kubeconfig, &["get", "machines.cluster.x-k8s.io", "-o", names]).await?;
    let first = machines.split_whitespace().next().context("no Machine")?;
    kubectl(
        &kubeconfig,
        &["delete", &format!("machine.cluster.x-k8s.io/{first}"), "--wait=false"],
    )
    .await?;
    kubectl(&kubeconfig, &["scale", owner, "--replicas=4"]).await?;
    field(&up, "default", pool, "{.status.replicas}", |replicas| replicas == "4").await?;
    gone(&up, "default", &format!("machine.cluster.x-k8s.io/{first}")).await?;
    // A drain that does not end in time: a disruption budget keeps a pod.
    let machine = machines.split_whitespace().nth(1).context("one Machine only")?;
    let machine = format!("machine.cluster.x-k8s.io/{machine}");
    let node = field(&up, "default", &machine, "{.status.nodeRef.name}", |node| {
        !node.is_empty()
    })
    .await?;
    let object = field(&up, "default", &machine, "{.spec.infrastructureRef.name}", |name| {
        !name.is_empty()
    })
    .await?;
    fill(&up, &node).await?;
    let object = format!("azuremachinepoolmachine/{object}");
    kubectl(&kubeconfig, &["delete", &object, "--wait=false"]).await?;
    gone(&up, "default", &object).await?;
    kubectl(&kubeconfig, &["delete", "pdb/web", "-n", "default"]).await?;
    // Several machines go at once.
    field(&up, "default", pool, "{.status.replicas}/{.status.ready}", |state| {
        state == "4/true"
    })
    .await?;
    kubectl(&kubeconfig, &["scale", owner, "--replicas=2"]).await?;
    // An autoscaler sets the replicas: the MachinePool follows Azure, once the pool's own deletions have ended.
    let machines = ["get", "azuremachinepoolmachines", "-o", names];
    kubectl_until(&kubeconfig, &machines, |names| names.split_whitespace().count() == 2).await?;
    let external = "{\"metadata\":{\"annotations\":{\"cluster.x-k8s.io/replicas-managed-by\":\"autoscaler\"}},\"spec\":{\"replicas\":9}}";
    kubectl(&kubeconfig, &["patch", owner, "--type=merge", "-p", external]).await?;
    field(&up, "default", owner, "{.spec.replicas}", |replicas| replicas == "2").await?;
    kubectl(&kubeconfig, &["delete", owner, "--wait=false"]).await?;
    gone(&up, "default", pool).await?;
    compare(
        up,
        "azure-pools",
        &[include_str!("../../../../deploy/controllers/azure-pools/rbac.yaml")],
    )
    .await
}

/// A cluster with an identity, a zone and an address from a pool. The predecessor left its finalizers on the identity and the zone.
const ANNEX: &str = "
apiVersion: v1
kind: Secret
metadata: {name: shared, namespace: capstan-system}
stringData: {username: \"${VSPHERE_USERNAME}\", password: \"${VSPHERE_PASSWORD}\"}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereClusterIdentity
metadata:
  name: shared
  annotations: {capstan.dev/allowed-servers: \"${VSPHERE_SERVER}\"}
  finalizers: [vsphereclusteridentity/infrastructure.cluster.x-k8s.io]
spec: {secretName: shared, allowedNamespaces: {selector: {matchLabels: {kubernetes.io/metadata.name: vsphere}}}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereFailureDomain
metadata:
  name: east
  annotations: {capstan.dev/v1beta1-fields: '{\"region.autoConfigure\":true,\"zone.autoConfigure\":true}'}
spec:
  region: {name: east, type: Datacenter, tagCategory: region}
  zone: {name: east-1, type: ComputeCluster, tagCategory: zone}
  topology: {datacenter: DC0, computeCluster: DC0_C0, datastore: LocalDS_0, networks: [DC0_DVPG0]}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereDeploymentZone
metadata: {name: east, labels: {zone: east}, finalizers: [vspheredeploymentzone.infrastructure.cluster.x-k8s.io]}
spec:
  server: \"${VSPHERE_SERVER}\"
  failureDomain: east
  controlPlane: true
  placementConstraint: {resourcePool: /DC0/host/DC0_C0/Resources, folder: /DC0/vm}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereCluster
metadata: {name: annex, namespace: vsphere}
spec:
  server: \"${VSPHERE_SERVER}\"
  thumbprint: \"${VSPHERE_THUMBPRINT}\"
  identityRef: {kind: VSphereClusterIdentity, name: shared}
  failureDomainSelector: {matchLabels: {zone: east}}
  controlPlaneEndpoint: {host: 127.0.0.1, port: 6443}
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: Cluster
metadata: {name: annex, namespace: vsphere}
spec: {infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: VSphereCluster, name: annex}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereMachine
metadata: {name: fixed, namespace: vsphere, labels: {cluster.x-k8s.io/cluster-name: annex}}
spec:
  datacenter: DC0
  datastore: LocalDS_0
  resourcePool: /DC0/host/DC0_C0/Resources
  template: pvscsi
  numCPUs: 2
  memoryMiB: 2048
  diskGiB: 20
  network:
    devices:
    - networkName: DC0_DVPG0
      addressesFromPools: [{apiGroup: ipam.cluster.x-k8s.io, kind: InClusterIPPool, name: fixed}]
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: Machine
metadata:
  name: fixed
  namespace: vsphere
  labels: {cluster.x-k8s.io/cluster-name: annex, cluster.x-k8s.io/deployment-name: gone}
spec:
  clusterName: annex
  bootstrap: {dataSecretName: dock-bootstrap}
  infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: VSphereMachine, name: fixed}
";

const TEMPLATES: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereMachineTemplate
metadata: {name: old, namespace: default}
spec: {template: {spec: {template: pvscsi, network: {devices: []}}}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereClusterTemplate
metadata: {name: old, namespace: default}
spec: {template: {spec: {server: vcenter}}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereFailureDomain
metadata: {name: old}
spec:
  region: {name: r, type: Datacenter, tagCategory: r}
  zone: {name: z, type: ComputeCluster, tagCategory: z}
  topology: {datacenter: DC0, computeCluster: DC0_C0}
";

const ADDRESS: &str = "
apiVersion: ipam.cluster.x-k8s.io/v1beta2
kind: IPAddress
metadata: {name: fixed, namespace: vsphere}
spec:
  address: 10.9.0.7
  prefix: 24
  gateway: 10.9.0.1
  poolRef: {apiGroup: ipam.cluster.x-k8s.io, kind: InClusterIPPool, name: fixed}
  claimRef: {name: fixed-0-0}
";

#[tokio::test(flavor = "multi_thread")]
async fn the_vsphere_controller_has_the_rights_that_it_uses_and_no_more() -> Result<()> {
    let up = start("vsphere", &[]).await?;
    let kubeconfig = up.kubeconfig();
    // An earlier version has stored objects as v1beta1. Capstan has no other right on templates than to store them anew.
    apply(&up, TEMPLATES).await?;
    for definition in vsphere_definitions() {
        let stored = "{\"status\":{\"storedVersions\":[\"v1beta1\",\"v1beta2\"]}}";
        let crd = format!("crd/{definition}");
        let patch = ["patch", &crd, "--subresource=status", "--type=merge", "-p", stored];
        kubectl(&kubeconfig, &patch).await?;
    }
    lead(&up, "vsphere").await?;
    apply(&up, include_str!("../../../../examples/vsphere.yaml")).await?;
    apply(&up, ANNEX).await?;
    let claim = "ipaddressclaim/fixed-0-0";
    field(&up, "vsphere", claim, "{.metadata.name}", |name| !name.is_empty()).await?;
    apply(&up, ADDRESS).await?;
    let answer = "{\"status\":{\"addressRef\":{\"name\":\"fixed\"}}}";
    let patch = [
        "patch",
        claim,
        "-n",
        "vsphere",
        "--subresource=status",
        "--type=merge",
        "-p",
        answer,
    ];
    kubectl(&kubeconfig, &patch).await?;
    for machine in ["dock-plain", "dock-with-disks", "fixed"] {
        field(
            &up,
            "vsphere",
            &format!("vspheremachine/{machine}"),
            "{.status.initialization.provisioned}",
            |ready| ready == "true",
        )
        .await?;
    }
    refused_twice(&up, NOWHERE, "vsphere", "vspherecluster/nowhere").await?;
    // A Machine with a Node gets the name of its host.
    let node = "{\"status\":{\"nodeRef\":{\"name\":\"dock-plain\"}}}";
    let machine = "machine.cluster.x-k8s.io/dock-plain";
    let patch = [
        "patch",
        machine,
        "-n",
        "vsphere",
        "--subresource=status",
        "--type=merge",
        "-p",
        node,
    ];
    kubectl(&kubeconfig, &patch).await?;
    field(&up, "vsphere", machine, "{.metadata.labels}", |labels| {
        labels.contains("esxi-host")
    })
    .await?;
    // The predecessor left its finalizer on the Secret.
    let finalizer = "{\"metadata\":{\"finalizers\":[\"vspherecluster/infrastructure.cluster.x-k8s.io\"]}}";
    kubectl(
        &kubeconfig,
        &[
            "patch",
            "secret/vcenter",
            "-n",
            "vsphere",
            "--type=merge",
            "-p",
            finalizer,
        ],
    )
    .await?;
    for machine in ["dock-plain", "dock-with-disks", "fixed"] {
        let (core, own) = (
            format!("machine.cluster.x-k8s.io/{machine}"),
            format!("vspheremachine/{machine}"),
        );
        kubectl(
            &kubeconfig,
            &[
                "delete",
                &core,
                &own,
                "-n",
                "vsphere",
                "--wait=false",
                "--ignore-not-found",
            ],
        )
        .await?;
        gone(&up, "vsphere", &own).await?;
    }
    for cluster in ["shipyard", "annex"] {
        let own = format!("vspherecluster/{cluster}");
        let core = format!("cluster.cluster.x-k8s.io/{cluster}");
        kubectl(
            &kubeconfig,
            &[
                "delete",
                &core,
                &own,
                "-n",
                "vsphere",
                "--wait=false",
                "--ignore-not-found",
            ],
        )
        .await?;
        gone(&up, "vsphere", &own).await?;
    }
    kubectl(&kubeconfig, &["delete", "vspheredeploymentzone/east", "--timeout=300s"]).await?;
    kubectl(
        &kubeconfig,
        &["delete", "vsphereclusteridentity/shared", "--timeout=300s"],
    )
    .await?;
    compare(
        up,
        "vsphere",
        &[
            include_str!("../../../../deploy/controllers/vsphere/rbac.yaml"),
            WEBHOOK,
        ],
    )
    .await
}
