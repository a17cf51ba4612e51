//! Every request of ours fits Azure's specification: it is sent to Azure's official typed fake servers, which refuse fields,
//! types, paths and query parameters that they do not know.

use std::process::Stdio;
use std::time::Duration;

use capstan_azure::client::When;
use capstan_azure::model::{
    AvailabilitySet, Disk, NetworkInterface, PublicIpAddress, ScaleSet, VirtualMachine, VirtualMachineUpdate,
};
use capstan_azure::{Client, Clients, Cloud, Credential, Owned, Resource, Secret, Settings};
use capstan_testkit::parts;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

const SUBSCRIPTION: &str = "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b";

struct Fake {
    _child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    ca: std::path::PathBuf,
    url: String,
}

impl Fake {
    async fn start() -> Self {
        let program = tokio::task::spawn_blocking(|| parts::FAKEARM.path())
            .await
            .unwrap()
            .unwrap();
        let ca = std::env::temp_dir().join(format!("capstan-fakearm-{}.pem", std::process::id()));
        let mut child = Command::new(program)
            .arg("--ca-file")
            .arg(&ca)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        let url = ready["url"].as_str().unwrap().to_owned();
        Self {
            _child: child,
            lines,
            ca,
            url,
        }
    }

    fn client(&self) -> Client {
        let cloud = Cloud::custom("AzurePublicCloud", &self.url, &self.url).unwrap();
        let settings = Settings {
            ca_file: Some(self.ca.clone()),
            ..Settings::new(cloud)
        };
        let credential = Credential::Secret {
            tenant: "tenant".into(),
            client_id: "client".into(),
            secret: Secret::new("secret"),
        };
        Clients::new(settings)
            .unwrap()
            .client(&credential, SUBSCRIPTION)
            .at("eastus")
    }

    /// What the server wrote down so far.
    async fn recorded(&mut self) -> Vec<Value> {
        let mut records = Vec::new();
        while let Ok(Ok(Some(line))) = tokio::time::timeout(Duration::from_secs(2), self.lines.next_line()).await {
            records.push(serde_json::from_str(&line).unwrap());
        }
        records
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ca);
    }
}

/// Reads a model and makes sure that every field has a place of its own in it.
fn model<T: DeserializeOwned + std::fmt::Debug>(value: Value) -> T {
    let model: T = serde_json::from_value(value).unwrap();
    let text = format!("{model:?}");
    let unknown = text
        .split("rest: {\"")
        .nth(1)
        .map(|rest| rest.chars().take(80).collect::<String>());
    assert_eq!(unknown, None, "a field that our model does not have");
    model
}

fn id(kind: &str, name: &str) -> Value {
    json!({ "id": format!("/subscriptions/{SUBSCRIPTION}/resourceGroups/g/providers/{kind}/{name}") })
}

fn owned<T: Resource + DeserializeOwned>(name: &str) -> Owned<T> {
    let id = format!(
        "/subscriptions/{SUBSCRIPTION}/resourceGroups/g/providers/{}/{name}",
        T::TYPE
    );
    let resource = serde_json::from_value(json!({ "id": id, "type": T::TYPE })).unwrap();
    Owned::by_tags(&resource, |_| true).unwrap()
}

fn security() -> Value {
    json!({ "encryptionAtHost": true, "securityType": "TrustedLaunch", "uefiSettings": { "secureBootEnabled": true, "vTpmEnabled": true } })
}

fn managed_disk() -> Value {
    json!({ "storageAccountType": "Premium_LRS", "diskEncryptionSet": id("Microsoft.Compute/diskEncryptionSets", "s"),
        "securityProfile": { "securityEncryptionType": "VMGuestStateOnly", "diskEncryptionSet": id("Microsoft.Compute/diskEncryptionSets", "s") } })
}

fn os_disk() -> Value {
    json!({ "name": "vm_OSDisk", "osType": "Linux", "createOption": "FromImage", "deleteOption": "Delete", "caching": "ReadOnly",
        "diskSizeGB": 64, "managedDisk": managed_disk(), "diffDiskSettings": { "option": "Local", "placement": "CacheDisk" } })
}

