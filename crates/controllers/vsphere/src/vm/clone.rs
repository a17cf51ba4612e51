//! The clone: what it is made from, where it goes, and what happens when somebody was there before.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use capstan_core::Class;
use capstan_core::disks::vsphere::allocate;
use capstan_kube::Next;
use capstan_vsphere::{
    CloneSpec, ConfigSpec, Datacenter, Datastore, DiskLocation, DiskMove, MoRef, ResourcePool, Vcenter, VmInfo,
};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, ResourceExt};

use super::state::{CloneEnd, Started, TaskKind, VmState};
use super::{Vms, pending, status};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use crate::observed::{self, Resolved, ResolvedDisk};
use capstan_core::vm as plan;
use capstan_core::vm::{DesiredVm, UserData};

impl Vms {
    pub(super) async fn start_clone(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<Next, Error> {
        if plan::waits_for_static_address(&desired::desired(vm).networks) {
            return self.waiting_for_static_address(vm, state).await;
        }
        if state.name_taken {
            self.name_is_taken(vm, state, vcenter).await?;
            if state.reference.is_some() {
                return Ok(Next::After(Duration::ZERO));
            }
        }
        if self.others_are_cloning(vm, state, vcenter).await? {
            return Ok(Next::Wait);
        }
        self.load_user_data(vm, state).await?;
        let datacenter = vcenter.datacenter(vm.spec.clone_spec.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &vm.spec.clone_spec.template).await?;
        let hardware = template.hardware();
        let desired = self.desired(vm, state);
        let snapshot = self.snapshot(vm, &desired, &template).await;
        plan::check_template(&desired, &hardware, snapshot.is_some()).map_err(Error::Invalid)?;
        let allocation =
            allocate(&hardware, &desired.disks).map_err(|problems| Error::Invalid(problems.to_string()))?;
        let resolved = self.resolve(&desired, vcenter).await?;
        let folder = vcenter.vm_folder(&datacenter, desired.folder.as_deref()).await?;
        let mut devices = observed::add_disks(
            &desired,
            &resolved,
            &allocation.new_controllers,
            &allocation.placements,
            false,
        );
        devices.extend(observed::replace_nics(&desired, &resolved, template.devices.iter()));
        let config = ConfigSpec {
            instance_uuid: Some(desired.instance_uuid.clone()),
            disk_uuid_enabled: Some(true),
            num_cpus: Some(desired.cpus),
            cores_per_socket: desired.cores_per_socket,
            memory_mib: Some(desired.memory_mib),
            memory_reservation_locked: (!desired.pci.is_empty()).then_some(true),
            devices,
            extra_config: plan::at_clone(&desired, state.user.as_ref()).into_iter().collect(),
            vapp_config_removed: Some(true),
            ..ConfigSpec::default()
        };
        let config = observed::with_settings(&desired, config);
        let spec = self
            .location(&desired, vcenter, &datacenter, &template, snapshot.clone(), config)
            .await?;
        let task = match vcenter
            .clone_vm(&template.reference, &folder, &desired.name, &spec)
            .await
        {
            Ok(task) => task,
            Err(error) if error.fault().is_some_and(|fault| fault.is("DuplicateName")) => {
                state.name_taken = true;
                self.name_is_taken(vm, state, vcenter).await?;
                return Ok(Next::After(Duration::ZERO));
            }
            Err(error) => {
                state.doubtful = error.fault().is_none();
                return Err(error.into());
            }
        };
        state.started = Some(Started {
            task: task.reference().value().to_owned(),
            linked: snapshot.is_some(),
            snapshot: snapshot.map(|snapshot| snapshot.value().to_owned()),
            disks: desired::planned_disks(&desired.disks, &allocation.placements),
        });
        state.task_over = false;
        let ignored = capstan_core::validate::vsphere::ignored(&vm.spec.clone_spec);
        if !ignored.is_empty() {
            self.recorder
                .warning(vm.as_ref(), "FieldIgnored", ignored.join("; "))
                .await;
        }
        let next = self.follow(vm, state, TaskKind::Clone, pending::task(task));
        self.record_clone(vm, state).await?;
        Ok(next)
    }

    /// The snapshot that a linked clone grows from; without one it is a full clone, which is told of.
    async fn snapshot(&self, vm: &VSphereVM, desired: &DesiredVm, template: &VmInfo) -> Option<MoRef> {
        if !desired.linked {
            return None;
        }
        let Some(name) = &desired.snapshot else {
            return template.current_snapshot.clone();
        };
        match template.snapshot(name) {
            Ok(snapshot) => Some(snapshot.reference.clone()),
            Err(error) => {
                let text = format!("{error}: the machine becomes a full clone instead of a linked one");
                self.recorder.warning(vm, "SnapshotNotFound", text).await;
                None
            }
        }
    }

    /// Where the clone goes: pool, datastore and storage policy.
    async fn location(
        &self,
        desired: &DesiredVm,
        vcenter: &Vcenter,
        datacenter: &Datacenter,
        template: &VmInfo,
        snapshot: Option<MoRef>,
        config: ConfigSpec,
    ) -> Result<CloneSpec, Error> {
        let pool = vcenter.resource_pool(datacenter, desired.pool.as_deref()).await?;
        let policy = match &desired.storage_policy {
            Some(name) => Some(vcenter.storage_policy(name).await?),
            None => None,
        };
        let datastore = self
            .datastore(desired, vcenter, datacenter, &pool, policy.as_deref())
            .await?;
        let disks = template.devices.iter().filter(|device| device.disk().is_some());
        Ok(CloneSpec {
            disk_locations: disks
                .map(|disk| DiskLocation {
                    key: disk.key,
                    datastore: datastore.reference.clone(),
                })
                .collect(),
            datastore: Some(datastore.reference.clone()),
            disk_move: if snapshot.is_some() {
                DiskMove::Linked
            } else {
                DiskMove::Full
            },
            pool: Some(pool.reference.clone()),
            snapshot,
            config,
            ..CloneSpec::default()
        })
    }

    /// Returns the datastore that the spec names, else one that satisfies the policy, else the only one.
    async fn datastore(
        &self,
        desired: &DesiredVm,
        vcenter: &Vcenter,
        datacenter: &Datacenter,
        pool: &ResourcePool,
        policy: Option<&str>,
    ) -> Result<Arc<Datastore>, Error> {
        let named = match &desired.datastore {
            Some(path) => Some(vcenter.datastore(datacenter, Some(path)).await?),
            None => None,
        };
        let (Some(policy), name) = (policy, desired.storage_policy.as_deref().unwrap_or_default()) else {
            return match named {
                Some(named) => Ok(named),
                None => Ok(vcenter.datastore(datacenter, None).await?),
            };
        };
        if let Some(named) = named {
            let fits = vcenter
                .compatible_datastores(policy, std::slice::from_ref(&named.reference))
                .await?;
            return if fits.is_empty() {
                let text = format!(
                    "datastore {:?} does not satisfy storage policy {name:?}: name another or none",
                    named.name
                );
                Err(Error::Invalid(text))
            } else {
                Ok(named)
            };
        }
        let owner = pool.owner.clone().unwrap_or_else(|| pool.reference.clone());
        let all = vcenter.datastores_of(&owner).await?;
        let usable: Vec<&Datastore> = all
            .iter()
            .filter(|d| d.accessible && d.maintenance == "normal")
            .collect();
        let references: Vec<MoRef> = usable.iter().map(|datastore| datastore.reference.clone()).collect();
        let fits = vcenter.compatible_datastores(policy, &references).await?;
        let fitting = usable
            .into_iter()
            .filter(|datastore| fits.contains(&datastore.reference));
        let fitting: Vec<&Datastore> = fitting.collect();
        let candidates: Vec<(&str, u64)> = fitting
            .iter()
            .map(|datastore| {
                (
                    datastore.name.as_str(),
                    u64::try_from(datastore.free_bytes).unwrap_or_default(),
                )
            })
            .collect();
        let chosen = plan::choose_datastore(&desired.instance_uuid, &candidates).and_then(|index| fitting.get(index));
        let none = || Error::Invalid(format!("no compatible datastores found for storage policy: {name}"));
        chosen
            .map(|datastore| Arc::new(Datastore::clone(datastore)))
            .ok_or_else(none)
    }

    /// What the networks, and the datastores and policies of single disks, are called in vCenter.
    pub(super) async fn resolve(&self, desired: &DesiredVm, vcenter: &Vcenter) -> Result<Resolved, Error> {
        let datacenter = vcenter.datacenter(desired.datacenter.as_deref()).await?;
        let mut resolved = Resolved::default();
        if let Some(name) = &desired.storage_policy {
            resolved.policy = Some(vcenter.storage_policy(name).await?);
        }
        for device in &desired.networks {
            resolved
                .networks
                .push(vcenter.network(&datacenter, &device.network).await?);
        }
        for (index, disk) in desired.disks.iter().enumerate() {
            let named = |error: capstan_vsphere::Error| match error {
                error @ (capstan_vsphere::Error::NotFound { .. } | capstan_vsphere::Error::Ambiguous { .. }) => {
                    Error::Invalid(format!("dataDisks[{index}] {:?}: {error}", disk.name))
                }
                error => error.into(),
            };
            let datastore = match &disk.datastore {
                Some(path) => Some(vcenter.datastore(&datacenter, Some(path)).await.map_err(named)?),
                None => None,
            };
            let policy = match disk.storage_policy.as_ref().or(desired.storage_policy.as_ref()) {
                Some(name) => Some(vcenter.storage_policy(name).await.map_err(named)?),
                None => None,
            };
            resolved.disks.push(ResolvedDisk { datastore, policy });
        }
        Ok(resolved)
    }

    /// Reads what the guest is started with.
    pub(super) async fn load_user_data(&self, vm: &VSphereVM, state: &mut VmState) -> Result<(), Error> {
        let Some(name) = vm
            .spec
            .bootstrap_ref
            .as_ref()
            .and_then(|reference| reference.name.clone())
        else {
            return Ok(());
        };
        if state.user.is_some() {
            return Ok(());
        }
        let secrets: Api<Secret> = self.context.api(&vm.namespace().unwrap_or_default());
        let secret = secrets.get_opt(&name).await?;
        let secret =
            secret.ok_or_else(|| Error::NotReady(format!("secret {name:?} with the bootstrap data does not exist")))?;
        let mut data = secret.data.unwrap_or_default();
        let value = data.remove("value").map(|value| value.0);
        let value = value
            .ok_or_else(|| Error::NotReady(format!("secret {name:?} with the bootstrap data has no \"value\"")))?;
        let format = data
            .get("format")
            .map(|format| String::from_utf8_lossy(&format.0).trim().to_owned());
        state.user = Some(match format.as_deref() {
            None | Some("" | "cloud-config") => UserData::CloudInit(value),
            Some("ignition") => UserData::Ignition(value),
            Some(other) => {
                let text =
                    format!("secret {name:?} has bootstrap data of format {other:?}: use cloud-config or ignition");
                return Err(Error::Invalid(text));
            }
        });
        Ok(())
    }

    /// Keeps the clone's task in the status, at once, with the units that were given out.
    pub(super) async fn record_clone(&self, vm: &VSphereVM, state: &mut VmState) -> Result<(), Error> {
        let Some(started) = state.started.clone() else {
            return Ok(());
        };
        let noted = vm.status.as_ref().and_then(|status| status.task_ref.as_deref());
        if noted == Some(started.task.as_str()) || state.task_over || started.task.is_empty() {
            return Ok(());
        }
        let text = status::cloning(vm);
        self.write(vm, state, |status, now| {
            status.task_ref = Some(started.task.clone());
            started.note(status);
            status::in_progress(status, names::CLONING, &text, now);
        })
        .await
    }

    pub(super) async fn clone_ended(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        result: capstan_vsphere::Result<Option<MoRef>>,
    ) -> Result<(), Error> {
        let end = CloneEnd::of(&result);
        state.task_over = end != CloneEnd::UnderWay;
        match (end, result) {
            (_, Ok(made)) => {
                state.reference = made;
                state.failures = 0;
                Ok(())
            }
            // Whether it was made after all is found out by its UUID, once no clone is under way any more.
            (CloneEnd::Unknown, Err(_)) => {
                state.doubtful = true;
                Ok(())
            }
            (CloneEnd::UnderWay, Err(error)) => Err(error.into()),
            (_, Err(error)) => {
                state.started = None;
                self.write(vm, state, |status, _| status.task_ref = None).await?;
                if error.fault().is_some_and(|fault| fault.is("DuplicateName")) {
                    state.name_taken = true;
                    return Ok(());
                }
                Err(status::because(names::CLONING_FAILED, error))
            }
        }
    }

    /// Whether a process before this one may have started a clone that is still under way; if so, leaves a waiter behind.
    /// An object that is younger than this process cannot have been cloned by another.
    pub(super) async fn others_are_cloning(
        self: &Arc<Self>,
        vm: &Arc<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<bool, Error> {
        let young = vm.creation_timestamp().is_some_and(|made| made.0 > self.started);
        if !state.doubtful && (state.alone || young) {
            return Ok(false);
        }
        let datacenter = vcenter.datacenter(vm.spec.clone_spec.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &vm.spec.clone_spec.template).await?;
        let tasks = vcenter.running_clones(&template.reference).await?;
        if tasks.is_empty() {
            (state.alone, state.doubtful) = (true, false);
            return Ok(false);
        }
        self.follow(vm, state, TaskKind::OtherClones, pending::clones(tasks));
        Ok(true)
    }

    /// The units that were given out by a process that did not live to write them down: the same template and the same
    /// spec give the same units.
    pub(super) async fn recall_disks(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<(), Error> {
        let recorded = self.recorded(vm, state);
        let mode = vm.status.as_ref().is_some_and(|status| status.clone_mode.is_some()) || state.started.is_some();
        let known = mode && recorded.placements.len() == vm.spec.clone_spec.data_disks.len();
        let told = vm.status.as_ref().is_some_and(|status| status.ready);
        if known || told || state.observed.is_none() {
            return Ok(());
        }
        match self.allocate_again(vm, state, vcenter).await {
            // What was up once is up without its template, too.
            Err(error) if recorded.was_ready && error.class() == Class::Terminal => Ok(()),
            result => result,
        }
    }

    async fn allocate_again(&self, vm: &VSphereVM, state: &mut VmState, vcenter: &Vcenter) -> Result<(), Error> {
        let desired = desired::desired(vm);
        let datacenter = vcenter.datacenter(desired.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &desired.template).await?;
        let snapshot = self.snapshot(vm, &desired, &template).await;
        let allocation = allocate(&template.hardware(), &desired.disks).map_err(|p| Error::Invalid(p.to_string()))?;
        state.started = Some(Started {
            task: String::new(),
            linked: snapshot.is_some(),
            snapshot: snapshot.map(|snapshot| snapshot.value().to_owned()),
            disks: desired::planned_disks(&desired.disks, &allocation.placements),
        });
        Ok(())
    }

    /// Who has the name that a clone was refused for.
    async fn name_holder(&self, vm: &VSphereVM, vcenter: &Vcenter) -> Result<Holder, Error> {
        let spec = &vm.spec.clone_spec;
        let datacenter = vcenter.datacenter(spec.datacenter.as_deref()).await?;
        let folder = vcenter.vm_folder(&datacenter, spec.folder.as_deref()).await?;
        let Some(reference) = vcenter.find_child(&folder, &vm.name_any()).await? else {
            return Ok(Holder::Nobody);
        };
        let info = match vcenter.vm(&reference).await {
            Err(error) if error.is_gone() => return Ok(Holder::Nobody),
            info => info?,
        };
        Ok(match info.instance_uuid.as_str() {
            "" => Holder::Unfinished,
            uuid if uuid.eq_ignore_ascii_case(&vm.uid().unwrap_or_default()) => Holder::Ourselves(reference),
            uuid => Holder::Somebody(uuid.to_owned()),
        })
    }

    /// Somebody has the name already: ourselves, through a clone whose task was lost, or somebody else.
    async fn name_is_taken(&self, vm: &VSphereVM, state: &mut VmState, vcenter: &Vcenter) -> Result<(), Error> {
        let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
        match self.name_holder(vm, vcenter).await? {
            // It may be given up right now, or be held by something that this account may not see.
            Holder::Nobody => {
                state.name_taken = false;
                let folder = vm.spec.clone_spec.folder.as_deref().unwrap_or("vm");
                Err(Error::Unseen(format!(
                    "vCenter says that the name {name:?} is taken, but no virtual machine of that name can be seen in \
                     folder {folder:?}: let the account see what has it, remove that, or use another name"
                )))
            }
            Holder::Ourselves(reference) => {
                state.name_taken = false;
                state.reference = Some(reference);
                Ok(())
            }
            Holder::Unfinished => Err(Error::NotReady(format!(
                "a clone named {name:?} is under way already: waiting for it"
            ))),
            Holder::Somebody(uuid) => {
                let folder = vm.spec.clone_spec.folder.as_deref().unwrap_or("vm");
                Err(Error::Invalid(format!(
                    "a virtual machine named {name:?} exists in folder {folder:?} already and is not this VSphereVM's (its \
                     instance UUID is {uuid}, not {uid}): it is left alone; rename or remove it, or use another name"
                )))
            }
        }
    }
}

/// Who has a name.
enum Holder {
    Nobody,
    Ourselves(MoRef),
    /// A clone that is not far enough to tell whose it is.
    Unfinished,
    /// By the instance UUID.
    Somebody(String),
}
