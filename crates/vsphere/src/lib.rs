//! A thin typed client for vCenter 7 to 9: vim25 in SOAP, tags and cluster modules by REST, storage policies by PBM.
//!
//! Start with [`Sessions`]: it hands out one [`Vcenter`] for each server and user, renews its session when vCenter has
//! forgotten it, and logs out at the end. Tasks and machines are watched by one long poll for each session
//! ([`Task::wait`], [`Vcenter::watch_vm`]), never polled one by one. Look-ups in the inventory are remembered for a short
//! time, so that many machines of one making cost few calls. Every request goes through the interceptors in [`Settings`].
//! No answer, however broken, makes it panic.

mod body;
mod cache;
mod circuit;
mod content;
mod device;
mod error;
mod groups;
mod in_process;
mod inventory;
mod library;
mod listing;
mod metrics;
mod modules;
mod pbm;
mod poll;
mod poll_rate;
mod properties;
mod rest;
mod session;
mod soap;
mod spec;
mod tags;
mod task;
mod tls;
mod vcenter;
mod vm;
mod watcher;
#[doc(hidden)]
pub mod xml;

pub use capstan_core::vm::{MoRef, PowerState};
pub use content::About;
pub use device::{Controller, Device, DeviceKind, Disk, Nic, hardware};
pub use error::{Error, Fault, Result};
pub use groups::Groups;
pub use in_process::InProcess;
pub use inventory::{Datacenter, Datastore, NamedDatastores, Network, NetworkBacking, ResourcePool};
pub use metrics::Metrics;
pub use modules::Module;
pub use session::{Login, Sessions, Settings, Trust};
pub use spec::{CloneSpec, ConfigSpec, DeviceChange, DiskLocation, DiskMove, NewDisk, NewNic, NewPci};
pub use tags::Tag;
pub use task::{Task, TaskInfo, TaskState};
pub use vcenter::Vcenter;
pub use vm::{Kept, Snapshot, VmInfo, VmRuntime, VmWatch};

/// Feeds a tree to every decoder, for tests with mutated documents.
#[cfg(test)]
fn probe_decoders(tree: &xml::Element) {
    fn walk(element: &xml::Element) {
        let _ = Device::read(element).map(|device| hardware(19, &[device]));
        let _ = Fault::localized(element).to_string();
        let _ = groups::probe(element);
        let _ = Fault::read(Some(element), "").class();
        if let Ok(object) = properties::read_object(element) {
            let _ = TaskInfo::read(&object);
            let _ = VmInfo::read(MoRef::new("VirtualMachine", "vm-1"), &object).hardware();
        }
        let values = element
            .all("changeSet")
            .filter_map(|c| Some((c.string_at("name")?, c.child("val")?.clone())));
        let object = properties::Object {
            reference: None,
            values: values.collect(),
        };
        let _ = TaskInfo::read(&object);
        let _ = VmInfo::read(MoRef::new("VirtualMachine", "vm-1"), &object);
        element.children.iter().for_each(walk);
    }
    walk(tree);
}
