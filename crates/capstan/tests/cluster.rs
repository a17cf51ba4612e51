//! The program as its users start it, against a real API server.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use capstan_testkit::{ControlPlane, parts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LIMIT: Duration = Duration::from_secs(120);

fn capstan() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_capstan"));
    command.env_remove("KUBECONFIG").stdin(Stdio::null());
    command
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("capstan-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

/// Builds the parts outside of any time limit: on a fresh machine that takes minutes.
async fn build_parts() -> Result<()> {
    drop(ControlPlane::shared().await?);
    tokio::task::spawn_blocking(|| parts::VCSIM.path().and(parts::CLUSTER_API_CRDS.path())).await??;
    Ok(())
}

fn wait(child: &mut Child, limit: Duration) -> Result<std::process::ExitStatus> {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if since.elapsed() > limit {
            child.kill()?;
            bail!("did not end within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn signal(child: &Child, name: &str) -> Result<()> {
    ensure!(
        Command::new("kill")
            .args([name, &child.id().to_string()])
            .status()?
            .success()
    );
    Ok(())
}

/// Whether any process has `dir` among its arguments.
fn is_mentioned(dir: &Path) -> bool {
    let needle = dir.display().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    processes.into_iter().any(|process| {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&needle)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn up_once_brings_every_example_to_ready_and_leaves_nothing_behind() -> Result<()> {
    build_parts().await?;
    let dir = scratch("once");
    let out = capstan()
        .args(["up", "--once", "--timeout", "90s", "--dir"])
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
    ensure!(!is_mentioned(&dir), "a process is left");
    let log = std::fs::read_to_string(dir.join("capstan.log"))?;
    let forbidden = log.lines().find(|line| line.contains("is forbidden"));
    ensure!(
        forbidden.is_none(),
        "deploy/rbac.yaml lacks a permission: {forbidden:?}"
    );
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_process_is_left_after_kill_9_of_up() -> Result<()> {
    build_parts().await?;
    let dir = scratch("killed");
    std::fs::create_dir_all(&dir)?;
    let out = std::fs::File::create(dir.join("out"))?;
    let mut child = capstan()
        .args(["up", "--no-examples", "--controllers", "openshift,vsphere", "--dir"])
        .arg(&dir)
        .stdout(out)
        .stderr(Stdio::null())
        .spawn()?;
    let since = Instant::now();
    while !std::fs::read_to_string(dir.join("out"))?
        .lines()
        .any(|line| line.starts_with("ready "))
    {
        ensure!(
            since.elapsed() < LIMIT && child.try_wait()?.is_none(),
            "up did not get ready"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let children = descendants(child.id());
    ensure!(children.len() >= 4, "up has only {children:?}");
    signal(&child, "-KILL")?;
    wait(&mut child, LIMIT)?;
    let since = Instant::now();
    while is_mentioned(&dir) || children.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        ensure!(since.elapsed() < LIMIT, "processes are left");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

fn descendants(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let direct: Vec<u32> = lists
        .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|pid| pid.parse().ok())
        .collect();
    let further: Vec<u32> = direct.iter().flat_map(|pid| descendants(*pid)).collect();
    direct.into_iter().chain(further).collect()
}

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
