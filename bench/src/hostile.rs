//! A good tenant's machines, created alone and beside hostile tenants: vCenters that answer without end, workload clusters
//! with 100,000 Nodes, vCenters that answer late, and clients that never finish their headers.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use capstan_api::azure::AzureMachinePoolMachine;
use capstan_api::vsphere::{VSphereMachine, VSphereVM};
use capstan_sim::azure::{Azure, Config, Span, Times};
use capstan_testkit::hostile::{NO_MEMORY, Server, SlowClients, Vcenter};
use capstan_testkit::tenants::{Tenant, VcenterAccess};
use capstan_testkit::vcsim;
use capstan_testkit::vcsim::Options;
use futures::TryStreamExt;
use kube::Api;
use kube::runtime::wait::await_condition;
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use tokio::process::{Child, Command};

use crate::azure::access;
use crate::measure::{Audited, usage};

/// The start of `capstan run` is not measured; it has settled by then.
const SETTLE: Duration = Duration::from_secs(3);

#[derive(clap::Args)]
pub struct Args {
    /// How many machines the good tenant creates, one after the other, alone and again beside the hostile tenants
    #[arg(long, default_value_t = 7)]
    machines: usize,
    /// How many tenants of each kind are hostile
    #[arg(long, default_value_t = 4)]
    tenants: usize,
    /// How many machines each hostile tenant of a vCenter has
    #[arg(long, default_value_t = 5)]
    hostile_machines: usize,
    /// How many machines each tenant of a slow vCenter has: more than are reconciled at a time
    #[arg(long, default_value_t = 100)]
    slow_machines: usize,
    /// How many Nodes each hostile workload cluster has
    #[arg(long, default_value_t = 100_000)]
    nodes: usize,
    /// How many bytes of annotations each of them has; a page of 50 may have 4 MiB
    #[arg(long, default_value_t = 70_000)]
    node_bytes: usize,
    /// How many clients with slow headers connect to each port
    #[arg(long, default_value_t = 200)]
    clients: usize,
    /// How long a clone takes, in milliseconds
    #[arg(long, default_value_t = 5000)]
    clone_ms: u64,
    /// How long after power-on a guest has its address, in milliseconds
    #[arg(long, default_value_t = 1000)]
    address_ms: u64,
    /// The program that is measured [default: the capstan beside this one]
    #[arg(long, env = "CAPSTAN")]
    capstan: Option<PathBuf>,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 300)]
    patience: u64,
}

pub async fn run(args: &Args) -> Result<()> {
    let plane = Audited::start().await?;
    plane.plane.install_crds().await?;
    plane.plane.install_cluster_api_crds().await?;
    let sim = vcsim(Options {
        clone_delay: Duration::from_millis(args.clone_ms),
        guest_ip_delay: Some(Duration::from_millis(args.address_ms)),
        ..Options::default()
    })
    .await?;
    let times = Times {
        instance_create: Span::ZERO,
        ..Times::default()
    };
    let azure = Azure::start(Config {
        times,
        ..Config::default()
    })
    .await?;
    let (child, ports) = start(args, &plane, &azure).await?;
    let pid = child.id().context("capstan ended")?;
    let tenant = async |name: &str| {
        anyhow::Ok(Tenant {
            client: plane.client().await?,
            namespace: plane.plane.namespace(name).await?,
        })
    };
    let bench = Bench {
        args,
        good: tenant("good").await?,
    };
    bench.good.vsphere_cluster("c", &(&sim).into()).await?;
    let alone = bench.machines("alone").await?;
    let before = usage(pid)?;
    println!(
        "alone                 {:.2} s a machine (median of {}); {:.0} MiB at peak",
        median(&alone),
        alone.len(),
        before.peak_mib
    );

    let mut servers = Vec::new();
    for n in 0..args.tenants {
        for (kind, hostile) in Vcenter::ALL.into_iter().chain([Vcenter::Slow]).enumerate() {
            let (server, tenant) = (Server::vcenter(hostile).await?, tenant("vcenter").await?);
            bench.hostile_vcenter(&tenant, &server, hostile).await?;
            servers.push((format!("vCenter {kind}.{n} ({hostile:?})"), server));
        }
        let (server, tenant) = (
            Server::cluster(args.nodes, args.node_bytes).await?,
            tenant("nodes").await?,
        );
        let cluster = format!("{}-c", tenant.namespace);
        tenant
            .azure_cluster(&cluster, &access(&azure), &server.kubeconfig())
            .await?;
        let image = "/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node";
        let pool = format!("p{n}");
        tenant.azure_pool(&cluster, &pool, 2, json!(1), image).await?;
        bench.refuses_nodes(&tenant).await?;
        servers.push((format!("workload cluster {n}"), server));
    }
    let slow = SlowClients::start(&ports, args.clients).await?;
    let beside = bench.machines("beside").await?;
    let after = usage(pid)?;
    drop(slow);
    println!(
        "beside hostile ones   {:.2} s a machine (median of {}), {:.2} x; {:.0} MiB at peak, now {:.0} MiB without program pages",
        median(&beside),
        beside.len(),
        median(&beside) / median(&alone),
        after.peak_mib,
        after.anonymous_mib
    );
    println!(
        "slowest               {:.2} s alone, {:.2} s beside",
        largest(&alone),
        largest(&beside)
    );
    println!(
        "CPU seconds           {:.1} alone, {:.1} beside",
        before.cpu_seconds,
        after.cpu_seconds - before.cpu_seconds
    );
    for (name, server) in &servers {
        let mib = server.sent() / (1 << 20);
        println!("  {name}: {} requests, {mib} MiB sent", server.requests());
    }
    Ok(())
}

