//! The version of Cluster API's own kinds that the management cluster serves.
//!
//! Invariant: callers request such a kind in the newest version and get it in the version that is served. When a list in
//! one version is not found, the client requests it in the other; the version that works is used for that kind until it
//! fails in turn. Both versions are read into the same types, so no other code depends on the version.

use std::collections::HashMap;

use capstan_api::capi::{GROUP, Version};
use http::{Method, Request, Uri};
use kube::client::Body;
use parking_lot::Mutex;

/// The kind in a path under Cluster API's group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    pub plural: String,
    /// Whether the path is that of all objects, in a namespace or everywhere.
    collection: bool,
}

/// The versions that worked, by kind; a kind that is not here is requested in the newest version.
#[derive(Debug, Default)]
pub struct Served(Mutex<HashMap<String, Version>>);

fn prefix(version: Version) -> String {
    format!("/apis/{GROUP}/{}/", version.as_str())
}

/// Returns the kind in a path of the newest version.
pub fn kind(path: &str) -> Option<Kind> {
    let rest = path.strip_prefix(&prefix(Version::V1Beta2))?;
    let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
    let (plural, further) = match parts.as_slice() {
        ["namespaces", _, plural, further @ ..] => (*plural, further),
        [plural, further @ ..] => (*plural, further),
        [] => return None,
    };
    Some(Kind {
        plural: plural.to_owned(),
        collection: further.is_empty(),
    })
}

impl Kind {
    /// Whether a 404 to this request can only mean that the kind is not served.
    pub fn proves_absence(&self, method: &Method) -> bool {
        self.collection && *method == Method::GET
    }
}

impl Served {
    pub fn version(&self, kind: &Kind) -> Version {
        self.0.lock().get(&kind.plural).copied().unwrap_or_default()
    }

    pub fn remember(&self, kind: &Kind, version: Version) {
        tracing::info!(kind = %kind.plural, version = version.as_str(), "Cluster API is served in this version");
        self.0.lock().insert(kind.plural.clone(), version);
    }
}

/// Returns the other version.
pub fn other(version: Version) -> Version {
    match version {
        Version::V1Beta1 => Version::V1Beta2,
        Version::V1Beta2 => Version::V1Beta1,
    }
}

/// Replaces the version in the request's path.
pub fn set_version(request: &mut Request<Body>, version: Version) {
    let Some(asked) = request.uri().path_and_query() else {
        return;
    };
    let path = asked
        .as_str()
        .replacen(&prefix(Version::V1Beta2), &prefix(version), 1)
        .parse();
    let mut parts = request.uri().clone().into_parts();
    if let Ok(path) = path {
        parts.path_and_query = Some(path);
    }
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::everywhere("/apis/cluster.x-k8s.io/v1beta2/machines", Some(("machines", true)))]
    #[case::in_a_namespace("/apis/cluster.x-k8s.io/v1beta2/namespaces/ns/machines", Some(("machines", true)))]
    #[case::one("/apis/cluster.x-k8s.io/v1beta2/namespaces/ns/machines/m/status", Some(("machines", false)))]
    #[case::discovery("/apis/cluster.x-k8s.io/v1beta2/", None)]
    #[case::another_group("/apis/ipam.cluster.x-k8s.io/v1beta2/ipaddresses", None)]
    #[case::another_version("/apis/cluster.x-k8s.io/v1beta1/machines", None)]
    fn a_path_tells_its_kind(#[case] path: &str, #[case] expected: Option<(&str, bool)>) {
        let found = kind(path);
        assert_eq!(found.as_ref().map(|k| (k.plural.as_str(), k.collection)), expected);
    }

    #[test]
    fn only_the_version_of_a_request_is_replaced() {
        let uri = "/apis/cluster.x-k8s.io/v1beta2/machines?watch=true&x=/apis/cluster.x-k8s.io/v1beta2/";
        let mut request = Request::get(uri).body(Body::empty()).unwrap();
        set_version(&mut request, Version::V1Beta1);
        let expected = "/apis/cluster.x-k8s.io/v1beta1/machines?watch=true&x=/apis/cluster.x-k8s.io/v1beta2/";
        assert_eq!(request.uri().to_string(), expected);
    }

    #[test]
    fn the_version_that_worked_is_used_for_its_kind_alone() {
        let served = Served::default();
        let machines = kind("/apis/cluster.x-k8s.io/v1beta2/machines").unwrap();
        let clusters = kind("/apis/cluster.x-k8s.io/v1beta2/clusters").unwrap();
        served.remember(&machines, Version::V1Beta1);
        assert_eq!(served.version(&machines), Version::V1Beta1);
        assert_eq!(served.version(&clusters), Version::V1Beta2);
    }
}
