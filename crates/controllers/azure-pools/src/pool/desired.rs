//! What the pool should be: its bootstrap data and its model, read from the objects that it belongs to.

use std::time::Duration;

use capstan_core::pool::Setup;
use capstan_core::validate::{azure_cluster, azure_pool};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;

use super::orphan::OLD_FINALIZER;
use super::{Actor, FINALIZER};
use crate::error::Error;
use crate::model::{self, Model};

/// The public SSH key that Capstan generated for a pool whose spec has none.
pub(super) const SSH_KEY_ANNOTATION: &str = "azuremachinepool.infrastructure.cluster.x-k8s.io/sshPublicKey";
/// Bootstrap data is read again when it is older than this.
pub(super) const BOOTSTRAP_AGE: Duration = Duration::from_secs(30);

/// What the spec asks for.
pub(super) enum Intent {
    /// The pool is deleted.
    Teardown,
    /// The pool's object lacks something.
    Setup(Setup),
    /// Others have to bring something first: the reason and the message of the condition.
    WaitingFor(&'static str, &'static str),
    Model(Box<Model>),
}

impl Actor<'_> {
    /// Reads what the spec asks for. An error says why that is not known.
    pub(super) async fn intent(&mut self) -> Result<Intent, Error> {
        if self.scope.is_deleting() {
            return Ok(Intent::Teardown);
        }
        let pool = self.pool();
        let has = |name: &str| pool.finalizers().iter().any(|finalizer| finalizer == name);
        if !has(FINALIZER) || has(OLD_FINALIZER) {
            return Ok(Intent::Setup(Setup::Finalizer));
        }
        let findings = azure_pool::validate(pool);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let cluster = &self.owners.azure_cluster;
        let findings = azure_cluster::validate(&cluster.spec);
        if !findings.is_ok() {
            let (name, message) = (cluster.name_any(), findings.message());
            return Err(Error::Invalid(format!("AzureCluster {name}: {message}")));
        }
        if let Some(zone) = &cluster.spec.extended_location {
            let (name, zone) = (cluster.name_any(), &zone.name);
            return Err(Error::Invalid(format!(
                "AzureCluster {name}: spec.extendedLocation: Invalid value: {zone:?}: Capstan makes no scale sets in edge zones; \
                 one that exists keeps its place, and is still scaled"
            )));
        }
        let template = &pool.spec.template;
        let windows = template.os_disk.os_type.as_deref() == Some("Windows");
        if !windows && template.ssh_public_key.as_deref().is_none_or(str::is_empty) {
            return Ok(Intent::Setup(Setup::SshKey));
        }
        let ready = cluster.status.as_ref().is_some_and(|status| status.ready);
        if !self.owners.cluster.infrastructure_provisioned() && !ready {
            return Ok(Intent::WaitingFor(
                "WaitingForClusterInfrastructure",
                "the cluster's infrastructure is not ready yet",
            ));
        }
        let Some(bootstrap) = self.bootstrap(BOOTSTRAP_AGE).await? else {
            return Ok(Intent::WaitingFor(
                "WaitingForBootstrapData",
                "the MachinePool has no bootstrap data yet",
            ));
        };
        Ok(Intent::Model(Box::new(self.model(&bootstrap).await?)))
    }

    /// Returns the bootstrap data, no older than `age`; nothing while there is none.
    pub(super) async fn bootstrap(&mut self, age: Duration) -> Result<Option<Vec<u8>>, Error> {
        let bootstrap = &self.owners.machine_pool.spec.template.spec.bootstrap;
        let Some(name) = bootstrap.data_secret_name.clone().filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        if let Some((read, data, at)) = &self.state.bootstrap
            && *read == name
            && self.since(*at) < age
        {
            return Ok(Some(data.clone()));
        }
        let namespace = &self.scope.key.namespace;
        let missing = |what: &str| Error::NotReady(format!("bootstrap secret {namespace}/{name} {what}"));
        let secret = self.scope.api_of::<Secret>().get_opt(&name).await?;
        let secret = secret.ok_or_else(|| missing("does not exist"))?;
        let value = secret.data.unwrap_or_default().remove("value");
        let data = value.ok_or_else(|| missing("has no key value"))?.0;
        self.state.bootstrap = Some((name, data.clone(), self.now()));
        Ok(Some(data))
    }

    /// Returns the scale set that is wanted, after a check of what only Azure's catalogue knows.
    pub(super) async fn model(&mut self, bootstrap: &[u8]) -> Result<Model, Error> {
        let subscription = self
            .controller
            .options
            .sign_in
            .subscription(&self.owners.azure_cluster)?;
        let client = self.client().await?;
        let spec = &self.pool().spec;
        let size = match client.size(&spec.location, &spec.template.vm_size).await {
            Ok(size) => size,
            // Only the check for Ultra needs the catalogue; without it Azure itself will judge.
            Err(error) if azure_pool::ultra_enabled(&spec.template) != Some(true) => {
                tracing::debug!(%error, "the catalogue of sizes cannot be read");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let cluster_name = self.owners.cluster.name_any();
        let input = model::Input {
            pool: self.pool(),
            machine_pool: &self.owners.machine_pool,
            cluster_name: &cluster_name,
            azure_cluster: &self.owners.azure_cluster,
            subscription: &subscription,
            bootstrap,
            accelerated_networking: size.as_ref().is_some_and(|size| size.accelerated_networking),
        };
        if let Some(size) = &size {
            model::check_size(&input, size)?;
        }
        model::build(&input)
    }

    /// Returns how many machines there should be: as the MachinePool says, or as whoever manages its replicas has set.
    pub(super) fn desired(&self) -> usize {
        let machine_pool = &self.owners.machine_pool;
        let external = self
            .state
            .external
            .filter(|_| machine_pool.replicas_managed_externally());
        external.unwrap_or_else(|| usize::try_from(machine_pool.replicas()).unwrap_or_default())
    }
}
