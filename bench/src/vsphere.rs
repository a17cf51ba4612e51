//! Machines with data disks on a simulated vCenter whose clones take a while.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use capstan_api::vsphere::VSphereMachine;
use capstan_testkit::tenants::Tenant;
use capstan_testkit::vcsim::Options;
use capstan_testkit::{Vcsim, vcsim};
use futures::{StreamExt, TryStreamExt, stream};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde_json::Value;

use crate::measure::{Audited, usage};

/// Objects are made by so many requests at once.
const MAKERS: usize = 16;
/// The controllers' own start is not measured; they have logged in and settled by then.
const SETTLE: Duration = Duration::from_secs(3);

#[derive(clap::Args)]
pub struct Args {
    /// How many machines
    #[arg(long, default_value_t = 200)]
    machines: usize,
    /// How many data disks each
    #[arg(long, default_value_t = 2)]
    disks: usize,
    /// How long a clone takes, in milliseconds
    #[arg(long, default_value_t = 5000)]
    clone_ms: u64,
    /// How long after power-on a guest has its address, in milliseconds
    #[arg(long, default_value_t = 1000)]
    address_ms: u64,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Delete the machines afterwards, and measure that too
    #[arg(long)]
    delete: bool,
    /// Print which calls and writes were made
    #[arg(long)]
    details: bool,
}

/// The part that is measured, as a process of its own. It ends with its parent.
pub async fn controllers(namespace: String) -> Result<()> {
    let config = kube::Config::infer().await?;
    let options = capstan_kube::Options {
        namespace: Some(namespace),
        ..Default::default()
    };
    let shutdown = options.shutdown.clone();
    let context = capstan_kube::Context::new(config, options)?;
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        shutdown.cancel();
    });
    capstan_vsphere_machines::run(context, Default::default()).await?;
    Ok(())
}

pub async fn run(args: &Args) -> Result<()> {
    let ideal = Duration::from_millis(args.clone_ms + args.address_ms);
    let audited = Audited::start().await?;
    audited.plane.install_crds().await?;
    audited.plane.install_cluster_api_crds().await?;
    let sim = vcsim(Options {
        clone_delay: Duration::from_millis(args.clone_ms),
        guest_ip_delay: Some(Duration::from_millis(args.address_ms)),
        // What the simulator checks for the tests is not to be measured.
        any_order: true,
        ..Options::default()
    })
    .await?;
    let namespace = audited.plane.namespace("bench").await?;
    let bench = Bench {
        tenant: Tenant {
            client: audited.client().await?,
            namespace,
        },
    };
    bench.tenant.vsphere_cluster("c", &(&sim).into()).await?;
    let owners = bench.make_owners(args.machines).await?;
    let mut child = tokio::process::Command::new(std::env::current_exe()?)
        .args(["vsphere-controllers", &bench.tenant.namespace])
        .env("KUBECONFIG", audited.kubeconfig())
        // As `capstan run` sets it for itself.
        .env("MALLOC_ARENA_MAX", "1")
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let pid = child.id().context("the controllers did not start")?;
    let _lifeline = child.stdin.take();
    tokio::time::sleep(SETTLE).await;

    sim.admin.reset_counters().await?;
    let (before, writes_before) = (usage(pid)?, sum(&audited.writes(&bench.tenant.namespace)?));
    let started = Instant::now();
    bench.make_machines(&owners, args.disks).await?;
    let made = started.elapsed();
    tokio::time::timeout(Duration::from_secs(args.patience), bench.all_ready(args.machines))
        .await
        .context("the machines did not all get ready in time")??;
    let took = started.elapsed();
    // Last writes (events) are on their way.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (after, writes) = (usage(pid)?, audited.writes(&bench.tenant.namespace)?);
    let calls = sim.admin.counters().await?;

    let n = args.machines as f64;
    let cpu = after.cpu_seconds - before.cpu_seconds;
    println!(
        "{} machines with {} data disks each; objects made in {:.1} s",
        args.machines,
        args.disks,
        made.as_secs_f64()
    );
    println!(
        "time                  {:.1} s, {:.2} x the ideal {:.1} s",
        took.as_secs_f64(),
        took.as_secs_f64() / ideal.as_secs_f64(),
        ideal.as_secs_f64()
    );
    println!("machines per second   {:.1}", n / took.as_secs_f64());
    println!("vSphere calls each    {:.1}", calls.values().sum::<u64>() as f64 / n);
    println!("kube writes each      {:.1}", (sum(&writes) - writes_before) as f64 / n);
    println!("CPU seconds each      {:.4}", cpu / n);
    println!(
        "peak memory           {:.0} MiB (before: {:.0}); now {:.0} MiB without program pages",
        after.peak_mib, before.peak_mib, after.anonymous_mib
    );
    if args.details {
        println!("calls: {calls:?}\nwrites: {writes:?}");
    }
    if args.delete {
        bench.delete_all(&sim, args).await?;
    }
    child.kill().await?;
    Ok(())
}

fn sum(counts: &std::collections::BTreeMap<String, u64>) -> u64 {
    counts.values().sum()
}

struct Bench {
    tenant: Tenant,
}

impl Bench {
    /// Machines with bootstrap data, as Cluster API core makes them first.
    async fn make_owners(&self, number: usize) -> Result<Vec<Value>> {
        let make = |n: usize| async move { self.tenant.vsphere_owner("c", &format!("m{n}")).await };
        stream::iter((0..number).map(make)).buffered(MAKERS).try_collect().await
    }

    async fn make_machines(&self, owners: &[Value], disks: usize) -> Result<()> {
        let make = |machine| self.tenant.vsphere_machine(machine, disks);
        let made = stream::iter(owners.iter().map(make)).buffer_unordered(MAKERS);
        made.try_collect().await
    }

    fn machines(&self) -> Api<VSphereMachine> {
        Api::namespaced(self.tenant.client.clone(), &self.tenant.namespace)
    }

    async fn all_ready(&self, number: usize) -> Result<()> {
        let mut ready = std::collections::HashSet::new();
        let mut events = std::pin::pin!(watcher(self.machines(), watcher::Config::default()).applied_objects());
        while let Some(machine) = events.try_next().await? {
            if machine.status.as_ref().is_some_and(|status| status.ready) {
                ready.insert(machine.name_any());
            }
            if ready.len() == number {
                return Ok(());
            }
        }
        bail!("the watch ended")
    }

    async fn delete_all(&self, sim: &Vcsim, args: &Args) -> Result<()> {
        sim.admin.reset_counters().await?;
        let started = Instant::now();
        self.machines()
            .delete_collection(&Default::default(), &Default::default())
            .await?;
        while !self
            .machines()
            .list_metadata(&Default::default())
            .await?
            .items
            .is_empty()
        {
            if started.elapsed() > Duration::from_secs(args.patience) {
                bail!("the machines were not all deleted in time");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let calls = sim.admin.counters().await?;
        let each = sum(&calls) as f64 / args.machines as f64;
        println!(
            "deleted in            {:.1} s, {each:.1} vSphere calls each",
            started.elapsed().as_secs_f64()
        );
        if args.details {
            println!("calls: {calls:?}");
        }
        Ok(())
    }
}
