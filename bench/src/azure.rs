//! What the benchmarks on the simulated Azure share: the cloud, the controllers as `capstan run`, and what they cost.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use capstan_sim::azure::joiner::{Cluster, Options};
use capstan_sim::azure::{Azure, Config, Handle, Span, Times};
use capstan_testkit::tenants::AzureAccess;
use tokio::process::{Child, Command};

use crate::measure::{Audited, Usage, usage};

/// The controllers' own start is not measured; they have settled by then.
const SETTLE: Duration = Duration::from_secs(3);
/// Last writes (events) are on their way.
const TAIL: Duration = Duration::from_secs(2);

/// Times of the simulated Azure.
#[derive(clap::Args, Clone)]
pub struct CloudArgs {
    /// How long Azure takes to make a VM or instance
    #[arg(long, default_value = "20s")]
    pub create: Span,
    /// How long Azure takes to delete a VM or instance
    #[arg(long, default_value = "10s")]
    pub delete: Span,
    /// How long every call takes
    #[arg(long, default_value = "50ms")]
    pub latency: Span,
    /// Seconds in Retry-After of compute operations
    #[arg(long, default_value_t = 10)]
    pub retry_after: u64,
    /// How long network calls take; then they are operations too
    #[arg(long, default_value = "0s")]
    pub network: Span,
    /// Refuse calls beyond Azure's published limits
    #[arg(long)]
    pub throttle: bool,
    /// The program that is measured [default: the capstan beside this one]
    #[arg(long, env = "CAPSTAN")]
    pub capstan: Option<PathBuf>,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 900)]
    pub patience: u64,
    /// Print which calls and writes were made
    #[arg(long)]
    pub details: bool,
}

impl CloudArgs {
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }

    pub async fn start(&self, plane: &Audited) -> Result<Handle> {
        let times = Times {
            vm_create: self.create,
            vm_delete: self.delete,
            instance_create: self.create,
            instance_delete: self.delete,
            network: self.network,
            latency: self.latency,
            disk: Span::ZERO,
            ..Times::default()
        };
        let joiner = Options {
            default: Some(Cluster::Kubeconfig(plane.kubeconfig().to_owned())),
            ..Options::default()
        };
        let config = Config {
            times,
            retry_after: self.retry_after,
            throttle: self.throttle,
            joiner: Some(joiner),
            ..Config::default()
        };
        Azure::start(config).await
    }

    /// `capstan run` with one controller, once it has settled.
    pub async fn run(&self, plane: &Audited, sim: &Handle, controller: &str, namespace: &str) -> Result<Child> {
        let beside = std::env::current_exe()?.with_file_name("capstan");
        let program = self.capstan.clone().unwrap_or(beside);
        let child = Command::new(&program)
            .args(["run", "--controllers", controller, "--namespace", namespace])
            .args([
                "--leader-elect=false",
                "--health",
                "0",
                "--metrics",
                "0",
                "--log-level",
                "warn",
            ])
            .arg("--kubeconfig")
            .arg(plane.kubeconfig())
            .env("AZURE_AUTHORITY_HOST", &sim.url)
            .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &sim.url)
            .env("SSL_CERT_FILE", &sim.ca_file)
            // As `capstan run` sets it for itself.
            .env("MALLOC_ARENA_MAX", "1")
            .kill_on_drop(true)
            .spawn()
            .with_context(|| {
                format!(
                    "cannot run {}; build it with `cargo build -p capstan`",
                    program.display()
                )
            })?;
        tokio::time::sleep(SETTLE).await;
        Ok(child)
    }
}

/// What a stretch of work cost.
pub struct Meter<'a> {
    plane: &'a Audited,
    sim: &'a Handle,
    namespace: &'a str,
    pid: u32,
    usage: Usage,
    writes: std::collections::BTreeMap<String, u64>,
    sign_ins: u64,
    began: std::time::Instant,
}

impl<'a> Meter<'a> {
    pub fn start(plane: &'a Audited, sim: &'a Handle, namespace: &'a str, child: &Child) -> Result<Self> {
        let pid = child.id().context("the controllers ended")?;
        sim.clear_requests();
        Ok(Self {
            plane,
            sim,
            namespace,
            pid,
            usage: usage(pid)?,
            writes: writes(plane, namespace)?,
            sign_ins: sim.sign_ins(),
            began: std::time::Instant::now(),
        })
    }

    /// Prints what was used since the start, for each of `n` things.
    pub async fn report(self, what: &str, n: usize, ideal: Duration, details: bool) -> Result<()> {
        let took = self.began.elapsed();
        tokio::time::sleep(TAIL).await;
        let used = usage(self.pid)?;
        let each = |total: u64| total as f64 / n as f64;
        let writes = writes(self.plane, self.namespace)?;
        let written = writes.values().sum::<u64>() - self.writes.values().sum::<u64>();
        let calls = self.sim.arm_requests();
        println!("{what}");
        let ratio = took.as_secs_f64() / ideal.as_secs_f64().max(0.001);
        println!(
            "  time                {:.1} s, {ratio:.2} x the ideal {:.1} s",
            took.as_secs_f64(),
            ideal.as_secs_f64()
        );
        println!("  ARM calls each      {:.2}", each(calls.len() as u64));
        println!("  sign-ins            {}", self.sim.sign_ins() - self.sign_ins);
        println!("  kube writes each    {:.2}", each(written));
        println!("  CPU seconds         {:.2}", used.cpu_seconds - self.usage.cpu_seconds);
        println!(
            "  peak memory         {:.0} MiB (before: {:.0})",
            used.peak_mib, self.usage.peak_mib
        );
        if details {
            let mut by_policy = std::collections::BTreeMap::<String, u64>::new();
            for call in calls {
                *by_policy.entry(format!("{} {}", call.policy, call.status)).or_default() += 1;
            }
            let before = |name: &str| self.writes.get(name).copied().unwrap_or_default();
            let writes: Vec<_> = writes
                .iter()
                .map(|(name, count)| (name, count - before(name)))
                .filter(|(_, count)| *count > 0)
                .collect();
            println!("  calls: {by_policy:?}\n  writes: {writes:?}");
        }
        Ok(())
    }
}

/// What the controllers wrote, to Nodes too.
fn writes(plane: &Audited, namespace: &str) -> Result<std::collections::BTreeMap<String, u64>> {
    let mut writes = plane.writes(namespace)?;
    writes.extend(
        plane
            .writes("")?
            .into_iter()
            .filter(|(what, _)| what.contains(" nodes")),
    );
    Ok(writes)
}

/// Returns the account that the simulated Azure knows.
pub fn access(sim: &Handle) -> AzureAccess {
    AzureAccess {
        subscription: sim.subscription.clone(),
        tenant: sim.tenant.clone(),
        client_id: sim.client_id.clone(),
        client_secret: sim.client_secret.clone(),
    }
}
