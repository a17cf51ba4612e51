use super::super::names::{MACHINE_TAG, UID_TAG, sample};
use super::*;
use rstest::rstest;
use serde_json::json;

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
        ..Found::default()
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

const HAD_VM: Known = Known {
    attached: &[],
    had_vm: true,
};
const NEVER_HAD_VM: Known = Known {
    attached: &[],
    had_vm: false,
};
const ALL: [&str; 4] = ["m1_OSDisk", "m1_kept", "m1_gone", "m1_unsaid"];

fn deleted(disposition: &Disposition) -> Vec<&str> {
    disposition.delete.iter().map(|(_, name)| name.as_str()).collect()
}

#[test]
fn only_disks_marked_delete_and_the_os_disk_are_deleted() {
    let disposition = decide(&spec(), &sample(), &listing(&ALL, None), HAD_VM);
    assert_eq!(
        disposition.delete,
        [("OS disk", "m1_OSDisk".to_owned()), ("Data Disk", "m1_gone".to_owned())]
    );
    assert_eq!(disposition.keep, ["/disks/m1_kept", "/disks/m1_unsaid"]);
}

#[test]
fn what_an_earlier_machine_of_the_same_name_left_is_not_ours() {
    assert_eq!(
        decide(&spec(), &sample(), &listing(&ALL, None), NEVER_HAD_VM),
        Disposition::default()
    );
}

#[test]
fn disks_made_for_a_virtual_machine_that_never_came_go_whatever_their_policy() {
    let mut own = sample().tags(&spec());
    own.insert(POLICY_TAG.to_owned(), "Detach".to_owned());
    let own = Some(own);
    let disposition = decide(&spec(), &sample(), &listing(&ALL, own.clone()), NEVER_HAD_VM);
    assert_eq!(deleted(&disposition), ALL);
    assert!(disposition.keep.is_empty());
    // Azure made this one together with a virtual machine, and gave it the same tags: it was attached.
    let with_vm = Some(sample().tags(&spec()));
    let disposition = decide(&spec(), &sample(), &listing(&["m1_kept"], with_vm), NEVER_HAD_VM);
    assert_eq!((deleted(&disposition), disposition.keep.len()), (vec![], 1));
    let disposition = decide(&spec(), &sample(), &listing(&ALL, own), HAD_VM);
    assert_eq!(
        deleted(&disposition),
        ["m1_OSDisk", "m1_gone"],
        "one that was attached is kept"
    );
}

#[test]
fn a_disk_older_than_its_machine_was_left_by_another_even_if_the_spec_says_delete() {
    let mut names = sample();
    names.created = at("2026-01-02T00:00:00Z");
    let (key, mut old) = found("m1_gone", None);
    old.created = at("2026-01-01T00:00:00Z");
    let listing: Listing = Arc::new([(key, old)].into());
    let disposition = decide(&spec(), &names, &listing, HAD_VM);
    assert_eq!(
        (deleted(&disposition), &disposition.keep),
        (vec![], &vec!["/disks/m1_gone".to_owned()])
    );
    // Unless it was attached to the virtual machine: then the machine's object is the younger one, restored perhaps.
    let attached = had(&[("m1_gone", "Delete")]);
    let known = Known {
        attached: &attached,
        had_vm: true,
    };
    assert_eq!(deleted(&decide(&spec(), &names, &listing, known)), ["m1_gone"]);
}

#[test]
fn what_is_gone_already_is_not_deleted_again_and_what_should_be_there_is_missed() {
    let disposition = decide(&spec(), &sample(), &listing(&["m1_unsaid"], None), HAD_VM);
    assert_eq!(
        (deleted(&disposition), &disposition.missing),
        (vec![], &vec!["m1_kept".to_owned()])
    );
    // Added to the spec after the virtual machine was made: it never was.
    let attached = had(&[("m1_gone", "Delete")]);
    let known = Known {
        attached: &attached,
        had_vm: true,
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
        had_vm: true,
    };
    let disposition = decide(
        &AzureMachineProviderSpec::default(),
        &sample(),
        &listing(&["m1_lost"], None),
        known,
    );
    assert_eq!(deleted(&disposition).is_empty(), !goes);
    assert_eq!(disposition.keep.is_empty(), goes);
}

