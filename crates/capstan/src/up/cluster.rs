//! The cluster that `capstan up` works on: a local one from real parts, or one that is there already.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use capstan_testkit::{ControlPlane, Options, manifests, parts};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::Api;
use kube::{Client, Config};

use super::Up;
use super::standin::Part;
use crate::controllers::Name;
use crate::run::cluster;

/// The rights that all controllers need, and the Secret of the webhooks.
const BASE: [&str; 3] = [
    include_str!("../../../../deploy/base/namespace.yaml"),
    include_str!("../../../../deploy/base/rbac.yaml"),
    include_str!("../../../../deploy/base/webhook.yaml"),
];

/// Returns the rights of one controller: those that an installation gives it.
fn rights(name: Name) -> &'static str {
    match name {
        Name::Openshift => include_str!("../../../../deploy/controllers/openshift/rbac.yaml"),
        Name::AzurePools => include_str!("../../../../deploy/controllers/azure-pools/rbac.yaml"),
        Name::Vsphere => include_str!("../../../../deploy/controllers/vsphere/rbac.yaml"),
    }
}

/// kube-apiserver records the user and the object of each request, without the content.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
";
const ACCOUNT_NAMESPACE: &str = "capstan-system";
const ACCOUNT: &str = "system:serviceaccount:capstan-system:capstan";
const GROUPS: [&str; 3] = [
    "system:serviceaccounts",
    "system:serviceaccounts:capstan-system",
    "system:authenticated",
];

/// The cluster that the controllers work on.
pub struct Cluster {
    pub kubeconfig: PathBuf,
    /// The access of the controllers.
    pub config: Config,
    /// The access of an administrator.
    pub admin: Config,
    pub client: Client,
    /// A local control plane ends with this value.
    plane: Option<ControlPlane>,
}

impl Cluster {
    pub async fn open(args: &Up, controllers: &[Name], dir: &Path) -> Result<Self> {
        match &args.kubeconfig {
            Some(file) => Self::existing(file).await,
            None => Self::local(args, controllers, dir).await,
        }
    }

    async fn existing(file: &Path) -> Result<Self> {
        let config = cluster(Some(file), None).await?;
        let client = Client::try_from(config.clone())?;
        let answer = client.apiserver_version().await;
        answer.with_context(|| format!("the cluster of {} does not answer", file.display()))?;
        Ok(Self {
            kubeconfig: file.canonicalize()?,
            admin: config.clone(),
            config,
            client,
            plane: None,
        })
    }

    async fn local(args: &Up, controllers: &[Name], dir: &Path) -> Result<Self> {
        let options = Options {
            dir: Some(dir.to_owned()),
            capi_core: args.cluster_api,
            apiserver_flags: if args.audit { audit_flags(dir)? } else { Vec::new() },
            ..Options::default()
        };
        let plane = ControlPlane::start(options).await?;
        let (admin, client) = (plane.config().await?, plane.client().await?);
        for text in BASE.into_iter().chain(controllers.iter().copied().map(rights)) {
            let objects = manifests::parse(text).context("cannot read deploy/")?;
            manifests::apply(&client, ACCOUNT_NAMESPACE, &objects)
                .await
                .context("cannot apply deploy/")?;
        }
        // The controllers have the rights that deploy/ gives them, so a missing right shows here first.
        let mut config = admin.clone();
        config.auth_info.impersonate = Some(ACCOUNT.to_owned());
        config.auth_info.impersonate_groups = Some(GROUPS.map(str::to_owned).to_vec());
        Ok(Self {
            kubeconfig: plane.kubeconfig().to_owned(),
            config,
            admin,
            client,
            plane: Some(plane),
        })
    }

    /// Whether the control plane runs on this machine for this command alone.
    pub fn is_local(&self) -> bool {
        self.plane.is_some()
    }

    /// Installs the missing definitions. Returns the component that a stand-in must replace.
    pub async fn install_definitions(&self, args: &Up, controllers: &[Name]) -> Result<Option<Part>> {
        let mut objects = Vec::new();
        for crd in capstan_api::crds() {
            objects.extend(manifests::parse(&capstan_api::manifest(&crd)?)?);
        }
        manifests::install_crds(&self.client, objects).await?;
        let (policy, binding) = capstan_api::template_policy();
        let mut policies = manifests::parse(&capstan_api::manifest(&policy)?)?;
        policies.extend(manifests::parse(&capstan_api::manifest(&binding)?)?);
        manifests::apply(&self.client, ACCOUNT_NAMESPACE, &policies).await?;
        if controllers.iter().all(|name| *name == Name::Openshift) {
            return Ok(None);
        }
        if args.cluster_api {
            return Ok(Some(Part::ControlPlane));
        }
        // An existing cluster that has Cluster API has a manager of its own for it.
        let crds: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        let there = crds.get_opt("clusters.cluster.x-k8s.io").await?;
        if there.as_ref().is_some_and(|crd| !is_ours(crd)) {
            return Ok(Some(Part::ControlPlane));
        }
        if there.is_none() {
            let dir = tokio::task::spawn_blocking(|| parts::CLUSTER_API_CRDS.path()).await??;
            manifests::install_crds(&self.client, manifests::read_dir(&dir)?).await?;
        }
        Ok(Some(Part::Core))
    }
}

/// Returns the flags with which kube-apiserver writes `audit.log`. It checks owner references too, as OpenShift does.
fn audit_flags(dir: &Path) -> Result<Vec<String>> {
    let policy = dir.join("audit-policy.yaml");
    std::fs::write(&policy, AUDIT_POLICY).with_context(|| format!("cannot write {}", policy.display()))?;
    Ok(vec![
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", dir.join("audit.log").display()),
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement".to_owned(),
    ])
}

/// Whether an earlier `capstan up` installed it, so that no other controller manages its kind.
fn is_ours(crd: &CustomResourceDefinition) -> bool {
    let writers = crd.metadata.managed_fields.iter().flatten();
    writers
        .into_iter()
        .any(|entry| entry.manager.as_deref() == Some(manifests::FIELD_MANAGER))
}
