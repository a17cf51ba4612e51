//! The inventory of the vCenter, and the tasks that change its machines.

use capstan_vsphere::MoRef;
use capstan_vsphere::xml::Element;

use super::{Answer, CLONE, Fault, GUEST, NOT_FOUND, State, TASK, Vcenter, leaf, link, links, node, returned};

/// The template of all machines.
const TEMPLATE: &str = "pvscsi";
const ON: &str = "poweredOn";
const OFF: &str = "poweredOff";

/// A datacenter with one of each, and a template with a snapshot.
pub fn inventory(state: &mut State) {
    let reference = MoRef::new;
    let (root, datacenter) = (reference("Folder", "group-d1"), reference("Datacenter", "datacenter-2"));
    let folders = [
        ("vm", "vmFolder", "group-v3"),
        ("host", "hostFolder", "group-h4"),
        ("datastore", "datastoreFolder", "group-s5"),
        ("network", "networkFolder", "group-n6"),
    ];
    let (cluster, pool) = (
        reference("ClusterComputeResource", "domain-c7"),
        reference("ResourcePool", "resgroup-8"),
    );
    let (store, network, host) = (
        reference("Datastore", "datastore-9"),
        reference("Network", "network-10"),
        reference("HostSystem", "host-11"),
    );
    let template = reference("VirtualMachine", "vm-12");
    let mut object = |reference: &MoRef, name: &str, parent: &MoRef| {
        state.set(reference, "name", leaf("val", name));
        state.set(reference, "parent", link(parent));
    };
    object(&root, "Datacenters", &root);
    object(&datacenter, "DC0", &root);
    for (name, _, id) in folders {
        object(&reference("Folder", id), name, &datacenter);
    }
    object(&cluster, "DC0_C0", &reference("Folder", "group-h4"));
    object(&pool, "Resources", &cluster);
    object(&store, "LocalDS_0", &reference("Folder", "group-s5"));
    object(&network, "VM Network", &reference("Folder", "group-n6"));
    object(&host, "host", &cluster);
    object(&template, TEMPLATE, &reference("Folder", "group-v3"));
    state.set(&root, "childEntity", links(&[&datacenter]));
    for (_, path, id) in folders {
        state.set(&datacenter, path, link(&reference("Folder", id)));
    }
    for (folder, child) in [("group-h4", &cluster), ("group-s5", &store), ("group-n6", &network)] {
        state.set(&reference("Folder", folder), "childEntity", links(&[child]));
    }
    state.set(&reference("Folder", "group-v3"), "childEntity", links(&[&template]));
    state.set(&cluster, "resourcePool", link(&pool));
    state.set(&cluster, "datastore", links(&[&store]));
    state.set(&cluster, "host", links(&[&host]));
    state.set(&pool, "owner", link(&cluster));
    state.set(&store, "summary.freeSpace", leaf("val", 1_u64 << 44));
    state.set(&store, "summary.accessible", leaf("val", true));
    state.set(&store, "summary.maintenanceMode", leaf("val", "normal"));
    set_machine(state, &template, TEMPLATE);
    state.set(&template, "config.template", leaf("val", true));
    let snapshot = reference("VirtualMachineSnapshot", "snapshot-13");
    let of = |name: &str| Element {
        name: name.to_owned(),
        ..link(&snapshot)
    };
    let tree = node("rootSnapshotList", None, vec![of("snapshot"), leaf("name", "base")]);
    state.set(
        &template,
        "snapshot",
        node("val", None, vec![of("currentSnapshot"), tree]),
    );
}

