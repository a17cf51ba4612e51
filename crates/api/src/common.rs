//! Types that several groups share.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{self as meta, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use std::{borrow::Cow, collections::BTreeMap, fmt};

/// Fields that this version does not know. They are kept, so that a write loses no value.
pub type Extra = BTreeMap<String, serde_json::Value>;

/// A condition in the form that Cluster API v1beta1 and the Machine API share.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition, in CamelCase.
    #[serde(rename = "type")]
    pub type_: String,
    /// Status of the condition: True, False or Unknown.
    pub status: String,
    /// Severity of a condition that is False: Error, Warning or Info. Empty otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<String>,
    /// Time at which the status last changed.
    pub last_transition_time: Time,
    /// Reason of the last change, one word in CamelCase for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Description of the state, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Conditions in the form of Cluster API v1beta2.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct V1Beta2Status {
    /// Conditions with observedGeneration and without severity.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("maxItems" = 32, "x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<meta::Condition>,
}

/// Labels and annotations of objects that are created from a template.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TemplateMeta {
    /// Labels of the created object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the created object.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Host and port of a cluster's API server.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiEndpoint {
    /// Host name or IP address of the API server.
    #[serde(default)]
    pub host: String,
    /// TCP port of the API server.
    #[serde(default)]
    pub port: i32,
}

/// An address of a machine.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineAddress {
    /// Type of the address: Hostname, ExternalIP, InternalIP, ExternalDNS or InternalDNS.
    #[serde(rename = "type")]
    pub type_: String,
    /// The address or the name.
    pub address: String,
}

/// A failure domain of an infrastructure cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterFailureDomain {
    /// Whether control plane machines may be created in the failure domain.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control_plane: bool,
    /// Attributes of the failure domain, as free text by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// A decimal quantity as Kubernetes writes it, given as a string or as a number.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Quantity(pub String);

impl Quantity {
    /// Returns the number, as Kubernetes counts it: `250m` is 0.25, `1k` is 1000. `None` where it is no number.
    pub fn value(&self) -> Option<f64> {
        const SUFFIXES: [(&str, f64); 15] = [
            ("Ki", 1024.0),
            ("Mi", 1_048_576.0),
            ("Gi", 1_073_741_824.0),
            ("Ti", 1_099_511_627_776.0),
            ("Pi", 1_125_899_906_842_624.0),
            ("Ei", 1_152_921_504_606_846_976.0),
            ("n", 1e-9),
            ("u", 1e-6),
            ("m", 1e-3),
            ("k", 1e3),
            ("M", 1e6),
            ("G", 1e9),
            ("T", 1e12),
            ("P", 1e15),
            ("E", 1e18),
        ];
        let text = self.0.trim();
        let scaled = SUFFIXES
            .iter()
            .find_map(|(suffix, scale)| Some((text.strip_suffix(suffix)?, *scale)));
        let (digits, scale) = scaled.unwrap_or((text, 1.0));
        // Rust also reads words such as `inf`.
        let plain = digits.chars().all(|c| c.is_ascii_digit() || "+-.eE".contains(c));
        let number: f64 = digits.parse().ok().filter(|_| plain)?;
        Some(number * scale)
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(serde_json::Number),
        }
        Ok(match Either::deserialize(deserializer)? {
            Either::Text(text) => Self(text),
            Either::Number(number) => Self(number.to_string()),
        })
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
            "x-kubernetes-int-or-string": true,
        })
    }
}

/// Pattern of the durations that Go can read and hold. A value that Go cannot read would stop every reader of the
/// object.
pub(crate) const DURATION: &str = r"^[-+]?(0|(([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|μs|ms|s|m|h)){1,8})$";

pub(crate) fn is_false(value: &bool) -> bool {
    !*value
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
