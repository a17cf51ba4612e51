//! Answers to admission reviews. Pure: a request goes in, findings or a patch come out.
//!
//! Invariant: an object that is being deleted, or whose provider spec the update does not change, is never refused for
//! its provider spec: a bad object that was made while the webhook was away can still be repaired, finished and deleted.

use capstan_api::openshift::{
    AzureMachineProviderSpec, CLUSTER_ID_LABEL, MACHINE_FINALIZER, Machine, MachineSet, ProviderSpec,
};
use capstan_core::validate::openshift::{self as rules, DISK_ANNOTATIONS, GENERATED_SUFFIX, is_azure};
use capstan_core::validate::{FieldError, Findings};
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::ResourceExt;
use kube::core::admission::{AdmissionRequest, AdmissionResponse};
use kube::core::{DynamicObject, Selector, SelectorExt};
use serde::Serialize;
use serde_json::{Value, json};

/// The API server cuts longer warnings.
const LONGEST_WARNING: usize = 250;

/// A request, with its objects as plain values. An object that is not there is null.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub kind: String,
    pub namespace: String,
    pub user: UserInfo,
    pub object: Value,
    pub old_object: Value,
}

/// Returns who sent a request, and for which namespace; the objects in it are dropped.
pub fn sender(request: Request) -> (UserInfo, String) {
    (request.user, request.namespace)
}

impl From<AdmissionRequest<DynamicObject>> for Request {
    fn from(request: AdmissionRequest<DynamicObject>) -> Self {
        let plain = |object: Option<DynamicObject>| serde_json::to_value(object).unwrap_or_default();
        Self {
            kind: request.kind.kind,
            namespace: request.namespace.unwrap_or_default(),
            user: request.user_info,
            object: plain(request.object),
            old_object: plain(request.old_object),
        }
    }
}

/// One operation of a JSON patch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Operation {
    op: &'static str,
    path: String,
    value: Value,
}

/// Refuses the request if there are errors, with all of them; passes the warnings on.
pub fn answer(mut response: AdmissionResponse, findings: Findings) -> AdmissionResponse {
    if !findings.is_ok() {
        response = response.deny(findings.message());
        response.result.code = 422;
        response.result.reason = "Invalid".to_owned();
    }
    let warnings: Vec<String> = findings.warnings.into_iter().map(shorten).collect();
    response.warnings = (!warnings.is_empty()).then_some(warnings);
    response
}

/// Answers with a patch, if there is anything to change.
pub fn patched(response: AdmissionResponse, operations: &[Operation]) -> AdmissionResponse {
    let patch = serde_json::to_value(operations).and_then(serde_json::from_value);
    match patch {
        Ok(patch) if !operations.is_empty() => response.clone().with_patch(patch).unwrap_or(response),
        _ => response,
    }
}

pub fn validate(request: &Request) -> Findings {
    match request.kind.as_str() {
        Machine::KIND => validate_machine(request),
        MachineSet::KIND => validate_set(request),
        _ => Findings::default(),
    }
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Option<T> {
    serde_json::from_value(value.clone()).ok()
}

/// Returns the provider spec that a request brings. `None`: the request does not change it.
pub fn changed_spec(request: &Request) -> Option<AzureMachineProviderSpec> {
    let pointer = match request.kind.as_str() {
        Machine::KIND => "/spec/providerSpec/value",
        MachineSet::KIND => "/spec/template/spec/providerSpec/value",
        _ => return None,
    };
    let value = request.object.pointer(pointer)?;
    let deleting = request.object.pointer("/metadata/deletionTimestamp").is_some();
    if deleting || !is_azure(value) || request.old_object.pointer(pointer) == Some(value) {
        return None;
    }
    AzureMachineProviderSpec::from_raw(value).ok()
}

fn validate_machine(request: &Request) -> Findings {
    let Some(machine) = read::<Machine>(&request.object) else {
        return Findings::default();
    };
    let old = read::<Machine>(&request.old_object);
    if machine.metadata.deletion_timestamp.is_some() {
        let errors =
            old.map(|old| rules::validate_hooks_update(&old.spec.lifecycle_hooks, &machine.spec.lifecycle_hooks));
        return Findings {
            errors: errors.unwrap_or_default(),
            ..Findings::default()
        };
    }
    let spec = &machine.spec.provider_spec;
    let annotation = |key: &str| machine.annotations().get(key);
    let same_spec = old.as_ref().is_some_and(|old| old.spec.provider_spec == *spec);
    let same = |key: &&str| {
        old.as_ref()
            .is_some_and(|old| old.annotations().get(*key) == annotation(key))
    };
    let wrong = match same_spec && DISK_ANNOTATIONS.iter().all(same) {
        true => Vec::new(),
        false => wrong_annotations(annotation, spec),
    };
    if same_spec {
        return Findings {
            errors: wrong,
            ..Findings::default()
        };
    }
    let generated = machine
        .metadata
        .generate_name
        .as_ref()
        .map(|prefix| format!("{prefix}xxxxx"));
    let name = machine.metadata.name.clone().or(generated).unwrap_or_default();
    let mut findings = provider_spec(&name, &request.namespace, spec);
    findings.errors.extend(wrong);
    findings
}

/// Returns what is wrong with the annotations about disks: each disk that they name has to be in the spec.
fn wrong_annotations<'a>(annotation: impl Fn(&str) -> Option<&'a String>, spec: &ProviderSpec) -> Vec<FieldError> {
    let value = spec.value.as_ref();
    value
        .map(|value| rules::validate_annotations(annotation, value))
        .unwrap_or_default()
}

