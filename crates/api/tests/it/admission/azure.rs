//! Pools, their machines, clusters and identities on Azure.

use super::case::{Case, changing, creating, with};
use serde_json::{Value, json};

const POOL: &str = "AzureMachinePool";
const SUBSCRIPTION: &str = "00000000-0000-0000-0000-000000000000";
const ULTRA: &str = "UltraSSD_LRS";

fn pool() -> Value {
    json!({
        "location": "westeurope",
        "template": {
            "vmSize": "Standard_D4s_v3",
            "osDisk": { "osType": "Linux", "diskSizeGB": 30, "managedDisk": { "storageAccountType": "Premium_LRS" } },
            "image": { "marketplace": { "publisher": "p", "offer": "o", "sku": "s", "version": "1" } },
            "dataDisks": [
                { "nameSuffix": "etcd", "diskSizeGB": 256, "lun": 0, "cachingType": "None",
                  "managedDisk": { "storageAccountType": ULTRA }, "diskIOPSReadWrite": 5000, "diskMBpsReadWrite": 200 },
                { "nameSuffix": "logs", "diskSizeGB": 64, "lun": 1, "cachingType": "ReadOnly" },
                { "nameSuffix": "spare", "diskSizeGB": 4 },
            ],
        },
    })
}

fn template_cases() -> Vec<Case> {
    let refused =
        |pointer: &str, value: Value, parts: &[&str]| creating(POOL, with(&pool(), pointer, value)).refused(parts);
    let accepted = |pointer: &str, value: Value| creating(POOL, with(&pool(), pointer, value));
    const ONE: &str = "exactly one of id, marketplace, sharedGallery and computeGallery must be set";
    const OS: &str =
        "UltraSSD_LRS and PremiumV2_LRS can be used with data disks only, they cannot be used with OS disks";
    vec![
        creating(POOL, pool()),
        accepted("/template/image", Value::Null),
        accepted("/template/image", json!({ "id": "/subscriptions/s/images/i" })),
        refused("/template/image", json!({}), &["spec.template.image", ONE]),
        refused(
            "/template/image/id",
            json!("/subscriptions/s"),
            &["spec.template.image", ONE],
        ),
        accepted("/template/terminateNotificationTimeout", json!(5)),
        accepted("/template/terminateNotificationTimeout", json!(15)),
        refused(
            "/template/terminateNotificationTimeout",
            json!(4),
            &["terminateNotificationTimeout", "greater than or equal to 5"],
        ),
        refused(
            "/template/terminateNotificationTimeout",
            json!(16),
            &["terminateNotificationTimeout", "less than or equal to 15"],
        ),
        refused(
            "/template/osDisk/diskSizeGB",
            json!(0),
            &["osDisk.diskSizeGB", "greater than or equal to 1"],
        ),
        refused(
            "/template/osDisk/diskSizeGB",
            json!(2049),
            &["osDisk.diskSizeGB", "less than or equal to 2048"],
        ),
        refused(
            "/template/osDisk/managedDisk/storageAccountType",
            json!(ULTRA),
            &["osDisk.managedDisk.storageAccountType", OS],
        ),
        refused(
            "/template/osDisk/cachingType",
            json!("Always"),
            &["osDisk.cachingType", "\"ReadWrite\""],
        ),
        accepted("/template/networkInterfaces", json!([{ "subnetName": "a" }])),
        accepted("/template/subnetName", json!("a")),
        creating(
            POOL,
            with(
                &with(&pool(), "/template/subnetName", json!("a")),
                "/template/networkInterfaces",
                json!([{ "subnetName": "a" }]),
            ),
        )
        .refused(&[
            "spec.template.subnetName",
            "cannot set both NetworkInterfaces and machine SubnetName",
        ]),
        accepted(
            "/template/diagnostics",
            json!({ "boot": { "storageAccountType": "Managed" } }),
        ),
        refused(
            "/template/diagnostics",
            json!({ "boot": { "storageAccountType": "UserManaged" } }),
            &["userManaged must be specified when storageAccountType is 'UserManaged'"],
        ),
        refused(
            "/template/diagnostics",
            json!({ "boot": { "storageAccountType": "Disabled", "userManaged": { "storageAccountURI": "https://x" } } }),
            &[
                "userManaged",
                "userManaged can be set only when storageAccountType is 'UserManaged'",
            ],
        ),
        changing(
            POOL,
            pool(),
            with(&pool(), "/template/disableVMBootstrapExtension", json!(true)),
        ),
        changing(
            POOL,
            with(&pool(), "/template/disableVMBootstrapExtension", json!(true)),
            pool(),
        )
        .refused(&["disableVMBootstrapExtension is immutable once it has been set"]),
        changing(
            POOL,
            pool(),
            with(&pool(), "/template/vmSize", json!("Standard_D8s_v3")),
        ),
    ]
}

