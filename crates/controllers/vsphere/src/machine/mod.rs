//! VSphereMachine: what Cluster API sees of a machine on vSphere.
//!
//! Kept here: no VSphereVM is made before the cluster's infrastructure is there and the bootstrap data is written; a
//! VSphereMachine does not go before its VSphereVM has gone.

mod desired;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use capstan_api::MachineAddress;
use capstan_api::capi::GROUP;
use capstan_api::vsphere::{
    VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereMachineStatus, VSphereVM,
};
use capstan_kube::capi::Machine;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::expectations::Version;
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Context, Next, Reconciler, Recorder, cache};
use jiff::Timestamp;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};

use crate::conditions as names;
use crate::credentials::{check_machine_server, server_of};
use crate::error::Error;
use crate::owner_cluster::{Clusters, cluster_name, has_paused_annotation};

/// What a VM is busy with is passed on when it takes longer than this; its end, and what goes wrong, at once.
const SLOW: Duration = Duration::from_secs(30);
/// A cache that has not shown a VM after this long will not: somebody has removed it.
const SHOWN: Duration = Duration::from_secs(30);

/// Runs the machines.
pub struct Machines {
    context: Context,
    recorder: Recorder,
    clusters: Clusters,
    machines: Cache<Machine>,
    vms: Cache<VSphereVM>,
    zones: Cache<VSphereDeploymentZone>,
    domains: Cache<VSphereFailureDomain>,
    written: Mutex<HashMap<String, Version>>,
    /// VMs that were made and that the cache has not shown yet, by their machine's UID.
    made: Mutex<HashMap<String, (Arc<VSphereVM>, Instant)>>,
}

