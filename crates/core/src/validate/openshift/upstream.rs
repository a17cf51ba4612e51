//! The rules of machine-api-operator's own admission, as a table of facts: each case of its public tests for Azure
//! (`pkg/webhooks/machine_webhook_test.go`), with the field that it refuses. Capstan has to accept and to refuse alike.
//! Not here: a machine without a spec (`webhook/review.rs`), and a public address where the cluster's DNS has no public zone,
//! which only the operator knows and refuses.

use super::*;

/// The cluster of the cases that begin without defaults.
const CLUSTER: &str = "azure-cluster";

/// Cases of the operator that Capstan decides otherwise, on purpose: it is stricter about names that become part of a URL.
/// The operator's own samples have such a value, so here they have a real id instead.
const IMAGE: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/images/i";

/// A case: what is changed in the sample, and the field that is refused; none if the object is accepted.
type Fact = (&'static str, Value, Option<&'static str>);

/// The operator's sample of a complete spec.
fn complete() -> Value {
    json!({
        "kind": "AzureMachineProviderSpec", "apiVersion": "azureproviderconfig.openshift.io/v1beta1", "vmSize": "vmSize",
        "image": {"resourceID": IMAGE}, "userDataSecret": {"name": "name"},
        "credentialsSecret": {"name": "name", "namespace": "azure-validation-test"}, "osDisk": {"diskSizeGB": 1},
    })
}

