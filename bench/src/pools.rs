//! A machine pool that is created, left alone for a while, and rolled to a new image.

use std::time::Duration;

use anyhow::{Result, bail};
use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::azure::{CloudArgs, Meter, create};
use crate::measure::Audited;

const LOOK: Duration = Duration::from_millis(200);
const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const CLUSTER_API: &str = "cluster.x-k8s.io/v1beta2";

#[derive(clap::Args)]
pub struct Args {
    /// How many machines
    #[arg(long, default_value_t = 100)]
    machines: usize,
    /// maxSurge, a number or percent
    #[arg(long, default_value = "10%")]
    surge: String,
    /// Seconds to leave the pool alone, and count what that costs
    #[arg(long, default_value_t = 20)]
    idle: u64,
    #[command(flatten)]
    cloud: CloudArgs,
}

impl Args {
    fn surge(&self) -> usize {
        let number: usize = self.surge.trim_end_matches('%').parse().unwrap_or(1);
        if self.surge.ends_with('%') {
            (self.machines * number).div_ceil(100)
        } else {
            number
        }
        .max(1)
    }

    /// Each place of the surge makes a machine and then waits for an old one to go, over and over.
    fn ideal(&self) -> Duration {
        let rounds = self.machines.div_ceil(self.surge()) as u32;
        (self.cloud.create.max + self.cloud.delete.max) * rounds
    }
}

struct Bench<'a> {
    args: &'a Args,
    client: kube::Client,
    namespace: String,
}

pub async fn run(args: &Args) -> Result<()> {
    let plane = Audited::start_with(true).await?;
    plane.plane.install_crds().await?;
    plane.plane.install_cluster_api_crds().await?;
    let bench = Bench {
        args,
        client: plane.client().await?,
        namespace: plane.plane.namespace("bench").await?,
    };
    let sim = args.cloud.start(&plane).await?;
    bench.make_cluster(&sim, plane.kubeconfig()).await?;
    let mut child = args.cloud.run(&plane, &sim, "azure-pools", &bench.namespace).await?;
    let namespace = bench.namespace.clone();

    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    bench.make_pool().await?;
    bench.until_settled(&sim, 1).await?;
    let what = format!("a pool of {}, created", args.machines);
    meter
        .report(&what, args.machines, args.cloud.create.max, args.cloud.details)
        .await?;

    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    let idle = Duration::from_secs(args.idle);
    tokio::time::sleep(idle).await;
    meter
        .report("left alone", args.machines, idle, args.cloud.details)
        .await?;

    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    let pools: Api<AzureMachinePool> = Api::namespaced(bench.client.clone(), &namespace);
    let change = json!({ "spec": { "template": { "image": { "id": image(2) } } } });
    pools
        .patch("pool", &PatchParams::default(), &Patch::Merge(change))
        .await?;
    bench.until_settled(&sim, 2).await?;
    let what = format!("rolled to another image with maxSurge {}", args.surge);
    meter
        .report(&what, args.machines, args.ideal(), args.cloud.details)
        .await?;
    child.kill().await?;
    Ok(())
}

fn image(version: u32) -> String {
    format!("/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node-{version}")
}

