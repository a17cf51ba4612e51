//! `capstan up`: a cluster, simulated clouds, all controllers and examples on one machine.

mod clouds;
mod examples;
mod rows;
mod screen;
mod standin;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use capstan_openshift::webhook;
use capstan_testkit::{ControlPlane, Options, cache_dir, manifests, parts};
use clap::Args;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject};
use kube::{Client, Config};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::controllers::Name;
use crate::manager::Manager;
use crate::run::{cluster, stop_on_signal};
use crate::serve::Status;
use crate::{duration, logs};
use clouds::Clouds;
use rows::Rows;

/// Bring up a cluster, simulated clouds, the controllers and examples on this machine
///
/// The first start builds kube-apiserver, etcd and the other real parts with Go, once, into a per-user cache
/// (CAPSTAN_CACHE, or ~/.cache/capstan). Nothing outside this machine is touched. Ctrl-C stops everything.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan up                              a live table of machines; Ctrl-C ends it
  capstan up --once                       until all examples are ready, then tear down: a smoke test
  capstan up --no-examples --dir ./local  an empty cluster for your own manifests; its state stays in ./local")]
pub struct Up {
    /// Use an existing cluster instead of a local control plane
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Which controllers to run, and so which clouds to simulate [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    controllers: Vec<Name>,
    /// Keep state and logs here, with the kubeconfig; a later start goes on from there
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave the cluster empty
    #[arg(long)]
    no_examples: bool,
    /// Wait until all examples are ready, print a summary, tear down; exit 1 and say what is not ready otherwise
    #[arg(long)]
    once: bool,
    /// How long --once waits
    #[arg(long, default_value = "5m", value_parser = duration::parse, value_name = "TIME")]
    timeout: Duration,
    /// Run the Cluster API core manager too, instead of standing in for it
    #[arg(long)]
    cluster_api: bool,
}

/// What the controllers of a local cluster may do: the same as in a real one.
const RBAC: [&str; 2] = [
    include_str!("../../../../deploy/namespace.yaml"),
    include_str!("../../../../deploy/rbac.yaml"),
];
const ACCOUNT_NAMESPACE: &str = "capstan-system";
const ACCOUNT: &str = "system:serviceaccount:capstan-system:capstan";

/// The cluster that is worked on.
struct Cluster {
    kubeconfig: PathBuf,
    /// The controllers' access.
    config: Config,
    client: Client,
    /// Ours, unless an existing one is used.
    plane: Option<ControlPlane>,
}

pub async fn run(args: Up) -> Result<()> {
    let stop = stop_on_signal()?;
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => cache_dir().join("run").join(format!("up-{}", std::process::id())),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let dir = dir.canonicalize()?;
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(dir.join("capstan.log"))?;
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
        () = stop.cancelled() => return Ok(()),
    };
    let Running {
        rows,
        applied,
        cluster,
        manager,
        ..
    } = &mut up;
    let work = async {
        if args.once {
            once(args, rows, applied, &cluster.kubeconfig, stop).await
        } else {
            stay(rows, &cluster.kubeconfig, dir, stop).await
        }
    };
    let result = tokio::select! {
        result = work => result,
        ended = manager => bail!("the controllers ended: {ended:?}"),
    };
    up.end().await;
    result
}

/// All that is up.
struct Running {
    rows: Rows,
    applied: Vec<DynamicObject>,
    manager: JoinHandle<Result<()>>,
    stop_manager: CancellationToken,
    _watches: JoinSet<()>,
    _standin: Option<JoinSet<()>>,
    clouds: Clouds,
    cluster: Cluster,
}

