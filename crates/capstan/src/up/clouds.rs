//! The simulated clouds of `capstan up`, and the variables that describe them.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use capstan_sim::azure;
use capstan_testkit::Vcsim;

use crate::controllers::Name;

pub struct Clouds {
    pub azure: Option<azure::Handle>,
    pub vsphere: Option<Vcsim>,
}

const VCENTER_ADDRESS: &str = "vcenter-address";
const AZURE_ADDRESS: &str = "azure-address";

/// Returns the address of an earlier start, if it is still free.
fn kept_address(dir: &Path, file: &str) -> Option<String> {
    let address = std::fs::read_to_string(dir.join(file)).ok()?;
    TcpListener::bind(&address).is_ok().then_some(address)
}

impl Clouds {
    /// Starts the clouds that the controllers need. Instances of the simulated Azure join the cluster as Nodes.
    ///
    /// `dir` keeps both clouds over restarts: their content, their certificates and their addresses.
    pub async fn start(controllers: &[Name], cluster: &super::Cluster, dir: Option<&Path>) -> Result<Self> {
        let mut clouds = Self {
            azure: None,
            vsphere: None,
        };
        if controllers
            .iter()
            .any(|name| matches!(name, Name::Openshift | Name::AzurePools))
        {
            clouds.azure = Some(start_azure(cluster, dir).await?);
        }
        if controllers.contains(&Name::Vsphere) {
            let options = capstan_testkit::vcsim::Options {
                listen: dir.and_then(|dir| kept_address(dir, VCENTER_ADDRESS)),
                state: dir.map(|dir| dir.join("vcenter")),
                clone_delay: Duration::from_secs(1),
                guest_ip_delay: Some(Duration::from_millis(500)),
                ..Default::default()
            };
            let vcsim = capstan_testkit::vcsim(options).await;
            let vcsim = vcsim.context("cannot start the simulated vCenter")?;
            if let Some(dir) = dir {
                std::fs::write(dir.join(VCENTER_ADDRESS), &vcsim.server)?;
            }
            clouds.vsphere = Some(vcsim);
        }
        Ok(clouds)
    }

    pub fn line(&self) -> String {
        let azure = self.azure.iter().map(|azure| format!("Azure at {}", azure.url));
        let vsphere = self.vsphere.iter().map(|vcsim| format!("vCenter at {}", vcsim.url));
        azure.chain(vsphere).collect::<Vec<_>>().join(", ")
    }

    pub fn stop(self) -> Result<()> {
        self.azure.map_or(Ok(()), azure::Handle::stop)
    }

    pub fn azure_settings(&self) -> Result<capstan_azure::Settings> {
        let Some(azure) = &self.azure else {
            return Ok(capstan_azure::Settings::from_env()?);
        };
        let cloud = capstan_azure::Cloud::custom("AzurePublicCloud", &azure.url, &azure.url)?;
        Ok(capstan_azure::Settings {
            ca_file: Some(azure.ca_file.clone()),
            ..capstan_azure::Settings::new(cloud)
        })
    }

    /// Returns the variables that manifests need. Examples refer to them as `${NAME}`.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if let Some(azure) = &self.azure {
            variables.extend([
                ("AZURE_RESOURCE_MANAGER_ENDPOINT", azure.url.clone()),
                ("AZURE_AUTHORITY_HOST", azure.url.clone()),
                ("AZURE_CA_FILE", azure.ca_file.display().to_string()),
                ("AZURE_SUBSCRIPTION_ID", azure.subscription.clone()),
                ("AZURE_TENANT_ID", azure.tenant.clone()),
                ("AZURE_CLIENT_ID", azure.client_id.clone()),
                ("AZURE_CLIENT_SECRET", azure.client_secret.clone()),
            ]);
        }
        if let Some(vcsim) = &self.vsphere {
            variables.extend([
                ("VSPHERE_SERVER", vcsim.server.clone()),
                ("VSPHERE_USERNAME", vcsim.username.clone()),
                ("VSPHERE_PASSWORD", vcsim.password.clone()),
                ("VSPHERE_THUMBPRINT", vcsim.thumbprint.clone()),
                ("VSPHERE_ADMIN", vcsim.admin.url().to_owned()),
            ]);
        }
        variables
    }
}

async fn start_azure(cluster: &super::Cluster, dir: Option<&Path>) -> Result<azure::Handle> {
    let mut config = azure::Config {
        joiner: Some(azure::joiner::Options::client(cluster.client.clone())),
        state: dir.map(|dir| dir.join("azure.json")),
        ca_file: dir.map(|dir| dir.join("azure-ca.pem")),
        strict: azure::Strict::ALL,
        ..azure::Config::quick()
    };
    if let Some(kept) = dir.and_then(|dir| kept_address(dir, AZURE_ADDRESS)) {
        config.listen = kept.parse()?;
    }
    let azure = azure::Azure::start(config).await;
    let azure = azure.context("cannot start the simulated Azure")?;
    if let Some(dir) = dir {
        std::fs::write(dir.join(AZURE_ADDRESS), azure.address.to_string())?;
    }
    Ok(azure)
}