/// The annotation that a set's machines get: the template's, else the set's own.
fn annotation_of<'a>(set: &'a MachineSet, key: &str) -> Option<&'a String> {
    let own = set.annotations().get(key);
    set.spec.template.metadata.annotations.get(key).or(own)
}

fn validate_set(request: &Request) -> Findings {
    let Some(set) = read::<MachineSet>(&request.object) else {
        return Findings::default();
    };
    if set.metadata.deletion_timestamp.is_some() {
        return Findings::default();
    }
    let old = read::<MachineSet>(&request.old_object);
    let mut findings = Findings::default();
    if old.as_ref().is_some_and(|old| old.spec.selector != set.spec.selector) {
        findings
            .errors
            .push(FieldError::forbidden("spec.selector", "selector is immutable"));
    }
    let labels = &set.spec.template.metadata.labels;
    if !Selector::try_from(set.spec.selector.clone()).is_ok_and(|selector| selector.matches(labels)) {
        let text = "`selector` does not match template `labels`";
        findings.errors.push(FieldError::invalid(
            "spec.template.metadata.labels",
            json!(labels),
            text,
        ));
    }
    let template = &set.spec.template.spec.provider_spec;
    let new_spec = old
        .as_ref()
        .is_none_or(|old| old.spec.template.spec.provider_spec != *template);
    let new = |key: &&str| {
        old.as_ref()
            .is_none_or(|old| annotation_of(old, key) != annotation_of(&set, key))
    };
    if new_spec || DISK_ANNOTATIONS.iter().any(new) {
        let wrong = wrong_annotations(|key| annotation_of(&set, key), template);
        findings.errors.extend(wrong);
    }
    if new_spec {
        let name = format!("{}{}", set.name_any(), "x".repeat(GENERATED_SUFFIX));
        let found = provider_spec(&name, &request.namespace, template);
        findings.errors.extend(found.errors);
        findings.warnings.extend(found.warnings);
    }
    findings
}

fn provider_spec(machine: &str, namespace: &str, provider: &ProviderSpec) -> Findings {
    let Some(value) = &provider.value else {
        return Findings {
            errors: vec![FieldError::required("providerSpec.value", "a value must be provided")],
            ..Findings::default()
        };
    };
    let mut findings = rules::validate_raw(machine, value, None);
    findings.errors.extend(rules::validate_user_data(namespace, value));
    findings
}

/// Returns the patch that fills in what users leave out. `cluster_id` is for objects that do not name their cluster.
/// A provider spec that an update does not change stays as it is: filled in, it would count as changed and be checked.
pub fn defaults(request: &Request, cluster_id: &str) -> Vec<Operation> {
    let mut operations = match request.kind.as_str() {
        Machine::KIND => {
            let mut operations = default_machine(&request.object, cluster_id);
            operations.extend(
                request
                    .old_object
                    .is_null()
                    .then(|| with_finalizer(&request.object))
                    .flatten(),
            );
            operations
        }
        MachineSet::KIND => default_set(&request.object, cluster_id),
        _ => Vec::new(),
    };
    let old = &request.old_object;
    operations.retain(|operation| {
        let untouched = !old.is_null() && old.pointer(&operation.path) == request.object.pointer(&operation.path);
        !untouched || !operation.path.ends_with("/providerSpec/value")
    });
    operations
}

