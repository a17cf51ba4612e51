//! Manifests as users keep them: files with one or several YAML documents, lists, or standard input.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::Value;

/// One object of a file.
pub struct Object {
    /// The file it came from, as the user named it.
    pub source: String,
    pub value: Value,
}

impl Object {
    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    pub fn api_version(&self) -> &str {
        self.text("/apiVersion")
    }

    /// The API group, without the version.
    pub fn group(&self) -> &str {
        self.api_version().split_once('/').map_or("", |(group, _)| group)
    }

    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    pub fn namespace(&self) -> &str {
        self.text("/metadata/namespace")
    }

    /// `file: Kind namespace/name`
    pub fn describe(&self) -> String {
        let namespace = self.namespace();
        let slash = if namespace.is_empty() { "" } else { "/" };
        format!("{}: {} {namespace}{slash}{}", self.source, self.kind(), self.name())
    }

    /// The object as one of our types; the error names the file and the object.
    pub fn typed<T: serde::de::DeserializeOwned>(&self) -> anyhow::Result<T> {
        serde_json::from_value(self.value.clone()).with_context(|| self.describe())
    }

    fn text(&self, pointer: &str) -> &str {
        self.value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }
}

/// Reads every object of a file; `-` is standard input. Lists are taken apart, empty documents passed over.
pub fn read(path: &Path) -> anyhow::Result<Vec<Object>> {
    let source = path.display().to_string();
    let text = if source == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
        text
    } else {
        std::fs::read_to_string(path).with_context(|| source.clone())?
    };
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).with_context(|| format!("{source}: not YAML"))?;
    let mut objects = Vec::new();
    for value in documents {
        match value {
            Value::Null => {}
            Value::Object(map) if map.get("items").is_some_and(Value::is_array) => {
                let items = map.get("items").and_then(Value::as_array).cloned().unwrap_or_default();
                objects.extend(items.into_iter().map(|value| Object {
                    source: source.clone(),
                    value,
                }));
            }
            value @ Value::Object(_) => objects.push(Object {
                source: source.clone(),
                value,
            }),
            other => bail!("{source}: a document is not an object: {other}"),
        }
    }
    Ok(objects)
}
