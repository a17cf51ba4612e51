//! The controllers that Capstan replaces, beside a control plane: their definitions, their manager, their admission.
//!
//! Invariant: a stopped peer leaves no webhook that rejects writes: its admission is removed with it. Its definitions
//! stay, like those of an installation whose Deployment was scaled to zero.

mod installation;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use installation::Installation;

use anyhow::{Context, Result};
use kube::api::DynamicObject;
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::clusterapi::{self, Server};
use crate::controlplane::{ControlPlane, free_ports};
use crate::parts::{self, Part};
use crate::pki::Pki;
use crate::process::{Lifeline, Process};
use crate::{files, manifests};

/// One release of a controller.
pub struct Release {
    pub name: &'static str,
    /// What the names of its own installation begin with.
    prefix: &'static str,
    program: &'static Part,
    crds: &'static Part,
    /// Definitions of other providers that the manager watches.
    watched: Option<&'static Part>,
    /// Foreign kinds that the manager needs at its start, and that are not served: group, version, kind, plural.
    pub foreign: &'static [(&'static str, &'static str, &'static str, &'static str)],
    webhooks: &'static Part,
    /// The contracts of Cluster API that its definitions fulfil.
    contracts: &'static [&'static str],
    /// Whether it converts its own objects.
    converts: bool,
    flags: &'static [&'static str],
}

pub static CAPV_1_16: Release = Release {
    name: "capv",
    prefix: "capv",
    program: &parts::CAPV,
    crds: &parts::CAPV_CRDS,
    watched: None,
    foreign: &[],
    webhooks: &parts::CAPV_WEBHOOKS,
    contracts: &["v1beta1", "v1beta2"],
    converts: true,
    flags: &["--leader-elect=false", "--credentials-file=/dev/null"],
};

pub static CAPV_1_14: Release = Release {
    name: "capv-1.14",
    program: &parts::CAPV_1_14,
    crds: &parts::CAPV_1_14_CRDS,
    webhooks: &parts::CAPV_1_14_WEBHOOKS,
    contracts: &["v1beta1"],
    ..CAPV_1_16
};

pub static CAPZ: Release = Release {
    name: "capz",
    prefix: "capz",
    program: &parts::CAPZ,
    crds: &parts::CAPZ_CRDS,
    watched: Some(&parts::KUBEADM_CRDS),
    // Azure Service Operator's.
    foreign: &[
        (
            "resources.azure.com",
            "v1api20200601",
            "ResourceGroup",
            "resourcegroups",
        ),
        (
            "network.azure.com",
            "v1api20201101",
            "VirtualNetwork",
            "virtualnetworks",
        ),
        (
            "network.azure.com",
            "v1api20201101",
            "VirtualNetworksSubnet",
            "virtualnetworkssubnets",
        ),
        ("network.azure.com", "v1api20220701", "NatGateway", "natgateways"),
        ("network.azure.com", "v1api20220701", "BastionHost", "bastionhosts"),
        (
            "network.azure.com",
            "v1api20220701",
            "PrivateEndpoint",
            "privateendpoints",
        ),
        (
            "containerservice.azure.com",
            "v1api20250801",
            "ManagedCluster",
            "managedclusters",
        ),
        (
            "containerservice.azure.com",
            "v1api20250801",
            "ManagedClustersAgentPool",
            "managedclustersagentpools",
        ),
        (
            "containerservice.azure.com",
            "v1api20250301",
            "FleetsMember",
            "fleetsmembers",
        ),
        (
            "kubernetesconfiguration.azure.com",
            "v1api20230501",
            "Extension",
            "extensions",
        ),
    ],
    webhooks: &parts::CAPZ_WEBHOOKS,
    contracts: &["v1beta1"],
    converts: false,
    // Its own pauses are for an Azure that takes minutes.
    flags: &["--debouncing-timer=1s", "--reconciler-requeue=2s"],
};

impl Release {
    /// Builds all its parts, which takes minutes the first time.
    pub async fn build(&'static self) -> Result<()> {
        let all = [Some(self.program), Some(self.crds), self.watched, Some(self.webhooks)];
        tokio::task::spawn_blocking(move || all.into_iter().flatten().try_for_each(|part| part.path().map(drop)))
            .await
            .context("the build was interrupted")?
    }

    fn command(&self, kubeconfig: &Path, certificates: &Path, ports: Ports) -> Result<Command> {
        let mut command = Command::new(self.program.path()?);
        command
            .env("KUBECONFIG", kubeconfig)
            .env("POD_NAMESPACE", "default")
            .args([
                format!("--webhook-port={}", ports.webhook),
                format!("--health-addr=127.0.0.1:{}", ports.health),
            ])
            .arg(format!("--webhook-cert-dir={}", certificates.display()))
            .args(["--diagnostics-address=127.0.0.1:0", "--insecure-diagnostics"])
            .args(self.flags);
        Ok(command)
    }

