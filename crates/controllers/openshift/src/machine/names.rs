//! Where a machine's things are in Azure. Everything is named after the machine, so that it is found again even if no
//! status was ever written.

use super::status;
use crate::account::Place;
use crate::sizes;
use capstan_api::openshift::{AzureMachineProviderSpec, CLUSTER_ID_LABEL, Machine};
use capstan_azure::ResourceId;
use capstan_azure::model::{Tags, VirtualMachine};
use capstan_core::azure_names::AzureName;
use jiff::Timestamp;
use kube::ResourceExt as _;

/// Azure's limit on the name of a public address.
const MAX_PUBLIC_IP_NAME: usize = 80;

/// Azure's limit on the name that a public address gets in DNS.
const MAX_DNS_LABEL: usize = 63;

/// Names the machine on everything made for it.
pub const MACHINE_TAG: &str = "capstan-machine";

/// Tells apart machines that had the same name one after the other.
pub const UID_TAG: &str = "capstan-machine-uid";

/// Says on a disk that is made before its machine what is to become of it.
pub const POLICY_TAG: &str = "capstan-deletion-policy";

/// The set that a machine belongs to, put there by whoever made it.
pub const MACHINESET_LABEL: &str = "machine.openshift.io/cluster-api-machineset";

/// The names of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    pub subscription: String,
    pub group: String,
    pub network_group: String,
    pub location: String,
    pub machine: String,
    pub namespace: String,
    pub uid: String,
    /// When the machine's object was made.
    pub born: Option<Timestamp>,
    pub cluster: String,
    /// The set's name, where the machine has one.
    pub set: Option<String>,
}

impl Names {
    pub fn nic(&self) -> String {
        format!("{}-nic", self.machine)
    }

    pub fn public_ip(&self) -> String {
        let name = format!("{}-{}", self.cluster, self.machine);
        // The machine's own name is what tells it from others: a name too long loses the cluster's first letters.
        let cut = name.len().saturating_sub(MAX_PUBLIC_IP_NAME);
        let kept = name.get(cut..).unwrap_or(&self.machine);
        kept.trim_start_matches(|first: char| !first.is_ascii_alphanumeric())
            .to_owned()
    }

    /// The name that the public address gets in Azure's DNS; none where ours would not do for one.
    pub fn dns_label(&self) -> Option<String> {
        let label = self.public_ip().to_lowercase();
        let fits = (3..=MAX_DNS_LABEL).contains(&label.len())
            && label.starts_with(|first: char| first.is_ascii_lowercase())
            && label.ends_with(|last: char| last.is_ascii_alphanumeric())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        fits.then_some(label)
    }

    pub fn os_disk(&self) -> String {
        format!("{}_OSDisk", self.machine)
    }

    pub fn data_disk(&self, suffix: &str) -> String {
        capstan_core::disks::azure::disk_name(&self.machine, suffix)
    }

    /// Whether a disk of this name is one of the machine's data disks, or was.
    pub fn is_data_disk(&self, disk: &str) -> bool {
        let (disk, prefix) = (disk.to_lowercase(), format!("{}_", self.machine.to_lowercase()));
        disk.starts_with(&prefix) && disk != self.os_disk().to_lowercase()
    }

    /// The set that is made where a region has no zones.
    pub fn availability_set(&self) -> Option<String> {
        let name = self.set.as_ref().map(|set| format!("{set}-as"));
        name.filter(|name| AzureName::AvailabilitySet.check(name).is_ok())
    }

    /// Checks what every request about this machine has in its URL. The group may come from the credentials secret.
    pub fn check(&self) -> Result<(), String> {
        // An empty group has its own message.
        let group = Some(&self.group).filter(|group| !group.is_empty());
        for (field, kind, value) in [
            ("providerSpec.resourceGroup", AzureName::ResourceGroup, group),
            ("metadata.name", AzureName::VirtualMachine, Some(&self.machine)),
        ] {
            let Some(value) = value else { continue };
            kind.check(value)
                .map_err(|error| format!("{field}: Invalid value: {value:?}: {}", error.reason()))?;
        }
        Ok(())
    }

    pub fn vm_id(&self) -> ResourceId {
        ResourceId::compute(&self.subscription, &self.group, "virtualMachines", &self.machine)
    }

    pub fn disk_id(&self, name: &str) -> ResourceId {
        ResourceId::compute(&self.subscription, &self.group, "disks", name)
    }

