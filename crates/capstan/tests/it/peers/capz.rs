//! CAPZ makes pools, Capstan takes them over and works on them, and CAPZ gets them back; and both side by side, each with its own
//! kinds.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use capstan_sim::azure::{self, Azure};
use capstan_testkit::peers::{self, CAPZ, Installation, Peer};
use serde_json::{Value, json};

use super::played::Played;
use super::{Capstan, Management, Objects, same_objects};
use crate::program::build_parts;

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const KINDS: [&str; 4] = [
    "machines.v1beta2.cluster.x-k8s.io",
    "azuremachinepools.infrastructure.cluster.x-k8s.io",
    "azuremachinepoolmachines.infrastructure.cluster.x-k8s.io",
    "azureclusters.infrastructure.cluster.x-k8s.io",
];

struct World {
    management: Management,
    sim: azure::Handle,
    proxy: String,
    _played: Played,
}

impl World {
    async fn start() -> Result<Self> {
        build_parts().await?;
        CAPZ.build().await?;
        let management = Management::start(&KINDS).await?;
        let client = management.plane.client().await?;
        let sim = Azure::start(azure::Config {
            joiner: Some(azure::joiner::Options::client(client)),
            public_hosts: true,
            ..azure::Config::quick()
        })
        .await?;
        Ok(Self {
            proxy: peers::tunnel_to(sim.address).await?,
            _played: Played::start(&management.plane, &management.namespace).await?,
            sim,
            management,
        })
    }

    /// With `gates` that say which controllers run.
    async fn capz(&self, gates: &str, admits: fn(&str) -> bool) -> Result<Peer> {
        let variables = [
            ("HTTPS_PROXY", self.proxy.clone()),
            ("SSL_CERT_FILE", self.sim.ca_file.display().to_string()),
        ];
        let args = [format!("--feature-gates={gates},ASOAPI=false")];
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Peer::start(&self.management.plane, &CAPZ, &args, &variables, admits).await
    }

    /// CAPZ as its own manifests install it.
    async fn install(&self, gates: &str, admits: fn(&str) -> bool) -> Result<Installation> {
        let variables = [
            ("HTTPS_PROXY", self.proxy.clone()),
            ("SSL_CERT_FILE", self.sim.ca_file.display().to_string()),
        ];
        let gates = format!("--feature-gates={gates},ASOAPI=false");
        let args = ["--leader-elect", "--leader-election-namespace=capz-system", &gates];
        Installation::start(&self.management.plane, &CAPZ, &args, &variables, admits).await
    }

    fn capstan(&self) -> Result<Capstan> {
        let variables = [
            ("AZURE_RESOURCE_MANAGER_ENDPOINT", self.sim.url.clone()),
            ("AZURE_AUTHORITY_HOST", self.sim.url.clone()),
            ("SSL_CERT_FILE", self.sim.ca_file.display().to_string()),
        ];
        let args = ["--controllers", "azure-pools", "--azure-json", "--webhook", "0"];
        Capstan::start(&self.management.plane, &args, &variables)
    }

