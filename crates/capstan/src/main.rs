//! The only binary: command line and wiring.
//!
//! Feature `dev` (on by default) adds `up` and `sim` and everything they need. Images are built without it.

mod access;
mod adopt;
mod check;
mod controllers;
mod disks;
mod duration;
mod guard;
mod logs;
mod manager;
mod manifest;
mod orphans;
mod peer_flags;
mod plain;
mod plan;
mod run;
mod serve;
mod size;
#[cfg(feature = "dev")]
mod up;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context as _;
use capstan_api::vsphere::v1beta2::{self, V1BETA1, V1BETA2};
use clap::{CommandFactory, Parser, Subcommand};
use controllers::Name;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;

/// Runs the machines under Kubernetes clusters: OpenShift machines on Azure, Azure machine pools, vSphere machines
#[derive(Parser)]
#[command(name = "capstan", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[cfg(feature = "dev")]
    Up(up::Up),
    Run(Box<run::Run>),
    Plan(Box<plan::Plan>),
    Adopt(adopt::Adopt),
    /// Simulate a cloud on this machine
    #[cfg(feature = "dev")]
    #[command(subcommand)]
    Sim(Sim),
    /// Print the CustomResourceDefinitions and the admission policy of VSphereMachineTemplates, for example: capstan crds | kubectl apply --server-side -f -
    Crds {
        /// Print only the definitions of these controllers, for clusters in which other controllers serve the other kinds [default: all]
        #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
        controllers: Vec<Name>,
        /// Let the API server convert the vSphere kinds through this Service of Capstan
        #[arg(
            long,
            value_name = "NAMESPACE/NAME",
            default_value = "capstan-system/capstan-webhook"
        )]
        webhook_service: String,
        /// Store the vSphere kinds in this version: v1beta1 for the way back to Cluster API's vSphere provider before 1.16.
        /// At its next start Capstan writes all objects again, in this version
        #[arg(long, value_name = "VERSION", default_value = V1BETA2, value_parser = [V1BETA1, V1BETA2])]
        stored_version: String,
    },
    Check(check::Check),
    Orphans(orphans::Orphans),
    /// Print user data that partitions, formats and mounts data disks
    #[command(subcommand)]
    Disks(disks::Disks),
    /// Print a completion script for your shell, for example: source <(capstan completions bash)
    Completions {
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

#[cfg(feature = "dev")]
#[derive(Subcommand)]
enum Sim {
    Azure(Box<capstan_sim::azure::cli::AzureArgs>),
}

fn main() -> ExitCode {
    match run(Cli::parse_from(arguments(std::env::args_os())).command) {
        Ok(code) => code,
        // The reader of our output has closed it, as `head` does.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", plain::plain(&explain(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Returns the arguments with the subcommand `run` where the first of them is a flag: the containers of Cluster API's
/// providers have flags only.
fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.collect();
    let first = arguments.get(1).and_then(|first| first.to_str());
    if first.is_some_and(|first| first.starts_with("--") && !matches!(first, "--" | "--help" | "--version")) {
        arguments.insert(1, "run".into());
    }
    arguments
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Returns the error and its causes on one line. A cause that an error already contains is left out.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        #[cfg(feature = "dev")]
        Command::Up(args) => until_done(up::run(args))?,
        Command::Run(args) => until_done(run::run(*args))?,
        Command::Plan(args) => return until_done(plan::run(*args)),
        Command::Adopt(args) => return until_done(adopt::run(args)),
        #[cfg(feature = "dev")]
        Command::Sim(Sim::Azure(args)) => until_done(capstan_sim::azure::cli::run(*args))?,
        Command::Crds {
            controllers,
            webhook_service,
            stored_version,
        } => crds(&controllers, &webhook_service, &stored_version)?,
        Command::Check(args) => {
            if !until_done(check::run(&args))? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Orphans(args) => {
            if !until_done(orphans::run(&args))? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Disks(command) => disks::run(&command)?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "capstan", &mut script);
            std::io::stdout().write_all(&script)?;
        }
        Command::Version => writeln!(std::io::stdout(), "capstan {}", env!("CARGO_PKG_VERSION"))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Two threads: the program mostly waits, and each thread costs memory.
fn until_done<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let result = runtime.block_on(work);
    // A build on a blocking thread may take minutes. The program does not wait for it.
    runtime.shutdown_background();
    result
}

fn crds(controllers: &[Name], webhook_service: &str, stored_version: &str) -> anyhow::Result<()> {
    let controllers = if controllers.is_empty() {
        &Name::ALL
    } else {
        controllers
    };
    let (namespace, name) = webhook_service
        .split_once('/')
        .with_context(|| format!("--webhook-service {webhook_service:?} is not NAMESPACE/NAME"))?;
    let mut out = std::io::stdout().lock();
    let mut print = |manifest: String| writeln!(out, "---\n{}", manifest.trim_start_matches("---\n").trim_end());
    let mut crds = capstan_api::crds();
    v1beta2::set_service(&mut crds, namespace, name);
    v1beta2::store_as(&mut crds, stored_version);
    let asked = |crd: &CustomResourceDefinition| controllers.iter().any(|name| name.has_definition(&crd.name_any()));
    for crd in crds.into_iter().filter(asked) {
        print(capstan_api::manifest(&crd)?)?;
    }
    if !controllers.contains(&Name::Vsphere) {
        return Ok(());
    }
    let (policy, binding) = capstan_api::template_policy();
    print(capstan_api::manifest(&policy)?)?;
    print(capstan_api::manifest(&binding)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arguments in the Deployments of CAPZ 1.26 and CAPV 1.16, and of machine-api-operator's container for Azure.
    const PEERS: [&[&str]; 3] = [
        &[
            "--leader-elect",
            "--diagnostics-address=:8443",
            "--insecure-diagnostics=false",
            "--feature-gates=MachinePool=true,AKSResourceHealth=false,EdgeZone=false,ASOAPI=true,APIServerILB=false,SkipMachinePoolModelReconciliation=false",
            "--v=0",
        ],
        &[
            "--diagnostics-address=:8443",
            "--insecure-diagnostics=true",
            "--leader-elect",
            "--v=4",
            "--feature-gates=NodeAntiAffinity=false,NamespaceScopedZones=false",
        ],
        &[
            "--logtostderr=true",
            "--v=3",
            "--leader-elect=true",
            "--leader-elect-lease-duration=120s",
            "--leader-elect-resource-namespace=openshift-machine-api",
            "--namespace=openshift-machine-api",
            "--max-concurrent-reconciles=10",
        ],
    ];

    fn parse(flags: &[&str]) -> Result<Cli, clap::Error> {
        let line = ["capstan"].iter().chain(flags).map(OsString::from);
        Cli::try_parse_from(arguments(line))
    }

    #[test]
    fn the_arguments_of_the_replaced_controllers_start_the_manager() {
        for flags in PEERS {
            let command = parse(flags).map(|cli| cli.command);
            assert!(matches!(command, Ok(Command::Run(_))), "{flags:?}: {:?}", command.err());
        }
        assert!(matches!(
            parse(&["version"]).map(|cli| cli.command),
            Ok(Command::Version)
        ));
        let help = parse(&["--help"]).err().map(|error| error.kind());
        assert_eq!(help, Some(clap::error::ErrorKind::DisplayHelp));
    }
}
