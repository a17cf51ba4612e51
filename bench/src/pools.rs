//! A machine pool that is created, left alone for a while, and rolled to a new image.

use std::time::Duration;

use anyhow::{Result, bail};
use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine};
use capstan_kube::capi::Cluster;
use capstan_testkit::tenants::Tenant;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::azure::{CloudArgs, Meter, access};
use crate::measure::Audited;
use crate::pods;

const LOOK: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub struct Args {
    /// How many machines in each pool
    #[arg(long, default_value_t = 100)]
    machines: usize,
    /// How many pools
    #[arg(long, default_value_t = 1)]
    pools: usize,
    /// Run Cluster API's core, which owns the machines by Machines and drains them
    #[arg(long)]
    core: bool,
    /// A pod on every node, under a disruption budget that lets one of them go at a time
    #[arg(long)]
    pods: bool,
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

    /// Each place of the surge makes one machine after the other; an instance that is being deleted takes no place.
    fn ideal(&self) -> Duration {
        let rounds = self.machines.div_ceil(self.surge()) as u32;
        self.cloud.create.max * rounds
    }
}

struct Bench<'a> {
    args: &'a Args,
    tenant: Tenant,
}

pub async fn run(args: &Args) -> Result<()> {
    let plane = Audited::start_with(true, args.core).await?;
    plane.plane.install_crds().await?;
    if !args.core {
        plane.plane.install_cluster_api_crds().await?;
    }
    let bench = Bench {
        args,
        tenant: Tenant {
            client: plane.client().await?,
            namespace: plane.plane.namespace("bench").await?,
        },
    };
    let sim = args.cloud.start(&plane).await?;
    let kubeconfig = std::fs::read_to_string(plane.kubeconfig())?;
    bench.tenant.azure_cluster("c", &access(&sim), &kubeconfig).await?;
    if args.core {
        bench.make_control_plane().await?;
    }
    let mut child = args
        .cloud
        .run(&plane, &sim, "azure-pools", &bench.tenant.namespace)
        .await?;
    let namespace = bench.tenant.namespace.clone();

    let machines = args.machines * args.pools;
    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    bench.make_pools().await?;
    bench.until_settled(&sim, 1).await?;
    let what = format!("{} pools of {}, created", args.pools, args.machines);
    meter
        .report(&what, machines, args.cloud.create.max, args.cloud.details)
        .await?;
    let pods = match args.pods {
        true => Some(pods::run(&bench.tenant.client, &namespace, machines).await?),
        false => None,
    };

    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    let idle = Duration::from_secs(args.idle);
    tokio::time::sleep(idle).await;
    meter.report("left alone", machines, idle, args.cloud.details).await?;

    let meter = Meter::start(&plane, &sim, &namespace, &child)?;
    bench.upgrade().await?;
    bench.until_settled(&sim, 2).await?;
    let what = format!("rolled to another image with maxSurge {}", args.surge);
    meter.report(&what, machines, args.ideal(), args.cloud.details).await?;
    pods.iter().for_each(tokio::task::JoinHandle::abort);
    child.kill().await?;
    Ok(())
}

fn image(version: u32) -> String {
    format!("/subscriptions/s/resourceGroups/images/providers/Microsoft.Compute/images/node-{version}")
}

impl Bench<'_> {
    async fn make_pools(&self) -> Result<()> {
        let surge = self.args.surge.parse::<u64>();
        let surge = surge.map_or_else(|_| json!(self.args.surge), |number| json!(number));
        for name in self.names() {
            let machines = self.args.machines;
            self.tenant
                .azure_pool("c", &name, machines, surge.clone(), &image(1))
                .await?;
        }
        Ok(())
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (0..self.args.pools).map(|n| format!("pool-{n}"))
    }

    async fn upgrade(&self) -> Result<()> {
        let pools: Api<AzureMachinePool> = Api::namespaced(self.tenant.client.clone(), &self.tenant.namespace);
        let change = Patch::Merge(json!({ "spec": { "template": { "image": { "id": image(2) } } } }));
        for name in self.names() {
            pools.patch(&name, &PatchParams::default(), &change).await?;
        }
        Ok(())
    }

    /// Core connects to clusters whose control plane is up, and drains nodes where there is a Machine of a control plane.
    async fn make_control_plane(&self) -> Result<()> {
        let clusters: Api<Cluster> = Api::namespaced(self.tenant.client.clone(), &self.tenant.namespace);
        let up = json!({ "status": { "initialization": { "controlPlaneInitialized": true } } });
        clusters
            .patch_status("c", &PatchParams::default(), &Patch::Merge(up))
            .await?;
        let machine = json!({
            "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Machine",
            "metadata": { "name": "control-plane", "labels": {
                "cluster.x-k8s.io/cluster-name": "c", "cluster.x-k8s.io/control-plane": ""
            } },
            "spec": {
                "clusterName": "c", "bootstrap": { "dataSecretName": "boot" },
                "infrastructureRef": {
                    "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureMachinePoolMachine", "name": "none"
                }
            }
        });
        let path = "cluster.x-k8s.io/v1beta2/machines";
        self.tenant.create(path, &machine).await.map(drop)
    }

    /// Waits until the pools have exactly their machines, all ready and with this image.
    async fn until_settled(&self, sim: &capstan_sim::azure::Handle, version: u32) -> Result<()> {
        let machines: Api<AzureMachinePoolMachine> =
            Api::namespaced(self.tenant.client.clone(), &self.tenant.namespace);
        let pools: Api<AzureMachinePool> = Api::namespaced(self.tenant.client.clone(), &self.tenant.namespace);
        let waiting = async {
            loop {
                let all = machines.list(&Default::default()).await?.items;
                let good = |machine: &AzureMachinePoolMachine| {
                    let status = machine.status.clone().unwrap_or_default();
                    status.ready && status.latest_model_applied && machine.metadata.deletion_timestamp.is_none()
                };
                let settled = |pool: &AzureMachinePool| {
                    let status = pool.status.clone().unwrap_or_default();
                    let done = status.replicas as usize == self.args.machines;
                    let mut conditions = status.conditions.iter();
                    done && status.long_running_operation_states.is_empty()
                        && conditions.any(|c| c.type_ == "ScaleSetModelUpdated" && c.status == "True")
                };
                let listed = pools.list(&Default::default()).await?.items;
                if self
                    .names()
                    .all(|name| has_image(sim, &name, version, self.args.machines))
                    && all.len() == self.args.machines * self.args.pools
                    && all.iter().all(good)
                    && listed.iter().all(settled)
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
fn has_image(sim: &capstan_sim::azure::Handle, pool: &str, version: u32, count: usize) -> bool {
    let set = format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/Microsoft.Compute/virtualMachineScaleSets/{pool}",
        sim.subscription
    );
    let instances = sim.instances(&set);
    let wanted = json!(image(version));
    instances.len() == count
        && instances
            .iter()
            .all(|instance| instance.pointer("/properties/storageProfile/imageReference/id") == Some(&wanted))
}
