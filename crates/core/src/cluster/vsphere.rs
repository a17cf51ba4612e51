//! Decides what to do next for a VSphereCluster.
//!
//! Invariants: the finalizer comes before everything else; a cluster releases its Secret, its modules and itself only when no
//! machine and no VM of it is left, because without the Secret a VM could not be deleted in vCenter.

use std::fmt;
use std::time::Duration;

use super::modules::{self, ModuleChanges, ObservedModules};
use super::secrets::{self, HeldSecret, ObservedSecrets, SecretStep};
use crate::plan::{Describe, Impact, Plan};

/// A refused account may be corrected in vCenter, where Capstan does not see it. A more frequent login might lock it.
const REFUSED: Duration = Duration::from_secs(60);
/// Whatever else is wrong is corrected in Kubernetes, where Capstan watches everything but the labels of namespaces.
const RECHECK: Duration = Duration::from_secs(10);
/// A problem with modules is corrected in vCenter, where Capstan does not see it.
pub const MODULES_RECHECK: Duration = Duration::from_secs(60);
/// The machines that are left are read from the cache, so that reading them again costs nothing.
const DELETING: Duration = Duration::from_secs(10);

/// A VSphereCluster with everything that the plan depends on.
#[derive(Clone, Debug)]
pub enum ObservedCluster {
    /// A user has paused the VSphereCluster or its Cluster, for this reason.
    Paused(String),
    /// The cluster is deleted.
    Deleting {
        /// The machines and VMs that are left.
        machines: Vec<String>,
        teardown: Teardown,
    },
    Present {
        secrets: Box<ObservedSecrets>,
        vcenter: ObservedVcenter,
        /// How often to check a cluster that is as it should be.
        resync: Duration,
    },
}

/// What a deleted cluster leaves.
#[derive(Clone, Debug, Default)]
pub struct Teardown {
    pub uid: String,
    /// The Secret that the cluster names.
    pub secret: Option<HeldSecret>,
    /// The Secrets that the cluster owns and does not name any more.
    pub former: Vec<HeldSecret>,
    pub modules: Vec<String>,
    /// Why the account of the cluster can never be used again.
    pub account_fault: Option<String>,
}

/// Whether the vCenter of a cluster can be used.
#[derive(Clone, Debug)]
pub enum ObservedVcenter {
    Available(ObservedModules),
    /// A user must change something: in vCenter, or in Kubernetes.
    Refused {
        by_vcenter: bool,
    },
    /// It may answer the next time.
    Unreachable,
}

/// One effect for a VSphereCluster.
#[derive(Clone, Debug, PartialEq)]
pub enum ClusterStep {
    AddFinalizer,
    Secret(SecretStep),
    /// Bring the cluster modules up to date.
    ChangeModules(ModuleChanges),
    /// Fail the reconcile, so that the next one comes after a backoff.
    BackOff,
    DeleteModules(Vec<String>),
    /// Report modules that cannot be deleted: an account that is gone for good must not keep the cluster without end.
    LeaveModules {
        modules: Vec<String>,
        fault: String,
    },
    /// Remove the finalizer.
    Release,
}

impl fmt::Display for ClusterStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddFinalizer => f.write_str("puts its finalizer on the VSphereCluster"),
            Self::Secret(step) => step.fmt(f),
            Self::ChangeModules(changes) => {
                let (create, remove) = (changes.create.len(), changes.remove.len());
                write!(f, "creates {create} cluster modules and deletes {remove}")
            }
            Self::BackOff => f.write_str("waits until vCenter answers"),
            Self::DeleteModules(modules) => write!(f, "deletes cluster modules {}", modules.join(", ")),
            Self::LeaveModules { modules, .. } => write!(f, "leaves cluster modules {} behind", modules.join(", ")),
            Self::Release => f.write_str("takes its finalizer off the VSphereCluster"),
        }
    }
}

impl Describe for ClusterStep {
    fn impact(&self) -> Impact {
        match self {
            Self::AddFinalizer => Impact::Ensures,
            Self::BackOff => Impact::Waits,
            Self::LeaveModules { .. } => Impact::None,
            Self::Secret(_) | Self::Release => Impact::Cluster,
            Self::ChangeModules(changes) => Impact::Cloud(changes.create.len() + changes.remove.len()),
            Self::DeleteModules(modules) => Impact::Cloud(modules.len()),
        }
    }
}

/// Returns the next steps.
pub fn plan(observed: &ObservedCluster) -> Plan<ClusterStep> {
    match observed {
        ObservedCluster::Paused(_) => Plan::idle(),
        ObservedCluster::Deleting { machines, teardown } if machines.is_empty() => Plan {
            steps: release(teardown),
            requeue: None,
        },
        ObservedCluster::Deleting { .. } => Plan::after(DELETING),
        ObservedCluster::Present {
            secrets,
            vcenter,
            resync,
        } => {
            let mut steps = vec![ClusterStep::AddFinalizer];
            steps.extend(secrets::plan(secrets).into_iter().map(ClusterStep::Secret));
            let requeue = match vcenter {
                ObservedVcenter::Available(ObservedModules::Unmanaged) => *resync,
                ObservedVcenter::Available(ObservedModules::Unreadable(_)) => MODULES_RECHECK,
                ObservedVcenter::Available(ObservedModules::Known(known)) => {
                    steps.extend(modules::changes(known).map(ClusterStep::ChangeModules));
                    *resync
                }
                ObservedVcenter::Refused { by_vcenter: true } => REFUSED,
                ObservedVcenter::Refused { by_vcenter: false } => RECHECK,
                ObservedVcenter::Unreachable => {
                    steps.push(ClusterStep::BackOff);
                    return Plan { steps, requeue: None };
                }
            };
            Plan {
                steps,
                requeue: Some(requeue),
            }
        }
    }
}

