//! Machines, their templates, virtual machines, clusters and topology on vSphere.

use super::case::{CRDS, Case, changing, creating, with};
use serde_json::{Value, json};

const MACHINE: &str = "VSphereMachine";
const TEMPLATE: &str = "VSphereMachineTemplate";
const VM: &str = "VSphereVM";

fn clone_spec() -> Value {
    json!({
        "template": "CAPV_2_Disk", "server": "vcenter.example.com", "cloneMode": "linkedClone", "datacenter": "dc",
        "datastore": "/dc/datastore/vsan", "folder": "/dc/vm/f", "resourcePool": "/dc/host/c", "diskGiB": 128,
        "numCPUs": 4, "memoryMiB": 16384, "hardwareVersion": "vmx-17",
        "dataDisks": [
            { "name": "images", "sizeGiB": 50, "provisioningMode": "Thin" },
            { "name": "swap", "sizeGiB": 90, "provisioningMode": "Thick", "controller": { "type": "NVMe", "bus": 1 },
              "unitNumber": 3, "datastore": "fast", "storagePolicyName": "gold" },
            { "sizeGiB": 1, "unitNumber": 3 },
        ],
        "network": { "devices": [{ "dhcp4": true, "networkName": "ci-vlan-1240" }] },
    })
}

fn in_template(spec: Value) -> Value {
    json!({ "template": { "spec": spec } })
}

/// Two values for every field, so that each can be changed alone.
fn both(field: &str) -> (Value, Value) {
    let quantity = |cpu: &str| json!({ "requests": { "cpu": cpu } });
    match field {
        "numCPUs" | "numCoresPerSocket" | "memoryMiB" | "diskGiB" => (json!(1), json!(2)),
        "additionalDisksGiB" => (json!([1]), json!([2])),
        "customVMXKeys" => (json!({ "a": "1" }), json!({ "a": "2" })),
        "tagIDs" => (json!(["a"]), json!(["b"])),
        "pciDevices" => (
            json!([{ "deviceId": 1, "vendorId": 2 }]),
            json!([{ "vGPUProfile": "grid" }]),
        ),
        "dataDisks" => (json!([{ "sizeGiB": 1 }]), json!([{ "sizeGiB": 2 }])),
        "nestedHV" => (json!(true), json!(false)),
        "ftEncryptionMode" => (json!("ftEncryptionDisabled"), json!("ftEncryptionRequired")),
        "migrateEncryption" => (json!("disabled"), json!("required")),
        "hardwareVersion" => (json!("vmx-17"), json!("vmx-21")),
        "resources" => (quantity("1"), quantity("2")),
        "namingStrategy" => (json!({ "template": "a" }), json!({ "template": "b" })),
        _ => (json!("a"), json!("b")),
    }
}

/// A field that is changed or taken away is refused by its name; the fields come from the definition itself.
fn frozen_cases(kind: &'static str, mutable: &[&str]) -> Vec<Case> {
    let crd = CRDS.iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
    let fields = &schema["openAPIV3Schema"]["properties"]["spec"]["properties"];
    let fields = fields.as_object().unwrap().keys();
    let frozen: Vec<_> = fields
        .map(String::as_str)
        .filter(|field| !mutable.contains(field))
        .collect();
    let mut before = json!({ "network": { "devices": [] } });
    for field in &frozen {
        before[field] = both(field).0;
    }
    let cases = frozen.iter().flat_map(|field| {
        let pointer = format!("/{field}");
        let words = format!("spec.{field}: Forbidden: cannot be modified");
        let change = changing(kind, before.clone(), with(&before, &pointer, both(field).1)).refused(&[&words]);
        // Without its template nothing is a machine.
        let removal = (*field != "template")
            .then(|| changing(kind, before.clone(), with(&before, &pointer, Value::Null)).refused(&[&words]));
        [Some(change), removal].into_iter().flatten()
    });
    cases.collect()
}

