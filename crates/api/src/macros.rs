//! Two small macros: string enums that never lose a value, and the outer shape of a custom resource.
//!
//! Invariant: whatever the API server holds can be read. A value that this version does not know is kept as
//! `Other` and written back unchanged, and an object without `spec` reads as an empty one: a single odd object
//! must not stop a watch.

/// A closed set of strings in the schema, an open one in Rust.
///
/// `pub enum` puts the values into the CRD's schema; `pub open enum` leaves the schema a plain string.
macro_rules! string_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $($body:tt)* }) => {
        string_enum!(@define $(#[$meta])* $name { $($body)* });
        string_enum!(@schema closed $name);
    };
    ($(#[$meta:meta])* pub open enum $name:ident { $($body:tt)* }) => {
        string_enum!(@define $(#[$meta])* $name { $($body)* });
        string_enum!(@schema open $name);
    };
    (@define $(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub enum $name {
            $($(#[$vmeta])* $variant,)+
            /// A value that this version does not know, kept as it was read.
            Other(String),
        }

        impl $name {
            /// The values that this version knows.
            pub const KNOWN: &'static [&'static str] = &[$($text),+];

            /// Returns the value as it is written.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)+
                    Self::Other(value) => value,
                }
            }

            /// Whether this version knows the value.
            pub fn is_known(&self) -> bool {
                !matches!(self, Self::Other(_))
            }
        }

        impl From<&str> for $name {
            fn from(value: &str) -> Self {
                match value {
                    $($text => Self::$variant,)+
                    other => Self::Other(other.to_owned()),
                }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::Other(String::new())
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let value = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                Ok(Self::from(value.as_ref()))
            }
        }
    };
    (@schema closed $name:ident) => {
        string_enum!(@impl $name, |schema: &mut schemars::Schema| {
            schema.insert("enum".to_owned(), serde_json::Value::from($name::KNOWN));
        });
    };
    (@schema open $name:ident) => {
        string_enum!(@impl $name, |_: &mut schemars::Schema| {});
    };
    (@impl $name:ident, $finish:expr) => {
        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let mut schema = schemars::json_schema!({ "type": "string" });
                let finish: fn(&mut schemars::Schema) = $finish;
                finish(&mut schema);
                schema
            }
        }
    };
}

/// A custom resource: `metadata`, `spec` and, where there is one, `status`.
///
/// `"v1beta1" as "v1beta2"`: the fields are those of v1beta1, and objects are requested and written as v1beta2.
macro_rules! resource {
    (
        $(#[$meta:meta])*
        pub struct $name:ident { spec: $spec:ty $(, status: $status:ty)? $(,)? }
        $scope:ident $group:literal / $version:literal $(as $wire:literal)? / $plural:literal
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $name {
            pub metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
            pub spec: $spec,
            $(pub status: Option<$status>,)?
        }

        impl $name {
            pub const GROUP: &'static str = $group;
            pub const VERSION: &'static str = resource!(@wire $version $($wire)?);
            pub const API_VERSION: &'static str = concat!($group, "/", resource!(@wire $version $($wire)?));
            pub const KIND: &'static str = stringify!($name);
            pub const PLURAL: &'static str = $plural;

            /// Returns a new object. `Api::create` adds the namespace by its path.
            pub fn new(name: &str, spec: $spec) -> Self {
                let metadata = k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                    name: Some(name.to_owned()),
                    ..Default::default()
                };
                Self { metadata, spec, $(status: None::<$status>)? }
            }
        }

        impl kube_core::Resource for $name {
            type DynamicType = ();
            type Scope = kube_core::$scope;

            fn kind(_: &()) -> std::borrow::Cow<'_, str> {
                Self::KIND.into()
            }

            fn group(_: &()) -> std::borrow::Cow<'_, str> {
                Self::GROUP.into()
            }

            fn version(_: &()) -> std::borrow::Cow<'_, str> {
                Self::VERSION.into()
            }

            fn plural(_: &()) -> std::borrow::Cow<'_, str> {
                Self::PLURAL.into()
            }

            fn meta(&self) -> &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                &mut self.metadata
            }
        }

        impl crate::schema::Kind for $name {
            const GROUP: &'static str = $group;
            const VERSION: &'static str = $version;
            const KIND: &'static str = stringify!($name);
            const PLURAL: &'static str = $plural;
            const SCOPE: &'static str = resource!(@scope $scope);

            fn spec_schema() -> serde_json::Value {
                crate::schema::plain::<$spec>()
            }

            fn status_schema() -> Option<serde_json::Value> {
                [$(crate::schema::plain::<$status>(),)?].into_iter().next()
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                #[derive(serde::Serialize)]
                #[serde(rename_all = "camelCase")]
                struct Wire<'a> {
                    api_version: &'static str,
                    kind: &'static str,
                    metadata: &'a k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
                    spec: &'a $spec,
                    $(#[serde(skip_serializing_if = "Option::is_none")]
                    status: &'a Option<$status>,)?
                }
                let wire = Wire {
                    api_version: concat!($group, "/", $version),
                    kind: Self::KIND,
                    metadata: &self.metadata,
                    spec: &self.spec,
                    $(status: resource!(@second $status, &self.status),)?
                };
                resource!(@write wire, serializer $(, $wire)?)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(serde::Deserialize)]
                struct Wire {
                    #[serde(default)]
                    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
                    #[serde(default)]
                    spec: $spec,
                    $(#[serde(default)]
                    status: Option<$status>,)?
                }
                let wire: Wire = resource!(@read deserializer $(, $wire)?)?;
                Ok(Self { metadata: wire.metadata, spec: wire.spec, $(status: resource!(@second $status, wire.status))? })
            }
        }
    };
    (@wire $version:literal) => { $version };
    (@wire $version:literal $wire:literal) => { $wire };
    (@write $object:ident, $serializer:ident) => { $object.serialize($serializer) };
    (@write $object:ident, $serializer:ident, $wire:literal) => {
        crate::vsphere::v1beta2::write(&$object, Self::API_VERSION, $serializer)
    };
    (@read $deserializer:ident) => { Wire::deserialize($deserializer) };
    (@read $deserializer:ident, $wire:literal) => { crate::vsphere::v1beta2::read(Self::KIND, $deserializer) };
    (@scope NamespaceResourceScope) => { "Namespaced" };
    (@scope ClusterResourceScope) => { "Cluster" };
    (@second $_:ty, $value:expr) => { $value };
}
