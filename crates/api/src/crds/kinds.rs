//! The kinds, and what `kubectl get` tells of each.

use super::definition::Definition;
use crate::{azure, openshift, schema::Kind, vsphere};

const CONTRACT: (&str, &str) = ("cluster.x-k8s.io/v1beta1", "v1beta1");
const PROVIDER: &str = "cluster.x-k8s.io/provider";
/// `clusterctl move` knows the kinds with this label only. An owner that it moves without its dependents leaves them to the
/// garbage collector.
const CLUSTERCTL: &str = "clusterctl.cluster.x-k8s.io";
/// `clusterctl move` takes along every object of such a kind, and the Secrets that it owns, although no Cluster owns it.
const MOVE_HIERARCHY: &str = "clusterctl.cluster.x-k8s.io/move-hierarchy";
const CLUSTER_API: &[&str] = &["cluster-api"];
const CLUSTER: &str = r".metadata.labels.cluster\.x-k8s\.io/cluster-name";
const AGE: &str = ".metadata.creationTimestamp";
const READY_REASON: &str = r#".status.conditions[?(@.type=="Ready")].reason"#;
const READY_MESSAGE: &str = r#".status.conditions[?(@.type=="Ready")].message"#;

pub(super) fn all() -> Vec<Definition> {
    let mut all = openshift_kinds();
    all.extend(azure_kinds());
    all.extend(vsphere_kinds());
    all
}

fn openshift_kinds() -> Vec<Definition> {
    vec![
        Definition::of::<openshift::Machine>("One machine of a cluster.")
            .column("Phase", "string", ".status.phase")
            .column(
                "Type",
                "string",
                r".metadata.labels.machine\.openshift\.io/instance-type",
            )
            .column("Region", "string", r".metadata.labels.machine\.openshift\.io/region")
            .column("Zone", "string", r".metadata.labels.machine\.openshift\.io/zone")
            .column("Age", "date", AGE)
            .wide("Node", "string", ".status.nodeRef.name")
            .wide("ProviderID", "string", ".spec.providerID")
            .wide(
                "State",
                "string",
                r".metadata.annotations.machine\.openshift\.io/instance-state",
            )
            .wide("Error", "string", ".status.errorMessage"),
        Definition::of::<openshift::MachineSet>("A number of like machines, made from one template.")
            .spec(openshift::bound_selector)
            .scalable()
            .column("Desired", "integer", ".spec.replicas")
            .column("Current", "integer", ".status.replicas")
            .column("Ready", "integer", ".status.readyReplicas")
            .column("Available", "string", ".status.availableReplicas")
            .column("Age", "date", AGE)
            .wide("Error", "string", ".status.errorMessage"),
    ]
}

fn azure_kind<K: Kind>(description: &'static str) -> Definition {
    Definition::of::<K>(description)
        .label(CONTRACT.0, CONTRACT.1)
        .label(PROVIDER, "infrastructure-azure")
        .label(CLUSTERCTL, "")
        .in_categories(CLUSTER_API)
}

