//! A MachineDeployment gets data disks, as the proposal's upgrade section has it: by a new template, rolled out by the
//! real Cluster API core manager.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use capstan_api::vsphere::{VSphereMachine, VSphereVM};
use capstan_testkit::vcsim::Options;
use capstan_testkit::{ControlPlane, Vcsim, vcsim};
use capstan_vsphere::{Login, Trust, Vcenter};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// Two machines, made and replaced one by one by Cluster API, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(180);

pub struct Rotation {
    pub plane: ControlPlane,
    pub namespace: String,
    pub sim: Vcsim,
    shutdown: CancellationToken,
}

impl Drop for Rotation {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Rotation {
    pub async fn start() -> Result<Self> {
        let plane = ControlPlane::start(capstan_testkit::Options {
            capi_core: true,
            ..Default::default()
        })
        .await?;
        plane.install_crds().await?;
        let rotation = Self {
            namespace: plane.namespace("rotation").await?,
            sim: vcsim(Options::default()).await?,
            plane,
            shutdown: CancellationToken::new(),
        };
        let options = capstan_kube::Options {
            namespace: Some(rotation.namespace.clone()),
            shutdown: rotation.shutdown.clone(),
            ..Default::default()
        };
        let context = capstan_kube::Context::new(rotation.plane.config().await?, options)?;
        tokio::spawn(capstan_vsphere_machines::run(context, Default::default()));
        let (client, namespace) = (rotation.plane.client().await?, rotation.namespace.clone());
        let shutdown = rotation.shutdown.clone();
        tokio::spawn(async move {
            while !shutdown.is_cancelled() {
                // An API server that is busy for a moment is asked again.
                let _ = control_plane(&client, &namespace).await;
                let _ = kubelets(&client, &namespace).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        });
        Ok(rotation)
    }

    pub async fn apply(&self, objects: &[Value]) -> Result<String> {
        let path = self.plane.dir().join("apply.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(&path, serde_json::to_vec(&list)?)?;
        self.plane
            .kubectl(&["apply", "-n", &self.namespace, "-f", &path.display().to_string()])
            .await
    }

    async fn make_cluster(&self) -> Result<()> {
        let kubeconfig = std::fs::read_to_string(self.plane.kubeconfig())?;
        let reference = json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereCluster", "name": "c"});
        self.apply(&[
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "vcenter"},
                "stringData": {"username": self.sim.username, "password": self.sim.password}}),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "boot"},
                "stringData": {"value": "#cloud-config\n{}\n"}}),
            json!({"apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
                "metadata": {"name": "c-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
                "stringData": {"value": kubeconfig}}),
            json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "Cluster", "metadata": {"name": "c"},
                "spec": {"infrastructureRef": reference, "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443}}}),
            json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereCluster", "metadata": {"name": "c"},
                "spec": {"server": self.sim.server, "thumbprint": self.sim.thumbprint,
                    "identityRef": {"kind": "Secret", "name": "vcenter"},
                    "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443}}}),
        ])
        .await
        .map(drop)
    }

    pub fn template(&self, name: &str, disks: &Value) -> Value {
        json!({"apiVersion": INFRASTRUCTURE, "kind": "VSphereMachineTemplate", "metadata": {"name": name},
        "spec": {"template": {"spec": {
            "template": "pvscsi", "cloneMode": "linkedClone", "datacenter": "DC0", "datastore": "LocalDS_0",
            "folder": "/DC0/vm", "resourcePool": "/DC0/host/DC0_C0", "numCPUs": 2, "memoryMiB": 2048,
            "network": {"devices": [{"networkName": "VM Network", "dhcp4": true}]}, "dataDisks": disks,
        }}}})
    }

