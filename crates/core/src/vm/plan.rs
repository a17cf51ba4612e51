//! The plan of a VSphereVM: from an observation to the steps that bring the VM up, or tear it down.

use std::time::Duration;

use jiff::Timestamp;

use super::MoRef;
use super::changes::{Changes, changes};
use super::report::{Report, report, waits_for_static_address};
use super::teardown::{Shutdown, TeardownStep, teardown};
use super::types::{DesiredVm, ObservedVm, PowerState, Recorded, ResolvedNames, UserData};
use crate::disks::vsphere::hardware_version;
use crate::plan::Plan;

/// A VSphereVM with everything that its plan depends on.
#[derive(Clone, Debug)]
pub enum Observation {
    /// There is nothing to do: a waiter follows pending work, a failure is retried later, or the VM was read a moment ago.
    /// Reconcile again after this long at the latest.
    Idle(Option<Duration>),
    /// Pools have not handed out all addresses yet; the claims with these names do not exist.
    Unaddressed {
        missing: Vec<String>,
    },
    BringUp(Box<BringUp>),
    Teardown(Box<Teardown>),
}

/// A VM that should be up.
#[derive(Clone, Debug, Default)]
pub struct BringUp {
    pub desired: DesiredVm,
    pub names: ResolvedNames,
    pub user: Option<UserData>,
    pub recorded: Recorded,
    /// `None`: vCenter does not have the VM.
    pub vm: Option<ObservedVm>,
    /// The last reconfiguration of the VM.
    pub tried: Option<Box<Changes>>,
    pub memberships: Memberships,
}

/// The groups that a VM is not a member of yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memberships {
    /// The tags that have not been attached.
    pub tags: Vec<String>,
    /// Whether the VM has to join the VM group of its failure domain.
    pub group: bool,
    /// The cluster module to join.
    pub module: Option<String>,
}

/// A VM that should go.
#[derive(Clone, Debug, Default)]
pub struct Teardown {
    pub desired: DesiredVm,
    pub recorded: Recorded,
    /// `None`: vCenter does not have the VM.
    pub vm: Option<ObservedVm>,
    /// When the object of the VM was deleted.
    pub deleted: Option<Timestamp>,
    /// When the guest was asked to shut down.
    pub asked: Option<Timestamp>,
    /// Whether the guest could not be asked.
    pub guest_refuses: bool,
    /// The cluster module that the VM is in.
    pub module: Option<String>,
}

/// One effect for a VSphereVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    AddFinalizer,
    /// Claim an address from a pool, by the name of the claim.
    CreateClaim(String),
    /// A card has neither DHCP nor an address: a user has to set one.
    AwaitStaticAddress,
    /// The VM does not exist and never did.
    Clone,
    /// The VM was ready once and vCenter does not have it any more.
    Lost,
    /// vCenter cannot read the configuration of the VM, for this reason.
    Unreadable(String),
    /// The virtual hardware is older than desired.
    Upgrade {
        vm: MoRef,
        to: String,
    },
    /// Something is not as desired.
    Reconfigure {
        vm: MoRef,
        changes: Box<Changes>,
    },
    /// vCenter keeps its own values of these settings, which a reconfiguration did not change.
    KeepSettings(Vec<String>),
    /// Something is not as desired, and no reconfiguration can change that.
    Wrong(String),
    AttachTags {
        vm: MoRef,
        tags: Vec<String>,
    },
    /// Join the VM group of the failure domain.
    JoinGroup(MoRef),
    /// Join it again, if somebody has taken the running VM out of it.
    RestoreGroup(MoRef),
    JoinModule {
        vm: MoRef,
        module: String,
    },
    PowerOn(MoRef),
    /// The VM runs, but its guest has not reported an address yet.
    AwaitAddresses {
        vm: MoRef,
        report: Report,
    },
    /// Write the BIOS UUID to the spec: from then on the VM was ready once.
    RecordBiosUuid(String),
    Up {
        vm: MoRef,
        report: Report,
    },
    LeaveModule {
        vm: MoRef,
        module: String,
    },
    Teardown(TeardownStep),
    /// Delete the Node of the machine.
    DeleteNode,
    /// Delete the claims of addresses.
    ReleaseAddresses,
}

/// Returns the next steps.
pub fn plan(observed: &Observation, now: Timestamp) -> Plan<Step> {
    match observed {
        Observation::Idle(requeue) => Plan {
            steps: Vec::new(),
            requeue: *requeue,
        },
        Observation::Unaddressed { missing } => {
            let claims = missing.iter().cloned().map(Step::CreateClaim);
            steps([Step::AddFinalizer].into_iter().chain(claims))
        }
        Observation::BringUp(observed) => steps([Step::AddFinalizer].into_iter().chain(bring_up(observed))),
        Observation::Teardown(observed) => steps(tear_down(observed, now)),
    }
}

fn steps(steps: impl IntoIterator<Item = Step>) -> Plan<Step> {
    Plan {
        steps: steps.into_iter().collect(),
        requeue: None,
    }
}

