//! One definition: names, columns, subresources, labels and schema.

use crate::{
    cel::{self, Rule},
    schema::Kind,
};
use k8s_openapi::{
    apiextensions_apiserver::pkg::apis::apiextensions::v1::{
        CustomResourceColumnDefinition, CustomResourceDefinition, CustomResourceDefinitionNames,
        CustomResourceDefinitionSpec, CustomResourceDefinitionVersion, CustomResourceSubresourceScale,
        CustomResourceSubresourceStatus, CustomResourceSubresources, CustomResourceValidation, JSONSchemaProps,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::{Value, json};

const API_VERSION_TEXT: &str = "API group and version of the object.";
const KIND_TEXT: &str = "Kind of the object, such as Machine.";

/// Builds a definition.
pub(super) struct Definition {
    kind: &'static str,
    plural: &'static str,
    group: &'static str,
    version: &'static str,
    scope: &'static str,
    description: &'static str,
    spec: Value,
    status: Option<Value>,
    short_names: &'static [&'static str],
    categories: &'static [&'static str],
    labels: Vec<(&'static str, &'static str)>,
    columns: Vec<CustomResourceColumnDefinition>,
    scale: bool,
    rules: Vec<Rule>,
}

impl Definition {
    pub(super) fn of<K: Kind>(description: &'static str) -> Self {
        Self {
            kind: K::KIND,
            plural: K::PLURAL,
            group: K::GROUP,
            version: K::VERSION,
            scope: K::SCOPE,
            description,
            spec: K::spec_schema(),
            status: K::status_schema(),
            short_names: &[],
            categories: &[],
            labels: Vec::new(),
            columns: Vec::new(),
            scale: false,
            rules: Vec::new(),
        }
    }

    pub(super) fn short(mut self, names: &'static [&'static str]) -> Self {
        self.short_names = names;
        self
    }

    pub(super) fn in_categories(mut self, names: &'static [&'static str]) -> Self {
        self.categories = names;
        self
    }

    pub(super) fn label(mut self, key: &'static str, value: &'static str) -> Self {
        self.labels.push((key, value));
        self
    }

    /// Adds a column that `kubectl get` shows.
    pub(super) fn column(self, name: &str, type_: &str, path: &str) -> Self {
        self.with_column(name, type_, path, None)
    }

    /// Adds a column that `kubectl get -o wide` shows.
    pub(super) fn wide(self, name: &str, type_: &str, path: &str) -> Self {
        self.with_column(name, type_, path, Some(1))
    }

    fn with_column(mut self, name: &str, type_: &str, path: &str, priority: Option<i32>) -> Self {
        self.columns.push(CustomResourceColumnDefinition {
            name: name.to_owned(),
            type_: type_.to_owned(),
            json_path: path.to_owned(),
            priority,
            ..Default::default()
        });
        self
    }

    pub(super) fn scalable(mut self) -> Self {
        self.scale = true;
        self
    }

    /// Changes the schema of `spec`, for rules that a type cannot carry itself.
    pub(super) fn spec(mut self, change: impl FnOnce(&mut Value)) -> Self {
        change(&mut self.spec);
        self
    }

    /// Adds a rule on the whole object.
    pub(super) fn rule(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    pub(super) fn build(self) -> CustomResourceDefinition {
        let names = CustomResourceDefinitionNames {
            kind: self.kind.to_owned(),
            list_kind: Some(format!("{}List", self.kind)),
            plural: self.plural.to_owned(),
            singular: Some(self.kind.to_lowercase()),
            short_names: owned(self.short_names),
            categories: owned(self.categories),
        };
        let labels = self
            .labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        CustomResourceDefinition {
            metadata: ObjectMeta {
                name: Some(format!("{}.{}", self.plural, self.group)),
                labels: (!self.labels.is_empty()).then(|| labels.collect()),
                ..Default::default()
            },
            spec: CustomResourceDefinitionSpec {
                group: self.group.to_owned(),
                names,
                scope: self.scope.to_owned(),
                versions: vec![self.served_version()],
                ..Default::default()
            },
            status: None,
        }
    }

    fn served_version(&self) -> CustomResourceDefinitionVersion {
        let scale = self.scale.then(|| CustomResourceSubresourceScale {
            spec_replicas_path: ".spec.replicas".to_owned(),
            status_replicas_path: ".status.replicas".to_owned(),
            label_selector_path: Some(".status.labelSelector".to_owned()),
        });
        let status = self.status.as_ref().map(|_| CustomResourceSubresourceStatus(json!({})));
        CustomResourceDefinitionVersion {
            name: self.version.to_owned(),
            served: true,
            storage: true,
            additional_printer_columns: (!self.columns.is_empty()).then(|| self.columns.clone()),
            subresources: status.is_some().then_some(CustomResourceSubresources { status, scale }),
            schema: Some(CustomResourceValidation {
                open_api_v3_schema: Some(self.schema()),
            }),
            ..Default::default()
        }
    }

    fn schema(&self) -> JSONSchemaProps {
        let mut root = json!({
            "type": "object",
            "description": self.description,
            "properties": {
                "apiVersion": { "type": "string", "description": API_VERSION_TEXT },
                "kind": { "type": "string", "description": KIND_TEXT },
                "metadata": { "type": "object" },
                "spec": self.spec,
            },
        });
        if let Some(status) = &self.status {
            root["properties"]["status"] = status.clone();
        }
        if !self.rules.is_empty() {
            cel::add(&mut root, self.rules.clone());
        }
        // The schema is made by our own types; a test renders every one of them.
        serde_json::from_value(root).unwrap_or_default()
    }
}

fn owned(words: &[&str]) -> Option<Vec<String>> {
    (!words.is_empty()).then(|| words.iter().map(|word| (*word).to_owned()).collect())
}
