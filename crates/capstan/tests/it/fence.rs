//! The whole program, started before its definitions are there, whose API server goes away in the middle of a machine's
//! creation.

use crate::program;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use capstan_sim::azure::faults::{Action, Fault};
use capstan_sim::azure::{Azure, Config, Handle};
use capstan_testkit::{ControlPlane, Options, manifests};

use program::{LIMIT, capstan, scratch, signal, wait};

const RENEW_DEADLINE: Duration = Duration::from_secs(6);
/// Time enough for a write that should not be sent.
const WATCHED: Duration = Duration::from_secs(4);

/// Ends with the test, however that ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The machine of the OpenShift example, with all that it needs.
async fn apply_machine(plane: &ControlPlane, azure: &Handle) -> Result<()> {
    let text = include_str!("../../../../examples/openshift.yaml")
        .replace("${AZURE_SUBSCRIPTION_ID}", &azure.subscription)
        .replace("${AZURE_TENANT_ID}", &azure.tenant)
        .replace("${AZURE_CLIENT_ID}", &azure.client_id)
        .replace("${AZURE_CLIENT_SECRET}", &azure.client_secret);
    let mut objects = manifests::parse(&text)?;
    objects.retain(|object| object.types.as_ref().is_some_and(|types| types.kind != "MachineSet"));
    manifests::apply(&plane.client().await?, "default", &objects).await?;
    Ok(())
}

fn start(plane: &ControlPlane, azure: &Handle, log: std::fs::File) -> Result<Running> {
    let child = capstan()
        .args(["run", "--controllers", "openshift", "--webhook", "0"])
        .args(["--health", "0", "--metrics", "0", "--leader-elect-namespace", "default"])
        .args([
            "--leader-elect-renew-deadline",
            "6s",
            "--leader-elect-lease-duration",
            "9s",
        ])
        .args(["--leader-elect-retry-period", "300ms", "--kubeconfig"])
        .arg(plane.kubeconfig())
        .args(["--azure-authority-host", &azure.url])
        .args(["--azure-resource-manager-endpoint", &azure.url, "--azure-ca-file"])
        .arg(&azure.ca_file)
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()?;
    Ok(Running(child))
}

fn writes(azure: &Handle) -> Vec<String> {
    let requests = azure.arm_requests().into_iter().filter(|request| request.is_write());
    requests
        .map(|request| format!("{} {}", request.method, request.path))
        .collect()
}

async fn until(what: &str, met: impl Fn() -> bool) -> Result<()> {
    let since = Instant::now();
    while !met() {
        ensure!(since.elapsed() < LIMIT, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_to_azure_after_the_lease_has_expired_and_the_machine_is_finished_later() -> Result<()> {
    let options = Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    };
    let mut plane = ControlPlane::start(options).await?;
    let azure = Azure::start(Config::quick()).await?;
    // The machine's interface takes until we say so; the machine itself is next.
    azure.fault(Fault::new(Action::Stall).method("PUT").path("networkInterfaces"))?;
    let dir = scratch("fence");
    std::fs::create_dir_all(&dir)?;
    let mut run = start(&plane, &azure, std::fs::File::create(dir.join("log"))?)?;
    let said = || std::fs::read_to_string(dir.join("log")).unwrap_or_default();
    // It is there before its definitions are, and takes them up without a restart.
    let waits = || said().contains("waits for its definition");
    until("its wait for definitions", waits).await.with_context(said)?;
    plane.install_crds().await?;
    apply_machine(&plane, &azure).await?;
    let begun = || writes(&azure).iter().any(|write| write.contains("networkInterfaces"));
    until("the interface", begun).await.with_context(said)?;

    plane.process("kube-apiserver").context("our own")?.pause()?;
    tokio::time::sleep(RENEW_DEADLINE + Duration::from_secs(1)).await;
    let before = writes(&azure);
    azure.clear_faults();
    ensure!(azure.release() > 0, "the interface was not waited for: {before:?}");
    tokio::time::sleep(WATCHED).await;
    ensure!(
        writes(&azure) == before,
        "written without a lease: {:?}",
        writes(&azure)
    );
    ensure!(azure.ids("virtualMachines").is_empty());

    plane.process("kube-apiserver").context("our own")?.resume()?;
    until("the machine", || azure.ids("virtualMachines").len() == 1)
        .await
        .with_context(said)?;
    ensure!(
        azure.ids("networkInterfaces").len() == 1,
        "{:?}",
        azure.ids("networkInterfaces")
    );
    signal(&run.0, "-TERM")?;
    ensure!(wait(&mut run.0, LIMIT)?.success(), "{}", said());
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
