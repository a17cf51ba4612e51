//! `capstan up`: a cluster, simulated clouds, all controllers and examples on one machine.

mod clouds;
mod cluster;
mod examples;
mod once;
mod rows;
mod screen;
mod standin;
mod telling;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use capstan_openshift::webhook;
use capstan_testkit::{Lock, cache_dir, manifests};
use clap::Args;
use kube::api::DynamicObject;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::controllers::Name;
use crate::manager::Manager;
use crate::run::stop_on_signal;
use crate::serve::Status;
use crate::{duration, logs};
use clouds::Clouds;
use cluster::Cluster;
use rows::Rows;
use telling::{Kubectl, Steps, say};

/// Bring up a cluster, simulated clouds, the controllers and examples on this machine
///
/// The first start builds kube-apiserver, etcd and the other real parts with Go, once, into a per-user cache
/// (CAPSTAN_CACHE, or ~/.cache/capstan). Nothing outside this machine is touched. Ctrl-C stops everything. The addresses and
/// credentials of the simulated clouds are written to DIR/clouds.env.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan up                              a live table of machines; Ctrl-C ends it
  capstan up --once                       until all examples are ready, then tear down: a smoke test
  capstan up --no-examples --dir ./local  an empty cluster for your own manifests; its state stays in ./local")]
pub struct Up {
    /// Use an existing cluster instead of a local control plane. Definitions are installed and stay; the examples are
    /// deleted again at the end, unless --dir keeps the clouds that they live in
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Which controllers to run, and so which clouds to simulate [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    controllers: Vec<Name>,
    /// Keep state and logs here, with the kubeconfig; a later start goes on from there, machines and clouds as they were
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave the cluster empty, for manifests of your own
    #[arg(long)]
    no_examples: bool,
    /// Wait until all examples are ready, print a summary, tear down; exit 1 and say what is not ready otherwise
    #[arg(long)]
    once: bool,
    /// How long --once waits
    #[arg(long, default_value = "5m", value_parser = duration::parse, value_name = "TIME")]
    timeout: Duration,
    /// Run the Cluster API core manager too, instead of standing in for it
    #[arg(long, conflicts_with = "kubeconfig")]
    cluster_api: bool,
}

/// How long examples may take to go from a cluster that is not ours.
const CLEAR_PATIENCE: Duration = Duration::from_secs(120);

pub async fn run(args: Up) -> Result<()> {
    let stop = stop_on_signal()?;
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => cache_dir().join("run").join(format!("up-{}", std::process::id())),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let dir = dir.canonicalize()?;
    let Some(_lock) = Lock::try_take(&dir.join("lock"))? else {
        bail!(
            "{} is in use by another capstan up: end that one, or give another --dir",
            dir.display()
        );
    };
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(dir.join("capstan.log"))
        .with_context(|| format!("cannot write {}/capstan.log", dir.display()))?;
    logs::start_to(logs::Format::Json, "info", Arc::new(log));
    let result = bring_up_and_stay(&args, &dir, &stop).await;
    if result.is_ok() && args.dir.is_none() {
        let _ = std::fs::remove_dir_all(&dir);
    } else if result.is_err() {
        eprintln!("logs are in {}", dir.display());
    }
    result
}

async fn bring_up_and_stay(args: &Up, dir: &Path, stop: &CancellationToken) -> Result<()> {
    let mut up = tokio::select! {
        up = Running::start(args, dir) => up?,
        () = stop.cancelled() => return stopped(args),
    };
    let result = up.work(args, dir, stop).await;
    // However that ended.
    let cleared = if args.kubeconfig.is_some() && args.dir.is_none() {
        up.clear().await
    } else {
        Ok(())
    };
    up.end().await;
    result.and(cleared)
}

/// The end of one that was asked to end before it had come to anything.
fn stopped(args: &Up) -> Result<()> {
    if args.once {
        bail!("stopped before everything was ready");
    }
    Ok(())
}

/// All that is up.
struct Running {
    controllers: Vec<Name>,
    rows: Rows,
    applied: Vec<DynamicObject>,
    /// Those that were not there before.
    created: Vec<DynamicObject>,
    manager: JoinHandle<Result<()>>,
    stop_manager: CancellationToken,
    _watches: JoinSet<()>,
    _standin: Option<JoinSet<()>>,
    clouds: Clouds,
    cluster: Cluster,
}

impl Running {
    async fn start(args: &Up, dir: &Path) -> Result<Self> {
        let controllers = if args.controllers.is_empty() {
            Name::ALL.to_vec()
        } else {
            args.controllers.clone()
        };
        say("starting; the first time the parts of a cluster are built");
        let mut steps = Steps::begin();
        let cluster = Cluster::open(args, dir).await?;
        steps.done(format!("cluster at {}", cluster.config.cluster_url));
        let part = cluster.install_definitions(args, &controllers).await?;
        steps.done("definitions installed");
        let clouds = Clouds::start(&controllers, &cluster, args.dir.is_some().then_some(dir)).await?;
        let variables = clouds.variables();
        telling::write_variables(dir, &variables)?;
        steps.done(format!("simulated clouds: {}", clouds.line()));

        let access = std::fs::read_to_string(&cluster.kubeconfig)?;
        let standin = part.map(|part| standin::start(part, &cluster.client, &access));
        let stop_manager = CancellationToken::new();
        let manager = start_manager(&cluster, &controllers, &clouds, stop_manager.clone())?;
        steps.done("controllers started");
        let (rows, watches) = Rows::watch(&cluster.client);
        let applied = if args.no_examples {
            Vec::new()
        } else {
            examples::load(&controllers, &variables)?
        };
        Ok(Self {
            controllers,
            rows,
            applied,
            created: Vec::new(),
            manager,
            stop_manager,
            _watches: watches,
            _standin: standin,
            clouds,
            cluster,
        })
    }

