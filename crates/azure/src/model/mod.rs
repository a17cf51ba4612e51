//! The small part of Azure's models that we need. Unset fields are not sent; fields that we do not know are kept, so
//! that reading, changing and writing back loses nothing.

mod compute;
mod disk;
mod network;
mod scale_set;
mod state;

pub use compute::*;
pub use disk::*;
pub use network::*;
pub use scale_set::*;
pub use state::*;

use std::collections::BTreeMap;

pub type Tags = BTreeMap<String, String>;

/// Structs whose fields are all optional on the wire. Fields that they do not name are kept in `rest`.
macro_rules! model {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name {
            $($(#[$field_meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>,)*
            /// The fields that this struct does not name.
            #[serde(flatten)]
            pub rest: serde_json::Map<String, serde_json::Value>,
        }
    )* };
}

/// Structs that are only read. Fields that they do not name are dropped, because lists are long.
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

/// The power state among the statuses of an instance view.
pub fn power_state(statuses: &[InstanceViewStatus]) -> Option<PowerState> {
    let mut codes = statuses.iter().filter_map(|status| status.code.as_deref());
    codes.find_map(|code| code.strip_prefix("PowerState/").map(PowerState::from))
}