fn data_disk_cases() -> Vec<Case> {
    let refused =
        |pointer: &str, value: Value, parts: &[&str]| creating(POOL, with(&pool(), pointer, value)).refused(parts);
    let accepted = |pointer: &str, value: Value| creating(POOL, with(&pool(), pointer, value));
    let caching = |caching: &str, kind: &str| {
        let spec = with(&pool(), "/template/dataDisks/0/cachingType", json!(caching));
        with(
            &spec,
            "/template/dataDisks/0/managedDisk/storageAccountType",
            json!(kind),
        )
    };
    let words = |caching: &str, kind: &str| {
        format!(
            "cachingType '{caching}' is not supported when storageAccountType is '{kind}'. Allowed values are: 'None'"
        )
    };
    let mut many = pool();
    many["template"]["dataDisks"] = (0..65)
        .map(|i| json!({ "nameSuffix": format!("d{i}"), "diskSizeGB": 4 }))
        .collect::<Vec<_>>()
        .into();
    let mut most = many.clone();
    most["template"]["dataDisks"].as_array_mut().unwrap().pop();
    vec![
        refused(
            "/template/dataDisks/0/diskSizeGB",
            json!(3),
            &["dataDisks[0].diskSizeGB", "greater than or equal to 4"],
        ),
        refused(
            "/template/dataDisks/0/diskSizeGB",
            json!(65537),
            &["dataDisks[0].diskSizeGB", "less than or equal to 65536"],
        ),
        accepted("/template/dataDisks/0/diskSizeGB", json!(65536)),
        refused(
            "/template/dataDisks/1/diskSizeGB",
            json!(32768),
            &[
                "dataDisks[1].diskSizeGB",
                "must be at most 32767 unless storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
            ],
        ),
        refused(
            "/template/dataDisks/0/lun",
            json!(-1),
            &["dataDisks[0].lun", "greater than or equal to 0"],
        ),
        refused(
            "/template/dataDisks/0/lun",
            json!(64),
            &["dataDisks[0].lun", "less than or equal to 63"],
        ),
        accepted("/template/dataDisks/0/lun", json!(63)),
        refused(
            "/template/dataDisks/0/lun",
            json!(1),
            &["spec.template.dataDisks", "each data disk must have a unique lun"],
        ),
        refused(
            "/template/dataDisks/0/nameSuffix",
            json!("logs"),
            &[
                "spec.template.dataDisks",
                "each data disk must have a unique nameSuffix",
            ],
        ),
        refused(
            "/template/dataDisks/0/nameSuffix",
            json!(""),
            &["dataDisks[0].nameSuffix", "at least 1 chars long"],
        ),
        refused(
            "/template/dataDisks/1/cachingType",
            json!("Always"),
            &["dataDisks[1].cachingType", "\"ReadOnly\""],
        ),
        creating(POOL, caching("ReadOnly", ULTRA)).refused(&["dataDisks[0].cachingType", &words("ReadOnly", ULTRA)]),
        creating(POOL, caching("ReadWrite", "PremiumV2_LRS"))
            .refused(&["dataDisks[0].cachingType", &words("ReadWrite", "PremiumV2_LRS")]),
        creating(POOL, caching("None", "PremiumV2_LRS")),
        refused(
            "/template/dataDisks/1/diskIOPSReadWrite",
            json!(500),
            &[
                "dataDisks[1]",
                "diskIOPSReadWrite and diskMBpsReadWrite can be set only when storageAccountType is UltraSSD_LRS or PremiumV2_LRS",
            ],
        ),
        creating(POOL, most),
        creating(POOL, many).refused(&["spec.template.dataDisks", "must have at most 64 items"]),
    ]
}

