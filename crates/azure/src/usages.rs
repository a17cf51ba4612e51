//! The usage of a subscription's quotas in a region.

use crate::Error;
use crate::budget::policy::Policy;
use crate::client::{Call, Client};
use crate::compute::COMPUTE;
use crate::error::null_is_empty;
use crate::path::Path;
use capstan_core::azure_names::AzureName;
use http::Method;
use serde::Deserialize;

/// One quota of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    pub name: UsageName,
    pub current_value: i64,
    /// Below zero: no limit.
    pub limit: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UsageName {
    /// `cores` for all vCPUs of the region, or a family of sizes.
    #[serde(deserialize_with = "null_is_empty")]
    pub value: String,
    /// As Azure's portal shows it.
    #[serde(deserialize_with = "null_is_empty")]
    pub localized_value: String,
}

impl Client {
    pub(crate) fn region_usages(&self, location: &str) -> Result<Call, Error> {
        let path = Path::subscription(self.subscription())?
            .provider("Microsoft.Compute")
            .resource("locations", AzureName::Resource, location)?
            .word("usages");
        Ok(Call::new(Method::GET, path, COMPUTE, Policy::Other))
    }

    /// The quotas of virtual machines in a region.
    pub async fn usages(&self, location: &str) -> Result<Vec<Usage>, Error> {
        self.list(self.region_usages(location)?).await
    }
}
