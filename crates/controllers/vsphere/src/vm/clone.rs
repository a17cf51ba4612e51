//! The clone: its template, its place, and the conflicts about its name.

use capstan_api::vsphere::VSphereVM;
use capstan_core::disks::vsphere::allocate;
use capstan_core::vm as plan;
use capstan_core::vm::{CloneRequest, DesiredVm, UserData};
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use capstan_vsphere::{
    CloneSpec, ConfigSpec, Datacenter, Datastore, DeviceChange, DiskLocation, DiskMove, MoRef, NamedDatastores,
    ResourcePool, Vcenter, VmInfo,
};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;

use super::room::Reservation;
use super::state::{Started, TaskKind, VmState};
use super::{Controller, Observed, pending};
use crate::desired;
use crate::error::Error;
use crate::observed;

/// A clone with everything that vCenter needs for it.
pub struct PreparedClone {
    template: MoRef,
    folder: MoRef,
    spec: CloneSpec,
    /// Its room on the datastore, until the clone ends.
    room: Option<Reservation>,
    /// The clone for the status, without its task.
    started: Started,
}

impl PreparedClone {
    /// Returns what decides about the turn of the clone. Turns are fair between namespaces.
    pub fn request(&self, vcenter: &Vcenter, scope: &Scope<VSphereVM>) -> CloneRequest {
        CloneRequest {
            vcenter: vcenter.server().to_owned(),
            datastore: self
                .spec
                .datastore
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            owner: scope.key.namespace.clone(),
        }
    }
}

impl Controller {
    /// Reads the template and resolves all names of the spec.
    pub(super) async fn prepare_clone(
        &self,
        vm: &VSphereVM,
        state: &mut VmState,
        vcenter: &Vcenter,
        desired: &DesiredVm,
    ) -> Result<PreparedClone, Error> {
        let datacenter = vcenter.datacenter(desired.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &desired.template).await?;
        let hardware = template.hardware();
        let snapshot = snapshot(state, desired, &template);
        plan::check_template(desired, &hardware, snapshot.is_some()).map_err(Error::Invalid)?;
        let allocation =
            allocate(&hardware, &desired.disks).map_err(|problems| Error::Invalid(problems.to_string()))?;
        let resolved = self.resolve(desired, vcenter).await?;
        let folder = vcenter.vm_folder(&datacenter, desired.folder.as_deref()).await?;
        let mut devices = observed::add_disks(
            desired,
            &resolved,
            &allocation.new_controllers,
            &allocation.placements,
            false,
        );
        devices.extend(observed::replace_nics(desired, &resolved, template.devices.iter()));
        let config = ConfigSpec {
            instance_uuid: Some(desired.instance_uuid.clone()),
            disk_uuid_enabled: Some(true),
            num_cpus: Some(desired.cpus),
            cores_per_socket: desired.cores_per_socket,
            memory_mib: Some(desired.memory_mib),
            memory_reservation_locked: (!desired.pci.is_empty()).then_some(true),
            devices,
            extra_config: plan::at_clone(desired, state.user.as_ref()).into_iter().collect(),
            vapp_config_removed: Some(true),
            ..ConfigSpec::default()
        };
        let config = observed::with_settings(desired, config);
        let pool = vcenter.resource_pool(&datacenter, desired.pool.as_deref()).await?;
        let turn = state.turn.as_ref().map(|turn| turn.request().datastore.as_str());
        let bytes = bytes(&config, &template, snapshot.is_some());
        let (datastore, room) = self
            .datastore(desired, vcenter, &datacenter, &pool, turn, bytes)
            .await?;
        let spec = clone_spec(&template, &pool, &datastore, snapshot.clone(), config);
        let kept = plan::ignored_sizes(desired, &hardware, snapshot.is_some());
        if !kept.is_empty() {
            state.events.push(EventNote::warning("DiskNotGrown", kept.join("; ")));
        }
        let ignored = capstan_core::validate::vsphere::ignored(&vm.spec.clone_spec);
        if !ignored.is_empty() {
            state
                .events
                .push(EventNote::warning("FieldIgnored", ignored.join("; ")));
        }
        Ok(PreparedClone {
            template: template.reference.clone(),
            folder,
            spec,
            room,
            started: Started {
                task: String::new(),
                linked: snapshot.is_some(),
                snapshot: snapshot.map(|snapshot| snapshot.value().to_owned()),
                disks: desired::planned_disks(&desired.disks, &allocation.placements),
            },
        })
    }

