//! The Cluster API core manager beside a control plane: its CRDs with conversion, the manager, its admission.
//!
//! Invariant: the CRDs come first, the admission last. The order matters: conversion is asked for as soon as the manager lists old versions, so the CRDs name its address
//! first; admission is registered last, since until the manager answers it would refuse everything.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::Client;
use kube::api::DynamicObject;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::controlplane::{ASK, START_TIMEOUT, free_ports};
use crate::pki::Pki;
use crate::process::{Lifeline, Process};
use crate::{manifests, parts};

pub struct Programs {
    manager: PathBuf,
    crds: PathBuf,
    webhooks: PathBuf,
}

impl Programs {
    pub fn provide() -> Result<Self> {
        Ok(Self {
            manager: parts::CLUSTER_API.path()?,
            crds: parts::CLUSTER_API_CRDS.path()?,
            webhooks: parts::CLUSTER_API_WEBHOOKS.path()?,
        })
    }
}

pub async fn start(
    programs: &Programs,
    dir: &Path,
    pki: &Pki,
    lifeline: &Lifeline,
    client: &Client,
) -> Result<Process> {
    let [webhook, health] = free_ports()?;
    let server = Server::new(webhook, pki);
    let mut crds = manifests::read_dir(&programs.crds)?;
    crds.iter_mut().for_each(|crd| server.convert(crd));
    manifests::install_crds(client, crds).await?;
    pki.serving("cluster-api")?;
    let mut process = lifeline.start(dir, "cluster-api", command(programs, dir, webhook, health))?;
    wait_healthy(&mut process, health).await?;
    let mut webhooks = manifests::read_dir(&programs.webhooks)?;
    for configuration in &mut webhooks {
        server.admit(configuration)?;
    }
    manifests::apply(client, "default", &webhooks).await?;
    Ok(process)
}

/// Waits until a manager answers at its health port, which includes that its webhooks are served.
pub(crate) async fn wait_healthy(process: &mut Process, port: u16) -> Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    while !is_healthy(port).await {
        process.check()?;
        if Instant::now() > deadline {
            bail!("{} is not ready; see {}", process.name(), process.log().display());
        }
        tokio::time::sleep(ASK).await;
    }
    Ok(())
}

fn command(programs: &Programs, dir: &Path, webhook: u16, health: u16) -> Command {
    let mut command = Command::new(&programs.manager);
    command
        .env("KUBECONFIG", dir.join("kubeconfig"))
        .args([
            format!("--webhook-port={webhook}"),
            format!("--health-addr=127.0.0.1:{health}"),
        ])
        .arg(format!("--webhook-cert-dir={}", dir.join("pki").display()))
        .args([
            "--webhook-cert-name=cluster-api.crt",
            "--webhook-key-name=cluster-api.key",
        ])
        .arg("--feature-gates=ClusterTopology=true")
        .args(["--diagnostics-address=127.0.0.1:0", "--insecure-diagnostics"]);
    command
}

/// The address at which a manager answers the API server.
pub(crate) struct Server {
    port: u16,
    ca: String,
    /// The namespace and the name of the Service in front of it.
    service: Option<(String, String)>,
}

impl Server {
    pub fn new(port: u16, pki: &Pki) -> Self {
        let ca = BASE64_STANDARD.encode(pki.ca());
        let service = None;
        Self { port, ca, service }
    }

    /// Lets the API server go through a Service, which has to lead to this machine.
    pub fn behind(mut self, namespace: &str, service: &str) -> Self {
        self.service = Some((namespace.to_owned(), service.to_owned()));
        self
    }

    fn at(&self, path: &str) -> Value {
        match &self.service {
            None => json!({ "url": format!("https://127.0.0.1:{}{path}", self.port), "caBundle": self.ca }),
            Some((namespace, name)) => {
                let service = json!({ "namespace": namespace, "name": name, "path": path, "port": self.port });
                json!({ "service": service, "caBundle": self.ca })
            }
        }
    }

    /// Lets the manager convert the objects of a definition.
    pub fn convert(&self, crd: &mut DynamicObject) {
        crd.data["spec"]["conversion"] = json!({
            "strategy": "Webhook",
            "webhook": { "clientConfig": self.at("/convert"), "conversionReviewVersions": ["v1"] },
        });
    }

    /// Points an admission configuration at the manager, which in a cluster is behind a Service.
    pub fn admit(&self, configuration: &mut DynamicObject) -> Result<()> {
        let entries = configuration.data["webhooks"].as_array_mut();
        for entry in entries.context("a configuration without webhooks")? {
            let path = entry["clientConfig"]["service"]["path"].as_str().unwrap_or_default();
            entry["clientConfig"] = self.at(path);
        }
        Ok(())
    }
}

/// Asks the manager's own readiness, which includes that its webhooks are served.
async fn is_healthy(port: u16) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    matches!(tokio::time::timeout(ASK * 20, ask).await, Ok(Ok(answer)) if answer.contains(" 200 "))
}
