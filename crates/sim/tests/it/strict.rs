//! Where Azure is stricter than a client hopes.

use std::time::Duration;

use capstan_sim::azure::{Action, Azure, Config, Fault, Handle, Span, Strict, Times};
use http::Method;
use serde_json::{Value, json};

fn id(sim: &Handle, kind: &str, name: &str) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/capstan/providers/{kind}/{name}",
        sim.subscription
    )
}

fn set_id(sim: &Handle) -> String {
    id(sim, "Microsoft.Compute/virtualMachineScaleSets", "pool")
}

fn set_body(sim: &Handle, capacity: u64, subnet: &str) -> Value {
    let subnet = id(sim, "Microsoft.Network/virtualNetworks", "capstan-vnet") + "/subnets/" + subnet;
    json!({ "location": "eastus", "sku": { "name": "Standard_D2s_v3", "capacity": capacity },
        "properties": { "overprovision": false, "upgradePolicy": { "mode": "Manual" }, "virtualMachineProfile": {
            "osProfile": { "computerNamePrefix": "pool", "adminUsername": "core", "customData": "b2xk" },
            "storageProfile": { "imageReference": { "id": "/images/1" }, "osDisk": { "createOption": "FromImage" } },
            "networkProfile": { "networkInterfaceConfigurations": [{ "name": "nic", "properties": { "primary": true,
                "ipConfigurations": [{ "name": "ip", "properties": { "subnet": { "id": subnet } } }] } }] } } } })
}

async fn start(config: Config) -> Handle {
    Azure::start(config).await.unwrap()
}

fn strict() -> Config {
    Config {
        strict: Strict::ALL,
        ..Config::instant()
    }
}

fn profile(profile: Value) -> Value {
    json!({ "properties": { "virtualMachineProfile": profile } })
}

#[tokio::test]
async fn instances_are_spelt_with_the_group_in_upper_case() {
    let sim = start(strict()).await;
    let set = set_id(&sim);
    sim.direct(Method::PUT, &set, set_body(&sim, 1, "default"));
    let list = sim
        .direct(Method::GET, &format!("{set}/virtualMachines"), Value::Null)
        .body;
    let instance = list["value"][0]["id"].as_str().unwrap();
    assert!(instance.contains("/resourceGroups/CAPSTAN/"), "{instance}");
    assert!(instance.eq_ignore_ascii_case(&format!(
        "{set}/virtualMachines/{}",
        list["value"][0]["instanceId"].as_str().unwrap()
    )));
    let own = sim.direct(Method::GET, &set, Value::Null).body;
    assert_eq!(own["id"], json!(set), "the set itself is spelt as it was made");
    let network = &list["value"][0]["properties"]["networkProfileConfiguration"];
    assert!(
        network.to_string().contains("/resourceGroups/capstan/"),
        "ids of Network stay as they are"
    );
}

#[tokio::test]
async fn computer_names_end_with_the_instances_number_in_base_36() {
    let sim = start(Config::instant()).await;
    let set = set_id(&sim);
    sim.direct(Method::PUT, &set, set_body(&sim, 30, "default"));
    for instance in sim.instances(&set) {
        let name = instance["properties"]["osProfile"]["computerName"]
            .as_str()
            .unwrap()
            .to_owned();
        let number = u64::from_str_radix(name.strip_prefix("pool").unwrap(), 36).unwrap();
        assert_eq!(
            (number.to_string(), name.len()),
            (instance["instanceId"].as_str().unwrap().to_owned(), 10)
        );
    }
}

