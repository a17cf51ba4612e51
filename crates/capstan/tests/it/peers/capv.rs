//! CAPV makes a cluster, Capstan takes it over and works on it, and CAPV gets it back.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use capstan_testkit::peers::{CAPV_1_14, CAPV_1_16, Installation, Peer, Release};
use capstan_testkit::vcsim::Options;
use capstan_testkit::{Vcsim, vcsim};
use serde_json::{Value, json};

use super::played::Played;
use super::{Capstan, Management, Objects, same_objects};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const KINDS: [&str; 7] = [
    "machines.v1beta2.cluster.x-k8s.io",
    "vspheremachines.v1beta1.infrastructure.cluster.x-k8s.io",
    "vspherevms.v1beta1.infrastructure.cluster.x-k8s.io",
    "vsphereclusters.v1beta1.infrastructure.cluster.x-k8s.io",
    "vspheredeploymentzones.v1beta1.infrastructure.cluster.x-k8s.io",
    "vspherefailuredomains.v1beta1.infrastructure.cluster.x-k8s.io",
    "ipaddressclaims.v1beta2.ipam.cluster.x-k8s.io",
];

struct World {
    management: Management,
    sim: Vcsim,
    _played: Played,
}

impl World {
    async fn start() -> Result<Self> {
        let management = Management::start(&KINDS).await?;
        let options = Options {
            clusters: 2,
            ..Options::default()
        };
        Ok(Self {
            sim: vcsim(options).await?,
            _played: Played::start(&management.plane, &management.namespace).await?,
            management,
        })
    }

