//! The controllers, by the names of the command line.

use anyhow::Result;
use capstan_kube::Context;
use clap::ValueEnum;

/// A controller that can be run or left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Name {
    /// OpenShift Machines and MachineSets on Azure
    Openshift,
    /// Cluster API machine pools on Azure
    AzurePools,
    /// Cluster API machines on vSphere
    Vsphere,
}

impl Name {
    pub const ALL: [Self; 3] = [Self::Openshift, Self::AzurePools, Self::Vsphere];

    /// Returns the version of its kinds that the controller requests.
    pub fn version(self) -> &'static str {
        match self {
            Self::Openshift => capstan_api::openshift::Machine::VERSION,
            Self::AzurePools => capstan_api::azure::AzureMachinePool::VERSION,
            Self::Vsphere => capstan_api::vsphere::VSphereMachine::VERSION,
        }
    }

    /// Returns the names of its reconcilers, as metrics and logs have them.
    pub fn reconcilers(self) -> &'static [&'static str] {
        match self {
            Self::Openshift => &capstan_openshift::CONTROLLERS,
            Self::AzurePools => &capstan_azure_pools::CONTROLLERS,
            Self::Vsphere => &capstan_vsphere_machines::CONTROLLERS,
        }
    }

    /// Returns the name of the reconciler that runs only with these settings.
    pub fn optional(self, settings: &Settings) -> Option<&'static str> {
        (self == Self::AzurePools && settings.azure_json).then_some(capstan_azure_pools::AZURE_JSON)
    }

    /// Whether a definition, by its name, is of a kind that the controller reconciles or reads.
    pub fn has_definition(self, name: &str) -> bool {
        match self {
            Self::Openshift => name.ends_with(".machine.openshift.io"),
            Self::AzurePools => name.starts_with("azure"),
            Self::Vsphere => name.starts_with("vsphere"),
        }
    }

    /// Returns the definition that the controller waits for.
    pub fn crd(self) -> &'static str {
        match self {
            Self::Openshift => "machines.machine.openshift.io",
            Self::AzurePools => "azuremachinepools.infrastructure.cluster.x-k8s.io",
            Self::Vsphere => "vspheremachines.infrastructure.cluster.x-k8s.io",
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Openshift => "openshift",
            Self::AzurePools => "azure-pools",
            Self::Vsphere => "vsphere",
        })
    }
}

/// Settings of all controllers.
#[derive(Clone)]
pub struct Settings {
    /// Shared, so that tokens and request budgets are too.
    pub azure: capstan_azure::Clients,
    /// How AzureClusters sign in.
    pub azure_sign_in: capstan_azure_pools::SignIn,
    /// Whether the Secret `<pool>-azure-json` of each AzureMachinePool is made.
    pub azure_json: bool,
    pub vsphere: capstan_vsphere_machines::Options,
}

/// Runs a controller until the context's shutdown.
pub async fn run(name: Name, context: Context, settings: Settings) -> Result<()> {
    match name {
        Name::Openshift => {
            capstan_openshift::run(context, settings.azure).await?;
        }
        Name::AzurePools => {
            let options = capstan_azure_pools::Options {
                sign_in: settings.azure_sign_in,
                azure_json: settings.azure_json,
            };
            capstan_azure_pools::run(context, settings.azure, options).await?;
        }
        Name::Vsphere => {
            capstan_vsphere_machines::run(context, settings.vsphere).await?;
        }
    }
    Ok(())
}