/// Cases about a complete spec, without defaults.
fn complete_specs() -> Vec<Fact> {
    let image = |without: &str| {
        let mut image =
            json!({"resourceID": null, "publisher": "test", "offer": "base-offer", "sku": "sku-rand", "version": "1"});
        image[without] = Value::Null;
        json!({"image": image})
    };
    let boot = |boot: Value| json!({"diagnostics": {"boot": boot}});
    let uri = json!({"storageAccountURI": "https://storageaccount.blob.core.windows.net/"});
    let encrypted =
        |kind: &str| json!({"diskSizeGB": 1, "managedDisk": {"securityProfile": {"securityEncryptionType": kind}}});
    let confidential =
        |uefi: Value| json!({"securityType": "ConfidentialVM", "confidentialVM": {"uefiSettings": uefi}});
    let tpm = json!({"virtualizedTrustedPlatformModule": "Enabled"});
    let guest = "VMGuestStateOnly";
    let whole = "DiskWithVMGuestState";
    vec![
        ("no vmSize", json!({"vmSize": null}), Some("vmSize")),
        (
            "ephemeral storage without caching",
            json!({"osDisk": {"cachingType": "", "diskSettings": {"ephemeralStorageLocation": "Local"}}}),
            Some("osDisk.cachingType"),
        ),
        (
            "vnet without subnet",
            json!({"vnet": "vnet", "subnet": "", "networkResourceGroup": "nrg"}),
            Some("subnet"),
        ),
        (
            "subnet without vnet",
            json!({"vnet": "", "subnet": "subnet", "networkResourceGroup": "nrg"}),
            Some("vnet"),
        ),
        ("no image", json!({"image": null}), Some("image")),
        (
            "image by id and by parts",
            json!({"image": {"sku": "sku-rand", "offer": "base-offer", "version": "1", "publisher": "test"}}),
            Some("image.resourceID"),
        ),
        ("image without offer", image("offer"), Some("image.offer")),
        ("image without sku", image("sku"), Some("image.sku")),
        ("image without version", image("version"), Some("image.version")),
        ("image without publisher", image("publisher"), Some("image.publisher")),
        ("image by id", json!({"image": {"resourceID": IMAGE}}), None),
        (
            "no user data secret",
            json!({"userDataSecret": null}),
            Some("userDataSecret"),
        ),
        (
            "no name of the user data secret",
            json!({"userDataSecret": {"name": null}}),
            Some("userDataSecret.name"),
        ),
        (
            "no credentials secret",
            json!({"credentialsSecret": null}),
            Some("credentialsSecret"),
        ),
        (
            "no namespace of the credentials secret",
            json!({"credentialsSecret": {"namespace": null}}),
            Some("credentialsSecret.namespace"),
        ),
        (
            "no name of the credentials secret",
            json!({"credentialsSecret": {"name": null}}),
            Some("credentialsSecret.name"),
        ),
        (
            "a credentials secret that does not exist",
            json!({"credentialsSecret": {"name": "does-not-exist"}}),
            None,
        ),
        (
            "no size of the OS disk",
            json!({"osDisk": {"diskSizeGB": null, "osType": "osType", "managedDisk": {"storageAccountType": "storageAccountType"}}}),
            Some("osDisk.diskSizeGB"),
        ),
        (
            "encryption type without a security profile",
            json!({"osDisk": encrypted(guest)}),
            Some("securityProfile"),
        ),
        (
            "ConfidentialVM without encryption type",
            json!({"securityProfile": {"settings": confidential(tpm.clone())}}),
            Some("osDisk.managedDisk.securityProfile.securityEncryptionType"),
        ),
        (
            "ConfidentialVM without its settings",
            json!({"securityProfile": {"settings": {"securityType": "ConfidentialVM"}}, "osDisk": encrypted(guest)}),
            Some("securityProfile.settings.confidentialVM"),
        ),
        (
            "ConfidentialVM with the TPM disabled",
            json!({"securityProfile": {"settings": confidential(json!({"virtualizedTrustedPlatformModule": "Disabled"}))},
                "osDisk": encrypted(guest)}),
            Some("securityProfile.settings.confidentialVM.uefiSettings.virtualizedTrustedPlatformModule"),
        ),
        (
            "disk encryption of a ConfidentialVM beside encryption at host",
            json!({"securityProfile": {"encryptionAtHost": true, "settings": confidential(
                json!({"virtualizedTrustedPlatformModule": "Enabled", "secureBoot": "Enabled"}))}, "osDisk": encrypted(whole)}),
            Some("securityProfile.encryptionAtHost"),
        ),
        (
            "disk encryption of a ConfidentialVM without secure boot",
            json!({"securityProfile": {"settings": confidential(
                json!({"virtualizedTrustedPlatformModule": "Enabled", "secureBoot": "Disabled"}))}, "osDisk": encrypted(whole)}),
            Some("securityProfile.settings.confidentialVM.uefiSettings.secureBoot"),
        ),
        (
            "encryption type without ConfidentialVM",
            json!({"securityProfile": {"settings": {"confidentialVM": {"uefiSettings": tpm}}}, "osDisk": encrypted(whole)}),
            Some("securityProfile.settings.securityType"),
        ),
        (
            "TrustedLaunch without its settings",
            json!({"securityProfile": {"settings": {"securityType": "TrustedLaunch"}}}),
            Some("securityProfile.settings.trustedLaunch"),
        ),
        (
            "secure boot without TrustedLaunch",
            json!({"securityProfile": {"settings": {"trustedLaunch": {"uefiSettings": {"secureBoot": "Enabled"}}}}}),
            Some("securityProfile.settings.securityType"),
        ),
        ("all that is required", json!({}), None),
        ("spot machines", json!({"spotVMOptions": {}}), None),
        ("spot machines of a government", json!({"spotVMOptions": {}}), None),
        (
            "boot diagnostics of Azure",
            boot(json!({"storageAccountType": "AzureManaged"})),
            None,
        ),
        (
            "boot diagnostics of the customer",
            boot(json!({"storageAccountType": "CustomerManaged", "customerManaged": uri})),
            None,
        ),
        (
            "boot diagnostics of Azure with the customer's account",
            boot(json!({"storageAccountType": "AzureManaged", "customerManaged": uri})),
            Some("diagnostics.boot.customerManaged"),
        ),
        (
            "boot diagnostics of the customer without account",
            boot(json!({"storageAccountType": "CustomerManaged", "customerManaged": {}})),
            Some("diagnostics.boot.customerManaged.storageAccountURI"),
        ),
        (
            "unknown boot diagnostics",
            boot(json!({"storageAccountType": "invalid"})),
            Some("diagnostics.boot.storageAccountType"),
        ),
        (
            "another kind",
            json!({"kind": "INVALID", "apiVersion": "INVALID/v1"}),
            None,
        ),
        (
            "the other group",
            json!({"apiVersion": "machine.openshift.io/v1beta1"}),
            None,
        ),
        ("an unknown field", json!({"randomField-1": "something"}), None),
    ]
}

