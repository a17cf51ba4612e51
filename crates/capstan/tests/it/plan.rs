//! `capstan plan` as its users start it, against a real API server.

use crate::program;

use std::process::Stdio;

use anyhow::{Result, ensure};
use capstan_testkit::ControlPlane;
use program::{Started, capstan, kubectl_until, scratch};
use serde_json::Value;

const SET: &str = "
apiVersion: machine.openshift.io/v1beta1
kind: MachineSet
metadata: {name: workers}
spec: {replicas: 0, selector: {matchLabels: {set: workers}}, template: {metadata: {labels: {set: workers}}}}
";

const TEMPLATE: &str = "
apiVersion: infrastructure.cluster.x-k8s.io/v1beta2
kind: VSphereMachineTemplate
metadata: {name: small}
spec: {template: {spec: {template: ubuntu, server: vc.example.com, numCPUs: 2, network: {devices: [{networkName: lan, dhcp4: true}]}}}}
";

const MACHINE: &str = "
apiVersion: machine.openshift.io/v1beta1
kind: Machine
metadata: {name: worker, labels: {machine.openshift.io/cluster-api-cluster: ocp}}
spec: {providerSpec: {value: {kind: AzureMachineProviderSpec, apiVersion: machine.openshift.io/v1beta1}}}
";

/// Runs `capstan plan`. Returns its exit code, and what it printed.
async fn plan(plane: &ControlPlane, namespace: &str, args: &[&str]) -> Result<(Option<i32>, String, String)> {
    let mut command = capstan();
    command
        .args(["plan", "--namespace", namespace, "--kubeconfig"])
        .arg(plane.kubeconfig())
        .args(args);
    let out = tokio::task::spawn_blocking(move || command.output()).await??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((out.status.code(), text(&out.stdout), text(&out.stderr)))
}