fn may_change(kind: &'static str) -> Vec<Case> {
    let before = clone_spec();
    let network = |field: &str, value: Value| {
        let after = with(&before, &format!("/network/{field}"), value);
        changing(kind, before.clone(), after)
            .refused(&[&format!("spec.network.{field}: Forbidden: cannot be modified")])
    };
    let soft = with(
        &with(&before, "/powerOffMode", json!("trySoft")),
        "/guestSoftPowerOffTimeout",
        json!("3m"),
    );
    vec![
        creating(kind, before.clone()),
        changing(
            kind,
            before.clone(),
            with(
                &before,
                "/network/devices",
                json!([{ "networkName": "n", "ipAddrs": ["10.0.0.7/24"] }]),
            ),
        ),
        changing(kind, before.clone(), soft),
        network("routes", json!([{ "to": "a", "via": "b", "metric": 1 }])),
        network("preferredAPIServerCidr", json!("10.0.0.0/8")),
        creating(kind, with(&before, "/guestSoftPowerOffTimeout", json!("3m"))).refused(&[
            "spec.guestSoftPowerOffTimeout",
            "should not be set in templates unless the powerOffMode is trySoft",
        ]),
        creating(kind, with(&before, "/powerOffMode", json!("rough"))).refused(&["spec.powerOffMode", "\"trySoft\""]),
        creating(kind, with(&before, "/network/devices/0/ipAddrs", json!(["10.0.0.7"])))
            .refused(&["ip addresses should be in the CIDR format"]),
        creating(kind, with(&before, "/network/devices/0/ipAddrs", json!(["fd00::7/64"]))),
    ]
}

/// Rules of the clone itself, wherever it is spelled out.
fn clone_cases(kind: &'static str, wrap: fn(Value) -> Value, root: &str) -> Vec<Case> {
    let refused = |pointer: &str, value: Value, parts: &[&str]| {
        let parts: Vec<_> = parts.iter().map(|part| part.replace("spec.", root)).collect();
        let parts: Vec<_> = parts.iter().map(String::as_str).collect();
        creating(kind, wrap(with(&clone_spec(), pointer, value))).refused(&parts)
    };
    let accepted = |pointer: &str, value: Value| creating(kind, wrap(with(&clone_spec(), pointer, value)));
    const TYPE: &str =
        "provisioningType is not a field of a data disk: use provisioningMode (Thin, Thick or EagerlyZeroed)";
    const PCI: &str = "should have either deviceId + vendorId or vGPUProfile set";
    const UNIT: &str = "two data disks must not have the same unitNumber on the same controller";
    let disks = |count: i32| {
        (0..count)
            .map(|i| json!({ "name": format!("d{i}"), "sizeGiB": 1 }))
            .collect::<Vec<_>>()
    };
    vec![
        creating(kind, wrap(clone_spec())),
        refused(
            "/dataDisks/0/provisioningType",
            json!("Thin"),
            &["spec.dataDisks[0].provisioningType", TYPE],
        ),
        refused(
            "/dataDisks/0/provisioningMode",
            json!("Fat"),
            &["spec.dataDisks[0].provisioningMode", "\"EagerlyZeroed\""],
        ),
        accepted("/dataDisks/0/provisioningMode", json!("EagerlyZeroed")),
        accepted("/dataDisks/0/name", json!("swap")),
        refused(
            "/dataDisks/0/sizeGiB",
            json!(0),
            &["spec.dataDisks[0].sizeGiB", "greater than or equal to 1"],
        ),
        refused(
            "/dataDisks/0/sizeGiB",
            Value::Null,
            &["spec.dataDisks[0].sizeGiB: Required value"],
        ),
        refused(
            "/dataDisks/1/controller/type",
            json!("Floppy"),
            &["spec.dataDisks[1].controller.type", "\"PVSCSI\""],
        ),
        refused(
            "/dataDisks/1/unitNumber",
            json!(64),
            &["spec.dataDisks[1].unitNumber", "less than or equal to 63"],
        ),
        refused("/dataDisks/1/controller", Value::Null, &["spec.dataDisks", UNIT]),
        accepted("/dataDisks", disks(60).into()),
        refused(
            "/dataDisks",
            disks(257).into(),
            &["spec.dataDisks", "must have at most 256 items"],
        ),
        refused(
            "/hardwareVersion",
            json!("17"),
            &[
                "spec.hardwareVersion",
                "should be a valid VM hardware version, example vmx-17",
            ],
        ),
        accepted("/pciDevices", json!([{ "vGPUProfile": "grid" }])),
        refused("/pciDevices", json!([{ "deviceId": 1 }]), &["spec.pciDevices[0]", PCI]),
        refused(
            "/pciDevices",
            json!([{ "deviceId": 1, "vendorId": 2, "vGPUProfile": "grid" }]),
            &["spec.pciDevices[0]", PCI],
        ),
        refused("/template", json!(""), &["spec.template", "at least 1 chars long"]),
    ]
}

