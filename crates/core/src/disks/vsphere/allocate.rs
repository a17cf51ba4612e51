//! Unit numbers for the data disks of a machine.
//!
//! In the order of the spec, on the primary disk's controller unless the spec names another, each disk gets the lowest free
//! unit after the disks of the template; units that the spec gives by number are set aside first. An error names all disks
//! that cannot be placed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::controller::Family;
use super::{Controller, ControllerKind, DataDisk, Hardware};

/// Keys below this are for controllers that do not exist yet; vCenter replaces them.
const NEW_CONTROLLER_KEY: i32 = -1000;
/// Keys below this are for disks that do not exist yet.
const NEW_DISK_KEY: i32 = -2000;

/// A controller to make along with the clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewController {
    pub key: i32,
    pub kind: ControllerKind,
    pub bus: i32,
}

/// Where one data disk goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its place in `dataDisks`.
    pub index: usize,
    /// The temporary key of the new device.
    pub key: i32,
    pub controller_key: i32,
    pub kind: ControllerKind,
    pub bus: i32,
    pub unit: i32,
}

/// All placements, in the order of the spec, and the controllers that they need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    pub new_controllers: Vec<NewController>,
    pub placements: Vec<Placement>,
}

/// Why a disk cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The disk's place in the spec; `None` when the template itself is unfit.
    pub index: Option<usize>,
    pub name: String,
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.index {
            None => f.write_str(&self.text),
            Some(index) => write!(f, "dataDisks[{index}] {:?}: {}", self.name, self.text),
        }
    }
}

/// Every disk that cannot be placed, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Problems(pub Vec<Problem>);

/// Gives every data disk a controller and a unit, or says why that cannot be.
pub fn allocate(hardware: &Hardware, disks: &[DataDisk]) -> Result<Allocation, Problems> {
    if disks.is_empty() {
        return Ok(Allocation::default());
    }
    let unfit = |text: String| {
        Problems(vec![Problem {
            index: None,
            name: String::new(),
            text,
        }])
    };
    let Some(primary) = hardware.primary() else {
        return Err(unfit(
            "Invalid disk count: 0: the template has no disk to put the data disks beside".into(),
        ));
    };
    let Some(home) = hardware.controller(primary.controller_key) else {
        return Err(unfit(format!(
            "unable to find controller with key={}",
            primary.controller_key
        )));
    };
    let mut allocator = Allocator::new(hardware, disks);
    let targets: Vec<Option<Target>> = (0..disks.len()).map(|index| allocator.target(index, home)).collect();
    let reserved = allocator.reserve(&targets);
    allocator.assign(&targets, &reserved)
}

/// The controller that a disk goes to.
#[derive(Clone, Copy)]
struct Target {
    key: i32,
    kind: ControllerKind,
    bus: i32,
}

struct Allocator<'a> {
    hardware: &'a Hardware,
    disks: &'a [DataDisk],
    /// Units in use, by controller key, with what uses them.
    used: BTreeMap<i32, BTreeMap<i32, String>>,
    new_controllers: Vec<NewController>,
    problems: Vec<Problem>,
}

impl<'a> Allocator<'a> {
    fn new(hardware: &'a Hardware, disks: &'a [DataDisk]) -> Self {
        let mut used: BTreeMap<i32, BTreeMap<i32, String>> = BTreeMap::new();
        for device in &hardware.devices {
            if let Some(unit) = device.unit {
                let what = if device.disk.is_some() {
                    "a disk of the template"
                } else {
                    "a device of the template"
                };
                used.entry(device.controller_key).or_default().insert(unit, what.into());
            }
        }
        for controller in &hardware.controllers {
            let own = controller.own_unit.or(controller.kind.own_unit());
            if let (Some(unit), Family::Scsi) = (own, controller.kind.family()) {
                used.entry(controller.key)
                    .or_default()
                    .insert(unit, "the controller itself".into());
            }
        }
        Self {
            hardware,
            disks,
            used,
            new_controllers: Vec::new(),
            problems: Vec::new(),
        }
    }