    /// Returns its definitions as its own installation has them.
    fn definitions(&self, server: &Server) -> Result<Vec<DynamicObject>> {
        let mut crds = manifests::read_dir(&self.crds.path()?)?;
        for crd in &mut crds {
            let labels = crd.labels_mut();
            let contract = |version: &&str| (format!("cluster.x-k8s.io/{version}"), (*version).to_owned());
            labels.extend(self.contracts.iter().map(contract));
            if self.converts {
                server.convert(crd);
            }
        }
        if let Some(watched) = self.watched {
            crds.extend(manifests::read_dir(&watched.path()?)?);
        }
        for foreign in self.foreign {
            crds.push(free_form(*foreign)?);
        }
        Ok(crds)
    }
}

/// Returns a definition of a namespaced kind that takes any content.
fn free_form((group, version, kind, plural): (&str, &str, &str, &str)) -> Result<DynamicObject> {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version = json!({"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}}});
    let names = json!({"kind": kind, "plural": plural, "listKind": format!("{kind}List")});
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    });
    Ok(serde_json::from_value(crd)?)
}

/// Connects every HTTPS tunnel to one server, for any host. CAPZ knows no other address of Azure than the real one.
///
/// Returns the address for `HTTPS_PROXY`; it answers as long as the runtime of the caller lives.
pub async fn tunnel_to(server: SocketAddr) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            // A client that disconnects ends its own tunnel only.
            tokio::spawn(async move { tunnel(client, server).await.ok() });
        }
    });
    Ok(format!("http://{address}"))
}

async fn tunnel(client: TcpStream, server: SocketAddr) -> Result<()> {
    let mut client = BufReader::new(client);
    let mut line = String::new();
    // The request and its headers end with an empty line; every request is CONNECT.
    while client.read_line(&mut line).await? > 2 {
        line.clear();
    }
    let mut server = TcpStream::connect(server).await?;
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

/// Where a manager listens, on loopback.
#[derive(Clone, Copy)]
struct Ports {
    webhook: u16,
    health: u16,
}

/// A running manager of a release.
pub struct Peer {
    process: Process,
    client: Client,
    admission: Vec<DynamicObject>,
    _lifeline: Lifeline,
}

impl Peer {
    /// Installs its definitions over those that are there, starts it, and registers its admission.
    ///
    /// `admits` chooses the webhooks, by the resource that each is about: a manager whose feature gates turn a controller off does
    /// not serve its webhooks, either.
    pub async fn start(
        plane: &ControlPlane,
        release: &'static Release,
        args: &[&str],
        variables: &[(&str, String)],
        admits: fn(&str) -> bool,
    ) -> Result<Self> {
        release.build().await?;
        let [webhook, health] = free_ports()?;
        let pki = Pki::open(&plane.dir().join("pki"))?;
        let server = Server::new(webhook, &pki);
        let client = plane.client().await?;
        manifests::install_crds(&client, release.definitions(&server)?).await?;
        let certificates = certificates(plane.dir(), &pki, release.name, &[])?;
        let ports = Ports { webhook, health };
        let mut command = release.command(plane.kubeconfig(), &certificates, ports)?;
        command
            .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
            .args(args);
        let lifeline = Lifeline::own()?;
        let mut process = lifeline.start(plane.dir(), release.name, command)?;
        clusterapi::wait_healthy(&mut process, health).await?;
        let mut admission = manifests::read_dir(&release.webhooks.path()?)?;
        for configuration in &mut admission {
            server.admit(configuration)?;
            retain(configuration, admits);
            // Cluster API's own configurations have the same names before their installation prefixes them.
            configuration.metadata.name = Some(format!("{}-{}", release.name, configuration.name_any()));
        }
        manifests::apply(&client, "default", &admission).await?;
        Ok(Self {
            process,
            client,
            admission,
            _lifeline: lifeline,
        })
    }

    /// Fails with the end of its log when it has ended.
    pub fn check(&mut self) -> Result<()> {
        self.process.check()
    }

    pub fn log(&self) -> PathBuf {
        self.process.log().to_owned()
    }

    /// Ends it, and removes its admission, which would refuse every write without it.
    pub async fn stop(mut self) -> Result<()> {
        self.process.kill();
        for configuration in &mut self.admission {
            configuration.data["webhooks"] = json!([]);
        }
        manifests::apply(&self.client, "default", &self.admission).await
    }
}

/// Keeps the webhooks about chosen resources in a configuration.
fn retain(configuration: &mut DynamicObject, admits: fn(&str) -> bool) {
    if let Some(entries) = configuration.data["webhooks"].as_array_mut() {
        let resource = |entry: &serde_json::Value| entry["rules"][0]["resources"][0].as_str().map(admits);
        entries.retain(|entry| resource(entry) == Some(true));
    }
}

/// Creates a serving certificate under the names that controller-runtime reads.
fn certificates(dir: &Path, pki: &Pki, name: &str, hosts: &[String]) -> Result<PathBuf> {
    pki.serving_for(name, hosts)?;
    let dir = dir.join(format!("{name}-webhook"));
    for (made, read) in [("crt", "tls.crt"), ("key", "tls.key")] {
        let text = std::fs::read_to_string(pki.file(&format!("{name}.{made}")))?;
        files::write_private(&dir.join(read), text)?;
    }
    Ok(dir)
}
