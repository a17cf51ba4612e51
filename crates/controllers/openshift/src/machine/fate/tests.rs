use super::super::names::tests::sample;
use super::super::names::{MACHINE_TAG, UID_TAG};
use super::*;
use capstan_azure::model::Tags;
use jiff::Timestamp;
use rstest::rstest;
use serde_json::json;
use std::collections::HashMap;
use std::sync::Arc;

fn spec() -> AzureMachineProviderSpec {
    AzureMachineProviderSpec::from_raw(&json!({"dataDisks": [
        {"nameSuffix": "kept", "lun": 0, "deletionPolicy": "Detach"},
        {"nameSuffix": "gone", "lun": 1, "deletionPolicy": "Delete"},
        {"nameSuffix": "unsaid", "lun": 2},
    ]}))
    .unwrap()
}

fn found(name: &str, tags: Option<Tags>) -> (String, Found) {
    let found = Found {
        name: name.to_owned(),
        id: format!("/disks/{name}"),
        tags,
        created: None,
    };
    (name.to_lowercase(), found)
}

fn listing(names: &[&str], tags: Option<Tags>) -> Listing {
    let all = names.iter().map(|name| found(name, tags.clone()));
    Arc::new(all.collect::<HashMap<_, _>>())
}

fn at(text: &str) -> Option<Timestamp> {
    Some(text.parse().unwrap())
}

fn had(disks: &[(&str, &str)]) -> Vec<Attached> {
    let one = |(name, policy): &(&str, &str)| Attached {
        name: (*name).to_owned(),
        deletion_policy: DeletionPolicy::from(*policy),
    };
    disks.iter().map(one).collect()
}

const OURS: Known = Known {
    attached: &[],
    ours: true,
};
const NEVER_SEEN: Known = Known {
    attached: &[],
    ours: false,
};
const ALL: [&str; 4] = ["m1_OSDisk", "m1_kept", "m1_gone", "m1_unsaid"];

fn doomed(fate: &Fate) -> Vec<&str> {
    fate.doomed.iter().map(|(_, name)| name.as_str()).collect()
}

#[test]
fn only_disks_marked_delete_and_the_os_disk_are_doomed() {
    let fate = decide(&spec(), &sample(), &listing(&ALL, None), OURS);
    assert_eq!(
        fate.doomed,
        [("OS disk", "m1_OSDisk".to_owned()), ("Data Disk", "m1_gone".to_owned())]
    );
    assert_eq!(fate.kept, ["/disks/m1_kept", "/disks/m1_unsaid"]);
}

#[test]
fn what_an_earlier_machine_of_the_same_name_left_is_not_ours() {
    assert_eq!(
        decide(&spec(), &sample(), &listing(&ALL, None), NEVER_SEEN),
        Fate::default()
    );
    let ours = Some(sample().tags(&spec()));
    let fate = decide(&spec(), &sample(), &listing(&ALL, ours), NEVER_SEEN);
    assert_eq!(doomed(&fate), ["m1_OSDisk", "m1_gone"]);
}

#[test]
fn a_disk_older_than_its_machine_was_left_by_another_even_if_the_spec_dooms_it() {
    let mut names = sample();
    names.born = at("2026-01-02T00:00:00Z");
    let (key, mut old) = found("m1_gone", None);
    old.created = at("2026-01-01T00:00:00Z");
    let listing: Listing = Arc::new([(key, old)].into());
    let fate = decide(&spec(), &names, &listing, OURS);
    assert_eq!(
        (doomed(&fate), &fate.kept),
        (vec![], &vec!["/disks/m1_gone".to_owned()])
    );
    // Unless it was attached to the virtual machine: then the machine's object is the younger one, restored perhaps.
    let attached = had(&[("m1_gone", "Delete")]);
    let known = Known {
        attached: &attached,
        ours: true,
    };
    assert_eq!(doomed(&decide(&spec(), &names, &listing, known)), ["m1_gone"]);
}

#[test]
fn what_is_gone_already_is_not_deleted_again_and_what_should_be_there_is_missed() {
    let fate = decide(&spec(), &sample(), &listing(&["m1_unsaid"], None), OURS);
    assert_eq!((doomed(&fate), &fate.missing), (vec![], &vec!["m1_kept".to_owned()]));
    // Added to the spec after the virtual machine was made: it never was.
    let attached = had(&[("m1_gone", "Delete")]);
    let known = Known {
        attached: &attached,
        ours: true,
    };
    assert_eq!(
        decide(&spec(), &sample(), &listing(&[], None), known).missing,
        Vec::<String>::new()
    );
}

#[rstest]
#[case::delete("Delete", true)]
#[case::detach("Detach", false)]
fn a_disk_that_the_spec_lost_goes_as_its_virtual_machine_said(#[case] policy: &str, #[case] goes: bool) {
    let attached = had(&[("m1_lost", policy)]);
    let known = Known {
        attached: &attached,
        ours: true,
    };
    let fate = decide(
        &AzureMachineProviderSpec::default(),
        &sample(),
        &listing(&["m1_lost"], None),
        known,
    );
    assert_eq!(doomed(&fate).is_empty(), !goes);
    assert_eq!(fate.kept.is_empty(), goes);
}