fn default_machine(object: &Value, cluster_id: &str) -> Vec<Operation> {
    let Some(machine) = read::<Machine>(object) else {
        return Vec::new();
    };
    if machine.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    let labelled = machine
        .labels()
        .get(CLUSTER_ID_LABEL)
        .filter(|id| !id.is_empty())
        .cloned();
    let mut operations = Vec::new();
    if labelled.is_none() && !cluster_id.is_empty() {
        let mut labels = machine.labels().clone();
        labels.insert(CLUSTER_ID_LABEL.to_owned(), cluster_id.to_owned());
        operations.push(Operation {
            op: "add",
            path: "/metadata/labels".to_owned(),
            value: json!(labels),
        });
    }
    let cluster_id = labelled.unwrap_or_else(|| cluster_id.to_owned());
    operations.extend(default_provider_spec(
        &machine.spec.provider_spec,
        "/spec/providerSpec/value",
        &cluster_id,
    ));
    operations
}

/// A new machine gets our finalizer with its creation: one write less, and no moment in which it can be deleted unseen.
fn with_finalizer(object: &Value) -> Option<Operation> {
    let machine = read::<Machine>(object)?;
    let azure = machine.spec.provider_spec.value.as_ref().is_some_and(is_azure);
    let there = machine
        .finalizers()
        .iter()
        .any(|finalizer| finalizer == MACHINE_FINALIZER);
    let mut finalizers = machine.finalizers().to_vec();
    finalizers.push(MACHINE_FINALIZER.to_owned());
    (azure && !there).then(|| Operation {
        op: "add",
        path: "/metadata/finalizers".to_owned(),
        value: json!(finalizers),
    })
}

fn default_set(object: &Value, cluster_id: &str) -> Vec<Operation> {
    let Some(set) = read::<MachineSet>(object) else {
        return Vec::new();
    };
    if set.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    let template = &set.spec.template;
    let labelled = [&template.metadata.labels, set.labels()]
        .into_iter()
        .find_map(|l| l.get(CLUSTER_ID_LABEL));
    let cluster_id = labelled.map_or(cluster_id, String::as_str);
    let path = "/spec/template/spec/providerSpec/value";
    default_provider_spec(&template.spec.provider_spec, path, cluster_id)
        .into_iter()
        .collect()
}

fn default_provider_spec(provider: &ProviderSpec, path: &str, cluster_id: &str) -> Option<Operation> {
    let value = provider.value.as_ref().filter(|value| is_azure(value))?;
    let spec = AzureMachineProviderSpec::from_raw(value).ok()?;
    let filled = rules::with_defaults(value, &spec, cluster_id);
    (filled != *value).then(|| Operation {
        op: "replace",
        path: path.to_owned(),
        value: filled,
    })
}

