//! Helpers for objects of any kind.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, Preconditions};
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

use crate::cache::Object;
use crate::error::{Error, code};

/// Whether the object has been deleted and waits for its finalizers.
pub fn is_deleting<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

/// Returns the reference to the object's owner of kind `K`, in any version of its group.
pub fn owner_of<K: Resource<DynamicType = ()>>(object: &impl Resource) -> Option<&OwnerReference> {
    let owners = object.meta().owner_references.iter().flatten();
    let mut owners = owners.filter(|owner| {
        let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
        owner.kind == K::kind(&()) && group == K::group(&())
    });
    owners.next()
}

/// Returns the references by which a trigger names these objects.
pub fn references<K: Object>(objects: &[Arc<K>]) -> Vec<ObjectRef<K>> {
    objects
        .iter()
        .map(|object| ObjectRef::from_obj(object.as_ref()))
        .collect()
}

/// Returns the object's UID. The API server gives every object one.
pub fn uid<K: Resource<DynamicType = ()>>(object: &K) -> Result<String, Error> {
    object.uid().ok_or_else(|| incomplete::<K>("metadata.uid"))
}

/// Returns the object's namespace. Every object of a kind with namespaces has one.
pub fn namespace<K: Resource<DynamicType = ()>>(object: &K) -> Result<String, Error> {
    object.namespace().ok_or_else(|| incomplete::<K>("metadata.namespace"))
}

fn incomplete<K: Resource<DynamicType = ()>>(field: &'static str) -> Error {
    Error::Incomplete {
        kind: K::kind(&()).into_owned(),
        field,
    }
}

/// Deletes this object, and no other of its name. Returns whether the API server deleted it: false if it is gone, or if
/// another object has its name by now.
pub async fn delete_exactly<K: Object>(api: &Api<K>, object: &K) -> Result<bool, Error> {
    delete_named(api, &object.name_any(), uid(object)?).await
}

/// As [`delete_exactly`], for an object of which only name and UID are known.
pub async fn delete_named<K: Object>(api: &Api<K>, name: &str, uid: String) -> Result<bool, Error> {
    let params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    match api.delete(name, &params).await {
        Ok(_) => Ok(true),
        Err(error) if matches!(code(&error), Some(404 | 409)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use k8s_openapi::api::apps::v1::{DaemonSet, ReplicaSet};
    use k8s_openapi::api::core::v1::{ConfigMap, Pod};
    use kube::client::Body;
    use parking_lot::Mutex;
    use rstest::rstest;
    use serde_json::{Value, json};
    use tower::BoxError;

    #[rstest]
    #[case::deleted(200, Some(true))]
    #[case::gone(404, Some(false))]
    #[case::another_of_its_name(409, Some(false))]
    #[case::forbidden(403, None)]
    #[tokio::test]
    async fn only_the_object_with_this_uid_is_deleted(#[case] status: u16, #[case] expected: Option<bool>) {
        let sent = Arc::new(Mutex::new(Value::Null));
        let seen = sent.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let seen = seen.clone();
            async move {
                *seen.lock() = serde_json::from_slice(&request.into_body().collect_bytes().await?)?;
                let answer = json!({"kind": "Status", "apiVersion": "v1", "code": status, "status": "Success",
                    "message": "", "reason": ""});
                let body = Body::from(answer.to_string().into_bytes());
                Ok::<_, BoxError>(Response::builder().status(status).body(body)?)
            }
        });
        let api: Api<ConfigMap> = Api::namespaced(kube::Client::new(service, "default"), "default");
        let mut object = ConfigMap::default();
        object.metadata.name = Some("a".to_owned());
        assert!(delete_exactly(&api, &object).await.is_err(), "it has no UID");
        object.metadata.uid = Some("u".to_owned());
        assert_eq!(delete_exactly(&api, &object).await.ok(), expected);
        assert_eq!(sent.lock()["preconditions"], json!({"uid": "u"}));
    }

    #[test]
    fn an_owner_is_known_by_its_kind_and_group() {
        let reference = |version: &str, kind: &str| OwnerReference {
            api_version: version.to_owned(),
            kind: kind.to_owned(),
            name: "o".to_owned(),
            ..OwnerReference::default()
        };
        let mut pod = Pod::default();
        pod.metadata.owner_references = Some(vec![
            reference("other/v1", "ReplicaSet"),
            reference("apps/v1beta1", "ReplicaSet"),
        ]);
        assert_eq!(
            owner_of::<ReplicaSet>(&pod).map(|o| o.api_version.as_str()),
            Some("apps/v1beta1")
        );
        assert!(owner_of::<DaemonSet>(&pod).is_none() && !is_deleting(&pod));
    }
}
