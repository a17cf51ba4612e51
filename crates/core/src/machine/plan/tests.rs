use super::*;
use crate::plan::{Describe, Impact};
use rstest::rstest;
use serde_json::{Value, json};

fn machine(value: Value) -> Machine {
    let mut base = json!({
        "metadata": {"name": "m", "namespace": "n", "finalizers": [MACHINE_FINALIZER]},
        "spec": {"providerSpec": {"value": {"kind": "AzureMachineProviderSpec"}}},
    });
    merge(&mut base, value);
    serde_json::from_value(base).unwrap()
}

fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}

/// A machine that nothing is known of besides its object.
fn observed(over: Value) -> Observed {
    Observed {
        machine: Arc::new(machine(over)),
        vm: Vm::NotObserved,
        operation: None,
        may_exist: false,
        next_observation: HOUR,
        node: NodeLookup::NotCached,
        drained: None,
        control_plane_before: None,
        inherited: false,
        dependencies: Dependencies::default(),
        teardown: Teardown::default(),
    }
}

const NOW: Timestamp = Timestamp::constant(1_000_000, 0);
const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);

fn node() -> NodeLookup {
    let node = serde_json::from_value(json!({"metadata": {"name": "node"}})).unwrap();
    NodeLookup::Found(Arc::new(node))
}

/// The decision in short: what has to be read, else the step's name, else how long to wait.
fn decided(observed: &Observed) -> String {
    if let Some(read) = next_read(observed) {
        return format!("read {read:?}");
    }
    let plan = plan(observed, NOW);
    match (plan.steps.as_slice(), plan.requeue) {
        ([], None) => "idle".to_owned(),
        ([], Some(time)) => format!("wait {}", time.as_secs()),
        ([Step::DeleteVm(drained)], _) => format!("DeleteVm: {drained}"),
        ([Step::AwaitControlPlane(other)], _) => format!("AwaitControlPlane {other}"),
        ([Step::Release(node)], _) => format!("Release {}", if node.is_some() { "node" } else { "nothing" }),
        (steps, _) => {
            let name = |step: &Step| format!("{step:?}").split('(').next().unwrap_or_default().to_owned();
            steps.iter().map(name).collect::<Vec<_>>().join(", ")
        }
    }
}

#[rstest]
#[case::another_platform(json!({"spec": {"providerSpec": {"value": {"kind": "AWSMachineProviderConfig"}}}}), "idle")]
#[case::cluster_apis(json!({"status": {"authoritativeAPI": "ClusterAPI"}}), "idle")]
#[case::cluster_apis_from_the_start(json!({"spec": {"authoritativeAPI": "ClusterAPI"}}), "idle")]
#[case::handed_over(json!({"spec": {"authoritativeAPI": "ClusterAPI"}, "status": {"authoritativeAPI": "MachineAPI"}}), "Prepare")]
#[case::migrating(json!({"spec": {"authoritativeAPI": "MachineAPI"}, "status": {"authoritativeAPI": "Migrating"}}), "idle")]
#[case::failed_is_final(json!({"status": {"phase": "Failed"}}), "idle")]
#[case::without_finalizer(json!({"metadata": {"finalizers": []}}), "AddFinalizer")]
#[case::new(json!({}), "Prepare")]
#[case::refused_before(json!({"status": {"phase": "Provisioning"}}), "Prepare")]
#[case::requested(json!({"status": {"phase": "Provisioning", "providerStatus": {"vmId": "x"}}}), "read Vm")]
#[case::provisioned(json!({"status": {"phase": "Provisioned"}}), "wait 3600")]
#[case::made_by_an_earlier_controller(json!({"spec": {"providerID": "azure:///x"}}), "wait 3600")]
fn the_object_alone_decides(#[case] over: Value, #[case] expected: &str) {
    assert_eq!(decided(&observed(over)), expected);
}

#[rstest]
#[case::new(json!({"metadata": {"finalizers": []}}), Impact::Cloud(2))]
#[case::made_by_an_earlier_controller(json!({"metadata": {"finalizers": []}, "spec": {"providerID": "azure:///x"}}), Impact::Cluster)]
#[case::requested(
    json!({"metadata": {"finalizers": []}, "status": {"phase": "Provisioning", "providerStatus": {"vmId": "x"}}}), Impact::Cluster)]
fn a_new_machine_announces_the_calls_that_create_it(#[case] over: Value, #[case] expected: Impact) {
    let plan = plan(&observed(over), Timestamp::UNIX_EPOCH);
    assert_eq!(plan.steps.iter().map(Describe::impact).collect::<Vec<_>>(), [expected]);
}

