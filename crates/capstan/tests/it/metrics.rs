//! Metrics for those who may read them.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use capstan_testkit::ControlPlane;
use reqwest::StatusCode;

use crate::program::{LIMIT, Started, port, run_openshift, scratch, signal, until, wait};

#[tokio::test(flavor = "multi_thread")]
async fn metrics_need_a_token_and_the_right_to_read_them() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let namespace = plane.namespace("metrics").await?;
    let dir = scratch("metrics");
    std::fs::create_dir_all(&dir)?;
    let log_file = dir.join("log");
    let child = run_openshift(&namespace)
        .args(["--health", "0", "--webhook", "0"])
        // Not a loopback address, so HTTPS; the test asks over loopback.
        .args(["--metrics", ":0", "--kubeconfig"])
        .arg(plane.kubeconfig())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log_file)?)
        .spawn()?;
    let mut child = Started(child);
    let log = || std::fs::read_to_string(&log_file).unwrap_or_default();
    until(|| port(&log(), "metrics").is_some()).with_context(log)?;
    let port = port(&log(), "metrics").context("no port")?;

    // Everybody may create the binding's subject; the role comes with the installation.
    let rule = [
        "create",
        "clusterrole",
        &namespace,
        "--verb=get",
        "--non-resource-url=/metrics",
    ];
    plane.kubectl(&rule).await?;
    for account in ["reader", "stranger"] {
        plane
            .kubectl(&["create", "serviceaccount", account, "-n", &namespace])
            .await?;
    }
    let (role, reader) = (
        format!("--clusterrole={namespace}"),
        format!("--serviceaccount={namespace}:reader"),
    );
    plane
        .kubectl(&["create", "clusterrolebinding", &namespace, &role, &reader])
        .await?;
    let mut tokens = vec![None, Some("made-up".to_owned())];
    for account in ["stranger", "reader"] {
        let token = plane.kubectl(&["create", "token", account, "-n", &namespace]).await?;
        tokens.push(Some(token.trim().to_owned()));
    }

    let client = reqwest::Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .no_proxy()
        .build()?;
    let expected = [
        StatusCode::UNAUTHORIZED,
        StatusCode::UNAUTHORIZED,
        StatusCode::FORBIDDEN,
        StatusCode::OK,
    ];
    for (token, expected) in tokens.iter().zip(expected) {
        let mut request = client.get(format!("https://127.0.0.1:{port}/metrics"));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await?;
        let status = answer.status();
        ensure!(status == expected, "{status} instead of {expected}:\n{}", log());
        ensure!(answer.text().await?.contains("capstan_leading") == (status == StatusCode::OK));
    }
    let plain = client.get(format!("http://127.0.0.1:{port}/metrics")).send().await;
    ensure!(plain.is_err(), "the metrics are served without TLS");
    for kind in ["clusterrole", "clusterrolebinding"] {
        plane.kubectl(&["delete", kind, &namespace]).await?;
    }
    signal(&child.0, "-TERM")?;
    ensure!(wait(&mut child.0, LIMIT)?.success(), "{}", log());
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
