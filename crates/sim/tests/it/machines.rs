//! Virtual machines, disks and network interfaces, over the wire.

use crate::support;

use capstan_sim::azure::{Action, Config, Fault, Span};
use reqwest::Method;
use serde_json::{Value, json};
use support::Client;

const VM: &str = "Microsoft.Compute/virtualMachines";
const DISK: &str = "Microsoft.Compute/disks";

#[tokio::test]
async fn a_vm_is_created_followed_and_deleted_with_what_is_marked_so() {
    let azure = Client::start(Config::quick()).await;
    let nic = azure.make_nic("nic").await;
    let vm = azure.id(VM, "vm");
    let disks = json!({ "properties": { "storageProfile": { "dataDisks": [
        { "name": "keep", "lun": 0, "createOption": "Empty", "diskSizeGB": 10, "deleteOption": "Detach" },
        { "name": "drop", "lun": 1, "createOption": "Empty", "diskSizeGB": 10, "deleteOption": "Delete" }] } } });
    let (status, end) = azure.run(Method::PUT, &vm, azure.vm_body(&nic, disks)).await;
    assert_eq!((status, &end["status"]), (201, &json!("Succeeded")));

    let body = azure.get(&format!("{vm}?$expand=instanceView")).await;
    assert_eq!(body["properties"]["provisioningState"], "Succeeded");
    assert_eq!(
        body["properties"]["instanceView"]["statuses"][1]["code"],
        "PowerState/running"
    );
    assert_eq!(body["properties"]["osProfile"].get("customData"), None);
    assert_eq!(azure.sim.custom_data(&vm).as_deref(), Some("c2VjcmV0"));
    let disk = azure.get(&azure.id(DISK, "keep")).await;
    assert_eq!(disk["managedBy"], json!(vm));
    assert_eq!(disk["zones"], json!(["1"]));

    let (status, refused) = azure.run(Method::DELETE, &nic, Value::Null).await;
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("NicInUse")));
    let (status, refused) = azure.run(Method::DELETE, &azure.id(DISK, "keep"), Value::Null).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (409, &json!("OperationNotAllowed"))
    );

    let (status, _) = azure.run(Method::DELETE, &vm, Value::Null).await;
    assert_eq!(status, 202);
    let left = azure.sim.ids("disks");
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(left[0].ends_with("/keep"));
    assert_eq!(azure.get(&left[0]).await["properties"]["diskState"], "Unattached");
    let (status, _) = azure.run(Method::DELETE, &nic, Value::Null).await;
    assert_eq!(status, 200);
    let (status, _) = azure.run(Method::DELETE, &vm, Value::Null).await;
    assert_eq!(status, 204);
}

#[tokio::test]
async fn an_ultra_disk_without_the_capability_is_refused_and_leaves_nothing() {
    let azure = Client::start(Config::instant()).await;
    let nic = azure.make_nic("nic").await;
    let disks = json!({ "properties": { "storageProfile": { "dataDisks": [{ "name": "u", "lun": 0, "createOption": "Empty",
        "diskSizeGB": 10, "managedDisk": { "storageAccountType": "UltraSSD_LRS" } }] } } });
    let (status, refused) = azure
        .run(Method::PUT, &azure.id(VM, "vm"), azure.vm_body(&nic, disks))
        .await;
    assert_eq!(status, 400);
    assert_eq!(
        refused["error"],
        json!({ "code": "InvalidParameter", "target": "managedDisk.storageAccountType",
            "message": "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set." })
    );
    assert!(azure.sim.ids("disks").is_empty() && azure.sim.ids("virtualMachines").is_empty());
}

#[tokio::test]
async fn a_disk_attaches_to_a_running_vm_and_comes_off_again() {
    let azure = Client::start(Config::instant()).await;
    let nic = azure.make_nic("nic").await;
    let vm = azure.id(VM, "vm");
    azure.run(Method::PUT, &vm, azure.vm_body(&nic, json!({}))).await;
    let disk = azure.id(DISK, "volume");
    let body = json!({ "location": "eastus", "zones": ["1"], "sku": { "name": "PremiumV2_LRS" },
        "properties": { "diskSizeGB": 100, "creationData": { "createOption": "Empty" } } });
    let (status, _) = azure.run(Method::PUT, &disk, body).await;
    assert_eq!(status, 200);
    let attach = |disks: Value| json!({ "properties": { "storageProfile": { "dataDisks": disks } } });
    let one = json!([{ "lun": 3, "createOption": "Attach", "managedDisk": { "id": disk } }]);
    let (status, _) = azure.run(Method::PATCH, &vm, attach(one)).await;
    assert_eq!(status, 200);
    assert_eq!(azure.get(&disk).await["properties"]["diskState"], "Attached");
    azure.run(Method::PATCH, &vm, attach(json!([]))).await;
    assert_eq!(azure.get(&disk).await["properties"]["diskState"], "Unattached");
}