#[rstest]
#[case::never_had_a_node(json!({}), Vm::Failed, true, "RecordObservation, FailUnfinished")]
#[case::works(json!({"status": {"phase": "Running", "nodeRef": {"name": "n"}}}), Vm::Failed, true, "RecordObservation")]
#[case::under_way(json!({}), Vm::Updating, true, "RecordObservation")]
#[case::ours(json!({}), Vm::Failed, false, "RecordObservation")]
fn a_machine_that_another_controller_took_for_ready_fails_with_its_virtual_machine(
    #[case] over: Value,
    #[case] vm: Vm,
    #[case] inherited: bool,
    #[case] expected: &str,
) {
    let mut given = json!({"spec": {"providerID": "azure:///x"}, "status": {"phase": "Provisioned"}});
    merge(&mut given, over);
    let found = Observed {
        vm,
        inherited,
        ..observed(given)
    };
    assert_eq!(decided(&found), expected);
}

#[rstest]
#[case(Vm::Absent, false, "Prepare")]
#[case(Vm::Absent, true, "FailMissing")]
#[case(Vm::Ready, false, "RecordRequested, RecordProvisioned")]
#[case(Vm::Ready, true, "RecordObservation")]
#[case(Vm::Updating, false, "RecordRequested, AwaitVm")]
#[case(Vm::Updating, true, "RecordObservation")]
#[case(Vm::Failed, false, "RecordRequested, Prepare")]
#[case(Vm::Failed, true, "RecordObservation")]
#[case(Vm::Foreign, false, "FailNameConflict")]
#[case(Vm::Foreign, true, "FailNameConflict")]
fn a_virtual_machine_that_was_ready_once_is_never_created_again(
    #[case] vm: Vm,
    #[case] was_ready: bool,
    #[case] expected: &str,
) {
    let over = if was_ready {
        json!({"status": {"phase": "Running"}})
    } else {
        json!({})
    };
    assert_eq!(decided(&Observed { vm, ..observed(over) }), expected);
}

#[test]
fn a_running_machine_is_observed_when_due_and_linked_when_its_node_is_there() {
    let running = || observed(json!({"status": {"phase": "Running"}}));
    let due = Observed {
        next_observation: Duration::ZERO,
        ..running()
    };
    assert_eq!(decided(&due), "read Vm");
    assert_eq!(
        decided(&Observed {
            node: node(),
            ..running()
        }),
        "LinkNode"
    );
    for (due, expected) in [(Duration::ZERO, "PollVm"), (SECOND, "wait 1")] {
        let polled = Observed {
            operation: Some(due),
            node: node(),
            ..running()
        };
        assert_eq!(decided(&polled), expected);
    }
}

const PENDING: Progress = Progress::Pending(SECOND);
const DUE: Progress = Progress::Pending(Duration::ZERO);

#[rstest]
#[case::unprepared(Dependencies::default(), "Prepare")]
#[case::address_first(
    prepared(Some(Progress::NotRequested), Progress::NotRequested, Progress::NotRequested),
    "EnsureAddress"
)]
#[case::address_pending(prepared(Some(PENDING), Progress::NotRequested, Progress::NotRequested), "wait 1")]
#[case::address_due(prepared(Some(DUE), Progress::NotRequested, Progress::NotRequested), "EnsureAddress")]
#[case::no_address(
    prepared(None, Progress::NotRequested, Progress::NotRequested),
    "EnsureInterfaceAndDisks"
)]
#[case::after_the_address(
    prepared(Some(Progress::Done), Progress::NotRequested, Progress::Done),
    "EnsureInterfaceAndDisks"
)]
#[case::one_can_go_on(prepared(None, PENDING, Progress::NotRequested), "EnsureInterfaceAndDisks")]
#[case::one_is_due(prepared(None, PENDING, DUE), "EnsureInterfaceAndDisks")]
#[case::both_pending(prepared(None, Progress::Pending(HOUR), PENDING), "wait 1")]
#[case::one_left(prepared(None, Progress::Done, PENDING), "wait 1")]
#[case::all_there(prepared(Some(Progress::Done), Progress::Done, Progress::Done), "CreateVm")]
fn the_virtual_machine_comes_after_its_dependencies(#[case] dependencies: Dependencies, #[case] expected: &str) {
    let observed = Observed {
        dependencies,
        ..observed(json!({}))
    };
    assert_eq!(decided(&observed), expected);
    let failed = Observed {
        vm: Vm::Failed,
        machine: Arc::new(machine(json!({"status": {"providerStatus": {"vmId": "x"}}}))),
        ..observed
    };
    assert_eq!(decided(&failed), expected.replace("CreateVm", "RetryVm"));
}

fn prepared(address: Option<Progress>, interface: Progress, disks: Progress) -> Dependencies {
    Dependencies {
        prepared: true,
        address,
        interface,
        disks,
    }
}

const GONE: &str = "2026-01-01T00:00:00Z";

fn deleted(over: Value) -> Observed {
    let mut deleted = json!({"metadata": {"deletionTimestamp": GONE}});
    merge(&mut deleted, over);
    observed(deleted)
}

fn hooks(kind: &str) -> Value {
    json!({"spec": {"lifecycleHooks": {(kind): [{"name": "a", "owner": "o"}]}}})
}

