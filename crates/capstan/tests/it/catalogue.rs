//! `capstan check --azure` against a simulated Azure, as a user runs it.

use std::process::{Output, Stdio};

use capstan_sim::azure::{Azure, Config, Handle};
use tokio::io::AsyncWriteExt;

async fn check(sim: &Handle, manifests: &str, extra: &[(&str, &str)]) -> Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_capstan"));
    command
        .args(["check", "--azure", "-f", "-"])
        .env("AZURE_AUTHORITY_HOST", &sim.url)
        .env("AZURE_RESOURCE_MANAGER_ENDPOINT", &sim.url)
        .env("SSL_CERT_FILE", &sim.ca_file)
        .env("AZURE_SUBSCRIPTION_ID", &sim.subscription)
        .env("AZURE_TENANT_ID", &sim.tenant)
        .env("AZURE_CLIENT_ID", &sim.client_id)
        .env("AZURE_CLIENT_SECRET", &sim.client_secret)
        .envs(extra.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    // Whoever lacks a setting says so without reading.
    let _ = child.stdin.take().unwrap().write_all(manifests.as_bytes()).await;
    child.wait_with_output().await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn machine(name: &str, more: &str) -> String {
    format!(
        "---
apiVersion: machine.openshift.io/v1beta1
kind: Machine
metadata: {{name: {name}, labels: {{machine.openshift.io/cluster-api-cluster: ocp}}}}
spec:
  providerSpec:
    value:
      kind: AzureMachineProviderSpec
      image: {{resourceID: /subscriptions/s/image}}
      osDisk: {{diskSizeGB: 128}}
{more}
"
    )
}

const ULTRA: &str = "      dataDisks:
      - {nameSuffix: d, lun: 0, diskSizeGB: 4, deletionPolicy: Delete, managedDisk: {storageAccountType: UltraSSD_LRS}}";

#[tokio::test(flavor = "multi_thread")]
async fn check_asks_azure_what_only_azure_knows_in_the_controllers_words() {
    let sim = Azure::start(Config::instant()).await.unwrap();
    let manifests = [
        machine("good", &format!("      location: eastus\n      zone: '1'\n{ULTRA}")),
        machine("zoneless", &format!("      location: eastus\n{ULTRA}")),
        machine("sizeless", "      location: eastus\n      vmSize: Standard_Nope"),
        machine("elsewhere", ""),
    ];
    let pool = "---
apiVersion: infrastructure.cluster.x-k8s.io/v1beta1
kind: AzureMachinePool
metadata: {name: pool, namespace: default}
spec:
  location: eastus
  template:
    vmSize: Standard_D4s_v3
    osDisk: {osType: Linux, diskSizeGB: 30, managedDisk: {storageAccountType: Premium_LRS}}
    dataDisks: [{nameSuffix: d, diskSizeGB: 4, lun: 0, managedDisk: {storageAccountType: UltraSSD_LRS}}]
";
    let out = check(&sim, &(manifests.concat() + pool), &[]).await;
    let said = text(&out.stdout);
    let expected = "\
-: Machine zoneless: vm size Standard_D4s_V3 does not support ultra disks in location eastus. select a different vm size or disable ultra disks
-: Machine sizeless: vm size Standard_Nope is not available in location eastus. select a different vm size
-: Machine elsewhere: warning: providerSpec.location is empty: the credentials secret names the location, so the size is not checked
-: AzureMachinePool default/pool: vm size Standard_D4s_v3 does not support ultra disks in location eastus. select a different vm size or disable ultra disks
5 checked, 3 errors, 1 warnings
";
    assert_eq!(said, expected, "{}", text(&out.stderr));
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(sim.sign_ins(), 1);

    let out = check(&sim, &manifests[0], &[]).await;
    assert!(out.status.success(), "{}", text(&out.stdout));
}

/// A MachineSet of another platform.
fn foreign(kind: &str, more: &str) -> String {
    format!(
        "---
apiVersion: machine.openshift.io/v1beta1
kind: MachineSet
metadata: {{name: workers, namespace: openshift-machine-api}}
spec:
  selector: {{matchLabels: {{set: workers}}}}
  template:
    metadata: {{labels: {{set: workers}}}}
    spec: {{providerSpec: {{value: {{apiVersion: machine.openshift.io/v1beta1, kind: {kind}, {more}}}}}}}
"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn check_passes_the_machines_of_other_platforms_by() {
    let sim = Azure::start(Config::instant()).await.unwrap();
    let aws = "instanceType: m5.large, ami: {id: ami-1}, placement: {region: us-east-1}, subnet: {id: subnet-1}, \
        blockDevices: [{ebs: {volumeSize: 120}}], userDataSecret: {name: u}, credentialsSecret: {name: c}";
    let vsphere = "template: rhcos, numCPUs: 4, memoryMiB: 8192, diskGiB: 120, workspace: {server: vcenter}, \
        network: {devices: [{networkName: n}]}, userDataSecret: {name: u}, credentialsSecret: {name: c}";
    let manifests = foreign("AWSMachineProviderConfig", aws) + &foreign("VSphereMachineProviderSpec", vsphere);
    let out = check(&sim, &manifests, &[]).await;
    assert_eq!(
        text(&out.stdout),
        "2 checked, 0 errors, 0 warnings\n",
        "{}",
        text(&out.stderr)
    );
    assert!(out.status.success());
    assert!(sim.arm_requests().is_empty(), "Azure is not asked about them");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_says_what_it_needs_to_ask_azure() {
    let sim = Azure::start(Config::instant()).await.unwrap();
    let out = check(&sim, &machine("m", ""), &[("AZURE_SUBSCRIPTION_ID", "")]).await;
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(
        said.contains("AZURE_SUBSCRIPTION_ID") && said.contains("AZURE_CLIENT_SECRET"),
        "{said}"
    );
    let out = check(
        &sim,
        &machine("m", "      location: eastus"),
        &[("AZURE_CLIENT_SECRET", "wrong")],
    )
    .await;
    assert_eq!(out.status.code(), Some(1));
    assert!(!text(&out.stderr).contains("wrong"), "no secret is printed");
}
