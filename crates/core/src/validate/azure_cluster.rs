//! The names in an AzureCluster that become part of Resource Manager addresses, by Azure's rules.
//!
//! The schema has the same rules; an object may be older than its CRD, and `capstan check` has no API server.

use capstan_api::azure::AzureClusterSpec;

use super::{FieldError, Findings};
use crate::azure_names::AzureName;

/// Everything that is wrong with an AzureCluster. An empty name counts as unset.
pub fn validate(spec: &AzureClusterSpec) -> Findings {
    let network = &spec.network_spec;
    let mut names: Vec<(String, AzureName, Option<&str>)> = vec![
        (
            "spec.subscriptionID".to_owned(),
            AzureName::Subscription,
            spec.subscription_id.as_deref(),
        ),
        (
            "spec.resourceGroup".to_owned(),
            AzureName::ResourceGroup,
            spec.resource_group.as_deref(),
        ),
        (
            "spec.networkSpec.vnet.name".to_owned(),
            AzureName::VirtualNetwork,
            Some(&network.vnet.name),
        ),
        (
            "spec.networkSpec.vnet.resourceGroup".to_owned(),
            AzureName::ResourceGroup,
            network.vnet.resource_group.as_deref(),
        ),
    ];
    if let Some(balancer) = &network.node_outbound_lb {
        let at = |field: &str| format!("spec.networkSpec.nodeOutboundLB.{field}");
        names.push((at("name"), AzureName::LoadBalancer, balancer.name.as_deref()));
        let pool = balancer.backend_pool.name.as_deref();
        names.push((at("backendPool.name"), AzureName::LoadBalancer, pool));
    }
    for (n, subnet) in network.subnets.iter().enumerate() {
        let path = format!("spec.networkSpec.subnets[{n}].name");
        names.push((path, AzureName::Subnet, Some(&subnet.name)));
    }
    let errors = names
        .into_iter()
        .filter_map(|(path, kind, name)| name_error(path, kind, name));
    Findings {
        errors: errors.collect(),
        warnings: Vec::new(),
    }
}

/// Why a name cannot be used, if it is set.
pub(super) fn name_error(path: String, kind: AzureName, name: Option<&str>) -> Option<FieldError> {
    let name = name.filter(|name| !name.is_empty())?;
    let error = kind.check(name).err()?;
    Some(FieldError::invalid(path, error.shown(), error.reason()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    fn cluster() -> Value {
        json!({
            "location": "westeurope", "resourceGroup": "My-RG_(1)",
            "subscriptionID": "00000000-0000-0000-0000-000000000000",
            "networkSpec": {
                "vnet": { "name": "net", "resourceGroup": "net" },
                "subnets": [{ "name": "nodes", "role": "node" }],
                "nodeOutboundLB": { "name": "out", "backendPool": { "name": "pool" } }
            }
        })
    }

    #[test]
    fn names_that_azure_takes_pass() {
        let findings = validate(&serde_json::from_value(cluster()).unwrap());
        assert_eq!(findings.message(), "");
    }

    #[rstest]
    #[case("/subscriptionID", "spec.subscriptionID")]
    #[case("/resourceGroup", "spec.resourceGroup")]
    #[case("/networkSpec/vnet/name", "spec.networkSpec.vnet.name")]
    #[case("/networkSpec/vnet/resourceGroup", "spec.networkSpec.vnet.resourceGroup")]
    #[case("/networkSpec/subnets/0/name", "spec.networkSpec.subnets[0].name")]
    #[case("/networkSpec/nodeOutboundLB/name", "spec.networkSpec.nodeOutboundLB.name")]
    #[case(
        "/networkSpec/nodeOutboundLB/backendPool/name",
        "spec.networkSpec.nodeOutboundLB.backendPool.name"
    )]
    fn a_name_that_would_change_an_address_is_refused_with_its_field(#[case] pointer: &str, #[case] field: &str) {
        for hostile in ["g?api-version=2021-04-01&x=", "a/b", "..", "a%2Fb", "a#b"] {
            let mut spec = cluster();
            *spec.pointer_mut(pointer).unwrap() = json!(hostile);
            let message = validate(&serde_json::from_value(spec).unwrap()).message();
            assert!(message.starts_with(&format!("{field}: Invalid value: ")), "{message}");
        }
    }
}
