//! Decides about the cluster modules of a VSphereCluster: one for its control plane and one for each MachineDeployment, so that
//! DRS keeps their machines on different hosts.
//!
//! Invariants: `spec.clusterModules` names every module that was created and not removed; a module is removed when its owner
//! and the last of its machines are gone; no machine waits for a module.

use std::collections::{BTreeMap, BTreeSet};

use capstan_api::vsphere::ClusterModule;

use crate::validate::vcenter::same_server;

/// Machines that are to run on different hosts: those of a control plane or of a MachineDeployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    pub control_plane: bool,
    pub name: String,
}

impl Target {
    /// Returns the module that was created for these machines.
    pub fn module<'a>(&self, modules: &'a [ClusterModule]) -> Option<&'a str> {
        let found = modules.iter().find(|module| Self::of_module(module) == *self);
        found.map(|module| module.module_uuid.as_str())
    }

    pub fn of_module(module: &ClusterModule) -> Self {
        Self {
            control_plane: module.control_plane,
            name: module.target_object_name.clone(),
        }
    }
}

/// Where the machines of a target run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub server: Option<String>,
    pub datacenter: Option<String>,
    pub resource_pool: Option<String>,
}

/// The modules of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub enum ObservedModules {
    /// The cluster has none and is to have none.
    Unmanaged,
    /// vCenter does not list its modules, and why.
    Unreadable(String),
    Known(KnownModules),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct KnownModules {
    /// The vCenter of the cluster.
    pub server: String,
    /// The modules that the cluster records.
    pub recorded: Vec<ClusterModule>,
    /// The owners of machines.
    pub busy: BTreeMap<Target, Place>,
    /// Owners of recorded modules that have no machines at present, but may have some again: a control plane for as long as its
    /// cluster lives, a MachineDeployment for as long as it exists.
    pub idle: BTreeSet<Target>,
    /// The modules that vCenter has.
    pub existing: BTreeSet<String>,
}

/// What to do about the modules of a cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModuleChanges {
    pub keep: Vec<ClusterModule>,
    pub create: Vec<(Target, Place)>,
    pub remove: Vec<ClusterModule>,
    /// Owners that cannot have a module, and why.
    pub refused: Vec<String>,
}

/// Returns what to do about the modules of a cluster; `None` where nothing differs.
pub fn changes(known: &KnownModules) -> Option<ModuleChanges> {
    let mut changes = ModuleChanges::default();
    let mut served = BTreeSet::new();
    for module in &known.recorded {
        let target = Target::of_module(module);
        let exists = known.existing.contains(&module.module_uuid);
        let desired = known.idle.contains(&target) || (known.busy.contains_key(&target) && exists);
        if desired && served.insert(target) {
            changes.keep.push(module.clone());
        } else if exists {
            changes.remove.push(module.clone());
        }
    }
    for (target, place) in known.busy.iter().filter(|(target, _)| !served.contains(target)) {
        let server = place.server.as_deref().filter(|server| !server.is_empty());
        match server.filter(|server| !same_server(server, &known.server)) {
            Some(server) => changes.refused.push(format!(
                "{}: its machines are in vCenter {server:?}, which is not the cluster's own",
                target.name
            )),
            None => changes.create.push((target.clone(), place.clone())),
        }
    }
    let differs = changes.keep != known.recorded || !changes.create.is_empty() || !changes.refused.is_empty();
    differs.then_some(changes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(target: &str, id: &str) -> ClusterModule {
        ClusterModule {
            control_plane: false,
            target_object_name: target.into(),
            module_uuid: id.into(),
        }
    }

    fn target(name: &str) -> Target {
        Target {
            control_plane: false,
            name: name.into(),
        }
    }

    #[test]
    fn every_owner_of_machines_has_one_module_and_nobody_else_has() {
        let known = KnownModules {
            server: "vc".into(),
            recorded: vec![
                module("a", "1"),
                module("a", "2"),
                module("b", "3"),
                module("gone", "4"),
                module("long-gone", "5"),
                module("scaled-down", "6"),
                module("removed", "7"),
            ],
            busy: ["a", "b", "c"].map(|name| (target(name), Place::default())).into(),
            idle: ["scaled-down", "removed"].map(target).into(),
            existing: ["1", "2", "4", "6", "foreign"].map(String::from).into(),
        };
        let expected = ModuleChanges {
            keep: vec![module("a", "1"), module("scaled-down", "6"), module("removed", "7")],
            create: vec![(target("b"), Place::default()), (target("c"), Place::default())],
            remove: vec![module("a", "2"), module("gone", "4")],
            refused: Vec::new(),
        };
        assert_eq!(changes(&known), Some(expected.clone()));
        let settled = KnownModules {
            recorded: vec![module("a", "1"), module("b", "8"), module("c", "9")],
            idle: BTreeSet::new(),
            existing: ["1", "8", "9"].map(String::from).into(),
            ..known
        };
        assert_eq!(changes(&settled), None);
    }

    #[test]
    fn machines_in_another_vcenter_than_their_clusters_get_no_module() {
        let place = |server: &str| Place {
            server: Some(server.into()),
            ..Place::default()
        };
        let known = KnownModules {
            server: "vc".into(),
            busy: [(target("a"), place("vc")), (target("b"), place("vc2"))].into(),
            ..KnownModules::default()
        };
        let found = changes(&known).unwrap();
        assert_eq!(found.create, [(target("a"), place("vc"))]);
        assert!(found.refused[0].contains("vc2"), "{:?}", found.refused);
    }
}