fn azure_kinds() -> Vec<Definition> {
    vec![
        azure_kind::<azure::AzureMachinePool>("A scale set whose machines have a life of their own.")
            .short(&["amp"])
            .column("Replicas", "string", ".status.replicas")
            .column("Ready", "string", ".status.ready")
            .column("State", "string", ".status.provisioningState")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("Cluster", "string", CLUSTER)
            .wide(
                "MachinePool",
                "string",
                r#".metadata.ownerReferences[?(@.kind=="MachinePool")].name"#,
            )
            .wide("VM Size", "string", ".spec.template.vmSize")
            .wide("VMSS ID", "string", ".spec.providerID")
            .wide("Message", "string", READY_MESSAGE),
        azure_kind::<azure::AzureMachinePoolMachine>("One instance of a pool's scale set.")
            .short(&["ampm"])
            .column("Version", "string", ".status.version")
            .column("Ready", "string", ".status.ready")
            .column("State", "string", ".status.provisioningState")
            .column("Latest", "boolean", ".status.latestModelApplied")
            .column("Node", "string", ".status.nodeRef.name")
            .column("Age", "date", AGE)
            .wide("Cluster", "string", CLUSTER)
            .wide("VMSS VM ID", "string", ".spec.providerID")
            .wide("Reason", "string", READY_REASON)
            .wide("Message", "string", READY_MESSAGE),
        azure_kind::<azure::AzureCluster>("The Azure side of a cluster.")
            .column("Cluster", "string", CLUSTER)
            .column("Ready", "string", r#".status.conditions[?(@.type=="Ready")].status"#)
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("Message", "string", READY_MESSAGE)
            .wide("Resource Group", "string", ".spec.resourceGroup")
            .wide("SubscriptionID", "string", ".spec.subscriptionID")
            .wide("Location", "string", ".spec.location")
            .wide("Endpoint", "string", ".spec.controlPlaneEndpoint.host"),
        azure_kind::<azure::AzureClusterIdentity>("Who signs in to Azure, and which namespaces may use it.")
            .label(MOVE_HIERARCHY, "true")
            .column("Type", "string", ".spec.type")
            .column("Age", "date", AGE),
    ]
}

fn vsphere_kind<K: Kind>(description: &'static str) -> Definition {
    Definition::of::<K>(description)
        .label(CONTRACT.0, CONTRACT.1)
        .label(PROVIDER, "infrastructure-vsphere")
        .label(CLUSTERCTL, "")
        .in_categories(CLUSTER_API)
}

fn vsphere_kinds() -> Vec<Definition> {
    let mut all = vsphere_machine_kinds();
    all.extend([
        vsphere_kind::<vsphere::VSphereCluster>("The vSphere side of a cluster.")
            .column("Ready", "string", ".status.ready")
            .column("Server", "string", ".spec.server")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("ControlPlaneEndpoint", "string", ".spec.controlPlaneEndpoint.host")
            .wide("Message", "string", READY_MESSAGE),
        vsphere_kind::<vsphere::VSphereClusterTemplate>("A template that VSphereClusters are made from.")
            .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereClusterIdentity>("Who signs in to vCenter, and which namespaces may use it.")
            .label(MOVE_HIERARCHY, "true")
            .column("Ready", "string", ".status.ready")
            .column("Secret", "string", ".spec.secretName")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("Message", "string", READY_MESSAGE),
        vsphere_kind::<vsphere::VSphereFailureDomain>("A place in vCenter that fails as one.")
            .label(MOVE_HIERARCHY, "true")
            .column("Region", "string", ".spec.region.name")
            .column("Zone", "string", ".spec.zone.name")
            .column("Datacenter", "string", ".spec.topology.datacenter")
            .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereDeploymentZone>("A failure domain that machines may be put into.")
            .label(MOVE_HIERARCHY, "true")
            .column("Ready", "string", ".status.ready")
            .column("Server", "string", ".spec.server")
            .column("FailureDomain", "string", ".spec.failureDomain")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("Message", "string", READY_MESSAGE),
    ]);
    all
}

fn vsphere_machine_kinds() -> Vec<Definition> {
    vec![
        vsphere_kind::<vsphere::VSphereMachine>("One machine of a cluster on vSphere.")
            .spec(vsphere::freeze_machine)
            .column("Cluster", "string", CLUSTER)
            .column("Ready", "string", ".status.ready")
            .column("ProviderID", "string", ".spec.providerID")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide(
                "Machine",
                "string",
                r#".metadata.ownerReferences[?(@.kind=="Machine")].name"#,
            )
            .wide("Message", "string", READY_MESSAGE),
        vsphere_kind::<vsphere::VSphereMachineTemplate>("A template that VSphereMachines are made from.")
            .column("Template", "string", ".spec.template.spec.template")
            .column("CPUs", "integer", ".spec.template.spec.numCPUs")
            .column("Memory", "integer", ".spec.template.spec.memoryMiB")
            .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereVM>("The virtual machine behind a VSphereMachine.")
            .spec(vsphere::freeze_vm)
            .rule(vsphere::vm_name_rule())
            .column("Cluster", "string", CLUSTER)
            .column("Ready", "string", ".status.ready")
            .column("Host", "string", ".status.host")
            .column("Address", "string", ".status.addresses[0]")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("UUID", "string", ".spec.biosUUID")
            .wide("Message", "string", READY_MESSAGE),
    ]
}