fn strategy_cases() -> Vec<Case> {
    const ZERO: &str = "rolling update strategy MaxUnavailable must not be 0 if MaxSurge is 0";
    const FORM: &str = "must be a number of machines, 0 or more, or a percentage such as 25%";
    let budgets = |surge: Value, unavailable: Value| {
        let update = json!({ "maxSurge": surge, "maxUnavailable": unavailable });
        creating(
            POOL,
            with(
                &pool(),
                "/strategy",
                json!({ "type": "RollingUpdate", "rollingUpdate": update }),
            ),
        )
    };
    let strategy = |update: Value| creating(POOL, with(&pool(), "/strategy", json!({ "rollingUpdate": update })));
    vec![
        budgets(json!(1), json!(0)),
        budgets(json!(0), json!("20%")),
        budgets(json!("10%"), json!("0%")),
        budgets(json!(0), json!(0)).refused(&["spec.strategy.rollingUpdate", ZERO]),
        // The Azure provider of Cluster API refuses numbers only.
        budgets(json!("0%"), json!(0)),
        budgets(json!(0), json!("0%")),
        budgets(json!("0%"), json!("00%")),
        creating(POOL, with(&pool(), "/strategy", json!({ "type": "OnDelete" }))),
        // The other budget has its default: no machine unavailable, one more.
        strategy(json!({ "maxSurge": 0 })).refused(&["spec.strategy.rollingUpdate", ZERO]),
        strategy(json!({ "maxUnavailable": 0 })),
        budgets(json!(-1), json!(1)).refused(&["spec.strategy.rollingUpdate.maxSurge", FORM]),
        budgets(json!(1), json!("a few")).refused(&["spec.strategy.rollingUpdate.maxUnavailable", FORM]),
        strategy(json!({ "mode": "InPlace", "deletePolicy": "Newest" })),
        strategy(json!({ "mode": "Sideways" })).refused(&["rollingUpdate.mode", "\"Replace\", \"InPlace\""]),
        strategy(json!({ "deletePolicy": "Cheapest" })).refused(&["rollingUpdate.deletePolicy", "\"Oldest\""]),
        creating(POOL, with(&pool(), "/strategy", json!({ "type": "Recreate" })))
            .refused(&["strategy.type", "RollingUpdate"]),
    ]
}

fn pool_cases() -> Vec<Case> {
    let refused =
        |pointer: &str, value: Value, parts: &[&str]| creating(POOL, with(&pool(), pointer, value)).refused(parts);
    let system = with(&pool(), "/identity", json!("SystemAssigned"));
    let user = with(&pool(), "/identity", json!("UserAssigned"));
    let role = with(
        &system,
        "/systemAssignedIdentityRole",
        json!({ "name": "n", "scope": "s", "definitionID": "d" }),
    );
    vec![
        refused("/identity", json!("Somebody"), &["spec.identity", "\"UserAssigned\""]),
        creating(POOL, user.clone()).refused(&[
            "spec.userAssignedIdentities",
            "must be specified for the 'UserAssigned' identity type",
        ]),
        creating(
            POOL,
            with(
                &user,
                "/userAssignedIdentities",
                json!([{ "providerID": "azure:///x" }]),
            ),
        ),
        creating(POOL, role.clone()),
        refused(
            "/systemAssignedIdentityRole",
            json!({ "scope": "s" }),
            &["systemAssignedIdentityRole can only be set when identity is set to 'SystemAssigned'"],
        ),
        creating(POOL, with(&role, "/roleAssignmentName", json!("n"))).refused(&[
            "systemAssignedIdentityRole",
            "cannot set both roleAssignmentName and systemAssignedIdentityRole.name",
        ]),
        creating(POOL, with(&pool(), "/nodeDrainTimeout", json!("10m"))),
        refused(
            "/nodeDrainTimeout",
            json!("soon"),
            &["spec.nodeDrainTimeout", "should match"],
        ),
        changing(
            POOL,
            with(&pool(), "/orchestrationMode", json!("Flexible")),
            with(&role, "/orchestrationMode", json!("Flexible")),
        ),
        changing(POOL, pool(), with(&pool(), "/orchestrationMode", json!("Flexible")))
            .refused(&["spec.orchestrationMode", "orchestrationMode is immutable"]),
        refused(
            "/orchestrationMode",
            json!("Loose"),
            &["spec.orchestrationMode", "\"Flexible\", \"Uniform\""],
        ),
    ]
}