    pub(super) async fn start_clone(
        &self,
        scope: &Scope<VSphereVM>,
        observed: &mut Observed,
        state: &mut VmState,
    ) -> Result<Outcome, Error> {
        let Some(prepared) = observed.clone.take() else {
            return Ok(Outcome::Observe);
        };
        let PreparedClone {
            template,
            folder,
            spec,
            room,
            started,
        } = prepared;
        // A turn ends with its clone, or with a failure to start it.
        let turn = state.turn.take();
        let cloned = observed
            .vcenter()?
            .clone_vm(&template, &folder, &observed.desired.name, &spec);
        let task = match cloned.await {
            Ok(task) => task,
            Err(error) if error.fault().is_some_and(|fault| fault.is("DuplicateName")) => {
                state.name_taken = true;
                return Ok(Outcome::Observe);
            }
            Err(error) => {
                state.doubtful = error.fault().is_none();
                return Err(error.into());
            }
        };
        let started = Started {
            task: task.reference().value().to_owned(),
            ..started
        };
        observed.notes.started = Some(started.clone());
        state.started = Some(started);
        (state.task_over, state.clone_failed) = (false, false);
        let clone = async move {
            let outcome = pending::task(task).await;
            drop((turn, room));
            outcome
        };
        Ok(pending::follow(scope, state, TaskKind::Clone, clone))
    }

    /// Returns the datastore that the spec names, or one of the datastore cluster that it names, else one that satisfies the
    /// policy, else the only one. A clone whose turn has come goes where its turn is for, if that still fits.
    async fn datastore(
        &self,
        desired: &DesiredVm,
        vcenter: &Vcenter,
        datacenter: &Datacenter,
        pool: &ResourcePool,
        turn: Option<&str>,
        bytes: u64,
    ) -> Result<(Datastore, Option<Reservation>), Error> {
        let policy = match &desired.storage_policy {
            Some(name) => Some(vcenter.storage_policy(name).await?),
            None => None,
        };
        let named = match &desired.datastore {
            Some(name) => Some(vcenter.datastores(datacenter, name).await?),
            None => None,
        };
        let reachable;
        let mut fitting = match (&named, &policy) {
            (Some(named), _) => usable(named),
            (None, None) => return Ok((Datastore::clone(&*vcenter.datastore(datacenter, None).await?), None)),
            (None, Some(_)) => {
                let owner = pool.owner.as_ref().unwrap_or(&pool.reference);
                reachable = vcenter.datastores_of(owner).await?;
                reachable.iter().filter(|datastore| is_usable(datastore)).collect()
            }
        };
        if let Some(policy) = &policy {
            let references: Vec<MoRef> = fitting.iter().map(|datastore| datastore.reference.clone()).collect();
            let fits = vcenter.compatible_datastores(policy, &references).await?;
            fitting.retain(|datastore| fits.contains(&datastore.reference));
        }
        let of_turn = |datastore: &&Datastore| turn == Some(datastore.reference.to_string().as_str());
        if let Some(datastore) = fitting.iter().copied().find(of_turn) {
            fitting = vec![datastore];
        }
        let chosen = self
            .room
            .choose(vcenter.server(), &desired.instance_uuid, &fitting, bytes);
        let (datastore, room) = chosen.ok_or_else(|| Error::Invalid(no_datastore(desired)))?;
        Ok((datastore, Some(room)))
    }

