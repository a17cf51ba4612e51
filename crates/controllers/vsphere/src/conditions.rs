//! Names that others rely on: condition types, their reasons, finalizers, labels. Conditions for both contracts of Cluster API.

use capstan_api::common::{Condition, V1Beta2Status};
pub use capstan_core::cluster::secrets::{CLUSTER_FINALIZER, IDENTITY_SECRET};
use capstan_core::cluster::zone::Check;
use capstan_kube::conditions::READY;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition as NewCondition, Time};

/// Whether the virtual machine is there and up.
pub const VM_PROVISIONED: &str = "VMProvisioned";
/// Whether vCenter answers.
pub const VCENTER_AVAILABLE: &str = Check::Vcenter.condition();
/// Whether the certificate of vCenter is verified; absent when it is.
pub const CERTIFICATE_VERIFIED: &str = "VCenterCertificateVerified";
pub const INSECURE: &str = "Insecure";
/// Whether every pool has given its address.
pub const IP_ADDRESS_CLAIMED: &str = "IPAddressClaimed";
/// Whether a guest that was asked to shut down has done so.
pub const GUEST_SOFT_POWER_OFF_SUCCEEDED: &str = "GuestSoftPowerOffSucceeded";
/// Whether the failure domains of a cluster can be used.
pub const FAILURE_DOMAINS_AVAILABLE: &str = "FailureDomainsAvailable";
/// Whether the failure domain of a zone is as described.
pub const FAILURE_DOMAIN_VALIDATED: &str = Check::FailureDomain.condition();
/// Whether the folder and the pool of a zone exist.
pub const PLACEMENT_CONSTRAINT_MET: &str = Check::Placement.condition();
/// Whether the groups of machines that are kept on different hosts are there.
pub const CLUSTER_MODULES_AVAILABLE: &str = "ClusterModulesAvailable";
/// Whether an identity's secret is there.
pub const CREDENTIALS_AVAILABLE: &str = "CredentialsAvailable";

/// Whether Capstan leaves the object alone, because a user has paused it or its cluster. Only in the v1beta2 contract.
pub const PAUSED: &str = "Paused";

/// Whether Capstan can connect to the workload cluster; absent when it can, or had no need to.
pub const WORKLOAD_CLUSTER_AVAILABLE: &str = "WorkloadClusterAvailable";

/// The kubeconfig Secret of the workload cluster is missing, or Capstan does not use it.
pub const KUBECONFIG_REFUSED: &str = "KubeconfigRefused";
/// Upstream's reason for zones that have not reported yet.
pub const WAITING_FOR_ZONES: &str = "WaitingForFailureDomainStatus";
pub const WAITING_FOR_CLUSTER: &str = "WaitingForClusterInfrastructure";
pub const WAITING_FOR_BOOTSTRAP_DATA: &str = "WaitingForBootstrapData";
pub const WAITING_FOR_STATIC_IP: &str = "WaitingForStaticIPAllocation";
pub const WAITING_FOR_IP: &str = "WaitingForIPAllocation";
pub const WAITING_FOR_IP_ADDRESS: &str = "WaitingForIPAddress";
pub const CLONING: &str = "Cloning";
pub const CLONING_FAILED: &str = "CloningFailed";
pub const POWERING_ON: &str = "PoweringOn";
pub const POWERING_ON_FAILED: &str = "PoweringOnFailed";
pub const TASK_FAILURE: &str = "TaskFailure";
pub const TAGS_FAILED: &str = "TagsAttachmentFailed";
pub const VM_GROUP_FAILED: &str = "VMGroupFailed";
pub const MODULES_FAILED: &str = "ClusterModuleSetupFailed";
pub const NOT_FOUND: &str = "NotFoundByBIOSUUID";
pub const DELETING: &str = "Deleting";
pub const DELETION_FAILED: &str = "DeletionFailed";
pub const VCENTER_UNREACHABLE: &str = "VCenterUnreachable";
pub const SOFT_OFF_IN_PROGRESS: &str = "GuestSoftPowerOffInProgress";
pub const SOFT_OFF_FAILED: &str = "GuestSoftPowerOffFailed";

