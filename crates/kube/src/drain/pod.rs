//! A pod as a drain reads it. Invariant: nothing else of a pod is read into memory, because the cluster may be hostile: a
//! container of two bytes is a struct of two thousand in the type of the whole pod.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Deserialize;

use crate::cache::name_bytes;

/// The kubelet marks its shadows of static pods with this annotation.
pub(super) const MIRROR: &str = "kubernetes.io/config.mirror";
/// Cluster API's label for pods that a drain leaves alone or waits for.
pub(super) const DRAIN_LABEL: &str = "cluster.x-k8s.io/drain";

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Pod {
    #[serde(default)]
    pub metadata: ObjectMeta,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Clone, Debug, Deserialize)]
struct Spec {
    volumes: Option<Vec<Volume>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Volume {
    empty_dir: Option<EmptyDir>,
}

#[derive(Clone, Debug, Deserialize)]
struct EmptyDir {}

#[derive(Clone, Debug, Deserialize)]
struct Status {
    phase: Option<String>,
}

impl Resource for Pod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        v1::Pod::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        v1::Pod::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        v1::Pod::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        v1::Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Pod {
    /// Whether all of its containers have ended for good.
    pub(super) fn is_finished(&self) -> bool {
        let phase = self.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }

    pub(super) fn has_empty_dir(&self) -> bool {
        let mut volumes = self.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        volumes.any(|volume| volume.empty_dir.is_some())
    }

    /// Keeps what [`super::owners::Owners::describe`] reads: a mark, a label, the controller, and whether there is an emptyDir.
    pub(super) fn trim(&mut self) {
        let meta = std::mem::take(&mut self.metadata);
        let only = |map: Option<BTreeMap<String, String>>, key: &str| {
            map.and_then(|mut map| map.remove_entry(key))
                .map(|entry| BTreeMap::from([entry]))
        };
        let controller = meta
            .owner_references
            .into_iter()
            .flatten()
            .find(|owner| owner.controller == Some(true));
        self.metadata = ObjectMeta {
            name: meta.name,
            namespace: meta.namespace,
            uid: meta.uid,
            resource_version: meta.resource_version,
            deletion_timestamp: meta.deletion_timestamp,
            annotations: only(meta.annotations, MIRROR),
            labels: only(meta.labels, DRAIN_LABEL),
            owner_references: controller.map(|owner| vec![owner]),
            ..ObjectMeta::default()
        };
        let empty_dir = self.has_empty_dir().then_some(Volume {
            empty_dir: Some(EmptyDir {}),
        });
        self.spec = empty_dir.map(|volume| Spec {
            volumes: Some(vec![volume]),
        });
    }

    /// Returns how many bytes of text it has, once it is trimmed.
    pub(super) fn bytes(&self) -> usize {
        let texts = |map: &Option<BTreeMap<String, String>>| {
            let texts = map.iter().flatten();
            texts.map(|(key, value)| key.len() + value.len()).sum::<usize>()
        };
        let meta = &self.metadata;
        let owners = meta.owner_references.iter().flatten().map(|owner| {
            let texts = [&owner.api_version, &owner.kind, &owner.name, &owner.uid];
            texts.into_iter().map(String::len).sum::<usize>()
        });
        let phase = self.status.iter().filter_map(|status| status.phase.as_ref());
        name_bytes(meta)
            + texts(&meta.annotations)
            + texts(&meta.labels)
            + owners.sum::<usize>()
            + phase.map(String::len).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_is_read_as_the_api_server_sends_it_and_costs_a_few_bytes_for_each_foreign_object() {
        let mut pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "a", "namespace": "ns", "uid": "u", "annotations": {MIRROR: "x", "other": "y"}},
            "spec": {"containers": [{"name": "c"}], "volumes": [{"name": "s", "secret": {}}, {"name": "e", "emptyDir": {"medium": "Memory"}}]},
            "status": {"phase": "Failed", "conditions": [{"type": "Ready"}]},
        }))
        .unwrap();
        assert!(pod.is_finished() && pod.has_empty_dir());
        pod.trim();
        assert!(pod.is_finished() && pod.has_empty_dir());
        assert_eq!(pod.metadata.annotations.as_ref().map(BTreeMap::len), Some(1));
        assert_eq!(
            pod.bytes(),
            "a".len() + "ns".len() + "u".len() + MIRROR.len() + "x".len() + "Failed".len()
        );
        let mut bare: Pod = serde_json::from_value(json!({"spec": {"volumes": null}, "status": {}})).unwrap();
        bare.trim();
        assert!(!bare.is_finished() && !bare.has_empty_dir());
        assert!(size_of::<Volume>() <= 8);
    }
}
