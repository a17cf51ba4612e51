//! Rules that the API server checks by itself, for `x-kubernetes-validations`.

use serde::Serialize;
use serde_json::Value;

/// One rule in the Common Expression Language.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rule {
    rule: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_expression: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    field_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// Returns a rule: the API server answers with `message` where `expression` is false.
pub(crate) fn rule(expression: impl Into<String>, message: impl Into<String>) -> Rule {
    Rule {
        rule: expression.into(),
        message: message.into(),
        message_expression: None,
        field_path: None,
        reason: None,
    }
}

impl Rule {
    /// Reports the error at a field below the object.
    pub(crate) fn at(self, path: impl Into<String>) -> Self {
        Self {
            field_path: Some(path.into()),
            ..self
        }
    }

    /// Takes the message from an expression over the object.
    pub(crate) fn saying(self, expression: &'static str) -> Self {
        Self {
            message_expression: Some(expression),
            ..self
        }
    }

    /// Answers `Forbidden` instead of `Invalid value`.
    pub(crate) fn forbidden(self) -> Self {
        Self {
            reason: Some("FieldValueForbidden"),
            ..self
        }
    }
}

/// Returns a rule that keeps a value as it was first set.
pub(crate) fn immutable(message: &str) -> Rule {
    rule("self == oldSelf", message)
}

/// Makes every property of an object schema immutable, except those named. A property that is added later is immutable,
/// too.
pub(crate) fn freeze(schema: &mut Value, but: &[&str], message: &str) {
    let Some(Value::Object(properties)) = schema.get("properties") else {
        return;
    };
    let frozen = properties.keys().filter(|name| !but.contains(&name.as_str()));
    let rules = frozen.map(|name| {
        rule(same("self", "oldSelf", name), message)
            .at(format!(".{name}"))
            .forbidden()
    });
    add(schema, rules.collect());
}

/// Returns an expression: both objects have the field with the same value, or both lack it. (`.?` would be shorter, but
/// has no bounded cost.)
pub(crate) fn same(a: &str, b: &str, field: &str) -> String {
    format!("has({a}.{field}) == has({b}.{field}) && (!has({a}.{field}) || {a}.{field} == {b}.{field})")
}

/// Adds rules to those of a schema.
pub(crate) fn add(schema: &mut Value, rules: Vec<Rule>) {
    let Some(node) = schema.as_object_mut() else { return };
    let list = node
        .entry("x-kubernetes-validations")
        .or_insert_with(|| Value::Array(Vec::new()));
    if let (Value::Array(list), Ok(Value::Array(rules))) = (list, serde_json::to_value(rules)) {
        list.extend(rules);
    }
}
