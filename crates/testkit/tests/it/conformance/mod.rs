//! The in-process API server answers as the real one does: the same requests go to both, and the answers are compared.

mod cases;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use capstan_testkit::ControlPlane;
use capstan_testkit::apiserver::{ApiServer, Settings};
use futures::{AsyncBufReadExt, TryStreamExt};
use http::Request;
use serde_json::{Value, json};

use cases::{MACHINES, Step, cases, delete, get, machine, patch, post};

/// A server that is asked again has this long to come to what a case waits for.
const LIMIT: Duration = Duration::from_secs(120);
/// How often a case that waits asks.
const ASK: Duration = Duration::from_millis(100);

/// One server with what was learned from its answers.
struct Side {
    client: kube::Client,
    namespace: String,
    /// The last uid of an object, and its last two versions.
    known: BTreeMap<String, (String, String, String)>,
    /// Values that differ between servers, in the order in which they came.
    tokens: Vec<String>,
}

impl Side {
    fn new(client: kube::Client, namespace: String) -> Self {
        let (known, tokens) = (BTreeMap::new(), Vec::new());
        Self {
            client,
            namespace,
            known,
            tokens,
        }
    }

    fn fill(&self, text: &str) -> String {
        let mut text = text.replace("$ns", &self.namespace);
        for (name, (uid, version, old)) in self.known.iter().rev() {
            text = text.replace(&format!("\"$uid.{name}\""), &format!("\"{uid}\""));
            text = text.replace(&format!("\"$rv.{name}\""), &format!("\"{version}\""));
            text = text.replace(&format!("\"$old.{name}\""), &format!("\"{old}\""));
        }
        text
    }

    async fn send(&mut self, step: &Step) -> Result<(u16, Value)> {
        let request = Request::builder().method(step.method).uri(self.fill(&step.path));
        let body = match &step.body {
            Value::Null => Vec::new(),
            body => self.fill(&body.to_string()).into_bytes(),
        };
        let request = request.header("content-type", step.media_type).body(body.into())?;
        let response = self.client.send(request).await?;
        let code = response.status().as_u16();
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((code, serde_json::from_str(&text).unwrap_or(json!({ "text": text }))))
    }

    /// The answer to a step, in a form that is the same on both servers.
    async fn answer(&mut self, step: &Step) -> Result<Value> {
        let waiting = async {
            loop {
                let (code, answer) = self.send(step).await?;
                if step.until.is_none_or(|so| so(&answer)) {
                    return anyhow::Ok((code, answer));
                }
                tokio::time::sleep(ASK).await;
            }
        };
        let (code, answer) = tokio::time::timeout(LIMIT, waiting)
            .await
            .with_context(|| format!("{} {}", step.method, step.path))??;
        self.learn(&answer);
        Ok(self.shown(code, &answer))
    }

    fn learn(&mut self, answer: &Value) {
        let meta = &answer["metadata"];
        let (Some(name), Some(uid), Some(version)) = (
            meta["name"].as_str(),
            meta["uid"].as_str(),
            meta["resourceVersion"].as_str(),
        ) else {
            return;
        };
        let old = self
            .known
            .get(name)
            .map_or(String::new(), |known| match known.1 == version {
                true => known.2.clone(),
                false => known.1.clone(),
            });
        self.known
            .insert(name.to_owned(), (uid.to_owned(), version.to_owned(), old));
    }

    fn token(&mut self, value: &Value) -> Value {
        let Some(text) = value.as_str() else {
            return value.clone();
        };
        let place = self.tokens.iter().position(|token| token == text).unwrap_or_else(|| {
            self.tokens.push(text.to_owned());
            self.tokens.len() - 1
        });
        json!(format!("#{place}"))
    }

    fn shown(&mut self, code: u16, answer: &Value) -> Value {
        let text = answer.to_string().replace(&self.namespace, "$ns");
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        if let Some(items) = answer["items"].as_array() {
            let names: Vec<&Value> = items.iter().map(|item| &item["metadata"]["name"]).collect();
            let more = answer["metadata"]["continue"]
                .as_str()
                .is_some_and(|token| !token.is_empty());
            return json!({"code": code, "kind": answer["kind"], "items": names, "more": more});
        }
        if answer["kind"] == "Status" {
            let details = &answer["details"];
            let causes: Vec<Value> = details["causes"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|cause| cause["reason"] == "DisruptionBudget")
                .cloned()
                .collect();
            return json!({"code": code, "status": answer["status"], "reason": answer["reason"], "name": details["name"],
                "group": details["group"], "causes": causes});
        }
        let meta = &answer["metadata"];
        let mut shown =
            json!({"code": code, "kind": answer["kind"], "apiVersion": answer["apiVersion"], "text": answer["text"]});
        for field in [
            "name",
            "namespace",
            "labels",
            "annotations",
            "finalizers",
            "deletionGracePeriodSeconds",
        ] {
            shown[field] = meta[field].clone();
        }
        shown["deleting"] = json!(meta["deletionTimestamp"].is_string());
        shown["created"] = json!(meta["creationTimestamp"].is_string());
        let owners = meta["ownerReferences"].as_array().into_iter().flatten();
        shown["owners"] = owners.map(|owner| owner["name"].clone()).collect();
        match answer["kind"].as_str() {
            Some("Machine") => {
                shown["uid"] = self.token(&meta["uid"]);
                shown["version"] = self.token(&meta["resourceVersion"]);
                shown["generation"] = meta["generation"].clone();
                shown["spec"] = answer["spec"].clone();
                shown["status"] = answer["status"].clone();
            }
            Some("ConfigMap" | "Secret") => {
                shown["uid"] = self.token(&meta["uid"]);
                shown["version"] = self.token(&meta["resourceVersion"]);
                shown["data"] = answer["data"].clone();
                shown["type"] = answer["type"].clone();
            }
            Some("Lease") => shown["holder"] = answer["spec"]["holderIdentity"].clone(),
            Some("Node") => {
                // Other parts of a real control plane write Nodes too.

                shown["labels"] = meta["labels"]["capstan.dev/kwok"].clone();
                shown["annotations"] = Value::Null;
                shown["provider"] = answer["spec"]["providerID"].clone();
                shown["unschedulable"] = answer["spec"]["unschedulable"].clone();
                let conditions = answer["status"]["conditions"].as_array().into_iter().flatten();
                let conditions = conditions.filter(|c| shown["name"] == "$ns-n" && !c["status"].is_null());
                shown["conditions"] = conditions.map(|c| json!([c["type"], c["status"]])).collect();
            }
            Some("Pod") => {
                shown["deletionGracePeriodSeconds"] = Value::Null;
                shown["deleting"] = Value::Null;
                shown["annotations"] = Value::Null;
            }
            _ => {}
        }
        shown
    }
}