    pub fn nic_id(&self) -> ResourceId {
        ResourceId::network(&self.subscription, &self.group, "networkInterfaces", &self.nic())
    }

    /// As the kubelet's cloud provider writes it: subscription and group in lower case.
    pub fn provider_id(&self) -> String {
        ResourceId::compute(
            &self.subscription.to_lowercase(),
            &self.group.to_lowercase(),
            "virtualMachines",
            &self.machine,
        )
        .provider_id()
    }

    /// What [`MACHINE_TAG`] says.
    pub fn owner(&self) -> String {
        format!("{}/{}", self.namespace, self.machine)
    }

    fn cluster_tag(&self) -> String {
        format!("kubernetes.io-cluster-{}", self.cluster)
    }

    /// The tags of everything made for this machine: the user's and ours.
    pub fn tags(&self, spec: &AzureMachineProviderSpec) -> Tags {
        let mut tags = spec.tags.clone();
        if !self.cluster.is_empty() {
            tags.insert(self.cluster_tag(), "owned".to_owned());
        }
        tags.insert(MACHINE_TAG.to_owned(), self.owner());
        tags.insert(UID_TAG.to_owned(), self.uid.clone());
        tags
    }

    /// Whether this very machine made it, and not an earlier one of its name.
    pub fn made(&self, tags: Option<&Tags>) -> bool {
        tags.and_then(|tags| tags.get(UID_TAG))
            .is_some_and(|uid| *uid == self.uid)
    }

    /// Whether part of a machine's network was made for it. The controller before this one put no tags there: on a
    /// machine that it worked on (`inherited`), what has none is the machine's.
    pub fn has_made(&self, tags: Option<&Tags>, inherited: bool) -> bool {
        self.owns(tags) || (inherited && tags.is_none_or(Tags::is_empty))
    }

    /// Whether a resource bears the tag of another machine.
    pub fn is_of_another(&self, tags: Option<&Tags>) -> bool {
        let owner = tags.and_then(|tags| tags.get(MACHINE_TAG));
        owner.is_some_and(|owner| *owner != self.owner())
    }

    /// Whether Azure's answer is this machine's virtual machine. Its id must be the one that was asked for, and its tags
    /// or the machine's status must say that it was made for the machine: a provider id proves nothing, for users
    /// write it.
    pub fn owns_vm(&self, vm: &VirtualMachine, recorded: Option<&ResourceId>) -> bool {
        let id = vm.id.as_deref().and_then(|id| id.parse::<ResourceId>().ok());
        let tags = vm.tags.as_ref();
        id == Some(self.vm_id()) && (self.owns(tags) || (recorded == Some(&self.vm_id()) && !self.is_of_another(tags)))
    }

    /// Whether something that bears our name was made for us: by our tag, or by the cluster's where an earlier
    /// controller made it.
    pub fn owns(&self, tags: Option<&Tags>) -> bool {
        let get = |key: &str| tags.and_then(|tags| tags.get(key));
        match get(MACHINE_TAG) {
            Some(owner) => *owner == self.owner(),
            None => {
                get(&self.cluster_tag()).is_some() || get(&format!("kubernetes.io_cluster.{}", self.cluster)).is_some()
            }
        }
    }
}

/// Returns the virtual machine that the machine's status records, or else the one that its provider id names.
fn located(machine: &Machine) -> Option<ResourceId> {
    let named = || {
        let id: ResourceId = machine.spec.provider_id.as_deref()?.parse().ok()?;
        id.kind().eq_ignore_ascii_case("virtualMachines").then_some(id)
    };
    let id = status::recorded_vm(machine).or_else(named)?;
    AzureName::ResourceGroup.check(&id.group).is_ok().then_some(id)
}

