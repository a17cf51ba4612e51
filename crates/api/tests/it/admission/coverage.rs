//! No rule without a test: each rule of a definition has rejected an object, with its own message at its own field, and
//! has accepted an object that it applied to.

use super::{
    Answer, azure,
    case::{CRDS, Case},
    openshift, vsphere,
};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    io::{Write, stderr},
};

/// A rule, and where in an object it looks.
struct Rule {
    /// As in `spec.template.dataDisks[]`.
    path: String,
    rule: Value,
}

impl Rule {
    fn text(&self, key: &str) -> &str {
        self.rule[key].as_str().unwrap_or_default()
    }

    /// What every refusal by this rule says.
    fn words(&self) -> &str {
        // A message that contains values of the object is recognized by its last words.
        let made = self.text("messageExpression").rsplit("+ ").next();
        made.filter(|words| !words.is_empty())
            .map_or(self.text("message"), |words| words.trim_matches('"'))
    }

    /// Where the API server reports it.
    fn reported_at(&self) -> String {
        format!("{}{}", self.path, self.text("fieldPath"))
            .trim_start_matches('.')
            .to_owned()
    }

    fn refuses(&self, answer: &str) -> bool {
        let answer = without_indices(answer);
        // The API server reports all errors of an object together: the message must follow its field.
        let place = format!("{}: ", self.reported_at());
        let told = match self.reported_at().is_empty() {
            true => Some(answer.as_str()),
            false => answer.split_once(&place).map(|(_, rest)| rest),
        };
        told.is_some_and(|rest| rest.contains(self.words()))
    }

    /// Whether the case has what the rule looks at, before too when it compares.
    fn looks_at(&self, case: &Case) -> bool {
        let compares = self.text("rule").contains("oldSelf");
        let path: Vec<&str> = self.path.split('.').filter(|key| !key.is_empty()).skip(1).collect();
        let before = case.before.as_ref().is_some_and(|before| has(before, &path));
        has(&case.spec, &path) && (before || !compares)
    }
}

fn has(value: &Value, path: &[&str]) -> bool {
    let Some((key, rest)) = path.split_first() else {
        return true;
    };
    match key.strip_suffix("[]") {
        Some(key) => {
            let items = value.get(key).and_then(Value::as_array);
            items.is_some_and(|items| items.iter().any(|item| has(item, rest)))
        }
        None => value.get(key).is_some_and(|value| has(value, rest)),
    }
}

/// `a[3].b` as `a[].b`.
fn without_indices(text: &str) -> String {
    let mut parts = text.split('[');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push('[');
        out.push_str(match part.split_once(']') {
            Some((index, _)) if !index.is_empty() && index.bytes().all(|digit| digit.is_ascii_digit()) => {
                &part[index.len()..]
            }
            _ => part,
        });
    }
    out
}

fn rules(path: &str, schema: &Value, found: &mut Vec<Rule>) {
    let here = schema["x-kubernetes-validations"].as_array();
    found.extend(here.into_iter().flatten().map(|rule| Rule {
        path: path.to_owned(),
        rule: rule.clone(),
    }));
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        rules(&format!("{path}.{name}"), property, found);
    }
    if schema["items"].is_object() {
        rules(&format!("{path}[]"), &schema["items"], found);
    }
}

/// The rules of a kind. Cases have a spec alone, so a rule elsewhere would go untested.
fn rules_of(kind: &str) -> Vec<Rule> {
    let crd = CRDS.iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
    let mut found = Vec::new();
    rules("", &schema["openAPIV3Schema"], &mut found);
    found
}

/// Rules of the kinds of these cases that no answer shows at work.
pub fn missing(answers: &[Answer]) -> Vec<String> {
    let kinds: BTreeSet<_> = answers.iter().map(|(case, _)| case.kind).collect();
    let mut missing = Vec::new();
    for kind in kinds {
        let rules = rules_of(kind);
        let of_kind = || answers.iter().filter(|(case, _)| case.kind == kind);
        for rule in &rules {
            let place = rule.reported_at();
            if !of_kind().any(|(_, answer)| answer.as_ref().is_some_and(|answer| rule.refuses(answer))) {
                missing.push(format!("{kind}: nothing is refused at {place:?} by: {}", rule.words()));
            }
            if !of_kind().any(|(case, answer)| answer.is_none() && rule.looks_at(case)) {
                missing.push(format!("{kind}: nothing is accepted at {place:?} by: {}", rule.words()));
            }
        }
        // Written past the capture of the test program, so that the count is always shown.
        let _ = writeln!(stderr(), "{kind}: {} rules, each accepting and refusing", rules.len());
    }
    missing
}

#[test]
fn every_kind_with_rules_has_cases_and_every_rule_looks_at_a_spec() {
    let groups = [openshift::cases(), azure::cases(), vsphere::cases()];
    let kinds: BTreeSet<_> = groups.iter().flatten().map(|case| case.kind).collect();
    let mut count = 0;
    for crd in CRDS.iter() {
        let kind = crd.spec.names.kind.as_str();
        let rules = rules_of(kind);
        assert!(rules.is_empty() || kinds.contains(kind), "{kind} has rules and no case");
        for rule in &rules {
            let within = rule.path.is_empty() || rule.path.starts_with(".spec");
            assert!(within, "{kind}: a rule at {} has no case", rule.path);
        }
        count += rules.len();
    }
    assert!(count > 100, "only {count} rules were found");
}
