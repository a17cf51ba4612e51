//! `capstan adopt` and `capstan run --hold-leases` as their users start them, against a real API server. The peers are there as
//! objects: Deployments, Leases, webhook configurations.

use crate::program;

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use capstan_testkit::{ControlPlane, Options};
use program::{Started, capstan, kubectl, kubectl_until, scratch};
use serde_json::Value;

const PEERS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: capv-system}
---
apiVersion: v1
kind: Namespace
metadata: {name: capz-system}
---
apiVersion: v1
kind: Namespace
metadata: {name: capstan-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: capv-controller-manager, namespace: capv-system}
spec:
  replicas: 2
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec: {containers: [{name: manager, image: capv, args: [--leader-elect]}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: capz-controller-manager, namespace: capz-system}
spec:
  replicas: 1
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec: {containers: [{name: manager, image: capz, args: [--leader-elect, "--feature-gates=MachinePool=true,ASOAPI=true"]}]}
---
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: capv-controller-manager-runtime, namespace: capv-system}
spec: {holderIdentity: capv, leaseDurationSeconds: 3600, acquireTime: "2026-01-01T00:00:00.000000Z", renewTime: "2126-01-01T00:00:00.000000Z", leaseTransitions: 1}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: capv-validating-webhook-configuration, labels: {cluster.x-k8s.io/provider: infrastructure-vsphere}}
webhooks:
- name: default.vspherevm.infrastructure.x-k8s.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: capv-webhook-service, namespace: capv-system, path: /validate}}
  rules: [{apiGroups: [infrastructure.cluster.x-k8s.io], apiVersions: [v1beta1], operations: [CREATE], resources: [vspherevms]}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: capz-validating-webhook-configuration, labels: {cluster.x-k8s.io/provider: infrastructure-azure}}
webhooks:
- name: azuremachinepoolmachine.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: capz-webhook-service, namespace: capz-system, path: /validate-ampm}}
  rules: [{apiGroups: [infrastructure.cluster.x-k8s.io], apiVersions: [v1beta1], operations: [CREATE, UPDATE], resources: [azuremachinepoolmachines]}]
- name: validation.azurecluster.infrastructure.cluster.x-k8s.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: capz-webhook-service, namespace: capz-system, path: /validate-cluster}}
  rules: [{apiGroups: [infrastructure.cluster.x-k8s.io], apiVersions: [v1beta1], operations: [CREATE, UPDATE], resources: [azureclusters]}]
- name: validation.azuremachinepool.infrastructure.cluster.x-k8s.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: capz-webhook-service, namespace: capz-system, path: /validate-amp}}
  rules: [{apiGroups: [infrastructure.cluster.x-k8s.io], apiVersions: [v1beta1], operations: [CREATE, UPDATE], resources: [azuremachinepools]}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: capz-mutating-webhook-configuration, labels: {cluster.x-k8s.io/provider: infrastructure-azure}}
webhooks:
- name: default.azuremachinepool.infrastructure.cluster.x-k8s.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: capz-webhook-service, namespace: capz-system, path: /mutate-amp}}
  rules: [{apiGroups: [infrastructure.cluster.x-k8s.io], apiVersions: [v1beta1], operations: [CREATE, UPDATE], resources: [azuremachinepools]}]
"#;

const POOL: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureMachinePool
metadata: {name: workers, namespace: capstan-system}
spec: {location: eastus, template: {vmSize: Standard_D2s_v3, osDisk: {osType: Linux}, sshPublicKey: ''}}
";

/// As clusterctl installs it.
const CAPSTAN: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: capstan-all-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: capstan-controller-manager, namespace: capstan-all-system, labels: {app.kubernetes.io/name: capstan}}
spec:
  replicas: 1
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec: {containers: [{name: manager, image: capstan, args: [run]}]}
";

const DEFINITION: &str = "vspherevms.infrastructure.cluster.x-k8s.io";
const CONVERTED_BY_CAPV: &str = r#"{
  "metadata": {"annotations": {"cert-manager.io/inject-ca-from": "capv-system/capv-serving-cert"}},
  "spec": {"conversion": {"webhook": {"clientConfig": {"service": {"namespace": "capv-system", "name": "capv-webhook-service"}}}}}
}"#;