#[tokio::test]
async fn faults_strike_as_told() {
    let azure = Client::start(Config::quick()).await;
    let nic = azure.make_nic("nic").await;
    let vm = azure.id(VM, "vm");
    azure.sim.fault(Fault::throttle(7).policy("PutVM").times(1)).unwrap();
    let answer = azure.send(Method::PUT, &vm, azure.vm_body(&nic, json!({})), &[]).await;
    assert_eq!(
        (
            answer.status().as_u16(),
            answer.headers()["retry-after"].to_str().unwrap()
        ),
        (429, "7")
    );

    azure
        .sim
        .fault(Fault::new(Action::Drop).policy("PutVM").times(1))
        .unwrap();
    let url = format!("{}{vm}?api-version=1", azure.sim.url);
    assert!(azure.http.put(url).json(&json!({})).send().await.is_err());

    let action = Action::FailProvisioning {
        code: "OSProvisioningTimedOut".into(),
        message: "late".into(),
    };
    azure.sim.fault(Fault::new(action).path("/vm$").times(1)).unwrap();
    let (_, end) = azure.run(Method::PUT, &vm, azure.vm_body(&nic, json!({}))).await;
    assert_eq!(
        (&end["status"], &end["error"]["code"]),
        (&json!("Failed"), &json!("OSProvisioningTimedOut"))
    );
    assert_eq!(azure.get(&vm).await["properties"]["provisioningState"], "Failed");

    azure
        .sim
        .fault(Fault::new(Action::Stall).policy("DeleteVM").times(1))
        .unwrap();
    let answer = azure.send(Method::DELETE, &vm, Value::Null, &[]).await;
    let url = answer.headers()["azure-asyncoperation"].to_str().unwrap().to_owned();
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert_eq!(azure.get(&url).await["status"], "InProgress");
    assert_eq!(azure.sim.release(), 1);
    assert_eq!(azure.get(&url).await["status"], "Succeeded");
    assert_eq!(azure.sim.get(&vm), None);
    assert_eq!(azure.sim.sign_ins(), 1);
    let puts = azure
        .sim
        .requests()
        .iter()
        .filter(|request| request.policy == "PutVM")
        .count();
    assert_eq!(puts, 3);
}

#[tokio::test]
async fn an_etag_that_is_out_of_date_is_refused() {
    let azure = Client::start(Config::instant()).await;
    let nic = azure.make_nic("nic").await;
    let body = azure.get(&nic).await;
    let etag = body["etag"].as_str().unwrap().to_owned();
    let first = azure
        .send(Method::PUT, &nic, body.clone(), &[("if-match", &etag)])
        .await;
    assert_eq!(first.status(), 200);
    let second = azure.send(Method::PUT, &nic, body, &[("if-match", &etag)]).await;
    assert_eq!(second.status(), 412);
    let third = azure
        .send(
            Method::PUT,
            &nic,
            json!({ "location": "eastus" }),
            &[("if-none-match", "*")],
        )
        .await;
    assert_eq!(third.status(), 412);
}

#[tokio::test]
async fn a_put_sent_again_while_the_vm_is_made_makes_no_second_one_and_no_haste() {
    let mut config = Config::quick();
    config.times.vm_create = Span::millis(60_000);
    let azure = Client::start(config).await;
    let nic = azure.make_nic("nic").await;
    let vm = azure.id(VM, "vm");
    let body = azure.vm_body(&nic, json!({}));
    let first = azure.send(Method::PUT, &vm, body.clone(), &[]).await;
    let again = azure.send(Method::PUT, &vm, body, &[]).await;
    assert_eq!((first.status().as_u16(), again.status().as_u16()), (201, 200));
    let operation = |answer: &reqwest::Response| answer.headers()["azure-asyncoperation"].to_str().unwrap().to_owned();
    assert_eq!(operation(&first), operation(&again));
    assert_eq!(
        again.json::<Value>().await.unwrap()["properties"]["provisioningState"],
        "Creating"
    );
}

#[tokio::test]
async fn a_namespace_must_be_registered_and_a_group_must_exist() {
    let config = Config {
        unregistered: vec!["Microsoft.Network".into()],
        ..Config::instant()
    };
    let azure = Client::start(config).await;
    let ip = azure.id("Microsoft.Network/publicIPAddresses", "ip");
    let body = json!({ "location": "eastus" });
    let (status, refused) = azure.run(Method::PUT, &ip, body.clone()).await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (409, &json!("MissingSubscriptionRegistration"))
    );
    let register = format!(
        "/subscriptions/{}/providers/Microsoft.Network/register",
        azure.sim.subscription
    );
    azure.run(Method::POST, &register, Value::Null).await;
    let (status, _) = azure.run(Method::PUT, &ip, body.clone()).await;
    assert_eq!(status, 201);
    let (status, refused) = azure
        .run(Method::PUT, &ip.replace("/capstan/", "/nowhere/"), body)
        .await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (404, &json!("ResourceGroupNotFound"))
    );
}

#[tokio::test]
async fn a_vm_can_be_told_to_leave_its_disks_behind_and_a_quota_is_kept() {
    let azure = Client::start(Config {
        regional_cores: 4,
        ..Config::instant()
    })
    .await;
    let nic = azure.make_nic("nic").await;
    let vm = azure.id(VM, "vm");
    azure.run(Method::PUT, &vm, azure.vm_body(&nic, json!({}))).await;
    let other = azure.make_nic("other").await;
    let more = json!({ "properties": { "storageProfile": { "osDisk": { "name": "other" } } } });
    let (status, refused) = azure
        .run(Method::PUT, &azure.id(VM, "other"), azure.vm_body(&other, more))
        .await;
    assert_eq!(
        (status, &refused["error"]["code"]),
        (409, &json!("OperationNotAllowed"))
    );
    assert!(
        refused["error"]["message"]
            .as_str()
            .unwrap()
            .contains("Total Regional Cores quota")
    );
    azure
        .sim
        .fault(Fault::new(Action::KeepDisks).policy("DeleteVM"))
        .unwrap();
    azure.run(Method::DELETE, &vm, Value::Null).await;
    assert_eq!(azure.sim.ids("disks").len(), 1);
}
