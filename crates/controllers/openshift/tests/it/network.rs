//! What surrounds a machine in Azure: networks, balancers, availability sets, identities, security.

use crate::support;

use anyhow::{Context as _, Result};
use capstan_api::openshift::Machine;
use capstan_sim::azure::{Config, Fault, Network};
use http::Method;
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::{World, disk};

fn id(world: &World, group: &str, provider: &str, kind: &str, name: &str) -> String {
    let subscription = &world.sim.subscription;
    format!("/subscriptions/{subscription}/resourceGroups/{group}/providers/{provider}/{kind}/{name}")
}

fn network(world: &World, kind: &str, name: &str) -> String {
    id(world, "capstan", "Microsoft.Network", kind, name)
}

/// Somebody makes this by other means.
fn given(world: &World, id: &str, body: &Value) {
    let path = format!("{id}?api-version=2024-07-01");
    let answer = world.sim.direct(Method::PUT, &path, body.clone());
    assert!(answer.status.is_success(), "{id}: {answer:?}");
}

fn nic(world: &World, machine: &str) -> Result<Value> {
    let id = network(world, "networkInterfaces", &format!("{machine}-nic"));
    world.sim.get(&id).context("no interface")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interface_joins_balancers_rules_groups_and_a_network_elsewhere() -> Result<()> {
    let world = World::new("network", Config::quick()).await?;
    let _controller = world.start().await?;
    world.sim.network(&Network {
        group: "net-rg".into(),
        vnet: "far-vnet".into(),
        ..Network::default()
    });
    let balancer = |rules: &[&str]| {
        let rules: Vec<Value> = rules.iter().map(|name| json!({"name": name})).collect();
        json!({"location": "eastus", "sku": {"name": "Standard"}, "properties": {
            "backendAddressPools": [{"name": "pool"}, {"name": "other"}], "inboundNatRules": rules,
        }})
    };
    let (public, internal) = (
        network(&world, "loadBalancers", "front"),
        network(&world, "loadBalancers", "back"),
    );
    given(&world, &public, &balancer(&["first", "second"]));
    given(&world, &internal, &balancer(&[]));
    let plain = json!({"location": "eastus", "properties": {}});
    for (kind, name) in [
        ("networkSecurityGroups", "guard"),
        ("applicationSecurityGroups", "web"),
        ("applicationSecurityGroups", "db"),
    ] {
        given(&world, &network(&world, kind, name), &plain);
    }
    let name = world.name("m");
    let over = json!({
        "vnet": "far-vnet", "networkResourceGroup": "net-rg", "publicLoadBalancer": "front",
        "internalLoadBalancer": "back", "natRule": 1, "securityGroup": "guard", "publicIP": true,
        "applicationSecurityGroups": ["web", "db"], "acceleratedNetworking": true, "tags": {"team": "blue"},
    });
    world.create(world.manifest(&name, over)).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;

    let nic = nic(&world, &name)?;
    let config = &nic["properties"]["ipConfigurations"][0];
    assert_eq!(config["name"], "pipConfig");
    let config = &config["properties"];
    let far = id(&world, "net-rg", "Microsoft.Network", "virtualNetworks", "far-vnet");
    assert_eq!(config["subnet"]["id"], format!("{far}/subnets/worker-subnet"));
    assert_eq!(
        config["loadBalancerBackendAddressPools"],
        json!(
            [
                (&public, "pool"),
                (&public, "other"),
                (&internal, "pool"),
                (&internal, "other")
            ]
            .map(|(balancer, pool)| json!({"id": format!("{balancer}/backendAddressPools/{pool}")}))
        )
    );
    assert_eq!(
        config["loadBalancerInboundNatRules"],
        json!([{"id": format!("{public}/inboundNatRules/second")}])
    );
    let groups = ["web", "db"].map(|name| json!({"id": network(&world, "applicationSecurityGroups", name)}));
    assert_eq!(config["applicationSecurityGroups"], json!(groups));
    let address = network(&world, "publicIPAddresses", &format!("c-{name}"));
    assert_eq!(config["publicIPAddress"]["id"], address);
    assert_eq!(
        (
            &nic["properties"]["networkSecurityGroup"]["id"],
            &nic["properties"]["enableAcceleratedNetworking"]
        ),
        (&json!(network(&world, "networkSecurityGroups", "guard")), &json!(true))
    );
    let vm = world.vm(&name).context("no virtual machine")?;
    for made in [&nic, &vm, &world.sim.get(&address).context("no address")?] {
        let tags = &made["tags"];
        assert_eq!(
            (&tags["team"], &tags["kubernetes.io_cluster.c"]),
            (&json!("blue"), &json!("owned"))
        );
    }
    let addresses = machine.status.map(|status| status.addresses).unwrap_or_default();
    for kind in ["InternalIP", "ExternalIP", "InternalDNS", "Hostname"] {
        assert!(
            addresses.iter().any(|address| address.type_ == kind),
            "{kind}: {addresses:?}"
        );
    }
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("publicIPAddresses").is_empty() && world.azure("networkInterfaces").is_empty());
    assert_eq!(
        world.azure("loadBalancers"),
        ["back", "front"],
        "what is not its own stays"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_dual_stack_subnet_an_interface_gets_an_ipv6_configuration_too() -> Result<()> {
    let world = World::new("dual", Config::quick()).await?;
    let _controller = world.start().await?;
    let subnet = network(&world, "virtualNetworks", "capstan-vnet/subnets/dual");
    let prefixes = json!({"properties": {"addressPrefixes": ["10.9.0.0/16", "fd00:9::/64"]}});
    given(&world, &subnet, &prefixes);
    let inner = network(&world, "loadBalancers", "inner");
    let frontend =
        |name: &str, version: &str| json!({"name": name, "properties": {"privateIPAddressVersion": version}});
    given(
        &world,
        &inner,
        &json!({"location": "eastus", "sku": {"name": "Standard"}, "properties": {
            "frontendIPConfigurations": [frontend("v4", "IPv4"), frontend("v6", "IPv6")],
            "backendAddressPools": [{"name": "four"}, {"name": "six"}, {"name": "inner-v6"}],
        }}),
    );
    let name = world.name("m");
    let over = json!({"subnet": "dual", "internalLoadBalancer": "inner"});
    world.create(world.manifest(&name, over)).await?;
    let machine = world.until_phase(&name, "Provisioned").await?;
    let configs = nic(&world, &name)?["properties"]["ipConfigurations"].clone();
    let of = |index: usize| {
        let config = &configs[index];
        let properties = &config["properties"];
        let pool = properties["loadBalancerBackendAddressPools"].clone();
        (
            config["name"].clone(),
            properties["privateIPAddressVersion"].clone(),
            properties["primary"].clone(),
            properties["subnet"]["id"].clone(),
            pool,
        )
    };
    let pool = |name: &str| json!({"id": format!("{inner}/backendAddressPools/{name}")});
    let (ipv4, ipv6) = (json!("IPv4"), json!("IPv6"));
    assert_eq!(
        of(0),
        (
            json!("pipConfig"),
            ipv4,
            json!(true),
            json!(subnet),
            json!([pool("four")])
        )
    );
    assert_eq!(
        of(1),
        (
            json!("pipConfig-v6"),
            ipv6,
            json!(false),
            json!(subnet),
            json!([pool("six"), pool("inner-v6")])
        )
    );
    let addresses = machine.status.map(|status| status.addresses).unwrap_or_default();
    let internal: Vec<_> = addresses
        .iter()
        .filter(|address| address.type_ == "InternalIP")
        .map(|address| address.address.contains(':'))
        .collect();
    assert_eq!(internal, [false, true], "the IPv4 address comes first: {addresses:?}");
    Ok(())
}

/// As OpenShift's installer makes them for two families: the public balancer's frontends do not tell their family, and the pools
/// of IPv6 end with `-v6`. There are more pools than frontends.
#[tokio::test(flavor = "multi_thread")]
async fn an_interface_joins_all_pools_of_a_public_balancer_each_with_the_address_of_its_family() -> Result<()> {
    let world = World::new("families", Config::quick()).await?;
    let _controller = world.start().await?;
    let subnet = network(&world, "virtualNetworks", "capstan-vnet/subnets/dual");
    let prefixes = json!({"properties": {"addressPrefixes": ["10.9.0.0/16", "fd00:9::/64"]}});
    given(&world, &subnet, &prefixes);
    let front = network(&world, "loadBalancers", "ocp-x7");
    let part = |list: &str, name: &str| json!({"id": format!("{front}/{list}/{name}")});
    let frontend = |name: &str, version: &str| {
        let address = network(&world, "publicIPAddresses", name);
        let body = json!({"location": "eastus", "properties": {"publicIPAddressVersion": version}});
        given(&world, &address, &body);
        json!({"name": name, "properties": {"publicIPAddress": {"id": address}}})
    };
    let pools = ["ocp-x7-v6", "ocp-x7", "ocp-x7-outbound", "ocp-x7-outbound-v6"];
    let rule = |name: &str, frontend: &str, pool: &str| {
        json!({"name": name, "properties": {"frontendIPConfiguration": part("frontendIPConfigurations", frontend),
            "backendAddressPool": part("backendAddressPools", pool)}})
    };
    let balancer = json!({"location": "eastus", "sku": {"name": "Standard"}, "properties": {
        "frontendIPConfigurations": [frontend("public-v4", "IPv4"), frontend("public-v6", "IPv6")],
        "backendAddressPools": pools.map(|name| json!({"name": name})),
        "loadBalancingRules": [rule("api", "public-v4", "ocp-x7"), rule("api-v6", "public-v6", "ocp-x7-v6"),
            rule("out", "public-v4", "ocp-x7-outbound"), rule("out-v6", "public-v6", "ocp-x7-outbound-v6")],
    }});
    given(&world, &front, &balancer);
    let name = world.name("m");
    let over = json!({"subnet": "dual", "publicLoadBalancer": "ocp-x7"});
    world.create(world.manifest(&name, over)).await?;
    world.until_phase(&name, "Provisioned").await?;
    let configs = nic(&world, &name)?["properties"]["ipConfigurations"].clone();
    let joined = |index: usize| configs[index]["properties"]["loadBalancerBackendAddressPools"].clone();
    let all = |names: [&str; 2]| json!(names.map(|name| part("backendAddressPools", name)));
    assert_eq!(
        (joined(0), joined(1)),
        (
            all(["ocp-x7", "ocp-x7-outbound"]),
            all(["ocp-x7-v6", "ocp-x7-outbound-v6"])
        )
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balancer_that_is_not_there_is_waited_for_and_nothing_is_made_meanwhile() -> Result<()> {
    let world = World::new("balancer", Config::quick()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    world
        .create(world.manifest(&name, json!({"publicLoadBalancer": "front"})))
        .await?;
    let event = world.event(&name, "FailedCreate").await?;
    assert!(
        event.contains("load balancer front does not exist in capstan"),
        "{event}"
    );
    assert!(world.azure("networkInterfaces").is_empty());
    let body = json!({"location": "eastus", "properties": {"backendAddressPools": [{"name": "pool"}]}});
    given(&world, &network(&world, "loadBalancers", "front"), &body);
    world.until_phase(&name, "Provisioned").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn where_there_are_no_zones_the_machines_of_a_set_share_an_availability_set() -> Result<()> {
    let world = World::new("avset", Config::quick()).await?;
    let _controller = world.start().await?;
    world.sim.network(&Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Network::default()
    });
    let west = json!({"location": "westus", "zone": "", "vnet": "west-vnet"});
    let names = [world.name("a"), world.name("b")];
    for name in &names {
        let mut manifest = world.manifest(name, west.clone());
        manifest["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
        world.create(manifest).await?;
    }
    for name in &names {
        world.until_phase(name, "Provisioned").await?;
        let vm = world.vm(name).context("no virtual machine")?;
        let set = vm["properties"]["availabilitySet"]["id"].as_str().unwrap_or_default();
        assert!(set.to_lowercase().ends_with("/availabilitysets/c_workers-as"), "{set}");
    }
    let spot = world.name("spot");
    let mut over = west.clone();
    over["spotVMOptions"] = json!({"maxPrice": "250m"});
    let mut manifest = world.manifest(&spot, over);
    manifest["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
    world.create(manifest).await?;
    let machine = world.until_phase(&spot, "Provisioned").await?;
    // The value that the cluster's MachineHealthCheck for terminations selects.
    let label = machine.labels().get("machine.openshift.io/interruptible-instance");
    assert_eq!(label.map(String::as_str), Some(""));
    let vm = world.vm(&spot).context("no virtual machine")?["properties"].clone();
    assert_eq!(
        (
            &vm["priority"],
            &vm["evictionPolicy"],
            &vm["billingProfile"]["maxPrice"]
        ),
        (&json!("Spot"), &json!("Delete"), &json!(0.25))
    );
    assert_eq!(
        vm["availabilitySet"],
        Value::Null,
        "azure takes no spot machines into one"
    );
    for name in [&names[0], &names[1], &spot] {
        world.delete(name).await?;
    }
    for name in [&names[0], &names[1], &spot] {
        world.until_gone(name).await?;
    }
    assert!(world.azure("availabilitySets").is_empty(), "the last one takes it away");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn identity_security_encryption_and_diagnostics_reach_the_virtual_machine() -> Result<()> {
    let world = World::new("secure", Config::quick()).await?;
    let _controller = world.start().await?;
    let identity = id(
        &world,
        "capstan",
        "Microsoft.ManagedIdentity",
        "userAssignedIdentities",
        "me",
    );
    given(&world, &identity, &json!({"location": "eastus"}));
    let set = id(&world, "capstan", "Microsoft.Compute", "diskEncryptionSets", "keys");
    given(&world, &set, &json!({"location": "eastus", "properties": {}}));
    let mut data = disk("data", 0, "Delete", "Premium_LRS");
    data["managedDisk"]["diskEncryptionSet"] = json!({"id": set});
    let over = json!({
        "managedIdentity": "me", "dataDisks": [data],
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "cachingType": "ReadOnly",
            "managedDisk": {"storageAccountType": "Premium_LRS", "diskEncryptionSet": {"id": set}}},
        "securityProfile": {"encryptionAtHost": true, "settings": {"securityType": "TrustedLaunch",
            "trustedLaunch": {"uefiSettings": {"secureBoot": "Enabled", "virtualizedTrustedPlatformModule": "Enabled"}}}},
        "diagnostics": {"boot": {"storageAccountType": "AzureManaged"}},
    });
    let name = world.name("m");
    world.create(world.manifest(&name, over)).await?;
    world.until_phase(&name, "Provisioned").await?;
    let vm = world.vm(&name).context("no virtual machine")?;
    let identities = vm["identity"]["userAssignedIdentities"]
        .as_object()
        .context("no identity")?;
    assert!(
        identities.keys().any(|key| key.eq_ignore_ascii_case(&identity)),
        "{identities:?}"
    );
    let properties = &vm["properties"];
    let security = &properties["securityProfile"];
    assert_eq!(
        (&security["securityType"], &security["encryptionAtHost"]),
        (&json!("TrustedLaunch"), &json!(true))
    );
    assert_eq!(
        security["uefiSettings"],
        json!({"secureBootEnabled": true, "vTpmEnabled": true})
    );
    let storage = &properties["storageProfile"];
    for disk in [&storage["osDisk"], &storage["dataDisks"][0]] {
        assert_eq!(disk["managedDisk"]["diskEncryptionSet"]["id"], set);
    }
    assert_eq!(properties["diagnosticsProfile"]["bootDiagnostics"]["enabled"], true);
    Ok(())
}

/// Everything that the controller before this one made, by its names and with these tags.
fn made_before(world: &World, name: &str, tags: Value) {
    let nic = network(world, "networkInterfaces", &format!("{name}-nic"));
    let subnet = network(world, "virtualNetworks", "capstan-vnet/subnets/worker-subnet");
    let body = json!({"location": "eastus", "tags": tags, "properties": {"ipConfigurations": [
        {"name": "pipConfig", "properties": {"subnet": {"id": subnet}, "privateIPAllocationMethod": "Dynamic"}}]}});
    given(world, &nic, &body);
    let vm = id(world, "capstan", "Microsoft.Compute", "virtualMachines", name);
    let body = json!({"location": "eastus", "tags": tags, "zones": ["1"], "properties": {
        "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
        "storageProfile": {
            "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"name": format!("{name}_OSDisk"), "createOption": "FromImage", "osType": "Linux"},
            "dataDisks": [
                {"name": format!("{name}_data"), "lun": 0, "createOption": "Empty", "diskSizeGB": 4, "deleteOption": "Delete"},
                {"name": format!("{name}_keep"), "lun": 1, "createOption": "Empty", "diskSizeGB": 4, "deleteOption": "Detach"},
            ]},
        "osProfile": {"computerName": name, "adminUsername": "core", "adminPassword": "Aa1!aaaaaaaa"},
        "networkProfile": {"networkInterfaces": [{"id": nic, "properties": {"primary": true}}]},
    }});
    given(world, &vm, &body);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_of_the_controller_before_is_taken_over_and_leaves_nothing() -> Result<()> {
    let world = World::new("before", Config::instant()).await?;
    let name = world.name("m");
    made_before(&world, &name, json!({"kubernetes.io-cluster-c": "owned"}));
    let disks = json!([
        disk("data", 0, "Delete", "Premium_LRS"),
        disk("keep", 1, "Detach", "Premium_LRS")
    ]);
    let mut manifest = world.manifest(&name, json!({"dataDisks": disks}));
    manifest["metadata"]["finalizers"] = json!(["machine.machine.openshift.io"]);
    manifest["spec"]["providerID"] = json!(world.provider_id(&name));
    let machine = world.create(manifest).await?;
    let status = json!({"status": {"phase": "Provisioned", "providerStatus": {"vmState": "Running"}}});
    world
        .machines()
        .patch_status(&name, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    let _controller = world.start().await?;
    world.join(&machine).await?;
    let machine: Machine = world.until_phase(&name, "Running").await?;
    assert!(machine.status.is_some_and(|status| status.node_ref.is_some()));
    assert!(!world.calls().contains(&"PutVM"), "nothing is made anew");
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    for kind in ["virtualMachines", "networkInterfaces"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    assert_eq!(world.azure("disks"), [format!("{name}_keep")]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_virtual_machine_of_somebody_else_is_left_alone_and_its_namesake_can_go() -> Result<()> {
    let world = World::new("taken", Config::instant()).await?;
    let _controller = world.start().await?;
    let name = world.name("m");
    made_before(&world, &name, json!({"team": "other"}));
    let before = nic(&world, &name)?;
    world
        .create(world.manifest(&name, json!({"dataDisks": [disk("data", 0, "Delete", "Premium_LRS")]})))
        .await?;
    let machine = world.until_phase(&name, "Failed").await?;
    let message = machine
        .status
        .and_then(|status| status.error_message)
        .unwrap_or_default();
    assert!(message.contains("was not made for this machine"), "{message}");
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert_eq!(world.azure("virtualMachines"), std::slice::from_ref(&name));
    assert_eq!(nic(&world, &name)?, before, "nothing about it is changed");
    assert_eq!(
        world.azure("disks"),
        [format!("{name}_OSDisk"), format!("{name}_data"), format!("{name}_keep")]
    );
    Ok(())
}

/// An interface and a public address of a machine's names that nothing uses.
fn unused(world: &World, name: &str, tags: Value) {
    let subnet = network(world, "virtualNetworks", "capstan-vnet/subnets/worker-subnet");
    let body = json!({"location": "eastus", "tags": tags, "properties": {"ipConfigurations": [
        {"name": "pipConfig", "properties": {"subnet": {"id": subnet}, "privateIPAllocationMethod": "Dynamic"}}]}});
    given(
        world,
        &network(world, "networkInterfaces", &format!("{name}-nic")),
        &body,
    );
    let body = json!({"location": "eastus", "tags": tags, "properties": {"publicIPAllocationMethod": "Static"}});
    given(world, &network(world, "publicIPAddresses", &format!("c-{name}")), &body);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interface_and_an_address_of_somebody_else_are_neither_changed_nor_deleted() -> Result<()> {
    let world = World::new("strange", Config::instant()).await?;
    let _controller = world.start().await?;
    let (both, bare) = (world.name("both"), world.name("bare"));
    unused(&world, &both, json!({"team": "other"}));
    unused(&world, &bare, json!({}));
    let seen = |name: &str| {
        let address = network(&world, "publicIPAddresses", &format!("c-{name}"));
        (nic(&world, name).ok(), world.sim.get(&address))
    };
    let before = [seen(&both), seen(&bare)];
    for (name, public, what) in [
        (&both, true, "a public ip address"),
        (&bare, false, "a network interface"),
    ] {
        world.create(world.manifest(name, json!({"publicIP": public}))).await?;
        let machine = world.until_phase(name, "Failed").await?;
        let message = machine
            .status
            .and_then(|status| status.error_message)
            .unwrap_or_default();
        assert!(
            message.contains(what) && message.contains("was not made for this machine"),
            "{message}"
        );
        world.delete(name).await?;
        world.until_gone(name).await?;
    }
    assert_eq!([seen(&both), seen(&bare)], before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_controller_before_had_begun_is_finished_and_leaves_nothing() -> Result<()> {
    let world = World::new("begun", Config::instant()).await?;
    let (made, gone) = (world.name("made"), world.name("gone"));
    for name in [&made, &gone] {
        unused(&world, name, json!({}));
        let mut manifest = world.manifest(name, json!({"publicIP": true}));
        manifest["metadata"]["finalizers"] = json!(["machine.machine.openshift.io"]);
        world.create(manifest).await?;
        let condition = json!({"type": "MachineCreated", "status": "False", "reason": "MachineCreationFailed",
                               "message": "429", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"status": {"providerStatus": {"conditions": [condition]}}});
        world
            .machines()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await?;
    }
    world.delete(&gone).await?;
    let _controller = world.start().await?;
    world.until_gone(&gone).await?;
    world.until_phase(&made, "Provisioned").await?;
    assert_eq!(nic(&world, &made)?["tags"]["kubernetes.io_cluster.c"], "owned");
    world.delete(&made).await?;
    world.until_gone(&made).await?;
    for kind in ["virtualMachines", "networkInterfaces", "publicIPAddresses"] {
        assert!(world.azure(kind).is_empty(), "{kind}: {:?}", world.azure(kind));
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_availability_set_goes_even_if_the_catalogue_could_not_be_read_at_first() -> Result<()> {
    let world = World::new("avsetlate", Config::instant()).await?;
    world.sim.network(&Network {
        location: "westus".into(),
        vnet: "west-vnet".into(),
        ..Network::default()
    });
    let name = world.name("m");
    let mut manifest = world.manifest(&name, json!({"location": "westus", "zone": "", "vnet": "west-vnet"}));
    manifest["metadata"]["labels"]["machine.openshift.io/cluster-api-machineset"] = json!("workers");
    let first = world.start().await?;
    world.create(manifest).await?;
    world.until_phase(&name, "Provisioned").await?;
    assert_eq!(world.azure("availabilitySets"), ["c_workers-as"]);
    first.kill().await;
    world.sim.fault(Fault::answer(503).policy("GetSkus").times(1))?;
    let _second = world.start().await?;
    world.delete(&name).await?;
    world.until_gone(&name).await?;
    assert!(world.azure("availabilitySets").is_empty());
    Ok(())
}
