//! Deletion: preconditions, finalizers, grace periods, dependents.

use serde_json::{Value, json};

use super::answer::{Failure, success};
use super::kinds::{Kind, Target};
use super::selector::Selector;
use super::store::{FollowUp, Name, Store, finalizers, metadata, text};
use super::write::wrong_uid;

/// A Pod that names no other has so many seconds to end.
const GRACE_SECONDS: i64 = 30;

impl Store {
    pub fn delete(&mut self, target: &Target, options: &Value) -> Result<Value, Failure> {
        let object = self.existing(target)?;
        let (kind, name) = (&target.kind, target.name()?);
        check(kind, name, &object, &options["preconditions"])?;
        Ok(self.delete_object(kind, &target.key(name), object, options, target))
    }

    pub fn delete_all(&mut self, target: &Target, selector: &Selector, options: &Value) -> Vec<Value> {
        let inside = |name: &Name| target.namespace.as_ref().is_none_or(|namespace| *namespace == name.0);
        let kind = target.kind.clone();
        let selected = self
            .all(&kind.key())
            .filter(|(name, object)| inside(name) && selector.selects(object));
        let selected: Vec<(Name, Value)> = selected.map(|(name, object)| (name.clone(), object.clone())).collect();
        for (name, object) in &selected {
            self.delete_object(&kind, name, object.clone(), options, target);
        }
        selected.into_iter().map(|(_, object)| target.show(&object)).collect()
    }

    fn delete_object(&mut self, kind: &Kind, name: &Name, object: Value, options: &Value, target: &Target) -> Value {
        let uid = text(&object, "/metadata/uid").to_owned();
        let grace = grace(kind, &object, options);
        if finalizers(&object).is_empty() && grace == 0 {
            self.drop_object(kind, name);
            if kind.plural == "pods" {
                return target.show(&object);
            }
            return success(kind, &name.1, &uid);
        }
        if grace > 0 {
            self.follow_ups.push(FollowUp::PodEnds {
                name: name.clone(),
                uid,
            });
        }
        let deleting = object["metadata"]["deletionTimestamp"].is_string();
        if deleting && object["metadata"]["deletionGracePeriodSeconds"].as_i64() <= Some(grace) {
            return target.show(&object);
        }
        let mut marked = object;
        let time = self.time();
        let meta = metadata(&mut marked);
        meta.entry("deletionTimestamp").or_insert(json!(time));
        meta.insert("deletionGracePeriodSeconds".into(), json!(grace));
        if let Some(generation) = meta.get("generation").and_then(Value::as_i64)
            && !deleting
        {
            meta.insert("generation".into(), json!(generation + 1));
        }
        let marked = self.put(kind, name.clone(), marked);
        self.count_budgets(kind, Some(&name.0));
        target.show(&marked)
    }

    /// Removes an object for good, and lets those that depend on it know.
    pub fn drop_object(&mut self, kind: &Kind, name: &Name) {
        let Some(object) = self.remove(&kind.key(), name) else {
            return;
        };
        let owner = text(&object, "/metadata/uid").to_owned();
        self.follow_ups.push(FollowUp::Collect { owner });
        if kind.plural == "nodes" {
            let node = name.1.clone();
            self.follow_ups.push(FollowUp::RemovePods { node });
        }
        self.count_budgets(kind, Some(&name.0));
    }

    /// An object whose owner does not exist is garbage from the start.
    pub fn absent_owners(&mut self, object: &Value) {
        for owner in owners(object) {
            if !self.has_uid(&owner) {
                self.follow_ups.push(FollowUp::Collect { owner });
            }
        }
    }

    /// Executes a postponed follow-up.
    pub fn follow_up(&mut self, follow_up: FollowUp) {
        match follow_up {
            FollowUp::PodEnds { name, uid } => self.end_pod(&name, &uid),
            FollowUp::Collect { owner } => self.collect(&owner),
            FollowUp::RemovePods { node } => {
                let pods = self.all(&pods()).filter(|(_, pod)| text(pod, "/spec/nodeName") == node);
                let pods: Vec<(Name, String)> = pods
                    .map(|(name, pod)| (name.clone(), text(pod, "/metadata/uid").to_owned()))
                    .collect();
                pods.iter().for_each(|(name, uid)| self.end_pod(name, uid));
            }
        }
    }

    fn end_pod(&mut self, name: &Name, uid: &str) {
        let Some(mut pod) = self.get(&pods(), name).cloned() else {
            return;
        };
        let Some(kind) = self.kinds.get("", "pods").cloned() else {
            return;
        };
        if text(&pod, "/metadata/uid") != uid {
            return;
        }
        if finalizers(&pod).is_empty() {
            self.drop_object(&kind, name);
        } else {
            metadata(&mut pod).insert("deletionGracePeriodSeconds".into(), json!(0));
            self.put(&kind, name.clone(), pod);
        }
    }

    /// Deletes the dependents that have no other owner, and removes the reference from the others.
    fn collect(&mut self, owner: &str) {
        if self.has_uid(owner) {
            return;
        }
        let dependents = self
            .everything()
            .filter(|(_, _, object)| owners(object).iter().any(|uid| uid == owner));
        let dependents: Vec<_> = dependents
            .map(|(kind, name, object)| (kind.clone(), name.clone(), object.clone()))
            .collect();
        for (key, name, mut object) in dependents {
            let Some(kind) = self.kinds.get(&key.0, &key.1).cloned() else {
                continue;
            };
            if owners(&object).iter().any(|uid| self.has_uid(uid)) {
                if let Some(references) = object["metadata"]["ownerReferences"].as_array_mut() {
                    references.retain(|reference| reference["uid"] != owner);
                }
                self.put(&kind, name, object);
                continue;
            }
            let target = Target::whole(&kind, &name);
            self.delete_object(&kind, &name, object, &Value::Null, &target);
        }
    }
}

fn pods() -> super::kinds::Key {
    (String::new(), "pods".to_owned())
}

fn owners(object: &Value) -> Vec<String> {
    let references = object["metadata"]["ownerReferences"].as_array().into_iter().flatten();
    references
        .filter_map(|reference| reference["uid"].as_str().map(str::to_owned))
        .collect()
}

/// Returns the seconds that an object has before it is removed. Only Pods that run have any.
fn grace(kind: &Kind, object: &Value, options: &Value) -> i64 {
    let ended = matches!(text(object, "/status/phase"), "Succeeded" | "Failed");
    if kind.plural != "pods" || text(object, "/spec/nodeName").is_empty() || ended {
        return 0;
    }
    let own = object["spec"]["terminationGracePeriodSeconds"]
        .as_i64()
        .unwrap_or(GRACE_SECONDS);
    options["gracePeriodSeconds"].as_i64().unwrap_or(own)
}

pub fn check(kind: &Kind, name: &str, object: &Value, preconditions: &Value) -> Result<(), Failure> {
    let (uid, version) = (text(object, "/metadata/uid"), text(object, "/metadata/resourceVersion"));
    if let Some(given) = preconditions["uid"].as_str().filter(|given| *given != uid) {
        return Err(wrong_uid(kind, name, given, uid));
    }
    if let Some(given) = preconditions["resourceVersion"]
        .as_str()
        .filter(|given| *given != version)
    {
        let why = format!(
            "Precondition failed: ResourceVersion in precondition: {given}, ResourceVersion in object meta: {version}"
        );
        return Err(Failure::conflict(kind, name, &why));
    }
    Ok(())
}
