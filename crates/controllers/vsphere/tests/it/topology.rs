//! A cluster of a ClusterClass, by Cluster API's own topology controller and with the definitions that everybody installs.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use capstan_api::vsphere::{VSphereCluster, VSphereMachineTemplate};
use capstan_testkit::parts;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::rotation::Rotation;

const CORE: &str = "cluster.x-k8s.io/v1beta2";
const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta2";
const CONTROL_PLANE: &str = "controlplane.cluster.x-k8s.io/v1beta2";
const BOOTSTRAP: &str = "bootstrap.cluster.x-k8s.io/v1beta2";
/// Nothing here takes longer, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(180);

fn template_ref(api_version: &str, kind: &str, name: &str) -> Value {
    json!({"templateRef": {"apiVersion": api_version, "kind": kind, "name": name}})
}

fn object(api_version: &str, kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec})
}

/// A class whose variable is the size of the workers' data disk.
fn class() -> Value {
    let workers = json!({
        "class": "workers",
        "bootstrap": template_ref(BOOTSTRAP, "KubeadmConfigTemplate", "class"),
        "infrastructure": template_ref(INFRASTRUCTURE, "VSphereMachineTemplate", "class-workers"),
    });
    let mut control_plane = template_ref(CONTROL_PLANE, "KubeadmControlPlaneTemplate", "class");
    control_plane["machineInfrastructure"] =
        template_ref(INFRASTRUCTURE, "VSphereMachineTemplate", "class-control-plane");
    let patch = json!({"name": "images", "definitions": [{
        "selector": {"apiVersion": INFRASTRUCTURE, "kind": "VSphereMachineTemplate",
            "matchResources": {"machineDeploymentClass": {"names": ["workers"]}}},
        "jsonPatches": [{"op": "replace", "path": "/spec/template/spec/dataDisks",
            "valueFrom": {"template": "- {name: images, sizeGiB: {{ .imagesGiB }}}"}}],
    }]});
    let spec = json!({
        "infrastructure": template_ref(INFRASTRUCTURE, "VSphereClusterTemplate", "class"),
        "controlPlane": control_plane,
        "workers": {"machineDeployments": [workers]},
        "variables": [{"name": "imagesGiB", "required": true, "schema": {"openAPIV3Schema": {"type": "integer"}}}],
        "patches": [patch],
    });
    object(CORE, "ClusterClass", "class", spec)
}

fn cluster(images_gib: i32) -> Value {
    let spec = json!({"topology": {
        "classRef": {"name": "class"}, "version": "v1.33.0", "controlPlane": {"replicas": 1},
        "workers": {"machineDeployments": [{"class": "workers", "name": "w", "replicas": 1}]},
        "variables": [{"name": "imagesGiB", "value": images_gib}],
    }});
    object(CORE, "Cluster", "t", spec)
}

