//! What a drain needs to know of a pod, with the one question that the pod itself cannot answer: does its DaemonSet
//! still exist? Answers are remembered for a while, so that a node's pods cost a read per DaemonSet at most.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use capstan_core::drain;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::api::Api;

use crate::error::{Error, code};

/// A DaemonSet seen this long ago is taken to exist still.
const REMEMBER: Duration = Duration::from_secs(60);
/// The kubelet marks its shadows of static pods with this annotation.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Cluster API's label for pods that a drain leaves alone.
const DRAIN_LABEL: &str = "cluster.x-k8s.io/drain";

pub(crate) struct Owners {
    client: kube::Client,
    known: Mutex<HashMap<String, (bool, Instant)>>,
}

impl Owners {
    pub(crate) fn new(client: kube::Client) -> Self {
        Self {
            client,
            known: Mutex::default(),
        }
    }

    pub(crate) async fn describe(&self, pod: &Pod) -> Result<drain::Pod, Error> {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref())
            .unwrap_or_default();
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        Ok(drain::Pod {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
            mirror: pod.annotations().contains_key(MIRROR),
            finished: matches!(phase, "Succeeded" | "Failed"),
            owner: self.owner(pod).await?,
            deleted_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
            empty_dir: volumes.into_iter().any(|volume| volume.empty_dir.is_some()),
            skip: pod
                .labels()
                .get(DRAIN_LABEL)
                .is_some_and(|value| value.eq_ignore_ascii_case("skip")),
        })
    }

    async fn owner(&self, pod: &Pod) -> Result<drain::Owner, Error> {
        let Some(owner) = pod
            .owner_references()
            .iter()
            .find(|owner| owner.controller == Some(true))
        else {
            return Ok(drain::Owner::Nobody);
        };
        if owner.kind != "DaemonSet" || !owner.api_version.starts_with("apps/") {
            return Ok(drain::Owner::Other);
        }
        let exists = self.exists(&pod.namespace().unwrap_or_default(), owner).await?;
        Ok(if exists {
            drain::Owner::DaemonSet
        } else {
            drain::Owner::GoneDaemonSet
        })
    }

    async fn exists(&self, namespace: &str, owner: &OwnerReference) -> Result<bool, Error> {
        if let Some((exists, at)) = self.known().get(&owner.uid).copied()
            && at.elapsed() < REMEMBER
        {
            return Ok(exists);
        }
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), namespace);
        let exists = match api.get_metadata(&owner.name).await {
            Ok(found) => found.metadata.uid.as_deref() == Some(&owner.uid),
            Err(error) if code(&error) == Some(404) => false,
            Err(error) if code(&error) == Some(403) => true,
            Err(error) => return Err(error.into()),
        };
        let mut known = self.known();
        known.retain(|_, (_, at)| at.elapsed() < REMEMBER);
        known.insert(owner.uid.clone(), (exists, Instant::now()));
        Ok(exists)
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, (bool, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
