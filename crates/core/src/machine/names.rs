//! The names and tags of a machine's resources in Azure. Every name contains the machine's, so the resources are found
//! again even if no status was ever written.

use std::collections::BTreeMap;

use capstan_api::openshift::AzureMachineProviderSpec;
use jiff::Timestamp;

use crate::azure_names::AzureName;
use crate::disks::azure::{OS_DISK_SUFFIX, disk_name};

/// Azure's limit on the name of a public address.
const MAX_PUBLIC_IP_NAME: usize = 80;

/// Azure's limit on the name of an availability set.
const MAX_SET_NAME: usize = 80;

/// Azure's limit on the name that a public address gets in DNS.
const MAX_DNS_LABEL: usize = 63;

/// Azure's limit on the tags of a resource.
const MAX_TAGS: usize = 50;

/// Names the machine on every resource that was made for it.
pub const MACHINE_TAG: &str = "capstan-machine";

/// Tells apart machines that had the same name one after the other.
pub const UID_TAG: &str = "capstan-machine-uid";

/// The deletion policy of a disk that is made before its machine.
pub const POLICY_TAG: &str = "capstan-deletion-policy";

pub type Tags = BTreeMap<String, String>;

/// Returns the cluster that a tag names, in the spelling of today or in the one before.
fn cluster_of_tag(tag: &str) -> Option<&str> {
    let mut prefixes = ["kubernetes.io_cluster.", "kubernetes.io-cluster-"].into_iter();
    prefixes.find_map(|prefix| tag.strip_prefix(prefix))
}

/// Whether a tag is that of a cluster, in the spelling of today or in the one before.
pub fn is_tag_of(tag: &str, cluster: &str) -> bool {
    !cluster.is_empty() && cluster_of_tag(tag) == Some(cluster)
}

/// Returns the names of a set's availability set: that of today, and that of an earlier version.
pub fn availability_set_names(cluster: &str, set: &str) -> [String; 2] {
    let whole = match set.starts_with(cluster) {
        true => set.to_owned(),
        false => format!("{cluster}_{set}"),
    };
    let cut: String = whole.chars().take(MAX_SET_NAME - "-as".len()).collect();
    [format!("{cut}-as"), format!("{set}-as")]
}

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
    /// When the machine's object was created.
    pub created: Option<Timestamp>,
    /// The cluster's name, by its Infrastructure object or else by the machine's label.
    pub cluster: String,
    /// The cluster's name by the machine's label. Earlier versions named resources by it.
    pub labelled: String,
    /// Tags of every resource of the cluster.
    pub cluster_tags: Tags,
    /// The MachineSet's name, where the machine has one.
    pub set: Option<String>,
}

impl Names {
    pub fn nic(&self) -> String {
        format!("{}-nic", self.machine)
    }

    pub fn public_ip(&self) -> String {
        self.public_ip_of(&self.cluster)
    }

    /// Returns the name that an earlier version gave the public address, where it is another one.
    pub fn former_public_ip(&self) -> Option<String> {
        Some(self.public_ip_of(&self.labelled)).filter(|former| *former != self.public_ip())
    }

    fn public_ip_of(&self, cluster: &str) -> String {
        let name = format!("{cluster}-{}", self.machine);
        // The machine's own name distinguishes it from others: a name that is too long loses the cluster's first letters.
        let cut = name.len().saturating_sub(MAX_PUBLIC_IP_NAME);
        let kept = name.get(cut..).unwrap_or(&self.machine);
        kept.trim_start_matches(|first: char| !first.is_ascii_alphanumeric())
            .to_owned()
    }

    /// Returns the name that the public address gets in Azure's DNS. `None` where ours does not fit.
    pub fn dns_label(&self) -> Option<String> {
        let label = self.public_ip().to_lowercase();
        let fits = (3..=MAX_DNS_LABEL).contains(&label.len())
            && label.starts_with(|first: char| first.is_ascii_lowercase())
            && label.ends_with(|last: char| last.is_ascii_alphanumeric())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        fits.then_some(label)
    }

    pub fn os_disk(&self) -> String {
        disk_name(&self.machine, OS_DISK_SUFFIX)
    }

    pub fn data_disk(&self, suffix: &str) -> String {
        disk_name(&self.machine, suffix)
    }