fn bring_up(observed: &BringUp) -> Vec<Step> {
    let BringUp {
        desired,
        names,
        user,
        recorded,
        vm,
        tried,
        memberships,
    } = observed;
    let join_module = |vm: &MoRef| {
        let module = memberships.module.clone();
        let vm = vm.clone();
        module.map(|module| Step::JoinModule { vm, module })
    };
    let power_on = |vm: MoRef| {
        let mut steps = Vec::new();
        if !memberships.tags.is_empty() {
            let (vm, tags) = (vm.clone(), memberships.tags.clone());
            steps.push(Step::AttachTags { vm, tags });
        }
        if memberships.group {
            steps.push(Step::JoinGroup(vm.clone()));
        }
        steps.extend(join_module(&vm));
        steps.push(Step::PowerOn(vm));
        steps
    };
    match next_step(desired, names, user.as_ref(), recorded, vm.as_ref()) {
        Step::Reconfigure { vm, changes } if tried.as_ref() == Some(&changes) => match without_effect(&changes) {
            Ok(kept) => kept.into_iter().chain(power_on(vm)).collect(),
            Err(wrong) => vec![Step::Wrong(wrong)],
        },
        Step::PowerOn(vm) => power_on(vm),
        Step::Up { vm, report } => {
            let uuid = observed.vm.as_ref().map(|vm| vm.bios_uuid.clone());
            let uuid = uuid.filter(|uuid| !uuid.is_empty() && recorded.bios_uuid.as_ref() != Some(uuid));
            let mut steps = Vec::new();
            if memberships.group && recorded.was_ready {
                steps.push(Step::RestoreGroup(vm.clone()));
            }
            steps.extend(join_module(&vm));
            steps.extend(uuid.map(Step::RecordBiosUuid));
            steps.push(Step::Up { vm, report });
            steps
        }
        step => vec![step],
    }
}

/// A reconfiguration changed nothing: for devices and policies that is an error with their names. Of anything else vCenter
/// keeps its own value, and the machine goes on with that.
fn without_effect(changes: &Changes) -> Result<Option<Step>, String> {
    let failed = |text: &str| Err(format!("{text}, and a reconfiguration did not help"));
    if changes.sets_policies() {
        return failed("vCenter did not set the storage policy");
    }
    if changes.touches_devices() {
        return match changes.dropped.as_slice() {
            [] => failed("a disk did not grow"),
            dropped => failed(&dropped.join("; ")),
        };
    }
    let settings = changes.settings.clone();
    Ok((!settings.is_empty()).then_some(Step::KeepSettings(settings)))
}

fn tear_down(observed: &Teardown, now: Timestamp) -> Vec<Step> {
    let Teardown { desired, recorded, .. } = observed;
    let shutdown = Shutdown {
        mode: desired.power_off,
        timeout: desired.soft_timeout,
        asked: observed.asked,
    };
    let Some(step) = teardown(observed.vm.as_ref(), recorded, shutdown, observed.deleted, now) else {
        return Vec::new();
    };
    let step = match step {
        TeardownStep::ShutDownGuest(vm) if observed.guest_refuses => TeardownStep::PowerOff(vm),
        step => step,
    };
    let mut steps = Vec::new();
    match &step {
        TeardownStep::Release => {
            steps.extend(recorded.was_ready.then_some(Step::DeleteNode));
            steps.push(Step::ReleaseAddresses);
        }
        TeardownStep::Destroy { vm, .. } => {
            let (vm, module) = (vm.clone(), observed.module.clone());
            steps.extend(module.map(|module| Step::LeaveModule { vm, module }));
        }
        TeardownStep::Unreadable(_)
        | TeardownStep::ShutDownGuest(_)
        | TeardownStep::AwaitShutdown { .. }
        | TeardownStep::CannotShutDown
        | TeardownStep::PowerOff(_)
        | TeardownStep::Detach { .. } => {}
    }
    steps.push(Step::Teardown(step));
    steps
}

/// Returns the next step towards a machine that is ready.
pub fn next_step(
    desired: &DesiredVm,
    names: &ResolvedNames,
    user: Option<&UserData>,
    recorded: &Recorded,
    observed: Option<&ObservedVm>,
) -> Step {
    let Some(observed) = observed else {
        return match recorded.was_ready {
            true => Step::Lost,
            false if waits_for_static_address(&desired.networks) => Step::AwaitStaticAddress,
            false => Step::Clone,
        };
    };
    if let Some(reason) = &observed.unreadable {
        return Step::Unreadable(reason.clone());
    }
    let vm = observed.reference.clone();
    if !recorded.was_ready && observed.power == PowerState::Off {
        if let Some(to) = upgrade(desired, observed) {
            return Step::Upgrade { vm, to };
        }
        let changes = changes(desired, names, user, recorded, observed);
        if !changes.wrong.is_empty() {
            return Step::Wrong(changes.wrong.join("; "));
        }
        if !changes.is_empty() {
            let changes = Box::new(changes);
            return Step::Reconfigure { vm, changes };
        }
    }
    if observed.power != PowerState::On {
        return Step::PowerOn(vm);
    }
    let report = report(observed);
    if report.addresses.is_empty() {
        Step::AwaitAddresses { vm, report }
    } else {
        Step::Up { vm, report }
    }
}