    fn problem(&mut self, index: usize, text: String) {
        self.problems.push(Problem {
            index: Some(index),
            name: self.disks[index].name.clone(),
            text,
        });
    }

    fn target(&mut self, index: usize, home: &Controller) -> Option<Target> {
        let Some(choice) = self.disks[index].controller else {
            return Some(Target {
                key: home.key,
                kind: home.kind,
                bus: home.bus,
            });
        };
        match self.find_or_make(choice.kind.unwrap_or(home.kind), choice.bus) {
            Ok(target) => Some(target),
            Err(text) => {
                self.problem(index, text);
                None
            }
        }
    }

    fn find_or_make(&mut self, kind: ControllerKind, bus: Option<i32>) -> Result<Target, String> {
        let mut there: Vec<Target> = self
            .hardware
            .controllers
            .iter()
            .map(|c| Target {
                key: c.key,
                kind: c.kind,
                bus: c.bus,
            })
            .collect();
        there.extend(self.new_controllers.iter().map(|c| Target {
            key: c.key,
            kind: c.kind,
            bus: c.bus,
        }));
        there.retain(|c| c.kind.family() == kind.family());
        there.sort_by_key(|c| (c.bus, c.key));
        let bus = match bus {
            Some(bus) if !(0..kind.buses()).contains(&bus) => {
                return Err(format!(
                    "controller bus {bus} does not exist: a VM has {kind} buses 0 to {}",
                    kind.buses() - 1
                ));
            }
            Some(bus) => match there.iter().find(|c| c.bus == bus) {
                Some(found) if found.kind == kind => return Ok(*found),
                Some(found) => {
                    return Err(format!(
                        "controller bus {bus} has a {} controller, not {kind}: choose that type or another bus",
                        found.kind
                    ));
                }
                None => bus,
            },
            None => match there.iter().find(|c| c.kind == kind) {
                Some(found) => return Ok(*found),
                None => (0..kind.buses())
                    .find(|bus| there.iter().all(|c| c.bus != *bus))
                    .ok_or_else(|| {
                        format!(
                            "no bus is free for a new {kind} controller: all {} are in use by other types",
                            kind.buses()
                        )
                    })?,
            },
        };
        self.make(kind, bus)
    }

    fn make(&mut self, kind: ControllerKind, bus: i32) -> Result<Target, String> {
        if kind == ControllerKind::Ide {
            return Err(format!(
                "the template has no IDE controller {bus} and none can be added: choose another type"
            ));
        }
        if self.hardware.version < kind.since() {
            return Err(format!(
                "{kind} controllers need hardware version {} or later, the template has {}: use a newer template",
                kind.since(),
                self.hardware.version
            ));
        }
        let key = NEW_CONTROLLER_KEY - i32::try_from(self.new_controllers.len()).unwrap_or(i32::MAX / 2);
        self.new_controllers.push(NewController { key, kind, bus });
        if let Some(unit) = kind.own_unit() {
            self.used
                .entry(key)
                .or_default()
                .insert(unit, "the controller itself".into());
        }
        Ok(Target { key, kind, bus })
    }

    /// Sets the units aside that are asked for by number.
    fn reserve(&mut self, targets: &[Option<Target>]) -> BTreeSet<usize> {
        let mut reserved = BTreeSet::new();
        for (index, target) in targets.iter().enumerate() {
            let (Some(target), Some(unit)) = (target, self.disks[index].unit) else {
                continue;
            };
            let units = target.kind.units(self.hardware.version);
            let name = format!("dataDisks[{index}] {:?}", self.disks[index].name);
            if !(0..units).contains(&unit) {
                let text = format!(
                    "unitNumber {unit} does not exist: {} controller {} has units 0 to {} at hardware version {}",
                    target.kind,
                    target.bus,
                    units - 1,
                    self.hardware.version
                );
                self.problem(index, text);
            } else if let Some(by) = self.used.get(&target.key).and_then(|used| used.get(&unit)).cloned() {
                let text = format!(
                    "unitNumber {unit} of {} controller {} is taken by {by}: choose another, or leave unitNumber out",
                    target.kind, target.bus
                );
                self.problem(index, text);
            } else {
                self.used.entry(target.key).or_default().insert(unit, name);
                reserved.insert(index);
            }
        }
        reserved
    }

