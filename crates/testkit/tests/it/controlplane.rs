//! The control plane itself: it answers as a real one does, and it ends with whoever it was started for.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, Options, manifests, parts};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::Eviction;
use kube::Api;
use kube::api::PostParams;
use kube::runtime::wait::await_condition;
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(180);

fn object<K: serde::de::DeserializeOwned>(value: serde_json::Value) -> K {
    serde_json::from_value(value).expect("a manifest of this kind")
}

fn has_condition(node: &Node, kind: &str, status: &str) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == kind && condition.status == status)
}

#[tokio::test(flavor = "multi_thread")]
async fn of_objects_that_cannot_all_be_created_those_that_were_are_known() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let (client, namespace) = (plane.client().await?, plane.namespace("missing").await?);
    let names = ["there", "new", "No Name", "never"];
    let maps = names.map(|name| object(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})));
    manifests::apply(&client, &namespace, &maps[..1]).await?;
    let mut created = Vec::new();
    let made = manifests::create_missing(&client, &namespace, &maps, &mut created).await;
    ensure!(made.is_err_and(|error| error.to_string().contains("cannot create ConfigMap No Name")));
    ensure!(created == maps[1..2], "{created:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_become_ready_pods_run_and_budgets_refuse_evictions() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    tokio::time::timeout(LIMIT, async {
        let client = plane.client().await?;
        let namespace = plane.namespace("testkit").await?;
        let name = format!("node-{namespace}");
        let nodes: Api<Node> = Api::all(client.clone());
        let create = PostParams::default();
        nodes
            .create(&create, &object(json!({"metadata": {"name": name}})))
            .await?;
        let ready = |node: Option<&Node>| node.is_some_and(|node| has_condition(node, "Ready", "True"));
        await_condition(nodes.clone(), &name, ready).await?;

        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let pod = json!({
            "metadata": {"name": "web", "labels": {"app": "web"}},
            "spec": {"nodeName": name, "containers": [{"name": "web", "image": "none"}]},
        });
        pods.create(&create, &object(pod)).await?;
        let running = |pod: Option<&Pod>| {
            let phase = pod
                .and_then(|pod| pod.status.as_ref())
                .and_then(|status| status.phase.as_deref());
            phase == Some("Running")
        };
        await_condition(pods.clone(), "web", running).await?;

        let budgets: Api<k8s_openapi::api::policy::v1::PodDisruptionBudget> =
            Api::namespaced(client.clone(), &namespace);
        let budget = json!({
            "metadata": {"name": "web"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
        });
        budgets.create(&create, &object(budget)).await?;
        await_condition(
            budgets,
            "web",
            |budget: Option<&k8s_openapi::api::policy::v1::PodDisruptionBudget>| {
                budget
                    .and_then(|budget| budget.status.as_ref())
                    .is_some_and(|status| status.current_healthy == Some(1))
            },
        )
        .await?;
        let mut config = plane.config().await?;
        config.default_retry = false;
        let pods: Api<Pod> = Api::namespaced(kube::Client::try_from(config)?, &namespace);
        let eviction: Eviction = object(json!({"metadata": {"name": "web", "namespace": namespace}}));
        let refused = pods.create_subresource::<Eviction, kube::core::Status>("eviction", "web", &create, &eviction);
        match refused.await {
            Err(kube::Error::Api(status)) => ensure!(status.code == 429, "expected 429, got {status:?}"),
            other => anyhow::bail!("expected 429, got {other:?}"),
        }
        let listed = plane.kubectl(&["get", "pods", "-n", &namespace]).await?;
        ensure!(listed.contains("Running"), "kubectl shows {listed}");
        nodes.delete(&name, &Default::default()).await?;
        Ok(())
    })
    .await?
}

#[tokio::test(flavor = "multi_thread")]
async fn access_is_for_the_owner_alone() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    for name in [
        "kubeconfig",
        "kwok.kubeconfig",
        "pki/ca.key",
        "pki/sa.key",
        "pki/apiserver.key",
    ] {
        let mode = std::fs::metadata(plane.dir().join(name))?.permissions().mode();
        ensure!(mode & 0o077 == 0, "{name} has mode {mode:o}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn kwok_leaves_a_node_alone_that_asks_for_it() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    tokio::time::timeout(LIMIT, async {
        let nodes: Api<Node> = Api::all(plane.client().await?);
        let unmanaged = format!("left-alone-{}", std::process::id());
        let managed = format!("looked-after-{}", std::process::id());
        let create = PostParams::default();
        let label = json!({"capstan.dev/kwok": "off"});
        nodes
            .create(
                &create,
                &object(json!({"metadata": {"name": unmanaged, "labels": label}})),
            )
            .await?;
        nodes
            .create(&create, &object(json!({"metadata": {"name": managed}})))
            .await?;
        let ready = |node: Option<&Node>| node.is_some_and(|node| has_condition(node, "Ready", "True"));
        await_condition(nodes.clone(), &managed, ready).await?;
        ensure!(!has_condition(&nodes.get(&unmanaged).await?, "Ready", "True"));
        for name in [unmanaged, managed] {
            nodes.delete(&name, &Default::default()).await?;
        }
        Ok(())
    })
    .await?
}

