//! The plan of a pool before anything is done, compared with what is done then.

use crate::harness;

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use capstan_api::azure::{AzureMachinePool, AzureMachinePoolMachine};
use capstan_azure::{Cloud, Settings};
use capstan_core::interceptor::Interceptors;
use capstan_kube::runtime::{Planned, Preview};
use capstan_testkit::interceptors::{Ledger, kube_writes};
use futures::StreamExt;
use harness::{Options, World};
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::watcher;
use serde_json::json;
use tokio_util::sync::CancellationToken;

impl World {
    /// Returns the plan of the pool, as `capstan plan` makes it, and the writes to the API server that got through.
    async fn plan(&self, changes: Vec<DynamicObject>) -> Result<(Planned, usize)> {
        let (preview, shutdown) = (Preview::new(changes), CancellationToken::new());
        let _ended = shutdown.clone().drop_guard();
        let sent = Ledger::of(kube_writes);
        let options = capstan_kube::Options {
            namespace: Some(self.namespace.clone()),
            shutdown: shutdown.clone(),
            preview: Some(preview.clone()),
            // Behind the preview's own interceptor: it counts what that lets through.
            interceptors: Interceptors::new(vec![preview.read_only(), sent.clone()]),
            ..Default::default()
        };
        let context = capstan_kube::Context::new(self.plane.config().await?, options)?;
        let cloud = Cloud::custom("sim", &self.sim.url, &self.sim.url)?;
        let azure = capstan_azure::Clients::new(Settings {
            ca_file: Some(self.sim.ca_file.clone()),
            interceptors: Interceptors::new(vec![preview.read_only()]),
            ..Settings::new(cloud)
        })?;
        let task = tokio::spawn(capstan_azure_pools::run(context, azure, Default::default()));
        let all = BTreeSet::from(capstan_azure_pools::CONTROLLERS);
        ensure!(
            tokio::time::timeout(self.patience, preview.finished(&all)).await?,
            "not all pools were planned"
        );
        shutdown.cancel();
        task.await??;
        let planned = preview.planned();
        let pool = planned
            .into_iter()
            .find(|planned| planned.kind == AzureMachinePool::KIND);
        Ok((pool.context("the pool has no plan")?, sent.len()))
    }

    /// The pool with another image, as a file would have it.
    async fn upgraded(&self, version: u32) -> Result<DynamicObject> {
        let mut pool = serde_json::to_value(self.pool().await?)?;
        pool["spec"]["template"]["image"]["id"] = json!(harness::image(version));
        pool["apiVersion"] = json!("infrastructure.cluster.x-k8s.io/v1beta1");
        pool["kind"] = json!(AzureMachinePool::KIND);
        Ok(serde_json::from_value(pool)?)
    }
}

/// Returns the machines that are removed, in order.
fn removed(planned: &Planned) -> Vec<String> {
    planned
        .forecast
        .waves
        .iter()
        .flat_map(|wave| wave.removes.clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_takes_the_machines_that_its_plan_names_in_that_order_and_a_plan_writes_nothing() -> Result<()> {
    let mut world = World::with_pool(Options::default()).await?;
    world.assert_quiet().await?;
    world.crash().await;
    let mut before: Vec<String> = world.machines().await?.iter().map(ResourceExt::name_any).collect();
    before.sort();
    world.sim.clear_requests();

    let (idle, writes) = world.plan(Vec::new()).await?;
    ensure!(!idle.changes() && idle.blocked().is_none(), "{idle:#?}");
    ensure!((writes, idle.cloud_calls()) == (0, 0), "{idle:#?}");
    let mut stay = idle.forecast.stay.clone();
    stay.sort();
    ensure!(stay == before, "{idle:#?}");

    // A file that is not applied: the same plan as after it is applied.
    let (foreseen, writes) = world.plan(vec![world.upgraded(2).await?]).await?;
    ensure!(writes == 0 && foreseen.changes(), "{foreseen:#?}");
    let sent = world.sim.arm_requests();
    ensure!(
        !sent.is_empty() && sent.iter().all(|request| request.method == "GET"),
        "{sent:#?}"
    );

    world.upgrade(2).await?;
    let (planned, writes) = world.plan(Vec::new()).await?;
    ensure!(writes == 0, "{writes} writes");
    ensure!(planned.forecast == foreseen.forecast, "{planned:#?} {foreseen:#?}");
    let (order, adds) = (removed(&planned), planned.forecast.waves.iter().map(|wave| wave.adds));
    ensure!(
        adds.sum::<usize>() == 3 && planned.forecast.stay.is_empty(),
        "{planned:#?}"
    );
    let mut sorted = order.clone();
    sorted.sort();
    ensure!(sorted == before, "{planned:#?}");

    let (listed, ready) = tokio::sync::oneshot::channel();
    let gone = tokio::spawn(deletions(world.api(), order.len(), listed));
    ready.await?;
    world.run(Interceptors::default()).await?;
    world.until_rolling().await?;
    world.until_ready(3).await?;
    let happened = tokio::time::timeout(world.patience, gone).await??;
    ensure!(happened == order, "planned {order:?}, happened {happened:?}");
    Ok(())
}

/// Returns the names of the first machines that are deleted, in order.
async fn deletions(
    api: kube::Api<AzureMachinePoolMachine>,
    count: usize,
    listed: tokio::sync::oneshot::Sender<()>,
) -> Vec<String> {
    let mut listed = Some(listed);
    let mut order: Vec<String> = Vec::new();
    let mut events = Box::pin(watcher(api, watcher::Config::default()));
    while order.len() < count {
        let Some(Ok(event)) = events.next().await else {
            continue;
        };
        if matches!(event, watcher::Event::InitDone)
            && let Some(listed) = listed.take()
        {
            let _ = listed.send(());
        }
        let (watcher::Event::Apply(machine) | watcher::Event::InitApply(machine) | watcher::Event::Delete(machine)) =
            event
        else {
            continue;
        };
        let leaves = machine.metadata.deletion_timestamp.is_some();
        if leaves && !order.contains(&machine.name_any()) {
            order.push(machine.name_any());
        }
    }
    order
}