    fn assign(mut self, targets: &[Option<Target>], reserved: &BTreeSet<usize>) -> Result<Allocation, Problems> {
        let mut placements = Vec::with_capacity(targets.len());
        let without_unit = targets
            .iter()
            .enumerate()
            .filter(|(index, _)| self.disks[*index].unit.is_none());
        let mut wanted: BTreeMap<i32, usize> = BTreeMap::new();
        for target in without_unit.filter_map(|(_, target)| target.as_ref()) {
            *wanted.entry(target.key).or_default() += 1;
        }
        let mut first: BTreeMap<i32, i32> = BTreeMap::new();
        for (index, target) in targets.iter().enumerate() {
            let Some(target) = target else { continue };
            let unit = match self.disks[index].unit {
                Some(unit) if reserved.contains(&index) => unit,
                Some(_) => continue,
                None => {
                    let count = wanted.get(&target.key).copied().unwrap_or_default();
                    let first = *first
                        .entry(target.key)
                        .or_insert_with(|| self.first_unit(target, count));
                    match self.next_free(target, first) {
                        Some(unit) => unit,
                        None => {
                            let text = self.full(index, target);
                            self.problem(index, text);
                            continue;
                        }
                    }
                }
            };
            let key = NEW_DISK_KEY - i32::try_from(index).unwrap_or(i32::MAX / 2);
            let Target {
                key: controller_key,
                kind,
                bus,
            } = *target;
            placements.push(Placement {
                index,
                key,
                controller_key,
                kind,
                bus,
                unit,
            });
        }
        if !self.problems.is_empty() {
            self.problems.sort_by_key(|problem| problem.index);
            return Err(Problems(self.problems));
        }
        Ok(Allocation {
            new_controllers: self.new_controllers,
            placements,
        })
    }

    /// Returns the lowest free unit from `first` on.
    fn next_free(&mut self, target: &Target, first: i32) -> Option<i32> {
        let units = target.kind.units(self.hardware.version);
        let used = self.used.entry(target.key).or_default();
        let unit = (first..units).find(|unit| !used.contains_key(unit))?;
        used.insert(unit, "a data disk".into());
        Some(unit)
    }

    /// Returns the unit after the template's last disk on a controller, if all `wanted` disks have room from there on; else
    /// the first unit, so that they fill the gaps.
    fn first_unit(&self, target: &Target, wanted: usize) -> i32 {
        let units = target.kind.units(self.hardware.version);
        let on_it = |device: &&super::Device| device.controller_key == target.key && device.disk.is_some();
        let of_template = self
            .hardware
            .devices
            .iter()
            .filter(on_it)
            .filter_map(|device| device.unit);
        let last = of_template.filter(|unit| (0..units).contains(unit)).max();
        let after = last.map_or(0, |last| last + 1);
        let used = self.used.get(&target.key);
        let is_free = |unit: &i32| used.is_none_or(|used| !used.contains_key(unit));
        if (after..units).filter(is_free).count() >= wanted {
            after
        } else {
            0
        }
    }

    fn full(&self, index: usize, target: &Target) -> String {
        let (kind, bus, version) = (target.kind, target.bus, self.hardware.version);
        let units = kind.units(version);
        let own = if kind.own_unit().is_some() {
            ", one of them the controller's own"
        } else {
            ""
        };
        let more = match kind.more_units_from(version) {
            Some((from, more)) => format!("use a template of hardware version {from} or later ({more} units), "),
            None => String::new(),
        };
        format!(
            "{kind} controller {bus} has no free unit: all unit numbers are already in-use ({units} units at hardware \
             version {version}{own}); remove disks, {more}or put it on another controller with dataDisks[{index}].controller"
        )
    }
}

#[cfg(test)]
#[path = "allocate_tests.rs"]
mod tests;
