//! The part of `cluster.x-k8s.io` that Capstan reads: Cluster, Machine, MachinePool and MachineDrainRule.
//!
//! Invariant: v1beta1 and v1beta2 read into the same structs. Where the versions spell a fact differently both
//! spellings are kept, and a method gives the one answer. Capstan never writes whole objects of these kinds.

use crate::duration::{Duration, lenient};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube_core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, time};

pub const GROUP: &str = "cluster.x-k8s.io";
/// Label with the name of the cluster that an object belongs to.
pub const CLUSTER_NAME_LABEL: &str = "cluster.x-k8s.io/cluster-name";
/// An instance of a provider with `--watch-filter` reconciles only objects whose label has that value.
pub const WATCH_FILTER_LABEL: &str = "cluster.x-k8s.io/watch-filter";
/// Controllers do not reconcile an object with this annotation.
pub const PAUSED_ANNOTATION: &str = "cluster.x-k8s.io/paused";
/// `clusterctl move` sets it on objects that it has moved before it deletes them. Capstan keeps their resources in the cloud.
pub const DELETE_FOR_MOVE_ANNOTATION: &str = "clusterctl.cluster.x-k8s.io/delete-for-move";
/// Core drains a Machine's node only when no annotation with this prefix is left. The owner of the hook removes it.
pub const PRE_DRAIN_HOOK_PREFIX: &str = "pre-drain.delete.hook.machine.cluster.x-k8s.io";
/// Core does not drain the node of a Machine with this annotation.
pub const EXCLUDE_DRAIN_ANNOTATION: &str = "machine.cluster.x-k8s.io/exclude-node-draining";
/// A machine with this annotation is deleted first.
pub const DELETE_MACHINE_ANNOTATION: &str = "cluster.x-k8s.io/delete-machine";
/// A MachinePool with this annotation gets its replicas from its infrastructure provider or an autoscaler.
pub const REPLICAS_MANAGED_BY_ANNOTATION: &str = "cluster.x-k8s.io/replicas-managed-by";

/// The version of Cluster API that the management cluster serves.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Version {
    V1Beta1,
    #[default]
    V1Beta2,
}

impl Version {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V1Beta1 => "v1beta1",
            Self::V1Beta2 => "v1beta2",
        }
    }
}

/// A reference to an object of another provider, in either version's form.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reference {
    /// The API group, without a version (v1beta2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_group: Option<String>,
    /// The API group and version (v1beta1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// Kind of the referenced object.
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

impl Reference {
    /// Returns the API group, from the field of either version.
    pub fn group(&self) -> &str {
        match (&self.api_group, &self.api_version) {
            (Some(group), _) => group,
            (None, Some(version)) => version.split_once('/').map_or("", |(group, _)| group),
            (None, None) => "",
        }
    }

    /// Whether the reference names an object of that group and kind.
    pub fn is(&self, group: &str, kind: &str) -> bool {
        self.kind == kind && self.group() == group
    }
}

/// The parts of an object that were initialized once (v1beta2).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Initialization {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infrastructure_provisioned: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane_initialized: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_data_secret_created: Option<bool>,
}

/// A condition of either version. `severity` exists in v1beta1 only, `observedGeneration` in v1beta2 only.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CoreCondition {
    #[serde(rename = "type", default)]
    pub type_: String,
    #[serde(default)]
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The fields of a Cluster's spec that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infrastructure_ref: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane_ref: Option<Reference>,
    #[serde(default, skip_serializing_if = "crate::common::is_default")]
    pub control_plane_endpoint: crate::ApiEndpoint,
}

/// The fields of a Cluster's status that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// Set in v1beta1 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub infrastructure_ready: Option<bool>,
    /// Set in v1beta1 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane_ready: Option<bool>,
    /// Set in v1beta2 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initialization: Option<Initialization>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<CoreCondition>,
}

/// The source of a machine's bootstrap data.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Bootstrap {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_ref: Option<Reference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_secret_name: Option<String>,
}

/// Timeouts of a machine's deletion (v1beta2).
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineDeletion {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_drain_timeout_seconds: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_volume_detach_timeout_seconds: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_deletion_timeout_seconds: Option<i32>,
}

/// The fields of a Machine's spec that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSpec {
    #[serde(default)]
    pub cluster_name: String,
    #[serde(default)]
    pub bootstrap: Bootstrap,
    #[serde(default)]
    pub infrastructure_ref: Reference,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(rename = "providerID", skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// Set in v1beta1 only.
    #[serde(default, deserialize_with = "lenient", skip_serializing_if = "Option::is_none")]
    pub node_drain_timeout: Option<Duration>,
    /// Set in v1beta2 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion: Option<MachineDeletion>,
}

impl MachineSpec {
    /// Returns the drain timeout. `None` is no limit; 0 means no limit, too.
    pub fn drain_timeout(&self) -> Option<time::Duration> {
        let seconds = self
            .deletion
            .as_ref()
            .and_then(|deletion| deletion.node_drain_timeout_seconds);
        let timeout = match (seconds, self.node_drain_timeout) {
            (Some(seconds), _) => time::Duration::from_secs(u64::try_from(seconds).unwrap_or_default()),
            (None, Some(timeout)) if !timeout.is_negative() => timeout.into(),
            (None, _) => return None,
        };
        (!timeout.is_zero()).then_some(timeout)
    }
}

