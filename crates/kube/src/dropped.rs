//! Fields of our writes that the API server did not keep.
//!
//! A cluster may hold definitions that are not ours: older ones, or upstream's. The API server prunes fields that they do not
//! know, so the next reconcile would find them missing and write them again, without end. Invariant: a value that was sent and
//! was not in the answer is not sent again to the same object, until another value is desired there.
//!
//! The map belongs to the process, because several controllers write the same object: see `docs/adr/0008-dropped-fields.md`.

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};
use serde_json::{Map, Value};

/// The most objects that are remembered; with definitions of our own there is none.
const MOST: usize = 20_000;

static DROPPED: LazyLock<Mutex<HashMap<String, Value>>> = LazyLock::new(Mutex::default);

fn memory() -> MutexGuard<'static, HashMap<String, Value>> {
    DROPPED.lock()
}

/// Returns `patch` without the fields that the API server would drop again.
pub(crate) fn spare(uid: &str, patch: Value) -> Option<Value> {
    match memory().get(uid) {
        Some(dropped) => without(&patch, dropped),
        None => Some(patch),
    }
}

/// Notes the fields of `patch` that are not in the object that the API server answered with.
pub(crate) fn note(uid: &str, patch: &Value, answered: &Value) {
    let (mut memory, missing) = (memory(), missing(patch, answered));
    // A field that it keeps by now (another value, or under another definition) may be sent again.
    if let Some(dropped) = memory.remove(uid)
        && let Some(still) = still_dropped(&dropped, patch, answered)
    {
        memory.insert(uid.to_owned(), still);
    }
    let Some(missing) = missing else { return };
    if memory.len() >= MOST {
        memory.clear();
    }
    merge(memory.entry(uid.to_owned()).or_default(), missing);
}

/// Returns `dropped` less the leaves that `patch` has sent and `object` shows.
fn still_dropped(dropped: &Value, patch: &Value, object: &Value) -> Option<Value> {
    match (dropped, patch) {
        (Value::Object(known), Value::Object(sent)) => {
            let rest: Map<_, _> = known
                .iter()
                .filter_map(|(key, known)| {
                    let Some(sent) = sent.get(key) else {
                        return Some((key.clone(), known.clone()));
                    };
                    let found = object.get(key).unwrap_or(&Value::Null);
                    Some((key.clone(), still_dropped(known, sent, found)?))
                })
                .collect();
            (!rest.is_empty()).then_some(Value::Object(rest))
        }
        (known, sent) => missing(sent, object).is_some().then(|| known.clone()),
    }
}

/// Returns the leaves of a merge patch that the object does not show.
fn missing(patch: &Value, object: &Value) -> Option<Value> {
    match patch {
        Value::Object(fields) => {
            let rest: Map<_, _> = fields
                .iter()
                .filter_map(|(key, wanted)| {
                    let found = object.get(key).unwrap_or(&Value::Null);
                    Some((key.clone(), missing(wanted, found)?))
                })
                .collect();
            (!rest.is_empty()).then_some(Value::Object(rest))
        }
        wanted => (wanted != object).then(|| wanted.clone()),
    }
}

/// Merges two merge patches; the later one's values count.
fn merge(into: &mut Value, later: Value) {
    match (into, later) {
        (Value::Object(fields), Value::Object(later)) => {
            for (key, value) in later {
                merge(fields.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, later) => *into = later,
    }
}

/// Returns a merge patch less the leaves that `dropped` has with the same value.
fn without(patch: &Value, dropped: &Value) -> Option<Value> {
    match (patch, dropped) {
        (Value::Object(fields), Value::Object(known)) => {
            let rest: Map<_, _> = fields
                .iter()
                .filter_map(|(key, value)| {
                    let value = match known.get(key) {
                        Some(known) => without(value, known)?,
                        None => value.clone(),
                    };
                    Some((key.clone(), value))
                })
                .collect();
            (!rest.is_empty()).then_some(Value::Object(rest))
        }
        (value, known) => (value != known).then(|| value.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case::all_kept(json!({"a": 1, "b": {"c": [1]}}), json!({"a": 1, "b": {"c": [1], "d": 2}}), None)]
    #[case::pruned(json!({"a": 1, "b": {"c": 2}}), json!({"a": 1}), Some(json!({"b": {"c": 2}})))]
    #[case::list_items_pruned(json!({"a": [{"x": 1, "y": 2}]}), json!({"a": [{"x": 1}]}), Some(json!({"a": [{"x": 1, "y": 2}]})))]
    #[case::taken_away(json!({"a": null}), json!({}), None)]
    fn fields_that_the_answer_lacks_were_dropped(
        #[case] patch: Value,
        #[case] object: Value,
        #[case] expected: Option<Value>,
    ) {
        assert_eq!(missing(&patch, &object), expected);
    }

    #[rstest]
    #[case::the_same_again(json!({"a": 1}), json!({"a": 1}), None)]
    #[case::another_value(json!({"a": 2}), json!({"a": 1}), Some(json!({"a": 2})))]
    #[case::the_rest_is_sent(json!({"a": 1, "b": {"c": 1, "d": 1}}), json!({"b": {"c": 1}}), Some(json!({"a": 1, "b": {"d": 1}})))]
    fn dropped_fields_are_not_sent_again(
        #[case] patch: Value,
        #[case] dropped: Value,
        #[case] expected: Option<Value>,
    ) {
        assert_eq!(without(&patch, &dropped), expected);
    }

    #[test]
    fn fields_that_were_kept_since_are_sent_again() {
        let uid = "fields_that_were_kept_since_are_sent_again";
        let (refused, taken) = (json!({"a": {"b": 1, "c": 1}}), json!({"a": {"b": 2}}));
        note(uid, &refused, &json!({}));
        assert_eq!(spare(uid, refused.clone()), None);
        note(uid, &taken, &taken);
        assert_eq!(spare(uid, refused.clone()), Some(json!({"a": {"b": 1}})));
        // All of it is kept under a new definition: nothing is remembered.
        note(uid, &refused, &refused);
        assert!(!memory().contains_key(uid));
    }

    #[test]
    fn fields_that_were_dropped_at_different_times_add_up() {
        let uid = "fields_that_were_dropped_at_different_times_add_up";
        note(uid, &json!({"a": 1, "kept": 1}), &json!({"kept": 1}));
        note(uid, &json!({"b": {"c": 1}}), &json!({}));
        assert_eq!(spare(uid, json!({"a": 1, "b": {"c": 1}})), None);
        assert_eq!(spare(uid, json!({"a": 1, "kept": 2})), Some(json!({"kept": 2})));
        assert_eq!(spare("another", json!({"a": 1})), Some(json!({"a": 1})));
    }
}