    async fn make_cluster(&self) -> Result<()> {
        self.tag_zone().await?;
        let kubeconfig = std::fs::read_to_string(self.management.plane.kubeconfig())?;
        let reference = json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereCluster", "name": "c"});
        let endpoint = json!({"host": "127.0.0.1", "port": 6443});
        let side = |kind: &str, name: &str| json!({"name": name, "type": kind, "tagCategory": format!("k8s-{name}")});
        let objects = [
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "vcenter"},
                "stringData": {"username": self.sim.username, "password": self.sim.password}}),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "boot"},
                "stringData": {"value": "#cloud-config\n{}\n"}}),
            json!({"apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
                "metadata": {"name": "c-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
                "stringData": {"value": kubeconfig}}),
            json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereFailureDomain", "metadata": {"name": "east"},
                "spec": {"region": side("Datacenter", "region"), "zone": side("ComputeCluster", "zone"), "topology": {
                    "datacenter": "DC0", "computeCluster": "DC0_C1", "datastore": "LocalDS_0", "networks": ["VM Network"]}}}),
            json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereDeploymentZone", "metadata": {"name": "east"},
                "spec": {"server": self.sim.server, "failureDomain": "east", "controlPlane": true,
                    "placementConstraint": {"resourcePool": "/DC0/host/DC0_C1/Resources", "folder": "/DC0/vm"}}}),
            json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "Cluster", "metadata": {"name": "c"},
                "spec": {"infrastructureRef": reference, "controlPlaneEndpoint": endpoint}}),
            json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereCluster", "metadata": {"name": "c"},
                "spec": {"server": self.sim.server, "thumbprint": self.sim.thumbprint,
                    "identityRef": {"kind": "Secret", "name": "vcenter"}, "controlPlaneEndpoint": endpoint}}),
            self.template("workers-1", &["images"]),
            self.template("zoned", &[]),
            self.deployment("workers", 2, "workers-1", None),
            self.deployment("zoned", 1, "zoned", Some("east")),
        ];
        self.management.apply(&objects).await
    }

    /// Attaches the tags of the zone, which CAPV 1.16 does not make itself.
    async fn tag_zone(&self) -> Result<()> {
        let http = reqwest::Client::builder()
            .tls_danger_accept_invalid_certs(true)
            .no_proxy()
            .build()?;
        let base = format!("https://{}/rest/com/vmware/cis", self.sim.server);
        let login = http.post(format!("{base}/session"));
        let login = login.basic_auth(&self.sim.username, Some(&self.sim.password));
        let session: Value = login.send().await?.error_for_status()?.json().await?;
        let session = session["value"].as_str().unwrap_or_default().to_owned();
        let post = async |path: String, body: Value| -> Result<Value> {
            let request = http.post(format!("{base}/tagging/{path}")).json(&body);
            let answer = request.header("vmware-api-session-id", &session).send().await?;
            let text = answer.error_for_status()?.text().await?;
            Ok(serde_json::from_str(&text).unwrap_or_default())
        };
        for (name, kind, path) in [
            ("region", "datacenter", "/DC0"),
            ("zone", "cluster", "/DC0/host/DC0_C1"),
        ] {
            let found = self.sim.admin.find(kind, path).await?;
            let (class, id) = found.first().and_then(|found| found.split_once(':')).context(path)?;
            let spec = json!({"name": format!("k8s-{name}"), "description": "", "cardinality": "MULTIPLE", "associable_types": [class]});
            let category = post("category".into(), json!({"create_spec": spec})).await?;
            let spec = json!({"name": name, "description": "", "category_id": category["value"]});
            let tag = post("tag".into(), json!({"create_spec": spec})).await?;
            let tag = tag["value"].as_str().context("a tag without an id")?;
            let attach = format!("tag-association/id:{tag}?~action=attach");
            post(attach, json!({"object_id": {"type": class, "id": id}})).await?;
        }
        Ok(())
    }

    /// Machines with data disks, with an address of a pool beside DHCP, and with a name that is longer than 63 characters.
    fn template(&self, name: &str, disks: &[&str]) -> Value {
        let disks: Vec<Value> = disks
            .iter()
            .map(|disk| json!({"name": disk, "sizeGiB": 5, "provisioningMode": "Thin"}))
            .collect();
        let pool = json!({"apiGroup": "ipam.cluster.x-k8s.io", "kind": "InClusterIPPool", "name": "addresses"});
        let mut spec = json!({
            "template": "pvscsi", "cloneMode": "linkedClone", "datacenter": "DC0", "datastore": "LocalDS_0",
            "folder": "/DC0/vm", "resourcePool": "/DC0/host/DC0_C0/Resources", "numCPUs": 2, "memoryMiB": 2048,
            "network": {"devices": [{"networkName": "VM Network", "dhcp4": true}]},
        });
        if disks.is_empty() {
            spec["storagePolicyName"] = json!("vSAN Default Storage Policy");
        } else {
            spec["dataDisks"] = json!(disks);
            spec["network"]["devices"][0]["addressesFromPools"] = json!([pool]);
            spec["namingStrategy"] =
                json!({"template": "{{ .machine.name }}-with-a-name-that-is-longer-than-a-label-may-be-0123456789"});
        }
        json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereMachineTemplate", "metadata": {"name": name},
            "spec": {"template": {"spec": spec}}})
    }

    fn deployment(&self, name: &str, replicas: u32, template: &str, zone: Option<&str>) -> Value {
        let labels = json!({"cluster.x-k8s.io/cluster-name": "c", "set": name});
        let mut spec = json!({
            "clusterName": "c", "version": "v1.36.0", "bootstrap": {"dataSecretName": "boot"},
            "infrastructureRef": {"apiVersion": INFRASTRUCTURE, "kind": "VSphereMachineTemplate", "name": template},
        });
        if let Some(zone) = zone {
            spec["failureDomain"] = json!(zone);
        }
        json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "MachineDeployment",
            "metadata": {"name": name, "labels": labels},
            "spec": {"clusterName": "c", "replicas": replicas, "selector": {"matchLabels": {"set": name}},
                "template": {"metadata": {"labels": labels}, "spec": spec}}})
    }

    /// Waits until exactly so many machines run, those of workers with so many data disks.
    async fn running(&self, workers: usize, zoned: usize, disks: usize) -> Result<Objects> {
        let wanted = move |objects: &Objects| {
            let machines = || objects.iter().filter(|(name, _)| name.starts_with("machines/"));
            let count = |set: &str| {
                machines()
                    .filter(|(_, machine)| machine["metadata"]["labels"]["set"] == set)
                    .count()
            };
            let running = machines()
                .filter(|(_, machine)| machine["status"]["phase"] == "Running")
                .count();
            ensure!(
                (count("workers"), count("zoned"), running) == (workers, zoned, workers + zoned),
                "{} workers and {} zoned machines, {running} run",
                count("workers"),
                count("zoned")
            );
            let zone = &objects["vspheredeploymentzones/east"]["status"]["ready"];
            ensure!(zone == true, "the zone is not ready: {zone}");
            let of_disks = |(_, vm): &(&String, &Value)| {
                vm["spec"]["dataDisks"]
                    .as_array()
                    .is_some_and(|found| found.len() == disks)
            };
            let vms = objects.iter().filter(|(name, _)| name.starts_with("vspherevms/"));
            let found = vms.filter(of_disks).count();
            ensure!(found == workers, "{found} machines have {disks} data disks");
            Ok(())
        };
        self.management.until(wanted).await
    }

    /// The virtual machines of the vCenter.
    async fn vms(&self) -> Result<Vec<String>> {
        let mut found = self.sim.admin.find("vm", "/DC0/vm/*").await?;
        found.sort();
        Ok(found)
    }

    /// Calls that change something in vCenter, since the counters were reset.
    async fn effects(&self) -> Result<BTreeMap<String, u64>> {
        let changes = |name: &str| {
            name.ends_with("_Task")
                || [
                    "ShutdownGuest",
                    "MarkAsTemplate",
                    "UpdateAssignedLicense",
                    "PbmAssociate",
                ]
                .contains(&name)
                || [
                    "POST /rest/com/vmware/cis/tagging/category",
                    "POST /rest/com/vmware/cis/tagging/tag",
                ]
                .contains(&name)
                || name.starts_with("DELETE /rest/com/vmware/cis/tagging")
                || name.starts_with("PATCH /")
        };
        let mut counters = self.sim.admin.counters().await?;
        counters.retain(|name, _| changes(name));
        Ok(counters)
    }

    /// Installs the definitions of Capstan.
    async fn define(&self, stores_v1beta2: bool) -> Result<()> {
        let version = if stores_v1beta2 { "v1beta2" } else { "v1beta1" };
        self.management
            .install_definitions(&[
                "--webhook-service",
                "default/capstan-webhook",
                "--stored-version",
                version,
            ])
            .await
    }

    async fn capstan(&self, stores_v1beta2: bool) -> Result<Capstan> {
        self.define(stores_v1beta2).await?;
        let args = ["--controllers", "vsphere", "--webhook", "127.0.0.1:0"];
        Capstan::start(&self.management.plane, &args, &[])
    }

    /// Waits until nothing changes, and fails when anything that was there before is not as it was.
    async fn untouched(&self, step: &str, before: &Objects, vms: &[String]) -> Result<()> {
        let after = self.management.settled().await?;
        self.management.keep(step, &after)?;
        let calls = self.sim.admin.counters().await?;
        ensure!(calls.contains_key("Login"), "{step}: nobody has logged in: {calls:?}");
        same_objects(before, &after)?;
        ensure!(self.vms().await? == vms, "{step}: other virtual machines");
        let effects = self.effects().await?;
        ensure!(effects.is_empty(), "{step}: vCenter was changed: {effects:?}");
        Ok(())
    }
}

