//! The alerting rules and dashboards of `deploy/prometheus`: Prometheus's own tool tries the rules, and all of them use metrics
//! and runbooks that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const OPERATING: &str = include_str!("../../../../docs/operating.md");
const RUNBOOKS: &str = include_str!("../../../../docs/runbooks.md");

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(folder().join(name)).unwrap()
}

fn rules() -> Vec<Value> {
    let file: Value = serde_saphyr::from_str(&read("rules.yaml")).unwrap();
    let groups = file["spec"]["groups"].as_array().cloned().unwrap_or_default();
    let rules = groups.iter().flat_map(|group| group["rules"].as_array().cloned());
    rules.flatten().collect()
}

#[test]
fn the_alerts_fire_and_rest_as_their_tests_say() {
    let rule: Value = serde_saphyr::from_str(&read("rules.yaml")).unwrap();
    let dir = std::env::temp_dir().join(format!("capstan-alerts-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("rules.json"), rule["spec"].to_string()).unwrap();
    std::fs::write(dir.join("rules_test.yaml"), read("rules_test.yaml")).unwrap();
    let promtool = capstan_testkit::parts::PROMTOOL.path().unwrap();
    let tried: Vec<_> = [["check", "rules", "rules.json"], ["test", "rules", "rules_test.yaml"]]
        .iter()
        .map(|args| Command::new(&promtool).args(args).current_dir(&dir).output().unwrap())
        .collect();
    std::fs::remove_dir_all(&dir).unwrap();
    for out in tried {
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("SUCCESS"), "{said}");
    }
}

#[test]
fn every_alert_has_a_test_and_a_runbook() {
    let tests = read("rules_test.yaml");
    for rule in rules() {
        let name = rule["alert"].as_str().unwrap();
        assert!(tests.contains(&format!("alertname: {name}\n")), "{name} has no test");
        let link = format!("https://capstan.example.com/runbooks.html#{}", name.to_lowercase());
        assert_eq!(rule["annotations"]["runbook_url"], link.as_str(), "{name}");
        assert!(RUNBOOKS.contains(&format!("\n## {name}\n")), "{name} has no runbook");
    }
}

/// Returns the names in a query that look like metrics of ours.
fn metrics(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = words.filter(|word| word.starts_with("capstan_") || word.starts_with("mapi_"));
    ours.map(str::to_owned).collect()
}

/// Whether the documentation lists a metric, with or without the ending of its type.
fn is_listed(metric: &str) -> bool {
    let endings = ["", "_total", "_bucket", "_sum", "_count"];
    let mut names = endings.iter().filter_map(|ending| metric.strip_suffix(ending));
    names.any(|name| OPERATING.contains(&format!("`{name}`")))
}

/// Collects the queries of a dashboard.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(query) if name == "expr" || name == "query" => found.push(query.clone()),
                    _ => queries(field, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        _ => {}
    }
}

#[test]
fn alerts_and_dashboards_use_metrics_that_the_documentation_lists() {
    let mut all: Vec<(String, String)> = rules()
        .iter()
        .map(|rule| (rule["alert"].to_string(), rule["expr"].as_str().unwrap().to_owned()))
        .collect();
    let mut dashboards = 0;
    for entry in std::fs::read_dir(folder().join("dashboards")).unwrap() {
        let path = entry.unwrap().path();
        let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert!(
            dashboard["uid"].is_string() && dashboard["title"].is_string(),
            "{path:?}"
        );
        let mut found = Vec::new();
        queries(&dashboard["panels"], &mut found);
        assert!(found.len() >= 4, "{path:?} has few panels");
        all.extend(found.into_iter().map(|query| (path.display().to_string(), query)));
        dashboards += 1;
    }
    assert!(dashboards > 0, "there are no dashboards");
    for (place, query) in all {
        let metrics = metrics(&query);
        assert!(!metrics.is_empty(), "{place}: {query:?} has no metric of ours");
        for metric in metrics {
            assert!(is_listed(&metric), "{place}: docs/operating.md does not list {metric}");
        }
    }
}