pub const MACHINE_FINALIZER: &str = "vspheremachine.infrastructure.cluster.x-k8s.io";
pub const VM_FINALIZER: &str = "vspherevm.infrastructure.cluster.x-k8s.io";
/// Finalizer of an IPAddressClaim: the IP pool does not assign the address again while a machine has it.
pub const CLAIM_FINALIZER: &str = "vspherevm.infrastructure.cluster.x-k8s.io/ip-claim-protection";
/// The finalizer of claims that earlier versions of Capstan made.
pub const OLD_CLAIM_FINALIZER: &str = "ipaddressclaim.infrastructure.cluster.x-k8s.io";
/// Keeps an identity until no cluster uses it.
pub const IDENTITY_FINALIZER: &str = "vsphereclusteridentity/infrastructure.cluster.x-k8s.io";
/// Keeps a zone until no machine is in it.
pub const ZONE_FINALIZER: &str = "vspheredeploymentzone.infrastructure.cluster.x-k8s.io";

/// Label with the ESXi host of a virtual machine, on its Machine. Cluster API copies it to the Node.
pub const HOST_LABEL: &str = "node.cluster.x-k8s.io/esxi-host";
/// On a VSphereMachine, with the value "true": the machine fails when its VM is lost in vCenter, so that a MachineHealthCheck
/// replaces it.
pub const FAIL_WHEN_LOST: &str = "capstan.dev/fail-when-lost";
/// On a Machine: a MachineHealthCheck replaces the Machine. Cluster API ignores the value; Capstan writes [`FAIL_WHEN_LOST`].
pub const REMEDIATE: &str = "cluster.x-k8s.io/remediate-machine";
/// The reason of a failed machine. Cluster API lists the values.
pub const FAILED: &str = "UpdateError";
/// Label of the Machines of a control plane.
pub const CONTROL_PLANE_LABEL: &str = "cluster.x-k8s.io/control-plane";
/// Label with the name of a Machine's control plane object.
pub const CONTROL_PLANE_NAME_LABEL: &str = "cluster.x-k8s.io/control-plane-name";
/// Label with the name of a Machine's MachineDeployment.
pub const DEPLOYMENT_NAME_LABEL: &str = "cluster.x-k8s.io/deployment-name";
/// What every provider ID of a machine on vSphere starts with.
pub const PROVIDER_ID: &str = "vsphere://";

/// The condition types that have another name in the v1beta2 contract.
const RENAMED: [(&str, &str); 7] = [
    (VM_PROVISIONED, "VirtualMachineProvisioned"),
    (IP_ADDRESS_CLAIMED, "IPAddressClaimsFulfilled"),
    (FAILURE_DOMAINS_AVAILABLE, "FailureDomainsReady"),
    (FAILURE_DOMAIN_VALIDATED, "FailureDomainValidated"),
    (PLACEMENT_CONSTRAINT_MET, "PlacementConstraintReady"),
    (CLUSTER_MODULES_AVAILABLE, "ClusterModulesReady"),
    (CREDENTIALS_AVAILABLE, "Available"),
];

/// The reasons of True conditions in the v1beta2 contract, by the type there. CAPV has the same.
const REASONS_OF_TRUE: [(&str, &str); 9] = [
    ("VirtualMachineProvisioned", "Provisioned"),
    ("VCenterAvailable", "Available"),
    ("IPAddressClaimsFulfilled", "Fulfilled"),
    ("GuestSoftPowerOffSucceeded", "Succeeded"),
    ("FailureDomainsReady", "Ready"),
    ("FailureDomainValidated", "Validated"),
    ("PlacementConstraintReady", "Ready"),
    ("ClusterModulesReady", "Ready"),
    ("Available", "Available"),
];

