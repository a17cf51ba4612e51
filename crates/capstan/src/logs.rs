//! Logs: structured, to standard error, so that standard output belongs to the commands.
//!
//! Invariant: an event is one line, whatever text of others is in it, and no library logs whole answers of a server.

use std::io::{IsTerminal, Write};

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// One JSON object per line
    Json,
    /// Text for people
    #[value(alias = "text")]
    Pretty,
}

/// kube logs every answer that it cannot read, in full, and every answer that is not a success, even an expected one: a Secret,
/// or megabytes of a hostile server. Our own layers log what went wrong. `RUST_LOG` turns these on again by their names.
const QUIET: &str = "kube_client::client=off,kube_runtime::watcher=off";

/// `RUST_LOG` overrides `level`.
pub fn start(format: Format, level: &str) {
    start_to(format, level, std::io::stderr);
}

pub fn start_to<W>(format: Format, level: &str, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = filter(std::env::var(EnvFilter::DEFAULT_ENV).ok().as_deref(), level);
    let builder = tracing_subscriber::fmt().with_env_filter(filter);
    let builder = builder.with_writer(OneLine(writer));
    // A second start in one process (tests) changes nothing.
    let _ = match format {
        Format::Json => builder.json().flatten_event(true).try_init(),
        Format::Pretty => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
}

fn filter(variable: Option<&str>, level: &str) -> EnvFilter {
    let chosen = variable.filter(|text| !text.is_empty() && EnvFilter::try_new(text).is_ok());
    EnvFilter::new(format!("{QUIET},{}", chosen.unwrap_or(level)))
}

/// Writes each event as one line.
struct OneLine<W>(W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for OneLine<W> {
    type Writer = OneLine<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        OneLine(self.0.make_writer())
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Self::Writer {
        OneLine(self.0.make_writer_for(meta))
    }
}

impl<W: Write> Write for OneLine<W> {
    /// Takes a whole event with its line break, as the formatter hands it over.
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let (text, end) = match event.strip_suffix(b"\n") {
            Some(text) => (text, "\n"),
            None => (event, ""),
        };
        let breaks = |byte: &u8| matches!(byte, b'\n' | b'\r');
        if !text.iter().any(breaks) {
            return self.0.write_all(event).map(|()| event.len());
        }
        let mut line = Vec::with_capacity(event.len() + 16);
        for byte in text {
            match byte {
                b'\n' => line.extend_from_slice(b"\\n"),
                b'\r' => line.extend_from_slice(b"\\r"),
                byte => line.push(*byte),
            }
        }
        line.extend_from_slice(end.as_bytes());
        self.0.write_all(&line).map(|()| event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_and_no_library_logs_the_answers_of_a_server() {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter(Some("debug"), "info"))
            .with_writer(OneLine(move || writer.clone()))
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let hostile = "bad\r\n2026-01-01T00:00:00Z  INFO capstan: forged";
            tracing::warn!(error = %hostile, "{hostile}");
            tracing::warn!(target: "kube_client::client", "{}", "the whole answer");
            tracing::warn!(target: "kube_runtime::watcher", "{}", "the whole answer");
            tracing::debug!("the end");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("forged") && text.contains("the end"), "{text}");
        assert!(!text.contains("the whole answer"), "{text}");
        let named = filter(Some("kube_client::client=debug"), "info").to_string();
        assert!(named.contains("kube_client::client=debug"), "{named}");
    }
}
