use rstest::rstest;
use serde_json::json;

use super::*;

fn pool() -> AzureMachinePool {
    let pool = json!({"metadata": {"name": "workers", "namespace": "team", "uid": "1"}, "spec": {
        "location": "eastus", "template": {"vmSize": "Standard_D2s_v3", "osDisk": {"osType": "Linux"}, "sshPublicKey": ""}}});
    serde_json::from_value(pool).unwrap()
}

fn cluster(spec: Value) -> AzureCluster {
    let mut cluster = json!({"metadata": {"name": "dock", "namespace": "team"}, "spec": {"location": "eastus"}});
    for (key, value) in spec.as_object().unwrap() {
        cluster["spec"][key] = value.clone();
    }
    serde_json::from_value(cluster).unwrap()
}

fn wanted(spec: Value, identity: NodeIdentity) -> NamedSecret {
    let input = Input {
        pool: &pool(),
        cluster: &cluster(spec),
        cluster_name: "dock",
        group: "yard",
        subscription: "s",
        tenant: "t",
        cloud: "AzurePublicCloud",
        identity: &identity,
    };
    secret(&input).unwrap()
}

fn of_cluster() -> NodeIdentity {
    NodeIdentity::OfCluster {
        client_id: "app".to_owned(),
        secret: "a<b>&c".into(),
    }
}

fn text(secret: &NamedSecret) -> String {
    let data = secret.0.data.as_ref().unwrap();
    let texts: Vec<&[u8]> = KEYS.iter().map(|key| data[*key].0.as_slice()).collect();
    assert!(data.len() == 3 && texts.iter().all(|text| *text == texts[0]));
    String::from_utf8(texts[0].to_vec()).unwrap()
}

#[test]
fn the_settings_name_the_network_that_the_cluster_has_by_default() {
    let secret = wanted(json!({}), of_cluster());
    let expected = r#"{
    "cloud": "AzurePublicCloud",
    "tenantId": "t",
    "subscriptionId": "s",
    "aadClientId": "app",
    "aadClientSecret": "a\u003cb\u003e\u0026c",
    "resourceGroup": "yard",
    "securityGroupName": "dock-node-nsg",
    "securityGroupResourceGroup": "yard",
    "location": "eastus",
    "vmType": "vmss",
    "vnetName": "dock-vnet",
    "vnetResourceGroup": "yard",
    "subnetName": "dock-node-subnet",
    "routeTableName": "dock-node-routetable",
    "loadBalancerSku": "Standard",
    "loadBalancerName": "",
    "maximumLoadBalancerRuleCount": 250,
    "useManagedIdentityExtension": false,
    "useInstanceMetadata": true,
    "enableVmssFlexNodes": true
}"#;
    assert_eq!(text(&secret), expected);
    let meta = &secret.0.metadata;
    assert_eq!(
        (meta.name.as_deref(), meta.namespace.as_deref()),
        (Some("workers-azure-json"), Some("team"))
    );
    assert!(secret.is_owned_by("1"));
    assert_eq!(meta.labels.as_ref().unwrap()["dock"], "owned");
    assert!(!format!("{:?} {secret:?}", Step::Create(secret.clone())).contains("a<b>"));
}

#[rstest]
#[case::of_the_machine(NodeIdentity::SystemAssigned, json!(true), Value::Null)]
#[case::of_the_user(NodeIdentity::UserAssigned { client_id: "id".to_owned() }, json!(true), json!("id"))]
fn nodes_with_an_identity_of_their_own_get_no_secret(
    #[case] identity: NodeIdentity,
    #[case] managed: Value,
    #[case] user: Value,
) {
    let settings: Value = serde_json::from_str(&text(&wanted(json!({}), identity))).unwrap();
    assert_eq!(
        (
            &settings["useManagedIdentityExtension"],
            &settings["userAssignedIdentityID"]
        ),
        (&managed, &user)
    );
    assert!(settings.get("aadClientId").is_none() && settings.get("aadClientSecret").is_none());
}