async fn sides() -> Result<(ControlPlane, ApiServer, Side, Side)> {
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    let namespace = plane.namespace("conform").await?;
    // kube's own retries would wait for a budget.
    let mut config = plane.config().await?;
    config.default_retry = false;
    let server = ApiServer::new(Settings::default());
    let ours = Side::new(server.client(), namespace.clone());
    let client = kube::Client::try_from(config)?;
    served(Side::new(client.clone(), namespace.clone())).await?;
    Ok((plane, server, ours, Side::new(client, namespace)))
}

/// Waits until the server lists our kinds: it goes on to answer 404 for a moment after it has taken their definitions.
async fn served(mut side: Side) -> Result<()> {
    let listed = async {
        while side.send(&get(MACHINES, "")).await.is_ok_and(|(code, _)| code != 200) {
            tokio::time::sleep(ASK).await;
        }
    };
    Ok(tokio::time::timeout(LIMIT, listed).await?)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_requests_have_the_same_answers() -> Result<()> {
    let (_plane, _server, mut ours, mut theirs) = sides().await?;
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (case, steps) in cases() {
        for step in steps {
            count += 1;
            let (own, real) = futures::join!(ours.answer(&step), theirs.answer(&step));
            let (own, real) = match (own, real) {
                (Ok(own), Ok(real)) => (own, real),
                (own, real) => bail!("{case}: {own:?} {real:?}\nbefore that: {}", wrong.join("\n")),
            };
            if own != real {
                wrong.push(format!(
                    "{case}: {} {} {}\n   ours: {own}\n   real: {real}",
                    step.method, step.path, step.body
                ));
            }
        }
    }
    println!("{count} requests compared");
    ensure!(
        wrong.is_empty(),
        "{} of {count} answers differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    Ok(())
}

/// The types and names of the events that a watch shows.
async fn watched(side: &Side, path: &str, number: usize) -> Result<Vec<Value>> {
    let request = Request::get(side.fill(path)).body(Vec::new())?;
    let mut lines = Box::pin(side.client.request_stream(request).await?).lines();
    let mut events = Vec::new();
    while events.len() < number {
        let Some(line) = tokio::time::timeout(LIMIT, lines.try_next()).await?? else {
            bail!("the watch ended after {events:?}");
        };
        let event: Value = serde_json::from_str(&line)?;
        let object = &event["object"];
        events.push(json!([
            event["type"],
            object["kind"],
            object["metadata"]["name"],
            object["code"],
            object["reason"]
        ]));
    }
    Ok(events)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_changes_make_the_same_events() -> Result<()> {
    let (_plane, server, mut ours, mut theirs) = sides().await?;
    let list = get(MACHINES, "");
    let changes = [
        post(MACHINES, machine("a", json!({"metadata": {"labels": {"app": "web"}}}))),
        post(MACHINES, machine("b", json!({}))),
        patch(MACHINES, "b", json!({"metadata": {"labels": {"app": "web"}}})),
        patch(MACHINES, "b/status", json!({"status": {"phase": "x"}})),
        patch(
            MACHINES,
            "a",
            json!({"metadata": {"labels": null, "finalizers": ["capstan.dev/a"]}}),
        ),
        delete(MACHINES, "/b", Value::Null),
        delete(MACHINES, "/a", Value::Null),
        patch(MACHINES, "a", json!({"metadata": {"finalizers": null}})),
    ];
    let mut shown = Vec::new();
    for side in [&mut ours, &mut theirs] {
        let (_, before) = side.send(&list).await?;
        let version = before["metadata"]["resourceVersion"]
            .as_str()
            .context("a list has a version")?
            .to_owned();
        for change in &changes {
            let answer = side.answer(change).await?;
            ensure!(answer["code"].as_u64() < Some(300), "{answer}");
        }
        let mut all = Vec::new();
        for (selector, number) in [
            ("", 8),
            ("&labelSelector=app%3Dweb", 5),
            ("&fieldSelector=metadata.name%3Da", 4),
        ] {
            let path = format!("{MACHINES}?watch=true&resourceVersion={version}{selector}");
            all.push(watched(side, &path, number).await.context(selector)?);
        }
        shown.push(all);
    }
    assert_eq!(shown[0], shown[1]);
    server.compact();
    let mut expired = Vec::new();
    for side in [&ours, &theirs] {
        expired.push(watched(side, &format!("{MACHINES}?watch=true&resourceVersion=1"), 1).await?);
    }
    assert_eq!(expired[0], expired[1]);
    Ok(())
}
