//! `capstan up` as its users start it: on a machine of one's own, again in the same place, and on a cluster that is there.

use crate::program;

use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, parts};

use program::{LIMIT, Up, build_parts, capstan, is_mentioned, kubectl, kubectl_until, scratch, signal, until, wait};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(out: &Output) -> Result<String> {
    let said = text(&out.stdout);
    ensure!(out.status.success(), "{}:\n{said}\n{}", out.status, text(&out.stderr));
    Ok(said)
}

#[tokio::test(flavor = "multi_thread")]
async fn up_once_brings_every_example_to_ready_and_leaves_nothing_behind() -> Result<()> {
    build_parts().await?;
    let dir = scratch("once");
    let out = capstan()
        .args(["up", "--once", "--timeout", "300s", "--dir"])
        .arg(&dir)
        .output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    ensure!(out.status.success(), "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    let last = text.lines().last().unwrap_or_default();
    let kubeconfig = dir.canonicalize()?.join("kubeconfig");
    ensure!(
        last == format!("ready {}", kubeconfig.display()),
        "the last line is {last:?}"
    );
    for kind in ["Machine ", "AzureMachinePoolMachine", "VSphereVM"] {
        ensure!(text.contains(kind), "no {kind} in:\n{text}");
    }
    until(|| !is_mentioned(&dir)).context("a process is left")?;
    let log = std::fs::read_to_string(dir.join("capstan.log"))?;
    let forbidden = log.lines().find(|line| line.contains("is forbidden"));
    ensure!(forbidden.is_none(), "a role of deploy/ lacks a right: {forbidden:?}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_cluster_says_where_it_is_refuses_a_second_one_and_leaves_no_process_after_kill_9() -> Result<()> {
    build_parts().await?;
    let dir = scratch("empty");
    let up = Up::start(&dir, &["--no-examples", "--controllers", "openshift,vsphere"]).await?;
    let said = up.said();
    let last = said.lines().last().unwrap_or_default();
    ensure!(
        last == format!("ready {}", up.kubeconfig().display()),
        "the last line is {last:?}"
    );
    for line in ["cluster at https://", "definitions installed (", "no examples ("] {
        ensure!(
            said.lines().any(|said| said.starts_with(line)),
            "no {line:?} in:\n{said}"
        );
    }
    // What it says to try works when pasted.
    let tried: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("kubectl ")).collect();
    ensure!(tried.len() == 2, "{said}");
    for line in tried {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = kubectl(&up.kubeconfig(), &words).await?;
        ensure!(
            answer.is_empty() || words[0] == "explain",
            "the cluster is not empty: {answer}"
        );
    }
    let file = up.dir.join("clouds.env");
    let mode = std::fs::metadata(&file)?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "clouds.env has credentials and mode {mode:o}");
    let variables = std::fs::read_to_string(file)?;
    for name in [
        "AZURE_RESOURCE_MANAGER_ENDPOINT=https://",
        "AZURE_CA_FILE=/",
        "VSPHERE_SERVER=",
        "VSPHERE_PASSWORD=",
    ] {
        ensure!(variables.contains(name), "no {name} in:\n{variables}");
    }

    let second = capstan().args(["up", "--dir"]).arg(&dir).output()?;
    let complaint = text(&second.stderr);
    ensure!(
        second.status.code() == Some(1) && complaint.contains("in use by another capstan up"),
        "{complaint}"
    );
    ensure!(
        program::descendants(up.child.id()).len() >= 4,
        "up has too few processes"
    );
    up.end("-KILL").await?;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn up_goes_on_where_it_was_ended_with_the_machines_of_all_clouds_as_they_were() -> Result<()> {
    build_parts().await?;
    let dir = scratch("again");
    let first = capstan()
        .args(["up", "--once", "--timeout", "300s", "--dir"])
        .arg(&dir)
        .output()?;
    succeeded(&first)?;

    let up = Up::start(&dir, &[]).await?;
    let kubeconfig = up.kubeconfig();
    ensure!(up.said().contains("21 example objects, 0 of them new"), "{}", up.said());
    // The clouds know the machines: those asked to go, go; and more can be made beside those that stay.
    let machine = "vspheremachine/dock-with-disks";
    kubectl(
        &kubeconfig,
        &["delete", "machine.cluster.x-k8s.io/dock-with-disks", "-n", "vsphere"],
    )
    .await?;
    // Garbage collection may have been quicker.
    kubectl(
        &kubeconfig,
        &[
            "delete",
            machine,
            "-n",
            "vsphere",
            "--ignore-not-found",
            "--timeout=300s",
        ],
    )
    .await?;
    let archive = "machine.machine.openshift.io/archive";
    kubectl(
        &kubeconfig,
        &["delete", archive, "-n", "openshift-machine-api", "--timeout=300s"],
    )
    .await?;
    let set = "machineset.machine.openshift.io/workers";
    kubectl(
        &kubeconfig,
        &["scale", set, "-n", "openshift-machine-api", "--replicas=3"],
    )
    .await?;
    let ready = [
        "get",
        set,
        "-n",
        "openshift-machine-api",
        "-o",
        "jsonpath={.status.readyReplicas}",
    ];
    kubectl_until(&kubeconfig, &ready, |count| count == "3").await?;
    let vm = "vspherevm/dock-plain";
    let ready = [
        "get",
        vm,
        "-n",
        "vsphere",
        "-o",
        "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}",
    ];
    kubectl_until(&kubeconfig, &ready, |status| status == "True").await?;
    up.end("-KILL").await?;

    // After the hardest end too.
    let up = Up::start(&dir, &[]).await?;
    kubectl(
        &kubeconfig,
        &["scale", set, "-n", "openshift-machine-api", "--replicas=1"],
    )
    .await?;
    let machines = ["get", "machines.machine.openshift.io", "-A", "-o", "name"];
    // The archive machine is an example, and so it is made again.
    kubectl_until(&kubeconfig, &machines, |names| names.lines().count() == 2).await?;
    kubectl(
        &kubeconfig,
        &["delete", "vspheremachine/dock-plain", "-n", "vsphere", "--timeout=300s"],
    )
    .await?;
    ensure!(up.end("-INT").await?.success());
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_there_gets_the_definitions_and_is_left_without_the_examples() -> Result<()> {
    build_parts().await?;
    let plane = ControlPlane::start(Default::default()).await?;
    let command = |timeout: &str| {
        let mut command = capstan();
        command.args([
            "up",
            "--once",
            "--timeout",
            timeout,
            "--controllers",
            "openshift,vsphere",
        ]);
        command.arg("--kubeconfig").arg(plane.kubeconfig());
        command
    };
    let up = |timeout: &'static str| {
        let mut command = command(timeout);
        tokio::task::spawn_blocking(move || command.output())
    };
    let late = up("0s").await??;
    let complaint = text(&late.stderr);
    for expected in [
        "error: not ready after 0 s:",
        "VSphereMachine vsphere/dock-plain is",
        "logs are in ",
    ] {
        ensure!(
            late.status.code() == Some(1) && complaint.contains(expected),
            "no {expected:?} in {complaint}"
        );
    }
    let logs = complaint.lines().find_map(|line| line.strip_prefix("logs are in "));
    std::fs::remove_dir_all(logs.context("no logs")?)?;

    // Whatever is created after this is deleted again, or the last run would find it there and leave it.
    let dir = scratch("interrupted");
    std::fs::create_dir_all(&dir)?;
    let mut child = command("300s")
        .stdout(std::fs::File::create(dir.join("out"))?)
        .stderr(std::fs::File::create(dir.join("err"))?)
        .spawn()?;
    let said = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap_or_default();
    until(|| said("out").contains("controllers started"))?;
    signal(&child, "-INT")?;
    ensure!(wait(&mut child, LIMIT)?.code() == Some(1), "{}", said("out"));
    ensure!(said("err").contains("error: stopped before"), "{}", said("err"));
    let err = said("err");
    let logs = err.lines().find_map(|line| line.strip_prefix("logs are in "));
    std::fs::remove_dir_all(logs.context("no logs")?)?;
    std::fs::remove_dir_all(dir)?;

    let said = succeeded(&up("300s").await??)?;
    let last = said.lines().last().unwrap_or_default();
    ensure!(last.starts_with("ready /"), "the last line is {last:?}");
    let crds = plane.kubectl(&["get", "crds", "-o", "name"]).await?;
    for crd in [
        "machines.machine.openshift.io",
        "vspheremachines.infrastructure.cluster.x-k8s.io",
    ] {
        ensure!(crds.contains(crd), "no {crd} in:\n{crds}");
    }
    for left in [
        "namespaces",
        "machines.machine.openshift.io",
        "vspherevms",
        "vsphereclusters",
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
    ] {
        let names = plane.kubectl(&["get", left, "-A", "-o", "name"]).await?;
        let ours = names.lines().find(|name| {
            ["machine-api", "vsphere", "shipyard", "dock", "workers"]
                .iter()
                .any(|part| name.contains(part))
        });
        ensure!(ours.is_none(), "{ours:?} is left");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn beside_the_real_cluster_api_core_every_example_gets_ready_too() -> Result<()> {
    build_parts().await?;
    tokio::task::spawn_blocking(|| parts::CLUSTER_API.path().and(parts::CLUSTER_API_WEBHOOKS.path())).await??;
    let dir = scratch("core");
    let mut command = capstan();
    command.args(["up", "--once", "--timeout", "300s", "--cluster-api"]);
    command
        .args(["--controllers", "azure-pools,vsphere", "--dir"])
        .arg(&dir);
    let said = succeeded(&tokio::task::spawn_blocking(move || command.output()).await??)?;
    ensure!(
        said.contains("AzureMachinePoolMachine") && said.contains("VSphereVM"),
        "{said}"
    );
    ensure!(dir.join("cluster-api.log").exists(), "core did not run");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

/// A compiler that is in no hurry.
const SLOW_GO: &str =
    "#!/bin/sh\ncase $1 in version) echo go version go1.99.0 linux/amd64 ;; *) exec sleep 300 ;; esac\n";

#[test]
fn a_build_ends_with_the_up_that_waits_for_it() -> Result<()> {
    for name in ["-TERM", "-INT", "-KILL"] {
        let dir = scratch(&format!("slow{name}"));
        let (tools, cache) = (dir.join("tools"), dir.join("cache"));
        std::fs::create_dir_all(&tools)?;
        std::fs::write(tools.join("go"), SLOW_GO)?;
        std::fs::set_permissions(tools.join("go"), PermissionsExt::from_mode(0o755))?;
        let mut child = capstan()
            .args(["up", "--once", "--dir"])
            .arg(dir.join("up"))
            .env("CAPSTAN_CACHE", &cache)
            .env("PATH", format!("{}:/usr/bin:/bin", tools.display()))
            .env_remove("KUBEBUILDER_ASSETS")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // Only what builds has the cache among its arguments.
        until(|| is_mentioned(&cache)).with_context(|| format!("{name}: no build was started"))?;
        signal(&child, name)?;
        let status = wait(&mut child, LIMIT)?;
        ensure!(!status.success(), "{name}: nothing was shown to work");
        until(|| !is_mentioned(&cache)).with_context(|| format!("{name}: the build goes on"))?;
        std::fs::remove_dir_all(dir)?;
    }
    Ok(())
}
