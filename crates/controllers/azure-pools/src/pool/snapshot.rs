//! Azure as it was last read: the scale set and its instances.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_azure::model::{ImageReference, Instance, ScaleSet, Tags, VirtualMachine};
use capstan_azure::{Owned, ResourceId};
use capstan_core::pool::Claim;

use crate::model::{CUSTOM_DATA_TAG, HASH_TAG};

/// A list may lag behind: an instance that it lacks counts as gone once a list after this long lacks it, too.
pub(super) const CONFIRM: Duration = Duration::from_secs(10);

/// The scale set as last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScaleSetSnapshot {
    pub id: String,
    /// Changes with every change of the scale set.
    pub etag: Option<String>,
    pub capacity: usize,
    pub state: String,
    pub model: Option<String>,
    /// When we asked for that model, in seconds since the epoch; `None` where another process or somebody else did.
    pub model_since: Option<i64>,
    pub custom_data: Option<String>,
    pub make: Make,
    pub zones: Vec<String>,
    pub tags: Tags,
    pub flexible: bool,
    /// Azure's whole answer.
    pub whole: Arc<ScaleSet>,
}

/// Image and size, by which a model that somebody else made can be recognized, and an instance of it. Azure does not keep the
/// case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Make(String);

impl Make {
    pub fn new(image: Option<&ImageReference>, size: Option<&str>) -> Self {
        let image = image.cloned().unwrap_or_default();
        let parts = [
            image.id,
            image.community_gallery_image_id,
            image.shared_gallery_image_id,
            image.publisher,
            image.offer,
            image.sku,
            image.version,
            size.map(str::to_owned),
        ];
        let parts: Vec<String> = parts.into_iter().map(Option::unwrap_or_default).collect();
        Self(parts.join(" ").to_ascii_lowercase())
    }

    /// Whether the other one is of another image, as far as both are known.
    pub fn has_other_image(&self, other: &Self) -> bool {
        let image = |make: &Self| make.0.rsplit_once(' ').map(|(image, _)| image.to_owned());
        self.is_known() && other.is_known() && image(self) != image(other)
    }

    /// Whether Azure named an image and a size.
    pub fn is_known(&self) -> bool {
        !self.0.trim().is_empty()
    }

    pub fn of(set: &ScaleSet) -> Self {
        let profile = set.properties.as_ref().and_then(|p| p.virtual_machine_profile.as_ref());
        let image = profile.and_then(|profile| profile.storage_profile.as_ref()?.image_reference.as_ref());
        Self::new(image, set.sku.as_ref().and_then(|sku| sku.name.as_deref()))
    }
}

impl ScaleSetSnapshot {
    pub fn read(set: &ScaleSet) -> Self {
        let tag = |name: &str| set.tags.as_ref().and_then(|tags| tags.get(name)).cloned();
        Self {
            id: set.id.clone().unwrap_or_default(),
            etag: set.etag.clone().filter(|etag| !etag.is_empty()),
            capacity: usize::try_from(set.capacity()).unwrap_or_default(),
            state: set.provisioning_state().to_string(),
            model: tag(HASH_TAG),
            model_since: None,
            custom_data: tag(CUSTOM_DATA_TAG),
            make: Make::of(set),
            zones: set.zones.clone().unwrap_or_default(),
            tags: set.tags.clone().unwrap_or_default(),
            flexible: set.is_flexible(),
            whole: Arc::new(set.clone()),
        }
    }

    /// Whether its instances may be evicted.
    pub fn is_spot(&self) -> bool {
        let properties = self.whole.properties.as_ref();
        let profile = properties.and_then(|properties| properties.virtual_machine_profile.as_ref());
        profile.and_then(|profile| profile.priority.as_deref()) == Some("Spot")
    }

    /// Returns why the scale set is not the one of this pool; `None` if it is.
    pub fn refusal(&self, claim: &Claim) -> Option<String> {
        claim.refusal(self.tags.iter().map(|(name, value)| (name.as_str(), value.as_str())))
    }

    /// Proof by its tags that the scale set belongs to this pool.
    pub fn owned(&self, claim: &Claim) -> Result<Owned<ScaleSet>, capstan_azure::Error> {
        Owned::by_tags(self.whole.as_ref(), |_| self.refusal(claim).is_none())
    }

