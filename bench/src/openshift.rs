//! OpenShift machines with data disks on a simulated Azure whose virtual machines take a while.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use capstan_api::openshift::{MACHINE_FINALIZER, Machine};
use capstan_sim::azure::joiner::{Cluster, Options as Joiner};
use capstan_sim::azure::{Azure, Config, Handle, OPENSHIFTS_ROLE, Span, Times};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::measure::{Audited, usage};

/// Objects are made by so many requests at once.
const MAKERS: usize = 16;
/// The controllers' own start is not measured.
const SETTLE: Duration = Duration::from_secs(3);
/// Last writes (events) are on their way when the last machine is there.
const LAST_WRITES: Duration = Duration::from_secs(2);
/// How long to watch machines that wait for their Nodes.
const IDLE: Duration = Duration::from_secs(20);

#[derive(clap::Args)]
pub struct Args {
    /// How many machines
    #[arg(long, default_value_t = 100)]
    machines: usize,
    /// How many data disks each
    #[arg(long, default_value_t = 2)]
    disks: usize,
    /// How long Azure takes to make a virtual machine, in milliseconds
    #[arg(long, default_value_t = 20_000)]
    create_ms: u64,
    /// How long Azure takes to delete one, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    delete_ms: u64,
    /// How long each call takes, in milliseconds
    #[arg(long, default_value_t = 50)]
    latency_ms: u64,
    /// How long Azure takes to make or delete an interface, in milliseconds; then those are operations too, with the
    /// Retry-After of the others
    #[arg(long, default_value_t = 0)]
    network_ms: u64,
    /// Retry-After of operations, in seconds
    #[arg(long, default_value_t = 1)]
    retry_after: u64,
    /// Machines come with our finalizer, as admission and MachineSets make them
    #[arg(long)]
    admitted: bool,
    /// Nodes join when their virtual machines run
    #[arg(long)]
    nodes: bool,
    /// The account has only the rights that OpenShift gives it: it may delete disks, and neither list nor read them
    #[arg(long)]
    openshifts_role: bool,
    /// Give up after so many seconds
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Print which calls and writes were made
    #[arg(long)]
    details: bool,
}

/// The part that is measured, as a process of its own. It ends with its parent.
pub async fn controllers(namespace: String) -> Result<()> {
    let options = capstan_kube::Options {
        namespace: Some(namespace),
        ..Default::default()
    };
    let shutdown = options.shutdown.clone();
    let context = capstan_kube::Context::new(kube::Config::infer().await?, options)?;
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        shutdown.cancel();
    });
    let clients = capstan_azure::Clients::new(capstan_azure::Settings::from_env()?)?;
    capstan_openshift::run(context, clients).await?;
    Ok(())
}

