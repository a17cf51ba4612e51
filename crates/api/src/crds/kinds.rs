//! The kinds, and the columns of `kubectl get` for each.

use super::definition::Definition;
use crate::{azure, openshift, schema::Kind, vsphere};

const CONTRACT: (&str, &str) = ("cluster.x-k8s.io/v1beta1", "v1beta1");
/// Label with the provider that a definition belongs to.
const PROVIDER: &str = "cluster.x-k8s.io/provider";
/// `clusterctl move` moves only the kinds with this label. Where it moves an owner without its dependents, the garbage
/// collector deletes the dependents.
const CLUSTERCTL: &str = "clusterctl.cluster.x-k8s.io";
/// `clusterctl move` moves every object of a kind with this label, and the Secrets that the object owns, although no
/// Cluster owns it.
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
        Definition::of::<openshift::Machine>("A Machine is one machine of a cluster.")
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
        Definition::of::<openshift::MachineSet>("A MachineSet keeps a number of machines of the same template.")
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
        azure_kind::<azure::AzureMachinePool>(
            "An AzureMachinePool is a scale set on Azure that Capstan updates machine by machine.",
        )
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
        azure_kind::<azure::AzureMachinePoolMachine>(
            "An AzureMachinePoolMachine represents one instance of a scale set.",
        )
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
        azure_kind::<azure::AzureCluster>("An AzureCluster describes a cluster's infrastructure on Azure.")
            .column("Cluster", "string", CLUSTER)
            .column("Ready", "string", r#".status.conditions[?(@.type=="Ready")].status"#)
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("Message", "string", READY_MESSAGE)
            .wide("Resource Group", "string", ".spec.resourceGroup")
            .wide("SubscriptionID", "string", ".spec.subscriptionID")
            .wide("Location", "string", ".spec.location")
            .wide("Endpoint", "string", ".spec.controlPlaneEndpoint.host"),
        azure_kind::<azure::AzureClusterIdentity>(
            "An AzureClusterIdentity holds credentials for Azure, and the namespaces that may use them.",
        )
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
        vsphere_kind::<vsphere::VSphereCluster>("A VSphereCluster describes a cluster's infrastructure on vSphere.")
            .column("Ready", "string", ".status.ready")
            .column("Server", "string", ".spec.server")
            .column("Reason", "string", READY_REASON)
            .column("Age", "date", AGE)
            .wide("ControlPlaneEndpoint", "string", ".spec.controlPlaneEndpoint.host")
            .wide("Message", "string", READY_MESSAGE),
        vsphere_kind::<vsphere::VSphereClusterTemplate>(
            "A VSphereClusterTemplate is a template from which VSphereClusters are created.",
        )
        .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereClusterIdentity>(
            "A VSphereClusterIdentity holds credentials for vCenter, and the namespaces that may use them.",
        )
        .label(MOVE_HIERARCHY, "true")
        .column("Ready", "string", ".status.ready")
        .column("Secret", "string", ".spec.secretName")
        .column("Reason", "string", READY_REASON)
        .column("Age", "date", AGE)
        .wide("Message", "string", READY_MESSAGE),
        vsphere_kind::<vsphere::VSphereFailureDomain>(
            "A VSphereFailureDomain describes a region and a zone of vCenter, and the resources in them.",
        )
        .label(MOVE_HIERARCHY, "true")
        .column("Region", "string", ".spec.region.name")
        .column("Zone", "string", ".spec.zone.name")
        .column("Datacenter", "string", ".spec.topology.datacenter")
        .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereDeploymentZone>(
            "A VSphereDeploymentZone makes a failure domain available to clusters, with the place for machines in it.",
        )
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
        vsphere_kind::<vsphere::VSphereMachine>("A VSphereMachine is one machine of a cluster on vSphere.")
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
        vsphere_kind::<vsphere::VSphereMachineTemplate>(
            "A VSphereMachineTemplate is a template from which VSphereMachines are created.",
        )
        .column("Template", "string", ".spec.template.spec.template")
        .column("CPUs", "integer", ".spec.template.spec.numCPUs")
        .column("Memory", "integer", ".spec.template.spec.memoryMiB")
        .column("Age", "date", AGE),
        vsphere_kind::<vsphere::VSphereVM>("A VSphereVM is the virtual machine of a VSphereMachine.")
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
