//! Cluster modules: machines of one compute cluster that DRS keeps on different hosts.
//!
//! Invariants: every answer is checked by a read, because vCenter answers with success whatever came of a call; and one call about
//! modules at a time for each vCenter, since the calls of a burst of machines change the same list of members.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rest::{NOTHING, Path, Value};
use crate::vcenter::Vcenter;
use capstan_core::vm::MoRef;

const MODULES: Path = Path::new("/rest/vcenter/cluster/modules");
const MEMBERS: Path = Path::new("/rest/vcenter/cluster/modules/vm/");
/// As errors name it.
const MODULE: &str = "cluster module";

#[derive(Serialize)]
struct NewModule<'a> {
    spec: OfCluster<'a>,
}

#[derive(Serialize)]
struct OfCluster<'a> {
    cluster: &'a str,
}

#[derive(Serialize)]
struct Changed<'a> {
    vms: [&'a str; 1],
}

#[derive(Deserialize)]
struct Members {
    vms: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Outcome {
    success: bool,
}

#[derive(Deserialize)]
struct Summaries {
    summaries: Option<Vec<Module>>,
}

/// A cluster module.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Module {
    pub module: String,
    pub cluster: String,
}

impl Vcenter {
    /// Makes a module in a compute cluster; modules have no names, so its id is all that it is found by.
    pub async fn create_cluster_module(&self, cluster: &MoRef) -> Result<String> {
        let _turn = self.0.modules.lock().await;
        let spec = OfCluster {
            cluster: cluster.value(),
        };
        let made: Value<String> = self.rest("POST", &MODULES, Some(&NewModule { spec }), true).await?;
        Ok(made.value)
    }

    pub async fn cluster_modules(&self) -> Result<Vec<Module>> {
        let _turn = self.0.modules.lock().await;
        let all: Value<Summaries> = self.rest("GET", &MODULES, NOTHING, false).await?;
        Ok(all.value.summaries.unwrap_or_default())
    }

    /// Removes a module; one that is gone is no error.
    pub async fn delete_cluster_module(&self, module: &str) -> Result<()> {
        let _turn = self.0.modules.lock().await;
        let path = MODULES.word("/").id(MODULE, module)?;
        let gone = self.rest::<serde_json::Value>("DELETE", &path, NOTHING, true).await;
        match gone.map_err(|error| missing(error, module)) {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The ids of the machines in a module.
    pub async fn cluster_module_members(&self, module: &str) -> Result<Vec<String>> {
        let _turn = self.0.modules.lock().await;
        self.members(module).await
    }

    /// Makes a machine a member of a module; a member already is no error.
    pub async fn add_to_cluster_module(&self, module: &str, vm: &MoRef) -> Result<()> {
        let _turn = self.0.modules.lock().await;
        if self.change(module, "add", vm).await? || self.members(module).await?.iter().any(|id| id == vm.value()) {
            return Ok(());
        }
        Err(Error::Invalid {
            field: MODULE,
            value: module.to_owned(),
            reason: format!("vCenter does not take {vm} in: it is not in the module's compute cluster"),
        })
    }

    /// Takes a machine out of a module; neither a module that is gone nor a machine that is no member is an error.
    pub async fn remove_from_cluster_module(&self, module: &str, vm: &MoRef) -> Result<()> {
        let _turn = self.0.modules.lock().await;
        match self.change(module, "remove", vm).await {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn change(&self, module: &str, action: &'static str, vm: &MoRef) -> Result<bool> {
        let path = MEMBERS.id(MODULE, module)?.word("/members?action=").word(action);
        let body = Changed { vms: [vm.value()] };
        let outcome: Result<Value<Outcome>> = self.rest("POST", &path, Some(&body), true).await;
        Ok(outcome.map_err(|error| missing(error, module))?.value.success)
    }

    async fn members(&self, module: &str) -> Result<Vec<String>> {
        let path = MEMBERS.id(MODULE, module)?.word("/members");
        let members: Result<Value<Members>> = self.rest("GET", &path, NOTHING, false).await;
        let members = members.map_err(|error| missing(error, module))?;
        Ok(members.value.vms.unwrap_or_default())
    }
}

fn missing(error: Error, module: &str) -> Error {
    match error {
        Error::Http { status: 404, .. } => Error::NotFound {
            kind: MODULE,
            path: module.to_owned(),
        },
        error => error,
    }
}