impl Running {
    async fn start(args: &Up, dir: &Path) -> Result<Self> {
        let began = Instant::now();
        let controllers = if args.controllers.is_empty() {
            Name::ALL.to_vec()
        } else {
            args.controllers.clone()
        };
        let cluster = open_cluster(args, dir).await?;
        say(format!("cluster at {}", cluster.config.cluster_url));
        let stand_in = install_definitions(args, &cluster, &controllers).await?;
        say("definitions installed");
        let clouds = Clouds::start(&controllers, &cluster, args.dir.is_some().then_some(dir)).await?;
        let variables = clouds.variables();
        write_variables(dir, &variables)?;
        say(format!("simulated clouds: {}", clouds_line(&clouds)));

        let access = std::fs::read_to_string(&cluster.kubeconfig)?;
        let standin = stand_in.then(|| standin::start(&cluster.client, &access));
        let stop_manager = CancellationToken::new();
        let manager = start_manager(&cluster, &controllers, &clouds, stop_manager.clone())?;
        say("controllers started");
        let (rows, watches) = Rows::watch(&cluster.client);
        let applied = if args.no_examples {
            Vec::new()
        } else {
            examples::load(&controllers, &variables)?
        };
        manifests::create_missing(&cluster.client, examples::NAMESPACE, &applied)
            .await
            .context("cannot apply the examples")?;
        say(format!(
            "{} example objects applied, {} s after the start",
            applied.len(),
            began.elapsed().as_secs()
        ));
        Ok(Self {
            rows,
            applied,
            manager,
            stop_manager,
            _watches: watches,
            _standin: standin,
            clouds,
            cluster,
        })
    }

    /// Controllers first, then the clouds, then the cluster.
    async fn end(self) {
        self.stop_manager.cancel();
        // The manager bounds its own end.
        if let Ok(Err(error)) = self.manager.await {
            warn!(error = format!("{error:#}"), "the controllers ended");
        }
        if let Err(error) = self.clouds.stop() {
            warn!(error = format!("{error:#}"), "the simulated Azure was not saved");
        }
        drop(self.cluster);
    }
}

async fn open_cluster(args: &Up, dir: &Path) -> Result<Cluster> {
    if let Some(file) = &args.kubeconfig {
        let config = cluster(Some(file), None).await?;
        let client = Client::try_from(config.clone())?;
        return Ok(Cluster {
            kubeconfig: file.canonicalize()?,
            config,
            client,
            plane: None,
        });
    }
    say("starting the control plane");
    let options = Options {
        dir: Some(dir.to_owned()),
        capi_core: args.cluster_api,
        ..Options::default()
    };
    let plane = ControlPlane::start(options).await?;
    let (mut config, client) = (plane.config().await?, plane.client().await?);
    for text in RBAC {
        let objects = manifests::parse(text).context("cannot read deploy/")?;
        manifests::apply(&client, ACCOUNT_NAMESPACE, &objects)
            .await
            .context("cannot apply deploy/")?;
    }
    // A permission that is missing in deploy/ shows here and not only in production.
    config.auth_info.impersonate = Some(ACCOUNT.to_owned());
    config.auth_info.impersonate_groups = Some(
        [
            "system:serviceaccounts",
            "system:serviceaccounts:capstan-system",
            "system:authenticated",
        ]
        .map(str::to_owned)
        .to_vec(),
    );
    Ok(Cluster {
        kubeconfig: plane.kubeconfig().to_owned(),
        config,
        client,
        plane: Some(plane),
    })
}

/// Installs what is missing, and answers whether Cluster API core's part has to be played.
async fn install_definitions(args: &Up, cluster: &Cluster, controllers: &[Name]) -> Result<bool> {
    let mut objects = Vec::new();
    for crd in capstan_api::crds() {
        objects.extend(manifests::parse(&capstan_api::manifest(&crd)?)?);
    }
    manifests::install_crds(&cluster.client, objects).await?;
    let needs_cluster_api = controllers.iter().any(|name| *name != Name::Openshift);
    if args.cluster_api || !needs_cluster_api {
        return Ok(false);
    }
    // An existing cluster that has Cluster API has a manager of its own for it.
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let there = crds.get_opt("clusters.cluster.x-k8s.io").await?.is_some();
    if there && cluster.plane.is_none() {
        return Ok(false);
    }
    if !there {
        let dir = tokio::task::spawn_blocking(|| parts::CLUSTER_API_CRDS.path()).await??;
        manifests::install_crds(&cluster.client, manifests::read_dir(&dir)?).await?;
    }
    Ok(true)
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
        resync: None,
        // Nobody else runs here.
        lease: None,
        webhook: Some(webhook::Options::default()),
        status: Arc::new(Status::default()),
    };
    Ok(tokio::spawn(manager.run(stop)))
}

