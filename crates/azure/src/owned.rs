//! Proof that a resource may be deleted.
//!
//! Invariant: an [`Owned`] is made only of an answer of Azure that has the type asked for and shows whom it belongs to,
//! and it names exactly the resource that was read. The deletes of [`crate::Client`] take nothing else. One exception:
//! [`crate::Client::delete_disk`], for roles that may delete disks but not read them.

use crate::model::{
    AvailabilitySet, Disk, LoadBalancer, NetworkInterface, PublicIpAddress, ScaleSet, Subnet, Tags, VirtualMachine,
};
use crate::{Error, ResourceId};
use std::fmt;
use std::marker::PhantomData;

/// A resource as Azure describes it.
pub trait Resource {
    /// `Microsoft.Compute/virtualMachines`
    const TYPE: &'static str;
    fn id(&self) -> Option<&str>;
    /// The `type` that Azure answered.
    fn kind(&self) -> Option<&str>;
    fn tags(&self) -> Option<&Tags>;
}

macro_rules! resources {
    ($($model:ident $kind:literal)*) => { $(
        impl Resource for $model {
            const TYPE: &'static str = $kind;

            fn id(&self) -> Option<&str> {
                self.id.as_deref()
            }

            fn kind(&self) -> Option<&str> {
                self.rest.get("type").and_then(serde_json::Value::as_str)
            }

            fn tags(&self) -> Option<&Tags> {
                self.tags.as_ref()
            }
        }
    )* };
}

resources! {
    VirtualMachine "Microsoft.Compute/virtualMachines"
    ScaleSet "Microsoft.Compute/virtualMachineScaleSets"
    Disk "Microsoft.Compute/disks"
    AvailabilitySet "Microsoft.Compute/availabilitySets"
    NetworkInterface "Microsoft.Network/networkInterfaces"
    PublicIpAddress "Microsoft.Network/publicIPAddresses"
    LoadBalancer "Microsoft.Network/loadBalancers"
}

impl Resource for Subnet {
    const TYPE: &'static str = "Microsoft.Network/virtualNetworks/subnets";

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn kind(&self) -> Option<&str> {
        self.rest.get("type").and_then(serde_json::Value::as_str)
    }

    fn tags(&self) -> Option<&Tags> {
        None
    }
}

/// A resource that was read and belongs to the caller.
pub struct Owned<T> {
    id: ResourceId,
    of: PhantomData<fn() -> T>,
}

impl<T: Resource> Owned<T> {
    /// Proves by its tags that a resource belongs to the caller. A resource without tags has an empty map.
    pub fn by_tags(resource: &T, is_owned: impl FnOnce(&Tags) -> bool) -> Result<Self, Error> {
        let none = Tags::new();
        if !is_owned(resource.tags().unwrap_or(&none)) {
            return Err(refuse(resource, "its tags do not show that it belongs to this object"));
        }
        Self::read(resource)
    }

    fn read(resource: &T) -> Result<Self, Error> {
        if !resource.kind().is_some_and(|kind| kind.eq_ignore_ascii_case(T::TYPE)) {
            return Err(refuse(resource, format!("its type is not {}", T::TYPE)));
        }
        let id: ResourceId = resource.id().unwrap_or_default().parse()?;
        if !id.full_type().eq_ignore_ascii_case(T::TYPE) {
            return Err(refuse(resource, format!("its id is not of type {}", T::TYPE)));
        }
        Ok(Self { id, of: PhantomData })
    }
}

impl Owned<VirtualMachine> {
    /// Proves that a virtual machine is a member of a Flexible scale set that belongs to the caller.
    pub fn member(vm: &VirtualMachine, set: &Owned<ScaleSet>) -> Result<Self, Error> {
        let of = vm
            .properties
            .as_ref()
            .and_then(|properties| properties.virtual_machine_scale_set.as_ref()?.id.as_deref());
        let of: Option<ResourceId> = of.and_then(|id| id.parse().ok());
        if of.as_ref() != Some(&set.id) {
            return Err(refuse(vm, format!("it is not a member of {}", set.id)));
        }
        Self::read(vm)
    }
}

impl<T> Owned<T> {
    pub fn id(&self) -> &ResourceId {
        &self.id
    }
}

fn refuse<T: Resource>(resource: &T, reason: impl Into<String>) -> Error {
    Error::NotOwned {
        resource: resource.id().unwrap_or(T::TYPE).to_owned(),
        reason: reason.into(),
    }
}

impl<T> Clone for Owned<T> {
    fn clone(&self) -> Self {
        Self {
            id: self.id.clone(),
            of: PhantomData,
        }
    }
}

impl<T> PartialEq for Owned<T> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl<T> Eq for Owned<T> {}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owned({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const VM: &str = "/subscriptions/s/resourceGroups/G/providers/Microsoft.Compute/virtualMachines/m";
    const SET: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/p";

    fn vm(id: &str, kind: &str) -> VirtualMachine {
        serde_json::from_value(json!({ "id": id, "type": kind, "tags": { "owner": "me" },
            "properties": { "virtualMachineScaleSet": { "id": SET.to_uppercase() } } }))
        .unwrap()
    }

    #[rstest::rstest]
    #[case::type_in_another_case(VM, "microsoft.compute/VIRTUALMACHINES", true)]
    #[case::another_type(VM, "Microsoft.Resources/resourceGroups", false)]
    #[case::no_type(VM, "", false)]
    #[case::id_of_another_type(
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/m",
        "Microsoft.Compute/virtualMachines",
        false
    )]
    #[case::group("/subscriptions/s/resourceGroups/g", "Microsoft.Compute/virtualMachines", false)]
    fn only_a_resource_of_the_right_type_can_be_owned(#[case] id: &str, #[case] kind: &str, #[case] owned: bool) {
        assert_eq!(Owned::by_tags(&vm(id, kind), |_| true).is_ok(), owned);
    }

    #[test]
    fn tags_decide_who_owns_a_resource() {
        let vm = vm(VM, VirtualMachine::TYPE);
        let of = |owner: &str| Owned::by_tags(&vm, |tags| tags.get("owner").is_some_and(|tag| tag == owner));
        assert_eq!(of("me").unwrap().id().to_string(), VM);
        assert!(of("you").unwrap_err().to_string().contains("tags"));
    }

    #[test]
    fn a_member_of_another_scale_set_is_not_owned() {
        let vm = vm(VM, VirtualMachine::TYPE);
        let set = |id: &str| -> Owned<ScaleSet> {
            let set = serde_json::from_value(json!({ "id": id, "type": ScaleSet::TYPE })).unwrap();
            Owned::by_tags(&set, |_| true).unwrap()
        };
        assert!(Owned::member(&vm, &set(SET)).is_ok());
        assert!(Owned::member(&vm, &set(&format!("{SET}2"))).is_err());
    }
}
