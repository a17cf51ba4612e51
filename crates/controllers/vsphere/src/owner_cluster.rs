//! From a machine to the cluster that it belongs to.

use std::sync::Arc;

use capstan_api::capi::{CLUSTER_NAME_LABEL, DELETE_FOR_MOVE_ANNOTATION, PAUSED_ANNOTATION};
use capstan_api::vsphere::VSphereCluster;
use capstan_kube::capi::Cluster;
use capstan_kube::{Cache, Context};
use kube::{Resource, ResourceExt};

use crate::error::Error;

/// The clusters that are known.
#[derive(Clone)]
pub struct Clusters {
    pub clusters: Cache<Cluster>,
    pub infrastructure: Cache<VSphereCluster>,
}

impl Clusters {
    pub fn new(context: &Context) -> Self {
        Self {
            clusters: context.cache(),
            infrastructure: context.cache(),
        }
    }

    pub async fn ready(&self) -> Result<(), Error> {
        self.clusters.ready().await?;
        Ok(self.infrastructure.ready().await?)
    }

    /// The Cluster that an object's label names.
    pub fn of(&self, object: &impl Resource<DynamicType = ()>) -> Result<Arc<Cluster>, Error> {
        let name = cluster_name(object)
            .ok_or_else(|| Error::NotReady(format!("{:?} has no label {CLUSTER_NAME_LABEL}", object.name_any())))?;
        let namespace = object.namespace();
        self.clusters
            .get(namespace.as_deref(), &name)
            .ok_or_else(|| Error::NotReady(format!("Cluster {name:?} does not exist")))
    }

    /// The vSphere side of a Cluster.
    pub fn infrastructure_of(&self, cluster: &Cluster) -> Result<Arc<VSphereCluster>, Error> {
        let reference = cluster.spec.infrastructure_ref.as_ref();
        let name = reference
            .filter(|r| r.kind == VSphereCluster::KIND)
            .map(|r| r.name.as_str())
            .ok_or_else(|| {
                Error::NotReady(format!(
                    "Cluster {:?} has no VSphereCluster as infrastructureRef",
                    cluster.name_any()
                ))
            })?;
        self.infrastructure
            .get(cluster.namespace().as_deref(), name)
            .ok_or_else(|| Error::NotReady(format!("VSphereCluster {name:?} does not exist")))
    }

    /// The vSphere side of the Cluster that an object's label names, if both are known.
    pub fn infrastructure_behind(&self, object: &impl Resource<DynamicType = ()>) -> Option<Arc<VSphereCluster>> {
        self.infrastructure_of(self.of(object).ok()?.as_ref()).ok()
    }
}

/// Returns why an object is to be left alone, in the words of Cluster API. One whose cluster is not known is not paused by it.
pub fn paused<K: Resource<DynamicType = ()>>(object: &K, cluster: Option<&Cluster>) -> Option<String> {
    let mut reasons = Vec::new();
    if cluster.is_some_and(|cluster| cluster.is_paused()) {
        reasons.push("Cluster spec.paused is set to true".to_owned());
    }
    for annotation in [PAUSED_ANNOTATION, DELETE_FOR_MOVE_ANNOTATION] {
        if object.annotations().contains_key(annotation) {
            reasons.push(format!("{} has the {annotation} annotation", K::kind(&())));
        }
    }
    (!reasons.is_empty()).then(|| reasons.join(", "))
}

pub fn cluster_name(object: &impl Resource<DynamicType = ()>) -> Option<String> {
    object.labels().get(CLUSTER_NAME_LABEL).cloned()
}
