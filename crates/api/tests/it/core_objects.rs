//! Cluster API's own objects read alike in both of its versions.

use capstan_api::capi::{Cluster, Machine, MachinePool, Version};
use serde_json::json;
use std::time::Duration;

#[test]
fn a_cluster_says_the_same_in_both_versions() {
    let v1beta1 = json!({
        "metadata": { "name": "c" },
        "spec": { "infrastructureRef": { "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureCluster", "name": "a", "namespace": "n" } },
        "status": { "infrastructureReady": true, "controlPlaneReady": true,
            "conditions": [{ "type": "ControlPlaneInitialized", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" }] },
    });
    let v1beta2 = json!({
        "metadata": { "name": "c" },
        "spec": { "infrastructureRef": { "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "AzureCluster", "name": "a" } },
        "status": { "initialization": { "infrastructureProvisioned": true, "controlPlaneInitialized": true } },
    });
    for raw in [v1beta1, v1beta2] {
        let cluster: Cluster = serde_json::from_value(raw).unwrap();
        let reference = cluster.spec.infrastructure_ref.clone().unwrap();
        assert!(reference.is("infrastructure.cluster.x-k8s.io", "AzureCluster"));
        assert_eq!(reference.name, "a");
        assert!(cluster.infrastructure_provisioned() && cluster.control_plane_initialized());
        assert!(!cluster.is_paused());
    }
    assert!(!Cluster::default().infrastructure_provisioned());
}

#[test]
fn pause_is_seen_in_spec_and_annotation() {
    for raw in [
        json!({ "spec": { "paused": true } }),
        json!({ "metadata": { "annotations": { "cluster.x-k8s.io/paused": "" } } }),
    ] {
        let cluster: Cluster = serde_json::from_value(raw).unwrap();
        assert!(cluster.is_paused());
    }
}

#[test]
fn a_drain_timeout_is_read_in_both_spellings_and_zero_is_no_limit() {
    let timeout = |spec| {
        serde_json::from_value::<Machine>(json!({ "spec": spec }))
            .unwrap()
            .spec
            .drain_timeout()
    };
    assert_eq!(
        timeout(json!({ "nodeDrainTimeout": "1m30s" })),
        Some(Duration::from_secs(90))
    );
    assert_eq!(
        timeout(json!({ "deletion": { "nodeDrainTimeoutSeconds": 90 } })),
        Some(Duration::from_secs(90))
    );
    assert_eq!(timeout(json!({ "nodeDrainTimeout": "0s" })), None);
    assert_eq!(timeout(json!({ "deletion": { "nodeDrainTimeoutSeconds": 0 } })), None);
    assert_eq!(timeout(json!({})), None);
}

#[test]
fn a_pool_tells_who_decides_on_its_replicas() {
    let pool: MachinePool = serde_json::from_value(json!({
        "metadata": { "annotations": { "cluster.x-k8s.io/replicas-managed-by": "cluster-autoscaler" } },
        "spec": { "clusterName": "c", "replicas": 3, "template": { "spec": { "version": "v1.36.0", "bootstrap": { "dataSecretName": "s" } } } },
    }))
    .unwrap();
    assert!(pool.replicas_managed_externally());
    assert_eq!(pool.replicas(), 3);
    assert_eq!(pool.spec.template.spec.bootstrap.data_secret_name.as_deref(), Some("s"));
    assert_eq!(MachinePool::default().replicas(), 1);
}

#[test]
fn requests_go_to_the_version_that_is_served() {
    for (version, expected) in [(Version::V1Beta1, "v1beta1"), (Version::V1Beta2, "v1beta2")] {
        let path = <Machine as kube::Resource>::url_path(&version, Some("n"));
        assert_eq!(path, format!("/apis/cluster.x-k8s.io/{expected}/namespaces/n/machines"));
    }
}
