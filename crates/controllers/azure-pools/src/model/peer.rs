//! The scale sets of CAPZ 1.26 and ours, for the same pools.
//!
//! `capz.json` has what CAPZ sent to a simulated Resource Manager for the pools of its own templates, and for some of ours. Each
//! difference is named here, and in docs/differences.md with its reason.

use serde_json::{Value, json};

use super::*;

/// The data that both got.
const BOOTSTRAP: &[u8] = b"#cloud-config\n{}\n";

/// Returns the AzureCluster of a case; `cl6` has addresses of both families.
fn azure_cluster(name: &str) -> AzureCluster {
    let families = |v4: &str, v6: &str| match name {
        "cl6" => json!([v4, v6]),
        _ => json!([]),
    };
    let cluster = json!({
        "metadata": {"name": name},
        "spec": {"location": "eastus", "resourceGroup": "c-rg", "networkSpec": {
            "vnet": {"name": "c-vnet", "resourceGroup": "c-rg", "cidrBlocks": families("10.0.0.0/8", "2001:1234:5678:9a00::/56")},
            "subnets": [
                {"name": "cp-subnet", "role": "control-plane", "cidrBlocks": families("10.0.0.0/16", "2001:1234:5678:9abc::/64")},
                {"name": "node-subnet", "role": "node", "cidrBlocks": families("10.1.0.0/16", "2001:1234:5678:9abd::/64")},
            ],
            // CAPZ's own default for a cluster without a NAT gateway.
            "nodeOutboundLB": match name {
                "cl6" => json!({"name": "cl6"}),
                _ => json!(null),
            },
        }},
    });
    serde_json::from_value(cluster).unwrap()
}

fn ours(case: &Value) -> Value {
    let cluster_name = case["cluster"].as_str().unwrap();
    let mut pool = case["pool"].clone();
    let caching = &mut pool["spec"]["template"]["osDisk"]["cachingType"];
    if caching.is_null() {
        // The default of the definition.
        *caching = json!("None");
    }
    let pool: AzureMachinePool = serde_json::from_value(pool).unwrap();
    let machine_pool = json!({"metadata": {"name": "workers"}, "spec": {
        "clusterName": cluster_name, "replicas": 2, "failureDomains": case["zones"],
        "template": {"spec": {"clusterName": cluster_name, "version": "v1.34.2"}},
    }});
    let machine_pool: MachinePool = serde_json::from_value(machine_pool).unwrap();
    let input = Input {
        pool: &pool,
        machine_pool: &machine_pool,
        cluster_name,
        azure_cluster: &azure_cluster(cluster_name),
        subscription: "sub",
        bootstrap: BOOTSTRAP,
        accelerated_networking: true,
    };
    serde_json::to_value(build(&input).unwrap().set).unwrap()
}

/// Takes a field out of an object, if it is there.
fn take(value: &mut Value, path: &str) -> Value {
    let (parent, field) = path.rsplit_once('/').unwrap();
    let parent = value.pointer_mut(parent).and_then(Value::as_object_mut);
    parent.and_then(|parent| parent.remove(field)).unwrap_or_default()
}

/// Every field where the two differ, as `path: theirs, ours`.
fn differences(path: &str, theirs: &Value, ours: &Value, found: &mut Vec<String>) {
    match (theirs, ours) {
        (Value::Object(a), Value::Object(b)) => {
            let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in names {
                let of = |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or_default();
                differences(&format!("{path}/{name}"), &of(a), &of(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                differences(&format!("{path}/{index}"), a, b, found);
            }
        }
        // Azure's identifiers do not differ by case.
        (Value::String(a), Value::String(b)) if a.starts_with('/') && a.eq_ignore_ascii_case(b) => {}
        (a, b) if a == b => {}
        (a, b) => found.push(format!("{path}: {a}, {b}")),
    }
}

#[test]
fn a_scale_set_is_the_one_that_capz_makes_but_for_what_the_documents_list() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("capz.json")).unwrap();
    let mut all = Vec::new();
    for case in &cases {
        let (mut theirs, mut ours) = (case["sent"].clone(), ours(case));
        // The capacity goes beside the model.
        take(&mut theirs, "/sku/capacity");
        // Capstan's own marks.
        for tag in [HASH_TAG, CUSTOM_DATA_TAG, POOL_TAG] {
            assert!(take(&mut ours, &format!("/tags/{tag}")).is_string());
        }
        take(&mut ours, "/properties/scaleInPolicy");
        // CAPZ sends an empty profile where there is no extension, and null for settings that are not there.
        let profile = "/properties/virtualMachineProfile";
        if theirs.pointer(&format!("{profile}/extensionProfile")) == Some(&json!({})) {
            take(&mut theirs, &format!("{profile}/extensionProfile"));
        }
        // CAPZ drops what the spec says about these.
        let disks = ours.pointer_mut(&format!("{profile}/storageProfile/dataDisks"));
        for disk in disks.and_then(Value::as_array_mut).into_iter().flatten() {
            disk.as_object_mut().unwrap().remove("caching");
        }
        for field in ["securityType", "uefiSettings"] {
            take(&mut ours, &format!("{profile}/securityProfile/{field}"));
        }
        // To say that a further address is not the primary one says nothing.
        let card = format!(
            "{profile}/networkProfile/networkInterfaceConfigurations/0/properties/ipConfigurations/1/properties/primary"
        );
        for set in [&mut theirs, &mut ours] {
            if set.pointer(&card) == Some(&json!(false)) {
                take(set, &card);
            }
        }
        let mut found = Vec::new();
        differences("", &theirs, &ours, &mut found);
        let name = case["case"].as_str().unwrap();
        all.extend(found.into_iter().map(|line| format!("{name}: {line}")));
    }
    assert!(all.is_empty(), "theirs, ours:\n{}", all.join("\n"));
}

#[test]
fn the_price_of_a_spot_pool_may_be_written_as_the_api_server_writes_it() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("capz.json")).unwrap();
    let mut case = cases.into_iter().find(|case| case["case"] == "a spot pool").unwrap();
    case["pool"]["spec"]["template"]["spotVMOptions"]["maxPrice"] = json!("250m");
    let price = "/properties/virtualMachineProfile/billingProfile/maxPrice";
    assert_eq!(ours(&case).pointer(price), Some(&json!(0.25)));
}