/// The objects of the peers, without what the API server counts up.
async fn peers(kubeconfig: &Path) -> Result<Value> {
    let kinds = "deployments.apps,validatingwebhookconfigurations,mutatingwebhookconfigurations,roles,rolebindings";
    let answer = kubectl(kubeconfig, &["get", kinds, "-A", "-o", "json"]).await?;
    let mut list: Value = serde_json::from_str(&answer)?;
    let items = list["items"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let ours = items.into_iter().filter(|item| {
        !item["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .starts_with("system:")
    });
    let plain = ours.map(|mut item| {
        for field in [
            "uid",
            "resourceVersion",
            "generation",
            "creationTimestamp",
            "managedFields",
        ] {
            item["metadata"].as_object_mut().map(|meta| meta.remove(field));
        }
        // Nobody runs the pods here: the test writes their numbers.
        item.as_object_mut().map(|item| item.remove("status"));
        item
    });
    Ok(plain.collect())
}

/// Writes the status of a Deployment whose pods are all new.
async fn pods(kubeconfig: &Path, namespace: &str, name: &str, pods: i32) -> Result<()> {
    let path = "jsonpath={.metadata.generation}";
    let generation = kubectl(kubeconfig, &["get", "deployment", name, "-n", namespace, "-o", path]).await?;
    let status =
        format!(r#"{{"status":{{"observedGeneration":{generation},"replicas":{pods},"updatedReplicas":{pods}}}}}"#);
    let patch = [
        "patch",
        "deployment",
        name,
        "-n",
        namespace,
        "--subresource=status",
        "--type=merge",
        "-p",
        &status,
    ];
    kubectl(kubeconfig, &patch).await.map(drop)
}

/// Runs `capstan adopt`. Returns its exit code and what it printed.
async fn adopt(kubeconfig: &Path, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut command = capstan();
    command.arg("adopt").args(args).arg("--kubeconfig").arg(kubeconfig);
    let out = tokio::task::spawn_blocking(move || command.output()).await??;
    let text = [out.stdout, out.stderr].concat();
    Ok((out.status.code(), String::from_utf8_lossy(&text).into_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn adopt_reads_only_then_executes_records_and_reverts_and_capstan_waits_for_the_lease_of_its_peer() -> Result<()>
{
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let (dir, kubeconfig) = (scratch("adopt"), plane.kubeconfig().to_owned());
    std::fs::create_dir_all(&dir)?;
    let file = |name: &str, text: &str| -> Result<String> {
        std::fs::write(dir.join(name), text)?;
        Ok(dir.join(name).display().to_string())
    };
    let (code, said) = adopt(&kubeconfig, &[]).await?;
    ensure!(
        code == Some(0) && said.contains("No controller that Capstan replaces"),
        "{code:?} {said}"
    );
    plane.install_crds().await?;
    kubectl(&kubeconfig, &["apply", "-f", &file("peers.yaml", PEERS)?]).await?;
    // A definition of CAPV, into which cert-manager writes the CA of CAPV.
    kubectl(
        &kubeconfig,
        &["patch", "crd", DEFINITION, "--type=merge", "-p", CONVERTED_BY_CAPV],
    )
    .await?;
    // Nobody answers for CAPZ here, as with its feature gate off.
    let pool = kubectl(&kubeconfig, &["apply", "-f", &file("pool.yaml", POOL)?]).await;
    ensure!(pool.is_err(), "{pool:?}");
    let before = peers(&kubeconfig).await?;

    let (code, said) = adopt(&kubeconfig, &["-o", "json"]).await?;
    ensure!(code == Some(2), "{code:?} {said}");
    let report: Value = serde_json::from_str(&said)?;
    ensure!(
        report["ways"][0]["peer"] == "CAPZ" && report["ways"][1]["peer"] == "CAPV",
        "{report:#}"
    );
    ensure!(report["facts"]["webhooks"][1]["failClosed"] == 1, "{report:#}");
    ensure!(report["facts"]["leases"][0]["holder"] == "capv", "{report:#}");
    let (_, said) = adopt(&kubeconfig, &[]).await?;
    ensure!(
        said.contains("scale Deployment capv-system/capv-controller-manager to 0 [--execute does it]"),
        "{said}"
    );
    ensure!(
        said.contains("--hold-leases capv-system/capv-controller-manager-runtime [you do it]"),
        "{said}"
    );
    ensure!(peers(&kubeconfig).await? == before, "it wrote without --execute");

    // Both would act: nothing is switched over.
    let capstan_file = file("capstan.yaml", CAPSTAN)?;
    kubectl(&kubeconfig, &["apply", "-f", &capstan_file]).await?;
    let (code, said) = adopt(&kubeconfig, &["--execute"]).await?;
    ensure!(
        code == Some(1) && said.contains("scale it to 0 first"),
        "{code:?} {said}"
    );
    // Neither while its last pod stops.
    pods(&kubeconfig, "capstan-all-system", "capstan-controller-manager", 1).await?;
    let scale = [
        "scale",
        "deployment",
        "capstan-controller-manager",
        "--replicas=0",
        "-n",
        "capstan-all-system",
    ];
    kubectl(&kubeconfig, &scale).await?;
    for command in ["--execute", "--revert"] {
        let (code, said) = adopt(&kubeconfig, &[command]).await?;
        ensure!(
            code == Some(1) && said.contains("wait until its pods are gone"),
            "{command}: {code:?} {said}"
        );
    }
    kubectl(
        &kubeconfig,
        &[
            "delete",
            "deployment",
            "capstan-controller-manager",
            "-n",
            "capstan-all-system",
        ],
    )
    .await?;
    ensure!(peers(&kubeconfig).await? == before, "it wrote in spite of an obstacle");

    // As after a crash between the two objects of the grant.
    let role = [
        "create",
        "role",
        "capstan-peer-leases",
        "-n",
        "capv-system",
        "--verb=get",
        "--resource=leases",
    ];
    kubectl(&kubeconfig, &role).await?;
    let (code, said) = adopt(&kubeconfig, &["--execute"]).await?;
    let binding = ["get", "rolebinding", "capstan-peer-leases", "-n", "capv-system"];
    kubectl(&kubeconfig, &binding).await?;
    ensure!(
        code == Some(2) && said.contains("done: scale Deployment"),
        "{code:?} {said}"
    );
    let read = async |peer: &str, path: &str| {
        let (namespace, name, path) = (
            format!("{peer}-system"),
            format!("{peer}-controller-manager"),
            format!("jsonpath={{{path}}}"),
        );
        kubectl(
            &kubeconfig,
            &["get", "-n", &namespace, "deployment", &name, "-o", &path],
        )
        .await
    };
    ensure!(read("capv", ".spec.replicas").await? == "0");
    let args = read("capz", ".spec.template.spec.containers[0].args").await?;
    ensure!(args.contains("ASOAPI=true,MachinePool=false"), "{args}");
    ensure!(read("capz", ".spec.replicas").await? == "1");
    let path = "jsonpath={.items[*].webhooks[*].name}";
    let webhooks = [
        "get",
        "validatingwebhookconfigurations,mutatingwebhookconfigurations",
        "-o",
        path,
    ];
    let webhooks = kubectl(&kubeconfig, &webhooks).await?;
    ensure!(
        webhooks == "validation.azurecluster.infrastructure.cluster.x-k8s.io",
        "{webhooks}"
    );
    let annotations = "jsonpath={.metadata.annotations}";
    let annotations = kubectl(&kubeconfig, &["get", "crd", DEFINITION, "-o", annotations]).await?;
    ensure!(!annotations.contains("cert-manager"), "{annotations}");
    // CAPZ answers no webhook of pools any more, and the API server takes them.
    kubectl(&kubeconfig, &["apply", "-f", &file("pool.yaml", POOL)?]).await?;
    // The old pods act until they are gone.
    let (_, said) = adopt(&kubeconfig, &[]).await?;
    ensure!(said.contains("off; it restarts [--execute does it]"), "{said}");
    pods(&kubeconfig, "capz-system", "capz-controller-manager", 1).await?;
    pods(&kubeconfig, "capv-system", "capv-controller-manager", 0).await?;
    // Once more: nothing is left to do but what a person does.
    let (code, said) = adopt(&kubeconfig, &["--execute"]).await?;
    ensure!(code == Some(2) && !said.contains("done: "), "{code:?} {said}");
    ensure!(said.contains("off; it restarts [done]"), "{said}");

    hold(&kubeconfig, &dir).await?;

    // Capstan's definitions come; what somebody removes in the meantime is not in the way of the rest.
    let ours = CONVERTED_BY_CAPV.replace("capv-system", "capstan-system");
    let ours = ours.replace(
        "\"cert-manager.io/inject-ca-from\": \"capstan-system/capv-serving-cert\"",
        "",
    );
    kubectl(&kubeconfig, &["patch", "crd", DEFINITION, "--type=merge", "-p", &ours]).await?;
    let (code, said) = adopt(&kubeconfig, &["--revert"]).await?;
    ensure!(
        code == Some(0) && said.contains("done: created ValidatingWebhookConfiguration"),
        "{code:?} {said}"
    );
    let converted = "jsonpath={.spec.conversion.webhook.clientConfig.service.namespace} {.metadata.annotations}";
    let converted = kubectl(&kubeconfig, &["get", "crd", DEFINITION, "-o", converted]).await?;
    ensure!(
        converted.starts_with("capv-system ") && converted.contains("capv-system/capv-serving-cert"),
        "{converted}"
    );
    let after = peers(&kubeconfig).await?;
    ensure!(after == before, "not as it was:\n{before:#}\n{after:#}");
    let record = kubectl(
        &kubeconfig,
        &["get", "configmaps", "-n", "capstan-system", "-o", "name"],
    )
    .await?;
    ensure!(!record.contains("capstan-adoption"), "{record}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// Capstan does not lead while its peer holds the lease, and holds it itself afterwards.
async fn hold(kubeconfig: &Path, dir: &Path) -> Result<()> {
    let log_file = dir.join("log");
    let mut command = capstan();
    command.args([
        "run",
        "--controllers",
        "vsphere",
        "--health",
        "0",
        "--metrics",
        "0",
        "--webhook",
        "0",
    ]);
    command.args(["--leader-elect-namespace", "capstan-system", "--log-format", "json"]);
    command.args([
        "--hold-leases",
        "capv-system/capv-controller-manager-runtime",
        "--kubeconfig",
    ]);
    command
        .arg(kubeconfig)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log_file)?);
    let _capstan = Started(command.spawn()?);
    let log = || std::fs::read_to_string(&log_file).unwrap_or_default();
    program::until(|| log().contains("waiting for the controller that holds this lease"))?;
    ensure!(!log().contains("\"message\":\"starting\""), "{}", log());
    let lease = ["-n", "capv-system", "lease", "capv-controller-manager-runtime"];
    let free = [
        &["patch"][..],
        &lease[..],
        &["--type=merge", "-p", r#"{"spec":{"holderIdentity":""}}"#],
    ]
    .concat();
    kubectl(kubeconfig, &free).await?;
    let holder = [&["get"][..], &lease[..], &["-o", "jsonpath={.spec.holderIdentity}"]].concat();
    kubectl_until(kubeconfig, &holder, |holder| holder == "capstan/capstan-system/capstan").await?;
    program::until(|| log().contains("\"message\":\"starting\""))
}

/// Sets the feature gates of CAPZ. Its new pods are all there.
async fn set_gate(kubeconfig: &Path, value: bool) -> Result<()> {
    let args = format!(
        r#"{{"spec":{{"template":{{"spec":{{"containers":[{{"name":"manager","args":["--feature-gates=MachinePool={value}"]}}]}}}}}}}}"#
    );
    let (namespace, name) = ("capz-system", "capz-controller-manager");
    let patch = ["patch", "deployment", name, "-n", namespace, "-p", &args];
    kubectl(kubeconfig, &patch).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_controller_runs_beside_the_one_that_it_replaces() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let (dir, kubeconfig) = (scratch("guard"), plane.kubeconfig().to_owned());
    std::fs::create_dir_all(&dir)?;
    plane.install_crds().await?;
    let (objects, _) = PEERS
        .split_once("---\napiVersion: admissionregistration")
        .unwrap_or((PEERS, ""));
    let file = dir.join("objects.yaml");
    std::fs::write(&file, objects)?;
    kubectl(&kubeconfig, &["apply", "-f", &file.display().to_string()]).await?;
    pods(&kubeconfig, "capz-system", "capz-controller-manager", 1).await?;

    let log_file = dir.join("log");
    let mut command = capstan();
    command.args([
        "run",
        "--controllers",
        "azure-pools,vsphere",
        "--leader-elect-namespace",
    ]);
    command.args(["capstan-system", "--log-format", "json", "--health", "0"]);
    command.args(["--metrics", "127.0.0.1:0", "--webhook", "0", "--kubeconfig"]);
    command
        .arg(&kubeconfig)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log_file)?);
    let _capstan = Started(command.spawn()?);
    let log = || std::fs::read_to_string(&log_file).unwrap_or_default();
    let said = |controller: &str, message: &str| {
        let controller = format!("\"controller\":\"{controller}\"");
        let message = format!("\"message\":\"{message}");
        let log = log();
        log.lines()
            .filter(|line| line.contains(&controller) && line.contains(&message))
            .count()
    };
    let client = reqwest::Client::builder().no_proxy().build()?;
    let waits = async |controller: &str| -> Result<bool> {
        let port = program::port(&log(), "metrics").with_context(log)?;
        let text = client.get(format!("http://127.0.0.1:{port}/metrics")).send().await?;
        let line = format!("capstan_waits_for_peer{{controller=\"{controller}\"}} 1");
        Ok(text.text().await?.contains(&line))
    };
    program::until(|| said("azure-pools", "waits for") == 1 && said("vsphere", "waits for") == 1).with_context(log)?;
    ensure!(
        said("azure-pools", "starting") + said("vsphere", "starting") == 0,
        "{}",
        log()
    );
    ensure!(waits("azure-pools").await? && waits("vsphere").await?, "{}", log());
    let events = [
        "get",
        "events",
        "-n",
        "capz-system",
        "-o",
        "jsonpath={.items[*].reason}",
    ];
    kubectl_until(&kubeconfig, &events, |reasons| reasons.contains("CapstanWaits")).await?;

    // The old pods have the gate on until they are gone.
    set_gate(&kubeconfig, false).await?;
    program::until(|| said("azure-pools", "waits for") == 2).with_context(log)?;
    ensure!(said("azure-pools", "starting") == 0, "{}", log());
    pods(&kubeconfig, "capz-system", "capz-controller-manager", 1).await?;
    program::until(|| said("azure-pools", "starting") == 1).with_context(log)?;
    ensure!(!waits("azure-pools").await? && waits("vsphere").await?, "{}", log());
    ensure!(said("vsphere", "starting") == 0, "{}", log());

    let scale = [
        "scale",
        "deployment",
        "capv-controller-manager",
        "-n",
        "capv-system",
        "--replicas=0",
    ];
    kubectl(&kubeconfig, &scale).await?;
    program::until(|| said("vsphere", "starting") == 1).with_context(log)?;

    // Somebody, for example an upgrade, switches the gate on again.
    set_gate(&kubeconfig, true).await?;
    program::until(|| said("azure-pools", "stops") == 1 && said("azure-pools", "waits for") == 3).with_context(log)?;
    ensure!(said("vsphere", "stops") == 0, "{}", log());
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_gone_is_not_in_the_way_of_giving_the_rest_back() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let (dir, kubeconfig) = (scratch("adopt-gone"), plane.kubeconfig().to_owned());
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("peers.yaml");
    std::fs::write(&file, PEERS)?;
    kubectl(&kubeconfig, &["apply", "-f", &file.display().to_string()]).await?;
    adopt(&kubeconfig, &["--execute"]).await?;
    // The last change of CAPZ is undone after those of CAPV: their Deployment is gone.
    kubectl(
        &kubeconfig,
        &["delete", "deployment", "capv-controller-manager", "-n", "capv-system"],
    )
    .await?;
    let (code, said) = adopt(&kubeconfig, &["--revert"]).await?;
    ensure!(
        code == Some(0)
            && said.contains("done: nothing, as it does not exist any more")
            && said.contains("gave feature gate"),
        "{code:?} {said}"
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// Objects that CAPV and CAPZ accept and Capstan refuses.
const REFUSED: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereClusterIdentity
metadata: {name: team}
spec: {secretName: vc-account, allowedNamespaces: {selector: {}}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereCluster
metadata: {name: shared, namespace: capv-system}
spec: {server: vc.example.com, identityRef: {kind: VSphereClusterIdentity, name: team}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereCluster
metadata: {name: bare, namespace: capv-system}
spec: {server: vc.example.com, thumbprint: 'AA:BB'}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureClusterIdentity
metadata: {name: id, namespace: capz-system}
spec: {type: ServicePrincipal, tenantID: t, clientID: c, clientSecret: {name: password, namespace: capstan-system}, allowedNamespaces: {}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureCluster
metadata: {name: one, namespace: capz-system}
spec: {location: eastus, subscriptionID: 00000000-0000-0000-0000-000000000001, identityRef: {kind: AzureClusterIdentity, name: id}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureCluster
metadata: {name: two, namespace: capz-system}
spec: {location: eastus, subscriptionID: 00000000-0000-0000-0000-000000000001}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureCluster
metadata: {name: without-pools, namespace: capz-system}
spec: {location: eastus, subscriptionID: 00000000-0000-0000-0000-000000000001}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureMachinePool
metadata: {name: one, namespace: capz-system, labels: {cluster.x-k8s.io/cluster-name: one}}
spec: {location: eastus, template: {vmSize: Standard_D2s_v3, osDisk: {osType: Linux}, sshPublicKey: ''}}
---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureMachinePool
metadata: {name: two, namespace: capz-system, labels: {cluster.x-k8s.io/cluster-name: two}}
spec: {location: eastus, template: {vmSize: Standard_D2s_v3, osDisk: {osType: Linux}, sshPublicKey: ''}}
---
apiVersion: v1
kind: Secret
metadata: {name: password, namespace: capstan-system}
";

#[tokio::test(flavor = "multi_thread")]
async fn what_capstan_refuses_is_in_the_way_before_anything_is_switched_over() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let (dir, kubeconfig) = (scratch("adopt-refused"), plane.kubeconfig().to_owned());
    std::fs::create_dir_all(&dir)?;
    let apply = async |text: &str| {
        let file = dir.join("objects.yaml");
        std::fs::write(&file, text)?;
        kubectl(&kubeconfig, &["apply", "-f", &file.display().to_string()]).await
    };
    plane.install_crds().await?;
    // Without the webhooks, which nobody answers here.
    let (objects, _) = PEERS
        .split_once("---\napiVersion: admissionregistration")
        .unwrap_or((PEERS, ""));
    apply(objects).await?;
    apply(REFUSED).await?;
    let before = peers(&kubeconfig).await?;
    let (_, said) = adopt(&kubeconfig, &[]).await?;
    for refused in [
        "VSphereClusterIdentity team: spec.secretName \"vc-account\": Secret capstan-system/vc-account does not exist",
        "VSphereClusterIdentity team: metadata.annotations[capstan.dev/allowed-servers] does not name \"vc.example.com\"",
        "VSphereCluster capv-system/shared: spec.thumbprint is not set",
        "VSphereCluster capv-system/bare: spec.identityRef is not set",
        "AzureClusterIdentity capz-system/id: spec.clientSecret: Secret capstan-system/password does not exist, or does not allow",
        "AzureCluster capz-system/two: spec.identityRef is not set",
    ] {
        ensure!(said.contains(&format!("in the way: {refused}")), "{refused}: {said}");
    }
    ensure!(!said.contains("without-pools"), "{said}");
    for controllers in ["azure-pools", "vsphere"] {
        let (code, said) = adopt(&kubeconfig, &["--execute", "--controllers", controllers]).await?;
        ensure!(code == Some(1) && said.contains(" first"), "{code:?} {said}");
    }
    ensure!(peers(&kubeconfig).await? == before, "it wrote in spite of an obstacle");

    // What each line asks for.
    for fix in [
        &[
            "create",
            "secret",
            "generic",
            "vc-account",
            "-n",
            "capstan-system",
            "--from-literal=ca.crt=x",
        ][..],
        &[
            "annotate",
            "vsphereclusteridentity",
            "team",
            "capstan.dev/allowed-servers=vc.example.com",
        ],
        &["delete", "vspherecluster", "bare", "-n", "capv-system"],
        &[
            "annotate",
            "secret",
            "password",
            "-n",
            "capstan-system",
            "capstan.dev/allowed-namespaces=capz-system",
        ],
        &["delete", "azurecluster", "two", "-n", "capz-system"],
    ] {
        kubectl(&kubeconfig, fix).await?;
    }
    let (_, said) = adopt(&kubeconfig, &[]).await?;
    ensure!(!said.contains("in the way"), "{said}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
