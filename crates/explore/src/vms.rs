//! Machines on vSphere.
//!
//! Checked at every request to vCenter: a VM is cloned only for a VSphereVM, and never again after it was ready; a VM is
//! destroyed only when its VSphereVM is being deleted, is powered off, and has none of the storage driver's volumes any more.
//! In the end each VSphereVM has one VM, and one that is gone leaves nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use capstan_testkit::apiserver::{ApiServer, Rng};
use capstan_testkit::tenants::{Tenant, VcenterAccess};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::vcenter::{self, Vcenter};
use crate::world::{Clouds, NAMESPACE, NoMonitor, World};
use crate::{Scenario, Trace};

const VERSION: &str = "infrastructure.cluster.x-k8s.io/v1beta2";
const CLUSTER: &str = "c";

pub struct Vms {
    vcenter: Vcenter,
    watch: Arc<Watch>,
    made: usize,
    rng: Rng,
}

#[derive(Default)]
struct Watch {
    trace: Trace,
    server: Mutex<Option<ApiServer>>,
    /// Machines that somebody has removed from vCenter, or may have.
    lost: Mutex<BTreeSet<String>>,
    /// Machines that were ready once.
    up: Mutex<BTreeSet<String>>,
}

fn name(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn is_deleting(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

fn is_provisioned(object: &Value) -> bool {
    object["status"]["initialization"]["provisioned"] == true
}

/// Whether a VSphereVM is ready.
fn is_ready(object: &Value) -> bool {
    object["status"]["ready"] == true
}

impl Watch {
    fn vms(&self) -> Vec<Value> {
        self.server
            .lock()
            .as_ref()
            .map(|server| server.objects("vspherevms"))
            .unwrap_or_default()
    }

    fn observe(&self) {
        let ready = self.vms().into_iter().filter(is_ready);
        self.up.lock().extend(ready.map(|vm| name(&vm)));
    }
}

impl vcenter::Monitor for Watch {
    fn before(&self, vcenter: &Vcenter, method: &str, vm: &str) {
        self.observe();
        let object = self.vms().into_iter().find(|object| name(object) == vm);
        match method {
            "CloneVM_Task" => {
                if object.is_none() {
                    self.trace
                        .wrong(format!("a VM is cloned for {vm}, which does not exist"));
                }
                if self.up.lock().contains(vm) {
                    self.trace.wrong(format!("VM {vm} was ready once and is cloned again"));
                }
            }
            "Destroy_Task" => {
                if object.is_some_and(|object| !is_deleting(&object)) {
                    self.trace
                        .wrong(format!("VM {vm} is destroyed although its object stays"));
                }
                if vcenter.is_on(vm) {
                    self.trace.wrong(format!("VM {vm} is destroyed while it is on"));
                }
                let volumes = vcenter.volumes(vm);
                if !volumes.is_empty() {
                    self.trace
                        .wrong(format!("VM {vm} is destroyed with the volumes {volumes:?}"));
                }
            }
            _ => {}
        }
    }
}

impl Vms {
    fn tenant(&self, world: &World) -> Tenant {
        Tenant {
            client: world.client.clone(),
            namespace: NAMESPACE.to_owned(),
        }
    }

    async fn make(&mut self, world: &World) -> Result<()> {
        self.made += 1;
        let name = format!("m{}", self.made);
        world.trace.note(format!("user: create machine {name}"));
        let tenant = self.tenant(world);
        let owner = tenant.vsphere_owner(CLUSTER, &name).await?;
        tenant.vsphere_machine(&owner, self.rng.below(4)).await
    }

    fn pick(&mut self, world: &World) -> Option<String> {
        self.rng.pick(&world.view.server.objects("vspheremachines")).map(name)
    }
}

impl Scenario for Vms {
    const NAME: &'static str = "vms";

    fn prepare(seed: u64, trace: Trace) -> BoxFuture<'static, Result<(Self, World)>> {
        Box::pin(async move {
            let watch = Arc::new(Watch {
                trace: trace.clone(),
                ..Watch::default()
            });
            let vcenter = Vcenter::new(seed, watch.clone(), trace.clone());
            let process = |context, clouds: Clouds| -> BoxFuture<'static, Result<()>> {
                Box::pin(async move {
                    let options = capstan_vsphere_machines::Options {
                        in_process: clouds.vcenter,
                        ..capstan_vsphere_machines::Options::default()
                    };
                    Ok(capstan_vsphere_machines::run(context, options).await?)
                })
            };
            let mut world = World::new(seed, Default::default(), process, Arc::new(NoMonitor), trace).await?;
            world.vcenter = Some(vcenter.in_process());
            *watch.server.lock() = Some(world.view.server.clone());
            let mut vms = Self {
                vcenter,
                watch,
                made: 0,
                rng: Rng::new(seed ^ 0x7c1),
            };
            let access = VcenterAccess {
                server: "vcenter.example".into(),
                username: "user".into(),
                password: "secret".into(),
                ca: String::new(),
            };
            vms.tenant(&world)
                .vsphere_cluster(CLUSTER, &access)
                .await
                .context("cluster")?;
            vms.make(&world).await?;
            vms.make(&world).await?;
            Ok((vms, world))
        })
    }

    fn edit<'a>(&'a mut self, world: &'a mut World) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            match self.rng.below(8) {
                0 | 1 => self.make(world).await?,
                2 | 3 => {
                    if let Some(name) = self.pick(world) {
                        world.delete(VERSION, "vspheremachines", &name).await?;
                    }
                }
                4 => {
                    if let Some(name) = self.pick(world) {
                        world.trace.note(format!("others: VM {name} vanishes"));
                        self.watch.lost.lock().insert(name.clone());
                        self.vcenter.vanish(&name);
                    }
                }
                5 => {
                    if let Some(name) = self.pick(world) {
                        let patch = json!({"metadata": {"labels": {"edited": self.rng.suffix()}}});
                        world.patch(VERSION, "vspheremachines", &name, patch).await?;
                    }
                }
                _ => {
                    if let Some(name) = self.pick(world) {
                        let volume = format!("volume-{}", self.rng.suffix());
                        if self.vcenter.attach_volume(&name, &volume) {
                            world.trace.note(format!("others: {volume} is attached to {name}"));
                        }
                    }
                }
            }
            Ok(())
        })
    }

    fn disturb(&mut self, world: &mut World, rng: &mut Rng) -> Result<()> {
        match rng.below(2) {
            0 => {
                world.trace.note("vcenter: sessions are forgotten");
                self.vcenter.forget_sessions();
            }
            _ => {
                let number = 1 + rng.below(4);
                world.trace.note(format!("vcenter: the next {number} tasks fail"));
                self.vcenter.fail_tasks(number);
            }
        }
        Ok(())
    }

    fn missing(&self, world: &World) -> Vec<String> {
        self.watch.observe();
        let mut missing = Vec::new();
        let (lost, machines) = (self.watch.lost.lock(), world.view.server.objects("vspheremachines"));
        let vms = self.vcenter.machines();
        for machine in &machines {
            let name = name(machine);
            if is_deleting(machine) {
                missing.push(format!("{name} is being deleted"));
            } else if lost.contains(&name) {
                // It may have been made before somebody removed it, or after.
            } else if !is_provisioned(machine) {
                missing.push(format!("{name} is not ready"));
            } else if vms.iter().filter(|vm| **vm == name).count() != 1 {
                missing.push(format!("{name} is ready and has not one VM"));
            }
        }
        let objects: Vec<String> = world.view.server.objects("vspherevms").iter().map(name).collect();
        for vm in vms.iter().filter(|vm| !objects.contains(vm)) {
            missing.push(format!("VM {vm} has no object"));
        }
        for object in objects
            .iter()
            .filter(|object| !machines.iter().any(|machine| name(machine) == **object))
        {
            missing.push(format!("VSphereVM {object} has no machine"));
        }
        missing
    }

    fn settle<'a>(&'a mut self, _: &'a mut World) -> BoxFuture<'a, Result<()>> {
        self.vcenter.fail_tasks(0);
        Box::pin(async { Ok(()) })
    }
}
