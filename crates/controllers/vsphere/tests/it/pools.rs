//! Addresses from pools, by the contract of Cluster API's IPAM. The provider of the pool is the test itself.

use crate::world;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use capstan_api::vsphere::VSphereVM;
use capstan_testkit::vcsim::Options;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::wait::await_condition;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use world::{PATIENCE, World, spec};

fn api(world: &World, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("ipam.cluster.x-k8s.io", "v1beta1", kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    Api::namespaced_with(world.client.clone(), &world.namespace, &resource)
}

/// Answers a claim, as the provider of its pool does.
async fn answer(world: &World, claim: &str, address: &str, prefix: i32, gateway: &str) -> Result<()> {
    let claims = api(world, "IPAddressClaim", "ipaddressclaims");
    let there = await_condition(claims.clone(), claim, |claim: Option<&DynamicObject>| claim.is_some());
    let found = tokio::time::timeout(PATIENCE, there).await??.unwrap();
    let pool = found.data["spec"]["poolRef"].clone();
    let made: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "ipam.cluster.x-k8s.io/v1beta1", "kind": "IPAddress", "metadata": {"name": format!("a-{claim}")},
        "spec": {"address": address, "prefix": prefix, "gateway": gateway, "poolRef": pool, "claimRef": {"name": claim}},
    }))?;
    api(world, "IPAddress", "ipaddresses")
        .create(&PostParams::default(), &made)
        .await?;
    let status = json!({"status": {"addressRef": {"name": format!("a-{claim}")}}});
    claims
        .patch_status(claim, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    Ok(())
}

fn pool(name: &str) -> Value {
    json!({"apiGroup": "ipam.cluster.x-k8s.io", "kind": "InClusterIPPool", "name": name})
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_are_claimed_from_pools_and_given_back() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let network =
        json!({"devices": [{"networkName": "VM Network", "addressesFromPools": [pool("four"), pool("six")]}]});
    world.machine("m", spec("pvscsi", json!({"network": network}))).await?;
    answer(&world, "m-0-0", "10.9.0.7", 24, "10.9.0.1").await?;
    let waits = "IPAddressClaim \"m-0-1\" waits for an address of InClusterIPPool \"six\"";
    world.condition_of_vm("m", waits).await?;
    assert!(
        !world.vcsim.admin.counters().await?.contains_key("CloneVM_Task"),
        "nothing is cloned without its addresses"
    );
    answer(&world, "m-0-1", "fd00::7", 64, "fd00::1").await?;
    let (_, vm, info) = world.ready("m").await?;
    let metadata = info.extra_config("guestinfo.metadata").unwrap();
    let metadata = String::from_utf8(STANDARD.decode(metadata)?)?;
    for text in [
        "10.9.0.7/24",
        "fd00::7/64",
        "gateway4: \"10.9.0.1\"",
        "gateway6: \"fd00::1\"",
        "dhcp4: false",
    ] {
        assert!(metadata.contains(text), "{text} is not in {metadata}");
    }
    let conditions = vm.status.clone().unwrap().conditions;
    assert!(
        conditions
            .iter()
            .any(|c| c.type_ == "IPAddressClaimed" && c.status == "True"),
        "{conditions:?}"
    );
    let claims = api(&world, "IPAddressClaim", "ipaddressclaims");
    let claim = claims.get("m-0-0").await?;
    assert_eq!(claim.owner_references()[0].uid, vm.uid().unwrap());
    // A claim that somebody deletes stays for as long as the machine has its address.
    claims.delete("m-0-0", &DeleteParams::default()).await?;
    assert!(claims.get("m-0-0").await?.meta().deletion_timestamp.is_some());
    world.delete("m").await?;
    world.gone::<VSphereVM>("m").await?;
    for name in ["m-0-0", "m-0-1"] {
        assert!(claims.get_opt(name).await?.is_none(), "{name} was not given back");
    }
    Ok(())
}
