use super::super::names::tests::sample;
use super::*;
use capstan_azure::model::Tags;
use serde_json::json;
use std::collections::HashMap;

fn spec() -> AzureMachineProviderSpec {
    AzureMachineProviderSpec::from_raw(&json!({"dataDisks": [
        {"nameSuffix": "kept", "lun": 0, "deletionPolicy": "Detach"},
        {"nameSuffix": "gone", "lun": 1, "deletionPolicy": "Delete"},
        {"nameSuffix": "unsaid", "lun": 2},
    ]}))
    .unwrap()
}

fn listing(names: &[&str], tags: Option<Tags>) -> Listing {
    let found = |name: &&str| {
        (
            name.to_lowercase(),
            Found {
                id: format!("/disks/{name}"),
                attached_to: None,
                tags: tags.clone(),
            },
        )
    };
    Arc::new(names.iter().map(found).collect::<HashMap<_, _>>())
}

const ALL: [&str; 4] = ["m1_OSDisk", "m1_kept", "m1_gone", "m1_unsaid"];

#[test]
fn only_disks_marked_delete_and_the_os_disk_are_doomed() {
    let doomed = doomed(&spec(), &sample(), &listing(&ALL, None), true);
    assert_eq!(
        doomed,
        [("OS disk", "m1_OSDisk".to_owned()), ("Data Disk", "m1_gone".to_owned())]
    );
}

#[test]
fn what_an_earlier_machine_of_the_same_name_left_is_not_ours() {
    assert!(doomed(&spec(), &sample(), &listing(&ALL, None), false).is_empty());
    let ours = Some(sample().tags(&spec()));
    assert_eq!(doomed(&spec(), &sample(), &listing(&ALL, ours), false).len(), 2);
}

#[test]
fn what_is_gone_already_is_not_deleted_again() {
    assert!(doomed(&spec(), &sample(), &listing(&["m1_kept"], None), true).is_empty());
}

#[test]
fn a_disk_that_became_detach_is_spared_before_the_machine_goes() {
    let vm: VirtualMachine = serde_json::from_value(json!({"properties": {"storageProfile": {"dataDisks": [
        {"name": "M1_kept", "lun": 0, "deleteOption": "Delete", "createOption": "Empty"},
        {"name": "m1_gone", "lun": 1, "deleteOption": "Delete"},
    ]}}}))
    .unwrap();
    let update = spared(&spec(), &sample(), &vm).unwrap();
    let disks = serde_json::to_value(update).unwrap()["properties"]["storageProfile"]["dataDisks"].clone();
    assert_eq!(
        (&disks[0]["deleteOption"], &disks[1]["deleteOption"]),
        (&json!("Detach"), &json!("Delete"))
    );
    assert_eq!(disks[0]["createOption"], "Empty");

    let settled: VirtualMachine = serde_json::from_value(json!({"properties": {"storageProfile": {"dataDisks": [
        {"name": "m1_kept", "deleteOption": "Detach"}]}}}))
    .unwrap();
    assert!(spared(&spec(), &sample(), &settled).is_none());
}
