//! The only binary: command line and wiring.

mod check;
mod disks;
mod manifest;

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

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Check(args) => {
            if !check::run(&args)? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Disks(command) => disks::run(&command)?,
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "capstan", &mut std::io::stdout());
        }
        Command::Version => println!("capstan {}", env!("CARGO_PKG_VERSION")),
    }
    Ok(ExitCode::SUCCESS)
}