fn image() -> Value {
    json!({ "id": "/images/i", "publisher": "p", "offer": "o", "sku": "s", "version": "latest",
        "communityGalleryImageId": "/c", "sharedGalleryImageId": "/s" })
}

fn linux() -> Value {
    json!({ "disablePasswordAuthentication": true, "ssh": { "publicKeys": [{ "path": "/home/core/.ssh/authorized_keys", "keyData": "ssh-rsa A" }] } })
}

fn vm() -> VirtualMachine {
    model(json!({
        "location": "eastus", "tags": { "a": "b" }, "zones": ["1"],
        "identity": { "type": "UserAssigned", "userAssignedIdentities": { "/i": {} } },
        "plan": { "name": "n", "publisher": "p", "product": "q" },
        "properties": {
            "hardwareProfile": { "vmSize": "Standard_D4s_v3" },
            "storageProfile": { "imageReference": image(), "osDisk": os_disk(), "dataDisks": [{ "name": "vm_d", "lun": 0,
                "createOption": "Empty", "deleteOption": "Detach", "caching": "None", "diskSizeGB": 4, "managedDisk": managed_disk(),
                "toBeDetached": false }] },
            "osProfile": { "computerName": "vm", "adminUsername": "core", "adminPassword": "x", "customData": "eA==",
                "linuxConfiguration": linux(), "windowsConfiguration": { "enableAutomaticUpdates": false } },
            "networkProfile": { "networkInterfaces": [{ "id": "/nic", "properties": { "primary": true, "deleteOption": "Delete" } }] },
            "securityProfile": security(),
            "diagnosticsProfile": { "bootDiagnostics": { "enabled": true, "storageUri": "https://s" } },
            "additionalCapabilities": { "ultraSSDEnabled": true },
            "availabilitySet": id("Microsoft.Compute/availabilitySets", "a"),
            "virtualMachineScaleSet": id("Microsoft.Compute/virtualMachineScaleSets", "s"),
            "capacityReservation": { "capacityReservationGroup": { "id": "/crg" } },
            "priority": "Spot", "evictionPolicy": "Delete", "billingProfile": { "maxPrice": -1.0 },
        },
    }))
}

fn scale_set_properties(patch: bool) -> Value {
    let mut os = json!({ "createOption": "FromImage", "osType": "Linux", "name": "os", "caching": "ReadWrite", "deleteOption": "Delete",
        "diskSizeGB": 64, "managedDisk": managed_disk(), "diffDiskSettings": { "option": "Local", "placement": "CacheDisk" } });
    let mut os_profile = json!({ "customData": "eA==", "linuxConfiguration": linux(), "windowsConfiguration": { "enableAutomaticUpdates": false } });
    let mut profile = json!({
        "storageProfile": { "imageReference": image(), "dataDisks": [{ "name": "d", "lun": 0, "createOption": "Empty",
            "deleteOption": "Delete", "caching": "None", "diskSizeGB": 8, "diskIOPSReadWrite": 3000, "diskMBpsReadWrite": 125,
            "managedDisk": managed_disk() }] },
        "networkProfile": { "networkApiVersion": "2020-11-01", "healthProbe": { "id": "/probe" }, "networkInterfaceConfigurations": [
            { "name": "nic", "properties": { "primary": true, "enableAcceleratedNetworking": true, "enableIPForwarding": true,
                "deleteOption": "Delete", "networkSecurityGroup": { "id": "/nsg" }, "ipConfigurations": [{ "name": "ip", "properties": {
                    "primary": true, "privateIPAddressVersion": "IPv4", "subnet": { "id": "/subnet" },
                    "publicIPAddressConfiguration": { "name": "p", "properties": { "idleTimeoutInMinutes": 4 } },
                    "loadBalancerBackendAddressPools": [{ "id": "/pool" }], "loadBalancerInboundNatPools": [{ "id": "/nat" }],
                    "applicationSecurityGroups": [{ "id": "/asg" }] } }] } }] },
        "securityProfile": security(),
        "diagnosticsProfile": { "bootDiagnostics": { "enabled": true, "storageUri": "https://s" } },
        "extensionProfile": { "extensions": [{ "name": "e", "properties": { "publisher": "p", "type": "t", "typeHandlerVersion": "1.0",
            "autoUpgradeMinorVersion": true, "settings": { "a": 1 }, "protectedSettings": { "b": 2 } } }] },
        "scheduledEventsProfile": { "terminateNotificationProfile": { "enable": true, "notBeforeTimeout": "PT5M" } },
        "billingProfile": { "maxPrice": -1.0 },
    });
    let mut properties = json!({
        "overprovision": false, "singlePlacementGroup": false, "upgradePolicy": { "mode": "Manual" },
        "scaleInPolicy": { "rules": ["OldestVM"], "forceDeletion": false }, "additionalCapabilities": { "ultraSSDEnabled": true },
    });
    if patch {
        // What only a PUT may set.
        for name in ["name", "osType", "createOption"] {
            os.as_object_mut().unwrap().shift_remove(name);
        }
    } else {
        os_profile["computerNamePrefix"] = json!("pool");
        os_profile["adminUsername"] = json!("core");
        os_profile["adminPassword"] = json!("x");
        profile["priority"] = json!("Spot");
        profile["evictionPolicy"] = json!("Delete");
        profile["capacityReservation"] = json!({ "capacityReservationGroup": { "id": "/crg" } });
        properties["orchestrationMode"] = json!("Uniform");
        properties["platformFaultDomainCount"] = json!(1);
        properties["zoneBalance"] = json!(false);
    }
    profile["storageProfile"]["osDisk"] = os;
    profile["osProfile"] = os_profile;
    properties["virtualMachineProfile"] = profile;
    properties
}

