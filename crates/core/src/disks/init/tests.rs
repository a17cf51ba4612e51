use super::*;
use proptest::prelude::*;
use rstest::rstest;
use serde_json::Value;

fn disks() -> Vec<KnownDisk> {
    vec![KnownDisk::azure(0, "etcd"), KnownDisk::azure(5, "images")]
}

fn mounts(text: &str) -> Vec<Mount> {
    resolve(&parse_requests(text).unwrap(), &disks()).unwrap()
}

#[rstest]
#[case("/var/lib/etcd", "var-lib-etcd")]
#[case("/", "-")]
#[case("//var//lib/", "var-lib")]
#[case("/dev/disk/by-partlabel/lun0p1", "dev-disk-by\\x2dpartlabel-lun0p1")]
#[case("/.hidden/a b", "\\x2ehidden-a\\x20b")]
#[case("/ü", "\\xc3\\xbc")]
fn paths_are_escaped_as_systemd_does(#[case] path: &str, #[case] expected: &str) {
    assert_eq!(escape_path(path), expected);
}

#[test]
fn options_may_hold_commas() {
    let requests = parse_requests("lun0:/a:xfs:noatime,nodev,lun5:/b:ext4").unwrap();
    assert_eq!(requests[0].options.as_deref(), Some("noatime,nodev"));
    assert_eq!((requests.len(), requests[1].path.as_deref()), (2, Some("/b")));
}

#[rstest]
#[case("lun0", "write DISK:PATH:FORMAT")]
#[case(":/var:xfs", "a disk is missing")]
#[case("lun0:var:xfs", "must be absolute")]
#[case("lun0:/:xfs", "cannot be mounted at /")]
#[case("lun0:/a/../b:xfs", "must not contain")]
#[case("lun0:/a", "a format is missing")]
#[case("lun0:/a:zfs", "is not one of xfs, ext4, btrfs, vfat")]
fn a_bad_mount_is_refused_with_the_reason(#[case] text: &str, #[case] reason: &str) {
    let error = parse_requests(text).unwrap_err().to_string();
    assert!(error.contains(reason) && error.contains(text), "{error}");
}

#[test]
fn an_unknown_disk_is_refused_with_the_known_ones() {
    let error = resolve(&parse_requests("lun7:/a:xfs").unwrap(), &disks()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mount \"lun7:/a:xfs\": no data disk \"lun7\"; the machine has lun0/etcd, lun5/images"
    );
}

#[rstest]
#[case("lun0:/a:xfs,etcd:/b:xfs", "disk etcd")]
#[case("lun0:/a:xfs,lun5:/a/:xfs", "path /a")]
fn a_disk_or_a_path_used_twice_is_refused(#[case] text: &str, #[case] what: &str) {
    let error = resolve(&parse_requests(text).unwrap(), &disks())
        .unwrap_err()
        .to_string();
    assert!(error.ends_with(what), "{error}");
}

#[test]
fn ignition_is_made_from_nothing() {
    insta::assert_snapshot!(merge("", &mounts("lun0:/var/lib/etcd:xfs lun5:swap")).unwrap());
}

#[rstest]
#[case::another(r#"[{"label": "boot", "number": 1, "sizeMiB": 512}]"#, &[("boot", 1, 512), ("lun0p1", 2, 0)])]
#[case::gap(r#"[{"label": "a", "number": 1, "sizeMiB": 8}, {"label": "b", "number": 3, "sizeMiB": 8}]"#,
    &[("a", 1, 8), ("b", 3, 8), ("lun0p1", 2, 0)])]
