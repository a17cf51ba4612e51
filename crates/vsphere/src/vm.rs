//! Virtual machines: what is read of them, how they are watched, and what can be done to them.

use crate::device::{Device, hardware};
use crate::error::{Error, Result};
use std::net::IpAddr;
use std::sync::Arc;

use crate::properties::Object;
use crate::soap::Call;
use crate::spec::{CloneSpec, ConfigSpec, read_allocation};
use crate::task::Task;
use crate::vcenter::Vcenter;
use crate::watcher::{Interest, Update};
use crate::xml::{Element, Writer};
use capstan_core::memory::Holder;
use capstan_core::vm::{Allocation, GuestNic, MoRef, PowerState};

/// Bytes of memory that everything about one machine takes at most, because it is kept. A machine with 60 disks takes less
/// than one MiB.
const MAX_VM: usize = 3 << 20;
/// Bytes of memory of what is watched of a machine at most.
pub(crate) const MAX_STATE: usize = 512 << 10;
/// Addresses of one network card that are kept at most.
const MAX_ADDRESSES: usize = 256;
/// vSphere allows 496 snapshots in a chain of 32; each of their names has 80 characters.
const MAX_SNAPSHOTS: usize = 500;
const MAX_SNAPSHOT_PATH: usize = 16 << 10;

/// What is watched of a machine.
pub(crate) const STATE_PATHS: &[&str] = &[
    "name",
    "runtime.powerState",
    "runtime.connectionState",
    "runtime.host",
    "guest.toolsRunningStatus",
    "guest.hostName",
    "guest.ipAddress",
    "guest.net",
];

const INFO_PATHS: &[&str] = &[
    "name",
    "parent",
    "runtime.powerState",
    "runtime.connectionState",
    "runtime.host",
    "guest.toolsRunningStatus",
    "guest.hostName",
    "guest.ipAddress",
    "guest.net",
    "config.uuid",
    "config.instanceUuid",
    "config.version",
    "config.template",
    "config.guestId",
    "config.hardware",
    "config.extraConfig",
    "config.cpuAllocation",
    "config.memoryAllocation",
    "config.nestedHVEnabled",
    "config.files.vmPathName",
    "snapshot",
    "datastore",
    "resourcePool",
];

/// The part of a machine that changes by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmRuntime {
    pub name: String,
    pub power: PowerState,
    /// `connected`, or why vCenter does not know better (`disconnected`, `orphaned`, `inaccessible`, `invalid`).
    pub connection: String,
    pub host: Option<MoRef>,
    pub tools_running: bool,
    pub host_name: String,
    pub ip_address: String,
    pub nics: Vec<GuestNic>,
}

/// One snapshot of a machine's tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub reference: MoRef,
    pub name: String,
    /// Names from the root, joined by `/`.
    pub path: String,
}

/// A machine, read as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmInfo {
    pub reference: MoRef,
    pub state: VmRuntime,
    pub parent: Option<MoRef>,
    pub bios_uuid: String,
    pub instance_uuid: String,
    /// `vmx-19`.
    pub version: String,
    pub template: bool,
    pub guest_id: String,
    pub num_cpus: i32,
    pub cores_per_socket: i32,
    pub memory_mib: i64,
    /// In MHz.
    pub cpu_allocation: Allocation,
    /// In MiB.
    pub memory_allocation: Allocation,
    pub nested_hv: bool,
    pub devices: Vec<Device>,
    pub extra_config: Vec<(String, String)>,
    pub path: String,
    pub current_snapshot: Option<MoRef>,
    pub snapshots: Vec<Snapshot>,
    pub datastores: Vec<MoRef>,
    pub resource_pool: Option<MoRef>,
    pub kept: Kept,
}

/// The memory that a machine takes for as long as it is kept. Machines do not differ in it.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    _holder: Option<Arc<Holder>>,
}

