//! Writes to objects. Invariant: a patch is the difference between two typed values as a JSON merge patch, so that it
//! touches no field of another writer, and an empty one is not sent; a change of a list that others write too (finalizers)
//! carries the resourceVersion that it was computed from; a field that the API server prunes is not sent again and again;
//! the returned object is trimmed as the caches are.

use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::cache::{Object, trim};
use crate::dropped;
use crate::error::Error;
use crate::objects;

/// Whether a patch may be applied to a later version of the object than it was computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Yes: only the fields in the patch matter.
    Open,
    /// No: a conflict is answered with 409.
    Version,
}

/// Returns the merge patch (RFC 7386) that turns `before` into `after`; `None` when they are equal.
pub fn diff(before: &impl Serialize, after: &impl Serialize) -> Result<Option<Value>, Error> {
    Ok(difference(&value(before)?, &value(after)?))
}

fn value(object: &impl Serialize) -> Result<Value, Error> {
    let failed = |error: serde_json::Error| Error::Serialize {
        what: "an object",
        reason: error.to_string(),
    };
    serde_json::to_value(object).map_err(failed)
}

fn difference(before: &Value, after: &Value) -> Option<Value> {
    let (Value::Object(old), Value::Object(new)) = (before, after) else {
        return (before != after).then(|| after.clone());
    };
    let mut patch = Map::new();
    for (key, value) in new {
        match old.get(key) {
            Some(previous) => {
                if let Some(inner) = difference(previous, value) {
                    patch.insert(key.clone(), inner);
                }
            }
            None if value.is_null() => {}
            None => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    for (key, value) in old {
        if !new.contains_key(key) && !value.is_null() {
            patch.insert(key.clone(), Value::Null);
        }
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Writes the difference of the two `status` to the status subresource. Returns `None` when there was none.
pub async fn status<K: Object + Serialize>(
    api: &Api<K>,
    before: &K,
    after: &K,
    lock: Lock,
) -> Result<Option<K>, Error> {
    let uid = objects::uid(before)?;
    let Some(patch) = part(diff(before, after)?, &["status"]).and_then(|patch| dropped::spare(&uid, patch)) else {
        return Ok(None);
    };
    let sent = Patch::Merge(guarded(&patch, before, lock)?);
    let mut patched = api
        .patch_status(&before.name_any(), &PatchParams::default(), &sent)
        .await?;
    trim(&mut patched);
    dropped::note(&uid, &patch, &value(&patched)?);
    Ok(Some(patched))
}

/// Writes the difference of the two `metadata` and `spec`. Returns `None` when there was none.
pub async fn object<K: Object + Serialize>(
    api: &Api<K>,
    before: &K,
    after: &K,
    lock: Lock,
) -> Result<Option<K>, Error> {
    let uid = objects::uid(before)?;
    let patch = part(diff(before, after)?, &["metadata", "spec"]).and_then(|patch| dropped::spare(&uid, patch));
    let Some(patch) = patch else {
        return Ok(None);
    };
    let sent = Patch::Merge(guarded(&patch, before, lock)?);
    let mut patched = api.patch(&before.name_any(), &PatchParams::default(), &sent).await?;
    trim(&mut patched);
    dropped::note(&uid, &patch, &value(&patched)?);
    Ok(Some(patched))
}

fn part(patch: Option<Value>, keys: &[&str]) -> Option<Value> {
    let Some(Value::Object(mut patch)) = patch else {
        return None;
    };
    patch.retain(|key, _| keys.contains(&key.as_str()));
    (!patch.is_empty()).then_some(Value::Object(patch))
}

fn guarded<K: Resource<DynamicType = ()>>(patch: &Value, before: &K, lock: Lock) -> Result<Value, Error> {
    let mut patch = patch.clone();
    if lock == Lock::Open {
        return Ok(patch);
    }
    let incomplete = || Error::Incomplete {
        kind: K::kind(&()).into_owned(),
        field: "metadata.resourceVersion",
    };
    let version = before.meta().resource_version.clone().ok_or_else(incomplete)?;
    patch["metadata"]["resourceVersion"] = Value::String(version);
    Ok(patch)
}

#[derive(Debug, Serialize)]
struct MetadataPatch<'a> {
    metadata: Finalizers<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Finalizers<'a> {
    uid: Option<&'a str>,
    resource_version: Option<&'a str>,
    finalizers: Vec<&'a str>,
}

/// Adds a finalizer. Returns `None` when it is there already.
pub async fn add_finalizer<K: Object>(api: &Api<K>, object: &K, finalizer: &str) -> Result<Option<K>, Error> {
    if object.finalizers().iter().any(|f| f == finalizer) {
        return Ok(None);
    }
    let finalizers = object
        .finalizers()
        .iter()
        .map(String::as_str)
        .chain([finalizer])
        .collect();
    write_finalizers(api, object, finalizers).await.map(Some)
}

/// Removes a finalizer. Returns `None` when it was not there, or when the object is gone.
pub async fn remove_finalizer<K: Object>(api: &Api<K>, object: &K, finalizer: &str) -> Result<Option<K>, Error> {
    if !object.finalizers().iter().any(|f| f == finalizer) {
        return Ok(None);
    }
    let finalizers = object
        .finalizers()
        .iter()
        .map(String::as_str)
        .filter(|f| *f != finalizer)
        .collect();
    match write_finalizers(api, object, finalizers).await {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

async fn write_finalizers<K: Object>(api: &Api<K>, object: &K, finalizers: Vec<&str>) -> Result<K, Error> {
    let meta = object.meta();
    let (uid, resource_version) = (meta.uid.as_deref(), meta.resource_version.as_deref());
    let patch = MetadataPatch {
        metadata: Finalizers {
            uid,
            resource_version,
            finalizers,
        },
    };
    let mut patched = api
        .patch(&object.name_any(), &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    trim(&mut patched);
    Ok(patched)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case::equal(json!({"a": 1}), json!({"a": 1}), None)]
    #[case::changed(json!({"a": 1, "b": 2}), json!({"a": 1, "b": 3}), Some(json!({"b": 3})))]
    #[case::removed(json!({"a": {"b": 1, "c": 2}}), json!({"a": {"c": 2}}), Some(json!({"a": {"b": null}})))]
    #[case::added(json!({}), json!({"a": {"b": 1}}), Some(json!({"a": {"b": 1}})))]
    #[case::lists_are_whole(json!({"a": [1, 2]}), json!({"a": [2]}), Some(json!({"a": [2]})))]
    #[case::null_is_absent(json!({"a": null}), json!({}), None)]
    fn a_patch_holds_the_difference_only(#[case] before: Value, #[case] after: Value, #[case] expected: Option<Value>) {
        assert_eq!(difference(&before, &after), expected);
    }
}