fn scale_set(patch: bool) -> ScaleSet {
    let mut set = json!({ "tags": { "a": "b" }, "sku": { "name": "Standard_D4s_v3", "tier": "Standard", "capacity": 3 },
        "plan": { "name": "n", "publisher": "p", "product": "q" },
        "identity": { "type": "UserAssigned", "userAssignedIdentities": { "/i": {} } }, "properties": scale_set_properties(patch) });
    if patch {
        // Which disks a scale set has is changed by PATCH too, but their names and types are not.
        let disk = &mut set["properties"]["virtualMachineProfile"]["storageProfile"]["osDisk"];
        disk.as_object_mut().unwrap().shift_remove("deleteOption");
        set["properties"]["virtualMachineProfile"]["storageProfile"]["osDisk"]["deleteOption"] = json!("Delete");
    } else {
        set["location"] = json!("eastus");
        set["zones"] = json!(["1", "2"]);
    }
    model(set)
}

fn nic() -> NetworkInterface {
    model(json!({ "location": "eastus", "tags": { "a": "b" }, "properties": {
        "enableAcceleratedNetworking": true, "enableIPForwarding": true, "networkSecurityGroup": { "id": "/nsg" },
        "dnsSettings": { "internalDnsNameLabel": "vm" },
        "ipConfigurations": [{ "name": "main", "properties": { "primary": true, "privateIPAddress": "10.0.0.4",
            "privateIPAddressVersion": "IPv4", "privateIPAllocationMethod": "Dynamic", "subnet": { "id": "/subnet" },
            "publicIPAddress": { "id": "/ip" }, "loadBalancerBackendAddressPools": [{ "id": "/pool" }],
            "loadBalancerInboundNatRules": [{ "id": "/rule" }], "applicationSecurityGroups": [{ "id": "/asg" }] } }] } }))
}

