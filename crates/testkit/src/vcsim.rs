//! A simulated vCenter, started from its real part.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::controlplane::{ASK, START_TIMEOUT};
use crate::process::{Lifeline, Process};
use crate::{parts, shared};

/// Where a simulated vCenter is, and how to log in.
#[derive(Clone, Debug, Deserialize)]
pub struct Access {
    /// Address of the vCenter (TLS), with user and password in it or not as vcsim prints it.
    pub url: String,
    /// Address of the endpoint that counts calls and makes faults (plain HTTP).
    pub admin: String,
    pub username: String,
    pub password: String,
    /// Thumbprints of its certificate.
    pub sha1: String,
    pub sha256: String,
    /// Its certificate, PEM.
    pub ca: String,
}

/// A running vcsim; it ends with this value.
pub struct Vcsim {
    pub access: Access,
    process: Process,
    dir: PathBuf,
    _lifeline: Lifeline,
}

impl Vcsim {
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }
}

impl Drop for Vcsim {
    fn drop(&mut self) {
        self.process.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Starts vcsim with further flags (see `tools/vcsim`).
pub async fn vcsim(flags: &[&str]) -> Result<Vcsim> {
    let program = tokio::task::spawn_blocking(|| parts::VCSIM.path()).await??;
    let dir = shared::fresh_dir("vcsim")?;
    let lifeline = Lifeline::own()?;
    let mut command = Command::new(program);
    command.args(flags);
    let mut process = lifeline.start(&dir, "vcsim", command)?;
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        process.check()?;
        let log = std::fs::read_to_string(process.log()).unwrap_or_default();
        // A line is complete once its end is there.
        let lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        if let Some(access) = lines.filter_map(|line| serde_json::from_str(line).ok()).next() {
            return Ok(Vcsim {
                access,
                process,
                dir,
                _lifeline: lifeline,
            });
        }
        if Instant::now() > deadline {
            bail!("vcsim did not get ready; see {}", process.log().display());
        }
        tokio::time::sleep(ASK).await;
    }
}
