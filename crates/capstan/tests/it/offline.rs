//! The commands that need no cluster, run as a user runs them.

use capstan_core::disks::init::{KnownDisk, merge_ignition, parse_requests, resolve};
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn capstan(args: &[&str], input: &str) -> Output {
    feed(Command::new(env!("CARGO_BIN_EXE_capstan")).args(args), input)
}

fn feed(command: &mut Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn machine_set(disk: &str) -> String {
    format!(
        "apiVersion: machine.openshift.io/v1beta1
kind: MachineSet
metadata: {{name: workers, namespace: openshift-machine-api, labels: {{machine.openshift.io/cluster-api-cluster: ocp}}}}
spec:
  selector: {{matchLabels: {{set: workers}}}}
  template:
    metadata: {{labels: {{set: workers}}}}
    spec:
      providerSpec:
        value:
          kind: AzureMachineProviderSpec
          image: {{resourceID: /subscriptions/s/image}}
          osDisk: {{diskSizeGB: 128}}
          dataDisks: [{disk}]
"
    )
}

#[test]
fn check_accepts_a_machine_set_that_admission_would_fill_in() {
    let good = machine_set("{nameSuffix: etcd, lun: 0, diskSizeGB: 4, deletionPolicy: Detach}");
    let out = capstan(&["check", "-f", "-"], &good);
    assert_eq!(text(&out.stdout), "1 checked, 0 errors, 0 warnings\n");
    assert!(out.status.success());
}

#[test]
fn check_names_file_object_field_value_and_remedy_and_exits_1() {
    let out = capstan(
        &["check", "-f", "-"],
        &machine_set("{nameSuffix: etcd, lun: 64, diskSizeGB: 4, deletionPolicy: Keep}"),
    );
    let expected = "-: MachineSet openshift-machine-api/workers: providerSpec.dataDisks[0].lun: Invalid value: 64: must be greater than or equal to 0 and less than 64\n\
        -: MachineSet openshift-machine-api/workers: providerSpec.dataDisks[0].deletionPolicy: Invalid value: \"Keep\": must be either Delete or Detach\n\
        1 checked, 2 errors, 0 warnings\n";
    assert_eq!(text(&out.stdout), expected);
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn check_finds_storage_classes_whose_disks_no_machine_can_attach() {
    let class = |name: &str, provisioner: &str, parameters: &str| {
        format!(
            "---\napiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: {name}}}\nprovisioner: {provisioner}\n\
             parameters: {{{parameters}}}\n"
        )
    };
    let azure = "disk.csi.azure.com";
    let classes = class("good", azure, "skuName: UltraSSD_LRS, cachingMode: None")
        + &class("silent", azure, "skuName: UltraSSD_LRS")
        + &class(
            "cached",
            azure,
            "storageaccounttype: PremiumV2_LRS, cachingmode: ReadOnly",
        )
        + &class("other", "ebs.csi.aws.com", "skuName: UltraSSD_LRS");
    let out = capstan(&["check", "-f", "-"], &classes);
    let said = text(&out.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert!(
        lines[0].starts_with("-: StorageClass silent: parameters.cachingMode: Required value"),
        "{said}"
    );
    assert!(
        lines[1].starts_with("-: StorageClass cached: parameters.cachingMode: Invalid value: \"ReadOnly\""),
        "{said}"
    );
    assert_eq!(lines[2], "3 checked, 2 errors, 0 warnings");
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn check_finds_a_field_that_the_schema_does_not_know() {
    let pool = "apiVersion: infrastructure.cluster.x-k8s.io/v1beta1\nkind: AzureMachinePool\nmetadata: {name: p}\nspec: {locaton: eastus}\n";
    let out = text(&capstan(&["check", "-f", "-"], pool).stdout);
    assert!(
        out.contains("spec.locaton: Forbidden: unknown field") && out.contains("spec.location: Required value"),
        "{out}"
    );
}

#[test]
fn check_refuses_a_version_that_the_cluster_would_not_take_and_names_the_one_that_it_does() {
    let machine = machine_set("").replace("machine.openshift.io/v1beta1", "machine.openshift.io/v1");
    let vm =
        "apiVersion: infrastructure.cluster.x-k8s.io/v1alpha4\nkind: VSphereMachine\nmetadata: {name: m}\nspec: {}\n";
    let out = capstan(&["check", "-f", "-"], &format!("{machine}---\n{vm}"));
    let expected = "-: MachineSet openshift-machine-api/workers: apiVersion: Invalid value: \"machine.openshift.io/v1\": not served; write it as machine.openshift.io/v1beta1\n\
        -: VSphereMachine m: apiVersion: Invalid value: \"infrastructure.cluster.x-k8s.io/v1alpha4\": not served; write it as infrastructure.cluster.x-k8s.io/v1beta1 or \
        infrastructure.cluster.x-k8s.io/v1beta2\n\
        2 checked, 2 errors, 0 warnings\n";
    assert_eq!(text(&out.stdout), expected);
    assert_eq!(out.status.code(), Some(1));
}

#[test]
fn the_disks_of_a_vsphere_template_are_counted_and_its_controller_is_known() {
    let template = |more: &str, disks: usize| {
        let disks: Vec<String> = (0..disks).map(|n| format!("{{name: d{n}, sizeGiB: 1}}")).collect();
        format!(
            "apiVersion: infrastructure.cluster.x-k8s.io/v1beta2\nkind: VSphereMachineTemplate\nmetadata: {{name: t}}\n\
             spec: {{template: {{spec: {{template: t, network: {{devices: []}}, {more} dataDisks: [{}]}}}}}}\n",
            disks.join(", ")
        )
    };
    let mount = |manifest: &str, disk: &str, flags: &[&str]| {
        let mount = format!("{disk}:/var/lib/data:xfs");
        let args = [&["disks", "ignition", "-f", "-", "--mount", &mount], flags].concat();
        let out = capstan(&args, manifest);
        assert!(out.status.success(), "{}", text(&out.stderr));
        let is_guess = !flags.contains(&"--template-disks");
        assert_eq!(
            text(&out.stderr).contains("give the number with --template-disks"),
            is_guess
        );
        text(&out.stdout)
    };
    let path = |slot: &str, unit: u32| format!("/dev/disk/by-path/pci-0000:{slot}:00.0-scsi-0:0:{unit}:0");
    assert!(mount(&template("", 1), "d0", &[]).contains(&path("03", 1)));
    // Two more disks of the template have sizes of their own.
    assert!(mount(&template("additionalDisksGiB: [10, 20],", 1), "d0", &[]).contains(&path("03", 3)));
    assert!(mount(&template("", 1), "d0", &["--template-disks", "2"]).contains(&path("03", 2)));
    // A paravirtual controller of today takes 64 disks.
    assert!(mount(&template("", 20), "d19", &[]).contains(&path("03", 21)));
    let lsi = mount(&template("", 1), "d0", &["--template-controller", "lsilogic"]);
    assert!(lsi.contains("scsi-0:0:1:0") && !lsi.contains(&path("03", 1)), "{lsi}");
}

#[test]
fn the_device_of_a_disk_in_azure_follows_from_the_size_or_from_a_flag() {
    let device = |size: &str, flags: &[&str]| {
        let manifest = format!(
            "apiVersion: machine.openshift.io/v1beta1\nkind: Machine\nmetadata: {{name: m}}\nspec: {{providerSpec: {{value: \
             {{kind: AzureMachineProviderSpec, vmSize: {size}, dataDisks: [{{nameSuffix: etcd, lun: 3, diskSizeGB: 4}}]}}}}}}\n"
        );
        let args = [
            &["disks", "ignition", "-f", "-", "--mount", "etcd:/var/lib/etcd:xfs"],
            flags,
        ]
        .concat();
        let out = capstan(&args, &manifest);
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    };
    let (scsi, nvme) = ("/dev/disk/azure/scsi1/lun3", "/dev/disk/azure/data/by-lun/3");
    for size in ["Standard_D4s_v3", "Standard_M832ixs_v3", "Standard_B2s"] {
        assert!(device(size, &[]).contains(scsi), "{size}");
    }
    for size in ["Standard_D4ds_v6", "Standard_E8as_V7"] {
        assert!(device(size, &[]).contains(nvme), "{size}");
    }
    assert!(device("Standard_L8s_v4", &["--nvme"]).contains(nvme));
}

#[test]
fn disks_are_merged_into_a_user_data_secret() {
    let file = std::env::temp_dir().join(format!("capstan-offline-{}.yaml", std::process::id()));
    std::fs::write(
        &file,
        machine_set("{nameSuffix: etcd, lun: 3, diskSizeGB: 4, deletionPolicy: Detach}"),
    )
    .unwrap();
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: worker-user-data, uid: x}\nstringData: {userData: '{\"ignition\":{\"version\":\"3.2.0\"}}', disableTemplating: 'true'}\n";
    let path = file.to_str().unwrap();
    let args = [
        "disks",
        "ignition",
        "-f",
        path,
        "--mount",
        "etcd:/var/lib/etcd:xfs",
        "--secret",
        "-",
        "--name",
        "new",
    ];
    let out = capstan(&args, secret);
    let unknown = capstan(
        &["disks", "ignition", "-f", path, "--mount", "lun0:/var/lib/etcd:xfs"],
        "",
    );
    std::fs::remove_file(&file).unwrap();
    let merged: serde_json::Value = serde_saphyr::from_str(&text(&out.stdout)).unwrap();
    assert_eq!(
        (&merged["metadata"]["name"], merged["metadata"].get("uid")),
        (&"new".into(), None)
    );
    assert_eq!(merged["stringData"]["disableTemplating"], "true");
    assert!(
        merged["stringData"]["userData"]
            .as_str()
            .unwrap()
            .contains("/dev/disk/azure/scsi1/lun3")
    );
    assert_eq!(
        text(&unknown.stderr),
        "error: mount \"lun0:/var/lib/etcd:xfs\": no data disk \"lun0\"; the machine has lun3/etcd\n"
    );
}

#[test]
fn ignitions_own_validator_accepts_every_format_merged_into_every_specification() {
    let validator = capstan_testkit::parts::IGNITION_VALIDATE.path().unwrap();
    let disks = ["xfs", "ext4", "btrfs", "vfat"].map(|format| format!("{format}:/var/lib/{format}:{format}"));
    let known: Vec<_> = (0..5)
        .map(|lun| KnownDisk::azure(lun, ["xfs", "ext4", "btrfs", "vfat", "swap"][lun as usize]))
        .collect();
    let requests = parse_requests(&format!("{} swap:swap", disks.join(" "))).unwrap();
    let mounts = resolve(&requests, &known).unwrap();
    for minor in 0..=6 {
        let config = merge_ignition(&format!("{{\"ignition\":{{\"version\":\"3.{minor}.0\"}}}}"), &mounts).unwrap();
        let out = feed(Command::new(&validator).arg("-"), &config);
        assert!(
            out.status.success() && out.stdout.is_empty(),
            "3.{minor}.0: {}{}",
            text(&out.stdout),
            text(&out.stderr)
        );
    }
    let refused = feed(
        Command::new(&validator).arg("-"),
        "{\"ignition\":{\"version\":\"3.2.0\"},\"storage\":{\"disks\":[{\"device\":\"x\"}]}}",
    );
    assert!(!refused.status.success());
}

#[test]
fn crds_prints_the_definitions_of_the_controllers_that_are_asked_for() {
    let printed = |args: &[&str]| -> Vec<(String, String)> {
        let out = capstan(&[&["crds"], args].concat(), "");
        assert!(out.status.success(), "{}", text(&out.stderr));
        let objects: Vec<serde_json::Value> = serde_saphyr::from_multiple(&text(&out.stdout)).unwrap();
        let field = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let named = objects
            .iter()
            .map(|object| (field(&object["kind"]), field(&object["metadata"]["name"])));
        named.collect()
    };
    let all = printed(&[]);
    let mut parts = Vec::new();
    for (name, of) in [
        ("openshift", "machine.openshift.io"),
        ("azure-pools", "azure"),
        ("vsphere", "vsphere"),
    ] {
        let part = printed(&["--controllers", name]);
        assert!(
            !part.is_empty() && part.iter().all(|(_, object)| object.contains(of)),
            "{part:?}"
        );
        let policy = part.iter().any(|(kind, _)| kind == "ValidatingAdmissionPolicy");
        assert_eq!(policy, name == "vsphere", "{part:?}");
        parts.extend(part);
    }
    let sorted = |mut list: Vec<(String, String)>| {
        list.sort();
        list
    };
    assert_eq!(sorted(parts), sorted(all));
    let two = printed(&["--controllers", "openshift,azure-pools"]);
    assert!(two.iter().all(|(_, object)| !object.contains("vsphere")), "{two:?}");
}

#[test]
fn every_command_explains_itself() {
    let commands = [
        (&[][..], "Usage: capstan <COMMAND>"),
        (&["up"], "Ctrl-C stops everything"),
        (&["run"], "capstan run --kubeconfig"),
        (&["sim"], "Simulate a cloud"),
        (&["sim", "azure"], "Azure"),
        (&["crds"], "kubectl apply --server-side"),
        (&["check"], "Examples:"),
        (&["orphans"], "whose Machine is gone"),
        (&["disks"], "data disks"),
        (&["disks", "ignition"], "--mount"),
        (&["disks", "cloud-init"], "--mount"),
        (&["completions"], "source <(capstan completions bash)"),
        (&["version"], "Print the version"),
    ];
    for (command, taught) in commands {
        let out = capstan(&[command, &["--help"]].concat(), "");
        // Lines are as long as the terminal is wide.
        let said = text(&out.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(out.status.success() && said.contains(taught), "{command:?}: {said}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = capstan(&["completions", shell], "");
        assert!(
            out.status.success() && text(&out.stdout).contains("no-examples"),
            "{shell}"
        );
    }
    assert!(text(&capstan(&["version"], "").stdout).starts_with("capstan 0."));
    let unknown = capstan(&["run", "--controllers", "openstack"], "");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("possible values: openshift, azure-pools, vsphere"));
}

#[test]
fn crds_prints_what_is_in_deploy_and_does_not_mind_a_reader_that_leaves() {
    let printed = capstan_testkit::manifests::parse(&text(&capstan(&["crds"], "").stdout)).unwrap();
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    let mut kept = capstan_testkit::manifests::read_dir(&deploy).unwrap();
    let policy = include_str!("../../../../deploy/controllers/vsphere/template-policy.yaml");
    kept.extend(capstan_testkit::manifests::parse(policy).unwrap());
    let name = |object: &kube::api::DynamicObject| {
        let kind = object.types.as_ref().map(|types| types.kind.clone());
        (object.metadata.name.clone(), kind)
    };
    kept.sort_by_key(name);
    let mut sorted = printed;
    sorted.sort_by_key(name);
    assert_eq!(
        serde_json::to_value(&sorted).unwrap(),
        serde_json::to_value(&kept).unwrap()
    );

    let mut child = Command::new(env!("CARGO_BIN_EXE_capstan"))
        .arg("crds")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", text(&out.stderr));
}