    /// What it is there for, once all is up.
    async fn work(&mut self, args: &Up, dir: &Path, stop: &CancellationToken) -> Result<()> {
        // Not cut short by a stop: what has been created has to be known, and it takes a moment only.
        self.create_examples().await?;
        let Self {
            rows,
            applied,
            cluster,
            manager,
            controllers,
            ..
        } = self;
        let work = async {
            if args.once {
                return once::wait(args.timeout, rows, applied, &cluster.kubeconfig, stop).await;
            }
            let hints = tokio::select! {
                hints = hints(args, dir, &cluster.kubeconfig, controllers) => hints?,
                () = stop.cancelled() => return Ok(()),
            };
            stay(rows, hints, &cluster.kubeconfig, stop).await
        };
        tokio::select! {
            result = work => result,
            ended = manager => Err(anyhow!("the controllers ended: {ended:?}")),
        }
    }

    async fn create_examples(&mut self) -> Result<()> {
        let mut steps = Steps::begin();
        let (client, created) = (&self.cluster.client, &mut self.created);
        manifests::create_missing(client, examples::NAMESPACE, &self.applied, created)
            .await
            .context("cannot apply the examples")?;
        steps.done(match (self.applied.len(), created.len()) {
            (0, _) => "no examples".to_owned(),
            (all, new) => format!("{all} example objects, {new} of them new"),
        });
        Ok(())
    }

    /// Takes the examples out of a cluster that is not ours, while there are controllers and clouds to do it.
    async fn clear(&self) -> Result<()> {
        eprintln!("deleting the examples");
        // What holds others (clusters, secrets, namespaces) comes first in the files, and goes last.
        let (machines, others): (Vec<_>, Vec<_>) = self.created.iter().rev().cloned().partition(examples::is_machine);
        let mut left = Vec::new();
        for objects in [machines, others] {
            left.extend(
                manifests::delete(&self.cluster.client, examples::NAMESPACE, &objects, CLEAR_PATIENCE)
                    .await
                    .context("cannot delete the examples")?,
            );
        }
        if !left.is_empty() {
            bail!("still in the cluster: {}", left.join(", "));
        }
        Ok(())
    }

    /// Controllers first, then the clouds, then the cluster.
    async fn end(self) {
        self.stop_manager.cancel();
        // The manager bounds its own end. One that has ended already was told of.
        if !self.manager.is_finished()
            && let Ok(Err(error)) = self.manager.await
        {
            warn!(error = format!("{error:#}"), "the controllers ended");
        }
        if let Err(error) = self.clouds.stop() {
            warn!(error = format!("{error:#}"), "the simulated Azure was not saved");
        }
        drop(self.cluster);
    }
}

fn start_manager(
    cluster: &Cluster,
    controllers: &[Name],
    clouds: &Clouds,
    stop: CancellationToken,
) -> Result<JoinHandle<Result<()>>> {
    let manager = Manager {
        config: cluster.config.clone(),
        controllers: controllers.to_vec(),
        namespace: None,
        azure: clouds.azure_settings()?,
        azure_sign_in: Default::default(),
        vsphere: capstan_vsphere_machines::Options::from_env(),
        resync: None,
        // Nobody else runs here.
        lease: None,
        webhook: Some(webhook::Options::default()),
        status: Arc::new(Status::default()),
    };
    Ok(tokio::spawn(manager.run(stop)))
}

async fn hints(args: &Up, dir: &Path, kubeconfig: &Path, controllers: &[Name]) -> Result<Vec<String>> {
    // Scripts bring their own, and should not wait for it to be built.
    let kubectl = if std::io::stdout().is_terminal() {
        tokio::task::spawn_blocking(telling::find_kubectl).await?
    } else {
        Kubectl::InPath
    };
    Ok(telling::hints(
        kubeconfig,
        dir,
        &kubectl,
        controllers,
        !args.no_examples,
    ))
}

/// Says how to use it, then shows what happens until it is stopped.
async fn stay(rows: &Rows, hints: Vec<String>, kubeconfig: &Path, stop: &CancellationToken) -> Result<()> {
    if std::io::stdout().is_terminal() {
        let (rows, stop) = (rows.clone(), stop.clone());
        return tokio::task::spawn_blocking(move || screen::show(&rows, &hints, &stop)).await?;
    }
    hints.iter().for_each(say);
    say(format!("ready {}", kubeconfig.display()));
    stop.cancelled().await;
    Ok(())
}
