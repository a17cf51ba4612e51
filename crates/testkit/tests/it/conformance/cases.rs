//! The requests that both servers get.

use serde_json::{Value, json};

pub const MACHINES: &str = "/apis/machine.openshift.io/v1beta1/namespaces/$ns/machines";
const MAPS: &str = "/api/v1/namespaces/$ns/configmaps";
const PODS: &str = "/api/v1/namespaces/$ns/pods";
const BUDGETS: &str = "/apis/policy/v1/namespaces/$ns/poddisruptionbudgets";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/$ns/leases";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// One request. In path and body `$ns` is the namespace, `$uid.x` and `$rv.x` are of the object `x` as answered last, and
/// `$old.x` is the version before that.
pub struct Step {
    pub method: &'static str,
    pub path: String,
    pub media_type: &'static str,
    pub body: Value,
    pub until: Option<fn(&Value) -> bool>,
}

pub fn step(method: &'static str, path: String, media_type: &'static str, body: Value) -> Step {
    Step {
        method,
        path,
        media_type,
        body,
        until: None,
    }
}

pub fn get(path: &str, rest: &str) -> Step {
    step("GET", format!("{path}{rest}"), "", Value::Null)
}

pub fn post(path: &str, body: Value) -> Step {
    step("POST", path.to_owned(), "application/json", body)
}

pub fn put(path: &str, name: &str, body: Value) -> Step {
    step("PUT", format!("{path}/{name}"), "application/json", body)
}

pub fn patch(path: &str, name: &str, body: Value) -> Step {
    step("PATCH", format!("{path}/{name}"), MERGE, body)
}

pub fn delete(path: &str, rest: &str, body: Value) -> Step {
    step("DELETE", format!("{path}{rest}"), "application/json", body)
}

/// Asks until the answer is so.
pub fn until(step: Step, so: fn(&Value) -> bool) -> Step {
    Step {
        until: Some(so),
        ..step
    }
}

pub fn machine(name: &str, more: Value) -> Value {
    let mut machine = json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name},
        "spec": {"providerSpec": {"value": {"vmSize": "a"}}},
    });
    merge(&mut machine, &more);
    machine
}

pub fn map(name: &str, more: Value) -> Value {
    let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
    merge(&mut map, &more);
    map
}

pub fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

pub fn is_gone(answer: &Value) -> bool {
    answer["code"] == 404
}

