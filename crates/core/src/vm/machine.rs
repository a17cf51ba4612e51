//! Decides what to do next for a VSphereMachine.
//!
//! Invariants: no VSphereVM is created before the infrastructure of the cluster is ready and the bootstrap data exists; a
//! VSphereMachine is released only when its VSphereVM is gone.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use jiff::Timestamp;

use crate::plan::Plan;

/// The progress of a VSphereVM is reported on its VSphereMachine when it takes longer than this. Its end, and whatever goes
/// wrong, is reported at once.
pub const SLOW: Duration = Duration::from_secs(30);

/// A machine that is ready stays so when its VSphereVM cannot be followed, for example without its failure domain. The next try
/// comes after this long.
pub const RECHECK: Duration = Duration::from_secs(60);

/// A machine that is to fail when its VM is lost fails after this long: somebody may register the VM again.
pub const LOST_GRACE: Duration = Duration::from_secs(5 * 60);

/// A VSphereMachine with everything that the plan depends on.
#[derive(Clone, Debug)]
pub enum ObservedMachine {
    /// A user has paused the VSphereMachine or its cluster, for this reason.
    Paused(String),
    /// The VSphereMachine is being deleted; the VSphereVM was read from the API server, not from a cache.
    Deleting {
        vm: Option<Arc<VSphereVM>>,
    },
    /// The infrastructure of the cluster is not ready.
    NoInfrastructure,
    NoBootstrapData,
    /// There is no VSphereVM yet.
    NoVm {
        desired: Box<VSphereVM>,
    },
    Vm {
        vm: Arc<VSphereVM>,
        /// The VSphereVM as it should be, or why that is not known of a machine that is ready.
        followed: Result<Box<VSphereVM>, String>,
        /// The provider ID of the machine, once its VSphereVM is ready.
        provider_id: Option<String>,
        /// Whether the VSphereVM reports a warning or an error.
        is_failing: bool,
        /// The host's name for the label of the Machine, if the Machine does not have it.
        host_label: Option<String>,
        /// Since when vCenter does not have the VM of a machine that is to fail then.
        lost_since: Option<Timestamp>,
        remediation: Remediation,
    },
}

/// Whether somebody has asked Cluster API to replace a Machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remediation {
    #[default]
    Unasked,
    /// Capstan has asked.
    Asked,
    /// A user has asked; Capstan leaves that alone.
    AskedByOthers,
}

/// One effect for a VSphereMachine.
#[derive(Clone, Debug)]
pub enum MachineStep {
    AddFinalizer,
    CreateVm(Box<VSphereVM>),
    /// Bring the VSphereVM in line with its machine.
    UpdateVm {
        vm: Arc<VSphereVM>,
        followed: Box<VSphereVM>,
    },
    /// Write the provider ID to the VSphereMachine.
    SetProviderId(String),
    /// Label the Machine with the name of its host.
    LabelHost(String),
    /// Ask Cluster API to replace the Machine, because its VM is lost.
    AskForRemediation,
    /// Take that back, because the VM is there again.
    WithdrawRemediation,
    DeleteVm(Arc<VSphereVM>),
    /// Remove the finalizer.
    Release,
}

/// Returns the next steps.
pub fn plan(observed: &ObservedMachine, now: Timestamp) -> Plan<MachineStep> {
    let mut steps = vec![MachineStep::AddFinalizer];
    let mut requeue = None;
    match observed {
        ObservedMachine::Paused(_) => steps.clear(),
        ObservedMachine::Deleting { vm: None } => steps = vec![MachineStep::Release],
        ObservedMachine::Deleting { vm: Some(vm) } if vm.metadata.deletion_timestamp.is_some() => steps.clear(),
        ObservedMachine::Deleting { vm: Some(vm) } => steps = vec![MachineStep::DeleteVm(vm.clone())],
        ObservedMachine::NoInfrastructure | ObservedMachine::NoBootstrapData => {}
        ObservedMachine::NoVm { desired } => steps.push(MachineStep::CreateVm(desired.clone())),
        ObservedMachine::Vm {
            vm,
            followed,
            provider_id,
            is_failing,
            host_label,
            lost_since,
            remediation,
        } => {
            if let Ok(followed) = followed
                && vm.metadata.deletion_timestamp.is_none()
            {
                steps.push(MachineStep::UpdateVm {
                    vm: vm.clone(),
                    followed: followed.clone(),
                });
            }
            match provider_id {
                Some(id) => {
                    steps.push(MachineStep::SetProviderId(id.clone()));
                    let left = lost_since.map(|since| LOST_GRACE.saturating_sub(elapsed(since, now)));
                    requeue = left.filter(|left| !left.is_zero());
                }
                None => {
                    requeue = (!is_failing)
                        .then(|| SLOW.saturating_sub(age(vm, now)))
                        .filter(|left| !left.is_zero())
                }
            }
            if followed.is_err() {
                requeue = Some(requeue.map_or(RECHECK, |left| left.min(RECHECK)));
            }
            steps.extend(host_label.clone().map(MachineStep::LabelHost));
            match remediation {
                Remediation::Unasked if provider_id.is_some() && fails(*lost_since, now) => {
                    steps.push(MachineStep::AskForRemediation);
                }
                Remediation::Asked if lost_since.is_none() => steps.push(MachineStep::WithdrawRemediation),
                _ => {}
            }
        }
    }
    Plan { steps, requeue }
}

/// Whether the progress of a VSphereVM is to be reported on its VSphereMachine.
pub fn is_slow(vm: &VSphereVM, now: Timestamp) -> bool {
    age(vm, now) >= SLOW
}

fn age(vm: &VSphereVM, now: Timestamp) -> Duration {
    let created = vm.metadata.creation_timestamp.as_ref();
    created.map_or(Duration::ZERO, |created| elapsed(created.0, now))
}

