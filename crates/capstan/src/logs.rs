//! Logs: structured, to standard error, so that standard output belongs to the commands.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One JSON object per line
    Json,
    /// Text for people
    #[value(alias = "text")]
    Pretty,
}

/// kube's client logs every answer that is not a success as an error, even an expected one. Our own layer logs the others.
const QUIET: &str = "kube_client::client::builder=off";

/// `RUST_LOG` overrides `level`.
pub fn start(format: Format, level: &str) {
    start_to(format, level, std::io::stderr);
}

pub fn start_to<W>(format: Format, level: &str, writer: W)
where
    W: for<'a> tracing_subscriber::fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(format!("{QUIET},{level}")));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    // A second start in one process (tests) changes nothing.
    let _ = match format {
        Format::Json => builder.json().flatten_event(true).try_init(),
        Format::Pretty => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
}