#[tokio::test]
async fn properties_that_are_fixed_at_birth_cannot_change() {
    let sim = start(strict()).await;
    let set = set_id(&sim);
    sim.direct(Method::PUT, &set, set_body(&sim, 1, "default"));
    for (field, change) in [
        (
            "computerNamePrefix",
            profile(json!({ "osProfile": { "computerNamePrefix": "other" } })),
        ),
        (
            "adminUsername",
            profile(json!({ "osProfile": { "adminUsername": "root" } })),
        ),
        ("priority", profile(json!({ "priority": "Spot" }))),
        (
            "orchestrationMode",
            json!({ "properties": { "orchestrationMode": "Flexible" } }),
        ),
        (
            "platformFaultDomainCount",
            json!({ "properties": { "platformFaultDomainCount": 1 } }),
        ),
    ] {
        let mut body = set_body(&sim, 1, "default");
        capstan_sim::azure::wire::merge(&mut body, &change);
        let answer = sim.direct(Method::PUT, &set, body);
        // What was never set can be set.
        if field == "priority" {
            assert_eq!(answer.status, 200);
            continue;
        }
        assert_eq!(answer.status, 409, "{field}: {}", answer.body);
        assert_eq!(answer.body["error"]["code"], "PropertyChangeNotAllowed");
        assert_eq!(answer.body["error"]["target"], field);
    }
    let sets = id(&sim, "Microsoft.Compute/availabilitySets", "as");
    let body = |domains: u64| json!({ "location": "eastus", "sku": { "name": "Aligned" }, "properties": { "platformFaultDomainCount": domains } });
    assert_eq!(sim.direct(Method::PUT, &sets, body(2)).status, 200);
    assert_eq!(sim.direct(Method::PUT, &sets, body(2)).status, 200);
    let refused = sim.direct(Method::PUT, &sets, body(1));
    assert_eq!(
        (refused.status.as_u16(), &refused.body["error"]["code"]),
        (409, &json!("PropertyChangeNotAllowed"))
    );
}

#[tokio::test]
async fn an_availability_set_has_no_more_fault_domains_than_its_region() {
    let sim = start(Config::instant()).await;
    for (location, most) in [("westus", 3), ("ukwest", 2), ("onerack", 1)] {
        let sets = id(&sim, "Microsoft.Compute/availabilitySets", location);
        let put = |domains: u64| {
            let body = json!({ "location": location, "sku": { "name": "Aligned" },
                "properties": { "platformFaultDomainCount": domains } });
            sim.direct(Method::PUT, &sets, body)
        };
        let refused = put(most + 1);
        assert_eq!(refused.status, 400, "{location}");
        let error = &refused.body["error"];
        assert_eq!(
            (&error["code"], &error["target"]),
            (&json!("InvalidParameter"), &json!("platformFaultDomainCount"))
        );
        assert_eq!(put(most).status, 200, "{location}");
    }
}

#[tokio::test]
async fn a_pool_takes_addresses_of_one_family() {
    let sim = start(Config::instant()).await;
    let balancer = id(&sim, "Microsoft.Network/loadBalancers", "lb");
    let part = |list: &str, name: &str| json!({ "id": format!("{balancer}/{list}/{name}") });
    let rule = |name: &str| {
        json!({ "name": name, "properties": { "frontendIPConfiguration": part("frontendIPConfigurations", name),
            "backendAddressPool": part("backendAddressPools", name) } })
    };
    let body = json!({ "location": "eastus", "properties": {
        "frontendIPConfigurations": [{ "name": "four" }, { "name": "six", "properties": { "privateIPAddressVersion": "IPv6" } }],
        "backendAddressPools": [{ "name": "four" }, { "name": "six" }, { "name": "free" }],
        "loadBalancingRules": [rule("four"), rule("six")],
    } });
    assert!(sim.direct(Method::PUT, &balancer, body).status.is_success());
    let subnet = id(&sim, "Microsoft.Network/virtualNetworks", "capstan-vnet") + "/subnets/default";
    let join = |nic: &str, family: &str, pool: &str| {
        let config = json!({ "name": "a", "properties": { "subnet": { "id": subnet }, "privateIPAddressVersion": family,
            "loadBalancerBackendAddressPools": [part("backendAddressPools", pool)] } });
        let body = json!({ "location": "eastus", "properties": { "ipConfigurations": [config] } });
        let answer = sim.direct(Method::PUT, &id(&sim, "Microsoft.Network/networkInterfaces", nic), body);
        (answer.status.as_u16(), answer.body["error"]["code"].clone())
    };
    let mixed = json!("AllNicIpConfigurationsOfLbBackendPoolMustHaveSamePrivateIpAddressVersion");
    assert_eq!(join("a", "IPv4", "six"), (400, mixed.clone()), "by the rule's frontend");
    assert_eq!(join("a", "IPv6", "four"), (400, mixed.clone()));
    assert_eq!(join("a", "IPv6", "six").0, 201);
    assert_eq!(join("b", "IPv4", "four").0, 201);
    assert_eq!(join("c", "IPv6", "free").0, 201, "no rule tells");
    assert_eq!(join("d", "IPv4", "free"), (400, mixed), "by its first member");
    assert_eq!(
        join("c", "IPv6", "free").0,
        200,
        "an interface is in nobody's way but its own"
    );
}