    /// A cluster whose network is there; `managed` by somebody else, or left to CAPZ.
    async fn make_cluster(&self, managed: bool) -> Result<()> {
        let kubeconfig = std::fs::read_to_string(self.management.plane.kubeconfig())?;
        let (group, network) = ("capstan", "capstan-vnet");
        let identity = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": "sp"});
        let annotations = match managed {
            true => json!({"cluster.x-k8s.io/managed-by": "test"}),
            false => json!({}),
        };
        let namespace = &self.management.namespace;
        self.management
            .apply(&[
                json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "sp"},
                    "stringData": {"clientSecret": self.sim.client_secret}}),
                json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "boot"},
                    "stringData": {"value": "#cloud-config\n{}\n"}}),
                json!({"apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
                    "metadata": {"name": "dock-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "dock"}},
                    "stringData": {"value": kubeconfig}}),
                json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": {"name": "sp"},
                    "spec": {"type": "ServicePrincipal", "tenantID": self.sim.tenant, "clientID": self.sim.client_id,
                        "clientSecret": {"name": "sp", "namespace": namespace}, "allowedNamespaces": {}}}),
                json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureCluster",
                    "metadata": {"name": "dock", "annotations": annotations},
                    "spec": {"location": "eastus", "resourceGroup": group, "subscriptionID": self.sim.subscription,
                        "identityRef": identity, "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443},
                        "networkSpec": {"vnet": {"name": network, "resourceGroup": group}, "subnets": [
                            {"name": "default", "role": "control-plane"}, {"name": "node-subnet", "role": "node"}]}}}),
                json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "Cluster", "metadata": {"name": "dock"},
                    "spec": {"controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443},
                        "infrastructureRef": {"apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "name": "dock"}}}),
            ])
            .await?;
        if managed {
            let ready = r#"{"status":{"ready":true}}"#;
            let patch = [
                "patch",
                "azurecluster",
                "dock",
                "--subresource=status",
                "--type=merge",
                "-p",
                ready,
            ];
            self.management.kubectl(&patch).await?;
        }
        Ok(())
    }

    /// A pool of two, with more fields in its template and its spec.
    fn pool(name: &str, replicas: u32, template: Value, extra: Value) -> [Value; 2] {
        let mut spec = json!({"location": "eastus", "template": {
            "vmSize": "Standard_D2s_v3", "sshPublicKey": KEY,
            "osDisk": {"osType": "Linux", "diskSizeGB": 30, "managedDisk": {"storageAccountType": "Premium_LRS"}}}});
        for (field, value) in template.as_object().into_iter().flatten() {
            spec["template"][field] = value.clone();
        }
        let mut annotations = json!({});
        for (field, value) in extra.as_object().into_iter().flatten() {
            match field.as_str() {
                "annotations" => annotations = value.clone(),
                field => spec[field] = value.clone(),
            }
        }
        let reference = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "name": name});
        [
            json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "MachinePool", "metadata": {"name": name},
                "spec": {"clusterName": "dock", "replicas": replicas, "template": {"spec": {"clusterName": "dock",
                    "version": "v1.34.2", "bootstrap": {"dataSecretName": "boot"}, "infrastructureRef": reference}}}}),
            json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool",
                "metadata": {"name": name, "annotations": annotations}, "spec": spec}),
        ]
    }

    /// Waits until each of these pools has so many machines that are ready, and no others.
    async fn running(&self, pools: &[(&str, usize)]) -> Result<Objects> {
        let wanted = |objects: &Objects| {
            for (pool, count) in pools {
                let of_pool = |(name, object): &(&String, &Value)| {
                    name.starts_with("azuremachinepoolmachines/")
                        && object["metadata"]["labels"]["cluster.x-k8s.io/pool-name"] == *pool
                };
                let machines: Vec<_> = objects.iter().filter(of_pool).collect();
                let ready = machines
                    .iter()
                    .filter(|(_, machine)| machine["status"]["ready"] == true)
                    .count();
                let state = &objects.get(&format!("azuremachinepools/{pool}")).context("no pool")?["status"];
                ensure!(
                    (machines.len(), ready) == (*count, *count) && state["provisioningState"] == "Succeeded",
                    "{pool}: {ready} of {} machines are ready, {}",
                    machines.len(),
                    state["provisioningState"]
                );
            }
            Ok(())
        };
        self.management.until(wanted).await
    }

    /// The instances of all scale sets.
    fn instances(&self) -> Vec<String> {
        let mut all = self.sim.ids("virtualMachineScaleSets");
        all.extend(self.sim.ids("virtualMachines"));
        all.sort();
        all
    }

    /// Writes to Azure since the log was cleared, without those of tags alone.
    fn effects(&self) -> Vec<String> {
        let writes = self.sim.arm_requests().into_iter().filter(azure::Request::is_write);
        writes
            .filter(|request| request.method != "PATCH")
            .map(|request| format!("{} {}", request.method, request.path))
            .collect()
    }

    /// The settings that each pool gives to the cloud provider of its nodes, with their owners: CAPZ and Capstan write the same.
    async fn settings(&self) -> Result<BTreeMap<String, Value>> {
        let text = self.management.kubectl(&["get", "secrets", "-o", "json"]).await?;
        let list: Value = serde_json::from_str(&text)?;
        let secrets = list["items"].as_array().into_iter().flatten();
        let of_pools = secrets.filter_map(|secret| {
            let name = secret["metadata"]["name"].as_str()?.strip_suffix("-azure-json")?;
            let meta = &secret["metadata"];
            let all = json!([
                secret["data"],
                secret["type"],
                meta["labels"],
                meta["ownerReferences"],
                meta["uid"]
            ]);
            Some((name.to_owned(), all))
        });
        Ok(of_pools.collect())
    }

    async fn untouched(&self, step: &str, before: &Objects, instances: &[String]) -> Result<()> {
        let after = self.management.settled().await?;
        self.management.keep(step, &after)?;
        ensure!(self.sim.sign_ins() > 0, "{step}: nobody has signed in");
        same_objects(before, &after)?;
        ensure!(self.instances() == instances, "{step}: other instances");
        let effects = self.effects();
        ensure!(effects.is_empty(), "{step}: Azure was changed: {effects:?}");
        Ok(())
    }
}

