//! The plan of a virtual machine before anything is done.

use crate::world::{self, World, spec};

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use capstan_api::vsphere::VSphereVM;
use capstan_kube::runtime::{Planned, Preview};
use capstan_testkit::vcsim::Options;
use kube::api::DeleteParams;
use serde_json::json;
use tokio_util::sync::CancellationToken;

/// Returns the plan of the only object of a kind, as `capstan plan` makes it.
async fn plan(world: &World, kind: &str) -> Result<Planned> {
    let (preview, shutdown) = (Preview::new(Vec::new()), CancellationToken::new());
    let _ended = shutdown.clone().drop_guard();
    let options = capstan_kube::Options {
        namespace: Some(world.namespace.clone()),
        shutdown: shutdown.clone(),
        preview: Some(preview.clone()),
        ..Default::default()
    };
    let context = capstan_kube::Context::new(world.plane.config().await?, options)?;
    let options = capstan_vsphere_machines::Options {
        identity_namespace: world.namespace.clone(),
        credentials: world.credentials.clone(),
        ..Default::default()
    };
    let task = tokio::spawn(capstan_vsphere_machines::run(context, options));
    let all = BTreeSet::from(capstan_vsphere_machines::CONTROLLERS);
    ensure!(
        tokio::time::timeout(world::PATIENCE, preview.finished(&all)).await?,
        "not all objects were planned"
    );
    shutdown.cancel();
    task.await??;
    let mut planned = preview.planned().into_iter();
    planned
        .find(|planned| planned.kind == kind)
        .with_context(|| format!("no plan for a {kind}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_announces_the_calls_for_a_virtual_machine_and_makes_none() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    let (_, _, info) = world.ready("m").await?;
    world.crash().await;

    let idle = plan(&world, "VSphereVM").await?;
    ensure!(!idle.changes() && idle.cloud_calls() == 0, "{idle:#?}");

    world.api::<VSphereVM>().delete("m", &DeleteParams::default()).await?;
    let teardown = plan(&world, "VSphereVM").await?;
    ensure!(teardown.changes() && teardown.cloud_calls() > 0, "{teardown:#?}");
    let vm = world.vcenter().await?.vm(&info.reference).await?;
    ensure!(
        vm.state.power == info.state.power,
        "the plan has changed the virtual machine"
    );
    Ok(())
}
