//! The Azure that a cluster is in.
//!
//! `azureEnvironment` of an AzureCluster names one of Azure's own clouds, never an address: nobody can make Capstan send a
//! token elsewhere. Where the operator has given Capstan addresses of its own, they serve every cluster.

use std::collections::BTreeMap;

use capstan_api::azure::AzureCluster;
use capstan_azure::{Clients, Cloud};
use kube::ResourceExt;
use parking_lot::Mutex;

use crate::error::Error;

/// The clients of each cloud, made when the first cluster needs them.
pub struct Clouds {
    own: Clients,
    others: Mutex<BTreeMap<String, Clients>>,
}

impl Clouds {
    pub fn new(own: Clients) -> Self {
        Self {
            own,
            others: Mutex::default(),
        }
    }

    /// Returns the clients for a cluster's cloud: Capstan's own where the cluster names none.
    pub fn of(&self, cluster: &AzureCluster) -> Result<Clients, Error> {
        let name = cluster.spec.azure_environment.as_deref().unwrap_or_default();
        if name.is_empty() || self.has_own_addresses() {
            return Ok(self.own.clone());
        }
        let cloud = Cloud::named(name).map_err(|_| {
            Error::Invalid(format!(
                "AzureCluster {}: spec.azureEnvironment: Unsupported value: {name:?}: use AzurePublicCloud, \
                 AzureUSGovernmentCloud or AzureChinaCloud; for another Azure start Capstan with its addresses \
                 (AZURE_AUTHORITY_HOST, AZURE_RESOURCE_MANAGER_ENDPOINT)",
                cluster.name_any()
            ))
        })?;
        if cloud == *self.own.cloud() {
            return Ok(self.own.clone());
        }
        let mut others = self.others.lock();
        if let Some(clients) = others.get(&cloud.name) {
            return Ok(clients.clone());
        }
        let clients = self.own.in_cloud(cloud.clone())?;
        others.insert(cloud.name, clients.clone());
        Ok(clients)
    }

    /// Whether the operator has given addresses that are not one of Azure's own clouds.
    fn has_own_addresses(&self) -> bool {
        let own = self.own.cloud();
        Cloud::named(&own.name).ok().as_ref() != Some(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_azure::Settings;
    use rstest::rstest;
    use serde_json::json;

    fn cluster(environment: Option<&str>) -> AzureCluster {
        let spec = json!({ "location": "l", "azureEnvironment": environment });
        serde_json::from_value(json!({ "metadata": { "name": "c" }, "spec": spec })).unwrap()
    }

    fn host(own: Cloud, environment: Option<&str>) -> Result<String, String> {
        let clouds = Clouds::new(Clients::new(Settings::new(own)).unwrap());
        let clients = clouds.of(&cluster(environment)).map_err(|error| error.to_string())?;
        Ok(clients.cloud().resource_manager.host_str().unwrap().to_owned())
    }

    #[rstest]
    #[case::unset("", None, "management.azure.com")]
    #[case::unset_beside_an_own_choice("AzureChinaCloud", None, "management.chinacloudapi.cn")]
    #[case::government("", Some("AzureUSGovernmentCloud"), "management.usgovcloudapi.net")]
    #[case::public_beside_another_choice("AzureUSGovernmentCloud", Some("AzurePublicCloud"), "management.azure.com")]
    fn a_cluster_chooses_one_of_azures_clouds(
        #[case] own: &str,
        #[case] environment: Option<&str>,
        #[case] expected: &str,
    ) {
        assert_eq!(host(Cloud::named(own).unwrap(), environment).unwrap(), expected);
    }

    #[test]
    fn addresses_of_the_operator_serve_every_cluster() {
        let own = Cloud::custom("AzurePublicCloud", "https://localhost:1", "https://localhost:2").unwrap();
        assert_eq!(host(own, Some("AzureUSGovernmentCloud")).unwrap(), "localhost");
    }

    #[test]
    fn an_unknown_cloud_is_refused_by_name() {
        let refusal = host(Cloud::named("").unwrap(), Some("AzureStackCloud")).unwrap_err();
        assert!(
            refusal.contains("spec.azureEnvironment") && refusal.contains("AzureStackCloud"),
            "{refusal}"
        );
    }

    #[test]
    fn clusters_of_one_cloud_share_its_clients() {
        let clouds = Clouds::new(Clients::new(Settings::new(Cloud::named("").unwrap())).unwrap());
        for _ in 0..2 {
            clouds.of(&cluster(Some("AzureChinaCloud"))).unwrap();
        }
        assert_eq!(clouds.others.lock().len(), 1);
    }
}
