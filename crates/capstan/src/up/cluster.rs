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

/// What the controllers of a local cluster may do: the same as in a real one.
const RBAC: [&str; 2] = [
    include_str!("../../../../deploy/namespace.yaml"),
    include_str!("../../../../deploy/rbac.yaml"),
];
const ACCOUNT_NAMESPACE: &str = "capstan-system";
const ACCOUNT: &str = "system:serviceaccount:capstan-system:capstan";
const GROUPS: [&str; 3] = [
    "system:serviceaccounts",
    "system:serviceaccounts:capstan-system",
    "system:authenticated",
];

/// The cluster that is worked on.
pub struct Cluster {
    pub kubeconfig: PathBuf,
    /// The controllers' access.
    pub config: Config,
    pub client: Client,
    /// Ours, unless an existing one is used; ends with this value.
    _plane: Option<ControlPlane>,
}

impl Cluster {
    pub async fn open(args: &Up, dir: &Path) -> Result<Self> {
        match &args.kubeconfig {
            Some(file) => Self::existing(file).await,
            None => Self::local(args, dir).await,
        }
    }

    async fn existing(file: &Path) -> Result<Self> {
        let config = cluster(Some(file), None).await?;
        let client = Client::try_from(config.clone())?;
        let answer = client.apiserver_version().await;
        answer.with_context(|| format!("the cluster of {} does not answer", file.display()))?;
        Ok(Self {
            kubeconfig: file.canonicalize()?,
            config,
            client,
            _plane: None,
        })
    }

    async fn local(args: &Up, dir: &Path) -> Result<Self> {
        let options = Options {
            dir: Some(dir.to_owned()),
            capi_core: args.cluster_api,
            ..Options::default()
        };
        let plane = ControlPlane::start(options).await?;
        let (mut config, client) = (plane.config().await?, plane.client().await?);
        for text in RBAC {
            let objects = manifests::parse(text).context("cannot read deploy/")?;
            manifests::apply(&client, ACCOUNT_NAMESPACE, &objects)
                .await
                .context("cannot apply deploy/")?;
        }
        // A permission that is missing in deploy/ shows here and not only in production.
        config.auth_info.impersonate = Some(ACCOUNT.to_owned());
        config.auth_info.impersonate_groups = Some(GROUPS.map(str::to_owned).to_vec());
        Ok(Self {
            kubeconfig: plane.kubeconfig().to_owned(),
            config,
            client,
            _plane: Some(plane),
        })
    }

    /// Installs what is missing, and answers whose part has to be played beside the controllers.
    pub async fn install_definitions(&self, args: &Up, controllers: &[Name]) -> Result<Option<Part>> {
        let mut objects = Vec::new();
        for crd in capstan_api::crds() {
            objects.extend(manifests::parse(&capstan_api::manifest(&crd)?)?);
        }
        manifests::install_crds(&self.client, objects).await?;
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

/// Whether an earlier `capstan up` installed it, so that nobody else looks after its kind.
fn is_ours(crd: &CustomResourceDefinition) -> bool {
    let writers = crd.metadata.managed_fields.iter().flatten();
    writers
        .into_iter()
        .any(|entry| entry.manager.as_deref() == Some(manifests::FIELD_MANAGER))
}