pub async fn run(args: &Args) -> Result<()> {
    let audited = Audited::start().await?;
    audited.plane.install_crds().await?;
    let sim = Azure::start(simulated(args, &audited).await?).await?;
    let namespace = audited.plane.namespace("bench").await?;
    let bench = Bench {
        client: audited.client().await?,
        namespace,
        sim: &sim,
        args,
    };
    bench.secrets().await?;
    let mut child = tokio::process::Command::new(std::env::current_exe()?)
        .args(["openshift-controllers", &bench.namespace])
        .env("KUBECONFIG", audited.kubeconfig())
        .env("AZURE_AUTHORITY_HOST", &sim.url)
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &sim.url)
        .env("SSL_CERT_FILE", &sim.ca_file)
        // As `capstan run` sets it for itself.
        .env("MALLOC_ARENA_MAX", "1")
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let pid = child.id().context("the controllers did not start")?;
    let _lifeline = child.stdin.take();
    tokio::time::sleep(SETTLE).await;
    println!(
        "{} machines with {} data disks each, calls take {} ms",
        args.machines, args.disks, args.latency_ms
    );
    println!("idle memory           {:.0} MiB", usage(pid)?.peak_mib);

    let mut report = Report {
        audited: &audited,
        bench: &bench,
        pid,
        calls: 0,
        writes: 0,
        cpu: usage(pid)?.cpu_seconds,
    };
    let started = Instant::now();
    bench.make().await?;
    let there = if args.nodes { "Running" } else { "Provisioned" };
    bench
        .until("made", |phases| {
            phases.iter().filter(|phase| **phase == there).count() == args.machines
        })
        .await?;
    report.print("created", started.elapsed(), args.create_ms).await?;

    if !args.nodes {
        let before = sim.arm_requests().len();
        tokio::time::sleep(IDLE).await;
        let calls = sim.arm_requests().len() - before;
        println!("waiting for Nodes     {calls} calls in {} s", IDLE.as_secs());
    }
    report.skip()?;
    let started = Instant::now();
    bench
        .machines()
        .delete_collection(&Default::default(), &Default::default())
        .await?;
    bench.until("deleted", |phases| phases.is_empty()).await?;
    report.print("deleted", started.elapsed(), args.delete_ms).await?;
    let failed = bench.failed_deletes().await?;
    println!("sign-ins              {}; FailedDelete events {failed}", sim.sign_ins());
    let left: usize = ["virtualMachines", "networkInterfaces", "disks"]
        .iter()
        .map(|kind| sim.ids(kind).len())
        .sum();
    println!("left in Azure         {left}");
    child.kill().await?;
    Ok(())
}

async fn simulated(args: &Args, audited: &Audited) -> Result<Config> {
    let joiner = Joiner {
        default: Some(Cluster::Client(audited.client().await?)),
        ..Joiner::default()
    };
    Ok(Config {
        times: Times {
            vm_create: Span::millis(args.create_ms),
            vm_delete: Span::millis(args.delete_ms),
            network: Span::millis(args.network_ms),
            latency: Span::millis(args.latency_ms),
            ..Times::quick()
        },
        retry_after: args.retry_after,
        network_retry_after: args.retry_after,
        joiner: args.nodes.then_some(joiner),
        allowed_actions: args
            .openshifts_role
            .then(|| OPENSHIFTS_ROLE.map(str::to_owned).to_vec()),
        ..Config::default()
    })
}

fn phase(machine: &Machine) -> &str {
    machine
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// What has happened since the last line.
struct Report<'a> {
    audited: &'a Audited,
    bench: &'a Bench<'a>,
    pid: u32,
    calls: usize,
    writes: u64,
    cpu: f64,
}

impl Report<'_> {
    fn writes(&self) -> Result<std::collections::BTreeMap<String, u64>> {
        let mut writes = self.audited.writes(&self.bench.namespace)?;
        // Nodes are in no namespace.
        writes.extend(
            self.audited
                .writes("")?
                .into_iter()
                .filter(|(what, _)| what.ends_with(" nodes")),
        );
        Ok(writes)
    }

    fn skip(&mut self) -> Result<()> {
        self.calls = self.bench.sim.arm_requests().len();
        self.writes = self.writes()?.values().sum();
        self.cpu = usage(self.pid)?.cpu_seconds;
        Ok(())
    }

    async fn print(&mut self, what: &str, took: Duration, ideal_ms: u64) -> Result<()> {
        tokio::time::sleep(LAST_WRITES).await;
        let n = self.bench.args.machines as f64;
        let (calls, writes, now) = (self.bench.sim.arm_requests(), self.writes()?, usage(self.pid)?);
        let ideal = ideal_ms as f64 / 1000.0;
        println!(
            "{what} in            {:.1} s, {:.2} x the machine's own {ideal:.1} s",
            took.as_secs_f64(),
            took.as_secs_f64() / ideal
        );
        println!("  Azure calls each    {:.2}", (calls.len() - self.calls) as f64 / n);
        println!(
            "  kube writes each    {:.2}",
            (writes.values().sum::<u64>() - self.writes) as f64 / n
        );
        println!("  CPU seconds each    {:.4}", (now.cpu_seconds - self.cpu) / n);
        println!("  peak memory         {:.0} MiB", now.peak_mib);
        if self.bench.args.details {
            let mut by_policy = std::collections::BTreeMap::<_, u64>::new();
            calls[self.calls..]
                .iter()
                .for_each(|call| *by_policy.entry(call.policy).or_default() += 1);
            println!("  calls: {by_policy:?}\n  writes so far: {writes:?}");
        }
        self.skip()
    }
}

