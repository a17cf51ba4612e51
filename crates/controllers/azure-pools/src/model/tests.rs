//! What the scale set looks like, and what changes its hash.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

struct World {
    pool: AzureMachinePool,
    machine_pool: MachinePool,
    azure_cluster: AzureCluster,
    bootstrap: String,
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

fn world(change: Value) -> World {
    let mut spec = json!({
        "location": "eastus",
        "template": {
            "vmSize": "Standard_D4s_v3",
            "image": { "id": "/image/1" },
            "osDisk": { "osType": "Linux", "diskSizeGB": 30, "cachingType": "ReadWrite" },
            "sshPublicKey": "c3NoLXJzYSBBQUFB"
        }
    });
    merge(&mut spec, &change);
    let pool = json!({ "metadata": { "name": "workers" }, "spec": spec });
    let machine_pool = json!({
        "metadata": { "name": "workers" },
        "spec": { "clusterName": "c", "replicas": 3, "failureDomains": ["2", "1"],
                  "template": { "spec": { "clusterName": "c", "version": "v1.35.0" } } }
    });
    let azure_cluster = json!({
        "metadata": { "name": "c" },
        "spec": {
            "location": "eastus", "resourceGroup": "rg", "additionalTags": { "team": "a" },
            "networkSpec": {
                "vnet": { "name": "net", "resourceGroup": "net-rg" },
                "subnets": [{ "name": "cp", "role": "control-plane" }, { "name": "nodes", "role": "node" }],
                "nodeOutboundLB": { "name": "out" }
            }
        }
    });
    World {
        pool: serde_json::from_value(pool).unwrap(),
        machine_pool: serde_json::from_value(machine_pool).unwrap(),
        azure_cluster: serde_json::from_value(azure_cluster).unwrap(),
        bootstrap: "#cloud-config\nkey: value\ntoken: abcdef.0123456789abcdef\n".into(),
    }
}

fn model(world: &World) -> Model {
    build(&Input {
        pool: &world.pool,
        machine_pool: &world.machine_pool,
        cluster_name: "c",
        azure_cluster: &world.azure_cluster,
        subscription: "sub",
        bootstrap: world.bootstrap.as_bytes(),
        accelerated_networking: true,
    })
    .unwrap()
}

#[test]
fn a_scale_set_is_made_of_pool_cluster_and_machine_pool() {
    let world = world(json!({
        "additionalTags": { "team": "b" },
        "identity": "UserAssigned",
        "userAssignedIdentities": [{ "providerID": "azure:///subscriptions/sub/id" }],
        "template": {
            "dataDisks": [
                { "nameSuffix": "a", "diskSizeGB": 64, "lun": 0, "cachingType": "ReadOnly" },
                { "nameSuffix": "u", "diskSizeGB": 128, "managedDisk": { "storageAccountType": "UltraSSD_LRS" },
                  "diskIOPSReadWrite": 2000, "diskMBpsReadWrite": 100 }
            ],
            "spotVMOptions": { "maxPrice": "0.25", "evictionPolicy": "Delete" },
            "terminateNotificationTimeout": 7,
            "securityProfile": { "encryptionAtHost": true },
            "diagnostics": { "boot": { "storageAccountType": "Managed" } }
        }
    }));
    let model = model(&world);
    assert_eq!((model.group.as_str(), model.name.as_str()), ("rg", "workers"));
    let mut set = model.set;
    set.tags
        .as_mut()
        .unwrap()
        .retain(|name, _| !OWN_TAGS.contains(&name.as_str()));
    insta::assert_json_snapshot!(set);
}

#[rstest]
#[case::image(json!({ "template": { "image": { "id": "/image/2" } } }))]
#[case::size(json!({ "template": { "vmSize": "Standard_D8s_v3" } }))]
#[case::os_disk(json!({ "template": { "osDisk": { "diskSizeGB": 31 } } }))]
#[case::data_disk(json!({ "template": { "dataDisks": [{ "nameSuffix": "a", "diskSizeGB": 4 }] } }))]
#[case::caching(json!({ "template": { "osDisk": { "cachingType": "None" } } }))]
#[case::interfaces(json!({ "template": { "networkInterfaces": [{ "privateIPConfigs": 2 }] } }))]
#[case::accelerated(json!({ "template": { "acceleratedNetworking": false } }))]
#[case::extension(json!({ "template": { "vmExtensions": [{ "name": "e", "publisher": "p", "version": "1.0" }] } }))]
#[case::ssh_key(json!({ "template": { "sshPublicKey": "c3NoLXJzYSBCQkJC" } }))]
#[case::spot(json!({ "template": { "spotVMOptions": {} } }))]
#[case::security(json!({ "template": { "securityProfile": { "encryptionAtHost": true } } }))]
#[case::ultra(json!({ "template": { "additionalCapabilities": { "ultraSSDEnabled": true } } }))]
#[case::identity(json!({ "identity": "SystemAssigned" }))]
fn every_change_of_the_model_changes_its_hash(#[case] change: Value) {
    assert_ne!(model(&world(change)).hash, model(&world(json!({}))).hash);
}

#[test]
fn zones_and_bootstrap_data_change_the_hash() {
    let plain = model(&world(json!({})));
    let mut other = world(json!({}));
    other.machine_pool.spec.failure_domains = vec!["1".into()];
    assert_ne!(model(&other).hash, plain.hash);
    let mut other = world(json!({}));
    other.bootstrap = other.bootstrap.replace("value", "another");
    assert_ne!(model(&other).hash, plain.hash);
}

#[test]
fn replicas_strategy_tags_and_a_rotated_token_replace_nothing() {
    let plain = model(&world(json!({})));
    let mut other = world(json!({
        "strategy": { "rollingUpdate": { "maxSurge": 3 } }, "additionalTags": { "cost": "1" }
    }));
    other
        .azure_cluster
        .spec
        .additional_tags
        .insert("team".to_owned(), "b".to_owned());
    other.machine_pool.spec.replicas = Some(9);
    other.bootstrap = other
        .bootstrap
        .replace("abcdef.0123456789abcdef", "zyxwvu.fedcba9876543210");
    let rotated = model(&other);
    assert_eq!(rotated.hash, plain.hash);
    assert_ne!(
        rotated.custom_data_hash, plain.custom_data_hash,
        "new instances get the new token"
    );
}

#[rstest]
#[case("a abcdef.0123456789abcdef b", "a <token> b")]
#[case("abcdef.0123456789abcdef", "<token>")]
#[case("xabcdef.0123456789abcdef", "xabcdef.0123456789abcdef")]
#[case("abcdef.0123456789abcdef0", "abcdef.0123456789abcdef0")]
#[case("sha256.0123456789abcdeg", "<token>")]
#[case::of_ignition("data:,token%3A%20abcdef.0123456789abcdef%0A", "data:,token%3A%20<token>%0A")]
#[case::after_a_letter("data:,%3Aabcdef.0123456789abcdef%22", "data:,%3A<token>%22")]
#[case::half_an_escape("%0abcdef.0123456789abcdef", "%0abcdef.0123456789abcdef")]
#[case::no_escape("%zzabcdef.0123456789abcdef", "%zzabcdef.0123456789abcdef")]
fn tokens_are_masked_and_nothing_else(#[case] text: &str, #[case] masked: &str) {
    assert_eq!(mask_tokens(text), masked);
}

#[test]
fn a_generated_key_is_one_that_the_rules_accept() {
    let mut pool = world(json!({})).pool;
    pool.spec.template.ssh_public_key = generate_ssh_key();
    assert_eq!(capstan_core::validate::azure_pool::validate(&pool).message(), "");
}

#[test]
fn without_an_image_the_version_chooses_one() {
    let mut world = world(json!({}));
    world.pool.spec.template.image = None;
    let image = model(&world).image.compute_gallery.unwrap();
    assert_eq!(
        (image.name.as_str(), image.version.as_str()),
        ("capi-ubun2-2404", "1.35.0")
    );
}

#[test]
fn the_hash_is_the_same_in_every_version() {
    // Written once: who has to change this text rolls every pool of every user.
    assert_eq!(model(&world(json!({}))).hash, "3-fc8278be60966374-da99e81d329ae902");
}

#[test]
fn bootstrap_data_and_ssh_key_have_a_part_of_the_hash_of_their_own() {
    let part = |world: &World| bootstrap_part(&model(world).hash).to_owned();
    let plain = part(&world(json!({})));
    assert_eq!(plain.len(), 16);
    let image = world(json!({ "template": { "image": { "id": "/image/2" } } }));
    assert_eq!(part(&image), plain);
    let key = world(json!({ "template": { "sshPublicKey": "c3NoLXJzYSBCQkJC" } }));
    assert_ne!(part(&key), plain);
    let mut data = world(json!({}));
    data.bootstrap.push_str("another: line\n");
    assert_ne!(part(&data), plain);
}

fn profile(world: &World) -> VirtualMachineProfile {
    model(world).set.properties.unwrap().virtual_machine_profile.unwrap()
}

#[test]
fn nodes_of_a_dual_stack_network_get_an_ipv6_address() {
    let mut world = world(json!({}));
    let versions = |world: &World| -> Vec<String> {
        let network = profile(world).network_profile.unwrap();
        let interfaces = network.network_interface_configurations.unwrap();
        let addresses = interfaces[0].properties.clone().unwrap().ip_configurations.unwrap();
        let versions = addresses
            .into_iter()
            .map(|ip| ip.properties.unwrap().private_ip_address_version);
        versions.map(Option::unwrap).collect()
    };
    assert_eq!(versions(&world), ["IPv4"]);
    let vnet = &mut world.azure_cluster.spec.network_spec.vnet;
    vnet.cidr_blocks = vec!["10.0.0.0/16".to_owned(), "2001:1234:5678:9a00::/56".to_owned()];
    assert_eq!(versions(&world), ["IPv4", "IPv6"]);
}

#[test]
fn only_a_new_windows_scale_set_gets_a_password_and_each_another_one() {
    let password = |world: &World| {
        let mut set = model(world).set;
        set_admin_password(&mut set).unwrap();
        let profile = set.properties.unwrap().virtual_machine_profile.unwrap();
        profile.os_profile.unwrap().admin_password
    };
    assert_eq!(password(&world(json!({}))), None);
    let windows = world(json!({ "template": { "osDisk": { "osType": "Windows" } } }));
    let (one, other) = (password(&windows).unwrap(), password(&windows).unwrap());
    assert!((8..=123).contains(&one.len()) && one != other);
    assert_eq!(
        profile(&windows).os_profile.unwrap().admin_password,
        None,
        "no update changes it"
    );
}

#[rstest]
#[case::azure_stores_them(json!({}), true)]
#[case::switched_off(json!({ "diagnostics": { "boot": { "storageAccountType": "Disabled" } } }), false)]
fn boot_diagnostics_are_on_unless_the_pool_says_otherwise(#[case] template: Value, #[case] enabled: bool) {
    let profile = profile(&world(json!({ "template": template })));
    let boot = profile.diagnostics_profile.unwrap().boot_diagnostics.unwrap();
    assert_eq!(boot.enabled, Some(enabled));
}

#[rstest]
#[case::kept(json!({ "spotVMOptions": {} }), "Deallocate")]
#[case::on_its_host(json!({ "spotVMOptions": {}, "osDisk": { "diffDiskSettings": { "option": "Local" } } }), "Delete")]
#[case::as_written(json!({ "spotVMOptions": { "evictionPolicy": "Delete" } }), "Delete")]
fn an_evicted_instance_without_a_lasting_disk_is_deleted(#[case] template: Value, #[case] policy: &str) {
    let profile = profile(&world(json!({ "template": template })));
    assert_eq!(profile.eviction_policy.as_deref(), Some(policy));
}

#[test]
fn pools_of_one_cluster_have_machines_of_different_names() {
    let named = |name: &str| {
        let mut world = world(json!({}));
        world.pool.metadata.name = Some(name.to_owned());
        let profile = model(&world).set.properties.unwrap().virtual_machine_profile.unwrap();
        profile.os_profile.unwrap().computer_name_prefix.unwrap()
    };
    assert_eq!(named("capi-quickstart-mp-0"), "capi-quickstart-mp-0");
    assert_ne!(named("capi-quickstart-mp-0"), named("capi-quickstart-mp-1"));
}

#[test]
fn a_new_model_keeps_the_prefix_that_azure_does_not_let_change() {
    let old = model(&world(json!({}))).set;
    let mut existing = old.clone();
    let profile = existing
        .properties
        .as_mut()
        .unwrap()
        .virtual_machine_profile
        .as_mut()
        .unwrap();
    profile.os_profile.as_mut().unwrap().computer_name_prefix = Some("work".to_owned());
    let new = replacing(old, &existing);
    let profile = new.properties.unwrap().virtual_machine_profile.unwrap();
    assert_eq!(
        profile.os_profile.unwrap().computer_name_prefix.as_deref(),
        Some("work")
    );
}

#[rstest]
#[case::default(json!({}), Ok("capi-win-2022-containerd"))]
#[case::older(json!({"windowsServerVersion": "windows-2019"}), Ok("capi-win-2019-containerd"))]
#[case::empty(json!({"windowsServerVersion": ""}), Ok("capi-win-2022-containerd"))]
#[case::wrong(json!({"windowsServerVersion": "2019"}), Err("write it as windows-2022"))]
fn the_annotation_chooses_the_edition_of_windows(#[case] annotations: Value, #[case] expected: Result<&str, &str>) {
    let mut world = world(json!({ "template": { "osDisk": { "osType": "Windows" } } }));
    let plain = model(&world).hash;
    world.pool.spec.template.image = None;
    world.pool.metadata.annotations = serde_json::from_value(annotations).unwrap();
    let built = build(&Input {
        pool: &world.pool,
        machine_pool: &world.machine_pool,
        cluster_name: "c",
        azure_cluster: &world.azure_cluster,
        subscription: "sub",
        bootstrap: world.bootstrap.as_bytes(),
        accelerated_networking: true,
    });
    match (built, expected) {
        (Ok(model), Ok(name)) => {
            assert_ne!(model.hash, plain);
            assert_eq!(model.image.compute_gallery.unwrap().name, name);
        }
        (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{error}"),
        (built, expected) => panic!("{:?} instead of {expected:?}", built.map(|model| model.image)),
    }
}