fn drained_condition() -> Value {
    json!({"status": {"conditions": [{"type": "Drained", "status": "True", "lastTransitionTime": GONE}]}})
}

fn excluded() -> Value {
    json!({"metadata": {"annotations": {(EXCLUDE_DRAIN): ""}}})
}

fn both(mut one: Value, other: Value) -> Value {
    merge(&mut one, other);
    one
}

#[rstest]
#[case::without_finalizer(json!({"metadata": {"finalizers": []}}), "idle")]
#[case::plain(json!({}), "Drain")]
#[case::failed_machines_too(json!({"status": {"phase": "Failed"}}), "Drain")]
#[case::hook_before_the_drain(hooks("preDrain"), "AwaitDrainHooks")]
#[case::excluded(excluded(), "DeleteVm: the machine is excluded from draining")]
#[case::excluded_with_a_hook_before_the_drain(
    both(excluded(), hooks("preDrain")),
    "DeleteVm: the machine is excluded from draining"
)]
#[case::drained(drained_condition(), "DeleteVm: the node was drained before")]
#[case::drained_with_a_hook_before_the_deletion(
    both(drained_condition(), hooks("preTerminate")),
    "AwaitTerminateHooks"
)]
#[case::hook_before_the_deletion(hooks("preTerminate"), "Drain")]
fn a_machine_with_a_node_is_drained_before_it_is_deleted(#[case] over: Value, #[case] expected: &str) {
    let observed = Observed {
        node: node(),
        ..deleted(over)
    };
    assert_eq!(decided(&observed), expected);
}

#[rstest]
#[case::nothing(json!({}), "DeleteVm: the machine has no node")]
#[case::hook_before_a_drain_that_is_not_needed(hooks("preDrain"), "DeleteVm: the machine has no node")]
#[case::failed_with_a_hook(both(json!({"status": {"phase": "Failed"}}), hooks("preDrain")), "DeleteVm: the machine has no node")]
fn a_machine_that_never_had_a_node_is_deleted_without_a_drain(#[case] over: Value, #[case] expected: &str) {
    assert_eq!(decided(&deleted(over)), expected);
}

#[rstest]
#[case::linked(json!({"status": {"nodeRef": {"kind": "Node", "name": "m"}}}), "read Node")]
#[case::made(json!({"spec": {"providerID": "azure:///x"}}), "read Node")]
#[case::has_an_address(json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.4"}]}}), "read Node")]
#[case::excluded(both(excluded(), json!({"status": {"nodeRef": {"kind": "Node", "name": "m"}}})), "DeleteVm: the machine is excluded from draining")]
fn the_api_server_is_asked_for_a_node_before_its_machine_goes_undrained(#[case] over: Value, #[case] expected: &str) {
    assert_eq!(decided(&deleted(over.clone())), expected);
    let absent = Observed {
        node: NodeLookup::Absent,
        ..deleted(over.clone())
    };
    assert!(decided(&absent).starts_with("DeleteVm"), "{over}");
    let polled = Observed {
        operation: Some(Duration::ZERO),
        ..deleted(over)
    };
    assert_eq!(decided(&polled), "PollVmDeletion", "Azure deletes it already");
}

#[test]
fn one_control_plane_node_is_drained_at_a_time() {
    let waiting = Observed {
        node: node(),
        control_plane_before: Some("other".into()),
        ..deleted(json!({}))
    };
    assert_eq!(decided(&waiting), "AwaitControlPlane other");
    let drained = Observed {
        drained: Drained::timed_out("m", Some(NOW), NOW, Vec::new()),
        ..waiting
    };
    assert_eq!(decided(&drained), "DeleteVm: the drain timeout has passed");
}

#[rstest]
#[case(Progress::NotRequested, false, "DeleteResources")]
#[case(PENDING, false, "wait 1")]
#[case(DUE, false, "DeleteResources")]
#[case(Progress::Done, false, "DeleteAvailabilitySet")]
#[case(Progress::Done, true, "Release node")]
fn once_the_virtual_machine_is_gone_its_resources_follow(
    #[case] resources: Progress,
    #[case] availability_set: bool,
    #[case] expected: &str,
) {
    let observed = Observed {
        node: node(),
        teardown: Teardown {
            vm_gone: true,
            resources,
            availability_set,
        },
        ..deleted(json!({}))
    };
    assert_eq!(decided(&observed), expected);
}

#[test]
fn nothing_is_created_or_deleted_before_it_was_read() {
    let conflict = Observed {
        may_exist: true,
        ..observed(json!({}))
    };
    assert_eq!(next_read(&conflict), Some(Read::Vm));
    assert!(plan(&conflict, NOW).steps.is_empty());
    let linked = deleted(json!({"status": {"nodeRef": {"kind": "Node", "name": "m"}}}));
    assert_eq!(next_read(&linked), Some(Read::Node));
    assert!(plan(&linked, NOW).steps.is_empty());
}
