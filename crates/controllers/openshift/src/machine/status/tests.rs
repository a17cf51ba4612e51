use super::*;
use rstest::rstest;
use serde_json::json;

const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

#[test]
fn others_read_from_the_providers_status_whether_the_virtual_machine_was_created() {
    let created = |machine: &Machine| {
        let condition = provider(machine)
            .conditions
            .into_iter()
            .find(|one| one.type_ == "MachineCreated");
        condition.map(|one| (one.status, one.reason, one.message))
    };
    let text = |text: &str| text.to_owned();
    let machine = Machine::new("m", Default::default());
    assert_eq!(created(&machine), None);
    let waits = create_failed(&machine, "QuotaExceeded: none left", NOW);
    let expected = (
        text("False"),
        text("MachineCreationFailed"),
        text("QuotaExceeded: none left"),
    );
    assert_eq!(created(&waits), Some(expected));
    assert!(
        !is_inherited(&waits),
        "our own condition is no sign of another controller"
    );
    let made = provisioned(&waits, "Running", NOW);
    let expected = (
        text("True"),
        text("MachineCreationSucceeded"),
        text("machine successfully created"),
    );
    assert_eq!(created(&made), Some(expected));
    let refused = failed(&machine, "InvalidConfiguration", "no such size", NOW);
    assert_eq!(created(&refused).map(|(status, ..)| status).as_deref(), Some("False"));
    let gone = failed(&made, "UpdateError", "can't find created instance", NOW);
    assert_eq!(created(&gone).map(|(status, ..)| status).as_deref(), Some("True"));
    let old: Machine = serde_json::from_value(
        json!({"metadata": {"name": "m"}, "spec": {}, "status": {"providerStatus":
        {"conditions": [{"type": "MachineCreated", "status": "True", "reason": "MachineCreationSucceeded",
                         "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}}),
    )
    .unwrap();
    assert!(is_inherited(&old));
}

#[rstest]
#[case::no_migration(None, None, None)]
#[case::ours(Some("MachineAPI"), Some("MachineAPI"), Some("False"))]
#[case::new_mirror(Some("ClusterAPI"), None, Some("True"))]
#[case::handed_over(Some("ClusterAPI"), Some("ClusterAPI"), Some("True"))]
#[case::migrating(Some("ClusterAPI"), Some("Migrating"), Some("True"))]
fn an_object_that_cluster_api_manages_is_paused(
    #[case] spec: Option<&str>,
    #[case] status: Option<&str>,
    #[case] paused: Option<&str>,
) {
    let authority = |text: Option<&str>| -> Option<MachineAuthority> {
        text.map(|text| serde_json::from_value(json!(text)).unwrap())
    };
    let (spec, status) = (authority(spec), authority(status));
    let found = super::paused(&[], spec.as_ref(), status.as_ref(), NOW);
    let shown = found
        .as_ref()
        .and_then(|conditions| conditions::get(conditions, "Paused"));
    assert_eq!(shown.map(|condition| condition.status.as_str()), paused);
}

#[rstest]
#[case::runs("Succeeded", Some("running"), Some("Running"))]
#[case::stopped("Succeeded", Some("stopped"), Some("Stopped"))]
#[case::deallocated("Succeeded", Some("deallocated"), Some("Deallocated"))]
#[case::starts("Succeeded", Some("starting"), Some("Starting"))]
#[case::odd("Succeeded", Some("hibernating"), Some("Unknown"))]
#[case::changed("Updating", Some("running"), Some("Updating"))]
#[case::not_told("Succeeded", None, None)]
fn the_state_is_what_is_done_to_it_or_else_how_it_runs(
    #[case] provisioning: &str,
    #[case] power: Option<&str>,
    #[case] state: Option<&str>,
) {
    let statuses: Vec<_> = power
        .iter()
        .map(|power| json!({"code": format!("PowerState/{power}")}))
        .collect();
    let vm: VirtualMachine = serde_json::from_value(json!({"properties": {
        "provisioningState": provisioning, "instanceView": {"statuses": statuses},
    }}))
    .unwrap();
    assert_eq!(state_of(&vm).as_deref(), state);
}

fn reported(machine: &Machine, notes: Vec<Note>) -> (Machine, Vec<&'static str>) {
    let mut all = Notes::default();
    notes.into_iter().for_each(|note| all.push(note));
    let report = status(machine, &all, NOW);
    let events = report.events.iter().map(|event| event.reason).collect();
    (report.object.unwrap_or_else(|| machine.clone()), events)
}

fn node() -> ObjectReference {
    ObjectReference {
        name: Some("node".to_owned()),
        ..ObjectReference::default()
    }
}

#[rstest]
#[case::requested(vec![Note::Requested(Box::default())], "Provisioning", &[])]
#[case::made_at_once(vec![Note::Requested(Box::default()), Note::Provisioned(None)], "Provisioned", &["Created"])]
#[case::with_its_node(vec![Note::Provisioned(Some(node()))], "Running", &["Created"])]
#[case::linked(vec![Note::Linked(node())], "Running", &[])]
#[case::not_created(vec![Note::NotCreated("no room".to_owned())], "Provisioning", &["FailedCreate"])]
#[case::failed(vec![Note::Failed(Failed { reason: "UpdateError", message: "gone".to_owned(), event: "FailedUpdate" })], "Failed", &["FailedUpdate"])]
#[case::deleting(vec![Note::Deleting(Deletion::default())], "Deleting", &[])]
#[case::not_deleted(vec![Note::OperationOver, Note::Deleting(Deletion { error: Some("why".to_owned()), ..Deletion::default() })], "Deleting", &["FailedDelete"])]
fn steps_that_end_together_are_one_status(
    #[case] notes: Vec<Note>,
    #[case] phase: &str,
    #[case] events: &[&'static str],
) {
    let (after, found) = reported(&Machine::new("m", Default::default()), notes);
    assert_eq!(of(&after).phase.as_deref(), Some(phase));
    assert_eq!(found, events);
}

#[test]
fn a_virtual_machine_that_is_as_it_was_is_not_reported() {
    let show = |updated| {
        Note::Shown(Shown {
            state: Some("Running".to_owned()),
            addresses: Vec::new(),
            updated,
        })
    };
    let (first, events) = reported(&Machine::new("m", Default::default()), vec![show(false)]);
    assert_eq!(events, ["Updated"]);
    let (second, events) = reported(&first, vec![show(false)]);
    assert_eq!((&second.status, events.len()), (&first.status, 0));
    assert_eq!(reported(&first, vec![show(true)]).1, ["Updated"]);
}