    /// Reads the bootstrap data.
    pub(super) async fn load_user_data(&self, scope: &Scope<VSphereVM>, state: &mut VmState) -> Result<(), Error> {
        let reference = scope.object.spec.bootstrap_ref.as_ref();
        let Some(name) = reference.and_then(|reference| reference.name.clone()) else {
            return Ok(());
        };
        if state.user.is_some() {
            return Ok(());
        }
        let secret = scope.api_of::<Secret>().get_opt(&name).await?;
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

    /// Whether a process before this one may have started a clone that is still under way; if so, leaves a waiter behind.
    /// An object that is younger than this process cannot have been cloned by another.
    pub(super) async fn others_are_cloning(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<bool, Error> {
        let vm = &scope.object;
        let young = vm.creation_timestamp().is_some_and(|made| made.0 > self.started);
        if !state.doubtful && (state.alone || young) {
            return Ok(false);
        }
        let datacenter = vcenter.datacenter(vm.spec.clone_spec.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &vm.spec.clone_spec.template).await?;
        let tasks = vcenter.running_clones(&template.reference).await?;
        if tasks.is_empty() {
            (state.alone, state.doubtful) = (true, false);
            // A clone may have ended since the VM was searched.
            self.locate(scope, state, vcenter).await?;
            return Ok(false);
        }
        pending::follow(scope, state, TaskKind::OtherClones, pending::clones(tasks));
        Ok(true)
    }

    /// Allocates the units of the data disks as the clone did.
    pub(super) async fn allocate_again(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<(), Error> {
        let desired = desired::desired(&scope.object, &scope.key.uid);
        let datacenter = vcenter.datacenter(desired.datacenter.as_deref()).await?;
        let template = vcenter.template(&datacenter, &desired.template).await?;
        let snapshot = snapshot(state, &desired, &template);
        let allocation = allocate(&template.hardware(), &desired.disks).map_err(|p| Error::Invalid(p.to_string()))?;
        state.started = Some(Started {
            task: String::new(),
            linked: snapshot.is_some(),
            snapshot: snapshot.map(|snapshot| snapshot.value().to_owned()),
            disks: desired::planned_disks(&desired.disks, &allocation.placements),
        });
        Ok(())
    }

    /// Returns who has the name that vCenter refused a clone for.
    async fn name_holder(&self, scope: &Scope<VSphereVM>, vcenter: &Vcenter) -> Result<Holder, Error> {
        let spec = &scope.object.spec.clone_spec;
        let datacenter = vcenter.datacenter(spec.datacenter.as_deref()).await?;
        let folder = vcenter.vm_folder(&datacenter, spec.folder.as_deref()).await?;
        let Some(reference) = vcenter.find_child(&folder, &scope.key.name).await? else {
            return Ok(Holder::Nobody);
        };
        let info = match vcenter.vm(&reference).await {
            Err(error) if error.is_gone() => return Ok(Holder::Nobody),
            info => info?,
        };
        Ok(match info.instance_uuid.as_str() {
            "" => Holder::Unfinished,
            uuid if uuid.eq_ignore_ascii_case(&scope.key.uid) => Holder::Own(reference),
            uuid => Holder::Foreign(uuid.to_owned()),
        })
    }

    /// Finds the VM that has the name already: this object's, through a clone whose task was lost, or a foreign one.
    pub(super) async fn find_by_name(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
        vcenter: &Vcenter,
    ) -> Result<(), Error> {
        let (name, uid) = (&scope.key.name, &scope.key.uid);
        let folder = scope.object.spec.clone_spec.folder.as_deref().unwrap_or("vm");
        match self.name_holder(scope, vcenter).await? {
            // It may be given up right now, or be held by something that this account may not see.
            Holder::Nobody => {
                state.name_taken = false;
                Err(Error::Unseen(format!(
                    "vCenter reports that the name {name:?} is taken, but no virtual machine of that name can be seen in \
                     folder {folder:?}: let the account see what has it, remove that, or use another name"
                )))
            }
            Holder::Own(reference) => {
                state.name_taken = false;
                state.reference = Some(reference);
                Ok(())
            }
            Holder::Unfinished => Err(Error::NotReady(format!(
                "a clone named {name:?} is under way already: waiting for it"
            ))),
            Holder::Foreign(uuid) => Err(Error::Invalid(format!(
                "a virtual machine named {name:?} exists in folder {folder:?} already and is not this VSphereVM's (its \
                     instance UUID is {uuid}, not {uid}): it is left alone; rename or remove it, or use another name"
            ))),
        }
    }
}

/// Returns the clone with its pool and its datastore.
fn clone_spec(
    template: &VmInfo,
    pool: &ResourcePool,
    datastore: &Datastore,
    snapshot: Option<MoRef>,
    config: ConfigSpec,
) -> CloneSpec {
    let disks = template.devices.iter().filter(|device| device.disk().is_some());
    CloneSpec {
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
    }
}

/// Returns the room that a clone will take on its datastore at most: its new disks, those of the template if it is a full clone,
/// and the memory that a running machine has there.
fn bytes(config: &ConfigSpec, template: &VmInfo, is_linked: bool) -> u64 {
    let new = config.devices.iter().filter_map(|change| match change {
        DeviceChange::AddDisk(disk) if disk.datastore.is_none() => Some(disk.capacity_kib),
        _ => None,
    });
    let disks = template.devices.iter().filter_map(|device| device.disk());
    let copied = disks.filter(|_| !is_linked).map(|disk| disk.capacity_kib);
    let memory = config.memory_mib.map(|mib| mib << 10);
    let kib: i64 = new.chain(copied).chain(memory).sum();
    u64::try_from(kib).unwrap_or_default() << 10
}

/// Returns the datastores that take machines. One that is named by itself is left to vCenter to judge.
fn usable(named: &NamedDatastores) -> Vec<&Datastore> {
    let all = named.datastores.iter();
    all.filter(|datastore| !named.is_cluster || is_usable(datastore))
        .collect()
}

fn is_usable(datastore: &Datastore) -> bool {
    datastore.accessible && datastore.maintenance == "normal"
}

/// Returns the datastore for a machine.
fn choose(machine: &str, among: &[&Datastore]) -> Option<Datastore> {
    let free = |datastore: &&Datastore| u64::try_from(datastore.free_bytes).unwrap_or_default();
    let candidates: Vec<(&str, u64)> = among.iter().map(|one| (one.name.as_str(), free(one))).collect();
    let chosen = plan::choose_datastore(machine, &candidates)?;
    among.get(chosen).map(|datastore| Datastore::clone(datastore))
}

/// Says why no datastore is left.
fn no_datastore(desired: &DesiredVm) -> String {
    match (&desired.datastore, &desired.storage_policy) {
        (Some(name), Some(policy)) => {
            format!("datastore {name:?} does not satisfy storage policy {policy:?}: name another or none")
        }
        (Some(name), None) => none_usable(name),
        (None, policy) => {
            let policy = policy.as_deref().unwrap_or_default();
            format!("no compatible datastores found for storage policy: {policy}")
        }
    }
}

/// Returns the datastore of a data disk that names one, or one of the datastore cluster that it names, if it has any to give.
pub(super) async fn disk_datastore(
    vcenter: &Vcenter,
    datacenter: &Datacenter,
    machine: &str,
    name: &str,
) -> capstan_vsphere::Result<Option<Datastore>> {
    let all = vcenter.datastores(datacenter, name).await?;
    Ok(choose(machine, &usable(&all)))
}

/// Says that a datastore cluster has no datastore to give.
pub(super) fn none_usable(name: &str) -> String {
    format!("datastore cluster {name:?} has no datastore that is accessible and not in maintenance")
}

/// The holder of a name.
enum Holder {
    Nobody,
    Own(MoRef),
    /// A clone that does not show yet whose it is.
    Unfinished,
    /// By the instance UUID.
    Foreign(String),
}

/// Returns the snapshot that a linked clone grows from; without one it is a full clone, which an event reports.
fn snapshot(state: &mut VmState, desired: &DesiredVm, template: &VmInfo) -> Option<MoRef> {
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
            state.events.push(EventNote::warning("SnapshotNotFound", text));
            None
        }
    }
}
