//! The kinds of objects that the API server serves, and where it serves them.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion,
};
use reqwest::Url;
use serde_json::{Map, Value};

use super::answer::Failure;
use super::schema;

/// One kind of object.
#[derive(Clone, Debug)]
pub struct Kind {
    pub group: String,
    pub plural: String,
    pub kind: String,
    pub namespaced: bool,
    /// Whether status is a subresource of its own.
    pub status: bool,
    /// Whether the kind comes from a definition: its generation counts, and its updates name a version.
    pub custom: bool,
    /// The schema of each version, if there is one.
    versions: BTreeMap<String, Option<Value>>,
}

impl Kind {
    fn new(group: &str, version: &str, kind: &str, plural: &str, namespaced: bool, status: bool) -> Self {
        Self {
            group: group.to_owned(),
            plural: plural.to_owned(),
            kind: kind.to_owned(),
            namespaced,
            status,
            custom: false,
            versions: BTreeMap::from([(version.to_owned(), None)]),
        }
    }

    fn of(definition: &CustomResourceDefinition) -> Self {
        let spec = &definition.spec;
        let schema = |version: &CustomResourceDefinitionVersion| {
            let schema = version.schema.as_ref()?.open_api_v3_schema.as_ref()?;
            serde_json::to_value(schema).ok()
        };
        let served = spec.versions.iter().filter(|version| version.served);
        let status = |version: &CustomResourceDefinitionVersion| {
            version.subresources.as_ref().is_some_and(|all| all.status.is_some())
        };
        Self {
            group: spec.group.clone(),
            plural: spec.names.plural.clone(),
            kind: spec.names.kind.clone(),
            namespaced: spec.scope == "Namespaced",
            status: spec.versions.iter().any(status),
            custom: true,
            versions: served.map(|version| (version.name.clone(), schema(version))).collect(),
        }
    }

    pub fn key(&self) -> Key {
        (self.group.clone(), self.plural.clone())
    }

    /// `machines.machine.openshift.io`, or `pods`.
    pub fn qualified(&self) -> String {
        self.with_group(&self.plural)
    }

    /// `Machine.machine.openshift.io`, or `Pod`.
    pub fn qualified_kind(&self) -> String {
        self.with_group(&self.kind)
    }

    fn with_group(&self, name: &str) -> String {
        match self.group.as_str() {
            "" => name.to_owned(),
            group => format!("{name}.{group}"),
        }
    }

    pub fn api_version(&self, version: &str) -> String {
        match self.group.as_str() {
            "" => version.to_owned(),
            group => format!("{group}/{version}"),
        }
    }

    /// Whether an update may leave the version of the object open.
    pub fn updates_unconditionally(&self) -> bool {
        !self.custom && self.plural != "leases"
    }

    /// Removes fields that the schema does not have, and adds its defaults.
    pub fn prune(&self, version: &str, object: &mut Value) {
        if let Some(Some(schema)) = self.versions.get(version) {
            schema::prune(schema, object, true);
            schema::default(schema, object);
        }
    }
}

/// Group and plural name.
pub type Key = (String, String);

/// All kinds that are served.
pub struct Kinds(BTreeMap<Key, Kind>);

impl Kinds {
    /// Kubernetes' own kinds that we use.
    pub fn builtin() -> Self {
        let kinds = [
            ("", "v1", "Namespace", "namespaces", false, true),
            ("", "v1", "Node", "nodes", false, true),
            ("", "v1", "Pod", "pods", true, true),
            ("", "v1", "ReplicationController", "replicationcontrollers", true, true),
            ("", "v1", "Secret", "secrets", true, false),
            ("", "v1", "ConfigMap", "configmaps", true, false),
            ("", "v1", "Event", "events", true, false),
            ("events.k8s.io", "v1", "Event", "events", true, false),
            ("coordination.k8s.io", "v1", "Lease", "leases", true, false),
            (
                "policy",
                "v1",
                "PodDisruptionBudget",
                "poddisruptionbudgets",
                true,
                true,
            ),
            ("apps", "v1", "DaemonSet", "daemonsets", true, true),
            ("apps", "v1", "ReplicaSet", "replicasets", true, true),
        ];
        let mut all = Self(BTreeMap::new());
        for (group, version, kind, plural, namespaced, status) in kinds {
            all.add(Kind::new(group, version, kind, plural, namespaced, status));
        }
        all
    }

