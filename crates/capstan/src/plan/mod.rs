//! `capstan plan`: prints what the controllers would do, and does nothing.
//!
//! Invariant: the controllers that run here are those of `capstan run`; their context has a preview, so every client refuses
//! every write.

mod changes;
mod print;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use capstan_api::vsphere::v1beta2::V1BETA1;
use capstan_azure::Clients;
use capstan_core::interceptor::Interceptors;
use capstan_kube::runtime::Preview;
use capstan_kube::{Context, Options};
use clap::{Args, ValueEnum};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::controllers::{self, Name};
use crate::plain::plain;
use crate::run::{Azure, Vsphere, cluster};
use crate::{duration, logs, manager};
use changes::{Change, Target};
use print::Report;

/// The exit code when something would change.
const CHANGES: u8 = 2;

/// Show the steps that Capstan would take, and change nothing
///
/// Observes the cluster and its clouds as "capstan run" does, and prints the plan of every object: the next steps, the waves of
/// a rollout, what it waits for, and the minimum number of requests to the cloud. The clients refuse every write, to the cluster
/// and to the clouds. Rights to get, list and watch are enough. With -f it plans as if the files were applied: the API server
/// checks them in a dry run, which needs the right to patch these objects. Fields that an earlier "kubectl apply" had and the
/// files leave out are removed, as that command would do.
///
/// Does not show updates of status and events. Exits with 2 if something would change, with 0 if nothing would, and with 1 if
/// something cannot be observed.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan plan --controllers azure-pools --namespace team-a
  capstan plan -f pool.yaml
  capstan plan -o json | jq '.objects[] | select(.blockedBy)'")]
pub struct Plan {
    /// Use this kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Plan as if these manifest files were applied; - is standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE", num_args = 1..)]
    files: Vec<PathBuf>,
    /// Plan the files as this field manager applies them on the server [default: as each object was applied before]
    #[arg(long, requires = "files", value_name = "NAME")]
    field_manager: Option<String>,
    /// Plan for these controllers [default: all whose definitions are installed]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    controllers: Vec<Name>,
    /// Plan for objects in this namespace only [default: all namespaces]
    #[arg(long, short = 'n', env = "WATCH_NAMESPACE")]
    namespace: Option<String>,
    /// Plan only for objects of Cluster API whose label cluster.x-k8s.io/watch-filter has this value [default: all]
    #[arg(long, value_name = "VALUE")]
    watch_filter: Option<String>,
    /// Print in this format
    #[arg(long, short = 'o', value_enum, default_value = "table")]
    output: Output,
    /// Stop after this time, and print the plans that are ready by then
    #[arg(long, default_value = "5m", value_parser = duration::parse, value_name = "TIME")]
    timeout: Duration,
    /// Log at this level to standard error; RUST_LOG overrides it
    #[arg(long, default_value = "error", value_name = "FILTER")]
    log_level: String,
    /// Plan the Secrets POOL-azure-json, too, which "capstan run --azure-json" makes
    #[arg(long, help_heading = "Azure")]
    azure_json: bool,
    #[command(flatten)]
    azure: Azure,
    #[command(flatten)]
    vsphere: Vsphere,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Lines for people
    Table,
    /// One JSON object
    Json,
}

pub async fn run(args: Plan) -> Result<ExitCode> {
    logs::start(logs::Format::Pretty, &args.log_level);
    let config = cluster(args.kubeconfig.as_deref(), args.context.clone()).await?;
    let target = Target {
        namespace: args.namespace.as_deref().filter(|namespace| !namespace.is_empty()),
        field_manager: args.field_manager.as_deref(),
    };
    let changes = changes::dry_run(&config, &args.files, &target).await?;
    let preview = Preview::new(changes.iter().map(|change| change.object.clone()).collect());
    let report = report(&args, config, &preview, changes).await?;
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => report.json()?,
    };
    writeln!(std::io::stdout(), "{}", plain(text.trim_end()))?;
    Ok(match report {
        report if report.changes() => ExitCode::from(CHANGES),
        report if report.is_complete() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Returns why a controller cannot plan. `old`: its kinds are served, but only in an older version.
fn not_planned(name: Name, old: bool) -> String {
    let (crd, version) = (name.crd(), name.version());
    match old {
        false => format!("{name}: not planned, {crd} is not installed"),
        // Definitions of Capstan before CAPV has stopped would leave CAPV without a conversion.
        true => format!(
            "{name}: not planned, {crd} serves {V1BETA1} and not {version}: upgrade the controllers that run the cluster to a \
             version that serves {version} (CAPV 1.16), or plan once they have stopped and \"capstan crds --controllers {name}\" \
             is applied"
        ),
    }
}

/// Runs the controllers until all have planned.
async fn report(args: &Plan, config: kube::Config, preview: &Preview, changes: Vec<Change>) -> Result<Report> {
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let options = Options {
        namespace: args.namespace.clone().filter(|namespace| !namespace.is_empty()),
        watch_filter: args.watch_filter.clone().filter(|value| !value.is_empty()),
        shutdown: stop.clone(),
        preview: Some(preview.clone()),
        ..Options::default()
    };
    let context = Context::new(config, options).context("cannot make a Kubernetes client")?;
    let azure = Clients::new(capstan_azure::Settings {
        interceptors: Interceptors::new(vec![preview.read_only()]),
        ..args.azure.settings()?
    })?;
    let settings = controllers::Settings {
        azure,
        azure_sign_in: args.azure.sign_in()?,
        azure_json: args.azure_json,
        vsphere: args.vsphere.options(),
    };
    let asked = if args.controllers.is_empty() {
        Name::ALL.to_vec()
    } else {
        args.controllers.clone()
    };
    let mut tasks = JoinSet::new();
    let mut expected = BTreeSet::new();
    let mut missing = Vec::new();
    for name in asked {
        if !manager::is_served(name, &context.client).await? {
            let old = manager::serves(name, V1BETA1, &context.client).await?;
            missing.push(not_planned(name, old));
            continue;
        }
        expected.extend(name.reconcilers());
        expected.extend(name.optional(&settings));
        tasks.spawn(controllers::run(name, context.clone(), settings.clone()));
    }
    if expected.is_empty() {
        bail!("nothing to plan: {}", missing.join("; "));
    }
    let finished = async {
        tokio::select! {
            finished = preview.finished(&expected) => Ok(finished),
            Some(Ok(Err(error))) = tasks.join_next() => Err(error),
        }
    };
    match capstan_core::clock::timeout(args.timeout, finished).await {
        Ok(finished) => _ = finished?,
        Err(_) => {
            let done = preview.finished_now();
            let late: Vec<&str> = expected.difference(&done).copied().collect();
            missing.push(format!(
                "not all objects are planned after {:?}: {}; see --timeout",
                args.timeout,
                late.join(", ")
            ));
        }
    }
    let complete = expected.is_subset(&preview.finished_now());
    missing.extend(preview.notes());
    let report = Report::new(preview, changes, missing, complete);
    // Signs out of the vCenters.
    stop.cancel();
    let _ = capstan_core::clock::timeout(manager::STOP_GRACE, async {
        while tasks.join_next().await.is_some() {}
    })
    .await;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_cannot_plan_names_the_definition_and_what_to_do() {
        let missing = not_planned(Name::Vsphere, false);
        assert!(
            missing.ends_with("vspheremachines.infrastructure.cluster.x-k8s.io is not installed"),
            "{missing}"
        );
        let old = not_planned(Name::Vsphere, true);
        assert!(
            old.contains("serves v1beta1 and not v1beta2") && old.contains("capstan crds --controllers vsphere"),
            "{old}"
        );
    }
}