pub fn names(machine: &Machine, spec: &AzureMachineProviderSpec, place: &Place) -> Names {
    let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
    let asked = given(&spec.resource_group).unwrap_or_else(|| place.group.clone());
    // Where the virtual machine is counts for more than where the spec would have it by now.
    let group = match located(machine) {
        Some(id) if !id.group.eq_ignore_ascii_case(&asked) => id.group,
        _ => asked,
    };
    let label = |key: &str| machine.labels().get(key).cloned();
    let owner = || {
        let owners = machine.owner_references().iter();
        owners
            .clone()
            .find(|owner| owner.kind == "MachineSet")
            .map(|owner| owner.name.clone())
    };
    Names {
        subscription: place.subscription.clone(),
        network_group: given(&spec.network_resource_group).unwrap_or_else(|| group.clone()),
        group,
        // By the name that is also good for a label.
        location: sizes::region(&given(&spec.location).unwrap_or_else(|| place.location.clone())),
        machine: machine.name_any(),
        namespace: machine.namespace().unwrap_or_default(),
        uid: machine.uid().unwrap_or_default(),
        born: machine.creation_timestamp().map(|time| time.0),
        cluster: label(CLUSTER_ID_LABEL).unwrap_or_default(),
        set: label(MACHINESET_LABEL).or_else(owner),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Names {
        Names {
            subscription: "SUB".into(),
            group: "Group".into(),
            network_group: "net".into(),
            location: "eastus".into(),
            machine: "m1".into(),
            namespace: "ns".into(),
            uid: "u1".into(),
            born: None,
            cluster: "c".into(),
            set: None,
        }
    }

    #[test]
    fn the_provider_id_is_spelt_as_nodes_spell_it() {
        let expected = "azure:///subscriptions/sub/resourceGroups/group/providers/Microsoft.Compute/virtualMachines/m1";
        assert_eq!(sample().provider_id(), expected);
    }

    #[test]
    fn long_names_of_public_addresses_keep_what_tells_machines_apart() {
        let of = |cluster: &str, machine: &str| Names {
            cluster: cluster.into(),
            machine: machine.into(),
            ..sample()
        };
        let short = of("c", "m1");
        assert_eq!(
            (short.public_ip().as_str(), short.dns_label().as_deref()),
            ("c-m1", Some("c-m1"))
        );
        let cluster = "production-cluster-of-the-northern-region-2cv7h";
        let twins = ["a", "b"].map(|end| of(cluster, &format!("{cluster}-worker-westeurope1-{end}")));
        assert_ne!(twins[0].public_ip(), twins[1].public_ip());
        for twin in &twins {
            let name = twin.public_ip();
            assert!(name.len() <= 80 && name.ends_with(&twin.machine), "{name}");
            assert!(name.starts_with(|first: char| first.is_ascii_alphanumeric()), "{name}");
            assert_eq!(twin.dns_label(), None, "azure takes 63 letters");
        }
        assert_eq!(of("c", "m.1").dns_label(), None, "a label has no dots");
        assert_eq!(of("", "1m").dns_label(), None, "a label begins with a letter");
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
        let mut machine = Machine::new("m1", Default::default());
        assert_eq!(names(&machine, &spec, &place).group, "elsewhere");
        machine.spec.provider_id = Some(sample().provider_id());
        assert_eq!(names(&machine, &spec, &place).group, "group");
    }

    #[test]
    fn a_machines_disks_are_told_from_those_of_its_neighbours() {
        let names = sample();
        assert!(names.is_data_disk("M1_data"));
        for other in ["m1_OSDisk", "m1_osdisk", "m10_data", "m1-data", "pvc-1"] {
            assert!(!names.is_data_disk(other), "{other}");
        }
    }

    #[test]
    fn things_are_ours_by_machine_or_else_by_cluster() {
        let names = sample();
        let tags = |pairs: &[(&str, &str)]| -> Tags {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        assert!(names.owns(Some(&names.tags(&AzureMachineProviderSpec::default()))));
        assert!(names.owns(Some(&tags(&[("kubernetes.io-cluster-c", "owned")]))));
        assert!(!names.owns(Some(&tags(&[
            ("kubernetes.io-cluster-c", "owned"),
            (MACHINE_TAG, "ns/other")
        ]))));
        assert!(!names.owns(Some(&tags(&[("kubernetes.io-cluster-other", "owned")]))));
        assert!(!names.owns(None));
    }

    #[test]
    fn parts_of_a_network_without_tags_are_ours_only_where_another_controller_worked_before() {
        let (names, other) = (sample(), Tags::from([("team".to_owned(), "other".to_owned())]));
        let own = names.tags(&AzureMachineProviderSpec::default());
        for (tags, inherited, ours) in [
            (Some(&own), false, true),
            (None, false, false),
            (None, true, true),
            (Some(&Tags::new()), true, true),
            (Some(&other), true, false),
            (Some(&other), false, false),
        ] {
            assert_eq!(names.has_made(tags, inherited), ours, "{tags:?} {inherited}");
        }
    }
}