/// Gives a machine the properties of a new one, powered off.
fn set_machine(state: &mut State, vm: &MoRef, name: &str) {
    let (bios, instance) = (state.rng.uid(), state.rng.uid());
    let texts = [
        ("name", name),
        ("runtime.powerState", OFF),
        ("runtime.connectionState", "connected"),
        ("guest.toolsRunningStatus", "guestToolsNotRunning"),
        ("config.uuid", &bios),
        ("config.instanceUuid", &instance),
        ("config.version", "vmx-19"),
        ("config.guestId", "otherGuest64"),
        ("config.template", "false"),
        ("config.files.vmPathName", &format!("[LocalDS_0] {name}/{name}.vmx")),
    ];
    for (path, text) in texts {
        state.set(vm, path, leaf("val", text));
    }
    let key = |key: i32| leaf("key", key);
    let backing = vec![
        leaf("fileName", format!("[LocalDS_0] {name}/{name}.vmdk")),
        leaf("diskMode", "persistent"),
        leaf("uuid", state.rng.uid()),
    ];
    let hardware = vec![
        leaf("numCPU", 1),
        leaf("numCoresPerSocket", 1),
        leaf("memoryMB", 1024),
        node(
            "device",
            Some("ParaVirtualSCSIController"),
            vec![key(1000), leaf("busNumber", 0), leaf("scsiCtlrUnitNumber", 7)],
        ),
        node(
            "device",
            Some("VirtualDisk"),
            vec![
                key(2000),
                node("backing", Some("VirtualDiskFlatVer2BackingInfo"), backing),
                leaf("controllerKey", 1000),
                leaf("unitNumber", 0),
                leaf("capacityInKB", 10 << 20),
            ],
        ),
    ];
    state.set(vm, "config.hardware", node("val", None, hardware));
    state.set(vm, "config.extraConfig", node("val", None, Vec::new()));
    let place = |kind: &str, id: &str| MoRef::new(kind, id);
    state.set(vm, "parent", link(&place("Folder", "group-v3")));
    state.set(vm, "runtime.host", link(&place("HostSystem", "host-11")));
    state.set(vm, "resourcePool", link(&place("ResourcePool", "resgroup-8")));
    state.set(vm, "datastore", links(&[&place("Datastore", "datastore-9")]));
}

impl State {
    fn power(&self, vm: &MoRef) -> String {
        self.text(vm, "runtime.powerState")
    }

    fn value(&mut self, vm: &MoRef, path: &str) -> Result<&mut Element, Fault> {
        let object = self.objects.get_mut(vm).ok_or(NOT_FOUND)?;
        object.values.get_mut(path).ok_or(NOT_FOUND)
    }

