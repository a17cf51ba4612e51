//! MachineSet: a number of machines made from one template.

use super::machine::{MachineAuthority, MachineMeta, MachineSpec, SynchronizedApi};
use crate::cel::{Rule, rule, same};
use crate::common::{Condition, is_default};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// A MachineSet keeps a number of machines of the same template.
    pub struct MachineSet { spec: MachineSetSpec, status: MachineSetStatus }
    NamespaceResourceScope "machine.openshift.io" / "v1beta1" / "machinesets"
}

string_enum! {
    /// The order in which machines are deleted.
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

/// Template of the machines of a set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineTemplateSpec {
    /// Labels and annotations of the machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: MachineMeta,
    /// Spec of the machines that the set creates.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spec: MachineSpec,
}

/// Desired state of a set of machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = set_rules()))]
pub struct MachineSetSpec {
    /// Desired number of machines. 1 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    pub replicas: Option<i32>,
    /// Seconds that a node must be ready before its machine counts as available.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Order in which machines are deleted: Random, Newest or Oldest. Random when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_policy: Option<DeletePolicy>,
    /// Label selector of the machines that belong to the set.
    #[serde(default)]
    pub selector: LabelSelector,
    /// Template of new machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub template: MachineTemplateSpec,
    /// API that is authoritative for the set: MachineAPI or ClusterAPI.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
}

/// Observed state of a set of machines.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSetStatus {
    /// Number of machines of the set.
    #[serde(default)]
    pub replicas: i32,
    /// Number of machines that have all labels of the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fully_labeled_replicas: Option<i32>,
    /// Number of machines whose node is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Number of machines whose node has been ready for minReadySeconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_replicas: Option<i32>,
    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Label selector as text, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 4096))]
    pub label_selector: Option<String>,
    /// Reason of a problem that needs a user to act, in CamelCase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    /// Description of a problem that needs a user to act.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// Conditions of the set, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// API that is authoritative for the set now, or Migrating while this changes.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
    /// API from which the last synchronization copied.
    #[serde(rename = "synchronizedAPI", skip_serializing_if = "Option::is_none")]
    pub synchronized_api: Option<SynchronizedApi>,
    /// Generation of the authoritative object that was last synchronized.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub synchronized_generation: Option<i64>,
}

fn set_rules() -> [Rule; 2] {
    const SELECTED: &str = "!has(self.selector) || !has(self.selector.matchLabels) || self.selector.matchLabels.all(k, \
        has(self.template) && has(self.template.metadata) && has(self.template.metadata.labels) && \
        k in self.template.metadata.labels && self.template.metadata.labels[k] == self.selector.matchLabels[k])";
    [
        rule(same("self", "oldSelf", "selector"), "selector is immutable")
            .at(".selector")
            .forbidden(),
        rule(SELECTED, "`selector` does not match template `labels`").at(".template.metadata.labels"),
    ]
}

/// Bounds the labels of the selector: the API server needs the bounds to compute the cost of the rule.
pub(crate) fn bound_selector(spec: &mut serde_json::Value) {
    let labels = &mut spec["properties"]["selector"]["properties"]["matchLabels"];
    labels["maxProperties"] = 64.into();
    labels["additionalProperties"]["maxLength"] = 63.into();
}