/// Returns the time since `then`; none if that is in the future.
fn elapsed(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// Whether a machine fails now, because vCenter has not had its VM for long enough.
pub fn fails(lost_since: Option<Timestamp>, now: Timestamp) -> bool {
    lost_since.is_some_and(|since| elapsed(since, now) >= LOST_GRACE)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use rstest::rstest;

    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(1_000_000).unwrap()
    }

    fn vm(age: i64, deleting: bool) -> Arc<VSphereVM> {
        let mut vm = VSphereVM::new("m", Default::default());
        vm.metadata.creation_timestamp = Some(Time(now() - jiff::SignedDuration::from_secs(age)));
        vm.metadata.deletion_timestamp = deleting.then(|| Time(now()));
        Arc::new(vm)
    }

    fn observed(vm: Arc<VSphereVM>, provider_id: Option<&str>) -> ObservedMachine {
        ObservedMachine::Vm {
            followed: Ok(Box::new(VSphereVM::clone(&vm))),
            vm,
            provider_id: provider_id.map(str::to_owned),
            is_failing: false,
            host_label: None,
            lost_since: None,
            remediation: Remediation::Unasked,
        }
    }

    fn names(plan: &Plan<MachineStep>) -> Vec<&'static str> {
        let name = |step: &MachineStep| match step {
            MachineStep::AddFinalizer => "finalizer",
            MachineStep::CreateVm(_) => "create",
            MachineStep::UpdateVm { .. } => "update",
            MachineStep::SetProviderId(_) => "provider id",
            MachineStep::LabelHost(_) => "label",
            MachineStep::AskForRemediation => "ask",
            MachineStep::WithdrawRemediation => "withdraw",
            MachineStep::DeleteVm(_) => "delete",
            MachineStep::Release => "release",
        };
        plan.steps.iter().map(name).collect()
    }

    #[test]
    fn a_vm_is_created_after_the_gates_and_followed_until_it_is_ready() {
        let steps = |observed: &ObservedMachine| names(&plan(observed, now()));
        assert!(steps(&ObservedMachine::Paused(String::new())).is_empty());
        assert_eq!(steps(&ObservedMachine::NoInfrastructure), ["finalizer"]);
        assert_eq!(steps(&ObservedMachine::NoBootstrapData), ["finalizer"]);
        let desired = Box::new(VSphereVM::new("m", Default::default()));
        assert_eq!(steps(&ObservedMachine::NoVm { desired }), ["finalizer", "create"]);
        let young = plan(&observed(vm(10, false), None), now());
        assert_eq!(
            (names(&young), young.requeue),
            (vec!["finalizer", "update"], Some(Duration::from_secs(20)))
        );
        assert_eq!(plan(&observed(vm(40, false), None), now()).requeue, None);
        let ready = plan(&observed(vm(10, false), Some("vsphere://1")), now());
        assert_eq!(names(&ready), ["finalizer", "update", "provider id"]);
        let mut unfollowed = observed(vm(10, false), Some("vsphere://1"));
        if let ObservedMachine::Vm { followed, .. } = &mut unfollowed {
            *followed = Err("no such zone".into());
        }
        let unfollowed = plan(&unfollowed, now());
        assert_eq!(
            (names(&unfollowed), unfollowed.requeue),
            (vec!["finalizer", "provider id"], Some(RECHECK))
        );
    }

    #[test]
    fn a_machine_whose_vm_is_lost_fails_after_a_grace_period() {
        let lost = |seconds: i64| {
            let since = Some(now() - jiff::SignedDuration::from_secs(seconds));
            let mut observed = observed(vm(1000, false), Some("vsphere://1"));
            if let ObservedMachine::Vm { lost_since, .. } = &mut observed {
                *lost_since = since;
            }
            (plan(&observed, now()).requeue, fails(since, now()))
        };
        assert_eq!(lost(60), (Some(Duration::from_secs(240)), false));
        assert_eq!(lost(300), (None, true));
        assert!(!fails(None, now()));
    }

    #[rstest]
    #[case::there(None, Remediation::Unasked, None)]
    #[case::lost_a_moment_ago(Some(60), Remediation::Unasked, None)]
    #[case::lost(Some(300), Remediation::Unasked, Some("ask"))]
    #[case::lost_and_asked(Some(300), Remediation::Asked, None)]
    #[case::lost_and_asked_by_a_user(Some(300), Remediation::AskedByOthers, None)]
    #[case::back(None, Remediation::Asked, Some("withdraw"))]
    #[case::back_and_asked_by_a_user(None, Remediation::AskedByOthers, None)]
    #[case::lost_again_after_a_moment(Some(60), Remediation::Asked, None)]
    fn a_lost_machine_asks_for_its_replacement_until_it_is_back(
        #[case] lost: Option<i64>,
        #[case] asked: Remediation,
        #[case] expected: Option<&str>,
    ) {
        let mut observed = observed(vm(1000, false), Some("vsphere://1"));
        if let ObservedMachine::Vm {
            lost_since,
            remediation,
            ..
        } = &mut observed
        {
            *lost_since = lost.map(|seconds| now() - jiff::SignedDuration::from_secs(seconds));
            *remediation = asked;
        }
        let steps = names(&plan(&observed, now()));
        let found = steps.into_iter().find(|step| ["ask", "withdraw"].contains(step));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_machine_is_released_when_its_vm_is_gone() {
        let steps = |vm| names(&plan(&ObservedMachine::Deleting { vm }, now()));
        assert_eq!(steps(Some(vm(10, false))), ["delete"]);
        assert!(steps(Some(vm(10, true))).is_empty());
        assert_eq!(steps(None), ["release"]);
    }
}
