//! Managed identity as App Service, Functions and their like offer it: by an endpoint and a secret in the environment.
//! The environment of a process cannot be changed safely while it runs, so the client is this program started again.
//! The instance metadata service of a virtual machine has a fixed address, which no test can take; its answers and
//! the code that reads them are the same.

use anyhow::{Context as _, Result, ensure};
use capstan_azure::{Clients, Cloud, Credential, Settings};
use capstan_sim::azure::{Azure, Config};
use std::process::Command;

/// What the child does: signs in twice, and reads.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run as a child of the other test"]
async fn child() -> Result<()> {
    let var = |name: &str| std::env::var(name).with_context(|| format!("run as a child only: no {name}"));
    let url = var("SIM_URL")?;
    let settings = Settings {
        ca_file: Some(var("SIM_CA")?.into()),
        ..Settings::new(Cloud::custom("sim", &url, &url)?)
    };
    let clients = Clients::new(settings)?;
    for client_id in [None, Some("user-assigned".to_owned())] {
        let credential = Credential::ManagedIdentity { client_id };
        let client = clients.client(&credential, &var("SIM_SUBSCRIPTION")?).at("eastus");
        for _ in 0..3 {
            client.list_disks("capstan").await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_that_the_platform_manages_signs_in_once() -> Result<()> {
    let sim = Azure::start(Config::quick()).await?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--exact", "managed_identity::child", "--ignored", "--nocapture"])
        .env(
            "IDENTITY_ENDPOINT",
            format!("{}/metadata/identity/oauth2/token", sim.url),
        )
        .env("IDENTITY_HEADER", "the-platform's-secret")
        .env("SIM_URL", &sim.url)
        .env("SIM_CA", &sim.ca_file)
        .env("SIM_SUBSCRIPTION", &sim.subscription);
    let out = tokio::task::spawn_blocking(move || command.output()).await??;
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success() && said.contains("1 passed"), "{said}");
    ensure!(sim.sign_ins() == 2, "{} sign-ins of two identities", sim.sign_ins());
    let asked: Vec<_> = sim.requests().into_iter().filter(|r| r.policy == "SignIn").collect();
    ensure!(asked.len() == 2 && asked.iter().all(|r| r.method == "GET"), "{asked:?}");
    let by_client = asked
        .iter()
        .any(|r| format!("{r:?}").contains("client_id=user-assigned"));
    ensure!(by_client, "the user-assigned identity was not asked for: {asked:?}");
    Ok(())
}
