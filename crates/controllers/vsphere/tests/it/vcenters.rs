//! One cluster on several vCenters.

use crate::world;

use anyhow::Result;
use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM};
use capstan_testkit::vcsim;
use capstan_testkit::vcsim::Options;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;
use world::{World, spec};

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_has_machines_in_a_zone_on_another_vcenter_that_it_names() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let other = vcsim(Options::default()).await?;
    let merge = PatchParams::default();
    // The certificate of the cluster's own vCenter is known by its thumbprint, that of the other one by its CA.
    let ca = json!({"stringData": {"ca.crt": other.ca}});
    world
        .api::<Secret>()
        .patch("vcenter", &merge, &Patch::Merge(ca))
        .await?;
    let zone = format!("other-{}", world.namespace);
    let side = |kind: &str| json!({"name": "a", "type": kind, "tagCategory": kind, "autoConfigure": true});
    let domain: VSphereFailureDomain = serde_json::from_value(json!({
        "metadata": {"name": zone},
        "spec": {"region": side("Datacenter"), "zone": side("ComputeCluster"), "topology": {
            "datacenter": "DC0", "computeCluster": "DC0_C0", "datastore": "LocalDS_1", "networks": ["VM Network"],
        }},
    }))?;
    let wanted: VSphereDeploymentZone = serde_json::from_value(json!({
        "metadata": {"name": zone, "labels": {"zone": zone}},
        "spec": {"server": other.server, "failureDomain": zone, "controlPlane": true,
            "placementConstraint": {"resourcePool": "/DC0/host/DC0_C0/Resources", "folder": "/DC0/vm"}},
    }))?;
    let params = PostParams::default();
    Api::all(world.client.clone()).create(&params, &domain).await?;
    let zones: Api<VSphereDeploymentZone> = Api::all(world.client.clone());
    zones.create(&params, &wanted).await?;
    let clusters = world.api::<VSphereCluster>();
    let select = json!({
        "metadata": {"annotations": {"capstan.dev/zone-servers": format!("vc.example.com, {}", other.server)}},
        "spec": {"failureDomainSelector": {"matchLabels": {"zone": zone}}},
    });
    clusters.patch("c", &merge, &Patch::Merge(select)).await?;
    let offered = zone.clone();
    let offers = move |cluster: &VSphereCluster| {
        let status = cluster.status.as_ref();
        status.is_some_and(|status| status.failure_domains.contains_key(&offered))
    };
    world.until::<VSphereCluster>("c", offers).await?;

    world
        .machine("here", spec("pvscsi", json!({"dataDisks": [{"sizeGiB": 1}]})))
        .await?;
    world
        .machine("there", spec("pvscsi", json!({"failureDomain": zone})))
        .await?;
    let ready = |machine: &VSphereMachine| machine.status.as_ref().is_some_and(|status| status.ready);
    world.until::<VSphereMachine>("there", ready).await?;
    world.ready("here").await?;
    let vm = world.api::<VSphereVM>().get("there").await?;
    assert_eq!(vm.spec.clone_spec.server.as_deref(), Some(other.server.as_str()));
    assert_eq!(other.admin.find("vm", "/DC0/vm/there").await?.len(), 1);
    assert!(world.vcsim.admin.find("vm", "/DC0/vm/there").await?.is_empty());
    world.delete("there").await?;
    assert!(other.admin.find("vm", "/DC0/vm/there").await?.is_empty());
    zones.delete(&zone, &DeleteParams::default()).await?;
    Ok(())
}
