//! What a machine inherits from its cluster. Pure.

use std::collections::BTreeMap;

use capstan_api::openshift::{AzurePlatformStatus, Infrastructure};

/// The platform that the OpenShift controllers work on.
pub const AZURE: &str = "Azure";

/// The facts about a cluster that its machines depend on. Empty where the cluster has no Infrastructure object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// The name that resources of the cluster begin with, and that their tag has.
    pub name: String,
    /// The resource group of machines that name none.
    pub group: String,
    /// The resource group of networks that no machine names.
    pub network_group: String,
    /// Tags of every resource of the cluster.
    pub tags: BTreeMap<String, String>,
    /// The Azure that the cluster is in; empty for the public one.
    pub cloud: String,
    /// The address of the Resource Manager, where it is not the cloud's own.
    pub endpoint: String,
}

impl Cluster {
    pub fn of(infrastructure: &Infrastructure) -> Self {
        let status = infrastructure.status.clone().unwrap_or_default();
        let AzurePlatformStatus {
            resource_group_name,
            network_resource_group_name,
            cloud_name,
            arm_endpoint,
            resource_tags,
        } = status
            .platform_status
            .and_then(|platform| platform.azure)
            .unwrap_or_default();
        Self {
            name: status.infrastructure_name,
            network_group: match network_resource_group_name.is_empty() {
                true => resource_group_name.clone(),
                false => network_resource_group_name,
            },
            group: resource_group_name,
            tags: resource_tags.into_iter().map(|tag| (tag.key, tag.value)).collect(),
            cloud: cloud_name,
            endpoint: arm_endpoint,
        }
    }
}

/// Returns the platform of a cluster.
pub fn platform(infrastructure: &Infrastructure) -> &str {
    let Some(status) = &infrastructure.status else {
        return "";
    };
    let named = status.platform_status.as_ref().map(|platform| platform.type_.as_str());
    named.filter(|name| !name.is_empty()).unwrap_or(&status.platform)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn infrastructure(status: serde_json::Value) -> Infrastructure {
        serde_json::from_value(
            json!({"metadata": {"name": "cluster"}, "spec": {"cloudConfig": {"name": "x"}}, "status": status}),
        )
        .unwrap()
    }

    #[test]
    fn a_cluster_is_read_as_its_installer_wrote_it() {
        let found = infrastructure(json!({
            "infrastructureName": "ocp-x7", "platform": "Azure", "apiServerURL": "https://api",
            "platformStatus": {"type": "Azure", "azure": {
                "resourceGroupName": "ocp-x7-rg", "networkResourceGroupName": "net-rg", "cloudName": "AzureUSGovernmentCloud",
                "resourceTags": [{"key": "team", "value": "core"}],
            }},
        }));
        let cluster = Cluster::of(&found);
        assert_eq!(platform(&found), AZURE);
        assert_eq!((cluster.name.as_str(), cluster.group.as_str()), ("ocp-x7", "ocp-x7-rg"));
        assert_eq!(
            (cluster.network_group.as_str(), cluster.cloud.as_str()),
            ("net-rg", "AzureUSGovernmentCloud")
        );
        assert_eq!(cluster.tags, BTreeMap::from([("team".to_owned(), "core".to_owned())]));
    }

    #[test]
    fn the_network_is_in_the_clusters_group_unless_the_installer_named_another() {
        let found = infrastructure(json!({"platformStatus": {"type": "Azure", "azure": {"resourceGroupName": "rg"}}}));
        assert_eq!(Cluster::of(&found).network_group, "rg");
    }

    #[test]
    fn the_platform_of_older_clusters_is_known_too() {
        assert_eq!(platform(&infrastructure(json!({"platform": "AWS"}))), "AWS");
        assert_eq!(platform(&Infrastructure::default()), "");
    }
}
