//! What a reconcile did, as far as users see it. Steps take notes, and the status is made of them at the end, in one patch.

use super::{Deletion, Requested};
use capstan_core::machine::disks::Attached;
use capstan_kube::runtime::EventNote;
use k8s_openapi::api::core::v1::{NodeAddress, ObjectReference};

#[derive(Debug)]
pub enum Note {
    /// Azure has accepted the virtual machine and is making it.
    Requested(Box<Requested>),
    /// The virtual machine is there, and its Node perhaps, too.
    Provisioned(Option<ObjectReference>),
    /// The Node is there.
    Linked(ObjectReference),
    /// Azure showed a virtual machine that was ready before.
    Shown(Shown),
    /// The virtual machine could not be created for now.
    NotCreated(String),
    Failed(Failed),
    /// The virtual machine is about to be deleted, with these disks.
    Holding {
        vm_id: Option<String>,
        disks: Vec<Attached>,
    },
    Deleting(Deletion),
    /// The operation in the status is over, and came to nothing.
    OperationOver,
    Event(EventNote),
}

#[derive(Debug)]
pub struct Shown {
    pub state: Option<String>,
    /// Empty: they are known.
    pub addresses: Vec<NodeAddress>,
    /// Labels or annotations have changed with it.
    pub updated: bool,
}

/// Why a machine has failed for good.
#[derive(Debug)]
pub struct Failed {
    pub reason: &'static str,
    pub message: String,
    pub event: &'static str,
}

#[derive(Debug, Default)]
pub struct Notes(Vec<Note>);

impl Notes {
    pub fn push(&mut self, note: Note) {
        self.0.push(note);
    }

    pub fn event(&mut self, event: EventNote) {
        self.push(Note::Event(event));
    }

    /// Notes that the deletion waits, and for what. `Err`: the pods in the way.
    pub fn deleting(&mut self, drained: Option<Result<(), String>>) {
        self.push(Note::Deleting(Deletion {
            drained,
            ..Deletion::default()
        }));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Note> {
        self.0.iter()
    }
}