#[test]
fn the_spec_has_the_last_word_on_a_disk_that_it_names() {
    let attached = had(&[("M1_KEPT", "Delete"), ("m1_gone", "Detach")]);
    let known = Known {
        attached: &attached,
        ours: true,
    };
    let fate = decide(&spec(), &sample(), &listing(&["m1_kept", "m1_gone"], None), known);
    assert_eq!(
        (doomed(&fate), &fate.kept),
        (vec!["m1_gone"], &vec!["/disks/m1_kept".to_owned()])
    );
}

#[rstest]
#[case::marked(Some("Delete"), true)]
#[case::marked_to_stay(Some("Detach"), false)]
#[case::unmarked(None, false)]
fn a_disk_that_only_its_tag_tells_of_goes_as_the_tag_says(#[case] policy: Option<&str>, #[case] goes: bool) {
    let mut tags: Tags = [
        (UID_TAG.to_owned(), "u1".to_owned()),
        (MACHINE_TAG.to_owned(), "ns/m1".to_owned()),
    ]
    .into();
    if let Some(policy) = policy {
        tags.insert(POLICY_TAG.to_owned(), policy.to_owned());
    }
    let fate = decide(
        &AzureMachineProviderSpec::default(),
        &sample(),
        &listing(&["m1_first"], Some(tags)),
        NEVER_SEEN,
    );
    assert_eq!((!doomed(&fate).is_empty(), fate.kept.is_empty()), (goes, goes));
}

fn vm(disks: serde_json::Value) -> VirtualMachine {
    serde_json::from_value(json!({"properties": {"storageProfile": {"dataDisks": disks}}})).unwrap()
}

#[test]
fn a_virtual_machines_disks_are_known_by_name_and_group() {
    let names = sample();
    let id = |group: &str, name: &str| {
        format!("/subscriptions/sub/resourceGroups/{group}/providers/Microsoft.Compute/disks/{name}")
    };
    let seen = attached(
        &names,
        &vm(json!([
            {"name": "M1_a", "deleteOption": "Delete", "managedDisk": {"id": id("GROUP", "m1_a")}},
            {"name": "m1_b", "managedDisk": {"id": id("group", "m1_b")}},
            {"name": "m1_c", "deleteOption": "Delete", "managedDisk": {"id": id("other", "m1_c")}},
            {"name": "pvc-1", "deleteOption": "Delete"},
            {"name": "m1_OSDisk", "deleteOption": "Delete"},
            {"name": "m10_a", "deleteOption": "Delete"},
        ])),
    );
    assert_eq!(seen, had(&[("M1_a", "Delete"), ("m1_b", "Detach")]));
}

#[test]
fn what_is_seen_is_written_down_unless_spec_or_status_tell_of_it() {
    let (spec, names) = (spec(), sample());
    let seen = had(&[("m1_kept", "Detach"), ("m1_lost", "Delete")]);
    assert!(is_untold(&spec, &names, &[], &seen));
    assert!(!is_untold(&spec, &names, &seen, &seen));
    assert!(!is_untold(&spec, &names, &[], &seen[..1]));
    assert!(is_untold(&spec, &names, &had(&[("m1_lost", "Detach")]), &seen));
    let before = had(&[("M1_lost", "Detach"), ("m1_older", "Delete")]);
    assert_eq!(
        recorded(&before, seen),
        had(&[("m1_kept", "Detach"), ("m1_lost", "Delete"), ("m1_older", "Delete")])
    );
}

#[test]
fn a_disk_that_became_detach_is_spared_before_the_machine_goes() {
    let before = vm(json!([
        {"name": "M1_kept", "lun": 0, "deleteOption": "Delete", "createOption": "Empty"},
        {"name": "m1_gone", "lun": 1, "deleteOption": "Delete"},
    ]));
    let update = spared(&spec(), &sample(), &before).unwrap();
    let disks = serde_json::to_value(update).unwrap()["properties"]["storageProfile"]["dataDisks"].clone();
    assert_eq!(
        (&disks[0]["deleteOption"], &disks[1]["deleteOption"]),
        (&json!("Detach"), &json!("Delete"))
    );
    assert_eq!(disks[0]["createOption"], "Empty");
    let settled = vm(json!([{"name": "m1_kept", "deleteOption": "Detach"}]));
    assert!(spared(&spec(), &sample(), &settled).is_none());
}

#[test]
fn every_kept_disk_is_told_of_within_the_length_of_an_event() {
    assert_eq!(farewell("m", &[]), [r#"Deleted machine "m""#]);
    let ids: Vec<String> = (0..64)
        .map(|n| format!("/subscriptions/{}/disks/{n}", "s".repeat(150)))
        .collect();
    let told = farewell("m", &ids);
    assert!(
        told.iter()
            .all(|text| text.len() <= MESSAGE && text.starts_with(r#"Deleted machine "m""#))
    );
    let whole = told.join(" ");
    assert!(ids.iter().all(|id| whole.contains(id)));
}