#[tokio::test]
async fn windows_needs_a_password() {
    let sim = start(strict()).await;
    let set = set_id(&sim);
    let windows = |password: Value| {
        let mut body = set_body(&sim, 1, "default");
        let more = profile(
            json!({ "osProfile": { "adminPassword": password, "windowsConfiguration": {} },
            "storageProfile": { "osDisk": { "osType": "Windows" } } }),
        );
        capstan_sim::azure::wire::merge(&mut body, &more);
        sim.direct(Method::PUT, &set, body)
    };
    let refused = windows(Value::Null);
    assert_eq!(
        (refused.status.as_u16(), &refused.body["error"]["target"]),
        (400, &json!("adminPassword"))
    );
    assert_eq!(windows(json!("Passw0rd!xyz")).status, 201);
    // A change need not repeat it.
    let change = json!({ "location": "eastus", "sku": { "capacity": 2 } });
    assert_eq!(sim.direct(Method::PUT, &set, change).status, 200);
}

#[tokio::test(start_paused = true)]
async fn new_instances_are_listed_late() {
    let listing = Span::secs(30);
    for mode in ["Uniform", "Flexible"] {
        let times = Times {
            listing,
            ..Times::INSTANT
        };
        let sim = start(Config {
            times,
            ..Config::instant()
        })
        .await;
        let set = set_id(&sim);
        let mut body = set_body(&sim, 2, "default");
        body["properties"]["orchestrationMode"] = json!(mode);
        assert_eq!(sim.direct(Method::PUT, &set, body).status, 201);
        let listed = || {
            let own = sim
                .direct(Method::GET, &format!("{set}/virtualMachines"), Value::Null)
                .body;
            let vms = sim
                .direct(
                    Method::GET,
                    &id(&sim, "Microsoft.Compute", "virtualMachines"),
                    Value::Null,
                )
                .body;
            let count = |list: &Value| list["value"].as_array().unwrap().len();
            (count(&own), if mode == "Flexible" { count(&vms) } else { count(&own) })
        };
        assert_eq!(listed(), (0, 0), "{mode}");
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(listed(), (2, 2), "{mode}");
    }
}

#[tokio::test]
async fn an_upgrade_leaves_custom_data_alone_and_a_reimage_applies_it() {
    let sim = start(Config::instant()).await;
    let set = set_id(&sim);
    sim.direct(Method::PUT, &set, set_body(&sim, 1, "default"));
    let instance = sim.instances(&set)[0].clone();
    let (number, own) = (&instance["instanceId"], instance["id"].as_str().unwrap());
    let data = || sim.instance_custom_data(own).unwrap();
    let act = |action: &str| {
        sim.direct(
            Method::POST,
            &format!("{set}/{action}"),
            json!({ "instanceIds": [number] }),
        )
    };
    assert_eq!(data(), "b2xk");
    sim.direct(
        Method::PATCH,
        &set,
        profile(json!({ "osProfile": { "customData": "bmV3" } })),
    );
    act("manualupgrade");
    assert_eq!(sim.instances(&set)[0]["properties"]["latestModelApplied"], true);
    assert_eq!(data(), "b2xk", "the model is the newest, the custom data is not");
    act("reimage");
    assert_eq!(data(), "bmV3");
    // Another image does not change that.
    let change = json!({ "osProfile": { "customData": "bmV3ZXI=" }, "storageProfile": { "imageReference": { "id": "/images/2" } } });
    sim.direct(Method::PATCH, &set, profile(change));
    act("manualupgrade");
    assert_eq!(data(), "bmV3");
}