/// A key that CAPZ accepts: it checks the encoding.
const KEY: &str = include_str!("key.txt");

const POOLS: [(&str, usize); 5] = [("plain", 2), ("disks", 2), ("flex", 2), ("spot", 2), ("win", 2)];

fn pools() -> Vec<Value> {
    let disks = json!([{"nameSuffix": "logs", "diskSizeGB": 64, "lun": 0, "cachingType": "ReadOnly"}]);
    let windows = json!({"osType": "Windows", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}});
    [
        World::pool("plain", 2, json!({}), json!({})),
        World::pool("disks", 2, json!({"dataDisks": disks}), json!({})),
        World::pool("flex", 2, json!({}), json!({"orchestrationMode": "Flexible"})),
        World::pool("spot", 2, json!({"spotVMOptions": {"maxPrice": "0.25"}}), json!({})),
        World::pool(
            "win",
            2,
            json!({"osDisk": windows}),
            json!({"annotations": {"windowsServerVersion": "windows-2019"}}),
        ),
    ]
    .concat()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPZ: run by `just peers`"]
async fn pools_of_capz_are_taken_over_and_given_back_untouched() -> Result<()> {
    let world = World::start().await?;
    let management = &world.management;
    let peer = world.capz("MachinePool=true", |_| true).await?;
    world.make_cluster(true).await?;
    management.apply(&pools()).await?;
    world.running(&POOLS).await?;
    let made = management.settled().await?;
    management.keep("1-made-by-peer", &made)?;
    let instances = world.instances();
    let settings = world.settings().await?;
    ensure!(settings.len() == POOLS.len(), "{settings:?}");
    peer.stop().await?;

    world.sim.clear_requests();
    let capstan = world.capstan()?;
    world.untouched("2-taken-over", &made, &instances).await?;
    ensure!(
        world.settings().await? == settings,
        "Capstan writes other settings than CAPZ"
    );
    management.apply(&World::pool("plain", 3, json!({}), json!({}))).await?;
    management.apply(&World::pool("fresh", 2, json!({}), json!({}))).await?;
    let after = [
        ("plain", 3),
        ("disks", 2),
        ("flex", 2),
        ("spot", 2),
        ("win", 2),
        ("fresh", 2),
    ];
    world.running(&after).await?;
    let before = management.settled().await?;
    management.keep("3-made-by-capstan", &before)?;
    let instances = world.instances();
    let settings = world.settings().await?;
    ensure!(
        settings.contains_key("fresh"),
        "Capstan makes no settings for a new pool: {settings:?}"
    );
    capstan.stop()?;

    world.sim.clear_requests();
    let peer = world.capz("MachinePool=true", |_| true).await?;
    world.untouched("4-given-back", &before, &instances).await?;
    ensure!(
        world.settings().await? == settings,
        "CAPZ writes other settings than Capstan"
    );
    let list = ["delete", "machinepools", "--all", "--wait=false"];
    management.kubectl(&list).await?;
    let gone = |objects: &Objects| {
        let left: Vec<&String> = objects.keys().filter(|name| name.contains("pool")).collect();
        match left.is_empty() {
            true => Ok(()),
            false => bail!("still there: {left:?}"),
        }
    };
    management.until(gone).await?;
    ensure!(
        world.sim.ids("virtualMachineScaleSets").is_empty(),
        "scale sets are left"
    );
    peer.stop().await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPZ: run by `just peers`"]
async fn capz_without_pools_keeps_the_cluster_while_capstan_runs_the_pools() -> Result<()> {
    let world = World::start().await?;
    let management = &world.management;
    let admits = |resource: &str| !resource.starts_with("azuremachinepool") && !resource.starts_with("azuremanaged");
    let _capz = world.install("MachinePool=false", admits).await?;
    world.make_cluster(false).await?;
    let capstan = world.capstan()?;
    management
        .apply(&World::pool("beside", 2, json!({}), json!({})))
        .await?;
    let objects = world.running(&[("beside", 2)]).await?;
    let settings = world.settings().await?;
    ensure!(
        settings.contains_key("beside"),
        "nobody makes the settings of the nodes: {settings:?}"
    );
    let cluster = &objects["azureclusters/dock"];
    ensure!(cluster["status"]["ready"] == true, "{cluster}");
    // CAPZ's own conditions are there, and nobody else has written the status.
    let shown = management
        .kubectl(&["get", "azurecluster", "dock", "-o", "json", "--show-managed-fields"])
        .await?;
    let shown: Value = serde_json::from_str(&shown)?;
    let managers: Vec<&str> = shown["metadata"]["managedFields"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|entry| entry["subresource"] == "status")
        .filter_map(|entry| entry["manager"].as_str())
        .collect();
    ensure!(managers == ["cluster-api-provider-azure-manager"], "{managers:?}");
    capstan.stop()
}

const GATE: &str = "switch feature gate MachinePool of Deployment capz-system/capz-controller-manager off; it restarts";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPZ: run by `just peers`"]
async fn capstan_adopt_takes_the_pools_of_capz_over_and_gives_them_back() -> Result<()> {
    let world = World::start().await?;
    let management = &world.management;
    let mut capz = world.install("MachinePool=true", |_| true).await?;
    world.make_cluster(true).await?;
    let pools = [
        World::pool("plain", 2, json!({}), json!({})),
        World::pool("flex", 2, json!({}), json!({"orchestrationMode": "Flexible"})),
    ];
    management.apply(&pools.concat()).await?;
    world.running(&[("plain", 2), ("flex", 2)]).await?;
    let made = management.settled().await?;
    management.keep("adopt-1-made-by-peer", &made)?;
    let instances = world.instances();

    // Capstan waits for as long as CAPZ runs the pools.
    world.sim.clear_requests();
    let capstan = world.capstan()?;
    capstan.until_said("waits for", 1)?;
    let plan = management.adopt(&[], 2).await?;
    ensure!(
        plan.contains(&format!("{GATE} [--execute does it]"))
            && plan.contains("webhooks that CAPZ does not answer without feature gate MachinePool [--execute does it]")
            && plan.contains("found: Lease capz-system/controller-leader-election-capz, held by"),
        "{plan}"
    );
    ensure!(capstan.said("starting") == 0, "it acts beside CAPZ");
    management.adopt(&["--execute"], 2).await?;
    capz.follow().await?;
    management.adopted(GATE).await?;
    capstan.until_said("starting", 1)?;
    world.untouched("adopt-2-taken-over", &made, &instances).await?;
    management.apply(&World::pool("plain", 3, json!({}), json!({}))).await?;
    world.running(&[("plain", 3), ("flex", 2)]).await?;

    // An upgrade of CAPZ switches the gate on again: Capstan gives way, and comes back after the next adoption.
    let gate = r#"[{"op": "replace", "path": "/spec/template/spec/containers/0/args/2",
        "value": "--feature-gates=MachinePool=true,ASOAPI=false"}]"#;
    let deployment = ["-n", "capz-system", "patch", "deployment", "capz-controller-manager"];
    let patch = [&deployment[..], &["--type=json", "-p", gate]].concat();
    management.plane.kubectl(&patch).await?;
    capstan.until_said("stops", 1)?;
    management.adopt(&["--execute"], 2).await?;
    capstan.until_said("starting", 2)?;
    world.running(&[("plain", 3), ("flex", 2)]).await?;
    let before = management.settled().await?;
    management.keep("adopt-3-made-by-capstan", &before)?;
    let instances = world.instances();
    capstan.stop()?;

    world.sim.clear_requests();
    let reverted = management.adopt(&["--revert"], 0).await?;
    ensure!(reverted.contains("done: gave feature gate MachinePool"), "{reverted}");
    capz.follow().await?;
    world.untouched("adopt-4-given-back", &before, &instances).await?;
    management.apply(&World::pool("plain", 4, json!({}), json!({}))).await?;
    world.running(&[("plain", 4), ("flex", 2)]).await?;
    Ok(())
}
