//! Scale sets, over the wire.

use crate::support;

use capstan_sim::azure::{Action, Config, Fault};
use reqwest::Method;
use serde_json::{Value, json};
use support::Client;

const SET: &str = "Microsoft.Compute/virtualMachineScaleSets";

fn outdated(instances: &[Value]) -> usize {
    instances
        .iter()
        .filter(|instance| instance["properties"]["latestModelApplied"] == false)
        .count()
}

#[tokio::test]
async fn a_model_change_reaches_instances_only_by_manual_upgrade_or_replacement() {
    let azure = Client::start(Config::quick()).await;
    let set = azure.id(SET, "pool");
    let (status, end) = azure.run(Method::PUT, &set, azure.set_body(3, json!({}))).await;
    assert_eq!((status, &end["status"]), (201, &json!("Succeeded")));
    let list = azure.get(&format!("{set}/virtualMachines?$expand=instanceView")).await;
    let instances = list["value"].as_array().unwrap().clone();
    assert_eq!(instances.len(), 3);
    let mut zones: Vec<&str> = instances.iter().map(|i| i["zones"][0].as_str().unwrap()).collect();
    zones.sort_unstable();
    assert_eq!(zones, ["1", "2", "3"]);
    assert_eq!(
        instances[0]["properties"]["instanceView"]["statuses"][1]["code"],
        "PowerState/running"
    );

    let image = json!({ "properties": { "virtualMachineProfile": { "storageProfile": { "imageReference": { "id": "/images/2" } } } } });
    let (status, _) = azure.run(Method::PATCH, &set, image).await;
    assert_eq!(status, 200);
    assert_eq!(outdated(&azure.sim.instances(&set)), 3);
    assert!(azure.sim.custom_data(&set).is_some());

    let first = instances[0]["instanceId"].as_str().unwrap();
    let (status, _) = azure
        .run(
            Method::POST,
            &format!("{set}/manualupgrade"),
            json!({ "instanceIds": [first] }),
        )
        .await;
    assert_eq!(status, 202);
    assert_eq!(outdated(&azure.sim.instances(&set)), 2);

    let old: Vec<&str> = instances[1..]
        .iter()
        .map(|i| i["instanceId"].as_str().unwrap())
        .collect();
    azure
        .run(Method::POST, &format!("{set}/delete"), json!({ "instanceIds": old }))
        .await;
    assert_eq!(azure.get(&set).await["sku"]["capacity"], 1);
    azure
        .run(
            Method::PUT,
            &set,
            json!({ "location": "eastus", "sku": { "capacity": 4 } }),
        )
        .await;
    let now = azure.sim.instances(&set);
    assert_eq!((now.len(), outdated(&now)), (4, 0));

    let (status, refused) = azure
        .run(
            Method::POST,
            &format!("{set}/delete"),
            json!({ "instanceIds": ["9999"] }),
        )
        .await;
    assert_eq!((status, &refused["error"]["code"]), (400, &json!("InvalidParameter")));
    let (status, _) = azure.run(Method::DELETE, &set, Value::Null).await;
    assert_eq!(status, 202);
    assert_eq!(azure.sim.get(&set), None);
}

#[tokio::test]
async fn lists_come_in_pages() {
    let azure = Client::start(Config {
        page_size: 2,
        ..Config::instant()
    })
    .await;
    let set = azure.id(SET, "pool");
    azure.run(Method::PUT, &set, azure.set_body(5, json!({}))).await;
    let mut url = format!("{set}/virtualMachines?$expand=instanceView");
    let (mut seen, mut pages) = (0, 0);
    loop {
        let page = azure.get(&url).await;
        seen += page["value"].as_array().unwrap().len();
        pages += 1;
        assert!(page["value"][0]["properties"]["instanceView"].is_object());
        match page["nextLink"].as_str() {
            Some(next) => url = next.to_owned(),
            None => break,
        }
    }
    assert_eq!((seen, pages), (5, 3));
}

#[tokio::test]
async fn a_full_zone_and_a_failed_instance_show() {
    let azure = Client::start(Config::instant()).await;
    let set = azure.id(SET, "pool");
    let full = azure
        .sim
        .fault(Fault::new(Action::NoCapacity {
            zone: Some("2".into()),
            vm_size: None,
            code: None,
        }))
        .unwrap();
    let (_, end) = azure.run(Method::PUT, &set, azure.set_body(3, json!({}))).await;
    assert_eq!(end["error"]["code"], "ZonalAllocationFailed", "{end}");
    assert_eq!(azure.get(&set).await["properties"]["provisioningState"], "Failed");
    azure.sim.remove_fault(full);
    let before = azure.sim.instances(&set).len();
    let action = Action::FailProvisioning {
        code: "VMExtensionProvisioningError".into(),
        message: "no".into(),
    };
    azure
        .sim
        .fault(Fault::new(action).path("pool/virtualMachines/").times(1))
        .unwrap();
    azure
        .run(Method::PUT, &set, json!({ "sku": { "capacity": before + 2 } }))
        .await;
    let states: Vec<Value> = azure
        .sim
        .instances(&set)
        .iter()
        .map(|i| i["properties"]["provisioningState"].clone())
        .collect();
    assert_eq!(
        states.iter().filter(|state| *state == "Failed").count(),
        1,
        "{states:?}"
    );
}

#[tokio::test]
async fn spot_instances_are_evicted_by_their_policy() {
    let azure = Client::start(Config::instant()).await;
    let set = azure.id(SET, "pool");
    let spot = json!({ "properties": { "virtualMachineProfile": { "priority": "Spot", "evictionPolicy": "Delete" } } });
    azure.run(Method::PUT, &set, azure.set_body(2, spot)).await;
    let id = azure.sim.instances(&set)[0]["id"].as_str().unwrap().to_owned();
    let (status, _) = azure
        .run(Method::POST, &format!("{id}/simulateEviction"), Value::Null)
        .await;
    assert_eq!(status, 204);
    assert_eq!(azure.sim.instances(&set).len(), 1);
    assert_eq!(azure.get(&set).await["sku"]["capacity"], 1);
}

#[tokio::test]
async fn flexible_instances_are_virtual_machines() {
    let azure = Client::start(Config::instant()).await;
    let set = azure.id(SET, "flex");
    let mode =
        json!({ "properties": { "orchestrationMode": "Flexible", "overprovision": null, "upgradePolicy": null } });
    let (status, end) = azure.run(Method::PUT, &set, azure.set_body(2, mode)).await;
    assert_eq!(status, 201, "{end}");
    assert_eq!(azure.sim.ids("virtualMachines").len(), 2);
    assert_eq!(azure.sim.ids("networkInterfaces").len(), 2);
    let list = azure.get(&format!("{set}/virtualMachines")).await;
    let name = list["value"][0]["instanceId"].as_str().unwrap().to_owned();
    azure
        .run(Method::POST, &format!("{set}/delete"), json!({ "instanceIds": [name] }))
        .await;
    assert_eq!(azure.sim.ids("virtualMachines").len(), 1);
    assert_eq!(azure.sim.ids("networkInterfaces").len(), 1);
    assert_eq!(azure.get(&set).await["sku"]["capacity"], 1);
}