#[tokio::test]
async fn disks_and_interfaces_can_end_as_failed_after_an_accepted_put() {
    let sim = start(Config::instant()).await;
    let fail = || Action::FailProvisioning {
        code: "InternalExecutionError".into(),
        message: "An internal execution error occurred.".into(),
    };
    sim.fault(Fault::new(fail()).path("disks/d$").times(1)).unwrap();
    let disk = id(&sim, "Microsoft.Compute/disks", "d");
    let body =
        json!({ "location": "eastus", "properties": { "diskSizeGB": 8, "creationData": { "createOption": "Empty" } } });
    let state = |id: &str| sim.direct(Method::GET, id, Value::Null).body["properties"]["provisioningState"].clone();
    assert!(sim.direct(Method::PUT, &disk, body.clone()).status.is_success());
    assert_eq!(state(&disk), "Failed");
    assert!(sim.direct(Method::PUT, &disk, body).status.is_success());
    assert_eq!(state(&disk), "Succeeded", "once only");
    sim.fault(Fault::new(fail()).path("networkInterfaces/n$")).unwrap();
    let subnet = id(&sim, "Microsoft.Network/virtualNetworks", "capstan-vnet") + "/subnets/default";
    let nic = id(&sim, "Microsoft.Network/networkInterfaces", "n");
    let body = json!({ "location": "eastus", "properties": { "ipConfigurations": [{ "name": "a", "properties": { "subnet": { "id": subnet } } }] } });
    assert!(sim.direct(Method::PUT, &nic, body).status.is_success());
    assert_eq!(state(&nic), "Failed");
}

/// OpenShift's own Azure role may delete disks, and not read them.
#[tokio::test]
async fn a_role_refuses_actions_that_it_does_not_have() {
    let sim = start(Config {
        allowed_actions: Some(vec![
            "Microsoft.Compute/virtualMachines/*".into(),
            "Microsoft.Compute/disks/delete".into(),
        ]),
        ..Config::instant()
    })
    .await;
    let disk = id(&sim, "Microsoft.Compute/disks", "d");
    let refused = sim.direct(Method::GET, &disk, Value::Null);
    assert_eq!(
        (refused.status.as_u16(), &refused.body["error"]["code"]),
        (403, &json!("AuthorizationFailed"))
    );
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("'Microsoft.Compute/disks/read'") && message.contains(&disk),
        "{message}"
    );
    assert_eq!(sim.direct(Method::DELETE, &disk, Value::Null).status, 204);
    let vm = id(&sim, "Microsoft.Compute/virtualMachines", "m");
    assert_eq!(sim.direct(Method::GET, &vm, Value::Null).status, 404);
}

#[tokio::test]
async fn private_addresses_come_from_the_subnets_own_range() {
    let sim = start(Config::instant()).await;
    let set = set_id(&sim);
    sim.direct(Method::PUT, &set, set_body(&sim, 2, "worker-subnet"));
    let nics = sim
        .direct(Method::GET, &format!("{set}/networkInterfaces"), Value::Null)
        .body;
    for nic in nics["value"].as_array().unwrap() {
        let address = nic["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"]
            .as_str()
            .unwrap();
        assert!(address.starts_with("10.2."), "{address}");
    }
}

#[tokio::test]
async fn a_smaller_capacity_takes_the_highest_numbers_of_the_fullest_zone() {
    let sim = start(Config::instant()).await;
    let set = set_id(&sim);
    let mut body = set_body(&sim, 5, "default");
    body["zones"] = json!(["1", "2"]);
    sim.direct(Method::PUT, &set, body);
    let number = |instance: &Value| instance["instanceId"].as_str().unwrap().parse::<u64>().unwrap();
    let before = sim.instances(&set);
    let of_zone = |zone: &str| -> Vec<u64> {
        let here = before.iter().filter(|instance| instance["zones"][0] == zone);
        here.map(number).collect()
    };
    let (one, two) = (of_zone("1"), of_zone("2"));
    assert_eq!((one.len(), two.len()), (3, 2));
    sim.direct(Method::PATCH, &set, json!({ "sku": { "capacity": 4 } }));
    let left: Vec<u64> = sim.instances(&set).iter().map(number).collect();
    assert!(
        !left.contains(one.iter().max().unwrap()),
        "{left:?} of {one:?} and {two:?}"
    );
    assert_eq!(left.len(), 4);
}