/// The reasons of False conditions that have another name in the v1beta2 contract. CAPV has the same.
const REASONS_OF_FALSE: [(&str, &str); 12] = [
    (WAITING_FOR_CLUSTER, "WaitingForClusterInfrastructureReady"),
    (CLONING, "WaitingForClone"),
    (CLONING_FAILED, "NotProvisioned"),
    (POWERING_ON_FAILED, "NotProvisioned"),
    (TAGS_FAILED, "NotProvisioned"),
    (TASK_FAILURE, "TaskFailed"),
    (MODULES_FAILED, "NotReady"),
    (SOFT_OFF_IN_PROGRESS, "InProgress"),
    (SOFT_OFF_FAILED, "Failed"),
    ("FailureDomainRegionMisconfigured", "RegionMisconfigured"),
    ("FailureDomainZoneMisconfigured", "ZoneMisconfigured"),
    ("SecretInUse", "SecretAlreadyInUse"),
];

fn renamed<'a>(table: &[(&'a str, &'a str)], name: &str) -> Option<&'a str> {
    table.iter().find(|(old, _)| *old == name).map(|(_, new)| *new)
}

/// Returns reason and message of the Ready condition in the v1beta2 contract, where a message names the condition that it
/// comes from.
fn ready(ready: &Condition, all: &[Condition]) -> (String, String) {
    if ready.status == "True" {
        return (READY.to_owned(), String::new());
    }
    let is_cause = |condition: &&Condition| {
        condition.type_ != READY && condition.status == "False" && condition.reason == ready.reason
    };
    let message = ready.message.clone().unwrap_or_default();
    let Some(cause) = all.iter().find(is_cause) else {
        return ("NotReady".to_owned(), message);
    };
    let type_ = renamed(&RENAMED, &cause.type_).unwrap_or(&cause.type_);
    let reason = renamed(&REASONS_OF_FALSE, ready.reason.as_deref().unwrap_or_default());
    let text = match message.as_str() {
        "" => reason.or(ready.reason.as_deref()).unwrap_or_default(),
        message => message,
    };
    ("NotReady".to_owned(), format!("* {type_}: {text}"))
}

/// Returns the conditions in the form of the v1beta2 contract. Cluster API reads these first where they exist, so they always
/// agree with the others. A reason that CAPV does not have stays as it is; a True without one gets its type as the reason, because
/// the contract asks for one.
pub fn v1beta2(conditions: &[Condition]) -> Option<V1Beta2Status> {
    let convert = |condition: &Condition| {
        let type_ = renamed(&RENAMED, &condition.type_).unwrap_or(&condition.type_);
        let given = condition.reason.as_deref();
        let message = condition.message.clone().unwrap_or_default();
        let (reason, message) = match (type_, condition.status.as_str()) {
            (READY, _) => ready(condition, conditions),
            (_, "True") => (
                renamed(&REASONS_OF_TRUE, type_).or(given).unwrap_or(type_).to_owned(),
                message,
            ),
            _ => {
                let reason = given.unwrap_or(type_);
                (renamed(&REASONS_OF_FALSE, reason).unwrap_or(reason).to_owned(), message)
            }
        };
        NewCondition {
            type_: type_.to_owned(),
            status: condition.status.clone(),
            reason,
            message,
            last_transition_time: condition.last_transition_time.clone(),
            observed_generation: None,
        }
    };
    (!conditions.is_empty()).then(|| V1Beta2Status {
        conditions: conditions.iter().map(convert).collect(),
    })
}

/// The reason of an event: an object that others need is deleted, and stays.
pub const IN_USE: &str = "StillInUse";
/// An event names this many objects at most.
const LISTED: usize = 5;

