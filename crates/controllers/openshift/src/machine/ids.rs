//! A machine's resources in Azure, by id.

use super::error::Error;
use super::status;
use crate::account::Place;
use crate::sizes;
use capstan_api::openshift::{AzureMachineProviderSpec, CLUSTER_ID_LABEL, Machine};
use capstan_azure::ResourceId;
use capstan_azure::model::VirtualMachine;
use capstan_core::azure_names::AzureName;
use capstan_core::machine::cluster::Cluster;
use capstan_core::machine::names::Names;
use capstan_kube::runtime::ObjectKey;
use kube::ResourceExt as _;

/// Label with the name of the machine's set. The creator of the machine sets it.
pub const MACHINESET_LABEL: &str = "machine.openshift.io/cluster-api-machineset";

/// Resource ids of a machine's names.
pub trait Ids {
    fn vm_id(&self) -> ResourceId;
    fn disk_id(&self, name: &str) -> ResourceId;
    fn nic_id(&self) -> ResourceId;
    /// Returns the id as the kubelet's cloud provider writes it: subscription and group in lower case.
    fn provider_id(&self) -> String;
    /// Whether Azure's answer is this machine's virtual machine. Its id must be the one that was asked for, and its tags
    /// or the machine's status must say that it was made for the machine: a provider id proves nothing, for users
    /// write it.
    fn owns_vm(&self, vm: &VirtualMachine, recorded: Option<&ResourceId>) -> bool;
}

impl Ids for Names {
    fn vm_id(&self) -> ResourceId {
        ResourceId::compute(&self.subscription, &self.group, "virtualMachines", &self.machine)
    }

    fn disk_id(&self, name: &str) -> ResourceId {
        ResourceId::compute(&self.subscription, &self.group, "disks", name)
    }

    fn nic_id(&self) -> ResourceId {
        ResourceId::network(&self.subscription, &self.group, "networkInterfaces", &self.nic())
    }

    fn provider_id(&self) -> String {
        ResourceId::compute(
            &self.subscription.to_lowercase(),
            &self.group.to_lowercase(),
            "virtualMachines",
            &self.machine,
        )
        .provider_id()
    }

    fn owns_vm(&self, vm: &VirtualMachine, recorded: Option<&ResourceId>) -> bool {
        let id = vm.id.as_deref().and_then(|id| id.parse::<ResourceId>().ok());
        let tags = vm.tags.as_ref();
        id == Some(self.vm_id()) && (self.owns(tags) || (recorded == Some(&self.vm_id()) && !self.is_of_another(tags)))
    }
}

fn named(machine: &Machine) -> Option<ResourceId> {
    let id: ResourceId = machine.spec.provider_id.as_deref()?.parse().ok()?;
    id.kind().eq_ignore_ascii_case("virtualMachines").then_some(id)
}

/// Returns the virtual machine that the machine's status records, or else the one that its provider id names.
fn located(machine: &Machine) -> Option<ResourceId> {
    let id = status::recorded_vm(machine).or_else(|| named(machine))?;
    AzureName::ResourceGroup.check(&id.group).is_ok().then_some(id)
}

/// Refuses to look for a virtual machine in another subscription than the one that it was created in: it would be missed
/// there, and a machine that is missed has failed for good.
pub fn check_subscription(machine: &Machine, names: &Names) -> Result<(), Error> {
    let deleting = machine.metadata.deletion_timestamp.is_some();
    // A provider id alone proves nothing, so it keeps no machine from going.
    let known = status::recorded_vm(machine).or_else(|| named(machine).filter(|_| !deleting));
    match known {
        Some(id) if !id.subscription.eq_ignore_ascii_case(&names.subscription) => Err(Error::NotReady(format!(
            "the virtual machine is in subscription {}, but the credentials secret names subscription {}: correct the \
             secret",
            id.subscription, names.subscription
        ))),
        _ => Ok(()),
    }
}

