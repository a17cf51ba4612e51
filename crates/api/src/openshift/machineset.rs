//! MachineSet: a number of machines made from one template.

use super::machine::{MachineAuthority, MachineMeta, MachineSpec, SynchronizedApi};
use crate::cel::{Rule, rule, same};
use crate::common::{Condition, is_default};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

resource! {
    /// A number of like machines.
    pub struct MachineSet { spec: MachineSetSpec, status: MachineSetStatus }
    NamespaceResourceScope "machine.openshift.io" / "v1beta1" / "machinesets"
}

string_enum! {
    /// Which machine goes first.
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

/// What the machines of a set are like.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineTemplateSpec {
    /// Labels and annotations of the machines.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: MachineMeta,
    /// The machines themselves.
    #[serde(default, skip_serializing_if = "is_default")]
    pub spec: MachineSpec,
}

/// A set as it is to be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = set_rules()))]
pub struct MachineSetSpec {
    /// How many machines; 1 when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    pub replicas: Option<i32>,
    /// How long a machine must be ready to count as available.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Which machine goes first; Random when unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_policy: Option<DeletePolicy>,
    /// Which machines belong to the set.
    #[serde(default)]
    pub selector: LabelSelector,
    /// What new machines are like.
    #[serde(default, skip_serializing_if = "is_default")]
    pub template: MachineTemplateSpec,
    /// Which API has the say.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
}

/// A set as it is.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSetStatus {
    /// How many machines there are.
    #[serde(default)]
    pub replicas: i32,
    /// How many have all labels of the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fully_labeled_replicas: Option<i32>,
    /// How many have a node that is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// How many have been ready for minReadySeconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_replicas: Option<i32>,
    /// Generation that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The selector as text, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 4096))]
    pub label_selector: Option<String>,
    /// One word for what is wrong with the set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    /// What is wrong with the set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// Conditions, one per type.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Which API has the say.
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
    /// Which API was last copied from.
    #[serde(rename = "synchronizedAPI", skip_serializing_if = "Option::is_none")]
    pub synchronized_api: Option<SynchronizedApi>,
    /// Generation that was last copied.
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

/// No selector has more labels, and no label is longer: the API server wants to know before it takes the rule.
pub(crate) fn bound_selector(spec: &mut serde_json::Value) {
    let labels = &mut spec["properties"]["selector"]["properties"]["matchLabels"];
    labels["maxProperties"] = 64.into();
    labels["additionalProperties"]["maxLength"] = 63.into();
}