fn template_cases() -> Vec<Case> {
    let template = in_template(clone_spec());
    let refused = |pointer: &str, value: Value, parts: &[&str]| {
        creating(TEMPLATE, in_template(with(&clone_spec(), pointer, value))).refused(parts)
    };
    vec![
        changing(
            TEMPLATE,
            template.clone(),
            with(&template, "/template/metadata", json!({ "labels": { "a": "b" } })),
        ),
        creating(
            TEMPLATE,
            in_template(with(&clone_spec(), "/network/devices/0/ipAddrs", json!([]))),
        ),
        refused(
            "/providerID",
            json!("vsphere://x"),
            &["spec.template.spec.providerID: Forbidden", "cannot be set in templates"],
        ),
        refused(
            "/network/devices/0/ipAddrs",
            json!(["10.0.0.7/24"]),
            &[
                "spec.template.spec.network.devices",
                "ipAddrs cannot be set in templates",
            ],
        ),
        refused(
            "/network/devices/0/ipAddrs",
            json!(["10.0.0.7"]),
            &["ip addresses should be in the CIDR format"],
        ),
        refused(
            "/guestSoftPowerOffTimeout",
            json!("3m"),
            &[
                "guestSoftPowerOffTimeout",
                "should not be set in templates unless the powerOffMode is trySoft",
            ],
        ),
    ]
}

fn vm_cases() -> Vec<Case> {
    let before = clone_spec();
    let once = |field: &'static str| {
        let pointer = format!("/{field}");
        let first = with(&before, &pointer, json!("a"));
        let words = format!("spec.{field}: Forbidden: cannot be modified");
        [
            changing(VM, before.clone(), first.clone()),
            changing(VM, first.clone(), with(&before, &pointer, json!("b"))).refused(&[&words]),
            changing(VM, first, before.clone()).refused(&[&words]),
        ]
    };
    let windows = with(&before, "/os", json!("Windows"));
    let reference = json!({ "apiVersion": "v1", "kind": "Secret", "name": "s" });
    let mut cases = vec![
        creating(VM, windows.clone()).named("fifteen-letters"),
        creating(VM, windows).named("sixteen-letters-").refused(&["name"]),
        creating(VM, with(&before, "/os", json!("Windows")))
            .named("sixteen-lettersx")
            .refused(&["name has to be less than 16 characters for Windows VM"]),
        creating(VM, before.clone()).named("a-long-name-for-a-linux-machine"),
        changing(VM, before.clone(), with(&before, "/bootstrapRef", reference)),
        changing(VM, before.clone(), with(&before, "/thumbprint", json!("aa:bb"))),
    ];
    cases.extend(once("os"));
    cases.extend(once("biosUUID"));
    cases
}

fn cluster_cases() -> Vec<Case> {
    let cluster = json!({ "server": "vcenter.example.com", "identityRef": { "kind": "Secret", "name": "s" } });
    let template = in_template(cluster.clone());
    vec![
        creating("VSphereCluster", cluster.clone()),
        creating(
            "VSphereCluster",
            with(&cluster, "/identityRef/kind", json!("ConfigMap")),
        )
        .refused(&["spec.identityRef.kind", "\"Secret\""]),
        changing(
            "VSphereCluster",
            cluster.clone(),
            with(&cluster, "/controlPlaneEndpoint", json!({ "host": "h", "port": 6443 })),
        ),
        creating("VSphereClusterTemplate", template.clone()),
        changing("VSphereClusterTemplate", template.clone(), template.clone()),
        changing(
            "VSphereClusterTemplate",
            template.clone(),
            with(&template, "/template/spec/server", json!("other")),
        )
        .refused(&["spec.template.spec: Forbidden: VSphereClusterTemplate spec is immutable"]),
        creating(
            "VSphereClusterIdentity",
            json!({ "secretName": "s", "allowedNamespaces": { "selector": { "matchLabels": {} } } }),
        ),
        creating("VSphereClusterIdentity", json!({ "secretName": "" }))
            .refused(&["spec.secretName", "at least 1 chars long"]),
    ]
}

