//! Pools beside the real Cluster API core manager: it owns every machine by a Machine, and drains.

use crate::harness;

use std::collections::BTreeSet;

use anyhow::Result;
use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine};
use capstan_kube::capi::{Cluster, Machine, MachineDrainRule, MachinePool};
use capstan_kube::nodes::takes_pods;
use capstan_testkit::ControlPlane;
use futures::StreamExt;
use harness::{Options, World};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::json;
use tokio::task::JoinHandle;

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
            capstan_testkit::print_line(&about[about.len().saturating_sub(12)..].join("\n"));
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

impl Core {
    /// Waits until core gives this reason for the state of a Machine's deletion.
    async fn until_core_says(&self, machine: &AzureMachinePoolMachine, reason: &str) -> Result<()> {
        let (machines, name) = (self.0.api::<Machine>(), owner(machine).unwrap());
        let said = async || {
            let machine = machines.get(&name).await?;
            let conditions = machine.status.iter().flat_map(|status| &status.conditions);
            let mut deleting = conditions.filter(|c| c.type_ == "Deleting" && c.status == "True");
            Ok(deleting.any(|c| c.reason.as_deref() == Some(reason)).then_some(()))
        };
        self.0.until(&format!("core's word: {reason}"), said).await
    }

    /// Follows a Machine until it is gone. Returns what core says about its deletion, in order.
    async fn follow(&self, machine: &AzureMachinePoolMachine) -> Result<JoinHandle<Vec<String>>> {
        let one = WatchParams::default().fields(&format!("metadata.name={}", owner(machine).unwrap()));
        let changes = self.0.api::<Machine>().watch(&one, "0").await?;
        let reasons = changes
            .take_while(|change| std::future::ready(!matches!(change, Ok(WatchEvent::Deleted(_)) | Err(_))))
            .filter_map(|change| std::future::ready(change.ok().as_ref().and_then(deletion)));
        Ok(tokio::spawn(async move {
            let mut all: Vec<String> = reasons.collect().await;
            all.dedup();
            all
        }))
    }

    /// Scales the pool up and down again, so that Capstan chooses this machine to leave. Returns the one that stays. Whoever
    /// deletes an AzureMachinePoolMachine itself keeps core from draining.
    async fn let_leave(&self, machine: &AzureMachinePoolMachine) -> Result<AzureMachinePoolMachine> {
        let (world, name) = (&self.0, machine.name_any());
        world.scale(2).await?;
        let mut two = self.until_owned(2).await?;
        // Core drains no Machine whose Node it does not know.
        self.until_joined(2).await?;
        two.retain(|one| one.name_any() != name);
        let note = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "yes" } } });
        world.patch::<AzureMachinePoolMachine>(&name, note).await?;
        world.scale(1).await?;
        Ok(two.remove(0))
    }

    async fn rules_of_core_are_kept(&self, first: &AzureMachinePoolMachine) -> Result<()> {
        let world = &self.0;
        // Nobody drains before a hook is taken away; then core does.
        let (hook, name) = (
            "pre-drain.delete.hook.machine.cluster.x-k8s.io/backup",
            owner(first).unwrap(),
        );
        let hooked = |value: Option<&str>| json!({ "metadata": { "annotations": { hook: value } } });
        world.patch::<Machine>(&name, hooked(Some(""))).await?;
        world.guarded_pod("cache", &node_of(first)).await?;
        let second = self.let_leave(first).await?;
        self.until_core_says(first, "WaitingForPreDrainHook").await?;
        let node = Api::<Node>::all(world.client.clone()).get(&node_of(first)).await?;
        assert!(takes_pods(&node), "cordoned before its hook has run");
        world.patch::<Machine>(&name, hooked(None)).await?;
        self.until_core_says(first, "DrainingNode").await?;
        // Whoever looks at the pool sees what core waits for.
        let told = async || {
            let told = world.condition("ScaleSetDesiredReplicas").await?;
            let names = |text: &str| text.contains("cache") && text.contains("disruption budget");
            Ok(told.filter(|(_, text)| names(text)))
        };
        world
            .until("core's pod and budget in the pool's condition", told)
            .await?;
        self.assert_untouched("cache", first).await?;
        self.let_go("cache").await?;
        self.until_gone(first).await?;

        // A rule leaves a pod alone that its budget would keep for ever.
        world.guarded_pod("job", &node_of(&second)).await?;
        world
            .create::<MachineDrainRule>(json!({
                "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachineDrainRule", "metadata": { "name": "jobs" },
                "spec": { "drain": { "behavior": "Skip" }, "pods": [{ "selector": { "matchLabels": { "app": "job" } } }] }
            }))
            .await?;
        let third = self.let_leave(&second).await?;
        self.until_gone(&second).await?;
        let rules = world.api::<MachineDrainRule>();
        rules.delete("jobs", &DeleteParams::default()).await?;

        // A drain that takes too long is given up once, and not begun again by core.
        world.guarded_pod("slow", &node_of(&third)).await?;
        let timeout = json!({ "spec": { "nodeDrainTimeout": "3s" } });
        world.patch::<AzureMachinePool>(&world.name, timeout).await?;
        let followed = self.follow(&third).await?;
        self.let_leave(&third).await?;
        self.until_gone(&third).await?;
        let reasons = followed.await?;
        assert!(!reasons.contains(&"DrainingNode".to_owned()), "{reasons:?}");
        let forever = json!({ "spec": { "nodeDrainTimeout": null } });
        world.patch::<AzureMachinePool>(&world.name, forever).await?;
        self.until_owned(1).await.map(drop)
    }
}