/// Cases that begin with a size of the OS disk and nothing else: admission fills in the rest.
fn defaulted_specs() -> Vec<Fact> {
    let disks = |disks: Value| json!({"dataDisks": disks});
    let one = |change: Value| {
        let mut disk = json!({"nameSuffix": "test", "diskSizeGB": 4, "lun": 0, "deletionPolicy": "Delete"});
        merge(&mut disk, &change);
        disk
    };
    let ultra = |change: Value| {
        let mut disk = one(json!({"managedDisk": {"storageAccountType": "UltraSSD_LRS"}, "cachingType": "None"}));
        merge(&mut disk, &change);
        disks(json!([disk]))
    };
    let os = |change: Value| {
        let mut disk = json!({"diskSizeGB": 128});
        merge(&mut disk, &change);
        json!({"osDisk": disk})
    };
    let local = json!({"ephemeralStorageLocation": "Local"});
    let group = "/providers/Microsoft.Compute/capacityReservationGroups/myCapacityReservationGroup";
    let reserved = |id: String| json!({"capacityReservationGroupID": id});
    let long = "q".repeat(81);
    vec![
        ("no fields", json!({"osDisk": null}), Some("osDisk.diskSizeGB")),
        ("a size of the OS disk", json!({}), None),
        (
            "ephemeral storage",
            os(json!({"cachingType": "ReadOnly", "diskSettings": local})),
            None,
        ),
        (
            "unknown ephemeral storage",
            os(json!({"diskSettings": {"ephemeralStorageLocation": "INVALID"}})),
            Some("osDisk.diskSettings.ephemeralStorageLocation"),
        ),
        ("a cache of the OS disk", os(json!({"cachingType": "ReadOnly"})), None),
        (
            "an unknown cache of the OS disk",
            os(json!({"cachingType": "INVALID"})),
            Some("osDisk.cachingType"),
        ),
        (
            "ephemeral storage with a cache for writes",
            os(json!({"cachingType": "ReadWrite", "diskSettings": local})),
            Some("osDisk.cachingType"),
        ),
        ("no capacity reservation", reserved(String::new()), None),
        (
            "a capacity reservation",
            reserved(format!(
                "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/g{group}"
            )),
            None,
        ),
        (
            "a capacity reservation that is no resource",
            reserved(format!("/subscri/00000000-0000-0000-0000-000000000000/resour/g{group}")),
            Some("capacityReservationGroupID"),
        ),
        ("one disk of the default type", disks(json!([one(json!({}))])), None),
        (
            "one Ultra disk",
            disks(json!([one(
                json!({"managedDisk": {"storageAccountType": "UltraSSD_LRS"}})
            )])),
            None,
        ),
        (
            "one disk",
            disks(json!([one(
                json!({"managedDisk": {"storageAccountType": "Premium_LRS"}})
            )])),
            None,
        ),
        (
            "two disks",
            disks(json!([one(json!({})), one(json!({"nameSuffix": "test-1", "lun": 1}))])),
            None,
        ),
        (
            "an empty suffix",
            disks(json!([one(json!({"nameSuffix": ""}))])),
            Some("dataDisks[0].nameSuffix"),
        ),
        (
            "a long suffix",
            disks(json!([one(json!({"nameSuffix": long}))])),
            Some("dataDisks[0].nameSuffix"),
        ),
        (
            "a suffix with odd characters",
            disks(json!([one(json!({"nameSuffix": "inv$alid"}))])),
            Some("dataDisks[0].nameSuffix"),
        ),
        (
            "a suffix twice",
            disks(json!([one(json!({})), one(json!({"lun": 1}))])),
            Some("dataDisks[1].nameSuffix"),
        ),
        (
            "a small disk",
            disks(json!([one(json!({"diskSizeGB": 3}))])),
            Some("dataDisks[0].diskSizeGB"),
        ),
        (
            "a LUN twice",
            disks(json!([one(json!({})), one(json!({"nameSuffix": "test-1"}))])),
            Some("dataDisks[1].lun"),
        ),
        (
            "a LUN below 0",
            disks(json!([one(json!({"lun": -1}))])),
            Some("dataDisks[0].lun"),
        ),
        (
            "a LUN above 63",
            disks(json!([one(json!({"lun": 64}))])),
            Some("dataDisks[0].lun"),
        ),
        (
            "an Ultra disk with a cache",
            ultra(json!({"cachingType": "ReadOnly"})),
            Some("dataDisks[0].cachingType"),
        ),
        ("no capability", json!({"ultraSSDCapability": null}), None),
        ("the capability enabled", json!({"ultraSSDCapability": "Enabled"}), None),
        (
            "the capability disabled",
            json!({"ultraSSDCapability": "Disabled"}),
            None,
        ),
        (
            "an unknown capability",
            json!({"ultraSSDCapability": "hello"}),
            Some("ultraSSDCapability"),
        ),
        (
            "an unknown deletion policy",
            ultra(json!({"deletionPolicy": "bla"})),
            Some("dataDisks[0].deletionPolicy"),
        ),
        (
            "no deletion policy",
            ultra(json!({"deletionPolicy": null})),
            Some("dataDisks[0].deletionPolicy"),
        ),
        (
            "deletion policy Detach",
            ultra(json!({"deletionPolicy": "Detach"})),
            None,
        ),
        (
            "deletion policy Delete",
            ultra(json!({"deletionPolicy": "Delete"})),
            None,
        ),
    ]
}

