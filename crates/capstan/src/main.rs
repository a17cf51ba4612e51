//! The only binary: command line and wiring.

mod check;
mod controllers;
mod disks;
mod duration;
mod logs;
mod manager;
mod manifest;
mod run;
mod serve;
mod up;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Runs the machines under Kubernetes clusters: OpenShift machines on Azure, Azure machine pools, vSphere machines
#[derive(Parser)]
#[command(name = "capstan", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Up(up::Up),
    Run(Box<run::Run>),
    /// Simulated clouds
    #[command(subcommand)]
    Sim(Sim),
    /// Print the CustomResourceDefinitions, for example: capstan crds | kubectl apply --server-side -f -
    Crds {
        /// For clusters that are made from a ClusterClass: templates on vSphere are kept from being changed by an admission
        /// policy, which lets Cluster API's dry runs pass
        #[arg(long)]
        cluster_class: bool,
    },
    Check(check::Check),
    /// Render user data that partitions, formats and mounts data disks
    #[command(subcommand)]
    Disks(disks::Disks),
    /// Print a completion script for your shell, for example: source <(capstan completions bash)
    Completions {
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

#[derive(Subcommand)]
enum Sim {
    Azure(Box<capstan_sim::azure::cli::AzureArgs>),
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        // Whoever read our output has had enough, as `head` does.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", explain(&error));
            ExitCode::FAILURE
        }
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The error and its causes on one line; some say their cause themselves already.
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
        Command::Up(args) => until_done(up::run(args))?,
        Command::Run(args) => {
            with_one_arena();
            until_done(run::run(*args))?;
        }
        Command::Sim(Sim::Azure(args)) => until_done(capstan_sim::azure::cli::run(*args))?,
        Command::Crds { cluster_class } => crds(cluster_class)?,
        Command::Check(args) => {
            if !until_done(check::run(&args))? {
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

/// The C library gives threads arenas of their own, and each keeps what it once needed: at its peak a third of what the
/// program holds. One is enough for two threads that mostly wait. The setting is read before the program starts, so it
/// starts itself anew, as the same process; where that cannot be it goes on as it is.
fn with_one_arena() {
    const SETTING: &str = "MALLOC_ARENA_MAX";
    if std::env::var_os(SETTING).is_some() {
        return;
    }
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    if let Ok(program) = std::env::current_exe() {
        let mut again = std::process::Command::new(program);
        let _failed = again.arg0(name).args(args).env(SETTING, "1").exec();
    }
}

/// Two threads: the work is waiting, and each thread costs memory.
fn until_done<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let result = runtime.block_on(work);
    // A build of minutes that was waited for on a thread of its own ends with us, not we with it.
    runtime.shutdown_background();
    result
}

fn crds(cluster_class: bool) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let mut print = |manifest: String| writeln!(out, "---\n{}", manifest.trim_start_matches("---\n").trim_end());
    let crds = if cluster_class {
        capstan_api::crds_for_cluster_class()
    } else {
        capstan_api::crds()
    };
    for crd in crds {
        print(capstan_api::manifest(&crd)?)?;
    }
    if cluster_class {
        let (policy, binding) = capstan_api::template_policy();
        print(capstan_api::manifest(&policy)?)?;
        print(capstan_api::manifest(&binding)?)?;
    }
    Ok(())
}