    /// Whether Azure works on it.
    pub fn in_progress(&self) -> bool {
        in_progress(&self.state)
    }
}

/// Whether this is a state that passes.
pub(super) fn in_progress(state: &str) -> bool {
    let stable = ["", "Succeeded", "Failed", "Canceled"];
    !stable.iter().any(|name| name.eq_ignore_ascii_case(state))
}

/// One instance as last listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceSnapshot {
    /// Its number in a Uniform set, its VM's name in a Flexible one.
    pub id: String,
    pub name: String,
    pub provider_id: String,
    /// The name that its kubelet registers its Node by.
    pub computer_name: Option<String>,
    pub state: String,
    pub power: Option<String>,
    pub latest: bool,
    pub created: i64,
    /// Azure's message about a failure.
    pub message: Option<String>,
    /// Numbers may be used again; this never is.
    pub vm_id: Option<String>,
    pub make: Make,
    pub zone: Option<String>,
    /// Proof that the VM of a Flexible set may be deleted.
    pub vm: Option<Owned<VirtualMachine>>,
}

impl InstanceSnapshot {
    pub fn uniform(instance: &Instance) -> Option<Self> {
        let id = instance.id.as_ref()?;
        let properties = instance.properties.as_ref();
        let statuses = properties
            .and_then(|p| p.instance_view.as_ref())
            .and_then(|view| view.statuses.as_ref());
        let created = properties.and_then(|p| p.time_created.as_deref());
        let failure = statuses
            .into_iter()
            .flatten()
            .find(|status| status.level.as_deref() == Some("Error"));
        Some(Self {
            id: instance
                .instance_id
                .clone()
                .or_else(|| id.rsplit('/').next().map(str::to_owned))?,
            name: instance.name.clone().unwrap_or_default(),
            provider_id: provider_id(id),
            computer_name: properties.and_then(|p| p.os_profile.as_ref()?.computer_name.clone()),
            state: instance.provisioning_state().to_string(),
            power: instance.power_state().map(|power| power.to_string()),
            latest: instance.latest_model_applied(),
            created: created.and_then(seconds).unwrap_or_default(),
            message: failure.and_then(|status| status.message.clone().or_else(|| status.display_status.clone())),
            vm_id: properties.and_then(|p| p.vm_id.clone()),
            make: Make::new(
                properties.and_then(|p| p.storage_profile.as_ref()?.image_reference.as_ref()),
                instance.sku.as_ref().and_then(|sku| sku.name.as_deref()),
            ),
            zone: instance.zones.iter().flatten().next().cloned(),
            vm: None,
        })
    }

    /// A VM of a Flexible set, if it is one of `set`.
    pub fn flexible(vm: &VirtualMachine, set: &str, owned: Option<&Owned<ScaleSet>>) -> Option<Self> {
        let properties = vm.properties.as_ref()?;
        let owner: ResourceId = properties
            .virtual_machine_scale_set
            .as_ref()?
            .id
            .as_ref()?
            .parse()
            .ok()?;
        if owner != set.parse().ok()? {
            return None;
        }
        let statuses = properties
            .instance_view
            .as_ref()
            .and_then(|view| view.statuses.as_ref());
        let power = statuses.and_then(|statuses| capstan_azure::model::power_state(statuses));
        Some(Self {
            id: vm.name.clone()?,
            name: vm.name.clone()?,
            provider_id: provider_id(vm.id.as_ref()?),
            computer_name: properties.os_profile.as_ref().and_then(|os| os.computer_name.clone()),
            state: properties.provisioning_state.clone().unwrap_or_default(),
            power: power.map(|power| power.to_string()),
            // Azure does not say so; the hash on the machine object does.
            latest: false,
            created: properties.time_created.as_deref().and_then(seconds).unwrap_or_default(),
            message: None,
            vm_id: properties.vm_id.clone(),
            make: Make::new(
                properties
                    .storage_profile
                    .as_ref()
                    .and_then(|storage| storage.image_reference.as_ref()),
                properties
                    .hardware_profile
                    .as_ref()
                    .and_then(|hardware| hardware.vm_size.as_deref()),
            ),
            zone: vm.zones.iter().flatten().next().cloned(),
            vm: owned.and_then(|set| Owned::member(vm, set).ok()),
        })
    }

