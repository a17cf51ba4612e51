//! Benchmarks on real parts: a real API server, a simulated cloud, and the controllers as a process of their own, so that
//! time, calls, writes, CPU and memory are theirs alone.
//!
//! `cargo run --release -p capstan-bench -- vsphere --machines 200`

mod azure;
mod hostile;
mod measure;
mod openshift;
mod pods;
mod pools;
mod simulator;
mod vsphere;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(name = "capstan-bench")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The simulated Azure itself: requests per second and memory
    Simulator(simulator::Args),
    /// A machine pool that is created and rolled on a simulated Azure
    Pools(pools::Args),
    /// OpenShift machines with data disks on a simulated Azure
    Openshift(openshift::Args),
    /// What `openshift` measures: the controllers alone
    #[command(hide = true)]
    OpenshiftControllers { namespace: String },
    /// Machines with data disks on a simulated vCenter
    Vsphere(vsphere::Args),
    /// A good tenant's machines, alone and beside hostile tenants, and the memory of `capstan run`
    Hostile(hostile::Args),
    /// What `vsphere` measures: the controllers alone
    #[command(hide = true)]
    VsphereControllers { namespace: String },
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        // An API server that is just starting answers with errors: those are no news.
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("error,kube_client=off")))
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().command {
        Command::Simulator(args) => simulator::run(&args).await,
        Command::Pools(args) => pools::run(&args).await,
        Command::Openshift(args) => openshift::run(&args).await,
        Command::OpenshiftControllers { namespace } => openshift::controllers(namespace).await,
        Command::Vsphere(args) => vsphere::run(&args).await,
        Command::Hostile(args) => hostile::run(&args).await,
        Command::VsphereControllers { namespace } => vsphere::controllers(namespace).await,
    }
}
