//! The controllers that Capstan replaces, beside a control plane: their definitions, their manager, their admission.
//!
//! Invariant: a peer that was stopped leaves nothing that refuses writes: its admission goes with it. Its definitions stay,
//! as those of an installation do whose Deployment was scaled to zero.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use kube::Client;
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::json;

use crate::clusterapi::{self, Server};
use crate::controlplane::{ControlPlane, free_ports};
use crate::parts::{self, Part};
use crate::pki::Pki;
use crate::process::{Lifeline, Process};
use crate::{files, manifests};

/// One release of a controller.
pub struct Release {
    pub name: &'static str,
    program: &'static Part,
    crds: &'static Part,
    /// Kinds of others that the manager needs in order to start, and that nobody serves: group, version, kind, plural.
    foreign: &'static [(&'static str, &'static str, &'static str, &'static str)],
    webhooks: &'static Part,
    /// The contracts of Cluster API that its definitions fulfil.
    contracts: &'static [&'static str],
    /// Whether it converts its own objects.
    converts: bool,
    flags: &'static [&'static str],
}

pub static CAPV_1_16: Release = Release {
    name: "capv",
    program: &parts::CAPV,
    crds: &parts::CAPV_CRDS,
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
    program: &parts::CAPZ,
    crds: &parts::CAPZ_CRDS,
    // Azure Service Operator's.
    foreign: &[],
    webhooks: &parts::CAPZ_WEBHOOKS,
    contracts: &["v1beta1"],
    converts: false,
    // Its own pauses are for an Azure that takes minutes.
    flags: &["--debouncing-timer=1s", "--reconciler-requeue=2s"],
};

impl Release {
    /// Builds everything that it is made of, which takes minutes the first time.
    pub async fn build(&'static self) -> Result<()> {
        let all = [self.program, self.crds, self.webhooks];
        tokio::task::spawn_blocking(move || all.into_iter().try_for_each(|part| part.path().map(drop)))
            .await
            .context("the build was interrupted")?
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

/// A running manager of a release.
pub struct Peer {
    process: Process,
    client: Client,
    admission: Vec<DynamicObject>,
    _lifeline: Lifeline,
}

impl Peer {
    /// Installs its definitions over those that are there, starts it, and registers its admission.
    pub async fn start(
        plane: &ControlPlane,
        release: &'static Release,
        args: &[String],
        variables: &[(&str, String)],
    ) -> Result<Self> {
        release.build().await?;
        let [webhook, health] = free_ports()?;
        let pki = Pki::open(&plane.dir().join("pki"))?;
        let server = Server::new(webhook, &pki);
        let client = plane.client().await?;
        manifests::install_crds(&client, release.definitions(&server)?).await?;
        let certificates = certificates(plane, &pki, release.name)?;
        let mut command = Command::new(release.program.path()?);
        command
            .env("KUBECONFIG", plane.kubeconfig())
            .env("POD_NAMESPACE", "default")
            .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
            .args([
                format!("--webhook-port={webhook}"),
                format!("--health-addr=127.0.0.1:{health}"),
            ])
            .arg(format!("--webhook-cert-dir={}", certificates.display()))
            .args(["--diagnostics-address=127.0.0.1:0", "--insecure-diagnostics"])
            .args(release.flags)
            .args(args);
        let lifeline = Lifeline::own()?;
        let mut process = lifeline.start(plane.dir(), release.name, command)?;
        clusterapi::wait_healthy(&mut process, health).await?;
        let mut admission = manifests::read_dir(&release.webhooks.path()?)?;
        for configuration in &mut admission {
            server.admit(configuration)?;
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

/// Makes a serving certificate under the names that controller-runtime reads.
fn certificates(plane: &ControlPlane, pki: &Pki, name: &str) -> Result<PathBuf> {
    pki.serving(name)?;
    let dir = plane.dir().join(format!("{name}-webhook"));
    for (made, read) in [("crt", "tls.crt"), ("key", "tls.key")] {
        let text = std::fs::read_to_string(pki.file(&format!("{name}.{made}")))?;
        files::write_private(&dir.join(read), text)?;
    }
    Ok(dir)
}
