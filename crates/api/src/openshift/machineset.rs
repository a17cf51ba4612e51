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
    pub enum DeletePolicy {
        Random = "Random",
        Newest = "Newest",
        Oldest = "Oldest",
    }
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineTemplateSpec {
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: MachineMeta,
    #[serde(default, skip_serializing_if = "is_default")]
    pub spec: MachineSpec,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = set_rules()))]
pub struct MachineSetSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = 1))]
    pub replicas: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_policy: Option<DeletePolicy>,
    #[serde(default)]
    pub selector: LabelSelector,
    #[serde(default, skip_serializing_if = "is_default")]
    pub template: MachineTemplateSpec,
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineSetStatus {
    #[serde(default)]
    pub replicas: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fully_labeled_replicas: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_replicas: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1), extend("maxLength" = 4096))]
    pub label_selector: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map"), extend("x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    #[serde(rename = "authoritativeAPI", skip_serializing_if = "Option::is_none")]
    pub authoritative_api: Option<MachineAuthority>,
    #[serde(rename = "synchronizedAPI", skip_serializing_if = "Option::is_none")]
    pub synchronized_api: Option<SynchronizedApi>,
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