    /// Whether a disk of this name is one of the machine's data disks, or was.
    pub fn is_data_disk(&self, disk: &str) -> bool {
        let (disk, prefix) = (disk.to_lowercase(), format!("{}_", self.machine.to_lowercase()));
        disk.starts_with(&prefix) && disk != self.os_disk().to_lowercase()
    }

    /// Returns the availability set that is made where a region has no zones, by machine-api-provider-azure's rule: the
    /// cluster's name comes first unless the set's name starts with it, and the whole is cut to Azure's limit.
    pub fn availability_set(&self) -> Option<String> {
        let [name, _] = availability_set_names(&self.cluster, self.set.as_ref()?);
        Some(name).filter(|name| AzureName::AvailabilitySet.check(name).is_ok())
    }

    /// Returns the other names that the availability set may have: machine-api-provider-azure names it by the machine's
    /// label, and an earlier version left the cluster's name out.
    pub fn former_availability_sets(&self) -> Vec<String> {
        let Some(set) = &self.set else { return Vec::new() };
        let [by_label, short] = availability_set_names(&self.labelled, set);
        let mut names = vec![by_label, short];
        names.dedup();
        let today = self.availability_set();
        names.retain(|name| AzureName::AvailabilitySet.check(name).is_ok() && today.as_ref() != Some(name));
        names
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

    /// Returns the value of [`MACHINE_TAG`].
    pub fn owner(&self) -> String {
        format!("{}/{}", self.namespace, self.machine)
    }

    /// Returns the tag of the cluster's resources.
    fn cluster_tag(&self) -> String {
        format!("kubernetes.io_cluster.{}", self.cluster)
    }

    /// Whether a tag is the cluster's, in the spelling of today or in the one before.
    fn is_cluster_tag(&self, tag: &str) -> bool {
        is_tag_of(tag, &self.cluster) || is_tag_of(tag, &self.labelled)
    }

    /// Returns the tags of every resource that is made for this machine: the cluster's, the user's and ours.
    pub fn tags(&self, spec: &AzureMachineProviderSpec) -> Tags {
        let mut tags = self.cluster_tags.clone();
        for (key, value) in &spec.tags {
            // Azure compares keys without regard to case, and a machine's own tags count for more.
            tags.retain(|other, _| !other.eq_ignore_ascii_case(key));
            tags.insert(key.clone(), value.clone());
        }
        if !self.cluster.is_empty() {
            tags.insert(self.cluster_tag(), "owned".to_owned());
        }
        tags.insert(MACHINE_TAG.to_owned(), self.owner());
        tags.insert(UID_TAG.to_owned(), self.uid.clone());
        tags
    }

    /// Checks that Azure takes all tags of the machine.
    pub fn check_tags(&self, spec: &AzureMachineProviderSpec) -> Result<(), String> {
        // A disk has one more than other resources.
        let count = self.tags(spec).len() + 1;
        if count <= MAX_TAGS {
            return Ok(());
        }
        Err(format!(
            "providerSpec.tags: Too many: {count}: a resource in Azure has at most {MAX_TAGS} tags, those of the cluster \
             ({}) and of Capstan included",
            self.cluster_tags.len()
        ))
    }

    /// Whether a resource was made for this very machine, and not for an earlier one of its name.
    pub fn made(&self, tags: Option<&Tags>) -> bool {
        tags.and_then(|tags| tags.get(UID_TAG))
            .is_some_and(|uid| *uid == self.uid)
    }

    /// Whether part of a machine's network was made for it. The controller before this one put no tags there: on a
    /// machine that it worked on (`inherited`), a resource without tags is the machine's.
    pub fn has_made(&self, tags: Option<&Tags>, inherited: bool) -> bool {
        self.owns(tags) || (inherited && tags.is_none_or(Tags::is_empty))
    }

    /// Whether a resource bears the cluster's tag.
    pub fn is_of_cluster(&self, tags: Option<&Tags>) -> bool {
        tags.is_some_and(|tags| tags.keys().any(|tag| self.is_cluster_tag(tag)))
    }

    /// Returns the other cluster whose tag a resource bears. `None`: it bears that of this cluster, or no cluster's.
    pub fn other_cluster<'a>(&self, tags: Option<&'a Tags>) -> Option<&'a str> {
        let mut named = tags?.keys().filter_map(|tag| cluster_of_tag(tag));
        named.next().filter(|_| !self.is_of_cluster(tags))
    }

    /// Whether a resource bears the tag of another machine.
    pub fn is_of_another(&self, tags: Option<&Tags>) -> bool {
        let owner = tags.and_then(|tags| tags.get(MACHINE_TAG));
        owner.is_some_and(|owner| *owner != self.owner())
    }

    /// Whether a resource with the machine's name was made for the machine: by our tag, or by the cluster's where an
    /// earlier controller made it.
    pub fn owns(&self, tags: Option<&Tags>) -> bool {
        let get = |key: &str| tags.and_then(|tags| tags.get(key));
        match get(MACHINE_TAG) {
            Some(owner) => *owner == self.owner(),
            None => self.is_of_cluster(tags),
        }
    }
}

