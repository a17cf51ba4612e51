//! What a process used, and what an API server was asked to write.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use capstan_testkit::ControlPlane;

/// The kernel counts CPU time in hundredths of a second.
const TICKS: f64 = 100.0;
/// How the benchmark's own client calls itself, to be told from the controllers.
pub const USER_AGENT: &str = "capstan-bench";

#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu_seconds: f64,
    pub peak_mib: f64,
    /// Without the pages of the program file.
    pub anonymous_mib: f64,
}

/// CPU time so far and the largest resident set so far.
pub fn usage(pid: u32) -> Result<Usage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("the controllers ended")?;
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<f64> = after_name
        .split_whitespace()
        .map(|field| field.parse().unwrap_or_default())
        .collect();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("the controllers ended")?;
    let mib = |name: &str| -> f64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib: Option<f64> = line.and_then(|text| text.split_whitespace().next()?.parse().ok());
        kib.unwrap_or_default() / 1024.0
    };
    Ok(Usage {
        cpu_seconds: (fields.get(11).copied().unwrap_or_default() + fields.get(12).copied().unwrap_or_default())
            / TICKS,
        peak_mib: mib("VmHWM:"),
        anonymous_mib: mib("RssAnon:"),
    })
}

/// A control plane that keeps a record of every write.
pub struct Audited {
    pub plane: ControlPlane,
    log: PathBuf,
    dir: PathBuf,
}

impl Audited {
    pub async fn start() -> Result<Self> {
        Self::start_with(false, false).await
    }

    /// With kwok, which keeps Nodes alive, or Cluster API's core.
    pub async fn start_with(kwok: bool, capi_core: bool) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("capstan-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let (policy, log) = (dir.join("policy.yaml"), dir.join("audit.log"));
        std::fs::write(
            &policy,
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
             - {level: Metadata, verbs: [create, update, patch, delete, deletecollection]}\n- {level: None}\n",
        )?;
        let options = capstan_testkit::Options {
            kwok,
            capi_core,
            apiserver_flags: vec![
                format!("--audit-policy-file={}", policy.display()),
                format!("--audit-log-path={}", log.display()),
                "--enable-priority-and-fairness=false".into(),
                "--max-requests-inflight=2000".into(),
                "--max-mutating-requests-inflight=2000".into(),
            ],
            ..Default::default()
        };
        Ok(Self {
            plane: ControlPlane::start(options).await?,
            log,
            dir,
        })
    }

    /// A client of the benchmark's own.
    pub async fn client(&self) -> Result<kube::Client> {
        let mut config = self.plane.config().await?;
        config
            .headers
            .push((http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT)));
        Ok(kube::Client::try_from(config)?)
    }

    /// Writes in a namespace by the controllers, by verb and kind; the empty namespace stands for the cluster's own kinds.
    pub fn writes(&self, namespace: &str) -> Result<BTreeMap<String, u64>> {
        let mut writes = BTreeMap::new();
        for line in std::fs::read_to_string(&self.log).unwrap_or_default().lines() {
            let Ok(event) = serde_json::from_str::<serde_json::Value>(line) else {
                continue;
            };
            let text = |pointer: &str| {
                event
                    .pointer(pointer)
                    .and_then(|value| value.as_str())
                    .unwrap_or_default()
            };
            let agent = text("/userAgent");
            let here = text("/objectRef/namespace") == namespace;
            let others = [USER_AGENT, "capstan-sim", "cluster-api", "kube-", "kwok", "etcd"];
            if !here || others.iter().any(|other| agent.starts_with(other)) {
                continue;
            }
            let (resource, sub) = (text("/objectRef/resource"), text("/objectRef/subresource"));
            let sub = if sub.is_empty() {
                String::new()
            } else {
                format!("/{sub}")
            };
            *writes.entry(format!("{} {resource}{sub}", text("/verb"))).or_default() += 1;
        }
        Ok(writes)
    }

    pub fn kubeconfig(&self) -> &Path {
        self.plane.kubeconfig()
    }
}

impl Drop for Audited {
    fn drop(&mut self) {
        // Left-over files in the temporary folder are no reason to fail.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