/// Starts `capstan run` with the controllers that face hostile servers; returns the addresses of its ports, too.
async fn start(args: &Args, plane: &Audited, azure: &capstan_sim::azure::Handle) -> Result<(Child, [String; 2])> {
    let beside = std::env::current_exe()?.with_file_name("capstan");
    let program = args.capstan.clone().unwrap_or(beside);
    let free = || anyhow::Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string());
    let (health, metrics) = (free()?, free()?);
    let child = Command::new(&program)
        .args(["run", "--controllers", "azure-pools,vsphere", "--log-level", "error"])
        .args([
            "--leader-elect=false",
            "--webhook",
            "0",
            "--health",
            &health,
            "--metrics",
            &metrics,
        ])
        .arg("--kubeconfig")
        .arg(plane.kubeconfig())
        // As the Deployment sets it.
        .env("MALLOC_ARENA_MAX", "1")
        .env("AZURE_AUTHORITY_HOST", &azure.url)
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &azure.url)
        .env("SSL_CERT_FILE", &azure.ca_file)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| {
            format!(
                "cannot run {}; build it with `cargo build -p capstan`",
                program.display()
            )
        })?;
    tokio::time::sleep(SETTLE).await;
    Ok((child, [health, metrics]))
}

struct Bench<'a> {
    args: &'a Args,
    good: Tenant,
}

impl Bench<'_> {
    /// Creates the good tenant's machines one after the other; returns the seconds that each took.
    async fn machines(&self, prefix: &str) -> Result<Vec<f64>> {
        let api: Api<VSphereMachine> = Api::namespaced(self.good.client.clone(), &self.good.namespace);
        let mut took = Vec::new();
        for n in 0..self.args.machines {
            let name = format!("{prefix}-{n}");
            let owner = self.good.vsphere_owner("c", &name).await?;
            let began = Instant::now();
            self.good.vsphere_machine(&owner, 1).await?;
            let is_ready = |machine: Option<&VSphereMachine>| {
                machine
                    .and_then(|machine| machine.status.as_ref())
                    .is_some_and(|status| status.ready)
            };
            self.in_time(&name, async {
                Ok(await_condition(api.clone(), &name, is_ready).await.map(drop)?)
            })
            .await?;
            took.push(began.elapsed().as_secs_f64());
            api.delete(&name, &Default::default()).await?;
            self.in_time(&name, async {
                let is_gone = |machine: Option<&VSphereMachine>| machine.is_none();
                Ok(await_condition(api.clone(), &name, is_gone).await.map(drop)?)
            })
            .await?;
        }
        Ok(took)
    }

    /// Creates a cluster and machines on a hostile vCenter, and waits until a VM reports it.
    async fn hostile_vcenter(&self, tenant: &Tenant, server: &Server, kind: Vcenter) -> Result<()> {
        let vcenter = VcenterAccess {
            server: server.address.clone(),
            username: "user".into(),
            password: "secret".into(),
            ca: server.ca.clone(),
        };
        tenant.vsphere_cluster("c", &vcenter).await?;
        let machines = match kind {
            Vcenter::Slow => self.args.slow_machines,
            _ => self.args.hostile_machines,
        };
        for n in 0..machines {
            let owner = tenant.vsphere_owner("c", &format!("m{n}")).await?;
            tenant.vsphere_machine(&owner, 1).await?;
        }
        if matches!(kind, Vcenter::Slow) {
            return Ok(());
        }
        let api: Api<VSphereVM> = Api::namespaced(tenant.client.clone(), &tenant.namespace);
        let reported = async {
            let mut events = std::pin::pin!(watcher(api, watcher::Config::default()).applied_objects());
            while let Some(vm) = events.try_next().await? {
                let conditions = vm.status.unwrap_or_default().conditions;
                let mut texts = conditions.iter().filter_map(|condition| condition.message.as_deref());
                if texts.any(|text| text.contains(kind.report()) || text.contains(NO_MEMORY)) {
                    return Ok(());
                }
            }
            bail!("the watch ended")
        };
        self.in_time("a hostile vCenter", reported).await
    }

    /// Waits until a machine of a pool reports that its workload cluster has too many Nodes.
    async fn refuses_nodes(&self, tenant: &Tenant) -> Result<()> {
        let api: Api<AzureMachinePoolMachine> = Api::namespaced(tenant.client.clone(), &tenant.namespace);
        let reported = async {
            let mut events = std::pin::pin!(watcher(api, watcher::Config::default()).applied_objects());
            while let Some(machine) = events.try_next().await? {
                let conditions = machine.status.unwrap_or_default().conditions;
                let mut texts = conditions.iter().filter_map(|condition| condition.message.as_deref());
                if texts.any(|text| text.contains("manages no machines") || text.contains(NO_MEMORY)) {
                    return Ok(());
                }
            }
            bail!("the watch ended")
        };
        self.in_time("a cluster with many Nodes", reported).await
    }

    async fn in_time(&self, what: &str, waiting: impl Future<Output = Result<()>>) -> Result<()> {
        let limit = Duration::from_secs(self.args.patience);
        let waited = tokio::time::timeout(limit, waiting).await;
        waited.with_context(|| format!("waited in vain for {what}"))?
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}