/// Changes of a machine whose spec has everything that the operator fills in, and an ephemeral disk.
fn updates() -> Vec<Fact> {
    vec![
        ("no change", json!({}), None),
        ("the size is removed", json!({"vmSize": null}), Some("vmSize")),
        ("the subnet is removed", json!({"subnet": null}), Some("subnet")),
        (
            "the credentials secret is removed",
            json!({"credentialsSecret": null}),
            Some("credentialsSecret"),
        ),
        (
            "the cache of the ephemeral disk is removed",
            json!({"osDisk": {"cachingType": null}}),
            Some("osDisk.cachingType"),
        ),
    ]
}

/// What the operator's own admission fills in for a machine of cluster `clusterID`.
fn defaulted() -> Value {
    json!({
        "vmSize": "Standard_D4s_V3", "vnet": "clusterID-vnet", "subnet": "clusterID-worker-subnet",
        "image": {"resourceID":
            "/resourceGroups/clusterID-rg/providers/Microsoft.Compute/galleries/gallery_clusterID/images/clusterID/versions/latest"},
        "userDataSecret": {"name": "worker-user-data"},
        "credentialsSecret": {"name": "azure-cloud-credentials", "namespace": "openshift-machine-api"},
    })
}

#[test]
fn what_machine_api_operator_fills_in_is_filled_in_here() {
    let parts =
        json!({"image": {"offer": "test-offer", "sku": "test-sku", "publisher": "base-publisher", "version": "1"}});
    for (given, kept) in [
        (json!({}), None),
        (parts, Some("image")),
        (json!({"image": {"resourceID": IMAGE}}), Some("image")),
        (json!({"networkResourceGroup": "nrg"}), None),
        (json!({"credentialsSecret": {"namespace": "foo"}}), None),
        (
            json!({"userDataSecret": {"name": "foo"}, "credentialsSecret": {"name": "foo"}}),
            None,
        ),
    ] {
        let spec = AzureMachineProviderSpec::from_raw(&given).unwrap();
        let mut expected = defaulted();
        if let Some(field) = kept {
            expected[field] = json!({});
        }
        merge(&mut expected, &given);
        assert_eq!(with_defaults(&given, &spec, "clusterID"), expected, "{given}");
    }
}

/// As a JSON merge patch does.
fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let Value::Object(fields) = value else { return };
    for (key, change) in changes {
        if change.is_null() {
            fields.remove(key);
        } else {
            merge(fields.entry(key.clone()).or_insert(Value::Null), change);
        }
    }
}

#[test]
fn what_machine_api_operator_accepts_and_refuses_is_accepted_and_refused_here() {
    let mut wrong = Vec::new();
    let (mut accepted, mut refused) = (0, 0);
    let begun = json!({"kind": "AzureMachineProviderSpec", "osDisk": {"diskSizeGB": 128}});
    let complete = complete_specs().into_iter().map(|fact| (fact, complete(), None));
    let defaulted = defaulted_specs()
        .into_iter()
        .map(|fact| (fact, begun.clone(), Some(CLUSTER)));
    let mut made = self::defaulted();
    merge(
        &mut made,
        &json!({"osDisk": {"diskSizeGB": 2, "cachingType": "ReadOnly", "diskSettings": {"ephemeralStorageLocation": "Local"}}}),
    );
    let updated = updates().into_iter().map(|fact| (fact, made.clone(), None));
    for ((case, change, field), mut value, cluster) in complete.chain(defaulted).chain(updated) {
        merge(&mut value, &change);
        let found = validate_raw("machine", &value, cluster).errors;
        let paths: Vec<&str> = found.iter().map(|error| error.path.as_str()).collect();
        match field {
            None => accepted += 1,
            Some(_) => refused += 1,
        }
        let expected: Vec<String> = field.iter().map(|field| format!("providerSpec.{field}")).collect();
        if paths != expected {
            wrong.push(format!("{case}: expected {expected:?}, found {paths:?}"));
        }
    }
    println!(
        "machine-api-operator's cases: {accepted} accepted and {refused} refused alike, {} not",
        wrong.len()
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
}
