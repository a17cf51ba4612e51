//! `capstan run` as its users start it, against a real API server.

use crate::program;

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use capstan_testkit::ControlPlane;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use program::{LIMIT, capstan, port, run_openshift, scratch, signal, wait};

/// Every metric has a line there.
const OPERATING: &str = include_str!("../../../../docs/operating.md");

async fn get(port: u16, path: &str) -> Result<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// A machine that is refused, and a set without machines: so that every metric of machines has something to tell.
const MACHINES: &str = "
apiVersion: machine.openshift.io/v1beta1
kind: Machine
metadata: {name: refused}
spec: {providerSpec: {value: {kind: AzureMachineProviderSpec, dataDisks: [{lun: 64}]}}}
---
apiVersion: machine.openshift.io/v1beta1
kind: MachineSet
metadata: {name: none}
spec: {replicas: 0, selector: {matchLabels: {set: none}}, template: {metadata: {labels: {set: none}}}}
";

/// Asks for the metrics until they tell of the machine that is refused, under the name that dashboards use.
async fn metrics(port: u16) -> Result<String> {
    let since = Instant::now();
    loop {
        let answer = get(port, "/metrics").await?;
        if answer.contains("\nmapi_instance_create_failed{name=\"refused\"") {
            return Ok(answer);
        }
        ensure!(since.elapsed() < LIMIT, "no failure is told:\n{answer}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn run_serves_health_and_metrics_leads_keeps_to_its_namespace_and_gives_the_lease_back() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("run").await?;
    let elsewhere = plane.namespace("elsewhere").await?;
    let dir = scratch("run");
    std::fs::create_dir_all(&dir)?;
    let log_file = dir.join("log");
    let mut child = run_openshift(&namespace)
        .args([
            "--health",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            // It would refuse the machine before there is one.
            "--webhook",
            "0",
        ])
        .arg("--kubeconfig")
        .arg(plane.kubeconfig())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log_file)?)
        .spawn()?;
    let log = || std::fs::read_to_string(&log_file).unwrap_or_default();
    let since = Instant::now();
    while !log().contains("\"message\":\"starting\"") {
        ensure!(
            since.elapsed() < LIMIT && child.try_wait()?.is_none(),
            "run did not start:\n{}",
            log()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for path in ["/healthz", "/readyz"] {
        let answer = get(port(&log(), "health").context("no health port")?, path).await?;
        ensure!(answer.contains(" 200 ") && answer.ends_with("ok"), "{path}: {answer}");
    }
    let manifest = dir.join("machines.yaml");
    std::fs::write(&manifest, MACHINES)?;
    let manifest = manifest.display().to_string();
    for namespace in [&elsewhere, &namespace] {
        plane.kubectl(&["apply", "-n", namespace, "-f", &manifest]).await?;
    }
    let metrics = metrics(port(&log(), "metrics").context("no metrics port")?).await?;
    ensure!(
        metrics.contains("capstan_leading{lease=\"capstan\"} 1") && metrics.ends_with("# EOF\n"),
        "{metrics}"
    );
    let told = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for name in told.filter_map(|line| line.split(' ').next()) {
        ensure!(
            OPERATING.contains(&format!("`{name}`")),
            "{name} is not in docs/operating.md"
        );
    }
    let holder = [
        "get",
        "lease",
        "capstan",
        "-n",
        &namespace,
        "-o",
        "jsonpath={.spec.holderIdentity}",
    ];
    ensure!(!plane.kubectl(&holder).await?.is_empty(), "nobody holds the lease");

    signal(&child, "-TERM")?;
    let status = wait(&mut child, LIMIT)?;
    ensure!(status.success(), "{status}:\n{}", log());
    ensure!(plane.kubectl(&holder).await?.is_empty(), "the lease was not given back");
    // What --namespace leaves out was not touched, though it was there first.
    let touched = "jsonpath={.status}{.metadata.finalizers}";
    let refused = ["get", "machines.machine.openshift.io/refused", "-o", touched, "-n"];
    ensure!(
        !plane
            .kubectl(&[&refused[..], &[namespace.as_str()]].concat())
            .await?
            .is_empty()
    );
    let left = plane.kubectl(&[&refused[..], &[elsewhere.as_str()]].concat()).await?;
    ensure!(left.is_empty(), "touched in another namespace: {left}");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[test]
fn without_go_and_without_the_parts_one_sentence_says_what_to_install() -> Result<()> {
    let dir = scratch("bare");
    let out = capstan()
        .arg("up")
        .env("PATH", "/nowhere")
        .env("CAPSTAN_CACHE", &dir)
        .output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(
        !out.status.success() && said.contains("install Go 1.26 or newer"),
        "{said}"
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
