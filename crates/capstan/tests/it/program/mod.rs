//! Starting the program as its users do, and looking at what becomes of it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use capstan_testkit::{ControlPlane, parts};

/// No more than patience: a machine that builds several things at once is twenty times slower than an idle one.
pub const LIMIT: Duration = Duration::from_secs(300);

pub fn capstan() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_capstan"));
    command.env_remove("KUBECONFIG").stdin(Stdio::null());
    command
}

/// The controllers of OpenShift's machines in this namespace alone, with a log in JSON.
pub fn run_openshift(namespace: &str) -> Command {
    let mut command = capstan();
    command.args(["run", "--controllers", "openshift", "--log-format", "json"]);
    command.args(["--namespace", namespace, "--leader-elect-namespace", namespace]);
    command
}

pub fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("capstan-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

/// Builds the parts outside of any time limit: on a fresh machine that takes minutes.
pub async fn build_parts() -> Result<()> {
    drop(ControlPlane::shared().await?);
    tokio::task::spawn_blocking(|| parts::VCSIM.path().and(parts::CLUSTER_API_CRDS.path())).await??;
    Ok(())
}

pub fn wait(child: &mut Child, limit: Duration) -> Result<std::process::ExitStatus> {
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

pub fn signal(child: &Child, name: &str) -> Result<()> {
    ensure!(
        Command::new("kill")
            .args([name, &child.id().to_string()])
            .status()?
            .success()
    );
    Ok(())
}

/// Whether any process has `dir` among its arguments.
pub fn is_mentioned(dir: &Path) -> bool {
    let needle = dir.display().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    processes.into_iter().any(|process| {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&needle)
    })
}

pub fn descendants(pid: u32) -> Vec<u32> {
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

/// A process that a test started; killed when the test ends before it.
pub struct Started(pub Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A `capstan up` that has said that it is ready; killed when it is dropped.
pub struct Up {
    pub child: Child,
    pub dir: PathBuf,
}

impl Up {
    /// Starts it in `dir` with these arguments, and waits until it is ready.
    pub async fn start(dir: &Path, args: &[&str]) -> Result<Self> {
        Self::start_with(dir, args, &[]).await
    }

    /// Starts it with environment variables, too.
    pub async fn start_with(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let mut command = capstan();
        command.arg("up").args(args).arg("--dir").arg(dir);
        command.envs(variables.iter().copied());
        command.stdout(std::fs::File::create(dir.join("out"))?);
        command.stderr(std::fs::File::create(dir.join("err"))?);
        let child = command.spawn()?;
        let dir = dir.canonicalize()?;
        let mut up = Self { child, dir };
        let since = Instant::now();
        while !up.said().lines().any(|line| line.starts_with("ready ")) {
            let ended = up.child.try_wait()?;
            ensure!(
                since.elapsed() < LIMIT && ended.is_none(),
                "up did not get ready ({ended:?}):\n{}\n{}",
                up.said(),
                std::fs::read_to_string(up.dir.join("err")).unwrap_or_default()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(up)
    }

    /// What it has printed.
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.dir.join("out")).unwrap_or_default()
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    /// Asks it to end, or kills it, and waits until it and all its processes are gone.
    pub async fn end(mut self, signal_name: &str) -> Result<std::process::ExitStatus> {
        let children = descendants(self.child.id());
        signal(&self.child, signal_name)?;
        let status = wait(&mut self.child, LIMIT)?;
        let since = Instant::now();
        while is_mentioned(&self.dir) || children.iter().any(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            ensure!(since.elapsed() < LIMIT, "processes are left");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(status)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// kubectl's answer; fails with what it complained about.
pub async fn kubectl(kubeconfig: &Path, args: &[&str]) -> Result<String> {
    let kubectl = tokio::task::spawn_blocking(|| parts::KUBECTL.path()).await??;
    let mut command = tokio::process::Command::new(kubectl);
    command
        .arg("--kubeconfig")
        .arg(kubeconfig)
        .args(args)
        .kill_on_drop(true);
    let out = command.output().await.context("cannot run kubectl")?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "kubectl {}: {said}", args.join(" "));
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Asks kubectl until its answer is as wanted.
pub async fn kubectl_until(kubeconfig: &Path, args: &[&str], wanted: impl Fn(&str) -> bool) -> Result<()> {
    let since = Instant::now();
    loop {
        let answer = kubectl(kubeconfig, args).await;
        if answer.as_ref().is_ok_and(|answer| wanted(answer)) {
            return Ok(());
        }
        ensure!(
            since.elapsed() < LIMIT,
            "kubectl {} still answers {answer:?}",
            args.join(" ")
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until `met`, and fails after [`LIMIT`].
pub fn until(met: impl Fn() -> bool) -> Result<()> {
    let since = Instant::now();
    while !met() {
        ensure!(since.elapsed() < LIMIT, "waited in vain");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Returns the port in the log line that says what is served.
pub fn port(log: &str, what: &str) -> Option<u16> {
    let line = log.lines().find(|line| line.contains(&format!("serving {what}\"")))?;
    let address = line.split("\"address\":\"").nth(1)?.split('"').next()?;
    address.rsplit(':').next()?.parse().ok()
}
