//! The facts about a pod that a drain depends on. The pod itself does not show whether its DaemonSet still exists: that is
//! read, and kept for a while, so that a node's pods cost at most one read per DaemonSet.

use std::time::Duration;

use capstan_core::clock::Clock;
use capstan_core::drain;
use capstan_core::memo::Memo;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::api::Api;

use super::pod::{DRAIN_LABEL, MIRROR, Pod};
use crate::error::{Error, code};
use crate::objects;

/// An answer about a DaemonSet is used for this long.
const REMEMBER: Duration = Duration::from_secs(60);
/// More than any cluster has.
const DAEMON_SETS: usize = 1000;

pub(super) struct Owners {
    client: kube::Client,
    /// Whether the DaemonSet with this UID exists.
    known: Memo<String, bool>,
}

impl Owners {
    pub(super) fn new(client: kube::Client, clock: Clock) -> Self {
        Self {
            client,
            known: Memo::new(clock, DAEMON_SETS),
        }
    }

    pub(super) async fn describe(&self, pod: &Pod) -> Result<drain::Pod, Error> {
        Ok(drain::Pod {
            namespace: objects::namespace(pod)?,
            name: pod.name_any(),
            uid: objects::uid(pod)?,
            mirror: pod.annotations().contains_key(MIRROR),
            finished: pod.is_finished(),
            owner: self.owner(pod).await?,
            deleted_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
            empty_dir: pod.has_empty_dir(),
            label: pod
                .labels()
                .get(DRAIN_LABEL)
                .map_or(drain::Label::None, |value| drain::Label::read(value)),
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
        let exists = self.exists(&objects::namespace(pod)?, owner).await?;
        Ok(if exists {
            drain::Owner::DaemonSet
        } else {
            drain::Owner::GoneDaemonSet
        })
    }

    async fn exists(&self, namespace: &str, owner: &OwnerReference) -> Result<bool, Error> {
        let ask = async {
            let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), namespace);
            match api.get_metadata(&owner.name).await {
                Ok(found) => Ok(found.metadata.uid.as_deref() == Some(&owner.uid)),
                Err(error) if code(&error) == Some(404) => Ok(false),
                Err(error) if code(&error) == Some(403) => Ok(true),
                Err(error) => Err(error.into()),
            }
        };
        self.known.get(&owner.uid, REMEMBER, ask).await
    }
}