    pub fn define(&mut self, definition: &CustomResourceDefinition) {
        self.add(Kind::of(definition));
    }

    /// Serves a custom kind without a schema: nothing is pruned.
    pub fn define_free(&mut self, group: &str, version: &str, kind: &str, plural: &str) {
        let mut kind = Kind::new(group, version, kind, plural, true, true);
        kind.custom = true;
        self.add(kind);
    }

    fn add(&mut self, kind: Kind) {
        self.0.insert(kind.key(), kind);
    }

    pub fn get(&self, group: &str, plural: &str) -> Option<&Kind> {
        self.0.get(&(group.to_owned(), plural.to_owned()))
    }

    pub fn by_plural(&self, plural: &str) -> Option<&Kind> {
        self.0.values().find(|kind| kind.plural == plural)
    }

    /// Whether a path begins with a group and version that are served.
    pub fn serves(&self, path: &str) -> bool {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group, version) = match parts.as_slice() {
            ["api", version, ..] => ("", *version),
            ["apis", group, version, ..] => (*group, *version),
            _ => return false,
        };
        self.0
            .values()
            .any(|kind| kind.group == group && kind.versions.contains_key(version))
    }

    /// Returns the target of a path, if the path is served.
    pub fn resolve(&self, path: &str) -> Option<Target> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() && rest != ["status"] => (Some(*namespace), rest),
            rest => (None, rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (*plural, None, None),
            [plural, name] => (*plural, Some(*name), None),
            [plural, name, subresource] => (*plural, Some(*name), Some(*subresource)),
            _ => return None,
        };
        let kind = self.get(group, plural)?;
        let subresources: &[&str] = match plural {
            "pods" => &["status", "eviction"],
            _ if kind.status => &["status"],
            _ => &[],
        };
        if !kind.versions.contains_key(version) || subresource.is_some_and(|name| !subresources.contains(&name)) {
            return None;
        }
        Some(Target {
            kind: kind.clone(),
            version: version.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
            subresource: subresource.map(str::to_owned),
        })
    }
}

/// The target of a request.
#[derive(Clone, Debug)]
pub struct Target {
    pub kind: Kind,
    pub version: String,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

impl Target {
    /// One object in the kind's newest version.
    pub fn whole(kind: &Kind, (namespace, name): &(String, String)) -> Self {
        Self {
            version: kind.versions.keys().next_back().cloned().unwrap_or_default(),
            kind: kind.clone(),
            namespace: Some(namespace.clone()).filter(|namespace| !namespace.is_empty()),
            name: Some(name.clone()),
            subresource: None,
        }
    }

    /// The name in the path; a request without one is for all objects.
    pub fn name(&self) -> Result<&str, Failure> {
        self.name.as_deref().ok_or_else(Failure::not_allowed)
    }

    pub fn key(&self, name: &str) -> (String, String) {
        (self.namespace.clone().unwrap_or_default(), name.to_owned())
    }

    /// The object as this version shows it.
    pub fn show(&self, object: &Value) -> Value {
        let mut shown = Map::new();
        shown.insert("apiVersion".into(), self.kind.api_version(&self.version).into());
        shown.insert("kind".into(), self.kind.kind.clone().into());
        for (key, value) in object.as_object().into_iter().flatten() {
            if key != "apiVersion" && key != "kind" {
                shown.insert(key.clone(), value.clone());
            }
        }
        Value::Object(shown)
    }
}

/// The parameters of a request.
#[derive(Clone, Debug, Default)]
pub struct Query(BTreeMap<String, String>);

impl Query {
    pub fn parse(uri: &http::Uri) -> Self {
        let text = format!("http://in-process/?{}", uri.query().unwrap_or_default());
        let url = Url::parse(&text).ok();
        let pairs = url
            .iter()
            .flat_map(|url| url.query_pairs().into_owned().collect::<Vec<_>>());
        Self(pairs.collect())
    }

    pub fn get(&self, name: &str) -> &str {
        self.0.get(name).map(String::as_str).unwrap_or_default()
    }

    pub fn is_true(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1")
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name).parse().ok()
    }
}