pub fn cases() -> Vec<(&'static str, Vec<Step>)> {
    let m = MACHINES;
    vec![
        (
            "create",
            vec![
                post(
                    m,
                    machine(
                        "a",
                        json!({"status": {"phase": "Running"}, "unknown": 1, "spec": {"other": 1}}),
                    ),
                ),
                post(m, machine("a", json!({}))),
                post(
                    m,
                    json!({"apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {}}),
                ),
                post(m, machine("b", json!({"metadata": {"namespace": "elsewhere"}}))),
                post(m, machine("Not_A_Name", json!({}))),
                post(
                    m,
                    machine(
                        "c",
                        json!({"metadata": {"uid": "mine", "generation": 7, "deletionTimestamp": "2020-01-01T00:00:00Z"}}),
                    ),
                ),
                post(
                    MAPS,
                    map(
                        "d",
                        json!({"data": {"a": "b"}, "metadata": {"labels": {"x": "y"}, "finalizers": []}}),
                    ),
                ),
                post(
                    "/api/v1/namespaces/$ns/secrets",
                    json!({"metadata": {"name": "s"}, "stringData": {"a": "b"}, "data": {"c": "ZA=="}}),
                ),
                post("/api/v1/namespaces/$ns/nonsense", json!({})),
                post(
                    "/apis/machine.openshift.io/v9/namespaces/$ns/machines",
                    machine("z", json!({})),
                ),
            ],
        ),
        (
            "read",
            vec![
                get(m, "/nobody"),
                post(
                    MAPS,
                    map("l1", json!({"metadata": {"labels": {"app": "web", "n": "1"}}})),
                ),
                post(
                    MAPS,
                    map("l2", json!({"metadata": {"labels": {"app": "web", "n": "2"}}})),
                ),
                post(MAPS, map("l3", json!({"metadata": {"labels": {"app": "db"}}}))),
                get(MAPS, "?labelSelector=app%3Dweb"),
                get(MAPS, "?labelSelector=app%20in%20%28db%2Cx%29"),
                get(MAPS, "?labelSelector=app%2Cn%21%3D1"),
                get(MAPS, "?labelSelector=app%2C%21n"),
                get(MAPS, "?fieldSelector=metadata.name%3Dl2"),
                get(MAPS, "?labelSelector=app&limit=2"),
                delete(MAPS, "?labelSelector=app%3Dweb", json!({})),
                get(MAPS, "?labelSelector=app"),
            ],
        ),
        (
            "update",
            vec![
                post(m, machine("u", json!({}))),
                put(m, "u", machine("u", json!({}))),
                put(m, "u", machine("u", json!({"metadata": {"resourceVersion": "$rv.u"}}))),
                put(
                    m,
                    "u",
                    machine(
                        "u",
                        json!({"metadata": {"resourceVersion": "$rv.u"}, "spec": {"providerSpec": {"value": {"vmSize": "b"}}}}),
                    ),
                ),
                put(m, "u", machine("u", json!({"metadata": {"resourceVersion": "$old.u"}}))),
                put(
                    m,
                    "u",
                    machine("u", json!({"metadata": {"resourceVersion": "$rv.u", "uid": "another"}})),
                ),
                put(
                    m,
                    "u",
                    machine(
                        "u",
                        json!({"metadata": {"resourceVersion": "$rv.u", "labels": {"a": "b"}}, "spec": {"providerSpec": {"value": {"vmSize": "b"}}}, "status": {"phase": "x"}}),
                    ),
                ),
                put(
                    m,
                    "nobody",
                    machine("nobody", json!({"metadata": {"resourceVersion": "1"}})),
                ),
                put(
                    m,
                    "u/status",
                    machine(
                        "u",
                        json!({"metadata": {"resourceVersion": "$rv.u", "labels": {"c": "d"}}, "spec": {"providerSpec": {"value": {"vmSize": "c"}}}, "status": {"phase": "y"}}),
                    ),
                ),
                post(MAPS, map("um", json!({}))),
                put(MAPS, "um", map("um", json!({"data": {"a": "b"}}))),
                post(
                    LEASES,
                    json!({"metadata": {"name": "le"}, "spec": {"holderIdentity": "a"}}),
                ),
                put(
                    LEASES,
                    "le",
                    json!({"metadata": {"name": "le", "resourceVersion": "$rv.le"}, "spec": {"holderIdentity": "b"}}),
                ),
                put(
                    LEASES,
                    "le",
                    json!({"metadata": {"name": "le", "resourceVersion": "$old.le"}, "spec": {"holderIdentity": "c"}}),
                ),
            ],
        ),
        (
            "patch",
            vec![
                post(
                    m,
                    machine(
                        "p",
                        json!({"metadata": {"labels": {"a": "b"}, "annotations": {"x": "y"}}}),
                    ),
                ),
                patch(
                    m,
                    "p",
                    json!({"spec": {"providerSpec": {"value": {"vmSize": "b", "zone": "1"}}}}),
                ),
                patch(
                    m,
                    "p",
                    json!({"spec": {"providerSpec": {"value": {"zone": null}}}, "status": {"phase": "x"}}),
                ),
                patch(m, "p", json!({"spec": {"providerSpec": {"value": {"vmSize": "b"}}}})),
                patch(
                    m,
                    "p",
                    json!({"metadata": {"labels": {"a": null, "c": "d"}, "annotations": null}}),
                ),
                patch(
                    m,
                    "p/status",
                    json!({"metadata": {"labels": {"e": "f"}}, "spec": {"providerID": "z"}, "status": {"phase": "Running", "nothing": 1}}),
                ),
                patch(m, "p/status", json!({"status": {"phase": "Running"}})),
                patch(
                    m,
                    "p/status",
                    json!({"metadata": {"resourceVersion": "$old.p"}, "status": {"phase": "Failed"}}),
                ),
                patch(
                    m,
                    "p",
                    json!({"metadata": {"resourceVersion": "$rv.p", "uid": "$uid.p"}, "spec": {"providerID": "y"}}),
                ),
                patch(
                    m,
                    "p",
                    json!({"metadata": {"resourceVersion": "$old.p"}, "spec": {"providerID": "x"}}),
                ),
                patch(
                    m,
                    "p",
                    json!({"metadata": {"uid": "another"}, "spec": {"providerID": "x"}}),
                ),
                patch(m, "nobody", json!({"spec": {}})),
                step(
                    "PATCH",
                    format!("{m}/p"),
                    STRATEGIC,
                    json!({"spec": {"providerID": "w"}}),
                ),
                post(
                    "/api/v1/nodes",
                    json!({"metadata": {"name": "$ns-n", "labels": {"capstan.dev/kwok": "off"}}, "spec": {"providerID": "q"}, "status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Other", "status": "True"}]}}),
                ),
                patch(
                    "/api/v1/nodes",
                    "$ns-n",
                    json!({"spec": {"unschedulable": true}, "status": {"phase": "x"}}),
                ),
                step(
                    "PATCH",
                    "/api/v1/nodes/$ns-n/status".into(),
                    STRATEGIC,
                    json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
                ),
                patch("/api/v1/nodes", "$ns-n", json!({"spec": {"unschedulable": null}})),
                delete("/api/v1/nodes", "/$ns-n", Value::Null),
            ],
        ),
        (
            "delete",
            vec![
                post(m, machine("d", json!({}))),
                delete(m, "/d", json!({"preconditions": {"uid": "another"}})),
                delete(
                    m,
                    "/d",
                    json!({"preconditions": {"uid": "$uid.d", "resourceVersion": "1"}}),
                ),
                delete(m, "/d", json!({"preconditions": {"uid": "$uid.d"}})),
                delete(m, "/d", Value::Null),
                post(
                    m,
                    machine(
                        "f",
                        json!({"metadata": {"finalizers": ["capstan.dev/a", "capstan.dev/b"]}}),
                    ),
                ),
                delete(m, "/f", Value::Null),
                patch(
                    m,
                    "f",
                    json!({"metadata": {"finalizers": ["capstan.dev/a", "capstan.dev/c"]}}),
                ),
                delete(m, "/f", Value::Null),
                patch(
                    m,
                    "f",
                    json!({"metadata": {"finalizers": ["capstan.dev/a"]}, "spec": {"providerID": "x"}}),
                ),
                patch(m, "f/status", json!({"status": {"phase": "Deleting"}})),
                patch(
                    m,
                    "f",
                    json!({"metadata": {"resourceVersion": "$rv.f", "finalizers": []}}),
                ),
                get(m, "/f"),
                post(m, machine("f", json!({}))),
                patch(
                    m,
                    "f",
                    json!({"metadata": {"uid": "$uid.f", "finalizers": ["capstan.dev/a"]}}),
                ),
            ],
        ),
        (
            "owners",
            vec![
                post(MAPS, map("o1", json!({}))),
                post(MAPS, map("o2", json!({}))),
                post(
                    MAPS,
                    map(
                        "one",
                        json!({"metadata": {"ownerReferences": [
                    {"apiVersion": "v1", "kind": "ConfigMap", "name": "o1", "uid": "$uid.o1"}]}}),
                    ),
                ),
                post(
                    MAPS,
                    map(
                        "both",
                        json!({"metadata": {"ownerReferences": [
                    {"apiVersion": "v1", "kind": "ConfigMap", "name": "o1", "uid": "$uid.o1"},
                    {"apiVersion": "v1", "kind": "ConfigMap", "name": "o2", "uid": "$uid.o2"}]}}),
                    ),
                ),
                delete(MAPS, "/o1", Value::Null),
                until(get(MAPS, "/one"), is_gone),
                until(get(MAPS, "/both"), |map| {
                    map["metadata"]["ownerReferences"]
                        .as_array()
                        .is_some_and(|all| all.len() == 1)
                }),
                post(
                    MAPS,
                    map(
                        "late",
                        json!({"metadata": {"ownerReferences": [
                    {"apiVersion": "v1", "kind": "ConfigMap", "name": "o1", "uid": "$uid.o1"}]}}),
                    ),
                ),
                until(get(MAPS, "/late"), is_gone),
            ],
        ),
        ("evict", evictions()),
    ]
}

