//! Converts objects between v1beta1 and v1beta2.

use std::fmt;

use serde_json::{Map, Value};

use super::fields::{self, Field, Form};
use super::{V1BETA1, V1BETA2};
use crate::duration::Duration;

/// On objects in v1beta2: the values of v1beta1 that have no field in v1beta2, by their paths.
const KEPT: &str = "capstan.dev/v1beta1-fields";
/// CAPV's conversion writes the object of v1beta2 into this annotation of the object in v1beta1. Clients with Go types of v1beta1
/// write no field that is false, 0 or empty: the annotation records whether v1beta2 had it so, or not at all.
const CONVERSION_DATA: &str = "cluster.x-k8s.io/conversion-data";

/// An object that cannot be converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unconvertible(String);

impl fmt::Display for Unconvertible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unconvertible {}

/// Returns the object in another version, which `desired` names as `group/version`.
pub fn convert(mut object: Value, desired: &str) -> Result<Value, Unconvertible> {
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (from, kind) = (text("apiVersion"), text("kind"));
    let refuse = || Unconvertible(format!("{kind:?} cannot be converted from {from:?} to {desired:?}"));
    let known = fields::of(&kind).ok_or_else(refuse)?;
    let (group, version) = from.rsplit_once('/').ok_or_else(refuse)?;
    let (desired_group, desired_version) = desired.rsplit_once('/').ok_or_else(refuse)?;
    if group != desired_group || !object.is_object() {
        return Err(refuse());
    }
    match (version, desired_version) {
        (V1BETA1, V1BETA2) => up(&mut object, known),
        (V1BETA2, V1BETA1) => down(&mut object, known),
        (V1BETA1, V1BETA1) | (V1BETA2, V1BETA2) => {}
        _ => return Err(refuse()),
    }
    object["apiVersion"] = desired.into();
    Ok(object)
}

pub(super) fn up(object: &mut Value, kind: &fields::Kind) {
    let known = annotation(object, CONVERSION_DATA).and_then(|text| serde_json::from_str(&text).ok());
    let mut kept = Map::new();
    if let Some(spec) = at(object, kind.spec) {
        move_all(spec, kind.fields, |field, value| match field.form {
            Form::Same => Some(value),
            Form::List => Some(to_list(value)),
            Form::Seconds => {
                let seconds = seconds(&value);
                if seconds.map(duration) != Some(value.clone()) {
                    kept.insert(field.v1beta1.to_owned(), value);
                }
                seconds.map(Value::from)
            }
            Form::Dropped => {
                kept.insert(field.v1beta1.to_owned(), value);
                None
            }
        });
    }
    if let Some(status) = at(object, &["status"]) {
        move_all(status, kind.status, |field, value| match field.form {
            Form::List => Some(to_list(value)),
            Form::Same | Form::Seconds | Form::Dropped => Some(value),
        });
    }
    if !kept.is_empty() {
        annotate(object, KEPT, Value::Object(kept).to_string());
    }
    if let Some(known) = known {
        restore_empty(object, &known);
    }
}

/// Sets the fields of the spec that are empty in `known` and missing in the object.
fn restore_empty(object: &mut Value, known: &Value) {
    if let (Some(spec), Some(known)) = (object.get_mut("spec"), known.get("spec")) {
        fill_empty(spec, known);
    }
}

fn fill_empty(value: &mut Value, known: &Value) {
    match (value, known) {
        (Value::Object(fields), Value::Object(known)) => {
            for (name, known) in known {
                match fields.get_mut(name) {
                    Some(field) => fill_empty(field, known),
                    None if is_empty(known) => drop(fields.insert(name.clone(), known.clone())),
                    None => {}
                }
            }
        }
        // Items have no names. In a list of another length they are not those of before.
        (Value::Array(items), Value::Array(known)) if items.len() == known.len() => {
            items
                .iter_mut()
                .zip(known)
                .for_each(|(item, known)| fill_empty(item, known));
        }
        _ => {}
    }
}

/// Whether Go's `omitempty` leaves the value out.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Bool(set) => !set,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

pub(super) fn down(object: &mut Value, kind: &fields::Kind) {
    let kept = annotation(object, KEPT).and_then(|text| serde_json::from_str(&text).ok());
    let kept: Map<String, Value> = kept.unwrap_or_default();
    if let Some(spec) = at(object, kind.spec) {
        let back: Vec<Field> = kind.fields.iter().map(reversed).collect();
        move_all(spec, &back, |field, value| match field.form {
            Form::Same | Form::Dropped => Some(value),
            Form::List => Some(to_map(value)),
            Form::Seconds => {
                let original = kept.get(field.v1beta2);
                let current = value.as_i64();
                let still = original.filter(|original| current.is_some() && seconds(original) == current);
                Some(still.cloned().unwrap_or_else(|| current.map_or(value, duration)))
            }
        });
        for field in kind.fields {
            let Some(value) = kept.get(field.v1beta1) else { continue };
            match field.form {
                Form::Dropped => restore(spec, field.v1beta1, value.clone()),
                // A duration that cannot be read has no seconds.
                Form::Seconds if seconds(value).is_none() => restore(spec, field.v1beta1, value.clone()),
                Form::Seconds | Form::Same | Form::List => {}
            }
        }
    }
    if let Some(status) = at(object, &["status"]) {
        let back: Vec<Field> = kind.status.iter().map(reversed).collect();
        move_all(status, &back, |field, value| match field.form {
            Form::List => Some(to_map(value)),
            Form::Same | Form::Seconds | Form::Dropped => Some(value),
        });
    }
}

