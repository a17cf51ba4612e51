//! Benchmarks on real parts: a real API server, a simulated cloud, and the controllers as a process of their own, so that
//! time, calls, writes, CPU and memory are theirs alone.
//!
//! `cargo run --release -p capstan-bench -- vsphere --machines 200`

mod measure;
mod vsphere;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "capstan-bench")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Machines with data disks on a simulated vCenter
    Vsphere(vsphere::Args),
    /// What `vsphere` measures: the controllers alone
    #[command(hide = true)]
    VsphereControllers { namespace: String },
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().command {
        Command::Vsphere(args) => vsphere::run(&args).await,
        Command::VsphereControllers { namespace } => vsphere::controllers(namespace).await,
    }
}