async fn machines(azure: &Client) -> Result<(), capstan_azure::Error> {
    azure.put_vm("g", "vm", &vm(), When::Absent).await?;
    azure.put_vm("g", "vm", &vm(), When::Always).await?;
    azure.get_vm("g", "vm").await?;
    azure.get_vm_with_instance_view("g", "vm").await?;
    azure.list_flexible_vms("g", "/set").await?;
    azure.usages("eastus").await?;
    let update: VirtualMachineUpdate = model(
        json!({ "tags": { "a": "b" }, "properties": { "storageProfile": { "dataDisks": [
        { "lun": 1, "createOption": "Attach", "managedDisk": { "id": "/disk" }, "toBeDetached": false }] } } }),
    );
    azure.patch_vm("g", "vm", &update, When::Unchanged("1".into())).await?;
    azure.delete_vm(&owned("vm")).await?;
    let disk: Disk = model(
        json!({ "location": "eastus", "tags": { "a": "b" }, "zones": ["1"], "sku": { "name": "UltraSSD_LRS" },
        "properties": { "creationData": { "createOption": "Empty", "logicalSectorSize": 4096, "sourceResourceId": "/source" },
            "diskSizeGB": 8, "diskIOPSReadWrite": 1000, "diskMBpsReadWrite": 100,
            "encryption": { "type": "EncryptionAtRestWithCustomerKey", "diskEncryptionSetId": "/s" } } }),
    );
    azure.put_disk("g", "d", &disk).await?;
    azure.get_disk("g", "d").await?;
    azure.list_disks("g").await?;
    azure.delete_disk("g", "d").await?;
    let set: AvailabilitySet = model(
        json!({ "location": "westus", "tags": { "a": "b" }, "sku": { "name": "Aligned" },
        "properties": { "platformFaultDomainCount": 2, "platformUpdateDomainCount": 5 } }),
    );
    azure.put_availability_set("g", "a", &set).await?;
    azure.get_availability_set("g", "a").await?;
    azure.list_availability_sets("g").await?;
    azure.delete_availability_set(&owned("a")).await?;
    azure.size("eastus", "Standard_D4s_v3").await.map(drop)
}

async fn pools(azure: &Client) -> Result<(), capstan_azure::Error> {
    azure.put_scale_set("g", "s", &scale_set(false), When::Absent).await?;
    azure.patch_scale_set("g", "s", &scale_set(true), When::Always).await?;
    azure.get_scale_set("g", "s").await?;
    azure.get_scale_set_view("g", "s").await?;
    azure.list_instances("g", "s").await?;
    let ids = ["3".to_owned()];
    azure.upgrade_instances("g", "s", &ids).await?;
    azure.reimage_instances(&owned("s"), &ids).await?;
    azure.delete_instances(&owned("s"), &ids).await?;
    azure.delete_scale_set(&owned("s")).await.map(drop)
}

async fn network(azure: &Client) -> Result<(), capstan_azure::Error> {
    azure.put_nic("g", "n", &nic(), When::Absent).await?;
    azure.get_nic("g", "n").await?;
    azure.list_nics("g").await?;
    azure.list_public_ips("g").await?;
    azure.delete_nic(&owned("n")).await?;
    let ip: PublicIpAddress = model(
        json!({ "location": "eastus", "tags": { "a": "b" }, "zones": ["1"], "sku": { "name": "Standard" },
        "properties": { "publicIPAddressVersion": "IPv4", "publicIPAllocationMethod": "Static",
            "dnsSettings": { "domainNameLabel": "vm", "fqdn": "vm.eastus" } } }),
    );
    azure.put_public_ip("g", "i", &ip, When::Always).await?;
    azure.get_public_ip("g", "i").await?;
    azure.delete_public_ip(&owned("i")).await?;
    azure.get_subnet("g", "vn", "s").await?;
    azure.get_load_balancer("g", "l").await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_fits_azures_specification() {
    let mut fake = Fake::start().await;
    let azure = fake.client();
    let outcomes = [
        ("machines", machines(&azure).await),
        ("pools", pools(&azure).await),
        ("network", network(&azure).await),
    ];
    let records = fake.recorded().await;
    let refused: Vec<&Value> = records
        .iter()
        .filter(|record| record.get("refused").is_some())
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
    for (what, outcome) in outcomes {
        outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    let operations: std::collections::BTreeSet<&str> = records
        .iter()
        .filter_map(|record| record["operation"].as_str())
        .collect();
    capstan_testkit::print_line(&format!(
        "Azure's typed fakes: {} requests, none refused, {} operations of the specification",
        records.len(),
        operations.len()
    ));
    assert!(operations.len() >= 28, "{operations:#?}");
}
