//! User-assigned managed identities.

use capstan_core::azure_names::AzureName;
use http::Method;
use serde::Deserialize;

use crate::budget::policy::Policy;
use crate::client::{Call, Client};
use crate::error::null_is_empty;
use crate::model::Tags;
use crate::owned::Resource;
use crate::{Error, ResourceId};

const IDENTITY: &str = "2023-01-31";

/// A managed identity that machines share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct UserAssignedIdentity {
    pub id: Option<String>,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub tags: Option<Tags>,
    #[serde(deserialize_with = "null_is_empty")]
    pub properties: IdentityProperties,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IdentityProperties {
    #[serde(deserialize_with = "null_is_empty")]
    pub client_id: String,
}

impl Resource for UserAssignedIdentity {
    const TYPE: &'static str = "Microsoft.ManagedIdentity/userAssignedIdentities";

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn kind(&self) -> Option<&str> {
        self.kind.as_deref()
    }

    fn tags(&self) -> Option<&Tags> {
        self.tags.as_ref()
    }
}

/// Whether an id is one of a user-assigned identity.
pub fn is_identity(id: &ResourceId) -> bool {
    id.full_type().eq_ignore_ascii_case(UserAssignedIdentity::TYPE) && id.segments.len() == 1
}

impl Client {
    pub(crate) fn user_assigned_identity(&self, group: &str, name: &str) -> Result<Call, Error> {
        let path = self.group(group)?.provider("Microsoft.ManagedIdentity").resource(
            "userAssignedIdentities",
            AzureName::Resource,
            name,
        )?;
        Ok(Call::new(Method::GET, path, IDENTITY, Policy::Other))
    }

    pub async fn get_user_assigned_identity(
        &self,
        group: &str,
        name: &str,
    ) -> Result<Option<UserAssignedIdentity>, Error> {
        self.get(self.user_assigned_identity(group, name)?).await
    }
}
