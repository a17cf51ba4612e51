//! A peer as its own manifests install it: a Deployment, a Service in front of its webhooks, its definitions and its admission.
//! No kubelet runs the pods of the Deployment: the manager is a process beside the control plane, with the arguments that the
//! Deployment gives it.
//!
//! Invariant: after [`Installation::follow`] the process runs if and only if the Deployment wants a pod.

use std::path::PathBuf;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{Api, DynamicObject};
use kube::{Client, ResourceExt};
use serde_json::json;

use super::{Ports, Release, certificates, retain};
use crate::clusterapi::{Server, wait_healthy};
use crate::controlplane::{ControlPlane, free_ports};
use crate::manifests;
use crate::pki::Pki;
use crate::process::{Lifeline, Process};

/// An installed release.
pub struct Installation {
    release: &'static Release,
    namespace: String,
    client: Client,
    server: Server,
    ports: Ports,
    dir: PathBuf,
    kubeconfig: PathBuf,
    certificates: PathBuf,
    variables: Vec<(String, String)>,
    lifeline: Lifeline,
    /// The manager, and the arguments of its pod.
    running: Option<(Process, Vec<String>)>,
}

impl Installation {
    /// Installs a release whose Deployment has these arguments, and starts it. `admits` chooses its webhooks, as for
    /// [`super::Peer::start`].
    pub async fn start(
        plane: &ControlPlane,
        release: &'static Release,
        args: &[&str],
        variables: &[(&str, String)],
        admits: fn(&str) -> bool,
    ) -> Result<Self> {
        release.build().await?;
        let namespace = format!("{}-system", release.prefix);
        let service = format!("{}-webhook-service", release.prefix);
        let [webhook, health] = free_ports()?;
        let pki = Pki::open(&plane.dir().join("pki"))?;
        let host = format!("{service}.{namespace}.svc");
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()));
        let mut installation = Self {
            release,
            client: plane.client().await?,
            server: Server::new(webhook, &pki).behind(&namespace, &service),
            ports: Ports { webhook, health },
            dir: plane.dir().to_owned(),
            kubeconfig: plane.kubeconfig().to_owned(),
            certificates: certificates(plane.dir(), &pki, release.name, &[host])?,
            variables: variables.collect(),
            lifeline: Lifeline::own()?,
            running: None,
            namespace,
        };
        installation.deploy(&service, args).await?;
        installation.install_definitions().await?;
        installation.follow().await?;
        installation.register(admits).await?;
        Ok(installation)
    }

    fn deployment(&self) -> String {
        format!("{}-controller-manager", self.release.prefix)
    }

    async fn deploy(&self, service: &str, args: &[&str]) -> Result<()> {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}});
        let meta = |name: &str| json!({"name": name, "namespace": self.namespace});
        let labels = json!({"control-plane": self.deployment()});
        let objects = [
            namespace,
            // No proxy routes a cluster IP to this machine.
            json!({"apiVersion": "v1", "kind": "Service", "metadata": meta(service),
                "spec": {"type": "ExternalName", "externalName": "localhost"}}),
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta(&self.deployment()), "spec": {
                "replicas": 1, "selector": {"matchLabels": labels},
                // A pod that nobody runs never becomes ready, and a rolling update would wait for it.
                "strategy": {"type": "Recreate"},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [
                    {"name": "manager", "image": format!("localhost/{}", self.release.name), "args": args}]}}}}),
        ];
        let objects: Vec<DynamicObject> = objects
            .into_iter()
            .map(serde_json::from_value)
            .collect::<Result<_, _>>()?;
        manifests::apply(&self.client, &self.namespace, &objects).await
    }

    /// Installs its definitions over those that are there.
    pub async fn install_definitions(&self) -> Result<()> {
        let mut definitions = self.release.definitions(&self.server)?;
        let certificate = format!("{}/{}-serving-cert", self.namespace, self.release.prefix);
        for definition in definitions
            .iter_mut()
            .filter(|crd| crd.data["spec"]["conversion"].is_object())
        {
            let annotations = definition.annotations_mut();
            annotations.insert("cert-manager.io/inject-ca-from".to_owned(), certificate.clone());
        }
        manifests::install_crds(&self.client, definitions).await
    }

    async fn register(&self, admits: fn(&str) -> bool) -> Result<()> {
        let mut admission = manifests::read_dir(&self.release.webhooks.path()?)?;
        for configuration in &mut admission {
            self.server.admit(configuration)?;
            retain(configuration, admits);
            configuration.metadata.name = Some(format!("{}-{}", self.release.prefix, configuration.name_any()));
        }
        manifests::apply(&self.client, "default", &admission).await
    }

    /// Starts, restarts or ends the manager as its Deployment asks now.
    pub async fn follow(&mut self) -> Result<()> {
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = api.get(&self.deployment()).await?;
        let spec = found.spec.context("a Deployment without a spec")?;
        let pod = spec.template.spec.context("a Deployment without a pod")?;
        let args = pod.containers.into_iter().find_map(|container| container.args);
        let args = args.unwrap_or_default();
        let wanted = spec.replicas.unwrap_or(1) > 0;
        if self.running.as_ref().is_some_and(|(_, with)| wanted && *with == args) {
            return Ok(());
        }
        if let Some((mut process, _)) = self.running.take() {
            process.kill();
        }
        if !wanted {
            return Ok(());
        }
        let mut command = self.release.command(&self.kubeconfig, &self.certificates, self.ports)?;
        command
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .args(&args);
        let mut process = self.lifeline.start(&self.dir, self.release.name, command)?;
        wait_healthy(&mut process, self.ports.health).await?;
        self.running = Some((process, args));
        Ok(())
    }
}
