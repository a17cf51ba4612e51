//! `capstan check` says before what the API server says then: every case of the tests of admission, offline.

#[path = "../../../api/tests/it/admission/azure.rs"]
mod azure;
#[path = "../../../api/tests/it/admission/case.rs"]
mod case;
#[path = "../../../api/tests/it/admission/openshift.rs"]
mod openshift;
#[path = "../../../api/tests/it/support/mod.rs"]
#[allow(dead_code, reason = "the tests of capstan-api use the rest")]
mod support;
#[path = "../../../api/tests/it/admission/vsphere.rs"]
mod vsphere;

use case::{CRDS, Case};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

/// A change is for the API server to judge: a file does not say what was there before.
fn cases() -> Vec<Case> {
    let all = [openshift::cases(), azure::cases(), vsphere::cases()];
    let created = all.into_iter().flatten().filter(|case| case.before.is_none());
    created.collect()
}

fn object(index: usize, case: &Case) -> Value {
    let crd = CRDS.iter().find(|crd| crd.spec.names.kind == case.kind).unwrap();
    let group = match case.kind.starts_with("VSphere") {
        true => capstan_api::vsphere::VSphereMachine::GROUP,
        false => &crd.spec.group,
    };
    json!({
        "apiVersion": format!("{group}/{}", crd.spec.versions[0].name),
        "kind": case.kind,
        "metadata": { "name": case.name.unwrap_or("case"), "namespace": format!("case-{index}") },
        "spec": case.spec,
    })
}

/// What is said of each object of a list.
fn check(objects: &[Value]) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_capstan"))
        .args(["check", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    child
        .stdin
        .take()
        .unwrap()
        .write_all(list.to_string().as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn what_the_api_server_refuses_is_found_before_and_what_it_takes_is_not_complained_about() {
    let cases = cases();
    let objects: Vec<Value> = cases
        .iter()
        .enumerate()
        .map(|(index, case)| object(index, case))
        .collect();
    let said = check(&objects);
    let mut faults = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let name = format!(" case-{index}/{}: ", case.name.unwrap_or("case"));
        let errors: Vec<&str> = said
            .lines()
            .filter(|line| line.contains(&name) && !line.contains(": warning: "))
            .collect();
        // Machines have more to them than the API server looks at.
        let more = case.kind.starts_with("Machine");
        match (case.refusal.is_empty(), errors.as_slice()) {
            (false, []) => faults.push(format!("{} is not refused with {:?}", case.kind, case.refusal)),
            (true, [error, ..]) if !more => faults.push(format!("is taken by the API server: {error}")),
            _ => {}
        }
    }
    assert!(
        faults.is_empty(),
        "{} of {} cases:\n{}",
        faults.len(),
        cases.len(),
        faults.join("\n")
    );
}

#[test]
fn the_templates_of_the_replaced_controllers_have_no_errors() {
    let (azure, vsphere) = (support::templates::azure(), support::templates::vsphere());
    let pools = azure
        .into_iter()
        .filter(|(_, text)| text.contains("kind: AzureMachinePool\n"));
    for (name, text) in pools.chain(vsphere) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_capstan"))
            .args(["check", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        let printed = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{name}:\n{printed}");
    }
}
