//! The small part of Azure's models that we need. Unset fields are not sent; fields that we do not know are kept, so
//! that reading, changing and writing back loses nothing.

mod compute;
mod disk;
mod network;
mod scale_set;

pub use compute::*;
pub use disk::*;
pub use network::*;
pub use scale_set::*;

use std::collections::BTreeMap;

pub type Tags = BTreeMap<String, String>;

/// Structs whose fields are all optional on the wire, with what else Azure sent kept in `rest`.
macro_rules! model {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name {
            $($(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)*
            /// What Azure sent besides.
            #[serde(flatten)]
            pub rest: serde_json::Map<String, serde_json::Value>,
        }
    )* };
}

/// Structs that are only read: what we do not know is dropped at once, for lists are long.
macro_rules! view {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name {
            $($(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)*
        }
    )* };
}

pub(crate) use {model, view};

model! {
    /// A reference by id.
    SubResource { id: String }
    Sku { name: String, tier: String, capacity: i64 }
    Plan { name: String, publisher: String, product: String }
    ManagedIdentities {
        #[serde(rename = "type")]
        kind: String,
        user_assigned_identities: BTreeMap<String, serde_json::Value>,
    }
}

view! {
    /// One line of an instance view.
    InstanceViewStatus { code: String, level: String, display_status: String, message: String, time: String }
}

impl SubResource {
    pub fn of(id: impl ToString) -> Self {
        Self {
            id: Some(id.to_string()),
            ..Self::default()
        }
    }
}

/// `PowerState/running` → `running`.
pub fn power_state(statuses: &[InstanceViewStatus]) -> Option<&str> {
    statuses
        .iter()
        .find_map(|status| status.code.as_deref()?.strip_prefix("PowerState/"))
}
