//! The simulator as a program: what it prints, and what it keeps over a restart.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// Cargo builds examples beside the tests' own directory.
fn program() -> std::path::PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().and_then(Path::parent).unwrap().join("examples/sim-azure")
}

async fn start(dir: &Path, more: &[&str]) -> (Child, Value, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(program())
        .args([
            "--vm-create",
            "200ms",
            "--disk",
            "30s",
            "--retry-after",
            "1",
            "--ca-file",
        ])
        .arg(dir.join("ca.pem"))
        .arg("--state")
        .arg(dir.join("state.json"))
        .args(more)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
    (child, ready, lines)
}

async fn stop(mut child: Child) {
    let pid = child.id().unwrap().to_string();
    Command::new("kill").args(["-TERM", &pid]).status().await.unwrap();
    assert!(child.wait().await.unwrap().success());
}

fn client(ready: &Value) -> reqwest::Client {
    let pem = std::fs::read(ready["ca"].as_str().unwrap()).unwrap();
    let certificate = reqwest::Certificate::from_pem(&pem).unwrap();
    reqwest::Client::builder()
        .tls_certs_only([certificate])
        .no_proxy()
        .build()
        .unwrap()
}

async fn token(http: &reqwest::Client, ready: &Value) -> String {
    let text = |name: &str| ready[name].as_str().unwrap().to_owned();
    let form = format!(
        "grant_type=client_credentials&client_id={}&client_secret={}&scope=x/.default",
        text("clientId"),
        text("clientSecret")
    );
    let url = format!("{}/{}/oauth2/v2.0/token", text("authority"), text("tenant"));
    let answer = http
        .post(url)
        .header("content-type", "application/x-www-form-urlencoded")
        .body(form)
        .send()
        .await
        .unwrap();
    answer.json::<Value>().await.unwrap()["access_token"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[tokio::test]
async fn state_and_trust_and_running_operations_outlive_a_restart() {
    let dir = std::env::temp_dir().join(format!("capstan-sim-program-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (child, ready, mut lines) = start(&dir, &[]).await;
    let http = client(&ready);
    let disk = |ready: &Value| {
        let text = |name: &str| ready[name].as_str().unwrap().to_owned();
        format!(
            "{}/subscriptions/{}/resourceGroups/{}/providers/Microsoft.Compute/disks/d?api-version=2024-03-02",
            text("url"),
            text("subscription"),
            text("resourceGroup")
        )
    };
    let body =
        json!({ "location": "eastus", "properties": { "diskSizeGB": 8, "creationData": { "createOption": "Empty" } } });
    let answer = http
        .put(disk(&ready))
        .bearer_auth(token(&http, &ready).await)
        .json(&body)
        .send()
        .await
        .unwrap();
    assert_eq!(answer.status(), 202);
    let logged: Value = loop {
        let line: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        if line["policy"] != "SignIn" {
            break line;
        }
    };
    assert_eq!(
        (&logged["method"], &logged["policy"], &logged["status"]),
        (&json!("PUT"), &json!("PutDisk"), &json!(202))
    );
    stop(child).await;

    let (child, again, _lines) = start(&dir, &[]).await;
    let state = |ready: Value, http: reqwest::Client| async move {
        let answer = http
            .get(disk(&ready))
            .bearer_auth(token(&http, &ready).await)
            .send()
            .await
            .unwrap();
        answer.json::<Value>().await.unwrap()["properties"]["provisioningState"].clone()
    };
    // The same client trusts the new process: the authority is part of the state.
    assert_eq!(state(again.clone(), http.clone()).await, "Creating");
    let advance = http
        .post(format!("{}/sim/time", again["url"].as_str().unwrap()))
        .json(&json!({ "advance": "31s" }));
    assert_eq!(advance.send().await.unwrap().status(), 200);
    assert_eq!(state(again, http).await, "Succeeded");
    stop(child).await;
    std::fs::remove_dir_all(dir).unwrap();
}
