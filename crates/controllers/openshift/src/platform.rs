//! The cluster that the controllers work in: its platform, its facts, and the controllers that were there before.
//!
//! Invariant: on OpenShift nothing is written before Capstan holds the leases of the controllers that it replaces. They
//! run with leader election, so they stand by as long as Capstan holds their leases, and take over when it is removed.

use capstan_api::openshift::Infrastructure;
use capstan_azure::{Clients, Cloud};
use capstan_core::machine::cluster::{self, Cluster};
use capstan_kube::error::code;
use capstan_kube::lease::Group;
use capstan_kube::{Cache, Context, Error};
use kube::Api;
use kube::runtime::watcher;

/// The namespace of OpenShift's own machines and of the controllers that Capstan replaces.
pub const NAMESPACE: &str = "openshift-machine-api";

/// The leases of the controllers that Capstan replaces: Machines, MachineSets, and the links between Machines and Nodes.
const LEASES: [&str; 3] = [
    "cluster-api-provider-azure-leader",
    "cluster-api-provider-machineset-leader",
    "cluster-api-provider-nodelink-leader",
];

/// The name of the one Infrastructure object.
const CLUSTER: &str = "cluster";

/// The kind of cluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Platform {
    /// Not OpenShift: there is no Infrastructure object.
    Plain,
    /// OpenShift on Azure.
    Azure(Cluster),
    /// OpenShift on another platform, whose machines have their own controllers.
    Other(String),
}

impl Platform {
    pub async fn read(client: &kube::Client) -> Result<Self, Error> {
        let api: Api<Infrastructure> = Api::all(client.clone());
        match api.get(CLUSTER).await {
            Ok(found) => Ok(Self::of(&found)),
            // A group that is not served has an answer of its own kind.
            Err(error) if code(&error) == Some(404) => Ok(Self::Plain),
            Err(error) => Err(error.into()),
        }
    }

    fn of(infrastructure: &Infrastructure) -> Self {
        match cluster::platform(infrastructure) {
            cluster::AZURE => Self::Azure(Cluster::of(infrastructure)),
            other => Self::Other(other.to_owned()),
        }
    }
}

/// The facts about the cluster, as they are now.
#[derive(Clone, Default)]
pub struct Facts(Option<Cache<Infrastructure>>);

impl Facts {
    /// Watches the Infrastructure object.
    pub async fn watch(context: &Context) -> Result<Self, Error> {
        let config = watcher::Config::default().fields(&format!("metadata.name={CLUSTER}"));
        let cache = context.cache_cluster_wide_where::<Infrastructure>(config);
        cache.ready().await?;
        Ok(Self(Some(cache)))
    }

    /// Whether machine-api-operator runs beside the controllers.
    pub fn has_operator(&self) -> bool {
        self.0.is_some()
    }

    pub fn cluster(&self) -> Cluster {
        let found = self.0.as_ref().and_then(|cache| cache.get(None, CLUSTER));
        found.map(|found| Cluster::of(&found)).unwrap_or_default()
    }
}

/// Returns the leases of the controllers that Capstan replaces.
pub fn leases(context: &Context) -> Result<Group, Error> {
    let leases = LEASES.map(|name| (NAMESPACE.to_owned(), name.to_owned()));
    let client = context.unfenced()?;
    Ok(Group::of_peers(&client, &leases, &context.holder, context.clock))
}

/// Returns clients of the Azure that the cluster is in, unless the operator of Capstan has chosen another than the public
/// one.
pub fn clients(clients: &Clients, cluster: &Cluster) -> Result<Clients, capstan_azure::Error> {
    let chosen = *clients.cloud() != Cloud::named("")?;
    let same = cluster.cloud.is_empty() && cluster.endpoint.is_empty();
    if chosen || same {
        return Ok(clients.clone());
    }
    let mut cloud = Cloud::named(&cluster.cloud)?;
    if !cluster.endpoint.is_empty() {
        cloud = Cloud::custom(&cloud.name, cloud.authority.as_str(), &cluster.endpoint)?;
    }
    if cloud == *clients.cloud() {
        return Ok(clients.clone());
    }
    clients.in_cloud(cloud)
}

/// Returns the namespace to work in: the one that was asked for, else that of OpenShift's machines.
pub fn namespace(asked: Option<&String>) -> String {
    asked.cloned().unwrap_or_else(|| NAMESPACE.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn infrastructure(platform: &str, cloud: &str) -> Infrastructure {
        let status =
            json!({"infrastructureName": "ocp", "platformStatus": {"type": platform, "azure": {"cloudName": cloud}}});
        serde_json::from_value(json!({"metadata": {"name": CLUSTER}, "status": status})).unwrap()
    }

    #[test]
    fn only_clusters_on_azure_are_worked_on() {
        assert!(matches!(Platform::of(&infrastructure("Azure", "")), Platform::Azure(_)));
        for other in ["AWS", "VSphere", "None", ""] {
            assert_eq!(
                Platform::of(&infrastructure(other, "")),
                Platform::Other(other.to_owned())
            );
        }
    }

    #[test]
    fn requests_go_to_the_azure_of_the_cluster_unless_the_operator_has_chosen_one() {
        let of = |cloud: &str| Clients::new(capstan_azure::Settings::new(Cloud::named(cloud).unwrap())).unwrap();
        let cluster = |cloud: &str| Cluster::of(&infrastructure("Azure", cloud));
        let reached = |own: &str, theirs: &str| {
            let found = clients(&of(own), &cluster(theirs)).unwrap();
            found.cloud().resource_manager.host_str().unwrap_or_default().to_owned()
        };
        assert_eq!(reached("", ""), "management.azure.com");
        assert_eq!(reached("", "AzurePublicCloud"), "management.azure.com");
        assert_eq!(reached("", "AzureUSGovernmentCloud"), "management.usgovcloudapi.net");
        assert_eq!(
            reached("AzureChinaCloud", "AzureUSGovernmentCloud"),
            "management.chinacloudapi.cn"
        );
        let error = clients(&of(""), &cluster("AzureStackCloud")).err().unwrap().to_string();
        assert!(error.contains("AzureStackCloud"), "{error}");
        let mut own = cluster("AzureUSGovernmentCloud");
        own.endpoint = "https://arm.example.gov".into();
        let found = clients(&of(""), &own).unwrap();
        assert_eq!(found.cloud().resource_manager.as_str(), "https://arm.example.gov/");
        assert_eq!(found.cloud().authority.as_str(), "https://login.microsoftonline.us/");
    }
}