fn topology_cases() -> Vec<Case> {
    const KIND: &str = "VSphereFailureDomain";
    let domain = json!({
        "region": { "name": "r", "type": "Datacenter", "tagCategory": "k8s-region" },
        "zone": { "name": "z", "type": "ComputeCluster", "tagCategory": "k8s-zone" },
        "topology": { "datacenter": "dc", "computeCluster": "c" },
    });
    let refused =
        |pointer: &str, value: Value, parts: &[&str]| creating(KIND, with(&domain, pointer, value)).refused(parts);
    let hosts = json!({ "vmGroupName": "v", "hostGroupName": "h" });
    let datacenters = with(
        &with(&domain, "/zone/type", json!("Datacenter")),
        "/topology/computeCluster",
        Value::Null,
    );
    let networks = with(&domain, "/topology/networks", json!(["n"]));
    vec![
        creating(KIND, domain.clone()),
        creating(KIND, datacenters.clone()),
        changing(KIND, domain.clone(), domain.clone()),
        changing(
            KIND,
            domain.clone(),
            with(&domain, "/topology/datacenter", json!("other")),
        )
        .refused(&["spec: Forbidden: VSphereFailureDomainSpec is immutable"]),
        refused(
            "/topology/computeCluster",
            Value::Null,
            &[
                "spec.topology.computeCluster: Forbidden",
                "cannot be nil if the Failure Domain type of region or zone is ComputeCluster",
            ],
        ),
        creating(KIND, with(&datacenters, "/topology/hosts", hosts.clone()))
            .refused(&["spec.topology.computeCluster: Forbidden: cannot be empty if Hosts is not empty"]),
        refused(
            "/region/type",
            json!("HostGroup"),
            &["spec.region.type: Forbidden: region's Failure Domain type cannot be HostGroup"],
        ),
        refused(
            "/zone/type",
            json!("HostGroup"),
            &["spec.topology.hosts: Forbidden: cannot be nil if zone's Failure Domain type is HostGroup"],
        ),
        creating(
            KIND,
            with(
                &with(&domain, "/zone/type", json!("HostGroup")),
                "/topology/hosts",
                hosts,
            ),
        ),
        creating(KIND, networks.clone()),
        creating(
            KIND,
            with(
                &networks,
                "/topology/networkConfigurations",
                json!([{ "networkName": "n" }]),
            ),
        )
        .refused(&[
            "spec.topology.networks: Forbidden: cannot be set if spec.topology.networkConfigurations is already set",
        ]),
        creating(
            "VSphereDeploymentZone",
            json!({ "server": "s", "failureDomain": "f", "placementConstraint": { "folder": "f" } }),
        ),
        creating("VSphereDeploymentZone", json!({ "server": "s" })),
    ]
}

pub fn cases() -> Vec<Case> {
    let machine = ["providerID", "powerOffMode", "guestSoftPowerOffTimeout", "network"];
    let vm = [
        "bootstrapRef",
        "thumbprint",
        "powerOffMode",
        "guestSoftPowerOffTimeout",
        "network",
        "os",
        "biosUUID",
    ];
    let groups = [
        frozen_cases(MACHINE, &machine),
        frozen_cases(VM, &vm),
        may_change(MACHINE),
        may_change(VM),
        clone_cases(MACHINE, |spec| spec, "spec."),
        clone_cases(VM, |spec| spec, "spec."),
        clone_cases(TEMPLATE, in_template, "spec.template.spec."),
        template_cases(),
        vm_cases(),
        cluster_cases(),
        topology_cases(),
        vec![changing(
            MACHINE,
            clone_spec(),
            with(&clone_spec(), "/providerID", json!("vsphere://x")),
        )],
    ];
    groups.into_iter().flatten().collect()
}