impl PartialEq for Kept {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Kept {}

impl VmRuntime {
    pub(crate) fn read(object: &Object) -> Self {
        let text = |path: &str| object.string(path).unwrap_or_default();
        Self {
            name: unescape(&text("name")),
            power: match object.text("runtime.powerState") {
                Some("poweredOn") => PowerState::On,
                Some("suspended") => PowerState::Suspended,
                _ => PowerState::Off,
            },
            connection: text("runtime.connectionState"),
            host: object.moref("runtime.host"),
            tools_running: object.text("guest.toolsRunningStatus") == Some("guestToolsRunning"),
            host_name: text("guest.hostName"),
            ip_address: text("guest.ipAddress"),
            nics: object
                .get("guest.net")
                .map(|nics| nics.children.iter().map(read_nic).collect())
                .unwrap_or_default(),
        }
    }
}

fn read_nic(element: &Element) -> GuestNic {
    let plain = element.all("ipAddress").map(|address| address.text.trim());
    let config = element.child("ipConfig").into_iter();
    let detailed = config.flat_map(|config| config.all("ipAddress"));
    let detailed = detailed.filter_map(|address| address.text_at("ipAddress"));
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in plain.chain(detailed).filter_map(|text| text.parse().ok()) {
        if addresses.len() < MAX_ADDRESSES && !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    GuestNic {
        network: element.string_at("network"),
        mac: element.string_at("macAddress").unwrap_or_default(),
        addresses,
        connected: element.bool_at("connected").unwrap_or(false),
    }
}

impl VmInfo {
    pub(crate) fn read(reference: MoRef, object: &Object) -> Self {
        let text = |path: &str| object.string(path).unwrap_or_default();
        let empty = Element::default();
        let hardware = object.get("config.hardware").unwrap_or(&empty);
        let snapshot = object.get("snapshot").unwrap_or(&empty);
        let mut snapshots = Vec::new();
        for root in snapshot.all("rootSnapshotList") {
            read_snapshots(root, "", &mut snapshots);
        }
        Self {
            reference,
            state: VmRuntime::read(object),
            parent: object.moref("parent"),
            bios_uuid: text("config.uuid"),
            instance_uuid: text("config.instanceUuid"),
            version: text("config.version"),
            template: object.text("config.template") == Some("true"),
            guest_id: text("config.guestId"),
            num_cpus: hardware.number_at("numCPU").unwrap_or_default(),
            cores_per_socket: hardware.number_at("numCoresPerSocket").unwrap_or_default(),
            memory_mib: hardware.number_at("memoryMB").unwrap_or_default(),
            cpu_allocation: object
                .get("config.cpuAllocation")
                .map(read_allocation)
                .unwrap_or_default(),
            memory_allocation: object
                .get("config.memoryAllocation")
                .map(read_allocation)
                .unwrap_or_default(),
            nested_hv: object.text("config.nestedHVEnabled") == Some("true"),
            devices: hardware.all("device").filter_map(Device::read).collect(),
            extra_config: object.get("config.extraConfig").map(read_options).unwrap_or_default(),
            path: text("config.files.vmPathName"),
            current_snapshot: snapshot.moref_at("currentSnapshot"),
            snapshots,
            datastores: object.morefs("datastore"),
            resource_pool: object.moref("resourcePool"),
            kept: Kept::default(),
        }
    }

    /// The number in `vmx-19`; 0 if vCenter has not reported it.
    pub fn hardware_version(&self) -> u32 {
        self.version
            .rsplit('-')
            .next()
            .and_then(|number| number.parse().ok())
            .unwrap_or_default()
    }

    /// The devices as the decisions about disks want them.
    pub fn hardware(&self) -> capstan_core::disks::vsphere::Hardware {
        hardware(self.hardware_version(), &self.devices)
    }

    /// A snapshot by name or path; several of the same name are ambiguous.
    pub fn snapshot(&self, name: &str) -> Result<&Snapshot> {
        let found: Vec<&Snapshot> = self
            .snapshots
            .iter()
            .filter(|snapshot| {
                snapshot.name == name || snapshot.path == name.trim_matches('/') || snapshot.reference.value() == name
            })
            .collect();
        match found.as_slice() {
            [one] => Ok(one),
            [] => Err(Error::NotFound {
                kind: "snapshot",
                path: format!("{name} of {}", self.state.name),
            }),
            many => Err(Error::Ambiguous {
                kind: "snapshot",
                path: name.to_owned(),
                found: many.iter().map(|snapshot| snapshot.path.clone()).collect(),
            }),
        }
    }

    pub fn extra_config(&self, key: &str) -> Option<&str> {
        self.extra_config
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, value)| value.as_str())
    }
}

fn read_options(array: &Element) -> Vec<(String, String)> {
    array
        .children
        .iter()
        .filter_map(|option| {
            Some((
                option.string_at("key")?,
                option
                    .child("value")
                    .map(|value| value.text.clone())
                    .unwrap_or_default(),
            ))
        })
        .collect()
}

fn read_snapshots(node: &Element, above: &str, found: &mut Vec<Snapshot>) {
    let name = unescape(&node.string_at("name").unwrap_or_default());
    let path = if above.is_empty() {
        name.clone()
    } else {
        format!("{above}/{name}")
    };
    if found.len() >= MAX_SNAPSHOTS || path.len() > MAX_SNAPSHOT_PATH {
        return;
    }
    if let Some(reference) = node.moref_at("snapshot") {
        found.push(Snapshot {
            reference,
            name,
            path: path.clone(),
        });
    }
    for child in node.all("childSnapshotList") {
        read_snapshots(child, &path, found);
    }
}

