//! Evictions and the disruption budgets in their way. Invariant: a budget's status is that of its Pods now.

use serde_json::{Value, json};

use super::answer::Failure;
use super::delete::check;
use super::kinds::{Key, Kind, Target};
use super::selector::selects;
use super::store::{Name, Store, text};

impl Store {
    pub fn evict(&mut self, target: &Target, eviction: &Value) -> Result<Value, Failure> {
        let pod = self.existing(target)?;
        let name = target.name()?;
        let options = &eviction["deleteOptions"];
        check(&target.kind, name, &pod, &options["preconditions"])?;
        let ended = matches!(text(&pod, "/status/phase"), "Pending" | "Succeeded" | "Failed");
        if !ended && !is_deleting(&pod) {
            self.ask_budgets(target, &pod)?;
        }
        self.delete(target, options)?;
        Ok(json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}))
    }

    fn ask_budgets(&self, target: &Target, pod: &Value) -> Result<(), Failure> {
        let namespace = target.namespace.clone().unwrap_or_default();
        let budgets = self.all(&budgets()).filter(|(name, _)| name.0 == namespace);
        let budgets: Vec<&Value> = budgets
            .map(|(_, budget)| budget)
            .filter(|budget| covers(budget, pod))
            .collect();
        let budget = match budgets.as_slice() {
            [] => return Ok(()),
            [budget] => budget,
            _ => return Err(Failure::several_budgets()),
        };
        let number = |field: &str| budget["status"][field].as_i64().unwrap_or(0);
        let (healthy, needed) = (number("currentHealthy"), number("desiredHealthy"));
        // A Pod that is not ready counts for nothing, so it may go while the others suffice.
        if !is_ready(pod) && healthy >= needed && needed > 0 {
            return Ok(());
        }
        if number("disruptionsAllowed") > 0 {
            return Ok(());
        }
        let name = text(budget, "/metadata/name");
        Err(Failure::budget(format!(
            "The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
        )))
    }

    /// Writes the status of the budgets in a namespace after a Pod or a budget has changed.
    pub fn count_budgets(&mut self, kind: &Kind, namespace: Option<&str>) {
        if !matches!(kind.plural.as_str(), "pods" | "poddisruptionbudgets") {
            return;
        }
        let inside = |name: &Name| namespace == Some(name.0.as_str());
        let all = self.all(&budgets()).filter(|(name, _)| inside(name));
        let all: Vec<(Name, Value)> = all.map(|(name, budget)| (name.clone(), budget.clone())).collect();
        for (name, mut budget) in all {
            let pods = self.all(&pods()).filter(|(name, _)| inside(name)).map(|(_, pod)| pod);
            let pods: Vec<&Value> = pods.filter(|pod| covers(&budget, pod)).collect();
            let healthy = pods.iter().filter(|pod| is_ready(pod) && !is_deleting(pod)).count() as i64;
            let needed = needed(&budget["spec"], pods.len() as i64);
            let status = json!({
                "currentHealthy": healthy, "desiredHealthy": needed, "expectedPods": pods.len(),
                "disruptionsAllowed": (healthy - needed).max(0), "observedGeneration": 1,
            });
            if budget["status"] == status {
                continue;
            }
            budget["status"] = status;
            if let Some(kind) = self.kinds.get("policy", "poddisruptionbudgets").cloned() {
                self.put(&kind, name, budget);
            }
        }
    }
}

fn budgets() -> Key {
    ("policy".to_owned(), "poddisruptionbudgets".to_owned())
}

fn pods() -> Key {
    (String::new(), "pods".to_owned())
}

fn covers(budget: &Value, pod: &Value) -> bool {
    selects(&budget["spec"]["selector"], &pod["metadata"]["labels"])
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions
        .into_iter()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

fn is_deleting(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_string()
}

/// Returns the number of Pods that must stay.
fn needed(spec: &Value, pods: i64) -> i64 {
    let count = |value: &Value| match value {
        Value::Number(number) => number.as_i64().unwrap_or(0),
        Value::String(percent) => {
            let percent: i64 = percent.trim_end_matches('%').parse().unwrap_or(0);
            (pods * percent + 99) / 100
        }
        _ => 0,
    };
    match &spec["maxUnavailable"] {
        Value::Null => count(&spec["minAvailable"]),
        unavailable => (pods - count(unavailable)).max(0),
    }
}
