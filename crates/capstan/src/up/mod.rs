//! `capstan up`: a cluster, simulated clouds, all controllers and examples on one machine.

mod clouds;
mod cluster;
mod examples;
mod once;
mod output;
mod rows;
mod screen;
mod standin;

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
use output::{Kubectl, Steps, say};
use rows::Rows;

/// Start a cluster, simulated clouds, the controllers and examples on this machine
///
/// The first start builds kube-apiserver, etcd and the other real parts with Go, once, into a per-user cache
/// (CAPSTAN_CACHE, or ~/.cache/capstan). Capstan touches nothing outside this machine. Ctrl-C stops everything. DIR/clouds.env has the
/// addresses and credentials of the simulated clouds.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan up                              a live table of machines; Ctrl-C ends it
  capstan up --once                       until all examples are ready, then tear down: a smoke test
  capstan up --no-examples --dir ./local  an empty cluster for your own manifests; its state stays in ./local")]
pub struct Up {
    /// Use an existing cluster instead of a local control plane. The definitions stay installed; Capstan deletes the examples
    /// at the end, unless --dir keeps the clouds that they live in
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Run these controllers, and simulate their clouds [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    controllers: Vec<Name>,
    /// Keep state, logs and the kubeconfig in this folder; a later start continues with the same machines and clouds
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Create no examples
    #[arg(long)]
    no_examples: bool,
    /// Wait until all examples are ready, print a summary and stop; exit with 1 and name what is not ready otherwise
    #[arg(long)]
    once: bool,
    /// Let --once wait this long
    #[arg(long, default_value = "5m", value_parser = duration::parse, value_name = "TIME")]
    timeout: Duration,
    /// Run the Cluster API core manager too, instead of a stand-in for it
    #[arg(long, conflicts_with = "kubeconfig")]
    cluster_api: bool,
    /// Let kube-apiserver record every request in DIR/audit.log
    #[arg(long, conflicts_with = "kubeconfig", requires = "dir")]
    audit: bool,
}

/// Maximum time for the deletion of the examples from an existing cluster.
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

/// Ends a start that a signal interrupted.
fn stopped(args: &Up) -> Result<()> {
    if args.once {
        bail!("stopped before everything was ready");
    }
    Ok(())
}

/// Everything that runs.
struct Running {
    controllers: Vec<Name>,
    rows: Rows,
    applied: Vec<DynamicObject>,
    /// The examples that did not exist before.
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
        let cluster = Cluster::open(args, &controllers, dir).await?;
        steps.done(format!("cluster at {}", cluster.config.cluster_url));
        let part = cluster.install_definitions(args, &controllers).await?;
        steps.done("definitions installed");
        let clouds = Clouds::start(&controllers, &cluster, args.dir.is_some().then_some(dir)).await?;
        let variables = clouds.variables();
        output::write_variables(dir, &variables)?;
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

    /// Creates the examples and waits: with --once until they are ready, else until a signal.
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

    /// Deletes the examples from an existing cluster, while controllers and clouds still run.
    async fn clear(&self) -> Result<()> {
        eprintln!("deleting the examples");
        // Objects that others depend on (clusters, secrets, namespaces) are first in the files, and are deleted last.
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

    /// Stops the controllers first, then the clouds, then the cluster.
    async fn end(self) {
        self.stop_manager.cancel();
        // The manager bounds its own end. The end of one that has ended already was reported.
        if !self.manager.is_finished()
            && let Ok(Err(error)) = self.manager.await
        {
            warn!(error = format!("{error:#}"), "the controllers ended");
        }
        if let Err(error) = self.clouds.stop() {
            warn!(error = format!("{error:#}"), "cannot save the simulated Azure");
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
        hold: Vec::new(),
        config: cluster.config.clone(),
        controllers: controllers.to_vec(),
        namespace: None,
        watch_filter: None,
        azure: clouds.azure_settings()?,
        azure_sign_in: Default::default(),
        azure_json: false,
        vsphere: capstan_vsphere_machines::Options::from_env(),
        resync: None,
        memory: Arc::default(),
        // No other replica runs here.
        lease: None,
        webhook: Some(capstan_kube::webhook::Options::default()),
        admission: webhook::Options {
            // An installation has the default name, and reaches the webhook through a Service.
            name: "capstan-up".to_owned(),
            ..webhook::Options::default()
        },
        // The definitions of an existing cluster may point at an installation.
        convert: cluster.is_local(),
        registrar: Some(cluster.admin.clone()),
        status: Arc::new(Status::new("capstan-up")),
    };
    Ok(tokio::spawn(manager.run(stop)))
}

async fn hints(args: &Up, dir: &Path, kubeconfig: &Path, controllers: &[Name]) -> Result<Vec<String>> {
    // Scripts bring their own, and should not wait for it to be built.
    let kubectl = if std::io::stdout().is_terminal() {
        tokio::task::spawn_blocking(output::find_kubectl).await?
    } else {
        Kubectl::InPath
    };
    Ok(output::hints(kubeconfig, dir, &kubectl, controllers, !args.no_examples))
}

/// Prints how to use it, then shows the machines until a signal.
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
