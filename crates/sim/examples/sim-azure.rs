//! The simulator alone, as `capstan sim azure` runs it.

use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: capstan_sim::azure::AzureArgs,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    capstan_sim::azure::run(Cli::parse().args).await
}