/// Run as a child by the tests below: starts a control plane, says where it is, and waits to be killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run as a child of other tests"]
async fn hold_a_control_plane() -> Result<()> {
    let report = PathBuf::from(std::env::var("TESTKIT_REPORT").context("run as a child only")?);
    let plane = match std::env::var("TESTKIT_HOLD").as_deref() {
        Ok("shared") => ControlPlane::shared().await?,
        _ => ControlPlane::start(Options::default()).await?,
    };
    std::fs::write(&report, plane.dir().display().to_string())?;
    tokio::time::sleep(LIMIT).await;
    Ok(())
}

fn process_ids(dir: &Path) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pid") {
            found.push(std::fs::read_to_string(path)?.trim().parse()?);
        }
    }
    Ok(found)
}

fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// Whether any process still has `needle` among its arguments.
fn mentioned_by_a_process(needle: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return false;
    };
    let own = std::process::id().to_string();
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy() != own)
        .any(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(needle)
        })
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let since = Instant::now();
    while !done() {
        ensure!(since.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn kill_the_runner_and_look(hold: &str) -> Result<()> {
    // Built here, where no time limit runs.
    for part in [
        &parts::ETCD,
        &parts::KUBE_APISERVER,
        &parts::KUBE_CONTROLLER_MANAGER,
        &parts::KWOK,
        &parts::KWOK_STAGES,
    ] {
        part.path()?;
    }
    let report = std::env::temp_dir().join(format!("capstan-testkit-{}-{hold}", std::process::id()));
    let _ = std::fs::remove_file(&report);
    // The shell stands for cargo: it starts the test program and outlives it or not.
    let mut runner = Command::new("/bin/sh")
        .args([
            "-c",
            "\"$0\" --exact controlplane::hold_a_control_plane --ignored & wait",
        ])
        .arg(std::env::current_exe()?)
        .env("TESTKIT_HOLD", hold)
        .env("TESTKIT_REPORT", &report)
        .env("CARGO", "cargo")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut dir = String::new();
    wait_for("the child's control plane", || {
        dir = std::fs::read_to_string(&report).unwrap_or_default();
        !dir.is_empty()
    })?;
    let ids = process_ids(Path::new(&dir))?;
    ensure!(
        ids.len() == 4 && ids.iter().all(|pid| is_running(*pid)),
        "expected four programs, got {ids:?}"
    );

    if hold == "own" {
        // The test program itself is killed; its parent lives on.
        let child = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", runner.id()))?;
        ensure!(Command::new("kill").args(["-9", child.trim()]).status()?.success());
    } else {
        // The runner is killed, and not even reaped: nobody may wait for us to do that.
        ensure!(
            Command::new("kill")
                .args(["-9", &runner.id().to_string()])
                .status()?
                .success()
        );
    }
    wait_for("the programs to end", || !ids.iter().any(|pid| is_running(*pid)))?;
    wait_for("guards and keeper to end", || !mentioned_by_a_process(&dir))?;
    let _ = runner.kill();
    runner.wait()?;
    let _ = std::fs::remove_file(&report);
    let _ = std::fs::remove_dir_all(&dir);
    Ok(())
}

#[test]
fn no_process_is_left_after_kill_9_of_a_test_program() -> Result<()> {
    kill_the_runner_and_look("own")
}

#[test]
fn no_process_is_left_after_kill_9_of_the_test_runner() -> Result<()> {
    kill_the_runner_and_look("shared")
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_api_core_converts_defaults_and_reconciles() -> Result<()> {
    let plane = ControlPlane::start(Options {
        capi_core: true,
        ..Options::default()
    })
    .await?;
    tokio::time::timeout(LIMIT, async {
        plane.install_crds().await?;
        let namespace = plane.namespace("capi").await?;
        let path = plane.dir().join("cluster.yaml");
        std::fs::write(
            &path,
            "apiVersion: cluster.x-k8s.io/v1beta1\nkind: Cluster\nmetadata: {name: one}\n\
             spec:\n  infrastructureRef: {apiVersion: infrastructure.cluster.x-k8s.io/v1beta1, kind: VSphereCluster, name: one}\n  controlPlaneEndpoint: {host: 127.0.0.1, port: 6443}\n",
        )?;
        plane.kubectl(&["apply", "-n", &namespace, "-f", &path.display().to_string()]).await?;
        // Read in the newer version, with a phase that only the manager writes.
        let phase = ["get", "clusters.v1beta2.cluster.x-k8s.io", "one", "-n", &namespace, "-o", "jsonpath={.status.phase}"];
        while plane.kubectl(&phase).await?.is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    })
    .await?
}

#[tokio::test(flavor = "multi_thread")]
async fn a_simulated_vcenter_says_how_to_log_in() -> Result<()> {
    let vcsim = capstan_testkit::vcsim(Default::default()).await?;
    ensure!(vcsim.url.starts_with("https://127.0.0.1:"), "{}", vcsim.url);
    Ok(())
}