/// Returns a warning of the length that the API server passes on.
pub fn shorten(mut warning: String) -> String {
    if let Some((cut, _)) = warning.char_indices().nth(LONGEST_WARNING) {
        warning.truncate(cut);
    }
    warning
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: &str, object: Value, old: Value) -> Request {
        Request {
            kind: kind.into(),
            namespace: "n".into(),
            object,
            old_object: old,
            ..Request::default()
        }
    }

    fn is_allowed(findings: &Findings) -> bool {
        findings.is_ok()
    }

    fn machine(value: Value) -> Value {
        json!({"metadata": {"name": "m"}, "spec": {"providerSpec": {"value": value}}})
    }

    fn bad() -> Value {
        json!({"vmSize": "Standard_D4s_v3", "dataDisks": [
            {"nameSuffix": "a", "diskSizeGB": 1, "lun": 64, "deletionPolicy": "Keep"},
        ]})
    }

    fn refused(findings: &Findings) -> String {
        findings.message()
    }

    #[test]
    fn all_errors_of_an_object_are_said_at_once() {
        let response = validate(&request("Machine", machine(bad()), Value::Null));
        let message = refused(&response);
        assert!(!is_allowed(&response));
        for part in [
            "providerSpec.dataDisks[0].diskSizeGB: Invalid value: 1: diskSizeGB must be provided and at least 4GB in size",
            "providerSpec.dataDisks[0].lun: Invalid value: 64: must be greater than or equal to 0 and less than 64",
            "providerSpec.dataDisks[0].deletionPolicy: Invalid value: \"Keep\": must be either Delete or Detach",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_bad_object_can_still_be_finished_and_deleted() {
        let old = machine(bad());
        let mut new = old.clone();
        new["metadata"]["finalizers"] = json!(["x"]);
        assert!(is_allowed(&validate(&request("Machine", new.clone(), old.clone()))));
        let filled = defaults(&request("Machine", new.clone(), old.clone()), "");
        assert_eq!(filled, [], "what is filled in would count as changed");
        new["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        new["spec"]["providerSpec"]["value"]["vmSize"] = json!("");
        assert!(is_allowed(&validate(&request("Machine", new, old))));
    }

    #[test]
    fn mounts_of_disks_that_are_not_there_are_refused_and_an_old_mistake_is_not() {
        let with = |mounts: &str| json!({"capstan.dev/disk-mounts": mounts});
        let value = json!({"vmSize": "Standard_D4s_v3", "zone": "1", "vnet": "v", "subnet": "s",
            "image": {"resourceID": "/subscriptions/s/image"}, "osDisk": {"diskSizeGB": 128},
            "userDataSecret": {"name": "u"}, "credentialsSecret": {"name": "c", "namespace": "n"},
            "dataDisks": [{"nameSuffix": "a", "diskSizeGB": 4, "lun": 0, "deletionPolicy": "Delete"}]});
        let mut good = machine(value.clone());
        good["metadata"]["annotations"] = with("lun0:/data:xfs");
        let mut wrong = good.clone();
        wrong["metadata"]["annotations"] = with("lun1:/data:xfs");
        let checked = |new: &Value, old: &Value| refused(&validate(&request("Machine", new.clone(), old.clone())));
        assert_eq!(checked(&good, &Value::Null), "");
        for old in [&Value::Null, &good] {
            let message = checked(&wrong, old);
            assert!(
                message.contains("metadata.annotations[capstan.dev/disk-mounts]"),
                "{message}"
            );
        }
        let mut touched = wrong.clone();
        touched["metadata"]["labels"] = json!({"a": "b"});
        assert_eq!(
            checked(&touched, &wrong),
            "",
            "what an update leaves alone is not held against it"
        );

        let mut set = json!({"metadata": {"name": "s", "annotations": with("lun1:/data:xfs")}, "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"providerSpec": {"value": value}}},
        }});
        let message = refused(&validate(&request("MachineSet", set.clone(), Value::Null)));
        assert!(message.contains("no data disk"), "{message}");
        set["spec"]["template"]["metadata"]["annotations"] = with("lun0:/data:xfs");
        let message = refused(&validate(&request("MachineSet", set, Value::Null)));
        assert_eq!(message, "", "the template's own come first");
    }

    #[test]
    fn hooks_cannot_be_added_while_a_machine_is_being_deleted() {
        let mut old = machine(bad());
        old["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        let mut new = old.clone();
        new["spec"]["lifecycleHooks"] = json!({"preDrain": [{"name": "late", "owner": "me"}]});
        let response = validate(&request("Machine", new, old));
        assert!(
            refused(&response).contains("spec.lifecycleHooks.preDrain: Forbidden"),
            "{response:?}"
        );
    }

    #[test]
    fn machines_of_other_clouds_pass_by() {
        let other = machine(json!({"kind": "AWSMachineProviderConfig"}));
        assert!(is_allowed(&validate(&request("Machine", other.clone(), Value::Null))));
        let patch = defaults(&request("Machine", other, Value::Null), "c");
        assert_eq!(patch.len(), 1, "the label only");
    }

    #[test]
    fn sizes_are_looked_up_for_what_a_request_brings_anew() {
        let of = |object: &Value, old: Value| changed_spec(&request("Machine", object.clone(), old));
        let mut object = machine(json!({"vmSize": "Standard_B1s", "location": "eastus"}));
        let spec = of(&object, Value::Null).unwrap();
        assert_eq!(spec.vm_size.as_deref(), Some("Standard_B1s"));
        assert_eq!(of(&object, object.clone()), None, "nothing new");
        assert!(of(&object, machine(json!({"vmSize": "Standard_B2s"}))).is_some());
        object["metadata"]["deletionTimestamp"] = json!("2022-01-28T00:00:00Z");
        assert_eq!(of(&object, Value::Null), None, "it goes");
        assert_eq!(
            of(&machine(json!({"kind": "AWSMachineProviderConfig"})), Value::Null),
            None
        );
        let set = json!({"spec": {"template": {"spec": {"providerSpec": {"value": {"vmSize": "Standard_B1s"}}}}}});
        assert!(changed_spec(&request("MachineSet", set, Value::Null)).is_some());
    }

    #[test]
    fn a_selector_must_match_and_may_not_change() {
        let set = |selector: &str, label: &str| {
            json!({"metadata": {"name": "s"}, "spec": {
                "selector": {"matchLabels": {"a": selector}},
                "template": {"metadata": {"labels": {"a": label}}, "spec": {"providerSpec": {"value": {"kind": "Other"}}}},
            }})
        };
        let response = validate(&request("MachineSet", set("x", "y"), set("z", "y")));
        let message = refused(&response);
        assert!(
            message.contains("spec.selector: Forbidden: selector is immutable"),
            "{message}"
        );
        assert!(
            message.contains("`selector` does not match template `labels`"),
            "{message}"
        );
        assert!(is_allowed(&validate(&request(
            "MachineSet",
            set("x", "x"),
            Value::Null
        ))));
    }

    #[test]
    fn defaults_are_those_that_users_know() {
        let patch = defaults(
            &request("Machine", machine(json!({"location": "westeurope"})), Value::Null),
            "demo",
        );
        let patch = serde_json::to_value(patch).unwrap();
        assert_eq!(patch[0]["value"][CLUSTER_ID_LABEL], "demo");
        let value = &patch[1]["value"];
        assert_eq!(value["vmSize"], "Standard_D4s_V3");
        assert_eq!(
            (&value["vnet"], &value["subnet"]),
            (&json!("demo-vnet"), &json!("demo-worker-subnet"))
        );
        assert_eq!(value["userDataSecret"]["name"], "worker-user-data");
        assert_eq!(value["location"], "westeurope");
        assert_eq!(
            patch[2]["value"],
            json!([MACHINE_FINALIZER]),
            "a new machine is guarded from the start"
        );
    }

    #[test]
    fn a_complete_object_is_left_alone() {
        let first = defaults(&request("Machine", machine(json!({})), Value::Null), "demo");
        let patch = serde_json::to_value(first).unwrap();
        let mut object = machine(patch[1]["value"].clone());
        object["metadata"]["labels"] = patch[0]["value"].clone();
        object["metadata"]["finalizers"] = patch[2]["value"].clone();
        assert_eq!(defaults(&request("Machine", object, Value::Null), "demo"), []);
    }

    #[test]
    fn a_machine_takes_its_user_data_from_its_own_namespace() {
        let of = |namespace: &str| {
            let value = json!({"userDataSecret": {"name": "u", "namespace": namespace}});
            refused(&validate(&request("Machine", machine(value), Value::Null)))
        };
        assert!(
            of("kube-system").contains("providerSpec.userDataSecret.namespace: Invalid value"),
            "{}",
            of("kube-system")
        );
        assert!(!of("n").contains("userDataSecret"), "{}", of("n"));
    }

    #[test]
    fn an_answer_carries_code_reason_message_and_patch() {
        let review = json!({"uid": "u", "kind": {"group": "g", "version": "v", "kind": "Machine"},
            "resource": {"group": "g", "version": "v", "resource": "machines"}, "operation": "CREATE",
            "userInfo": {"username": "me"}, "namespace": "n", "object": {"metadata": {"name": "m"}}});
        let admission: AdmissionRequest<DynamicObject> = serde_json::from_value(review).unwrap();
        let response = AdmissionResponse::from(&admission);
        let findings = Findings {
            errors: vec![FieldError::required("spec.x", "x")],
            warnings: vec!["careful".into()],
        };
        let refused = serde_json::to_value(answer(response.clone(), findings)).unwrap();
        assert_eq!((&refused["uid"], &refused["allowed"]), (&json!("u"), &json!(false)));
        assert_eq!(
            (&refused["status"]["code"], &refused["warnings"]),
            (&json!(422), &json!(["careful"]))
        );
        let request = Request::from(admission);
        assert_eq!(
            (request.namespace.as_str(), request.user.username.as_deref()),
            ("n", Some("me"))
        );
        assert!(request.old_object.is_null());
        let patched = serde_json::to_value(patched(response.clone(), &defaults(&request, "demo"))).unwrap();
        assert_eq!(
            (&patched["allowed"], &patched["patchType"]),
            (&json!(true), &json!("JSONPatch"))
        );
        assert_eq!(super::patched(response, &[]).patch, None);
    }
}