fn machine_cases() -> Vec<Case> {
    const KIND: &str = "AzureMachinePoolMachine";
    let first = json!({ "providerID": "azure:///scale/0" });
    vec![
        creating(KIND, first.clone()),
        creating(KIND, json!({})).refused(&["spec.providerID: Required value"]),
        changing(KIND, first.clone(), with(&first, "/instanceID", json!("0"))),
        changing(KIND, json!({ "providerID": "" }), first.clone()),
        changing(KIND, first, json!({ "providerID": "azure:///scale/1" }))
            .refused(&["spec.providerID", "providerID is immutable"]),
    ]
}

fn cluster_cases() -> Vec<Case> {
    const KIND: &str = "AzureCluster";
    let cluster = json!({
        "location": "westeurope", "resourceGroup": "g", "subscriptionID": SUBSCRIPTION, "azureEnvironment": "AzurePublicCloud",
        "controlPlaneEndpoint": { "host": "h", "port": 6443 },
        "networkSpec": { "vnet": { "name": "v" }, "privateDNSZoneName": "z", "privateDNSZoneResourceGroup": "g", "privateDNSZone": "System",
            "subnets": [{ "name": "nodes", "role": "node" }] },
    });
    let frozen = [
        ("location", "other"),
        ("resourceGroup", "other"),
        ("subscriptionID", "00000000-0000-0000-0000-000000000001"),
        ("azureEnvironment", "other"),
    ];
    let mut cases: Vec<_> = frozen
        .map(|(field, other)| {
            let after = with(&cluster, &format!("/{field}"), json!(other));
            changing(KIND, cluster.clone(), after).refused(&[&format!("spec.{field}"), "field is immutable"])
        })
        .into();
    let changes = [
        ("controlPlaneEndpoint", "host", json!("other")),
        ("controlPlaneEndpoint", "port", json!(1)),
        ("networkSpec", "privateDNSZoneName", json!("other")),
        ("networkSpec", "privateDNSZoneResourceGroup", json!("other")),
        ("networkSpec", "privateDNSZone", json!("None")),
    ];
    for (part, field, value) in changes {
        let after = with(&cluster, &format!("/{part}/{field}"), value);
        cases.push(
            changing(KIND, cluster.clone(), after).refused(&[&format!("spec.{part}.{field}"), "field is immutable"]),
        );
    }
    let without_endpoint = with(&cluster, "/controlPlaneEndpoint", json!({ "host": "", "port": 0 }));
    cases.extend([
        creating(KIND, cluster.clone()),
        changing(KIND, without_endpoint, cluster.clone()),
        changing(KIND, json!({ "location": "westeurope" }), cluster.clone()),
        creating(KIND, with(&cluster, "/networkSpec/subnets/0/role", json!("guest")))
            .refused(&["subnets[0].role", "\"control-plane\""]),
    ]);
    cases.extend(cluster_name_cases(&cluster));
    cases
}

/// Values that would leave their segment of a Resource Manager address.
const HOSTILE: [&str; 6] = ["g?api-version=2021-04-01&x=", "a/b", "..", "a%2Fb", "a#b", "a\nb"];

fn cluster_name_cases(cluster: &Value) -> Vec<Case> {
    const KIND: &str = "AzureCluster";
    let names = [
        ("/resourceGroup", "spec.resourceGroup", "My-RG_(1).größe"),
        ("/subscriptionID", "spec.subscriptionID", SUBSCRIPTION),
        ("/location", "spec.location", "West Europe"),
        ("/networkSpec/vnet/name", "spec.networkSpec.vnet.name", "v.1_"),
        (
            "/networkSpec/vnet/resourceGroup",
            "spec.networkSpec.vnet.resourceGroup",
            "net(1)",
        ),
        (
            "/networkSpec/subnets/0/name",
            "spec.networkSpec.subnets[0].name",
            "nodes-1",
        ),
        (
            "/networkSpec/nodeOutboundLB/name",
            "spec.networkSpec.nodeOutboundLB.name",
            "lb",
        ),
        (
            "/networkSpec/nodeOutboundLB/backendPool/name",
            "spec.networkSpec.nodeOutboundLB.backendPool.name",
            "lb-outboundBackendPool",
        ),
        (
            "/networkSpec/privateDNSZoneResourceGroup",
            "spec.networkSpec.privateDNSZoneResourceGroup",
            "dns",
        ),
    ];
    let mut cases = Vec::new();
    for (pointer, field, good) in names {
        cases.push(creating(KIND, with(cluster, pointer, json!(good))));
        cases.extend(
            HOSTILE.map(|name| creating(KIND, with(cluster, pointer, json!(name))).refused(&[field, "should match"])),
        );
    }
    let peering = |name: &str, group: &str| {
        let peerings = json!([{ "remoteVnetName": name, "resourceGroup": group }]);
        creating(KIND, with(cluster, "/networkSpec/vnet/peerings", peerings))
    };
    cases.extend([
        peering("hub", "net"),
        peering("hub/x", "net").refused(&["spec.networkSpec.vnet.peerings[0].remoteVnetName", "should match"]),
        peering("hub", "net?").refused(&["spec.networkSpec.vnet.peerings[0].resourceGroup", "should match"]),
    ]);
    cases
}