async fn take_over_and_back(release: &'static Release, stores_v1beta2: bool) -> Result<()> {
    release.build().await?;
    let world = World::start().await?;
    let management = &world.management;
    let empty = world.vms().await?;
    let peer = Peer::start(&management.plane, release, &[], &[], |_| true).await?;
    world.make_cluster().await?;
    world.running(2, 1, 1).await?;
    let made = management.settled().await?;
    management.keep("1-made-by-peer", &made)?;
    let vms = world.vms().await?;
    peer.stop().await?;

    world.sim.admin.reset_counters().await?;
    let capstan = world.capstan(stores_v1beta2).await?;
    world.untouched("2-taken-over", &made, &vms).await?;

    management
        .apply(&[world.deployment("workers", 3, "workers-1", None)])
        .await?;
    world.running(3, 1, 1).await?;
    let rolled = [
        world.template("workers-2", &["images", "swap"]),
        world.deployment("workers", 3, "workers-2", None),
    ];
    management.apply(&rolled).await?;
    world.running(3, 1, 2).await?;
    let before = management.settled().await?;
    management.keep("3-made-by-capstan", &before)?;
    let vms = world.vms().await?;
    ensure!(vms.len() == empty.len() + 4, "{vms:?}");
    capstan.stop()?;

    world.sim.admin.reset_counters().await?;
    let peer = Peer::start(&management.plane, release, &[], &[], |_| true).await?;
    world.untouched("4-given-back", &before, &vms).await?;
    management
        .apply(&[world.deployment("workers", 4, "workers-2", None)])
        .await?;
    world.running(4, 1, 2).await?;
    peer.stop().await?;

    let capstan = world.capstan(stores_v1beta2).await?;
    management.kubectl(&["delete", "cluster", "c", "--wait=false"]).await?;
    let gone = |objects: &Objects| {
        let left: Vec<&String> = objects
            .keys()
            .filter(|name| !name.starts_with("vspheredeploymentzones/") && !name.starts_with("vspherefailuredomains/"))
            .collect();
        match left.is_empty() {
            true => Ok(()),
            false => bail!("still there: {left:?}"),
        }
    };
    management.until(gone).await?;
    ensure!(world.vms().await? == empty, "virtual machines are left");
    capstan.stop()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPV 1.16: run by `just peers`"]
async fn a_cluster_of_capv_1_16_is_taken_over_and_given_back_untouched() -> Result<()> {
    take_over_and_back(&CAPV_1_16, true).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPV 1.14: run by `just peers`"]
async fn a_cluster_of_capv_1_14_is_taken_over_and_given_back_untouched() -> Result<()> {
    take_over_and_back(&CAPV_1_14, false).await
}

const LEASE: &str = "capv-system/capv-controller-manager-runtime";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds CAPV 1.16: run by `just peers`"]
async fn capstan_adopt_takes_a_cluster_of_capv_over_and_gives_it_back() -> Result<()> {
    CAPV_1_16.build().await?;
    let world = World::start().await?;
    let management = &world.management;
    // A manager outside of a pod does not find the namespace of its lease.
    let mut capv = Installation::start(&management.plane, &CAPV_1_16, &["--leader-elect=false"], &[], |_| true).await?;
    world.make_cluster().await?;
    world.running(2, 1, 1).await?;
    let made = management.settled().await?;
    management.keep("adopt-1-made-by-peer", &made)?;
    let vms = world.vms().await?;

    let plan = management.adopt(&[], 2).await?;
    for step in [
        "let Capstan hold the lease of CAPV in namespace capv-system [--execute does it]",
        "scale Deployment capv-system/capv-controller-manager to 0 [--execute does it]",
        "remove ValidatingWebhookConfiguration capv-validating-webhook-configuration",
        "remove annotation cert-manager.io/inject-ca-from",
        "install the definitions",
    ] {
        ensure!(plan.contains(step), "{step}: {plan}");
    }
    management.adopt(&["--execute"], 2).await?;
    capv.follow().await?;
    management
        .adopted("scale Deployment capv-system/capv-controller-manager to 0")
        .await?;
    world.sim.admin.reset_counters().await?;
    world.define(true).await?;
    let election = [
        "--leader-elect-namespace=capstan-system",
        "--hold-leases=capv-system/capv-controller-manager-runtime",
    ];
    let args = ["--controllers", "vsphere", "--webhook", "127.0.0.1:0"];
    let capstan = Capstan::start_led(&management.plane, &election, &args, &[])?;
    world.untouched("adopt-2-taken-over", &made, &vms).await?;
    let said = management.adopt(&[], 2).await?;
    ensure!(
        said.contains(&format!("found: Lease {LEASE}, held by capstan/")),
        "{said}"
    );
    management
        .apply(&[world.deployment("workers", 3, "workers-1", None)])
        .await?;
    world.running(3, 1, 1).await?;
    let before = management.settled().await?;
    management.keep("adopt-3-made-by-capstan", &before)?;
    let vms = world.vms().await?;
    capstan.stop()?;

    world.sim.admin.reset_counters().await?;
    let reverted = management.adopt(&["--revert"], 0).await?;
    for done in [
        "gave capv-controller-manager back its replicas",
        "definitions back their conversion",
    ] {
        ensure!(reverted.contains(done), "{done}: {reverted}");
    }
    capv.install_definitions().await?;
    capv.follow().await?;
    world.untouched("adopt-4-given-back", &before, &vms).await?;
    management
        .apply(&[world.deployment("workers", 4, "workers-1", None)])
        .await?;
    world.running(4, 1, 1).await?;
    Ok(())
}