    /// Carries out a configuration as a clone or a reconfiguration brings it.
    fn configure(&mut self, vm: &MoRef, config: &Element) -> Result<(), Fault> {
        for (from, to) in [
            ("uuid", "config.uuid"),
            ("instanceUuid", "config.instanceUuid"),
            ("version", "config.version"),
            ("guestId", "config.guestId"),
        ] {
            if let Some(text) = config.text_at(from) {
                self.set(vm, to, leaf("val", text));
            }
        }
        let name = self.text(vm, "name");
        let (mac, uuid) = (self.rng.number() & 0xff_ffff, self.rng.uid());
        let hardware = self.value(vm, "config.hardware")?;
        for (from, to) in [
            ("numCPUs", "numCPU"),
            ("numCoresPerSocket", "numCoresPerSocket"),
            ("memoryMB", "memoryMB"),
        ] {
            let child = hardware.children.iter_mut().find(|child| child.name == to);
            if let (Some(text), Some(child)) = (config.string_at(from), child) {
                child.text = text;
            }
        }
        let mut keys: Vec<(String, String)> = Vec::new();
        for (number, change) in config.all("deviceChange").enumerate() {
            let mut device = change.child("device").cloned().ok_or("InvalidRequest")?;
            let key = device.string_at("key").unwrap_or_default();
            match change.text_at("operation") {
                Some("add") => {
                    let highest = hardware
                        .all("device")
                        .filter_map(|device| device.number_at::<i32>("key"));
                    let fresh = (highest.max().unwrap_or(0).max(4999) + 1).to_string();
                    put(&mut device, "key", &fresh);
                    let given = device.string_at("controllerKey");
                    if let Some((_, real)) = keys.iter().find(|(asked, _)| Some(asked) == given.as_ref()) {
                        put(&mut device, "controllerKey", real);
                    }
                    if device.kind.as_deref() == Some("VirtualDisk") {
                        occupied(hardware, &device)?;
                        let backing = device.children.iter_mut().find(|child| child.name == "backing");
                        if let Some(backing) = backing {
                            put(backing, "fileName", &format!("[LocalDS_0] {name}/{name}_{fresh}.vmdk"));
                            put(backing, "uuid", &format!("{uuid}-{number}"));
                        }
                    } else if device
                        .kind
                        .as_deref()
                        .is_some_and(|kind| kind.starts_with("VirtualVmxnet"))
                    {
                        put(
                            &mut device,
                            "macAddress",
                            &format!("00:50:56:{:02x}:{:02x}:{number:02x}", mac >> 8 & 0xff, mac & 0xff),
                        );
                    }
                    keys.push((key, fresh));
                    hardware.children.push(device);
                }
                Some("edit") => {
                    let same = |old: &&mut Element| old.name == "device" && old.string_at("key").as_ref() == Some(&key);
                    let old = hardware.children.iter_mut().find(same).ok_or("InvalidDeviceSpec")?;
                    device.name = "device".to_owned();
                    *old = device;
                }
                _ => hardware
                    .children
                    .retain(|old| old.name != "device" || old.string_at("key").as_ref() != Some(&key)),
            }
        }
        let extra = self.value(vm, "config.extraConfig")?;
        for option in config.all("extraConfig") {
            extra
                .children
                .retain(|old| old.string_at("key") != option.string_at("key"));
            extra.children.push(option.clone());
        }
        self.touch(vm);
        Ok(())
    }

    /// Carries out a task at its end.
    fn end_task(&mut self, method: &str, vm: &MoRef, call: &Element) -> Result<Option<MoRef>, Fault> {
        if !self.objects.contains_key(vm) {
            return Err(NOT_FOUND);
        }
        let power = self.power(vm);
        match method {
            "CloneVM_Task" => {
                let name = call.text_at("name").unwrap_or_default();
                if self.named("VirtualMachine", name).is_some() {
                    return Err("DuplicateName");
                }
                let clone = self.next("VirtualMachine", "vm-");
                set_machine(self, &clone, name);
                if let Some(config) = call.at("spec.config") {
                    self.configure(&clone, config)?;
                }
                Ok(Some(clone))
            }
            "ReconfigVM_Task" => {
                self.configure(vm, call.child("spec").ok_or("InvalidRequest")?)?;
                Ok(None)
            }
            "PowerOnVM_Task" if power != ON => {
                self.set(vm, "runtime.powerState", leaf("val", ON));
                Ok(None)
            }
            "PowerOffVM_Task" if power == ON => {
                self.power_off(vm);
                Ok(None)
            }
            "Destroy_Task" if power != ON => {
                self.remove(vm);
                Ok(None)
            }
            "UpgradeVM_Task" => {
                let version = call.text_at("version").unwrap_or_default();
                self.set(vm, "config.version", leaf("val", version));
                Ok(None)
            }
            _ => Err("InvalidPowerState"),
        }
    }

    fn power_off(&mut self, vm: &MoRef) {
        self.set(vm, "runtime.powerState", leaf("val", OFF));
        self.set(vm, "guest.toolsRunningStatus", leaf("val", "guestToolsNotRunning"));
        for path in ["guest.net", "guest.ipAddress"] {
            if let Some(object) = self.objects.get_mut(vm) {
                object.values.remove(path);
            }
        }
        self.touch(vm);
    }