/// Core's reason for the state of a Machine's deletion.
fn deletion(change: &WatchEvent<Machine>) -> Option<String> {
    let (WatchEvent::Added(machine) | WatchEvent::Modified(machine)) = change else {
        return None;
    };
    let mut conditions = machine.status.iter().flat_map(|status| &status.conditions);
    let deleting = conditions.find(|c| c.type_ == "Deleting" && c.status == "True");
    deleting.and_then(|condition| condition.reason.clone())
}

fn node_of(machine: &AzureMachinePoolMachine) -> String {
    machine.status.clone().unwrap().node_ref.unwrap().name.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_rules_and_timeouts_of_drains_mean_what_they_mean_to_core() -> Result<()> {
    let core = Core::start().await?;
    core.make_control_plane().await?;
    core.0.scale(1).await?;
    let one = core.until_owned(1).await?;
    core.rules_of_core_are_kept(&one[0]).await
}

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
    core.0.guarded_pod("web", &node_of(&two[0])).await?;
    core.0.delete_machine(&two[0].name_any()).await?;
    core.0.until_blocked(&two[0].name_any()).await?;
    core.assert_untouched("web", &two[0]).await?;
    core.let_go("web").await?;
    core.until_gone(&two[0]).await?;
    let two = core.until_owned(2).await?;

    // With one it does, and it finds the node drained: it does not wait for its next look. The machine whose pod may not go
    // lives until the pod may.
    let note = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "yes" } } });
    core.0
        .patch::<AzureMachinePoolMachine>(&two[0].name_any(), note)
        .await?;
    core.make_control_plane().await?;
    core.0.guarded_pod("db", &node_of(&two[0])).await?;
    core.0.scale(1).await?;
    let why = core.0.until_blocked(&two[0].name_any()).await?;
    assert!(why.contains("/db is blocked by budget"), "{why}");
    core.assert_untouched("db", &two[0]).await?;
    let machine = machines.get(&owner(&two[0]).unwrap()).await?;
    assert_eq!(machine.metadata.deletion_timestamp, None, "core has not begun to drain");
    let followed = core.follow(&two[0]).await?;
    core.let_go("db").await?;
    core.until_gone(&two[0]).await?;
    let reasons = followed.await?;
    assert!(
        reasons.contains(&"WaitingForInfrastructureDeletion".to_owned()),
        "{reasons:?}"
    );
    assert!(!reasons.contains(&"DrainingNode".to_owned()), "{reasons:?}");
    let one = core.until_owned(1).await?;
    assert_eq!(one[0].name_any(), two[1].name_any(), "the annotated one went");
    core.0.bounds.assert_kept();

    // A second pool whose name begins like the first one's, as clusterctl names them. Core finds the Node of every Machine.
    let options = Options {
        replicas: 2,
        ..Options::default()
    };
    core.0.make_pool("workload-cluster-mp-1", &options).await?;
    core.until_joined(3).await?;

    // A whole pool goes, with its Machines.
    let pools = core.0.api::<MachinePool>();
    pools.delete("workload-cluster-mp-1", &DeleteParams::default()).await?;
    let gone = async || {
        let left = pools.get_opt("workload-cluster-mp-1").await?.is_some();
        let sets = core.0.sim.ids("virtualMachineScaleSets").len();
        Ok((!left && sets == 1).then_some(()))
    };
    core.0.until("the end of the second pool", gone).await?;
    core.until_joined(1).await?;
    assert_eq!(core.0.machines().await?.len(), 1);
    Ok(())
}