#[case::its_own(r#"[{"label": "lun0p1", "number": 4, "sizeMiB": 2048}]"#, &[("lun0p1", 4, 2048)])]
fn partitions_that_are_described_keep_their_numbers_and_sizes(
    #[case] partitions: &str,
    #[case] expected: &[(&str, u64, u64)],
) {
    let before = format!(
        r#"{{"ignition": {{"version": "3.2.0"}}, "storage": {{"disks": [
            {{"device": "/dev/disk/azure/scsi1/lun0", "partitions": {partitions}}}]}}}}"#
    );
    let merged = merge_ignition(&before, &mounts("lun0:/data:xfs")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&merged).unwrap();
    let found = config["storage"]["disks"][0]["partitions"].as_array().unwrap();
    let found: Vec<_> = found
        .iter()
        .map(|part| {
            (
                part["label"].as_str().unwrap(),
                part["number"].as_u64().unwrap(),
                part["sizeMiB"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(found, expected);
    assert_eq!(merge_ignition(&merged, &mounts("lun0:/data:xfs")).unwrap(), merged);
}

#[test]
fn an_existing_ignition_config_keeps_everything_and_its_version() {
    let pointer = r#"{"ignition":{"config":{"merge":[{"source":"https://api-int:22623/config/worker"}]},"version":"3.1.0"},
        "passwd":{"users":[{"name":"core"}]},"systemd":{"units":[{"name":"a.service","enabled":false}]}}"#;
    let merged: Value =
        serde_json::from_str(&merge(pointer, &mounts("etcd:/var/lib/etcd:ext4:noatime")).unwrap()).unwrap();
    assert_eq!(merged["ignition"]["version"], "3.1.0");
    assert_eq!(
        merged["ignition"]["config"]["merge"][0]["source"],
        "https://api-int:22623/config/worker"
    );
    assert_eq!(merged["passwd"]["users"][0]["name"], "core");
    assert_eq!(merged["systemd"]["units"][0]["name"], "a.service");
    assert_eq!(merged["systemd"]["units"][1]["name"], "var-lib-etcd.mount");
    assert_eq!(merged["storage"]["disks"][0]["device"], "/dev/disk/azure/scsi1/lun0");
    assert!(
        merged["systemd"]["units"][1]["contents"]
            .as_str()
            .unwrap()
            .contains("Options=noatime\n")
    );
}

#[rstest]
#[case(r#"{"ignition":{"version":"2.2.0"}}"#, "specification 3.x")]
#[case(r#"{"storage":[]}"#, "specification 3.x")]
#[case("[]", "neither an Ignition config")]
#[case("{", "not JSON")]
#[case("Content-Type: multipart/mixed", "neither an Ignition config")]
#[case("#!/bin/sh\necho", "#cloud-config")]
fn user_data_that_cannot_take_mounts_is_refused(#[case] data: &str, #[case] reason: &str) {
    let error = merge(data, &mounts("lun0:/a:xfs")).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
}

#[test]
fn cloud_config_keeps_its_header_and_its_content() {
    let data = "## template: jinja\n#cloud-config\n\nhostname: \"{{ ds.meta_data.hostname }}\"\nmounts:\n- [tmpfs, /tmp, tmpfs]\n";
    insta::assert_snapshot!(merge(data, &mounts("lun0:/var/lib/etcd:xfs lun5:swap")).unwrap());
}

proptest! {
    #[test]
    fn merging_twice_is_merging_once(luns in proptest::collection::btree_set(0i32..64, 1..5), cloud_init: bool) {
        let disks: Vec<_> = luns.iter().map(|lun| KnownDisk::azure(*lun, "")).collect();
        let text: Vec<_> = luns.iter().map(|lun| format!("lun{lun}:/mnt/d{lun}:xfs")).collect();
        let mounts = resolve(&parse_requests(&text.join(",")).unwrap(), &disks).unwrap();
        let start = if cloud_init { "#cloud-config\npackages: [a]\n" } else { "" };
        let once = merge(start, &mounts).unwrap();
        prop_assert_eq!(merge(&once, &mounts).unwrap(), once);
    }

    #[test]
    fn no_input_makes_the_parsers_panic(data in ".{0,200}", text in ".{0,40}") {
        let _ = merge(&data, &mounts("lun0:/a:xfs"));
        let _ = parse_requests(&text);
        let _ = escape_path(&text);
    }
}