#[test]
fn the_spec_has_the_last_word_on_a_disk_that_it_names() {
    let attached = had(&[("M1_KEPT", "Delete"), ("m1_gone", "Detach")]);
    let known = Known {
        attached: &attached,
        had_vm: true,
    };
    let disposition = decide(&spec(), &sample(), &listing(&["m1_kept", "m1_gone"], None), known);
    assert_eq!(
        (deleted(&disposition), &disposition.keep),
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
    let disposition = decide(
        &AzureMachineProviderSpec::default(),
        &sample(),
        &listing(&["m1_first"], Some(tags)),
        HAD_VM,
    );
    assert_eq!(
        (!deleted(&disposition).is_empty(), disposition.keep.is_empty()),
        (goes, goes)
    );
}

#[test]
fn what_is_seen_is_written_down_unless_spec_or_status_tell_of_it() {
    let (spec, names) = (spec(), sample());
    let seen = had(&[("m1_kept", "Detach"), ("m1_lost", "Delete")]);
    assert!(is_unrecorded(&spec, &names, &[], &seen));
    assert!(!is_unrecorded(&spec, &names, &seen, &seen));
    assert!(!is_unrecorded(&spec, &names, &[], &seen[..1]));
    assert!(is_unrecorded(&spec, &names, &had(&[("m1_lost", "Detach")]), &seen));
    let before = had(&[("M1_lost", "Detach"), ("m1_older", "Delete")]);
    assert_eq!(
        recorded(&before, seen),
        had(&[("m1_kept", "Detach"), ("m1_lost", "Delete"), ("m1_older", "Delete")])
    );
}

#[test]
fn every_kept_disk_is_told_of_within_the_length_of_an_event() {
    assert_eq!(deleted_messages("m", None), [r#"Deleted machine "m""#]);
    let ids: Vec<String> = (0..64)
        .map(|n| format!("/subscriptions/{}/disks/{n}", "s".repeat(150)))
        .collect();
    let disks = Disposition {
        keep: ids[..40].to_vec(),
        keep_unseen: ids[40..].to_vec(),
        ..Disposition::default()
    };
    let told = deleted_messages("m", Some(&disks));
    assert!(
        told.iter()
            .all(|text| text.len() <= MESSAGE && text.starts_with(r#"Deleted machine "m""#))
    );
    let whole = told.join(" ");
    assert!(ids.iter().all(|id| whole.contains(id)));
}

#[test]
fn an_account_that_may_not_list_deletes_by_name_what_the_machine_had() {
    let names = |disposition: &Disposition| -> Vec<String> {
        disposition.delete.iter().map(|(_, name)| name.clone()).collect()
    };
    assert_eq!(
        decide_unlisted(&spec(), &sample(), NEVER_HAD_VM),
        Disposition::default()
    );
    let disposition = decide_unlisted(&spec(), &sample(), HAD_VM);
    assert_eq!(names(&disposition), ["m1_OSDisk", "m1_gone"]);
    let id = |disk: &str| format!("/subscriptions/SUB/resourceGroups/Group/providers/Microsoft.Compute/disks/{disk}");
    assert_eq!(disposition.keep_unseen, ["m1_kept", "m1_unsaid"].map(id));
    let attached = had(&[("m1_kept", "Delete"), ("m1_lost", "Delete")]);
    let known = Known {
        attached: &attached,
        had_vm: true,
    };
    let disposition = decide_unlisted(&spec(), &sample(), known);
    assert_eq!(
        names(&disposition),
        ["m1_OSDisk", "m1_lost"],
        "the spec keeps what it names; m1_gone was added later"
    );
    assert_eq!(disposition.keep_unseen, [id("m1_kept")]);
    let mut hostile = spec();
    hostile.data_disks[1].name_suffix = "x/../../y?z=".into();
    assert_eq!(names(&decide_unlisted(&hostile, &sample(), HAD_VM)), ["m1_OSDisk"]);
}

#[rstest]
#[case::as_it_was_made("gone", "Delete", &[])]
#[case::marked_before("kept", "Detach", &[])]
#[case::changed_since("kept", "Delete", &["m1_kept"])]
fn a_disk_that_is_kept_although_its_tag_says_otherwise_gets_another_tag(
    #[case] suffix: &str,
    #[case] tag: &str,
    #[case] expected: &[&str],
) {
    let tags: Tags = [(UID_TAG, "u1"), (MACHINE_TAG, "ns/m1"), (POLICY_TAG, tag)]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
    let listing = listing(&[&format!("m1_{suffix}")], Some(tags));
    let disposition = decide(&spec(), &sample(), &listing, HAD_VM);
    assert_eq!(disposition.mark_kept, expected);
}