#[test]
fn the_settings_follow_the_cluster() {
    let spec = json!({
        "extendedLocation": {"name": "edge", "type": "EdgeZone"},
        "networkSpec": {
            "vnet": {"name": "net", "resourceGroup": "nets"},
            "nodeOutboundLB": {"name": "out"},
            "subnets": [
                {"name": "control", "role": "control-plane"},
                {"name": "nodes", "role": "node", "securityGroup": {"name": "nsg"}, "routeTable": {"name": "rt"}}]},
        "cloudProviderConfigOverrides": {
            "rateLimits": [
                {"name": "diskRateLimit", "config": {"cloudProviderRateLimitBucketWrite": 7}},
                {"name": "defaultRateLimit", "config": {"cloudProviderRateLimit": true, "cloudProviderRateLimitQPS": "1200m",
                    "cloudProviderRateLimitBucket": 5}}],
            "backOffs": {"cloudProviderBackoff": true, "cloudProviderBackoffRetries": 3, "cloudProviderBackoffExponent": "2",
                "cloudProviderBackoffJitter": "1.5"}}});
    let text = text(&wanted(spec, NodeIdentity::SystemAssigned));
    let settings: Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("vnetName", "net"),
        ("vnetResourceGroup", "nets"),
        ("securityGroupResourceGroup", "nets"),
        ("securityGroupName", "nsg"),
        ("routeTableName", "rt"),
        ("subnetName", "nodes"),
        ("loadBalancerName", "out"),
        ("extendedLocationType", "EdgeZone"),
        ("extendedLocationName", "edge"),
    ] {
        assert_eq!(settings[field], value, "{field}");
    }
    let end = r#"    "enableVmssFlexNodes": true,
    "cloudProviderRateLimit": true,
    "cloudProviderRateLimitQPS": 1.2,
    "cloudProviderRateLimitBucket": 5,
    "diskRateLimit": {
        "cloudProviderRateLimitBucketWrite": 7
    },
    "cloudProviderBackoff": true,
    "cloudProviderBackoffRetries": 3,
    "cloudProviderBackoffExponent": 2,
    "cloudProviderBackoffJitter": 1.5
}"#;
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn a_cluster_with_one_subnet_for_all_has_names_of_its_own() {
    let spec = json!({"networkSpec": {"subnets": [{"name": "all", "role": "cluster"}]}});
    let settings: Value = serde_json::from_str(&text(&wanted(spec, NodeIdentity::SystemAssigned))).unwrap();
    assert_eq!(settings["securityGroupName"], "dock-nsg");
    assert_eq!(settings["routeTableName"], "dock-routetable");
}

/// Returns the Secret as the API server has it, with a change.
fn stored(change: impl FnOnce(&mut Secret)) -> NamedSecret {
    let mut secret = Secret::clone(&wanted(json!({}), NodeIdentity::SystemAssigned).0);
    change(&mut secret);
    NamedSecret::new(secret)
}

fn steps(found: Option<NamedSecret>) -> Vec<String> {
    let observed = Observed {
        cluster_name: "dock".to_owned(),
        wanted: wanted(json!({}), NodeIdentity::SystemAssigned),
        found,
    };
    let steps = plan(&observed).steps;
    for step in &steps {
        let (Step::Create(after) | Step::Replace(after)) = step;
        assert!(after.is_owned_by("1") && after.0.data == observed.wanted.0.data);
    }
    steps.iter().map(ToString::to_string).collect()
}

#[rstest]
#[case::nothing(None, &["creates Secret workers-azure-json"])]
#[case::made(Some(stored(|_| ())), &[])]
#[case::old(Some(stored(|secret| secret.data = None)), &["updates Secret workers-azure-json"])]
#[case::without_its_owner(Some(stored(|secret| secret.metadata.owner_references = None)), &["updates Secret workers-azure-json"])]
#[case::of_the_user(Some(stored(|secret| (secret.metadata.labels, secret.data) = (None, None))), &[])]
#[case::shared(Some(stored(|secret| {
    secret.metadata.labels = Some([("dock".to_owned(), "shared".to_owned())].into());
    secret.data = None;
})), &[])]
#[case::of_another_cluster(Some(stored(|secret| {
    secret.metadata.labels = Some([("pier".to_owned(), "owned".to_owned())].into());
    secret.data = None;
})), &[])]
#[case::deleted(Some(stored(|secret| {
    secret.data = None;
    secret.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
})), &[])]
fn only_a_secret_with_the_label_of_the_cluster_is_changed(
    #[case] found: Option<NamedSecret>,
    #[case] expected: &[&str],
) {
    assert_eq!(steps(found), expected);
}