/// Names that tests start from.
#[cfg(test)]
pub(super) fn sample() -> Names {
    Names {
        subscription: "SUB".into(),
        group: "Group".into(),
        network_group: "net".into(),
        location: "eastus".into(),
        machine: "m1".into(),
        namespace: "ns".into(),
        uid: "u1".into(),
        created: None,
        cluster: "c".into(),
        labelled: "c".into(),
        cluster_tags: Tags::new(),
        set: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn resources_bear_the_clusters_tags_and_those_of_earlier_names_are_still_known() {
        let names = Names {
            cluster: "ocp-x7".into(),
            labelled: "mine".into(),
            cluster_tags: Tags::from([("Team".into(), "core".into()), ("cost".into(), "1".into())]),
            ..sample()
        };
        let spec = AzureMachineProviderSpec {
            tags: Tags::from([("team".into(), "edge".into())]),
            ..AzureMachineProviderSpec::default()
        };
        let tags = names.tags(&spec);
        assert_eq!(
            tags.get("kubernetes.io_cluster.ocp-x7").map(String::as_str),
            Some("owned")
        );
        assert_eq!(
            (tags.get("team").map(String::as_str), tags.get("Team")),
            (Some("edge"), None)
        );
        assert_eq!(tags.get("cost").map(String::as_str), Some("1"));
        for (tag, ours) in [
            ("kubernetes.io_cluster.ocp-x7", true),
            ("kubernetes.io-cluster-ocp-x7", true),
            ("kubernetes.io-cluster-mine", true),
            ("kubernetes.io_cluster.other", false),
            ("kubernetes.io_cluster.", false),
        ] {
            assert_eq!(
                names.owns(Some(&Tags::from([(tag.to_owned(), "owned".to_owned())]))),
                ours,
                "{tag}"
            );
        }
        assert_eq!(
            (names.public_ip().as_str(), names.former_public_ip().as_deref()),
            ("ocp-x7-m1", Some("mine-m1"))
        );
        assert_eq!(sample().former_public_ip(), None);
    }

    #[test]
    fn more_tags_than_azure_takes_are_refused_with_their_number() {
        let spec = |count: usize| AzureMachineProviderSpec {
            tags: (0..count).map(|tag| (format!("t{tag}"), String::new())).collect(),
            ..AzureMachineProviderSpec::default()
        };
        assert_eq!(sample().check_tags(&spec(46)), Ok(()));
        let error = sample().check_tags(&spec(47)).unwrap_err();
        assert!(error.starts_with("providerSpec.tags: Too many: 51: "), "{error}");
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

    #[test]
    fn an_availability_set_has_the_name_that_the_controller_before_gave_it() {
        let of = |cluster: &str, set: &str| {
            let names = Names {
                cluster: cluster.into(),
                set: Some(set.into()),
                ..sample()
            };
            names.availability_set()
        };
        assert_eq!(of("ocp-x7", "ocp-x7-worker").as_deref(), Some("ocp-x7-worker-as"));
        assert_eq!(of("ocp-x7", "infra").as_deref(), Some("ocp-x7_infra-as"));
        let long = of("ocp-x7", &"w".repeat(90)).unwrap_or_default();
        assert!(long.len() == 80 && long.ends_with("w-as"), "{long}");
        assert_eq!(of("ocp-x7", "a/../b"), None);
        let former = |set: &str| {
            let names = Names {
                cluster: "ocp-x7".into(),
                set: Some(set.into()),
                ..sample()
            };
            names.former_availability_sets()
        };
        assert_eq!(former("infra"), ["c_infra-as", "infra-as"]);
        assert_eq!(former("ocp-x7-worker"), ["c_ocp-x7-worker-as"]);
        let same = Names {
            set: Some("c-worker".into()),
            ..sample()
        };
        assert!(same.former_availability_sets().is_empty());
        assert_eq!(sample().availability_set(), None);
    }
}