    /// The guest has started, and has an address for each of its interfaces.
    fn boot(&mut self, vm: &MoRef) {
        if !self.objects.contains_key(vm) || self.power(vm) != ON {
            return;
        }
        let address = format!("10.0.{}.{}", self.rng.below(250), 1 + self.rng.below(250));
        let nics: Vec<Element> = match self.value(vm, "config.hardware") {
            Ok(hardware) => hardware
                .all("device")
                .filter_map(|device| device.string_at("macAddress"))
                .map(|mac| {
                    let nic = vec![
                        leaf("network", "VM Network"),
                        leaf("ipAddress", &address),
                        leaf("macAddress", mac),
                        leaf("connected", true),
                    ];
                    node("GuestNicInfo", None, nic)
                })
                .collect(),
            Err(_) => return,
        };
        self.set(vm, "guest.net", node("val", None, nics));
        self.set(vm, "guest.ipAddress", leaf("val", address));
        self.set(vm, "guest.toolsRunningStatus", leaf("val", "guestToolsRunning"));
    }
}

fn put(element: &mut Element, name: &str, text: &str) {
    match element.children.iter_mut().find(|child| child.name == name) {
        Some(child) => child.text = text.to_owned(),
        None => element.children.push(leaf(name, text)),
    }
}

/// A controller has one disk at each unit.
fn occupied(hardware: &Element, disk: &Element) -> Result<(), Fault> {
    let place = |device: &Element| (device.string_at("controllerKey"), device.string_at("unitNumber"));
    match hardware.all("device").any(|device| place(device) == place(disk)) {
        true => Err("InvalidDeviceSpec"),
        false => Ok(()),
    }
}