/// Returns names for a message: some of them, and how many more there are.
pub fn list(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(LISTED)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Returns the conditions with `Paused`, for this generation of the object. `before` are the conditions that the object has;
/// `paused` says why it is paused.
pub fn with_paused(
    conditions: Option<V1Beta2Status>,
    before: Option<&V1Beta2Status>,
    generation: Option<i64>,
    paused: Option<&str>,
    now: Timestamp,
) -> Option<V1Beta2Status> {
    let (status, reason) = match paused {
        Some(_) => ("True", PAUSED),
        None => ("False", "NotPaused"),
    };
    let shown = before.and_then(paused_of).filter(|shown| shown.status == status);
    let paused = NewCondition {
        type_: PAUSED.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: paused.unwrap_or_default().to_owned(),
        last_transition_time: shown.map_or(Time(now), |shown| shown.last_transition_time.clone()),
        observed_generation: None,
    };
    let others = conditions.unwrap_or_default().conditions.into_iter();
    let others = others.filter(|condition| condition.type_ != PAUSED);
    let mut conditions: Vec<NewCondition> = others.chain([paused]).collect();
    for condition in &mut conditions {
        condition.observed_generation = generation;
    }
    Some(V1Beta2Status { conditions })
}

fn paused_of(status: &V1Beta2Status) -> Option<&NewCondition> {
    status.conditions.iter().find(|condition| condition.type_ == PAUSED)
}

/// Whether the conditions say that their object is paused.
pub fn shows_paused(status: Option<&V1Beta2Status>) -> bool {
    status.and_then(paused_of).is_some_and(|paused| paused.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_kube::conditions::{Severity, get, mark_false, mark_true, summarize};

    #[test]
    fn both_contracts_read_the_same_conditions() {
        let (mut old, now) = (Vec::new(), Timestamp::UNIX_EPOCH);
        mark_true(&mut old, VCENTER_AVAILABLE, now);
        mark_false(&mut old, VM_PROVISIONED, Severity::Info, CLONING, "cloning", now);
        summarize(&mut old, &[VCENTER_AVAILABLE, VM_PROVISIONED], now);
        let new = v1beta2(&old).unwrap().conditions;
        let shown = |type_: &str| {
            let found = new.iter().find(|condition| condition.type_ == type_).unwrap();
            (found.status.as_str(), found.reason.as_str(), found.message.as_str())
        };
        assert_eq!(
            shown("VirtualMachineProvisioned"),
            ("False", "WaitingForClone", "cloning")
        );
        assert_eq!(shown(VCENTER_AVAILABLE), ("True", "Available", ""));
        assert_eq!(get(&old, READY).unwrap().status, "False");
        assert_eq!(
            shown(READY),
            ("False", "NotReady", "* VirtualMachineProvisioned: cloning")
        );
        assert_eq!(v1beta2(&[]), None);
    }

    #[test]
    fn a_machine_that_is_up_has_the_reasons_of_capv() {
        let (mut old, now) = (Vec::new(), Timestamp::UNIX_EPOCH);
        for type_ in [VCENTER_AVAILABLE, VM_PROVISIONED, IP_ADDRESS_CLAIMED] {
            mark_true(&mut old, type_, now);
        }
        summarize(&mut old, &[VCENTER_AVAILABLE, VM_PROVISIONED, IP_ADDRESS_CLAIMED], now);
        let new = v1beta2(&old).unwrap().conditions;
        let mut shown: Vec<_> = new.iter().map(|c| (c.type_.as_str(), c.reason.as_str())).collect();
        shown.sort_unstable();
        let expected = [
            ("IPAddressClaimsFulfilled", "Fulfilled"),
            (READY, "Ready"),
            (VCENTER_AVAILABLE, "Available"),
            ("VirtualMachineProvisioned", "Provisioned"),
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn paused_is_shown_with_its_reason_and_keeps_the_time_of_its_transition() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let shown = |status: &V1Beta2Status| {
            let paused = paused_of(status).unwrap().clone();
            (
                paused.status,
                paused.reason,
                paused.message,
                paused.last_transition_time.0,
            )
        };
        let mut old = Vec::new();
        mark_true(&mut old, VM_PROVISIONED, at(0));
        let running = with_paused(v1beta2(&old), None, Some(1), None, at(1)).unwrap();
        assert_eq!(
            shown(&running),
            ("False".into(), "NotPaused".into(), String::new(), at(1))
        );
        let again = with_paused(v1beta2(&old), Some(&running), Some(2), None, at(2)).unwrap();
        assert_eq!(shown(&again), shown(&running));
        assert!(again.conditions.iter().all(|c| c.observed_generation == Some(2)));
        let paused = with_paused(Some(again.clone()), Some(&again), Some(2), Some("why"), at(3)).unwrap();
        assert_eq!(shown(&paused), ("True".into(), "Paused".into(), "why".into(), at(3)));
        assert!(shows_paused(Some(&paused)) && !shows_paused(Some(&again)) && !shows_paused(None));
        assert_eq!(paused.conditions.len(), 2);
    }
}
