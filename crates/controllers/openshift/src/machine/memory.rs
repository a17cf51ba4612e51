//! What this process remembers of machines between passes. Losing it costs a few calls, never a machine: everything in
//! it can be read again from the API server or from Azure.

use super::leaving::Leaving;
use super::making::Making;
use capstan_api::openshift::Machine;
use capstan_azure::Operation;
use capstan_kube::expectations::Version;
use kube::ResourceExt as _;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A machine whose Node is unwell or gone is looked at this often.
const UNWELL: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// As the API server last answered a write of ours: the cache may be older.
    machine: Option<Arc<Machine>>,
    operation: Option<Operation>,
    looked: Option<Look>,
    /// What is made before the virtual machine, while Azure works on it. Boxed: few machines are at that at a time.
    making: Option<Box<Making>>,
    /// What goes after the virtual machine, likewise.
    leaving: Option<Box<Leaving>>,
    /// Azure has confirmed that the virtual machine is gone.
    vm_gone: bool,
    /// The operation in the status is over, and came to nothing.
    forgotten: bool,
    /// Disks of others that an attempt to make the machine ran into.
    obstacles: Vec<String>,
    /// Our finalizer is off. The API server answers that with the object's old version, so versions do not tell.
    released: bool,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    fingerprint: u64,
}

#[derive(Default)]
pub struct Memory(Mutex<HashMap<String, Entry>>);

impl Memory {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, uid: &str, change: impl FnOnce(&mut Entry) -> T) -> T {
        change(self.lock().entry(uid.to_owned()).or_default())
    }

    /// The newer of what the cache shows and what our last write was answered with.
    pub fn newest(&self, cached: &Arc<Machine>) -> Arc<Machine> {
        let uid = cached.uid().unwrap_or_default();
        self.change(&uid, |entry| {
            let version = |machine: &Machine| Version::new(machine.resource_version().unwrap_or_default());
            match &entry.machine {
                Some(own) if !version(cached).shows(&version(own)) => own.clone(),
                _ => {
                    entry.machine = None;
                    cached.clone()
                }
            }
        })
    }

    /// Keeps what a write was answered with.
    pub fn wrote(&self, machine: Machine) -> Arc<Machine> {
        let machine = Arc::new(machine);
        let uid = machine.uid().unwrap_or_default();
        self.change(&uid, |entry| {
            entry.machine = Some(machine.clone());
            // What we wrote ourselves is no reason to ask Azure.
            if let Some(look) = entry.looked.as_mut() {
                look.fingerprint = fingerprint(&machine);
            }
        });
        machine
    }

    pub fn operation(&self, uid: &str) -> Option<Operation> {
        self.lock().get(uid)?.operation.clone()
    }

    pub fn follow(&self, uid: &str, operation: Option<Operation>) {
        self.change(uid, |entry| {
            entry.operation = operation;
            entry.forgotten = false;
        });
    }

    /// Whether the operation that stands in the status is none of our business any more.
    pub fn forgotten(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.forgotten)
    }

    pub fn making(&self, uid: &str) -> Making {
        let kept = self.lock().get(uid).and_then(|entry| entry.making.clone());
        kept.map(|making| *making).unwrap_or_default()
    }

    pub fn keep_making(&self, uid: &str, making: Option<Making>) {
        self.change(uid, |entry| entry.making = making.map(Box::new));
    }

    pub fn leaving(&self, uid: &str) -> Leaving {
        let kept = self.lock().get(uid).and_then(|entry| entry.leaving.clone());
        kept.map(|leaving| *leaving).unwrap_or_default()
    }

    pub fn keep_leaving(&self, uid: &str, leaving: Leaving) {
        self.change(uid, |entry| {
            entry.leaving = Some(Box::new(leaving));
            entry.making = None;
        });
    }

    pub fn vm_gone(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.vm_gone)
    }

    pub fn set_vm_gone(&self, uid: &str) {
        self.change(uid, |entry| entry.vm_gone = true);
    }

    /// The virtual machine is there, whatever was said of it: a request for it was carried out late. It is to be looked
    /// for again, and its earlier deletion is over.
    pub fn doubt_vm_gone(&self, uid: &str) {
        self.change(uid, |entry| {
            entry.vm_gone = false;
            entry.operation = None;
            entry.forgotten = true;
        });
    }

    pub fn released(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|entry| entry.released)
    }

    pub fn set_released(&self, uid: &str) {
        self.change(uid, |entry| entry.released = true);
    }

    pub fn obstacles(&self, uid: &str) -> Vec<String> {
        self.lock()
            .get(uid)
            .map(|entry| entry.obstacles.clone())
            .unwrap_or_default()
    }

    pub fn set_obstacles(&self, uid: &str, disks: Vec<String>) {
        self.change(uid, |entry| entry.obstacles = disks);
    }

    pub fn looked(&self, machine: &Machine) {
        let look = Look {
            at: Instant::now(),
            fingerprint: fingerprint(machine),
        };
        self.change(&machine.uid().unwrap_or_default(), |entry| entry.looked = Some(look));
    }

    /// How long until Azure ought to be asked about this machine again. A machine that this process has not looked at
    /// yet is spread over the first interval, so that a restart does not ask about all of them at once.
    pub fn next_look(&self, machine: &Machine, every: Duration, unwell: bool) -> Duration {
        let uid = machine.uid().unwrap_or_default();
        let print = fingerprint(machine);
        self.change(&uid, |entry| {
            let Some(look) = entry.looked else {
                let spread = every.mul_f64(share(&uid));
                let at = Instant::now().checked_sub(spread).unwrap_or_else(Instant::now);
                entry.looked = Some(Look { at, fingerprint: print });
                return if unwell {
                    Duration::ZERO
                } else {
                    every.saturating_sub(spread)
                };
            };
            if look.fingerprint != print {
                return Duration::ZERO;
            }
            let every = if unwell { UNWELL.min(every) } else { every };
            every.saturating_sub(look.at.elapsed())
        })
    }

    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }
}

/// Somewhere in 0..0.9, the same for the same machine.
fn share(uid: &str) -> f64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    uid.hash(&mut hasher);
    (hasher.finish() % 900) as f64 / 1000.0
}

/// What users change.
fn fingerprint(machine: &Machine) -> u64 {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    (machine.metadata.generation, machine.labels(), machine.annotations()).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(version: &str) -> Machine {
        let mut machine = Machine::new("m", Default::default());
        machine.metadata.uid = Some("u".into());
        machine.metadata.resource_version = Some(version.into());
        machine
    }

    #[test]
    fn a_late_cache_does_not_hide_our_own_write() {
        let memory = Memory::default();
        memory.wrote(machine("7"));
        assert_eq!(
            memory.newest(&Arc::new(machine("5"))).resource_version().as_deref(),
            Some("7")
        );
        assert_eq!(
            memory.newest(&Arc::new(machine("8"))).resource_version().as_deref(),
            Some("8")
        );
    }

    #[test]
    fn azure_is_asked_after_a_change_by_the_user_and_not_after_one_of_ours() {
        let (memory, hour) = (Memory::default(), Duration::from_secs(3600));
        let first = machine("1");
        memory.looked(&first);
        assert!(memory.next_look(&first, hour, false) > Duration::ZERO);
        let mut changed = machine("2");
        changed.annotations_mut().insert("a".into(), "b".into());
        assert_eq!(memory.next_look(&changed, hour, false), Duration::ZERO);
        memory.wrote(changed.clone());
        assert!(memory.next_look(&changed, hour, false) > Duration::ZERO);
        assert!(memory.next_look(&changed, hour, true) <= UNWELL);
    }
}