fn pool_name_cases() -> Vec<Case> {
    let names = [
        ("/location", "spec.location", "West Europe"),
        ("/template/vmSize", "spec.template.vmSize", "Standard_M128-32ms"),
        ("/template/subnetName", "spec.template.subnetName", "nodes_1"),
    ];
    let mut cases = Vec::new();
    for (pointer, field, good) in names {
        cases.push(creating(POOL, with(&pool(), pointer, json!(good))));
        cases.extend(
            HOSTILE.map(|name| creating(POOL, with(&pool(), pointer, json!(name))).refused(&[field, "should match"])),
        );
    }
    let interface = |name: &str| {
        let interfaces = json!([{ "subnetName": name }]);
        creating(POOL, with(&pool(), "/template/networkInterfaces", interfaces))
    };
    cases.push(interface("a/b").refused(&["spec.template.networkInterfaces[0].subnetName", "should match"]));
    cases
}

fn identity_cases() -> Vec<Case> {
    const KIND: &str = "AzureClusterIdentity";
    const CREDENTIAL: &str = "can only be set when AzureClusterIdentity is of type UserAssignedIdentityCredential";
    let identity = json!({ "type": "ServicePrincipal", "clientID": "c", "tenantID": "t",
        "clientSecret": { "name": "s", "namespace": "n" }, "allowedNamespaces": { "list": ["a"] } });
    let path = "/userAssignedIdentityCredentialsPath";
    let cloud = "/userAssignedIdentityCredentialsCloudType";
    let own = with(&identity, "/type", json!("UserAssignedIdentityCredential"));
    let managed = with(&identity, "/type", json!("UserAssignedMSI"));
    vec![
        creating(KIND, identity.clone()),
        creating(KIND, with(&identity, "/allowedNamespaces/list", json!([]))),
        creating(KIND, with(&identity, "/tenantID", json!("t/../other"))).refused(&["spec.tenantID", "should match"]),
        creating(KIND, with(&identity, "/type", json!("Password"))).refused(&["spec.type", "\"WorkloadIdentity\""]),
        changing(
            KIND,
            identity.clone(),
            with(&identity, "/type", json!("WorkloadIdentity")),
        )
        .refused(&["spec.type", "field is immutable"]),
        changing(KIND, identity.clone(), with(&identity, "/clientID", json!("other"))),
        creating(KIND, with(&managed, "/resourceID", json!("r"))),
        creating(KIND, with(&identity, "/resourceID", json!("r"))).refused(&[
            "spec.resourceID: Forbidden",
            "can only be set when AzureClusterIdentity is of type UserAssignedMSI",
        ]),
        creating(KIND, with(&with(&own, path, json!("p")), cloud, json!("public"))),
        creating(KIND, with(&identity, path, json!("p")))
            .refused(&["spec.userAssignedIdentityCredentialsPath", CREDENTIAL]),
        creating(KIND, with(&identity, cloud, json!("p")))
            .refused(&["spec.userAssignedIdentityCredentialsCloudType", CREDENTIAL]),
    ]
}

pub fn cases() -> Vec<Case> {
    let groups = [
        template_cases,
        data_disk_cases,
        strategy_cases,
        pool_cases,
        pool_name_cases,
        machine_cases,
        cluster_cases,
        identity_cases,
    ];
    groups.into_iter().flat_map(|cases| cases()).collect()
}
