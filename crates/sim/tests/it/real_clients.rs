//! Azure's own clients cannot tell the simulator from Azure: azure-mgmt-compute, azure-mgmt-network and azure-identity from
//! PyPI, and, when `CAPSTAN_TEST_AZ` is set, the `az` command.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use capstan_sim::azure::{Azure, Config, Handle, Network};
use capstan_testkit::print_line;
use serde_json::json;

/// Versions that were tried; the directory's name follows them, so that a change makes a new environment.
const PACKAGES: [&str; 3] = [
    "azure-mgmt-compute==39.0.0",
    "azure-mgmt-network==33.1.0",
    "azure-identity==1.27.0",
];
const AZ: [&str; 1] = ["azure-cli==2.91.0"];

fn cache() -> PathBuf {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let fallback = || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/tmp".into())).join(".cache");
    home.unwrap_or_else(fallback).join("capstan")
}

/// A virtual environment with these packages, made once per user; `None` when PyPI (or Python) is away.
fn environment(name: &str, packages: &[&str]) -> Option<PathBuf> {
    let versions: String = packages
        .iter()
        .map(|package| package.rsplit('=').next().unwrap())
        .collect::<Vec<_>>()
        .join("-");
    let home = cache().join(format!("python-{name}-{versions}"));
    let done = home.join("done");
    if done.exists() {
        return Some(home);
    }
    std::fs::create_dir_all(cache()).unwrap();
    let ran = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    // Scripts of an environment name its directory, so it is made in place; a half-made one has no mark and is made again.
    let _ = std::fs::remove_dir_all(&home);
    let made = ran(Command::new("python3").args(["-m", "venv"]).arg(&home))
        && ran(Command::new(home.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(packages));
    if !made {
        return None;
    }
    std::fs::write(done, "").unwrap();
    Some(home)
}

async fn simulator() -> (Handle, String) {
    let sim = Azure::start(Config::quick()).await.unwrap();
    let network = Network::default();
    let coordinates = json!({ "url": sim.url, "authority": sim.url, "ca": sim.ca_file, "subscription": sim.subscription,
        "tenant": sim.tenant, "clientId": sim.client_id, "clientSecret": sim.client_secret,
        "resourceGroup": network.group, "location": network.location });
    (sim, coordinates.to_string())
}

/// Runs a program without holding up the simulator in this process.
async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn azures_python_clients_cannot_tell() {
    let Some(home) = tokio::task::spawn_blocking(|| environment("azure", &PACKAGES))
        .await
        .unwrap()
    else {
        print_line(
            "SKIPPED: azures_python_clients_cannot_tell: PyPI or python3 is not available, no real client was tried",
        );
        return;
    };
    let (sim, coordinates) = simulator().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/operations.py");
    let mut command = Command::new(home.join("bin/python"));
    command
        .arg(script)
        .env("SIM", coordinates)
        .env("NO_PROXY", "localhost,127.0.0.1");
    let output = run(command).await;
    let text = String::from_utf8_lossy(&output.stdout);
    eprintln!("{text}");
    let requests = sim.requests();
    let last: Vec<_> = requests.iter().rev().take(5).collect();
    assert!(
        output.status.success() && text.contains("all shown"),
        "{}\nlast requests: {last:#?}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A login, and what people do with scale sets by hand. The install is large, so it is asked for by `CAPSTAN_TEST_AZ=1`.
#[tokio::test(flavor = "multi_thread")]
async fn the_az_command_cannot_tell() {
    if std::env::var_os("CAPSTAN_TEST_AZ").is_none() {
        print_line("SKIPPED: the_az_command_cannot_tell: set CAPSTAN_TEST_AZ=1 to install and try az");
        return;
    }
    let Some(home) = tokio::task::spawn_blocking(|| environment("az", &AZ)).await.unwrap() else {
        print_line("SKIPPED: the_az_command_cannot_tell: PyPI or python3 is not available, az was not tried");
        return;
    };
    let (sim, coordinates) = simulator().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/az.sh");
    let config = std::env::temp_dir().join(format!("capstan-az-{}", std::process::id()));
    let path = format!(
        "{}:{}",
        home.join("bin").display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let mut command = Command::new("bash");
    command
        .arg(script)
        .env("SIM", coordinates)
        .env("PATH", path)
        .env("AZURE_CONFIG_DIR", &config);
    let output = run(command).await;
    let _ = std::fs::remove_dir_all(config);
    eprintln!("{}", String::from_utf8_lossy(&output.stdout));
    let asked: Vec<String> = sim
        .requests()
        .iter()
        .map(|request| format!("{} {} {}", request.method, request.path, request.status))
        .collect();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stderr),
        asked.join("\n")
    );
}