    pub fn is(&self, state: &str) -> bool {
        self.state.eq_ignore_ascii_case(state)
    }
}

/// Returns the provider id of a resource as the cloud provider writes it on Nodes: subscription and group in lower case,
/// whatever case Azure answers with. Cluster API compares provider ids byte by byte.
pub fn provider_id(id: &str) -> String {
    let mut segments: Vec<String> = id.split('/').map(str::to_owned).collect();
    for n in 1..segments.len() {
        if matches!(
            segments[n - 1].to_ascii_lowercase().as_str(),
            "subscriptions" | "resourcegroups"
        ) {
            segments[n] = segments[n].to_lowercase();
        }
    }
    format!("azure://{}", segments.join("/"))
}

fn seconds(time: &str) -> Option<i64> {
    time.parse::<jiff::Timestamp>().ok().map(|time| time.as_second())
}

/// The last read of Azure.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub set: Option<ScaleSetSnapshot>,
    pub instances: Vec<InstanceSnapshot>,
    /// When the instances were listed.
    pub at: Instant,
    /// How many lists there were.
    pub lists: u64,
    /// Since when the lists have named the same instances.
    pub same_since: Instant,
    /// Whether a list that was made a while after the first one names the same instances.
    pub confirmed: bool,
}

impl Snapshot {
    pub fn new(set: Option<ScaleSetSnapshot>, now: Instant) -> Self {
        Self {
            set,
            instances: Vec::new(),
            at: now,
            lists: 0,
            same_since: now,
            confirmed: false,
        }
    }

    /// Takes a new list in.
    pub fn listed(&mut self, instances: Vec<InstanceSnapshot>, now: Instant) {
        let ids = |list: &[InstanceSnapshot]| -> BTreeSet<String> {
            let live = list.iter().filter(|instance| !instance.is("Deleting"));
            live.map(|instance| instance.provider_id.clone()).collect()
        };
        let same = self.lists > 0 && ids(&self.instances) == ids(&instances);
        if !same {
            self.same_since = now;
        }
        self.confirmed = same && (self.confirmed || now.duration_since(self.same_since) >= CONFIRM);
        (self.instances, self.at) = (instances, now);
        self.lists += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        "/subscriptions/ABC/resourceGroups/MY-RG/providers/Microsoft.Compute/virtualMachineScaleSets/Np/virtualMachines/0",
        "azure:///subscriptions/abc/resourceGroups/my-rg/providers/Microsoft.Compute/virtualMachineScaleSets/Np/virtualMachines/0"
    )]
    #[case(
        "/subscriptions/abc/resourcegroups/My-Rg/providers/Microsoft.Compute/virtualMachines/np_1A",
        "azure:///subscriptions/abc/resourcegroups/my-rg/providers/Microsoft.Compute/virtualMachines/np_1A"
    )]
    fn provider_ids_are_those_of_the_cloud_provider(#[case] id: &str, #[case] expected: &str) {
        assert_eq!(provider_id(id), expected);
    }

    #[test]
    fn a_list_is_confirmed_by_a_later_one_that_names_the_same_instances() {
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        let instance = |id: &str| InstanceSnapshot {
            provider_id: id.to_owned(),
            ..InstanceSnapshot::default()
        };
        let mut snapshot = Snapshot::new(None, begun);
        let mut listed = |ids: &[&str], at: Instant| {
            snapshot.listed(ids.iter().map(|id| instance(id)).collect(), at);
            snapshot.confirmed
        };
        assert!(!listed(&["a", "b"], begun));
        assert!(!listed(&["a", "b"], begun + second), "too soon");
        assert!(listed(&["b", "a"], begun + CONFIRM));
        assert!(listed(&["a", "b"], begun + CONFIRM + second), "it stays confirmed");
        assert!(
            !listed(&[], begun + CONFIRM + 2 * second),
            "an empty list is none until it is confirmed"
        );
        assert!(listed(&[], begun + 3 * CONFIRM));
    }
}
