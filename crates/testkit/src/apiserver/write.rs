//! Create, update, patch.

use serde_json::{Value, json};

use super::answer::Failure;
use super::kinds::{Kind, Target};
use super::merge;
use super::store::{Store, finalizers, metadata, text};

/// The metadata that a client may not set.
const OWN: [&str; 6] = [
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
];

impl Store {
    pub fn create(&mut self, target: &Target, mut object: Value) -> Result<Value, Failure> {
        let kind = &target.kind;
        check_type(target, &object)?;
        let meta = metadata(&mut object);
        if meta
            .get("resourceVersion")
            .and_then(Value::as_str)
            .is_some_and(|version| !version.is_empty())
        {
            return Err(Failure::bad_request(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        for field in OWN {
            meta.remove(field);
        }
        if kind.namespaced {
            let namespace = target.namespace.clone().ok_or_else(Failure::not_allowed)?;
            let given = meta.get("namespace").and_then(Value::as_str).unwrap_or_default();
            if !given.is_empty() && given != namespace {
                let message = "the namespace of the provided object does not match the namespace sent on the request";
                return Err(Failure::bad_request(message));
            }
            meta.insert("namespace".into(), json!(namespace));
        }
        let name = self.name_for(target, &object)?;
        if !valid(&name) {
            let why = format!(
                "metadata.name: Invalid value: \"{name}\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'"
            );
            return Err(Failure::invalid(kind, &name, &why));
        }
        if self.get(&kind.key(), &target.key(&name)).is_some() {
            return Err(Failure::already_exists(kind, &name));
        }
        let (uid, time) = (self.rng.uid(), self.time());
        let meta = metadata(&mut object);
        meta.insert("name".into(), json!(name));
        meta.insert("uid".into(), json!(uid));
        meta.insert("creationTimestamp".into(), json!(time));
        if kind.custom {
            meta.insert("generation".into(), json!(1));
        }
        // The kubelet registers its Node with a status; every other status is written by itself.
        if kind.status && kind.plural != "nodes" {
            object.as_object_mut().map(|fields| fields.remove("status"));
        }
        self.normalize(target, &mut object);
        let created = self.put(kind, target.key(&name), object);
        self.absent_owners(&created);
        self.count_budgets(kind, target.namespace.as_deref());
        Ok(created)
    }

    fn name_for(&mut self, target: &Target, object: &Value) -> Result<String, Failure> {
        let name = text(object, "/metadata/name");
        if !name.is_empty() {
            return Ok(name.to_owned());
        }
        let prefix = text(object, "/metadata/generateName").to_owned();
        if prefix.is_empty() {
            let why = "metadata.name: Required value: name or generateName is required";
            return Err(Failure::invalid(&target.kind, "", why));
        }
        loop {
            let name = format!("{prefix}{}", self.rng.suffix());
            if self.get(&target.kind.key(), &target.key(&name)).is_none() {
                return Ok(name);
            }
        }
    }

    pub fn update(&mut self, target: &Target, new: Value) -> Result<Value, Failure> {
        let (kind, name) = (&target.kind, target.name()?.to_owned());
        check_type(target, &new)?;
        let old = self.existing(target)?;
        let version = text(&new, "/metadata/resourceVersion");
        if version.is_empty() && !kind.updates_unconditionally() {
            let why = "metadata.resourceVersion: Invalid value: 0: must be specified for an update";
            return Err(Failure::invalid(kind, &name, why));
        }
        let uid = text(&new, "/metadata/uid");
        if !uid.is_empty() && uid != text(&old, "/metadata/uid") {
            return Err(wrong_uid(kind, &name, uid, text(&old, "/metadata/uid")));
        }
        self.replace(target, &old, new)
    }

    pub fn patch(&mut self, target: &Target, media_type: &str, patch: &Value) -> Result<Value, Failure> {
        let old = self.existing(target)?;
        let mut new = old.clone();
        match media_type {
            "application/merge-patch+json" => merge::merge(&mut new, patch),
            "application/strategic-merge-patch+json" if !target.kind.custom => merge::strategic(&mut new, patch),
            other => return Err(Failure::unsupported(other)),
        }
        let uid = text(&new, "/metadata/uid");
        if uid != text(&old, "/metadata/uid") {
            let why = format!("metadata.uid: Invalid value: \"{uid}\": field is immutable");
            return Err(Failure::invalid(&target.kind, target.name()?, &why));
        }
        self.replace(target, &old, new)
    }

    pub fn existing(&self, target: &Target) -> Result<Value, Failure> {
        let name = target.name()?;
        let found = self.get(&target.kind.key(), &target.key(name));
        found.cloned().ok_or_else(|| Failure::not_found(&target.kind, name))
    }

    /// Replaces `old` by `new`, except for the parts that the subresource may not change.
    fn replace(&mut self, target: &Target, old: &Value, mut new: Value) -> Result<Value, Failure> {
        let (kind, name) = (&target.kind, target.name()?.to_owned());
        let version = text(&new, "/metadata/resourceVersion");
        if !version.is_empty() && version != text(old, "/metadata/resourceVersion") {
            return Err(Failure::stale(kind, &name));
        }
        if text(&new, "/metadata/name") != name {
            return Err(Failure::bad_request(
                "the name of the object does not match the name on the URL",
            ));
        }
        match target.subresource.as_deref() {
            Some("status") => {
                let status = new["status"].take();
                new = old.clone();
                set(&mut new, "status", status);
            }
            _ if kind.status => set(&mut new, "status", old["status"].clone()),
            _ => {}
        }
        let meta = metadata(&mut new);
        for field in OWN.into_iter().chain(["namespace"]) {
            match old["metadata"].get(field) {
                Some(value) => meta.insert(field.into(), value.clone()),
                None => meta.remove(field),
            };
        }
        let deleting = old["metadata"]["deletionTimestamp"].is_string();
        let added: Vec<&str> = finalizers(&new)
            .into_iter()
            .filter(|f| !finalizers(old).contains(f))
            .collect();
        if deleting && !added.is_empty() {
            let why = format!(
                "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found \
                 new finalizers []string{{{}}}",
                added.iter().map(|f| format!("\"{f}\"")).collect::<Vec<_>>().join(", ")
            );
            return Err(Failure::invalid(kind, &name, &why));
        }
        self.normalize(target, &mut new);
        if kind.custom && specification(&new, kind) != specification(old, kind) {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(0);
            metadata(&mut new).insert("generation".into(), json!(generation + 1));
        }
        let key = target.key(&name);
        if deleting && finalizers(&new).is_empty() && self.may_go(kind, &new) {
            // The object is removed with its last finalizer.
            self.drop_object(kind, &key);
            return Ok(new);
        }
        // An update that changes nothing is not written.
        if new == *old {
            return Ok(new);
        }
        let written = self.put(kind, key, new);
        self.count_budgets(kind, target.namespace.as_deref());
        Ok(written)
    }

    /// Whether the object may be removed: a Pod on a Node only when its kubelet has ended it.
    fn may_go(&self, kind: &Kind, object: &Value) -> bool {
        kind.plural != "pods" || object["metadata"]["deletionGracePeriodSeconds"] == 0
    }

    /// Brings an object into the form in which it is kept.
    fn normalize(&self, target: &Target, object: &mut Value) {
        if let Some(fields) = object.as_object_mut() {
            fields.remove("apiVersion");
            fields.remove("kind");
        }
        merge::drop_nulls(object);
        let meta = metadata(object);
        meta.remove("managedFields");
        for field in ["labels", "annotations", "finalizers", "ownerReferences"] {
            let empty = |value: &Value| {
                value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
            };
            if meta.get(field).is_some_and(empty) {
                meta.remove(field);
            }
        }
        if target.kind.plural == "secrets" {
            let texts = object["stringData"].take();
            object.as_object_mut().map(|fields| fields.remove("stringData"));
            for (key, value) in texts.as_object().into_iter().flatten() {
                object["data"][key] = json!(encode(value.as_str().unwrap_or_default()));
            }
            if object["type"].is_null() {
                object["type"] = json!("Opaque");
            }
        }
        target.kind.prune(&target.version, object);
    }
}

pub fn wrong_uid(kind: &Kind, name: &str, given: &str, uid: &str) -> Failure {
    let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {uid}");
    Failure::conflict(kind, name, &why)
}

fn set(object: &mut Value, field: &str, value: Value) {
    match value {
        Value::Null => drop(object.as_object_mut().map(|fields| fields.remove(field))),
        value => object[field] = value,
    }
}

/// Returns the parts whose change increases the generation.
fn specification(object: &Value, kind: &Kind) -> Value {
    let mut rest = object.clone();
    if let Some(fields) = rest.as_object_mut() {
        fields.remove("metadata");
        if kind.status {
            fields.remove("status");
        }
    }
    rest
}

fn check_type(target: &Target, object: &Value) -> Result<(), Failure> {
    if !object.is_object() {
        return Err(Failure::bad_request("the body is not an object"));
    }
    let wanted = target.kind.api_version(&target.version);
    let (version, kind) = (text(object, "/apiVersion"), text(object, "/kind"));
    let fits = (version.is_empty() || version == wanted) && (kind.is_empty() || kind == target.kind.kind);
    if fits {
        return Ok(());
    }
    Err(Failure::bad_request(&format!(
        "the API version in the data ({version}) does not match the expected API version ({wanted})"
    )))
}

fn valid(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    name.len() <= 253 && name.chars().all(inner) && name.starts_with(edge) && name.ends_with(edge)
}

fn encode(text: &str) -> String {
    use base64::Engine;
    base64::prelude::BASE64_STANDARD.encode(text)
}
