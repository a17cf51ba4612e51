//! Label and field selectors as text, as they come in a request.

use serde_json::Value;

use super::kinds::Query;

/// The objects that a list or watch is about.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    labels: Vec<Term>,
    fields: Vec<Term>,
}

#[derive(Clone, Debug, PartialEq)]
enum Term {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Selector {
    pub fn of(query: &Query) -> Self {
        Self {
            labels: terms(query.get("labelSelector")),
            fields: terms(query.get("fieldSelector")),
        }
    }

    pub fn selects(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let label = |key: &str| labels[key].as_str().map(str::to_owned);
        // A field that is absent is the same as an empty one.
        let field = |key: &str| Some(text(object, key));
        self.labels.iter().all(|term| term.holds(label)) && self.fields.iter().all(|term| term.holds(field))
    }
}

/// Whether a LabelSelector object selects these labels.
pub fn selects(selector: &Value, labels: &Value) -> bool {
    let equal = selector["matchLabels"].as_object().into_iter().flatten();
    let mut equal = equal.map(|(key, value)| labels[key] == *value);
    let mut expressions = selector["matchExpressions"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|expression| {
            let key = expression["key"].as_str().unwrap_or_default().to_owned();
            let values = expression["values"].as_array().into_iter().flatten();
            let values = values.filter_map(Value::as_str).map(str::to_owned).collect();
            let term = match expression["operator"].as_str() {
                Some("In") => Term::In(key, values),
                Some("NotIn") => Term::NotIn(key, values),
                Some("DoesNotExist") => Term::Absent(key),
                _ => Term::Exists(key),
            };
            term.holds(|key| labels[key].as_str().map(str::to_owned))
        });
    equal.all(|holds| holds) && expressions.all(|holds| holds)
}

fn text(object: &Value, path: &str) -> String {
    let found = path.split('.').fold(object, |value, part| &value[part]);
    match found {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

impl Term {
    fn holds(&self, value: impl Fn(&str) -> Option<String>) -> bool {
        match self {
            Self::In(key, values) => value(key).is_some_and(|value| values.contains(&value)),
            Self::NotIn(key, values) => value(key).is_none_or(|value| !values.contains(&value)),
            Self::Exists(key) => value(key).is_some(),
            Self::Absent(key) => value(key).is_none(),
        }
    }
}

fn terms(text: &str) -> Vec<Term> {
    split(text).iter().map(|text| term(text)).collect()
}

/// Splits at commas that are not inside parentheses.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for letter in text.chars() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if letter == ',' && depth == 0 {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts.retain(|part| !part.trim().is_empty());
    parts
}

fn term(text: &str) -> Term {
    let text = text.trim();
    let words = |text: &str| {
        let inner = text.trim().trim_start_matches('(').trim_end_matches(')');
        inner.split(',').map(|word| word.trim().to_owned()).collect()
    };
    if let Some((key, values)) = text.split_once(" notin ") {
        return Term::NotIn(key.trim().to_owned(), words(values));
    }
    if let Some((key, values)) = text.split_once(" in ") {
        return Term::In(key.trim().to_owned(), words(values));
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Term::NotIn(key.trim().to_owned(), vec![value.trim().to_owned()]);
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Term::In(key.trim().to_owned(), vec![value.trim().to_owned()]);
    }
    match text.strip_prefix('!') {
        Some(key) => Term::Absent(key.trim().to_owned()),
        None => Term::Exists(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn selects_labels(selector: &str) -> bool {
        let object = json!({"metadata": {"labels": {"app": "web", "tier": "front"}}});
        terms(selector)
            .iter()
            .all(|term| term.holds(|key| object["metadata"]["labels"][key].as_str().map(str::to_owned)))
    }

    #[test]
    fn selectors_are_read_as_kubectl_writes_them() {
        for selector in [
            "app=web",
            "app==web,tier!=back",
            "app in (web, db),!gone",
            "tier notin (a,b),app",
            "",
        ] {
            assert!(selects_labels(selector), "{selector}");
        }
        for selector in ["app=db", "app!=web", "app notin (web)", "!app", "gone", "gone=x"] {
            assert!(!selects_labels(selector), "{selector}");
        }
    }
}