/// The Node of a machine.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReference {
    #[serde(default)]
    pub name: String,
}

/// The fields of a Machine's status that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ref: Option<NodeReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<CoreCondition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion: Option<MachineDeletionStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v1beta2: Option<LaterConditions>,
}

/// The conditions of v1beta2 in an object of v1beta1.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LaterConditions {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<CoreCondition>,
}

/// Progress of core in a machine's deletion.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineDeletionStatus {
    /// Set when core starts to drain the node. Core does not drain every node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_drain_start_time: Option<String>,
}

/// Template of a pool's machines.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineTemplate {
    #[serde(default)]
    pub metadata: crate::TemplateMeta,
    #[serde(default)]
    pub spec: MachineSpec,
}

/// The fields of a MachinePool's spec that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachinePoolSpec {
    #[serde(default)]
    pub cluster_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(default)]
    pub template: MachineTemplate,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failure_domains: Vec<String>,
    #[serde(rename = "providerIDList", default, skip_serializing_if = "Vec::is_empty")]
    pub provider_id_list: Vec<String>,
}

/// The fields of a MachinePool's status that Capstan reads.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachinePoolStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<CoreCondition>,
}

/// The part of a drain rule that says which machines it is about.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct MachineDrainRuleSpec {
    /// Machines that one of these selects; without any, all of the namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machines: Vec<DrainRuleMachines>,
}

/// Machines that both selectors select. One that is not set selects all.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainRuleMachines {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// By the labels of the machine's Cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_selector: Option<LabelSelector>,
}

/// A part of an object that Capstan does not read.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Unread {}

macro_rules! core_resource {
    ($(#[$meta:meta])* $name:ident, $spec:ty, $status:ty, $plural:literal) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
        pub struct $name {
            #[serde(default)]
            pub metadata: ObjectMeta,
            #[serde(default)]
            pub spec: $spec,
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub status: Option<$status>,
        }

        impl $name {
            pub const KIND: &'static str = stringify!($name);

            /// Whether the object itself has the paused annotation.
            pub fn has_paused_annotation(&self) -> bool {
                let annotations = self.metadata.annotations.as_ref();
                annotations.is_some_and(|all| all.contains_key(PAUSED_ANNOTATION))
            }
        }

        impl kube_core::Resource for $name {
            type DynamicType = Version;
            type Scope = NamespaceResourceScope;

            fn kind(_: &Version) -> Cow<'_, str> {
                Self::KIND.into()
            }

            fn group(_: &Version) -> Cow<'_, str> {
                GROUP.into()
            }

            fn version(version: &Version) -> Cow<'_, str> {
                version.as_str().into()
            }

            fn plural(_: &Version) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

core_resource! {
    /// A Cluster of Cluster API.
    Cluster, ClusterSpec, ClusterStatus, "clusters"
}
core_resource! {
    /// A Machine of Cluster API, on any infrastructure.
    Machine, MachineSpec, MachineStatus, "machines"
}
core_resource! {
    /// A MachinePool of Cluster API: several machines that one infrastructure object represents.
    MachinePool, MachinePoolSpec, MachinePoolStatus, "machinepools"
}

core_resource! {
    /// How core drains the nodes of machines. Capstan only asks which machines it is about.
    MachineDrainRule, MachineDrainRuleSpec, Unread, "machinedrainrules"
}

impl Cluster {
    /// Whether the spec or an annotation pauses the cluster.
    pub fn is_paused(&self) -> bool {
        self.spec.paused.unwrap_or_default() || self.has_paused_annotation()
    }

    /// Whether the infrastructure is provisioned, by the field of either version.
    pub fn infrastructure_provisioned(&self) -> bool {
        self.status.as_ref().is_some_and(|status| {
            let v1beta2 = status
                .initialization
                .as_ref()
                .and_then(|done| done.infrastructure_provisioned);
            v1beta2.or(status.infrastructure_ready).unwrap_or_default()
        })
    }

    /// Whether the control plane was initialized, by the field of either version.
    pub fn control_plane_initialized(&self) -> bool {
        self.status.as_ref().is_some_and(|status| {
            let v1beta2 = status
                .initialization
                .as_ref()
                .and_then(|done| done.control_plane_initialized);
            let condition = || {
                status
                    .conditions
                    .iter()
                    .any(|c| c.type_ == "ControlPlaneInitialized" && c.status == "True")
            };
            v1beta2.unwrap_or_else(condition)
        })
    }
}

impl MachinePool {
    /// Returns the desired replicas; 1 when unset, as core does.
    pub fn replicas(&self) -> i32 {
        self.spec.replicas.unwrap_or(1)
    }

    /// Whether another component than the user decides on the replicas.
    pub fn replicas_managed_externally(&self) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations
            .and_then(|all| all.get(REPLICAS_MANAGED_BY_ANNOTATION))
            .is_some_and(|by| by != "false")
    }
}
