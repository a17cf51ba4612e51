//! What a test sees of a pool: whether both bounds hold, and what it cost.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The two bounds, and the first state that broke one.
#[derive(Default)]
pub struct Bounds {
    pub floor: AtomicUsize,
    pub ceiling: AtomicUsize,
    pub samples: AtomicUsize,
    broken: Mutex<Option<String>>,
}

impl Bounds {
    pub fn set(&self, floor: usize, ceiling: usize) {
        self.floor.store(floor, Ordering::SeqCst);
        self.ceiling.store(ceiling, Ordering::SeqCst);
    }

    /// Notes the first state that breaks a bound, with its instances and nodes.
    pub fn check(&self, available: usize, instances: &[String], nodes: impl FnOnce() -> String) {
        self.samples.fetch_add(1, Ordering::SeqCst);
        let (floor, ceiling) = (self.floor.load(Ordering::SeqCst), self.ceiling.load(Ordering::SeqCst));
        let total = instances.len();
        if available < floor || (ceiling > 0 && total > ceiling) {
            let mut broken = self.broken.lock().unwrap();
            broken.get_or_insert_with(|| {
                let (now, nodes) = (jiff::Timestamp::now(), nodes());
                format!(
                    "{now}: {available} available (floor {floor}), {total} instances (ceiling {ceiling}): {instances:?} {nodes}"
                )
            });
        }
    }

    pub fn assert_kept(&self) {
        assert_eq!(*self.broken.lock().unwrap(), None, "a bound was broken");
        assert!(self.samples.load(Ordering::SeqCst) > 0, "nothing was observed");
    }
}