fn release(teardown: &Teardown) -> Vec<ClusterStep> {
    let modules = teardown.modules.clone();
    let modules = match &teardown.account_fault {
        _ if modules.is_empty() => None,
        Some(fault) => Some(ClusterStep::LeaveModules {
            modules,
            fault: fault.clone(),
        }),
        None => Some(ClusterStep::DeleteModules(modules)),
    };
    let secrets = secrets::teardown(&teardown.uid, teardown.secret.as_ref(), &teardown.former);
    let secrets = secrets.into_iter().map(ClusterStep::Secret);
    modules
        .into_iter()
        .chain(secrets)
        .chain([ClusterStep::Release])
        .collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::modules::{KnownModules, Place, Target};
    use super::super::secrets::tests::{owner, secret};
    use super::*;

    const RESYNC: Duration = Duration::from_secs(600);

    fn present(vcenter: ObservedVcenter) -> ObservedCluster {
        let secrets = ObservedSecrets {
            owner: owner("1"),
            identity: Some(secret("a", &[], &[])),
            recorded: None,
            former: Vec::new(),
        };
        ObservedCluster::Present {
            secrets: Box::new(secrets),
            vcenter,
            resync: RESYNC,
        }
    }

    fn words(plan: &Plan<ClusterStep>) -> Vec<&'static str> {
        let word = |step: &ClusterStep| match step {
            ClusterStep::AddFinalizer => "finalizer",
            ClusterStep::Secret(SecretStep::Record(_)) => "record",
            ClusterStep::Secret(SecretStep::Protect { .. }) => "protect",
            ClusterStep::Secret(SecretStep::Release { .. }) => "release secret",
            ClusterStep::ChangeModules(_) => "change modules",
            ClusterStep::BackOff => "back off",
            ClusterStep::DeleteModules(_) => "delete modules",
            ClusterStep::LeaveModules { .. } => "leave modules",
            ClusterStep::Release => "release",
        };
        plan.steps.iter().map(word).collect()
    }

    fn known(busy: bool) -> ObservedVcenter {
        let target = Target {
            control_plane: true,
            name: "cp".into(),
        };
        let busy = busy.then(|| (target, Place::default())).into_iter().collect();
        ObservedVcenter::Available(ObservedModules::Known(KnownModules {
            busy,
            ..KnownModules::default()
        }))
    }

    #[rstest]
    #[case::unmanaged(ObservedVcenter::Available(ObservedModules::Unmanaged), None, Some(RESYNC))]
    #[case::settled(known(false), None, Some(RESYNC))]
    #[case::a_module_is_missing(known(true), Some("change modules"), Some(RESYNC))]
    #[case::modules_unreadable(ObservedVcenter::Available(ObservedModules::Unreadable("503".into())), None, Some(MODULES_RECHECK))]
    #[case::refused_by_vcenter(ObservedVcenter::Refused { by_vcenter: true }, None, Some(REFUSED))]
    #[case::refused_here(ObservedVcenter::Refused { by_vcenter: false }, None, Some(RECHECK))]
    #[case::unreachable(ObservedVcenter::Unreachable, Some("back off"), None)]
    fn the_finalizer_and_the_secret_come_before_vcenter_whether_it_answers_or_not(
        #[case] vcenter: ObservedVcenter,
        #[case] last: Option<&str>,
        #[case] requeue: Option<Duration>,
    ) {
        let plan = plan(&present(vcenter));
        let expected: Vec<&str> = ["finalizer", "record", "protect"].into_iter().chain(last).collect();
        assert_eq!((words(&plan), plan.requeue), (expected, requeue));
    }

    #[rstest]
    #[case::a_machine_is_left(&["m"], &["1"], None, &[])]
    #[case::nothing_left(&[], &[], None, &["release secret", "release"])]
    #[case::modules(&[], &["1"], None, &["delete modules", "release secret", "release"])]
    #[case::an_account_that_is_gone(&[], &["1"], Some("no account"), &["leave modules", "release secret", "release"])]
    #[case::an_account_that_nobody_needs(&[], &[], Some("no account"), &["release secret", "release"])]
    fn a_deleted_cluster_is_released_after_its_last_machine(
        #[case] machines: &[&str],
        #[case] modules: &[&str],
        #[case] fault: Option<&str>,
        #[case] expected: &[&str],
    ) {
        let strings = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
        let held = HeldSecret {
            secret: secret("a", &["1"], &[secrets::SECRET_FINALIZER]),
            is_shared: false,
        };
        let observed = ObservedCluster::Deleting {
            machines: strings(machines),
            teardown: Teardown {
                uid: "1".into(),
                secret: Some(held),
                modules: strings(modules),
                account_fault: fault.map(str::to_owned),
                ..Teardown::default()
            },
        };
        assert_eq!(words(&plan(&observed)), expected);
    }
}