    fn deployment(&self, template: &str) -> Value {
        let labels = json!({"cluster.x-k8s.io/cluster-name": "c", "set": "workers"});
        json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "MachineDeployment",
        "metadata": {"name": "workers", "labels": labels},
        "spec": {"clusterName": "c", "replicas": 2, "selector": {"matchLabels": {"set": "workers"}},
            "template": {"metadata": {"labels": labels}, "spec": {
                "clusterName": "c", "bootstrap": {"dataSecretName": "boot"},
                "infrastructureRef": {"apiVersion": INFRASTRUCTURE, "kind": "VSphereMachineTemplate", "name": template},
            }}}})
    }

    async fn machines(&self) -> Result<Vec<VSphereMachine>> {
        let machines: Api<VSphereMachine> = Api::namespaced(self.plane.client().await?, &self.namespace);
        Ok(machines.list(&Default::default()).await?.items)
    }

    /// Waits until exactly two machines are ready, each with so many data disks, and nobody else is there.
    async fn two_with(&self, disks: usize) -> Result<BTreeSet<String>> {
        let mut seen = Vec::new();
        let settled = async {
            loop {
                let machines = self.machines().await?;
                let fits = |machine: &VSphereMachine| {
                    machine.spec.clone_spec.data_disks.len() == disks
                        && machine.status.as_ref().is_some_and(|status| status.ready)
                };
                seen = machines.iter().map(ResourceExt::name_any).collect();
                if machines.len() == 2 && machines.iter().all(fits) {
                    return anyhow::Ok(machines.iter().filter_map(|m| m.spec.provider_id.clone()).collect());
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        match tokio::time::timeout(PATIENCE, settled).await {
            Ok(found) => found,
            Err(_) => {
                let all = [
                    "get",
                    "machines,machinesets,machinedeployments,vspheremachines,vspherevms",
                    "-n",
                    &self.namespace,
                ];
                let state = self.plane.kubectl(&all).await?;
                let path = "jsonpath={range .items[*]}{.metadata.name}{\"\\n\"}{range .status.conditions[*]}  {.type} {.status} {.reason} {.message}{\"\\n\"}{end}{end}";
                let reasons = [
                    "get",
                    "machines.v1beta2.cluster.x-k8s.io",
                    "-n",
                    &self.namespace,
                    "-o",
                    path,
                ];
                let state = format!("{state}\n{}", self.plane.kubectl(&reasons).await?);
                bail!("not two machines with {disks} disks each, but {seen:?}\n{state}")
            }
        }
    }

    async fn vcenter(&self) -> Result<Vcenter> {
        let login = Login {
            server: self.sim.server.clone(),
            username: self.sim.username.clone(),
            password: self.sim.password.clone().into(),
            trust: Trust::Ca(self.sim.ca.clone()),
            tenant: None,
        };
        Ok(Vcenter::connect(login, Default::default()).await?)
    }
}

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta2";

/// Plays the control plane's provider: Cluster API looks for Nodes only once a control plane is said to be there, and a pass
/// of its own that was under way may write the opposite after us.
async fn control_plane(client: &Client, namespace: &str) -> Result<()> {
    const SAYS_SO: &str = "ControlPlaneInitialized";
    let kind = GroupVersionKind::gvk("cluster.x-k8s.io", "v1beta2", "Cluster");
    let kind = ApiResource::from_gvk_with_plural(&kind, "clusters");
    let clusters: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    let Some(cluster) = clusters.get_opt("c").await? else {
        return Ok(());
    };
    let conditions = cluster.data.pointer("/status/conditions").and_then(Value::as_array);
    let mut conditions = conditions.cloned().unwrap_or_default();
    if conditions.iter().any(|c| c["type"] == SAYS_SO && c["status"] == "True") {
        return Ok(());
    }
    conditions.retain(|condition| condition["type"] != SAYS_SO);
    let now = jiff::Timestamp::now();
    conditions.push(
        json!({"type": SAYS_SO, "status": "True", "reason": "Initialized", "message": "",
        "lastTransitionTime": format!("{now:.0}")}),
    );
    let status = json!({"status": {
        "initialization": {"controlPlaneInitialized": true}, "conditions": conditions,
    }});
    clusters
        .patch_status("c", &PatchParams::default(), &Patch::Merge(status))
        .await?;
    Ok(())
}

/// Plays the kubelets: every machine that has a provider ID gets a Node, which kwok keeps ready.
async fn kubelets(client: &Client, namespace: &str) -> Result<()> {
    let machines: Api<VSphereMachine> = Api::namespaced(client.clone(), namespace);
    let nodes: Api<Node> = Api::all(client.clone());
    for machine in machines.list(&Default::default()).await?.items {
        let Some(id) = machine
            .spec
            .provider_id
            .clone()
            .filter(|_| machine.metadata.deletion_timestamp.is_none())
        else {
            continue;
        };
        let node: Node = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": machine.name_any()}, "spec": {"providerID": id},
        }))?;
        if nodes.get_opt(&machine.name_any()).await?.is_none() {
            nodes.create(&PostParams::default(), &node).await?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_deployment_rotates_to_a_template_with_data_disks() -> Result<()> {
    let rotation = Rotation::start().await?;
    rotation.make_cluster().await?;
    let images = json!([{"name": "images", "sizeGiB": 5, "provisioningMode": "Thin"}]);
    let both = json!([{"name": "images", "sizeGiB": 5, "provisioningMode": "Thin"},
        {"name": "swap", "sizeGiB": 5, "provisioningMode": "Thick"}]);
    rotation
        .apply(&[
            rotation.template("workers-1", &images),
            rotation.deployment("workers-1"),
        ])
        .await?;
    let before = rotation.two_with(1).await?;

    rotation
        .apply(&[rotation.template("workers-2", &both), rotation.deployment("workers-2")])
        .await?;
    let after = rotation.two_with(2).await?;
    assert!(
        before.is_disjoint(&after),
        "every machine was replaced: {before:?}, {after:?}"
    );
    let vcenter = rotation.vcenter().await?;
    for id in &after {
        let uuid = id.trim_start_matches("vsphere://");
        let vm = vcenter
            .find_vm_by_bios_uuid(None, uuid)
            .await?
            .context("not in vCenter")?;
        let info = vcenter.vm(&vm).await?;
        assert_eq!(info.devices.iter().filter(|device| device.disk().is_some()).count(), 3);
    }
    for id in &before {
        let uuid = id.trim_start_matches("vsphere://");
        assert!(
            vcenter.find_vm_by_bios_uuid(None, uuid).await?.is_none(),
            "{id} is gone with its disks"
        );
    }
    let nodes: Api<Node> = Api::all(rotation.plane.client().await?);
    for node in nodes.list(&Default::default()).await?.items {
        nodes.delete(&node.name_any(), &DeleteParams::default()).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_health_check_replaces_a_machine_whose_vm_is_lost() -> Result<()> {
    let rotation = Rotation::start().await?;
    rotation.make_cluster().await?;
    let mut template = rotation.template("workers", &json!([]));
    template["spec"]["template"]["metadata"] = json!({"annotations": {"capstan.dev/fail-when-lost": "true"}});
    let check = json!({"apiVersion": "cluster.x-k8s.io/v1beta1", "kind": "MachineHealthCheck",
        "metadata": {"name": "workers", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
        "spec": {"clusterName": "c", "selector": {"matchLabels": {"set": "workers"}},
            "unhealthyConditions": [{"type": "Ready", "status": "Unknown", "timeout": "1h"}]}});
    rotation
        .apply(&[template, rotation.deployment("workers"), check])
        .await?;
    rotation.two_with(0).await?;
    let machines = rotation.machines().await?;
    let (lost, kept) = (&machines[0], &machines[1]);
    let name = lost.name_any();

    let vcenter = rotation.vcenter().await?;
    let id = lost.spec.provider_id.clone().context("a provider ID")?;
    let vm = vcenter
        .find_vm_by_bios_uuid(None, id.trim_start_matches("vsphere://"))
        .await?;
    let vm = vm.context("not in vCenter")?;
    vcenter.power_off(&vm).await?.wait().await?;
    vcenter.destroy(&vm).await?.wait().await?;
    let vms: Api<VSphereVM> = Api::namespaced(rotation.plane.client().await?, &rotation.namespace);
    // Whoever marks a VSphereVM wants it to be read again; else that is done every ten minutes.
    let mark = json!({"metadata": {"annotations": {"look": "again"}}});
    vms.patch(&name, &PatchParams::default(), &Patch::Merge(mark)).await?;
    let is_lost = |vm: Option<&VSphereVM>| {
        let mut conditions = vm
            .iter()
            .flat_map(|vm| &vm.status)
            .flat_map(|status| &status.conditions);
        conditions.any(|condition| condition.reason.as_deref() == Some("NotFoundByBIOSUUID"))
    };
    let waited = kube::runtime::wait::await_condition(vms.clone(), &name, is_lost);
    tokio::time::timeout(PATIENCE, waited)
        .await
        .context("the loss is not reported")??;
    // The test does not wait until the grace period is over.
    let mut object = vms.get_status(&name).await?;
    for condition in &mut object.status.get_or_insert_default().conditions {
        condition.last_transition_time.0 -= jiff::SignedDuration::from_mins(10);
    }
    vms.replace_status(&name, &PostParams::default(), &object).await?;
    let replaced = async {
        loop {
            let machines = rotation.machines().await?;
            let ready = machines
                .iter()
                .filter(|machine| machine.status.as_ref().is_some_and(|status| status.ready));
            let names: BTreeSet<String> = ready.map(ResourceExt::name_any).collect();
            if names.len() == 2 && names.contains(&kept.name_any()) && !names.contains(&name) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let replaced = tokio::time::timeout(PATIENCE, replaced).await;
    replaced.context("the lost machine is not replaced")??;
    let nodes: Api<Node> = Api::all(rotation.plane.client().await?);
    for node in nodes.list(&Default::default()).await?.items {
        nodes.delete(&node.name_any(), &DeleteParams::default()).await?;
    }
    Ok(())
}