fn reversed(field: &Field) -> Field {
    Field {
        v1beta1: field.v1beta2,
        v1beta2: field.v1beta1,
        form: field.form,
    }
}

/// Takes the values of all fields from their places before it puts any into a new one: some fields change places.
fn move_all(parent: &mut Value, fields: &[Field], mut change: impl FnMut(&Field, Value) -> Option<Value>) {
    let from = fields.iter().filter(|field| !field.v1beta1.is_empty());
    let taken: Vec<(&Field, Value)> = from
        .filter_map(|field| Some((field, take(parent, field.v1beta1, field.form != Form::Dropped)?)))
        .collect();
    for (field, value) in taken {
        if let Some(value) = change(field, value) {
            put(parent, field.v1beta2, value);
        }
    }
}

fn at<'a>(object: &'a mut Value, path: &[&str]) -> Option<&'a mut Value> {
    let found = path.iter().try_fold(object, |value, key| value.get_mut(*key));
    found.filter(|value| value.is_object())
}

/// Takes the value at a path. With `prune`, removes parents that become empty.
fn take(parent: &mut Value, path: &str, prune: bool) -> Option<Value> {
    let fields = parent.as_object_mut()?;
    let Some((first, rest)) = path.split_once('.') else {
        return fields.remove(path);
    };
    let taken = take(fields.get_mut(first)?, rest, prune)?;
    if prune && fields.get(first).and_then(Value::as_object).is_some_and(Map::is_empty) {
        fields.remove(first);
    }
    Some(taken)
}

fn put(parent: &mut Value, path: &str, value: Value) {
    let Some(fields) = parent.as_object_mut() else { return };
    match path.split_once('.') {
        None => drop(fields.insert(path.to_owned(), value)),
        Some((first, rest)) => {
            let inner = fields.entry(first).or_insert_with(|| Value::Object(Map::new()));
            put(inner, rest, value);
        }
    }
}

/// Puts a value back, unless its parent no longer exists.
fn restore(parent: &mut Value, path: &str, value: Value) {
    let exists = match path.rsplit_once('.') {
        Some((above, _)) => above
            .split('.')
            .try_fold(&*parent, |value, key| value.get(key))
            .is_some(),
        None => true,
    };
    if exists {
        put(parent, path, value);
    }
}

/// Returns the whole seconds of a duration, rounded down.
fn seconds(value: &Value) -> Option<i64> {
    let duration: Duration = value.as_str()?.parse().ok()?;
    let whole = i64::try_from(std::time::Duration::from(duration).as_secs()).ok()?;
    (!duration.is_negative()).then_some(whole)
}

/// Returns a duration as Go writes it.
fn duration(seconds: i64) -> Value {
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    Value::String(match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        (_, _) => format!("{hours}h{minutes}m{rest}s"),
    })
}

fn to_list(value: Value) -> Value {
    let Value::Object(map) = value else { return value };
    let by_name: std::collections::BTreeMap<_, _> = map.into_iter().collect();
    let items = by_name.into_iter().map(|(name, mut item)| {
        put(&mut item, "name", name.into());
        item
    });
    Value::Array(items.collect())
}

fn to_map(value: Value) -> Value {
    let Value::Array(items) = value else { return value };
    let named = items.into_iter().filter_map(|mut item| {
        let name = take(&mut item, "name", true)?;
        Some((name.as_str()?.to_owned(), item))
    });
    Value::Object(named.collect())
}

/// Removes an annotation and returns its value.
fn annotation(object: &mut Value, key: &str) -> Option<String> {
    let metadata = at(object, &["metadata"])?;
    let annotations = metadata.get_mut("annotations")?.as_object_mut()?;
    let value = annotations.remove(key)?;
    if annotations.is_empty() {
        take(metadata, "annotations", true);
    }
    value.as_str().map(str::to_owned)
}

fn annotate(object: &mut Value, key: &str, value: String) {
    let Some(metadata) = at(object, &["metadata"]) else {
        return;
    };
    let Some(metadata) = metadata.as_object_mut() else {
        return;
    };
    let annotations = metadata
        .entry("annotations")
        .or_insert_with(|| Value::Object(Map::new()));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.insert(key.to_owned(), value.into());
    }
}

#[cfg(test)]
mod tests;