impl Bench<'_> {
    async fn make(&self, path: &str, object: Value) -> Result<Value> {
        create(&self.client, &self.namespace, path, &object).await
    }

    async fn secret(&self, name: &str, key: &str, value: &str) -> Result<()> {
        let object =
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name }, "stringData": { key: value } });
        self.make("v1/secrets", object).await.map(drop)
    }

    async fn make_cluster(&self, sim: &capstan_sim::azure::Handle, kubeconfig: &std::path::Path) -> Result<()> {
        self.secret("azure", "clientSecret", &sim.client_secret).await?;
        self.secret("boot", "value", "#cloud-config\n{}\n").await?;
        let object = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
            "metadata": { "name": "c-kubeconfig", "labels": { "cluster.x-k8s.io/cluster-name": "c" } },
            "stringData": { "value": std::fs::read_to_string(kubeconfig)? },
        });
        self.make("v1/secrets", object).await?;
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": { "name": "sp" },
            "spec": { "type": "ServicePrincipal", "tenantID": sim.tenant, "clientID": sim.client_id,
                "clientSecret": { "name": "azure", "namespace": self.namespace }, "allowedNamespaces": {} },
        });
        self.make(&format!("{INFRASTRUCTURE}/azureclusteridentities"), object)
            .await?;
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": { "name": "c" },
            "spec": { "subscriptionID": sim.subscription, "location": "eastus", "resourceGroup": "capstan",
                "identityRef": { "apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": "sp" },
                "networkSpec": { "vnet": { "name": "capstan-vnet" }, "subnets": [{ "name": "node-subnet", "role": "node" }] } },
        });
        self.make(&format!("{INFRASTRUCTURE}/azureclusters"), object).await?;
        let reference = json!({ "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureCluster", "name": "c" });
        let object = json!({ "apiVersion": CLUSTER_API, "kind": "Cluster", "metadata": { "name": "c" }, "spec": { "infrastructureRef": reference } });
        self.make(&format!("{CLUSTER_API}/clusters"), object).await.map(drop)
    }

    async fn make_pool(&self) -> Result<()> {
        let reference =
            json!({ "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureMachinePool", "name": "pool" });
        let object = json!({
            "apiVersion": CLUSTER_API, "kind": "MachinePool", "metadata": { "name": "pool" },
            "spec": { "clusterName": "c", "replicas": self.args.machines, "template": { "spec": {
                "clusterName": "c", "version": "v1.36.3", "bootstrap": { "dataSecretName": "boot" }, "infrastructureRef": reference } } },
        });
        self.make(&format!("{CLUSTER_API}/machinepools"), object).await?;
        let surge = self
            .args
            .surge
            .parse::<u64>()
            .map_or_else(|_| json!(self.args.surge), |number| json!(number));
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": { "name": "pool" },
            "spec": { "location": "eastus",
                "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxSurge": surge, "maxUnavailable": 0, "deletePolicy": "Oldest" } },
                "template": { "vmSize": "Standard_D2s_v3", "osDisk": { "osType": "Linux", "diskSizeGB": 30 },
                    "image": { "id": image(1) }, "sshPublicKey": "" } },
        });
        self.make(&format!("{INFRASTRUCTURE}/azuremachinepools"), object)
            .await
            .map(drop)
    }

    /// Waits until the pool has exactly its machines, all ready and with this image.
    async fn until_settled(&self, sim: &capstan_sim::azure::Handle, version: u32) -> Result<()> {
        let machines: Api<AzureMachinePoolMachine> = Api::namespaced(self.client.clone(), &self.namespace);
        let pools: Api<AzureMachinePool> = Api::namespaced(self.client.clone(), &self.namespace);
        let waiting = async {
            loop {
                let all = machines.list(&Default::default()).await?.items;
                let good = |machine: &AzureMachinePoolMachine| {
                    let status = machine.status.clone().unwrap_or_default();
                    status.ready && status.latest_model_applied && machine.metadata.deletion_timestamp.is_none()
                };
                let status = pools.get("pool").await?.status.unwrap_or_default();
                let done =
                    status.replicas as usize == self.args.machines && status.long_running_operation_states.is_empty();
                let current = status
                    .conditions
                    .iter()
                    .any(|c| c.type_ == "ScaleSetModelUpdated" && c.status == "True");
                if has_image(sim, version, self.args.machines)
                    && all.len() == self.args.machines
                    && all.iter().all(good)
                    && done
                    && current
                {
                    return Ok(());
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        match tokio::time::timeout(self.args.cloud.patience(), waiting).await {
            Ok(outcome) => outcome,
            Err(_) => bail!(
                "image {version} was not everywhere after {} s",
                self.args.cloud.patience
            ),
        }
    }
}

/// Whether Azure has exactly so many instances, all with this image.
fn has_image(sim: &capstan_sim::azure::Handle, version: u32, count: usize) -> bool {
    let set = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/virtualMachineScaleSets/pool",
        sim.subscription
    );
    let instances = sim.instances(&set);
    let wanted = json!(image(version));
    instances.len() == count
        && instances
            .iter()
            .all(|instance| instance.pointer("/properties/storageProfile/imageReference/id") == Some(&wanted))
}
