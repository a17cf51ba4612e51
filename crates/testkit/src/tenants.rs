//! The objects that users of one namespace create: clusters and machines on a vCenter, machine pools on Azure.

use anyhow::{Context, Result};
use serde_json::{Value, json};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";
const VSPHERE: &str = "infrastructure.cluster.x-k8s.io/v1beta2";
const CLUSTER_API: &str = "cluster.x-k8s.io/v1beta2";

/// A vCenter and an account there.
#[derive(Clone, Debug)]
pub struct VcenterAccess {
    pub server: String,
    pub username: String,
    pub password: String,
    /// Its certificate, or the CA of it.
    pub ca: String,
}

impl From<&crate::Vcsim> for VcenterAccess {
    fn from(sim: &crate::Vcsim) -> Self {
        Self {
            server: sim.server.clone(),
            username: sim.username.clone(),
            password: sim.password.clone(),
            ca: sim.ca.clone(),
        }
    }
}

/// A subscription and an application in it.
#[derive(Clone, Debug)]
pub struct AzureAccess {
    pub subscription: String,
    pub tenant: String,
    pub client_id: String,
    pub client_secret: String,
}

/// One namespace, and the objects that its users create there.
#[derive(Clone)]
pub struct Tenant {
    pub client: kube::Client,
    pub namespace: String,
}