impl Machines {
    pub fn new(context: &Context, clusters: Clusters, machines: Cache<Machine>, vms: Cache<VSphereVM>) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            recorder: context.recorder("vspheremachine-controller"),
            clusters,
            machines,
            vms,
            zones: context.cache_cluster_wide(cache::trim),
            domains: context.cache_cluster_wide(cache::trim),
            written: Mutex::default(),
            made: Mutex::default(),
        })
    }

    /// The controller, until shutdown.
    pub async fn run(self: Arc<Self>, own: Cache<VSphereMachine>, concurrency: u16) -> Result<(), Error> {
        self.zones.ready().await?;
        self.domains.ready().await?;
        let by_cluster = own.clone();
        let reconciler = Reconciler::new("vspheremachine", &self.context, own)
            .concurrency(concurrency)
            .watches(&self.vms, |vm: &VSphereVM| {
                let owner = vm
                    .owner_references()
                    .iter()
                    .find(|owner| owner.kind == VSphereMachine::KIND);
                owner
                    .map(|owner| reference(&owner.name, vm.namespace()))
                    .into_iter()
                    .collect()
            })
            .watches(&self.machines, |machine: &Machine| {
                let infrastructure = &machine.spec.infrastructure_ref;
                let ours = infrastructure.is(VSphereMachine::GROUP, VSphereMachine::KIND);
                ours.then(|| reference(&infrastructure.name, machine.namespace()))
                    .into_iter()
                    .collect()
            })
            .watches(&self.clusters.clusters, move |cluster| {
                let name = cluster.name_any();
                let waiting = |machine: &VSphereMachine| {
                    let busy = !machine.status.as_ref().is_some_and(|s| s.ready);
                    let going = machine.meta().deletion_timestamp.is_some();
                    cluster_name(machine).as_ref() == Some(&name) && (busy || going)
                };
                let found = by_cluster.select(cluster.namespace().as_deref(), waiting);
                found
                    .iter()
                    .map(|machine| ObjectRef::from_obj(machine.as_ref()))
                    .collect()
            });
        reconciler.run(move |machine| self.clone().pass(machine)).await;
        Ok(())
    }

    async fn pass(self: Arc<Self>, own: Arc<VSphereMachine>) -> Result<Next, Error> {
        let uid = own.uid().unwrap_or_default();
        let lagging = |written: &Version| own.resource_version().is_some_and(|v| !Version::new(v).shows(written));
        if lock(&self.written).get(&uid).is_some_and(lagging) {
            return Ok(Next::Wait);
        }
        let Some(name) = machine_name(&own) else {
            return Ok(Next::Wait);
        };
        let machine = self.machines.get(own.namespace().as_deref(), &name);
        let cluster = machine.as_ref().and_then(|machine| self.cluster_of(machine));
        if has_paused_annotation(own.as_ref()) || cluster.is_some_and(|cluster| cluster.is_paused()) {
            return Ok(Next::Wait);
        }
        if own.meta().deletion_timestamp.is_some() {
            return self.end(&own, &name).await;
        }
        let Some(machine) = machine else {
            return Ok(Next::Wait);
        };
        match self.bring_up(&own, &machine).await {
            Err(error) if error.is_told() => {
                let text = error.to_string();
                self.condition(&own, Severity::Warning, names::CLONING_FAILED, &text)
                    .await?;
                self.recorder.warning(own.as_ref(), names::CLONING_FAILED, text).await;
                Err(error)
            }
            result => result,
        }
    }

    fn cluster_of(&self, machine: &Machine) -> Option<Arc<capstan_kube::capi::Cluster>> {
        self.clusters
            .clusters
            .get(machine.namespace().as_deref(), &machine.spec.cluster_name)
    }

    async fn bring_up(&self, own: &Arc<VSphereMachine>, machine: &Machine) -> Result<Next, Error> {
        let api: Api<VSphereMachine> = self.context.api(&own.namespace().unwrap_or_default());
        if let Some(updated) = patch::add_finalizer(&api, own.as_ref(), names::MACHINE_FINALIZER).await? {
            self.note(&updated);
        }
        let name = &machine.spec.cluster_name;
        let cluster = self
            .cluster_of(machine)
            .ok_or_else(|| Error::NotReady(format!("Cluster {name:?} does not exist")))?;
        if !cluster.infrastructure_provisioned() {
            return self
                .condition(own, Severity::Info, names::WAITING_FOR_CLUSTER, "")
                .await
                .map(|()| Next::Wait);
        }
        if machine.spec.bootstrap.data_secret_name.is_none() {
            return self
                .condition(own, Severity::Info, names::WAITING_FOR_BOOTSTRAP_DATA, "")
                .await
                .map(|()| Next::Wait);
        }
        let vm = self.ensure_vm(own, machine, &cluster).await?;
        let status = vm.status.clone().unwrap_or_default();
        let provider_id = vm.spec.bios_uuid.as_ref().filter(|uuid| !uuid.is_empty());
        match provider_id {
            Some(uuid) if status.ready => {
                let provider_id = format!("{}{uuid}", names::PROVIDER_ID);
                let next = self.up(own, &vm, &provider_id).await?;
                self.label_with_host(machine, status.host.as_deref()).await?;
                Ok(next)
            }
            _ => self.mirror(own, &vm).await,
        }
    }

    async fn ensure_vm(
        &self,
        own: &VSphereMachine,
        machine: &Machine,
        cluster: &capstan_kube::capi::Cluster,
    ) -> Result<Arc<VSphereVM>, Error> {
        let infrastructure = self.clusters.infrastructure_of(cluster)?;
        let wanted_zone = machine
            .spec
            .failure_domain
            .clone()
            .or_else(|| own.spec.failure_domain.clone());
        let zone = match wanted_zone.as_deref().filter(|name| !name.is_empty()) {
            Some(name) => Some(self.zone(name)?),
            None => None,
        };
        let zone_server = zone.as_ref().and_then(|(zone, _)| zone.spec.server.as_deref());
        let own_server = own.spec.clone_spec.server.as_deref();
        check_machine_server(own_server, &server_of(&infrastructure)?, zone_server)?;
        let zone = zone.as_ref().map(|(zone, domain)| desired::Zone {
            zone: &zone.spec,
            domain: &domain.spec,
        });
        let name = desired::name(own, &machine.name_any()).map_err(Error::Invalid)?;
        let desired = desired::vm(&name, own, machine, &infrastructure, zone.as_ref());
        let api: Api<VSphereVM> = self.context.api(&own.namespace().unwrap_or_default());
        let existing = match self.known_vm(own, &name) {
            Some(existing) => existing,
            None => match api.create(&PostParams::default(), &desired).await {
                Ok(made) => {
                    let made = Arc::new(made);
                    let uid = own.uid().unwrap_or_default();
                    lock(&self.made).insert(uid, (made.clone(), Instant::now()));
                    return Ok(made);
                }
                Err(kube::Error::Api(status)) if status.code == 409 => Arc::new(api.get(&name).await?),
                Err(error) => return Err(error.into()),
            },
        };
        if !existing
            .owner_references()
            .iter()
            .any(|owner| owner.uid == own.uid().unwrap_or_default())
        {
            return Err(Error::Invalid(format!(
                "VSphereVM {name:?} exists already and belongs to another object: remove it, or use another name"
            )));
        }
        if existing.meta().deletion_timestamp.is_none() {
            let after = desired::follow(&existing, &desired);
            if let Some(updated) = patch::object(&api, existing.as_ref(), &after, Lock::Open).await? {
                return Ok(Arc::new(updated));
            }
        }
        Ok(existing)
    }

    /// The VM that the cache shows, or that was made so lately that it does not yet.
    fn known_vm(&self, own: &VSphereMachine, name: &str) -> Option<Arc<VSphereVM>> {
        let cached = self.vms.get(own.namespace().as_deref(), name);
        let mut made = lock(&self.made);
        let uid = own.uid().unwrap_or_default();
        if cached.is_some() || made.get(&uid).is_some_and(|(_, at)| at.elapsed() > SHOWN) {
            made.remove(&uid);
        }
        cached.or_else(|| made.get(&uid).map(|(vm, _)| vm.clone()))
    }

    fn zone(&self, name: &str) -> Result<(Arc<VSphereDeploymentZone>, Arc<VSphereFailureDomain>), Error> {
        let missing =
            |kind: &str, name: &str| Error::NotReady(format!("{kind} {name:?} of the failure domain does not exist"));
        let zone = self
            .zones
            .get(None, name)
            .ok_or_else(|| missing(VSphereDeploymentZone::KIND, name))?;
        let domain = zone.spec.failure_domain.clone().unwrap_or_default();
        let domain = self
            .domains
            .get(None, &domain)
            .ok_or_else(|| missing(VSphereFailureDomain::KIND, &domain))?;
        Ok((zone, domain))
    }

    /// Passes on what the VM is busy with, or what is wrong with it.
    async fn mirror(&self, own: &VSphereMachine, vm: &VSphereVM) -> Result<Next, Error> {
        let none = Vec::new();
        let list = vm.status.as_ref().map_or(&none, |status| &status.conditions);
        let of_vm = conditions::get(list, conditions::READY).filter(|condition| condition.status != "True");
        let grave = of_vm.is_some_and(|c| matches!(c.severity.as_deref(), Some("Warning" | "Error")));
        let age = vm
            .creation_timestamp()
            .map(|made| Timestamp::now().duration_since(made.0))
            .unwrap_or_default();
        let age = Duration::try_from(age).unwrap_or_default();
        if !grave && age < SLOW {
            return Ok(Next::After(SLOW - age));
        }
        let reason = of_vm
            .and_then(|c| c.reason.clone())
            .unwrap_or_else(|| names::CLONING.into());
        let message = of_vm.and_then(|c| c.message.clone()).unwrap_or_default();
        let severity = match of_vm.and_then(|c| c.severity.as_deref()) {
            Some("Error") => Severity::Error,
            Some("Warning") => Severity::Warning,
            _ => Severity::Info,
        };
        self.condition(own, severity, &reason, &message).await?;
        Ok(Next::Wait)
    }

    async fn up(&self, own: &VSphereMachine, vm: &VSphereVM, provider_id: &str) -> Result<Next, Error> {
        let api: Api<VSphereMachine> = self.context.api(&own.namespace().unwrap_or_default());
        if own.spec.provider_id.as_deref() != Some(provider_id) {
            let mut after = own.clone();
            after.spec.provider_id = Some(provider_id.to_owned());
            if let Some(updated) = patch::object(&api, own, &after, Lock::Open).await? {
                self.note(&updated);
            }
        }
        let found = vm.status.clone().unwrap_or_default();
        let external = found.addresses.iter().map(|address| ("ExternalIP", address.clone()));
        let all = external.chain([("InternalDNS", vm.name_any())]);
        let addresses = all
            .map(|(kind, address)| MachineAddress {
                type_: kind.to_owned(),
                address,
            })
            .collect();
        let mirrored = conditions::get(&found.conditions, names::VM_PROVISIONED).cloned();
        self.write(own, |status, now| {
            status.ready = true;
            status.addresses = addresses;
            status.network = found.network;
            (status.failure_reason, status.failure_message) = (None, None);
            match mirrored.filter(|condition| condition.status != "True") {
                Some(condition) => conditions::set(&mut status.conditions, condition),
                None => conditions::mark_true(&mut status.conditions, names::VM_PROVISIONED, now),
            };
        })
        .await?;
        Ok(Next::Wait)
    }

    /// Cluster API core carries this label from the Machine to its Node, so it is of no use before there is one.
    async fn label_with_host(&self, machine: &Machine, host: Option<&str>) -> Result<(), Error> {
        let has_node = machine.status.as_ref().is_some_and(|status| status.node_ref.is_some());
        let Some(host) = host.and_then(desired::label_value).filter(|_| has_node) else {
            return Ok(());
        };
        if machine.labels().get(names::HOST_LABEL) == Some(&host) {
            return Ok(());
        }
        let mut after = machine.clone();
        after
            .meta_mut()
            .labels
            .get_or_insert_default()
            .insert(names::HOST_LABEL.to_owned(), host);
        let api: Api<Machine> = self.context.api(&machine.namespace().unwrap_or_default());
        match patch::object(&api, machine, &after, Lock::Open).await {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The Machine itself may be gone already.
    async fn end(&self, own: &VSphereMachine, machine: &str) -> Result<Next, Error> {
        let namespace = own.namespace().unwrap_or_default();
        let vms: Api<VSphereVM> = self.context.api(&namespace);
        let name = desired::name(own, machine).unwrap_or_else(|_| machine.to_owned());
        // Live, not cached: a VM that was made a moment ago must not be forgotten.
        let ours = |vm: &VSphereVM| {
            vm.owner_references()
                .iter()
                .any(|o| o.uid == own.uid().unwrap_or_default())
        };
        if let Some(vm) = vms.get_opt(&name).await?.filter(ours) {
            if vm.meta().deletion_timestamp.is_none() {
                let preconditions = Preconditions {
                    uid: vm.uid(),
                    resource_version: None,
                };
                let params = DeleteParams {
                    preconditions: Some(preconditions),
                    ..DeleteParams::default()
                };
                match vms.delete(&name, &params).await {
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                    result => drop(result?),
                }
                self.condition(own, Severity::Info, names::DELETING, "").await?;
            } else {
                self.mirror_end(own, &vm).await?;
            }
            return Ok(Next::Wait);
        }
        let api: Api<VSphereMachine> = self.context.api(&namespace);
        patch::remove_finalizer(&api, own, names::MACHINE_FINALIZER).await?;
        lock(&self.written).remove(&own.uid().unwrap_or_default());
        Ok(Next::Wait)
    }

    async fn mirror_end(&self, own: &VSphereMachine, vm: &VSphereVM) -> Result<(), Error> {
        let list = vm
            .status
            .as_ref()
            .map(|status| status.conditions.clone())
            .unwrap_or_default();
        match conditions::get(&list, conditions::READY).filter(|c| c.severity.as_deref().is_some_and(|s| s != "Info")) {
            Some(condition) => {
                let (reason, message) = (condition.reason.clone(), condition.message.clone());
                let (reason, message) = (reason.unwrap_or_default(), message.unwrap_or_default());
                self.condition(own, Severity::Warning, &reason, &message).await
            }
            None => Ok(()),
        }
    }

    async fn condition(
        &self,
        own: &VSphereMachine,
        severity: Severity,
        reason: &str,
        message: &str,
    ) -> Result<(), Error> {
        self.write(own, |status, now| {
            conditions::mark_false(
                &mut status.conditions,
                names::VM_PROVISIONED,
                severity,
                reason,
                message,
                now,
            );
        })
        .await
    }

    async fn write(
        &self,
        own: &VSphereMachine,
        edit: impl FnOnce(&mut VSphereMachineStatus, Timestamp),
    ) -> Result<(), Error> {
        let now = Timestamp::now();
        let mut after = own.clone();
        let status = after.status.get_or_insert_default();
        edit(status, now);
        conditions::summarize(&mut status.conditions, &[names::VM_PROVISIONED], now);
        let api: Api<VSphereMachine> = self.context.api(&own.namespace().unwrap_or_default());
        match patch::status(&api, own, &after, Lock::Open).await {
            Ok(Some(updated)) => self.note(&updated),
            Ok(None) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn note(&self, written: &VSphereMachine) {
        if let (Some(uid), Some(version)) = (written.uid(), written.resource_version()) {
            lock(&self.written).insert(uid, Version::new(version));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of the Machine that owns this object.
pub fn machine_name(own: &VSphereMachine) -> Option<String> {
    let is_core = |api_version: &str| api_version.split('/').next() == Some(GROUP);
    let owners = own.owner_references().iter();
    let mut machines = owners.filter(|owner| owner.kind == "Machine" && is_core(&owner.api_version));
    machines.next().map(|owner| owner.name.clone())
}

fn reference(name: &str, namespace: Option<String>) -> ObjectRef<VSphereMachine> {
    let mut reference = ObjectRef::new(name);
    reference.namespace = namespace;
    reference
}