fn upgrade(desired: &DesiredVm, observed: &ObservedVm) -> Option<String> {
    let to = desired.hardware_version.as_deref()?;
    (hardware_version(to)? > observed.hardware.version).then(|| to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> MoRef {
        MoRef::vm("vm-1")
    }

    fn off() -> ObservedVm {
        ObservedVm {
            power: PowerState::Off,
            ..ObservedVm::new(vm())
        }
    }

    fn all(observation: Observation) -> Vec<Step> {
        plan(&observation, Timestamp::UNIX_EPOCH).steps
    }

    #[test]
    fn a_vm_joins_its_groups_before_it_is_powered_on() {
        let memberships = Memberships {
            tags: vec!["t".into()],
            group: true,
            module: Some("m".into()),
        };
        let observed = BringUp {
            recorded: Recorded {
                was_ready: true,
                ..Recorded::default()
            },
            vm: Some(off()),
            memberships,
            ..BringUp::default()
        };
        let tags = vec!["t".into()];
        let module = "m".to_owned();
        assert_eq!(
            all(Observation::BringUp(Box::new(observed))),
            [
                Step::AddFinalizer,
                Step::AttachTags { vm: vm(), tags },
                Step::JoinGroup(vm()),
                Step::JoinModule { vm: vm(), module },
                Step::PowerOn(vm()),
            ]
        );
    }

    #[test]
    fn a_running_vm_joins_its_group_again() {
        let steps = |was_ready, group| {
            let guest = crate::vm::GuestNic {
                mac: "m".into(),
                addresses: vec!["10.0.0.1".parse().unwrap()],
                ..Default::default()
            };
            let nic = crate::vm::Nic {
                mac: "m".into(),
                ..Default::default()
            };
            let running = ObservedVm {
                power: PowerState::On,
                nics: vec![nic],
                guest: vec![guest],
                ..off()
            };
            let observed = BringUp {
                recorded: Recorded {
                    was_ready,
                    ..Recorded::default()
                },
                vm: Some(running),
                memberships: Memberships {
                    group,
                    ..Memberships::default()
                },
                ..BringUp::default()
            };
            all(Observation::BringUp(Box::new(observed)))
        };
        assert_eq!(steps(true, true)[1], Step::RestoreGroup(vm()));
        for rest in [steps(true, false), steps(false, true)] {
            assert!(matches!(rest[1], Step::Up { .. }), "{rest:?}");
        }
    }

    #[test]
    fn a_reconfiguration_without_effect_is_not_repeated() {
        let cpus = Changes {
            cpus: Some(4),
            ..Changes::default()
        };
        let settings = Changes {
            settings: vec!["cpu shares 4000".into()],
            ..cpus.clone()
        };
        let policy = Changes {
            policy: Some("gold".into()),
            ..Changes::default()
        };
        let disk = Changes {
            grow: vec![(2000, 1)],
            ..Changes::default()
        };
        assert_eq!(without_effect(&cpus), Ok(None));
        let kept = Step::KeepSettings(settings.settings.clone());
        assert_eq!(without_effect(&settings), Ok(Some(kept)));
        assert!(without_effect(&policy).is_err_and(|text| text.contains("storage policy")));
        assert!(without_effect(&disk).is_err_and(|text| text.contains("did not grow")));
    }

    #[test]
    fn a_guest_that_cannot_be_asked_is_powered_off_where_the_spec_allows_it() {
        let running = ObservedVm {
            power: PowerState::On,
            tools_running: true,
            ..off()
        };
        let steps = |guest_refuses| {
            all(Observation::Teardown(Box::new(Teardown {
                desired: DesiredVm {
                    power_off: super::super::PowerOff::TrySoft,
                    ..DesiredVm::default()
                },
                vm: Some(running.clone()),
                deleted: Some(Timestamp::UNIX_EPOCH),
                guest_refuses,
                ..Teardown::default()
            })))
        };
        assert_eq!(steps(false), [Step::Teardown(TeardownStep::ShutDownGuest(vm()))]);
        assert_eq!(steps(true), [Step::Teardown(TeardownStep::PowerOff(vm()))]);
    }

    #[test]
    fn a_vm_that_is_gone_gives_its_node_and_its_addresses_back_before_it_is_released() {
        let gone = |was_ready| {
            let recorded = Recorded {
                was_ready,
                ..Recorded::default()
            };
            all(Observation::Teardown(Box::new(Teardown {
                recorded,
                deleted: Some(Timestamp::UNIX_EPOCH),
                ..Teardown::default()
            })))
        };
        let release = Step::Teardown(TeardownStep::Release);
        assert_eq!(gone(false), [Step::ReleaseAddresses, release.clone()]);
        assert_eq!(gone(true), [Step::DeleteNode, Step::ReleaseAddresses, release]);
    }
}