/// Names in the inventory come with `%`, `/` and `\` written as `%25`, `%2f` and `%5c`.
pub(crate) fn unescape(name: &str) -> String {
    name.replace("%2f", "/")
        .replace("%2F", "/")
        .replace("%5c", "\\")
        .replace("%5C", "\\")
        .replace("%25", "%")
}

/// A machine being watched, until this is dropped.
pub struct VmWatch {
    reference: MoRef,
    interest: Interest,
}

impl VmWatch {
    pub fn reference(&self) -> &MoRef {
        &self.reference
    }

    /// The next state that differs from the last one given; at first, the state as it is. A machine that does not exist
    /// is a `ManagedObjectNotFound` fault (see [`Error::is_gone`]).
    pub async fn next(&mut self) -> Result<VmRuntime> {
        loop {
            match self.interest.next().await? {
                Update::Object(object) => return Ok(VmRuntime::read(&object)),
                Update::Gone => return Err(crate::properties::gone(&self.reference)),
                Update::Nothing | Update::Failed(_) => {}
            }
        }
    }
}

impl Vcenter {
    /// Watches a machine from which something is expected: an address, a change of power.
    pub fn watch_vm(&self, vm: &MoRef) -> VmWatch {
        VmWatch {
            reference: vm.clone(),
            interest: self.interest(vm),
        }
    }

    /// Everything about one machine, in one call.
    pub async fn vm(&self, vm: &MoRef) -> Result<VmInfo> {
        let object = self.retrieve_one(vm, INFO_PATHS).await?;
        if object.weight() > MAX_VM {
            return Err(self.too_large("RetrievePropertiesEx", MAX_VM));
        }
        let holder = self.0.memory.holder(self.0.login.tenant());
        holder.set(object.weight())?;
        Ok(VmInfo {
            kept: Kept {
                _holder: Some(Arc::new(holder)),
            },
            ..VmInfo::read(vm.clone(), &object)
        })
    }

    /// The part of a machine that changes by itself, in one call.
    pub async fn vm_state(&self, vm: &MoRef) -> Result<VmRuntime> {
        Ok(VmRuntime::read(&self.retrieve_one(vm, STATE_PATHS).await?))
    }

    pub async fn clone_vm(&self, source: &MoRef, folder: &MoRef, name: &str, spec: &CloneSpec) -> Result<Task> {
        let mut body = Writer::new();
        body.moref("folder", folder).text("name", name);
        spec.write(&mut body);
        self.start("CloneVM_Task", source, body).await
    }

    pub async fn reconfigure(&self, vm: &MoRef, spec: &ConfigSpec) -> Result<Task> {
        let mut body = Writer::new();
        spec.write(&mut body, "spec");
        self.start("ReconfigVM_Task", vm, body).await
    }

    pub async fn power_on(&self, vm: &MoRef) -> Result<Task> {
        self.start("PowerOnVM_Task", vm, Writer::new()).await
    }

    pub async fn power_off(&self, vm: &MoRef) -> Result<Task> {
        self.start("PowerOffVM_Task", vm, Writer::new()).await
    }

    /// Asks the guest to shut down. Its power state shows when it has.
    pub async fn shutdown_guest(&self, vm: &MoRef) -> Result<()> {
        self.call(Call::write("ShutdownGuest", vm, String::new()))
            .await
            .map(|_| ())
    }

    /// Deletes the machine with all disks that it still has.
    pub async fn destroy(&self, vm: &MoRef) -> Result<Task> {
        self.start("Destroy_Task", vm, Writer::new()).await
    }

    /// Brings the virtual hardware to a version such as `vmx-19`.
    pub async fn upgrade_hardware(&self, vm: &MoRef, version: &str) -> Result<Task> {
        let mut body = Writer::new();
        body.text("version", version);
        self.start("UpgradeVM_Task", vm, body).await
    }

    pub async fn create_snapshot(&self, vm: &MoRef, name: &str, description: &str) -> Result<Task> {
        let mut body = Writer::new();
        body.text("name", name)
            .text("description", description)
            .value("memory", false)
            .value("quiesce", false);
        self.start("CreateSnapshot_Task", vm, body).await
    }

    pub async fn remove_snapshot(&self, snapshot: &MoRef, children: bool) -> Result<Task> {
        let mut body = Writer::new();
        body.value("removeChildren", children);
        self.start("RemoveSnapshot_Task", snapshot, body).await
    }

    async fn start(&self, method: &'static str, this: &MoRef, body: Writer) -> Result<Task> {
        let reference = self.call_for_moref(Call::write(method, this, body.finish())).await;
        if reference.as_ref().is_err_and(Error::is_gone) {
            self.0.cache.forget();
        }
        Ok(Task::new(self.clone(), reference?))
    }
}