pub fn evictions() -> Vec<Step> {
    let pod = |name: &str, app: &str| {
        json!({"metadata": {"name": name, "labels": {"app": app}},
            "spec": {"nodeName": "$ns-e", "containers": [{"name": "c", "image": "none"}]}})
    };
    let budget = |name: &str| json!({"metadata": {"name": name}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}}});
    let evict = |name: &str, options: Value| {
        let body = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "$ns"},
            "deleteOptions": options});
        step("POST", format!("{PODS}/{name}/eviction"), "application/json", body)
    };
    let running: fn(&Value) -> bool = |pod| {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions
            .into_iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "True")
    };
    let healthy: fn(&Value) -> bool = |budget| budget["status"]["currentHealthy"] == 1;
    vec![
        post("/api/v1/nodes", json!({"metadata": {"name": "$ns-e"}})),
        post(PODS, pod("free", "free")),
        post(PODS, pod("kept", "kept")),
        until(get(PODS, "/free"), running),
        until(get(PODS, "/kept"), running),
        post(BUDGETS, budget("web")),
        until(get(BUDGETS, "/web"), healthy),
        evict("nobody", json!({})),
        evict("free", json!({"preconditions": {"uid": "another"}})),
        evict("free", json!({"preconditions": {"uid": "$uid.free"}})),
        until(get(PODS, "/free"), is_gone),
        evict("kept", json!({})),
        post(BUDGETS, budget("db")),
        until(get(BUDGETS, "/db"), healthy),
        evict("kept", json!({})),
        delete(BUDGETS, "/web", Value::Null),
        delete(BUDGETS, "/db", Value::Null),
        post(
            BUDGETS,
            json!({"metadata": {"name": "loose"}, "spec": {"minAvailable": 0, "selector": {"matchLabels": {"app": "kept"}}}}),
        ),
        until(get(BUDGETS, "/loose"), |budget| {
            budget["status"]["disruptionsAllowed"] == 1
        }),
        evict("kept", json!({})),
        until(get(PODS, "/kept"), is_gone),
        delete("/api/v1/nodes", "/$ns-e", Value::Null),
    ]
}