/// Says how to use it, then shows what happens until it is stopped.
async fn stay(rows: &Rows, kubeconfig: &Path, dir: &Path, stop: &CancellationToken) -> Result<()> {
    let hints = hints(kubeconfig, dir);
    if std::io::stdout().is_terminal() {
        let (rows, stop) = (rows.clone(), stop.clone());
        return tokio::task::spawn_blocking(move || screen::show(&rows, &hints, &stop)).await?;
    }
    hints.iter().for_each(say);
    say(format!("ready {}", kubeconfig.display()));
    stop.cancelled().await;
    Ok(())
}

fn hints(kubeconfig: &Path, dir: &Path) -> Vec<String> {
    vec![
        format!("export KUBECONFIG={}", kubeconfig.display()),
        "try: kubectl get machines,machinesets,azuremachinepools,vspheremachines -A".to_owned(),
        "try: kubectl scale machineset.machine.openshift.io/workers -n openshift-machine-api --replicas=4".to_owned(),
        format!(
            "try: kubectl get nodes -w; addresses and credentials of the clouds are in {}/clouds.env",
            dir.display()
        ),
    ]
}

/// Waits until every example has become what it was to be.
async fn once(
    args: &Up,
    rows: &Rows,
    applied: &[DynamicObject],
    kubeconfig: &Path,
    stop: &CancellationToken,
) -> Result<()> {
    let began = Instant::now();
    let wanted: Vec<rows::Key> = applied
        .iter()
        .filter_map(|o| rows::key(o, examples::NAMESPACE))
        .collect();
    let mut changes = rows.changes();
    let mut told = Vec::new();
    let all_ready = async {
        loop {
            let all = rows.all();
            for row in all.iter().filter(|row| !told.contains(*row)) {
                say(format!(
                    "{:<24} {:<30} {:<18} {}",
                    row.kind, row.name, row.state, row.detail
                ));
            }
            let missing = wanted.iter().any(|key| rows.get(key).is_none_or(|row| !row.ready));
            if !missing && all.iter().all(|row| row.ready) {
                return;
            }
            told = all;
            if changes.changed().await.is_err() {
                return;
            }
        }
    };
    let in_time = tokio::select! {
        done = tokio::time::timeout(args.timeout, all_ready) => done.is_ok(),
        () = stop.cancelled() => bail!("stopped before everything was ready"),
    };
    let all = rows.all();
    if !in_time {
        let mut late: Vec<String> = all
            .iter()
            .filter(|row| !row.ready)
            .map(|row| format!("{} {} is {}", row.kind, row.name, row.state))
            .collect();
        let absent = wanted.iter().filter(|key| rows.get(key).is_none());
        late.extend(absent.map(|key| format!("{} {} is not there", rows::KINDS[key.0].1, key.2)));
        bail!("not ready after {} s: {}", args.timeout.as_secs(), late.join(", "));
    }
    say(format!(
        "{} machines and pools ready after {} s",
        all.len(),
        began.elapsed().as_secs()
    ));
    say(format!("ready {}", kubeconfig.display()));
    Ok(())
}

fn clouds_line(clouds: &Clouds) -> String {
    let azure = clouds.azure.iter().map(|azure| format!("Azure at {}", azure.url));
    let vsphere = clouds.vsphere.iter().map(|vcsim| format!("vCenter at {}", vcsim.url));
    azure.chain(vsphere).collect::<Vec<_>>().join(", ")
}

fn write_variables(dir: &Path, variables: &[(&str, String)]) -> Result<()> {
    let lines: String = variables
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect();
    std::fs::write(dir.join("clouds.env"), lines).context("cannot write clouds.env")
}

fn say(line: impl AsRef<str>) {
    println!("{}", line.as_ref());
}
