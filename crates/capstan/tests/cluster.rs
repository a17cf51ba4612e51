//! `capstan run` as its users start it, against a real API server.

mod program;

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use capstan_testkit::ControlPlane;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use program::{LIMIT, capstan, scratch, signal, wait};

async fn get(port: u16, path: &str) -> Result<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The port that a log line names as `address`.
fn port(log: &str, what: &str) -> Option<u16> {
    let line = log.lines().find(|line| line.contains(&format!("serving {what}\"")))?;
    let address = line.split("\"address\":\"").nth(1)?.split('"').next()?;
    address.rsplit(':').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn run_serves_health_and_metrics_leads_and_gives_the_lease_back() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("run").await?;
    let dir = scratch("run");
    std::fs::create_dir_all(&dir)?;
    let log_file = dir.join("log");
    let mut child = capstan()
        .args([
            "run",
            "--controllers",
            "openshift",
            "--log-format",
            "json",
            "--namespace",
            &namespace,
        ])
        .args([
            "--leader-elect-namespace",
            &namespace,
            "--health",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
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
    let metrics = get(port(&log(), "metrics").context("no metrics port")?, "/metrics").await?;
    ensure!(
        metrics.contains("capstan_leading 1") && metrics.ends_with("# EOF\n"),
        "{metrics}"
    );
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
    let status = wait(&mut child, Duration::from_secs(30))?;
    ensure!(status.success(), "{status}:\n{}", log());
    ensure!(plane.kubectl(&holder).await?.is_empty(), "the lease was not given back");
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
