//! Reads and writes objects of Capstan's types as v1beta2.
//!
//! Invariant: no other code depends on the version that is sent or received.

use serde::de::{DeserializeOwned, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::V1BETA2;
use super::convert::{convert, down};
use super::fields;

/// Writes an object with the fields of v1beta1 as `api_version`.
pub fn write<S: Serializer>(object: &impl Serialize, api_version: &str, serializer: S) -> Result<S::Ok, S::Error> {
    let value = serde_json::to_value(object).map_err(S::Error::custom)?;
    convert(value, api_version)
        .map_err(S::Error::custom)?
        .serialize(serializer)
}

/// Reads an object of either version into a type with the fields of v1beta1. An object without a version is one of v1beta1.
pub fn read<'de, T: DeserializeOwned, D: Deserializer<'de>>(kind: &str, deserializer: D) -> Result<T, D::Error> {
    let mut value = Value::deserialize(deserializer)?;
    let version = value.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
    if let (Some(known), true) = (fields::of(kind), version.ends_with(V1BETA2)) {
        down(&mut value, known);
    }
    serde_json::from_value(value).map_err(D::Error::custom)
}
