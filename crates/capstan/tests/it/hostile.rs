//! `capstan run` beside hostile tenants. The test bounds memory; `capstan-bench hostile` measures time, too.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use capstan_sim::azure::{Azure, Config};
use capstan_testkit::ControlPlane;
use capstan_testkit::hostile::{NO_MEMORY, Server, SlowClients, Vcenter};
use capstan_testkit::tenants::{AzureAccess, Tenant, VcenterAccess};
use serde_json::json;

use crate::program::{self, Started, build_parts, capstan, kubectl_until, scratch};

/// What `capstan run` may need, whatever its tenants name. The pages of the program itself are not counted: a debug build
/// has several times more of them.
const LIMIT_MIB: u64 = 128;

/// Records the largest anonymous memory of a process until it is dropped.
struct Peak {
    kib: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Peak {
    fn of(pid: u32) -> Self {
        let (kib, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (peak, stopped) = (kib.clone(), stop.clone());
        std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
                let now = line.and_then(|text| text.split_whitespace().next()?.parse().ok());
                peak.fetch_max(now.unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        Self { kib, stop }
    }

    fn mib(&self) -> u64 {
        self.kib.load(Ordering::Relaxed) / 1024
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_servers_and_clients_cost_a_bounded_amount_of_memory() -> Result<()> {
    build_parts().await?;
    let plane = ControlPlane::shared().await?;
    plane.install_crds().await?;
    plane.install_cluster_api_crds().await?;
    let azure = Azure::start(Config::quick()).await?;
    let tenant = Tenant {
        client: plane.client().await?,
        namespace: plane.namespace("hostile").await?,
    };
    let dir = scratch("hostile");
    std::fs::create_dir_all(&dir)?;
    let log = dir.join("log");
    let mut command = capstan();
    command
        .args([
            "run",
            "--controllers",
            "azure-pools,vsphere",
            "--namespace",
            &tenant.namespace,
        ])
        .args(["--leader-elect=false", "--webhook", "0", "--log-format", "json"])
        .args(["--health", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--kubeconfig"])
        .arg(plane.kubeconfig())
        // As the Deployment sets it.
        .env("MALLOC_ARENA_MAX", "1")
        .env("AZURE_AUTHORITY_HOST", &azure.url)
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &azure.url)
        .env("SSL_CERT_FILE", &azure.ca_file)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?);
    let child = Started(command.spawn()?);
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    program::until(|| text().contains("\"message\":\"starting\"")).with_context(text)?;
    let peak = Peak::of(child.0.id());
    let ports = ["health", "metrics"].map(|what| program::port(&text(), what));
    let ports = ports.iter().flatten().map(|port| format!("127.0.0.1:{port}"));
    let clients = SlowClients::start(&ports.collect::<Vec<_>>(), 100).await?;

    let mut servers = Vec::new();
    for kind in Vcenter::ALL {
        let server = Server::vcenter(kind).await?;
        let cluster = format!("{kind:?}").to_lowercase();
        let vcenter = VcenterAccess {
            server: server.address.clone(),
            username: "user".into(),
            password: "secret".into(),
            ca: server.ca.clone(),
        };
        tenant.vsphere_cluster(&cluster, &vcenter).await?;
        let owner = tenant.vsphere_owner(&cluster, &format!("{cluster}-m")).await?;
        tenant.vsphere_machine(&owner, 1).await?;
        servers.push((cluster, kind, server));
    }
    // Every page is large, and all 10,000 Nodes are read fast enough in a debug build on a busy machine, too.
    let nodes = Server::cluster(100_000, 10 << 10).await?;
    let access = AzureAccess {
        subscription: azure.subscription.clone(),
        tenant: azure.tenant.clone(),
        client_id: azure.client_id.clone(),
        client_secret: azure.client_secret.clone(),
    };
    tenant.azure_cluster("nodes", &access, &nodes.kubeconfig()).await?;
    let image = "/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node";
    tenant.azure_pool("nodes", "nodes-pool", 1, json!(1), image).await?;
    let arrays = Server::arrays().await?;
    tenant.azure_cluster("arrays", &access, &arrays.kubeconfig()).await?;
    tenant.azure_pool("arrays", "arrays-pool", 1, json!(1), image).await?;

    let messages = "jsonpath={.status.conditions[*].message}";
    for (cluster, kind, server) in &servers {
        let object = format!("vspherevm/{cluster}-m");
        let args = ["get", &object, "-n", &tenant.namespace, "-o", messages];
        kubectl_until(plane.kubeconfig(), &args, |text| {
            text.contains(kind.report()) || text.contains(NO_MEMORY)
        })
        .await
        .with_context(text)?;
        ensure!(server.requests() > 0);
    }
    let messages = "jsonpath={.items[*].status.conditions[*].message}";
    let args = [
        "get",
        "azuremachinepoolmachines",
        "-n",
        &tenant.namespace,
        "-o",
        messages,
    ];
    // A busy machine may not read the arrays up to their limit in the time of a turn.
    let arrays = ["the answer of the API server is too large", "does not end in time"];
    let nodes = ["more than 10000 Nodes", NO_MEMORY];
    let is_refused = |text: &str| {
        nodes.iter().any(|refusal| text.contains(refusal)) && arrays.iter().any(|refusal| text.contains(refusal))
    };
    kubectl_until(plane.kubeconfig(), &args, is_refused)
        .await
        .with_context(text)?;
    drop(clients);
    let mib = peak.mib();
    ensure!(mib > 0, "nothing was measured");
    ensure!(mib < LIMIT_MIB, "{mib} MiB");
    println!("{mib} MiB at peak without the pages of the program");
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
