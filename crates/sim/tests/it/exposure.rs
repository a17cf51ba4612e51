//! Others on the machine and on the network: files, the admin API, and clients that send too much or nothing.

use std::os::unix::fs::PermissionsExt as _;

use capstan_sim::azure::{Azure, Config};
use reqwest::Method;
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use crate::support::{Client, GROUP};

#[tokio::test]
async fn the_state_file_is_for_its_owner_only() {
    let path = std::env::temp_dir().join(format!("capstan-sim-private-{}.json", std::process::id()));
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let config = Config {
        state: Some(path.clone()),
        ..Config::instant()
    };
    let sim = Azure::start(config).await.unwrap();
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o600);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    sim.stop().unwrap();
    assert_eq!(mode(), 0o600, "a file that an older program wrote becomes private too");
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn a_listener_that_others_can_reach_needs_an_admin_token() {
    let config = |token: Option<&str>| Config {
        listen: ([192, 0, 2, 1], 0).into(),
        admin_token: token.map(str::to_owned),
        ..Config::instant()
    };
    for token in [None, Some("")] {
        let error = Azure::start(config(token)).await.err().unwrap().to_string();
        assert!(error.contains("--admin-token"), "{error}");
    }
    // With one the address is tried; this one is nobody's.
    let error = Azure::start(config(Some("t"))).await.err().unwrap().to_string();
    assert!(error.contains("cannot listen"), "{error}");
}

#[tokio::test]
async fn the_admin_api_takes_its_own_token_only() {
    let config = Config {
        admin_token: Some("letmein".into()),
        ..Config::instant()
    };
    let client = Client::start(config).await;
    let url = format!("{}/sim/state", client.sim.url);
    for (token, status) in [
        (None, 401),
        (Some("wrong12"), 401),
        (Some("letmein2"), 401),
        (Some("letmein"), 200),
    ] {
        let mut request = client.http.get(&url);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        assert_eq!(request.send().await.unwrap().status(), status, "{token:?}");
    }
}

#[tokio::test]
async fn a_body_beyond_resource_managers_limit_is_refused() {
    let client = Client::start(Config::instant()).await;
    let path = format!("/subscriptions/{}/resourceGroups/{GROUP}", client.sim.subscription);
    let body = json!({ "location": "eastus", "tags": { "a": "x".repeat(5 << 20) } });
    let answer = client.send(Method::PUT, &path, body, &[]).await;
    assert_eq!(answer.status(), 413);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_sends_nothing_is_cut_off() {
    let sim = Azure::start(Config::instant()).await.unwrap();
    let mut stream = tokio::net::TcpStream::connect(sim.address).await.unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());
}