fn templates(rotation: &Rotation) -> Vec<Value> {
    let machine = |name: &str| {
        let disks = json!([{"name": "images", "sizeGiB": 1}]);
        let mut made = rotation.template(name, &disks);
        made["apiVersion"] = json!(INFRASTRUCTURE);
        made["spec"]["template"]["spec"]["network"]["devices"][0] = json!({"networkName": "VM Network", "dhcp4": true});
        made
    };
    let infrastructure = json!({"server": rotation.sim.server, "thumbprint": rotation.sim.thumbprint,
        "identityRef": {"kind": "Secret", "name": "vcenter"}, "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443}});
    let of = |spec: Value| json!({"template": {"spec": spec}});
    let node = json!({"joinConfiguration": {"nodeRegistration": {"name": "{{ ds.meta_data.hostname }}"}}});
    let kubeadm = json!({"kubeadmConfigSpec": node});
    vec![
        machine("class-control-plane"),
        machine("class-workers"),
        object(INFRASTRUCTURE, "VSphereClusterTemplate", "class", of(infrastructure)),
        object(CONTROL_PLANE, "KubeadmControlPlaneTemplate", "class", of(kubeadm)),
        object(BOOTSTRAP, "KubeadmConfigTemplate", "class", of(node)),
    ]
}

/// Installs kubeadm's kinds, which nobody reconciles here, and the policy for templates.
async fn install(rotation: &Rotation) -> Result<()> {
    let folder = tokio::task::spawn_blocking(|| parts::KUBEADM_CRDS.path()).await??;
    rotation.plane.install_crds_from(&folder).await?;
    for kind in ["kubeadmcontrolplanes", "kubeadmcontrolplanetemplates"] {
        let name = format!("{kind}.controlplane.cluster.x-k8s.io");
        let label = "cluster.x-k8s.io/v1beta2=v1beta2";
        rotation.plane.kubectl(&["label", "crd", &name, label]).await?;
    }
    for kind in ["kubeadmconfigs", "kubeadmconfigtemplates"] {
        let name = format!("{kind}.bootstrap.cluster.x-k8s.io");
        let label = "cluster.x-k8s.io/v1beta2=v1beta2";
        rotation.plane.kubectl(&["label", "crd", &name, label]).await?;
    }
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../deploy/controllers/vsphere/template-policy.yaml");
    let policy = policy.display().to_string();
    rotation.plane.kubectl(&["apply", "-f", &policy]).await?;
    Ok(())
}

/// The MachineDeployment of the topology, as soon as it refers to a template with a disk of this size; and that template.
async fn rolled_to(client: &Client, namespace: &str, gib: i32) -> Result<VSphereMachineTemplate> {
    let kind = GroupVersionKind::gvk("cluster.x-k8s.io", "v1beta2", "MachineDeployment");
    let resource = ApiResource::from_gvk(&kind);
    let deployments: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
    let templates: Api<VSphereMachineTemplate> = Api::namespaced(client.clone(), namespace);
    let waiting = async {
        loop {
            for deployment in deployments.list(&ListParams::default()).await?.items {
                let name = &deployment.data["spec"]["template"]["spec"]["infrastructureRef"]["name"];
                let found = templates.get_opt(name.as_str().unwrap_or_default()).await?;
                let disks = |found: &VSphereMachineTemplate| found.spec.template.spec.clone_spec.data_disks.clone();
                if let Some(found) = found.filter(|found| disks(found).iter().any(|disk| disk.size_gib == gib)) {
                    return Ok::<_, anyhow::Error>(found);
                }
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, waiting).await;
    match found {
        Ok(found) => found,
        Err(_) => {
            let kind = GroupVersionKind::gvk("cluster.x-k8s.io", "v1beta2", "Cluster");
            let resource = ApiResource::from_gvk(&kind);
            let clusters: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
            let status = clusters.get("t").await?.data["status"].to_string();
            anyhow::bail!("no template with {gib} GiB: {status}")
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_variable_of_a_cluster_class_makes_a_new_template_and_leaves_the_old_one() -> Result<()> {
    let rotation = Rotation::start().await?;
    install(&rotation).await?;
    rotation.apply(&templates(&rotation)).await?;
    rotation.apply(&[class()]).await?;
    rotation.apply(&[cluster(5)]).await?;
    let client = rotation.plane.client().await?;
    let first = rolled_to(&client, &rotation.namespace, 5).await?;
    let clusters: Api<VSphereCluster> = Api::namespaced(client.clone(), &rotation.namespace);
    let made = clusters.list(&ListParams::default()).await?.items;
    assert_eq!(
        made.first().context("no VSphereCluster")?.spec.server,
        Some(rotation.sim.server.clone())
    );
    rotation.apply(&[cluster(8)]).await?;
    let second = rolled_to(&client, &rotation.namespace, 8).await?;
    assert_ne!(first.name_any(), second.name_any());
    // The policy that lets the dry runs of Cluster API pass refuses a change by anybody else.
    let templates: Api<VSphereMachineTemplate> = Api::namespaced(client, &rotation.namespace);
    let change = json!({"spec": {"template": {"spec": {"numCPUs": 8}}}});
    let refused = templates
        .patch(&second.name_any(), &PatchParams::default(), &Patch::Merge(change))
        .await;
    let said = refused.err().context("the template was changed")?.to_string();
    assert!(said.contains("immutable"), "{said}");
    Ok(())
}
