use super::*;
use rstest::rstest;
use serde_json::json;

fn machine(value: serde_json::Value) -> Machine {
    let mut base = json!({
        "metadata": {"name": "m", "namespace": "n", "finalizers": [MACHINE_FINALIZER]},
        "spec": {"providerSpec": {"value": {"kind": "AzureMachineProviderSpec"}}},
    });
    merge(&mut base, value);
    serde_json::from_value(base).unwrap()
}

fn merge(base: &mut serde_json::Value, over: serde_json::Value) {
    match (base, over) {
        (serde_json::Value::Object(base), serde_json::Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key).or_insert(serde_json::Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}

fn seen(machine: &Machine) -> Observed<'_> {
    Observed {
        machine,
        following: false,
        look_due: false,
        vm: Vm::NotAsked,
        node: false,
        node_asked: false,
    }
}

#[rstest]
#[case::another_provider(json!({"spec": {"providerSpec": {"value": {"kind": "AWSMachineProviderConfig"}}}}), Step::Leave)]
#[case::taken_over(json!({"status": {"authoritativeAPI": "ClusterAPI"}}), Step::Leave)]
#[case::failed_is_final(json!({"status": {"phase": "Failed"}}), Step::Leave)]
#[case::unguarded(json!({"metadata": {"finalizers": []}}), Step::Guard)]
#[case::new(json!({}), Step::Create)]
#[case::refused_before(json!({"status": {"phase": "Provisioning"}}), Step::Create)]
#[case::begun(json!({"status": {"phase": "Provisioning", "providerStatus": {"vmId": "x"}}}), Step::Look)]
#[case::provisioned(json!({"status": {"phase": "Provisioned"}}), Step::AwaitNode)]
#[case::made_by_an_earlier_controller(json!({"spec": {"providerID": "azure:///x"}}), Step::AwaitNode)]
fn what_the_object_alone_tells(#[case] over: serde_json::Value, #[case] step: Step) {
    assert_eq!(plan(&seen(&machine(over))), step);
}

#[rstest]
#[case(Vm::Absent, false, Step::Create)]
#[case(Vm::Absent, true, Step::Vanished)]
#[case(Vm::Whole, false, Step::Settle)]
#[case(Vm::Whole, true, Step::AwaitNode)]
#[case(Vm::Busy, false, Step::Watch)]
#[case(Vm::Busy, true, Step::AwaitNode)]
#[case(Vm::Broken, false, Step::Mend)]
#[case(Vm::Broken, true, Step::AwaitNode)]
#[case(Vm::Foreign, false, Step::Taken)]
fn what_azure_says_is_weighed_with_what_was(#[case] vm: Vm, #[case] was_there: bool, #[case] step: Step) {
    let over = if was_there {
        json!({"status": {"phase": "Running"}})
    } else {
        json!({})
    };
    let machine = machine(over);
    assert_eq!(plan(&Observed { vm, ..seen(&machine) }), step);
}

#[test]
fn a_running_machine_is_looked_at_when_due_and_linked_when_its_node_is_there() {
    let machine = machine(json!({"status": {"phase": "Running"}}));
    assert_eq!(
        plan(&Observed {
            look_due: true,
            ..seen(&machine)
        }),
        Step::Look
    );
    assert_eq!(
        plan(&Observed {
            node: true,
            ..seen(&machine)
        }),
        Step::Link
    );
    assert_eq!(
        plan(&Observed {
            following: true,
            node: true,
            ..seen(&machine)
        }),
        Step::Follow
    );
}

const GONE: &str = "2026-01-01T00:00:00Z";

#[rstest]
#[case::unguarded(json!({"metadata": {"finalizers": []}}), Step::Leave)]
#[case::plain(json!({}), Step::Drain)]
#[case::failed_ones_go_too(json!({"status": {"phase": "Failed"}}), Step::Drain)]
#[case::pre_drain_hook(json!({"spec": {"lifecycleHooks": {"preDrain": [{"name": "a", "owner": "o"}]}}}), Step::HoldDrain)]
#[case::excluded(json!({"metadata": {"annotations": {(EXCLUDE_DRAIN): ""}}}), Step::Destroy)]
#[case::drained(json!({"status": {"conditions": [{"type": "Drained", "status": "True", "lastTransitionTime": GONE}]}}), Step::Destroy)]
#[case::drained_but_held(json!({
    "status": {"conditions": [{"type": "Drained", "status": "True", "lastTransitionTime": GONE}]},
    "spec": {"lifecycleHooks": {"preTerminate": [{"name": "a", "owner": "o"}]}},
}), Step::HoldTerminate)]
fn a_deleted_machine_is_drained_before_it_is_destroyed(#[case] over: serde_json::Value, #[case] step: Step) {
    let mut deleted = json!({"metadata": {"deletionTimestamp": GONE}});
    merge(&mut deleted, over);
    let machine = machine(deleted);
    assert_eq!(
        plan(&Observed {
            node: true,
            ..seen(&machine)
        }),
        step
    );
}

#[test]
fn a_machine_that_never_got_so_far_as_a_node_is_destroyed_without_drain() {
    let machine = machine(json!({"metadata": {"deletionTimestamp": GONE}}));
    assert_eq!(plan(&seen(&machine)), Step::Destroy);
}

#[rstest]
#[case::linked(json!({"status": {"nodeRef": {"kind": "Node", "name": "m"}}}), Step::FindNode)]
#[case::made(json!({"spec": {"providerID": "azure:///x"}}), Step::FindNode)]
#[case::has_an_address(json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.4"}]}}), Step::FindNode)]
#[case::excluded(json!({
    "metadata": {"annotations": {(EXCLUDE_DRAIN): ""}},
    "status": {"nodeRef": {"kind": "Node", "name": "m"}},
}), Step::Destroy)]
#[case::drained(json!({"status": {
    "nodeRef": {"kind": "Node", "name": "m"},
    "conditions": [{"type": "Drained", "status": "True", "lastTransitionTime": GONE}],
}}), Step::Destroy)]
fn a_node_that_the_cache_does_not_show_is_asked_for_before_its_machine_goes_undrained(
    #[case] over: serde_json::Value,
    #[case] step: Step,
) {
    let mut deleted = json!({"metadata": {"deletionTimestamp": GONE}});
    merge(&mut deleted, over);
    let machine = machine(deleted);
    assert_eq!(plan(&seen(&machine)), step);
    let asked = Observed {
        node_asked: true,
        ..seen(&machine)
    };
    assert_eq!(plan(&asked), Step::Destroy);
    let going = Observed {
        following: true,
        ..seen(&machine)
    };
    assert_eq!(plan(&going), Step::Destroy, "it is being deleted in Azure already");
}