struct Bench<'a> {
    client: kube::Client,
    namespace: String,
    sim: &'a Handle,
    args: &'a Args,
}

impl Bench<'_> {
    fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn secrets(&self) -> Result<()> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let credentials = json!({
            "azure_subscription_id": self.sim.subscription, "azure_tenant_id": self.sim.tenant,
            "azure_client_id": self.sim.client_id, "azure_client_secret": self.sim.client_secret,
            "azure_resourcegroup": "capstan", "azure_region": "eastus",
        });
        for (name, data) in [("credentials", credentials), ("user-data", json!({"userData": "{}"}))] {
            let secret = serde_json::from_value(json!({"metadata": {"name": name}, "stringData": data}))?;
            api.create(&PostParams::default(), &secret).await?;
        }
        Ok(())
    }

    fn machine(&self, n: usize) -> Result<Machine> {
        let disks: Vec<Value> = (0..self.args.disks)
            .map(
                |lun| json!({"nameSuffix": format!("d{lun}"), "lun": lun, "diskSizeGB": 4, "deletionPolicy": "Delete"}),
            )
            .collect();
        let finalizers = self.args.admitted.then_some([MACHINE_FINALIZER]);
        Ok(serde_json::from_value(json!({
            "metadata": {"name": format!("{}-m{n}", self.namespace), "finalizers": finalizers,
                         "labels": {"machine.openshift.io/cluster-api-cluster": "c"}},
            "spec": {"providerSpec": {"value": {
                "kind": "AzureMachineProviderSpec", "vmSize": "Standard_D4s_v3", "zone": "1",
                "vnet": "capstan-vnet", "subnet": "worker-subnet", "dataDisks": disks,
                "image": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
                "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
                "userDataSecret": {"name": "user-data"},
                "credentialsSecret": {"name": "credentials", "namespace": self.namespace},
            }}},
        }))?)
    }

    async fn make(&self) -> Result<()> {
        let (api, params) = (self.machines(), PostParams::default());
        let make = |n| {
            let (api, params) = (&api, &params);
            async move { anyhow::Ok(api.create(params, &self.machine(n)?).await.map(drop)?) }
        };
        stream::iter(0..self.args.machines)
            .map(make)
            .buffer_unordered(MAKERS)
            .try_collect()
            .await
    }

    /// Waits until the phases of all machines are so, by watching.
    async fn until(&self, what: &str, so: impl Fn(&[&str]) -> bool) -> Result<()> {
        let (mut known, mut listed) = (std::collections::BTreeMap::new(), false);
        let mut events = std::pin::pin!(watcher(self.machines(), watcher::Config::default()).default_backoff());
        let waiting = async {
            while let Some(event) = events.try_next().await? {
                match event {
                    watcher::Event::Apply(machine) | watcher::Event::InitApply(machine) => {
                        known.insert(machine.name_any(), phase(&machine).to_owned());
                    }
                    watcher::Event::Delete(machine) => drop(known.remove(&machine.name_any())),
                    watcher::Event::Init => listed = false,
                    watcher::Event::InitDone => listed = true,
                }
                if listed && so(&known.values().map(String::as_str).collect::<Vec<_>>()) {
                    return Ok(());
                }
            }
            bail!("the watch ended")
        };
        tokio::time::timeout(Duration::from_secs(self.args.patience), waiting)
            .await
            .with_context(|| format!("the machines were not all {what} in time"))?
    }

    async fn failed_deletes(&self) -> Result<usize> {
        let api: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let events = api.list(&Default::default()).await?;
        Ok(events
            .iter()
            .filter(|event| event.reason.as_deref() == Some("FailedDelete"))
            .count())
    }
}
