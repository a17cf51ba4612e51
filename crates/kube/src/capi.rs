//! Cluster API's own kinds in the form that caches hold. Controllers request the newest version; the client requests the
//! older one where only that is served, and both are read into the same types.

use std::borrow::Cow;
use std::ops::Deref;

use capstan_api::capi::{self, GROUP, Version};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};

macro_rules! cached {
    ($(#[$meta:meta])* $name:ident, $plural:literal) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
        #[serde(transparent)]
        pub struct $name(pub capi::$name);

        impl Deref for $name {
            type Target = capi::$name;

            fn deref(&self) -> &capi::$name {
                &self.0
            }
        }

        impl kube::Resource for $name {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;

            fn kind(_: &()) -> Cow<'_, str> {
                capi::$name::KIND.into()
            }

            fn group(_: &()) -> Cow<'_, str> {
                GROUP.into()
            }

            fn version(_: &()) -> Cow<'_, str> {
                Version::V1Beta2.as_str().into()
            }

            fn plural(_: &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.0.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.0.metadata
            }
        }
    };
}

cached! {
    /// A cluster.
    Cluster, "clusters"
}
cached! {
    /// A machine of a cluster.
    Machine, "machines"
}
cached! {
    /// A pool of machines of a cluster.
    MachinePool, "machinepools"
}
cached! {
    /// A rule for core's drains.
    MachineDrainRule, "machinedrainrules"
}