impl Vcenter {
    /// Requests that change machines.
    pub(super) fn change(&self, call: &Element, this: &MoRef) -> Answer {
        let method = call.name.clone();
        let name = match method.as_str() {
            "CloneVM_Task" => call.string_at("name").unwrap_or_default(),
            _ => self.state.lock().text(this, "name"),
        };
        if !self.state.lock().objects.contains_key(this) {
            return Err(NOT_FOUND);
        }
        self.monitor.before(self, &method, &name);
        if method == "ShutdownGuest" {
            return self.shut_down(this);
        }
        if !method.ends_with("_Task") {
            self.trace.wrong(format!("{method} is not simulated"));
            return Err("NotSupported");
        }
        let (task, time) = {
            let mut state = self.state.lock();
            let task = state.next("Task", "task-");
            state.set(&task, "info.state", leaf("val", "running"));
            state.set(
                &task,
                "info.descriptionId",
                leaf(
                    "val",
                    format!("VirtualMachine.{}", method.trim_end_matches("VM_Task").to_lowercase()),
                ),
            );
            let mut recent = state
                .value(this, "recentTask")
                .map(|tasks| tasks.morefs())
                .unwrap_or_default();
            recent.push(task.clone());
            state.set(this, "recentTask", links(&recent.iter().collect::<Vec<_>>()));
            let time = if method == "CloneVM_Task" { CLONE } else { TASK };
            (task, state.between(time))
        };
        let (vcenter, call, vm, ended) = (self.clone(), call.clone(), this.clone(), task.clone());
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            vcenter.finish(&method, &vm, &call, &ended);
        });
        Ok(returned(&task))
    }

    fn finish(&self, method: &str, vm: &MoRef, call: &Element, task: &MoRef) {
        let mut state = self.state.lock();
        let result = match state.failing {
            0 => state.end_task(method, vm, call),
            _ => {
                state.failing -= 1;
                Err("GenericVmConfigFault")
            }
        };
        match &result {
            Ok(made) => {
                if let Some(made) = made {
                    state.set(task, "info.result", link(made));
                }
                state.set(task, "info.state", leaf("val", "success"));
            }
            Err(fault) => {
                let error = vec![node("fault", Some(fault), Vec::new()), leaf("localizedMessage", fault)];
                state.set(task, "info.error", node("val", None, error));
                state.set(task, "info.state", leaf("val", "error"));
            }
        }
        self.trace.note(format!("vcenter: {method} {vm} ends: {result:?}"));
        if method == "PowerOnVM_Task" && result.is_ok() {
            let time = state.between(GUEST);
            let (vcenter, vm) = (self.clone(), vm.clone());
            tokio::spawn(async move {
                tokio::time::sleep(time).await;
                vcenter.state.lock().boot(&vm);
                vcenter.changed.notify_waiters();
            });
        }
        drop(state);
        self.changed.notify_waiters();
    }

    fn shut_down(&self, vm: &MoRef) -> Answer {
        let mut state = self.state.lock();
        if state.text(vm, "guest.toolsRunningStatus") != "guestToolsRunning" {
            return Err("ToolsUnavailable");
        }
        let time = state.between(GUEST);
        let (vcenter, vm) = (self.clone(), vm.clone());
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            let mut state = vcenter.state.lock();
            if state.objects.contains_key(&vm) && state.power(&vm) == ON {
                state.power_off(&vm);
            }
            drop(state);
            vcenter.changed.notify_waiters();
        });
        Ok(String::new())
    }

    /// Names of all machines but the template.
    pub fn machines(&self) -> Vec<String> {
        let state = self.state.lock();
        let vms = state
            .objects
            .keys()
            .filter(|reference| reference.kind() == "VirtualMachine");
        let mut names: Vec<String> = vms
            .map(|vm| state.text(vm, "name"))
            .filter(|name| name != TEMPLATE)
            .collect();
        names.sort();
        names
    }

    /// Somebody removes a machine.
    pub fn vanish(&self, name: &str) {
        let mut state = self.state.lock();
        if let Some(vm) = state.named("VirtualMachine", name) {
            state.remove(&vm);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// A volume of the cluster's storage driver is attached to a machine that is on. Returns whether it was.
    pub fn attach_volume(&self, name: &str, volume: &str) -> bool {
        let mut state = self.state.lock();
        let Some(vm) = state.named("VirtualMachine", name).filter(|vm| state.power(vm) == ON) else {
            return false;
        };
        let Ok(hardware) = state.value(&vm, "config.hardware") else {
            return false;
        };
        let units: Vec<i32> = hardware
            .all("device")
            .filter_map(|device| device.number_at("unitNumber"))
            .collect();
        let unit = (1..64)
            .filter(|unit| *unit != 7)
            .find(|unit| !units.contains(unit))
            .unwrap_or(63);
        let key = hardware
            .all("device")
            .filter_map(|device| device.number_at::<i32>("key"))
            .max()
            .unwrap_or(0)
            + 1;
        let backing = vec![
            leaf("fileName", format!("[LocalDS_0] fcd/{volume}.vmdk")),
            leaf("diskMode", "independent_persistent"),
            leaf("uuid", volume),
        ];
        hardware.children.push(node(
            "device",
            Some("VirtualDisk"),
            vec![
                leaf("key", key),
                node("backing", Some("VirtualDiskFlatVer2BackingInfo"), backing),
                leaf("controllerKey", 1000),
                leaf("unitNumber", unit),
                leaf("capacityInKB", 1 << 20),
                node("vDiskId", None, vec![leaf("id", volume)]),
            ],
        ));
        state.touch(&vm);
        drop(state);
        self.changed.notify_waiters();
        true
    }

    /// The volumes that a machine has.
    pub fn volumes(&self, name: &str) -> Vec<String> {
        let mut state = self.state.lock();
        let Some(vm) = state.named("VirtualMachine", name) else {
            return Vec::new();
        };
        let Ok(hardware) = state.value(&vm, "config.hardware") else {
            return Vec::new();
        };
        hardware
            .all("device")
            .filter_map(|device| device.string_at("vDiskId.id"))
            .collect()
    }

    pub fn is_on(&self, name: &str) -> bool {
        let state = self.state.lock();
        state
            .named("VirtualMachine", name)
            .is_some_and(|vm| state.power(&vm) == ON)
    }
}