pub fn names(
    key: &ObjectKey,
    machine: &Machine,
    spec: &AzureMachineProviderSpec,
    place: &Place,
    cluster: Cluster,
) -> Names {
    let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    let first = |values: [&String; 2]| values.into_iter().find(|value| !value.is_empty()).cloned();
    let clusters = first([&place.group, &cluster.group]).unwrap_or_default();
    let asked = given(&spec.resource_group).unwrap_or_else(|| clusters.clone());
    // Where the virtual machine is counts for more than where the spec asks for it by now.
    let group = match located(machine) {
        Some(id) if !id.group.eq_ignore_ascii_case(&asked) => id.group,
        _ => asked,
    };
    let label = |name: &str| machine.labels().get(name).cloned();
    let owner = || {
        let mut owners = machine.owner_references().iter();
        owners
            .find(|owner| owner.kind == "MachineSet")
            .map(|owner| owner.name.clone())
    };
    let labelled = label(CLUSTER_ID_LABEL).unwrap_or_default();
    let network = given(&spec.network_resource_group).or_else(|| first([&cluster.network_group, &clusters]));
    Names {
        subscription: place.subscription.clone(),
        network_group: network.unwrap_or_else(|| group.clone()),
        group,
        // By the name that is also good for a label.
        location: sizes::region(&given(&spec.location).unwrap_or_else(|| place.location.clone())),
        machine: key.name.clone(),
        namespace: key.namespace.clone(),
        uid: key.uid.clone(),
        created: machine.creation_timestamp().map(|time| time.0),
        cluster: first([&cluster.name, &labelled]).unwrap_or_default(),
        labelled,
        cluster_tags: cluster.tags,
        set: label(MACHINESET_LABEL).or_else(owner),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn key() -> ObjectKey {
        ObjectKey {
            namespace: "ns".into(),
            name: "m1".into(),
            uid: "u1".into(),
        }
    }

    /// The names of machine `ns/m1` of cluster `c`.
    pub(crate) fn sample() -> Names {
        let mut machine = Machine::new("m1", Default::default());
        machine.labels_mut().insert(CLUSTER_ID_LABEL.into(), "c".into());
        let spec = AzureMachineProviderSpec {
            network_resource_group: Some("net".into()),
            ..AzureMachineProviderSpec::default()
        };
        let place = Place {
            subscription: "SUB".into(),
            group: "Group".into(),
            location: "eastus".into(),
        };
        names(&key(), &machine, &spec, &place, Cluster::default())
    }

    #[test]
    fn the_provider_id_is_spelt_as_nodes_spell_it() {
        let expected = "azure:///subscriptions/sub/resourceGroups/group/providers/Microsoft.Compute/virtualMachines/m1";
        assert_eq!(sample().provider_id(), expected);
    }

    #[test]
    fn a_machine_is_where_its_provider_id_says_even_if_the_spec_was_changed() {
        let spec = AzureMachineProviderSpec {
            resource_group: Some("elsewhere".into()),
            ..AzureMachineProviderSpec::default()
        };
        let place = Place {
            subscription: "SUB".into(),
            group: "other".into(),
            location: "eastus".into(),
        };
        let key = key();
        let mut machine = Machine::new("m1", Default::default());
        assert_eq!(
            names(&key, &machine, &spec, &place, Cluster::default()).group,
            "elsewhere"
        );
        machine.spec.provider_id = Some(sample().provider_id());
        assert_eq!(names(&key, &machine, &spec, &place, Cluster::default()).group, "group");
    }

    #[test]
    fn a_machine_is_not_looked_for_in_another_subscription() {
        let mut machine = Machine::new("m1", Default::default());
        assert!(check_subscription(&machine, &sample()).is_ok());
        machine.spec.provider_id = Some(sample().provider_id());
        assert!(check_subscription(&machine, &sample()).is_ok());
        let other = Names {
            subscription: "other".into(),
            ..sample()
        };
        let error = check_subscription(&machine, &other).unwrap_err().to_string();
        assert!(
            error.contains("is in subscription sub, but the credentials secret names subscription other"),
            "{error}"
        );
        machine.metadata.deletion_timestamp = serde_json::from_value(serde_json::json!("2026-01-01T00:00:00Z")).ok();
        assert!(
            check_subscription(&machine, &other).is_ok(),
            "a provider id keeps no machine"
        );
    }
}
