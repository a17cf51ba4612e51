//! Pools beside the real Cluster API core manager: it owns every machine by a Machine, and drains.

use crate::harness;

use std::collections::BTreeSet;

use anyhow::Result;
use capstan_api::azure::AzureMachinePoolMachine;
use capstan_kube::capi::{Cluster, Machine};
use capstan_testkit::ControlPlane;
use harness::{Options, World};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;

/// The Machine that owns a pool's machine.
fn owner(machine: &AzureMachinePoolMachine) -> Option<String> {
    let mut owners = machine.owner_references().iter();
    owners
        .find(|owner| owner.kind == "Machine")
        .map(|owner| owner.name.clone())
}

struct Core(World);

impl Core {
    /// A pool of two, each owned by a Machine.
    async fn start() -> Result<Self> {
        let plane = capstan_testkit::Options {
            capi_core: true,
            ..Default::default()
        };
        let options = Options {
            replicas: 2,
            group: "My-RG",
            name: Some("workload-cluster-mp-0"),
            ..Options::default()
        };
        let world = World::prepare_on(ControlPlane::start(plane).await?, options).await?;
        // No control plane provider runs here; core connects to clusters whose control plane is said to be up.
        let up = json!({ "status": { "initialization": { "controlPlaneInitialized": true } } });
        world
            .api::<Cluster>()
            .patch_status("c", &PatchParams::default(), &Patch::Merge(up))
            .await?;
        let core = Self(world.started().await?);
        core.until_owned(2).await?;
        Ok(core)
    }

    /// Waits until there are so many ready machines, each of them owned, and no Machine besides.
    async fn until_owned(&self, count: usize) -> Result<Vec<AzureMachinePoolMachine>> {
        let world = &self.0;
        world.until_ready(count).await?;
        let all_owned = async || {
            let machines = world.machines().await?;
            let workers = ListParams::default().labels("!cluster.x-k8s.io/control-plane");
            let owners = world.api::<Machine>().list(&workers).await?.items;
            let owned = machines.iter().all(|machine| owner(machine).is_some());
            Ok((machines.len() == count && owners.len() == count && owned).then_some(machines))
        };
        let found = world.until(&format!("{count} Machines, one for each"), all_owned).await;
        if found.is_err() {
            let log = std::fs::read_to_string(world.plane.dir().join("cluster-api.log")).unwrap_or_default();
            let about: Vec<&str> = log.lines().filter(|line| line.contains("achine")).collect();
            harness::say(&about[about.len().saturating_sub(12)..].join("\n"));
        }
        found
    }

    /// Waits until there are so many Machines, each with a Node of its own.
    async fn until_joined(&self, count: usize) -> Result<()> {
        let world = &self.0;
        let joined = async || {
            let workers = ListParams::default().labels("!cluster.x-k8s.io/control-plane");
            let machines = world.api::<Machine>().list(&workers).await?.items;
            let node = |machine: &Machine| Some(machine.status.as_ref()?.node_ref.as_ref()?.name.clone());
            let nodes: BTreeSet<_> = machines.iter().filter_map(node).collect();
            Ok((machines.len() == count && nodes.len() == count).then_some(()))
        };
        world.until(&format!("{count} Machines with a Node each"), joined).await
    }

    /// A Machine that core takes for a control plane's.
    async fn make_control_plane(&self) -> Result<()> {
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
        self.0.create::<Machine>(machine).await?;
        Ok(())
    }

    /// The pod still runs, and so does the instance under it.
    async fn assert_untouched(&self, pod: &str, machine: &AzureMachinePoolMachine) -> Result<()> {
        let pod = self.0.api::<Pod>().get(pod).await?;
        assert!(pod.metadata.deletion_timestamp.is_none());
        let id = machine.spec.provider_id.to_lowercase();
        let mut instances = self.0.instance_ids().into_iter();
        assert!(instances.any(|instance| id.ends_with(&instance.to_lowercase())));
        Ok(())
    }

    async fn let_go(&self, pod: &str) -> Result<()> {
        let budgets = self.0.api::<k8s_openapi::api::policy::v1::PodDisruptionBudget>();
        budgets.delete(pod, &DeleteParams::default()).await?;
        Ok(())
    }

    async fn until_gone(&self, machine: &AzureMachinePoolMachine) -> Result<()> {
        let (world, owner) = (&self.0, owner(machine).unwrap());
        world.until_gone(&machine.name_any()).await?;
        let gone = async || Ok(world.api::<Machine>().get_opt(&owner).await?.is_none().then_some(()));
        world.until(&format!("end of Machine {owner}"), gone).await
    }
}

/// One test, because the core manager is started once.
#[tokio::test(flavor = "multi_thread")]
async fn core_owns_the_machines_and_drains_them() -> Result<()> {
    let mut core = Core::start().await?;
    core.0.watch_bounds(2, 3);

    // A rollout.
    core.0.upgrade(2).await?;
    core.0.until_rolling().await?;
    let two = core.until_owned(2).await?;
    core.0.bounds.assert_kept();

    // A pool's machine that somebody deletes takes its Machine along, and the other way round.
    core.0.bounds.set(1, 3);
    core.0.delete_machine(&two[0].name_any()).await?;
    core.until_gone(&two[0]).await?;
    let two = core.until_owned(2).await?;
    let machines = core.0.api::<Machine>();
    machines
        .delete(&owner(&two[0]).unwrap(), &DeleteParams::default())
        .await?;
    core.until_gone(&two[0]).await?;
    let two = core.until_owned(2).await?;

    // Core does not drain where it sees no control plane. Then we do, before anything goes.
    let node = two[0].status.clone().unwrap().node_ref.unwrap().name.unwrap();
    core.0.guarded_pod("web", &node).await?;
    core.0.delete_machine(&two[0].name_any()).await?;
    core.0.until_blocked(&two[0].name_any()).await?;
    core.assert_untouched("web", &two[0]).await?;
    core.let_go("web").await?;
    core.until_gone(&two[0]).await?;
    let two = core.until_owned(2).await?;

    // With one it does. The machine whose pod may not go lives until the pod may.
    let note = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "yes" } } });
    core.0
        .patch::<AzureMachinePoolMachine>(&two[0].name_any(), note)
        .await?;
    core.make_control_plane().await?;
    let node = two[0].status.clone().unwrap().node_ref.unwrap().name.unwrap();
    core.0.guarded_pod("db", &node).await?;
    core.0.scale(1).await?;
    let held = owner(&two[0]).unwrap();
    core.0
        .until("core's word on the drain", async || {
            let machine = machines.get(&held).await?;
            let said = machine.status.iter().flat_map(|status| &status.conditions);
            let draining = said.filter(|c| c.type_ == "Deleting" && c.status == "True");
            let reasons: Vec<String> = draining.filter_map(|c| c.reason.clone()).collect();
            Ok(reasons.contains(&"DrainingNode".to_owned()).then_some(()))
        })
        .await?;
    core.assert_untouched("db", &two[0]).await?;
    core.let_go("db").await?;
    core.until_gone(&two[0]).await?;
    let one = core.until_owned(1).await?;
    assert_eq!(one[0].name_any(), two[1].name_any(), "the annotated one went");
    core.0.bounds.assert_kept();

    // A second pool whose name begins like the first one's, as clusterctl names them. Core finds the Node of every Machine.
    let options = Options {
        replicas: 2,
        ..Options::default()
    };
    core.0.make_pool("workload-cluster-mp-1", &options).await?;
    core.until_joined(3).await
}