/// Everything in the namespace that a controller might write.
async fn state(plane: &ControlPlane, namespace: &str) -> Result<String> {
    let kinds = "machinesets.machine.openshift.io,machines.machine.openshift.io,vspheremachinetemplates,leases,events";
    plane.kubectl(&["get", kinds, "-n", namespace, "-o", "yaml"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_exits_with_two_for_a_file_that_changes_something_and_with_zero_otherwise_and_writes_nothing() -> Result<()>
{
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("plan").await?;
    let dir = scratch("plan");
    std::fs::create_dir_all(&dir)?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = dir.join(name);
        std::fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let (set, template) = (file("set.yaml", SET)?, file("template.yaml", TEMPLATE)?);
    plane
        .kubectl(&["apply", "-n", &namespace, "-f", &set, "-f", &template])
        .await?;
    let before = state(&plane, &namespace).await?;

    let openshift = ["--controllers", "openshift"];
    let (code, out, err) = plan(&plane, &namespace, &openshift).await?;
    ensure!(
        code == Some(0) && out.contains("Nothing was written."),
        "{code:?} {out} {err}"
    );

    let larger = file("larger.yaml", &SET.replace("replicas: 0", "replicas: 2"))?;
    let args = [&openshift[..], &["-f", &larger, "-o", "json"]].concat();
    let (code, out, err) = plan(&plane, &namespace, &args).await?;
    ensure!(code == Some(2), "{code:?} {out} {err}");
    let report: Value = serde_json::from_str(&out)?;
    ensure!(
        report["objects"][0]["steps"][0]["step"] == "creates 2 machines",
        "{report:#}"
    );
    ensure!(report["objects"][0]["waves"][0]["adds"] == 2, "{report:#}");
    ensure!(report["files"][0]["outcome"] == "changed", "{report:#}");

    // The same file again changes nothing.
    let (code, out, err) = plan(&plane, &namespace, &[&openshift[..], &["-f", &set]].concat()).await?;
    ensure!(code == Some(0) && out.contains("MachineSet"), "{code:?} {out} {err}");

    let other = file(
        "other.yaml",
        &TEMPLATE
            .replace("name: small", "name: large")
            .replace("numCPUs: 2", "numCPUs: 8"),
    )?;
    let (code, out, err) = plan(&plane, &namespace, &[&openshift[..], &["-f", &other]].concat()).await?;
    ensure!(code == Some(2), "{code:?} {out} {err}");
    ensure!(
        out.contains("would be created: machines that exist stay as they are"),
        "{out}"
    );

    // What the API server would refuse, it refuses in the dry run, too.
    let invalid = file("invalid.yaml", &TEMPLATE.replace("numCPUs: 2", "numCPUs: many"))?;
    let (code, out, err) = plan(&plane, &namespace, &[&openshift[..], &["-f", &invalid]].concat()).await?;
    ensure!(
        code == Some(1) && err.contains("the API server refuses the change"),
        "{code:?} {out} {err}"
    );

    let after = state(&plane, &namespace).await?;
    ensure!(before == after, "something was written:\n{before}\n{after}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_a_file_has_no_more_is_removed_as_the_one_who_applied_it_would_remove_it() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let dir = scratch("plan-removed");
    std::fs::create_dir_all(&dir)?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = dir.join(name);
        std::fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let without = file("without.yaml", SET)?;
    let with = file(
        "with.yaml",
        &SET.replace("{replicas: 0", "{minReadySeconds: 30, replicas: 0"),
    )?;
    let ways: [(&str, &[&str], Option<i32>); 3] = [
        ("changed", &["apply"], Some(2)),
        ("changed", &["apply", "--server-side", "--field-manager=team"], Some(2)),
        // Nobody knows who set it.
        ("unchanged", &["create"], Some(0)),
    ];
    for (outcome, way, expected) in ways {
        let namespace = plane.namespace("plan-removed").await?;
        plane.kubectl(&[way, &["-n", &namespace, "-f", &with]].concat()).await?;
        let before = state(&plane, &namespace).await?;
        let args = ["--controllers", "openshift", "-o", "json", "-f"];
        // The same file changes nothing.
        let (code, out, err) = plan(&plane, &namespace, &[&args[..], &[&with]].concat()).await?;
        ensure!(code == Some(0), "{way:?}: {code:?} {out} {err}");
        let (code, out, err) = plan(&plane, &namespace, &[&args[..], &[&without]].concat()).await?;
        let report: Value = serde_json::from_str(&out)?;
        let line = &report["files"][0];
        ensure!(
            code == expected && line["outcome"] == outcome,
            "{way:?}: {code:?} {out} {err}"
        );
        let unknown = line["note"]
            .as_str()
            .is_some_and(|note| note.contains("--field-manager"));
        ensure!(unknown == (way == ["create"]), "{way:?}: {out}");
        ensure!(
            before == state(&plane, &namespace).await?,
            "{way:?}: something was written"
        );
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_counts_the_calls_that_create_a_new_machine() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("plan-machine").await?;
    let dir = scratch("plan-machine");
    std::fs::create_dir_all(&dir)?;
    let file = dir.join("machine.yaml");
    std::fs::write(&file, MACHINE)?;
    let file = file.display().to_string();
    plane.kubectl(&["apply", "-n", &namespace, "-f", &file]).await?;
    let (code, out, err) = plan(&plane, &namespace, &["--controllers", "openshift", "-o", "json"]).await?;
    ensure!(code == Some(2), "{code:?} {out} {err}");
    let report: Value = serde_json::from_str(&out)?;
    let objects = report["objects"].as_array().cloned().unwrap_or_default();
    let machine = objects.iter().find(|object| object["kind"] == "Machine");
    ensure!(
        machine.is_some_and(|machine| machine["totalCloudCalls"].as_u64() >= Some(2)),
        "{report:#}"
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

const OWNED: &str = "
apiVersion: machine.openshift.io/v1beta1
kind: Machine
metadata:
  name: NAME
  labels: {set: workers, machine.openshift.io/cluster-api-cluster: ocp}
  annotations: {ANNOTATIONS}
  ownerReferences: [{apiVersion: machine.openshift.io/v1beta1, kind: MachineSet, name: workers, uid: UID, controller: true}]
spec: {providerSpec: {value: {kind: AzureMachineProviderSpec, apiVersion: machine.openshift.io/v1beta1}}}
";

#[tokio::test(flavor = "multi_thread")]
async fn a_smaller_set_deletes_the_machines_that_its_plan_names() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("plan-smaller").await?;
    let dir = scratch("plan-smaller");
    std::fs::create_dir_all(&dir)?;
    let apply = async |name: &str, text: &str| -> Result<String> {
        let path = dir.join(name);
        std::fs::write(&path, text)?;
        let path = path.display().to_string();
        plane.kubectl(&["apply", "-n", &namespace, "-f", &path]).await?;
        Ok(path)
    };
    apply("set.yaml", &SET.replace("replicas: 0", "replicas: 3")).await?;
    let uid = ["get", "machinesets.machine.openshift.io/workers", "-n", &namespace];
    let uid = plane
        .kubectl(&[&uid[..], &["-o", "jsonpath={.metadata.uid}"]].concat())
        .await?;
    for (name, annotations) in [
        ("a", "machine.openshift.io/delete-machine: 'true'"),
        ("b", ""),
        ("c", "machine.openshift.io/delete-machine: 'true'"),
    ] {
        let machine = OWNED.replace("NAME", name).replace("UID", &uid);
        apply("machine.yaml", &machine.replace("ANNOTATIONS", annotations)).await?;
    }
    let smaller = dir.join("smaller.yaml");
    std::fs::write(&smaller, SET.replace("replicas: 0", "replicas: 1"))?;
    let smaller = smaller.display().to_string();
    let args = ["--controllers", "openshift", "-o", "json", "-f", &smaller];
    let (code, out, err) = plan(&plane, &namespace, &args).await?;
    ensure!(code == Some(2), "{code:?} {out} {err}");
    let report: Value = serde_json::from_str(&out)?;
    let objects = report["objects"].as_array().cloned().unwrap_or_default();
    let set = objects.iter().find(|object| object["kind"] == "MachineSet");
    let wave = set.and_then(|set| set["waves"][0]["removes"].as_array().cloned());
    // Among equals the order follows from the UIDs.
    let mut removed = wave.unwrap_or_default();
    removed.sort_by_key(ToString::to_string);
    ensure!(removed == ["a", "c"], "{report:#}");

    plane.kubectl(&["apply", "-n", &namespace, "-f", &smaller]).await?;
    let mut command = capstan();
    command.args(["run", "--controllers", "openshift", "--namespace", &namespace]);
    command.args([
        "--leader-elect-namespace",
        &namespace,
        "--health",
        "0",
        "--metrics",
        "0",
    ]);
    command.args(["--webhook", "0", "--kubeconfig"]).arg(plane.kubeconfig());
    command
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(dir.join("log"))?);
    let _capstan = Started(command.spawn()?);
    let left = "go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}} {{end}}{{end}}";
    let left = ["get", "machines.machine.openshift.io", "-n", &namespace, "-o", left];
    kubectl_until(plane.kubeconfig(), &left, |names| names.trim() == "b").await?;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