impl Tenant {
    /// Creates an object; `path` is group, version and plural.
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        let (group, plural) = path.rsplit_once('/').context("group/version/plural")?;
        let root = if group == "v1" { "api" } else { "apis" };
        let url = format!("/{root}/{group}/namespaces/{}/{plural}", self.namespace);
        let request = http::Request::post(url).header("content-type", "application/json");
        Ok(self.client.request(request.body(serde_json::to_vec(object)?)?).await?)
    }

    async fn secret(&self, name: &str, data: Value) -> Result<()> {
        let object = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data});
        self.create("v1/secrets", &object).await.map(drop)
    }

    /// Creates a Cluster on a vCenter, whose infrastructure counts as provisioned.
    pub async fn vsphere_cluster(&self, name: &str, vcenter: &VcenterAccess) -> Result<()> {
        let secret = format!("{name}-vcenter");
        let data = json!({"username": vcenter.username, "password": vcenter.password, "ca.crt": vcenter.ca});
        self.secret(&secret, data).await?;
        let reference = json!({"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "VSphereCluster", "name": name});
        let cluster = json!({"apiVersion": CLUSTER_API, "kind": "Cluster", "metadata": {"name": name}, "spec": {"infrastructureRef": reference}});
        let cluster = self.create(&format!("{CLUSTER_API}/clusters"), &cluster).await?;
        let object = json!({
            "apiVersion": VSPHERE, "kind": "VSphereCluster",
            "metadata": {"name": name, "labels": labels(name), "ownerReferences": [owner(&cluster)]},
            "spec": {
                "server": vcenter.server, "identityRef": {"kind": "Secret", "name": secret},
                "controlPlaneEndpoint": {"host": "127.0.0.1", "port": 6443},
            },
        });
        self.create(&format!("{VSPHERE}/vsphereclusters"), &object).await?;
        let url = format!(
            "/apis/{CLUSTER_API}/namespaces/{}/clusters/{name}/status",
            self.namespace
        );
        let status = json!({"status": {"initialization": {"infrastructureProvisioned": true}}});
        let request = http::Request::patch(url).header("content-type", "application/merge-patch+json");
        let _: Value = self.client.request(request.body(serde_json::to_vec(&status)?)?).await?;
        Ok(())
    }

    /// Creates a Machine with bootstrap data, as Cluster API core does first.
    pub async fn vsphere_owner(&self, cluster: &str, name: &str) -> Result<Value> {
        let secret = format!("{name}-boot");
        self.secret(&secret, json!({"value": "#cloud-config\n{}\n"})).await?;
        let reference = json!({"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "VSphereMachine", "name": name});
        let object = json!({
            "apiVersion": CLUSTER_API, "kind": "Machine", "metadata": {"name": name, "labels": labels(cluster)},
            "spec": {"clusterName": cluster, "bootstrap": {"dataSecretName": secret}, "infrastructureRef": reference},
        });
        self.create(&format!("{CLUSTER_API}/machines"), &object).await
    }

    /// Creates the VSphereMachine of a Machine, with so many data disks.
    pub async fn vsphere_machine(&self, machine: &Value, disks: usize) -> Result<()> {
        let disks: Vec<Value> = (0..disks)
            .map(|n| json!({"name": format!("disk-{n}"), "sizeGiB": 10 + n, "provisioningMode": "Thin"}))
            .collect();
        let meta = json!({
            "name": machine["metadata"]["name"], "labels": machine["metadata"]["labels"], "ownerReferences": [owner(machine)],
        });
        let object = json!({
            "apiVersion": VSPHERE, "kind": "VSphereMachine", "metadata": meta,
            "spec": {
                "template": "pvscsi", "datacenter": "DC0", "cloneMode": "linkedClone", "numCPUs": 2, "memoryMiB": 4096,
                "datastore": "LocalDS_0", "resourcePool": "/DC0/host/DC0_C0/Resources", "folder": "/DC0/vm",
                "network": {"devices": [{"networkName": "VM Network", "dhcp4": true}]},
                "dataDisks": disks,
            },
        });
        self.create(&format!("{VSPHERE}/vspheremachines"), &object)
            .await
            .map(drop)
    }

    /// Creates a Cluster on Azure whose workload cluster has this kubeconfig.
    pub async fn azure_cluster(&self, name: &str, azure: &AzureAccess, kubeconfig: &str) -> Result<()> {
        let secret = format!("{name}-azure");
        self.secret(&secret, json!({"clientSecret": azure.client_secret}))
            .await?;
        let object = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "cluster.x-k8s.io/secret",
            "metadata": {"name": format!("{name}-kubeconfig"), "labels": labels(name)},
            "stringData": {"value": kubeconfig},
        });
        self.create("v1/secrets", &object).await?;
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "metadata": {"name": name},
            "spec": {"type": "ServicePrincipal", "tenantID": azure.tenant, "clientID": azure.client_id,
                "clientSecret": {"name": secret, "namespace": self.namespace}, "allowedNamespaces": {}},
        });
        self.create(&format!("{INFRASTRUCTURE}/azureclusteridentities"), &object)
            .await?;
        let identity = json!({"apiVersion": INFRASTRUCTURE, "kind": "AzureClusterIdentity", "name": name});
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": {"name": name},
            "spec": {"subscriptionID": azure.subscription, "location": "eastus", "resourceGroup": "capstan",
                "identityRef": identity,
                "networkSpec": {"vnet": {"name": "capstan-vnet"}, "subnets": [{"name": "node-subnet", "role": "node"}]}},
        });
        self.create(&format!("{INFRASTRUCTURE}/azureclusters"), &object).await?;
        let reference = json!({"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureCluster", "name": name});
        let object = json!({"apiVersion": CLUSTER_API, "kind": "Cluster", "metadata": {"name": name}, "spec": {"infrastructureRef": reference}});
        self.create(&format!("{CLUSTER_API}/clusters"), &object).await.map(drop)
    }

    /// Creates a machine pool with rolling updates.
    pub async fn azure_pool(
        &self,
        cluster: &str,
        name: &str,
        machines: usize,
        surge: Value,
        image: &str,
    ) -> Result<()> {
        let secret = format!("{name}-boot");
        self.secret(&secret, json!({"value": "#cloud-config\n{}\n"})).await?;
        let reference =
            json!({"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureMachinePool", "name": name});
        let object = json!({
            "apiVersion": CLUSTER_API, "kind": "MachinePool", "metadata": {"name": name},
            "spec": {"clusterName": cluster, "replicas": machines, "template": {"spec": {
                "clusterName": cluster, "version": "v1.36.3", "bootstrap": {"dataSecretName": secret}, "infrastructureRef": reference}}},
        });
        self.create(&format!("{CLUSTER_API}/machinepools"), &object).await?;
        let object = json!({
            "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePool", "metadata": {"name": name},
            "spec": {"location": "eastus",
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 0, "deletePolicy": "Oldest"}},
                "template": {"vmSize": "Standard_D2s_v3", "osDisk": {"osType": "Linux", "diskSizeGB": 30},
                    "image": {"id": image}, "sshPublicKey": ""}},
        });
        self.create(&format!("{INFRASTRUCTURE}/azuremachinepools"), &object)
            .await
            .map(drop)
    }
}

fn labels(cluster: &str) -> Value {
    json!({"cluster.x-k8s.io/cluster-name": cluster})
}

fn owner(object: &Value) -> Value {
    json!({
        "apiVersion": object["apiVersion"], "kind": object["kind"], "name": object["metadata"]["name"],
        "uid": object["metadata"]["uid"], "controller": true,
    })
}
