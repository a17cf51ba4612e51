//! Where Cluster API's own kinds are served in their older version alone.

use crate::world;

use anyhow::Result;
use capstan_testkit::vcsim::Options;
use capstan_testkit::{ControlPlane, manifests, parts};
use kube::core::DynamicObject;
use serde_json::{Value, json};
use world::{World, disks, spec};

/// The definitions with v1beta1 alone, as they were before there was another version.
fn older(mut crd: DynamicObject) -> Option<DynamicObject> {
    let spec = &mut crd.data["spec"];
    spec["conversion"] = json!({"strategy": "None"});
    let versions = spec["versions"].as_array_mut()?;
    versions.retain(|version| version["name"] == "v1beta1");
    let only: &mut Value = versions.first_mut()?;
    (only["served"], only["storage"]) = (json!(true), json!(true));
    Some(crd)
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_come_up_and_go_where_only_the_older_cluster_api_is_served() -> Result<()> {
    let plane = ControlPlane::start(capstan_testkit::Options::default()).await?;
    let dir = tokio::task::spawn_blocking(|| parts::CLUSTER_API_CRDS.path()).await??;
    let crds = manifests::read_dir(&dir)?.into_iter().filter_map(older).collect();
    manifests::install_crds(&plane.client().await?, crds).await?;
    let world = World::start_on(plane, "v1beta1", Options::default()).await?;
    world
        .machine("m", spec("pvscsi", json!({"dataDisks": [{"name": "a", "sizeGiB": 1}]})))
        .await?;
    let (machine, _, info) = world.ready("m").await?;
    assert_eq!(disks(&info).len(), 2);
    assert!(machine.spec.provider_id.is_some());
    world.delete("m").await?;
    Ok(())
}
