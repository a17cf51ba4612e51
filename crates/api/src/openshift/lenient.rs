//! Reads a raw `providerSpec.value` as the Go controllers do: key case ignored, unknown fields kept, nulls and empty
//! strings taken for unset, a number or boolean taken for the word that it spells; and names the field where a value
//! has the wrong type.
//!
//! Invariant: what passes [`normalise`] deserialises. The schema of the type is the only list of fields, so a field
//! added to the type is read leniently without further work.

use serde_json::{Map, Value};
use std::fmt;

/// A field whose value cannot be read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FieldError {
    /// Path of the field, as in `providerSpec.value.dataDisks[1].lun`.
    pub path: String,
    /// Value of the field, shortened.
    pub value: String,
    /// Description of a valid value.
    pub expected: &'static str,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: Invalid value: {}: must be {}",
            self.path, self.value, self.expected
        )
    }
}

impl std::error::Error for FieldError {}

impl FieldError {
    /// Returns the outermost field of the path: `dataDisks` of `providerSpec.value.dataDisks[1].lun`.
    pub fn field(&self) -> &str {
        let inner = self.path.strip_prefix("providerSpec.value.").unwrap_or_default();
        inner.split(['.', '[']).next().unwrap_or_default()
    }

    fn new(path: &str, value: &Value, expected: &'static str) -> Self {
        const SHOWN: usize = 120;
        let mut text = value.to_string();
        if let Some((cut, _)) = text.char_indices().nth(SHOWN) {
            text.truncate(cut);
            text.push('…');
        }
        Self {
            path: path.to_owned(),
            value: text,
            expected,
        }
    }
}

/// Converts `value` to the exact form that `schema` requires.
pub(crate) fn normalise(value: &Value, schema: &Value, path: &str) -> Result<Value, FieldError> {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        return object(value, properties, path);
    }
    if let Some(items) = schema.get("items") {
        let list = value.as_array().ok_or_else(|| FieldError::new(path, value, "a list"))?;
        let items = list
            .iter()
            .enumerate()
            .map(|(i, item)| normalise(item, items, &format!("{path}[{i}]")));
        return items.collect::<Result<_, _>>().map(Value::Array);
    }
    if schema.get("x-kubernetes-int-or-string").is_some() {
        return match value {
            Value::String(_) | Value::Number(_) => Ok(value.clone()),
            _ => Err(FieldError::new(path, value, "a number or a string")),
        };
    }
    let expected = match schema.get("type").and_then(Value::as_str) {
        Some("string") => return word(value).ok_or_else(|| FieldError::new(path, value, "a string")),
        Some("boolean") if !value.is_boolean() => "true or false",
        Some("integer") if !fits(value, schema) => "a whole number",
        Some("object") => return map(value, schema.get("additionalProperties"), path),
        _ => return Ok(value.clone()),
    };
    Err(FieldError::new(path, value, expected))
}

/// Converts a number or boolean to text: manifests contain `zone: 1` and mean `"1"`. Capstan writes the text back.
fn word(value: &Value) -> Option<Value> {
    match value {
        Value::String(_) => Some(value.clone()),
        Value::Bool(given) => Some(given.to_string().into()),
        Value::Number(given) => Some(given.to_string().into()),
        _ => None,
    }
}

fn fits(value: &Value, schema: &Value) -> bool {
    match schema.get("format").and_then(Value::as_str) {
        Some("int32") => value.as_i64().is_some_and(|n| i32::try_from(n).is_ok()),
        _ => value.as_i64().is_some(),
    }
}

fn object(value: &Value, properties: &Map<String, Value>, path: &str) -> Result<Value, FieldError> {
    let fields = value
        .as_object()
        .ok_or_else(|| FieldError::new(path, value, "an object"))?;
    let mut out = Map::new();
    for (key, value) in fields {
        let exact = properties.get_key_value(key.as_str());
        let known = exact.or_else(|| properties.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)));
        let Some((name, schema)) = known else {
            out.insert(key.clone(), value.clone());
            continue;
        };
        // As in Go, null leaves a field unset, and an exact key takes precedence over one in another case.
        let unset = value.is_null() || value.as_str().is_some_and(str::is_empty);
        if unset || (exact.is_none() && fields.contains_key(name)) {
            continue;
        }
        out.insert(name.clone(), normalise(value, schema, &format!("{path}.{name}"))?);
    }
    Ok(Value::Object(out))
}

fn map(value: &Value, values: Option<&Value>, path: &str) -> Result<Value, FieldError> {
    let fields = value
        .as_object()
        .ok_or_else(|| FieldError::new(path, value, "an object"))?;
    let Some(values) = values.filter(|schema| schema.is_object()) else {
        return Ok(value.clone());
    };
    let entries = fields.iter().filter(|(_, value)| !value.is_null()).map(|(key, value)| {
        let value = normalise(value, values, &format!("{path}.{key}"))?;
        Ok((key.clone(), value))
    });
    entries.collect::<Result<_, _>>().map(Value::Object)
}
