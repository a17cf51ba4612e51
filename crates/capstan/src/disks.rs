//! `capstan disks`: user data that partitions, formats and mounts the data disks of a machine.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use capstan_api::{azure, openshift, vsphere};
use capstan_core::disks::azure::is_nvme_only_by_name;
use capstan_core::disks::init::{self, KnownDisk, Mount, MountRequest};
use capstan_core::disks::vsphere as units;
use clap::{Args, Subcommand};
use serde_json::Value;

use crate::manifest::{self, Object};

/// The keys of a user-data Secret, in the order in which they are tried.
const USER_DATA_KEYS: [&str; 2] = ["userData", "value"];

#[derive(Subcommand)]
pub enum Disks {
    /// Print an Ignition config (Red Hat CoreOS, Fedora CoreOS, Flatcar)
    ///
    /// Adds a partition, a file system and a systemd mount unit for each --mount, and leaves the rest of the config as
    /// it is. A second run changes nothing. A disk that has a file system keeps it.
    #[command(after_help = IGNITION_EXAMPLES)]
    Ignition(Render),
    /// Print a cloud-init config (a #cloud-config document)
    ///
    /// Adds disk_setup, fs_setup and mounts entries for each --mount, and leaves the rest of the document as it is.
    CloudInit(Render),
}

const IGNITION_EXAMPLES: &str = "\
Examples:
  # a config of its own, for the data disk at LUN 0 of a MachineSet's machines
  capstan disks ignition -f machineset.yaml --mount lun0:/var/lib/etcd:xfs
  # merged into the user-data secret that the MachineSet names; apply the result under a new name
  kubectl -n openshift-machine-api get secret worker-user-data -o yaml |
    capstan disks ignition -f machineset.yaml --mount lun0:/var/lib/etcd:xfs --secret - --name worker-user-data-etcd
  # vSphere disks go by their names
  capstan disks ignition -f template.yaml --mount images:/var/lib/containers:xfs --mount swap:swap

On a Machine or MachineSet the annotation capstan.dev/disk-mounts with the same values does it without any of this.";

#[derive(Args)]
pub struct Render {
    /// Read the machines from this manifest: Machine, MachineSet, AzureMachinePool, VSphereMachine, VSphereMachineTemplate or VSphereVM
    #[arg(short = 'f', long, value_name = "FILE")]
    filename: PathBuf,
    /// Mount a disk: DISK:PATH:FORMAT[:OPTIONS] or DISK:swap; DISK is lunN, a name suffix or a vSphere disk's name [repeatable]
    #[arg(long, required = true, value_name = "MOUNT")]
    mount: Vec<MountRequest>,
    /// Merge into this config instead of an empty one
    #[arg(long, value_name = "FILE", conflicts_with = "secret")]
    into: Option<PathBuf>,
    /// Merge into the user data of this Secret manifest, and print the Secret
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// Give the printed Secret this name
    #[arg(long, requires = "secret")]
    name: Option<String>,
    #[command(flatten)]
    hardware: Hardware,
}

/// The hardware of the machines, which the manifest does not show.
#[derive(Args, Clone, Copy)]
struct Hardware {
    /// Azure: the size attaches disks by NVMe and not by SCSI [default: by its name, from v6 on]
    #[arg(long)]
    nvme: bool,
    /// vSphere: the template has this many disks [default: 1, and one for each of additionalDisksGiB]
    #[arg(long = "template-disks", value_name = "N")]
    disks: Option<i32>,
    /// vSphere: the disks of the template are on a controller of this type
    #[arg(long = "template-controller", value_name = "TYPE", default_value = "PVSCSI", value_parser = controller)]
    controller: units::ControllerKind,
}

fn controller(text: &str) -> Result<units::ControllerKind, String> {
    // As `dataDisks[].controller.type` has them: "LSI Logic SCSI" is LSILogic there.
    let name = |kind: &units::ControllerKind| kind.to_string().replace(" SCSI", "").replace(' ', "");
    let all = units::ControllerKind::ALL;
    let found = all.into_iter().find(|kind| name(kind).eq_ignore_ascii_case(text));
    let names: Vec<String> = all.iter().map(name).collect();
    found.ok_or_else(|| format!("{text:?} is none of {}", names.join(", ")))
}

/// Adds mounts to user data.
type Merge = fn(&str, &[Mount]) -> Result<String, init::InitError>;

pub fn run(command: &Disks) -> anyhow::Result<()> {
    let (render, merge): (_, Merge) = match command {
        Disks::Ignition(render) => (render, init::merge_ignition),
        Disks::CloudInit(render) => (render, init::merge_cloud_init),
    };
    let disks = known_disks(&render.filename, render.hardware)?;
    let mounts = init::resolve(&render.mount, &disks)?;
    let out = match &render.secret {
        Some(path) => into_secret(path, render.name.as_deref(), |data| merge(data, &mounts))?,
        None => {
            let existing = match &render.into {
                Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
                None => String::new(),
            };
            merge(&existing, &mounts)?
        }
    };
    writeln!(std::io::stdout(), "{}", out.trim_end())?;
    Ok(())
}

/// Returns the data disks of the first object in the file that has some.
fn known_disks(path: &Path, hardware: Hardware) -> anyhow::Result<Vec<KnownDisk>> {
    for object in manifest::read(path)? {
        if let Some(disks) = disks_of(&object, hardware)? {
            return Ok(disks);
        }
    }
    bail!(
        "{}: no Machine, MachineSet, AzureMachinePool, VSphereMachine, VSphereMachineTemplate or VSphereVM in it",
        path.display()
    )
}

fn disks_of(object: &Object, hardware: Hardware) -> anyhow::Result<Option<Vec<KnownDisk>>> {
    let vsphere = |spec: &vsphere::VirtualMachineCloneSpec| vsphere_disks(spec, hardware);
    Ok(Some(match object.kind() {
        "Machine" if object.group() == openshift::Machine::GROUP => {
            let value = object.typed::<openshift::Machine>()?.spec.provider_spec.value;
            openshift_disks(object, value, hardware)?
        }
        "MachineSet" if object.group() == openshift::MachineSet::GROUP => openshift_disks(
            object,
            object
                .typed::<openshift::MachineSet>()?
                .spec
                .template
                .spec
                .provider_spec
                .value,
            hardware,
        )?,
        azure::AzureMachinePool::KIND => {
            let template = object.typed::<azure::AzureMachinePool>()?.spec.template;
            let lun =
                |index: usize, disk: &azure::DataDisk| disk.lun.unwrap_or(i32::try_from(index).unwrap_or(i32::MAX));
            template
                .data_disks
                .iter()
                .enumerate()
                .map(|(i, d)| azure_disk(hardware, &template.vm_size, lun(i, d), &d.name_suffix))
                .collect()
        }
        vsphere::VSphereMachine::KIND => vsphere(&object.typed::<vsphere::VSphereMachine>()?.spec.clone_spec)?,
        vsphere::VSphereVM::KIND => vsphere(&object.typed::<vsphere::VSphereVM>()?.spec.clone_spec)?,
        vsphere::VSphereMachineTemplate::KIND => vsphere(
            &object
                .typed::<vsphere::VSphereMachineTemplate>()?
                .spec
                .template
                .spec
                .clone_spec,
        )?,
        _ => return Ok(None),
    }))
}

/// An Azure data disk as a machine of this size shows it.
fn azure_disk(hardware: Hardware, size: &str, lun: i32, name_suffix: &str) -> KnownDisk {
    if hardware.nvme || is_nvme_only_by_name(size) {
        KnownDisk::azure_nvme(lun, name_suffix)
    } else {
        KnownDisk::azure(lun, name_suffix)
    }
}

fn openshift_disks(object: &Object, value: Option<Value>, hardware: Hardware) -> anyhow::Result<Vec<KnownDisk>> {
    let value = value.with_context(|| format!("{}: providerSpec.value is missing", object.describe()))?;
    let spec = openshift::AzureMachineProviderSpec::from_raw(&value).with_context(|| object.describe())?;
    let size = spec.vm_size.as_deref().unwrap_or_default();
    let disks = spec.data_disks.iter();
    Ok(disks
        .map(|disk| azure_disk(hardware, size, disk.lun, &disk.name_suffix))
        .collect())
}

/// Returns the places of the disks on a clone of such a template.
fn vsphere_disks(spec: &vsphere::VirtualMachineCloneSpec, template: Hardware) -> anyhow::Result<Vec<KnownDisk>> {
    const CONTROLLER: i32 = 1000;
    /// Limits are those of the newest hardware; the controller knows the template and refuses what it cannot have.
    const NEWEST_HARDWARE: u32 = 21;
    let controller = units::Controller {
        key: CONTROLLER,
        kind: template.controller,
        bus: 0,
        own_unit: None,
        pci_slot: None,
    };
    let sized = i32::try_from(spec.additional_disks_gib.len())?;
    let template_disks = template.disks.unwrap_or(1 + sized);
    if template.disks.is_none() && !spec.data_disks.is_empty() {
        writeln!(
            std::io::stderr(),
            "warning: the manifest does not show how many disks the template has, so the units are those after {template_disks}: \
             give the number with --template-disks"
        )?;
    }
    let own = (0..template_disks).map(|unit| units::Device {
        key: 2000 + unit,
        controller_key: CONTROLLER,
        unit: Some(unit),
        disk: Some(units::Disk::default()),
    });
    let hardware = units::Hardware {
        version: NEWEST_HARDWARE,
        controllers: vec![controller],
        devices: own.collect(),
    };
    let wanted: Vec<units::DataDisk> = spec.data_disks.iter().map(units::DataDisk::from).collect();
    let placed = units::allocate(&hardware, &wanted)?;
    placed
        .placements
        .iter()
        .map(|placement| {
            let name = &wanted[placement.index].name;
            let device = units::predicted_by_path(placement.kind, placement.bus, placement.unit).with_context(|| {
                format!(
                    "dataDisks[{}] {name:?}: where the guest sees a disk on {} controller {} is known only once it runs; \
                     read it from the VSphereVM's status",
                    placement.index, placement.kind, placement.bus
                )
            })?;
            let numbered = format!("disk{}", placement.index);
            let label = if name.is_empty() { numbered.clone() } else { name.clone() };
            Ok(KnownDisk { names: vec![label.clone(), numbered], device, label })
        })
        .collect()
}

/// Merges into the user data of a Secret. Returns the Secret, ready to apply.
fn into_secret(
    path: &Path,
    name: Option<&str>,
    merge: impl Fn(&str) -> Result<String, init::InitError>,
) -> anyhow::Result<String> {
    let mut secret = manifest::read(path)?
        .into_iter()
        .find(|object| object.kind() == "Secret")
        .with_context(|| format!("{}: no Secret in it", path.display()))?;
    let describe = secret.describe();
    let (pointer, encoded) = user_data(&secret.value)
        .with_context(|| format!("{describe}: neither data nor stringData has a key userData or value"))?;
    let text = if encoded.starts_with("/data/") {
        let bytes = STANDARD
            .decode(pointer_text(&secret.value, &encoded))
            .with_context(|| describe.clone())?;
        String::from_utf8(bytes).with_context(|| describe.clone())?
    } else {
        pointer_text(&secret.value, &encoded).to_owned()
    };
    let merged = merge(&text).with_context(|| describe)?;
    let new = if pointer == "data" {
        STANDARD.encode(merged)
    } else {
        merged
    };
    if let Some(slot) = secret.value.pointer_mut(&encoded) {
        *slot = Value::from(new);
    }
    forget_server_fields(&mut secret.value, name);
    Ok(serde_saphyr::to_string(&secret.value)?)
}

/// Returns the section and the JSON pointer of the user data.
fn user_data(secret: &Value) -> Option<(&'static str, String)> {
    ["stringData", "data"].into_iter().find_map(|section| {
        let key = USER_DATA_KEYS
            .into_iter()
            .find(|key| secret[section][key].is_string())?;
        Some((section, format!("/{section}/{key}")))
    })
}

fn pointer_text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Removes the fields that the API server sets, which must not be applied under another name.
fn forget_server_fields(secret: &mut Value, name: Option<&str>) {
    let Some(metadata) = secret.get_mut("metadata").and_then(Value::as_object_mut) else {
        return;
    };
    for field in [
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "managedFields",
        "ownerReferences",
    ] {
        metadata.remove(field);
    }
    if let Some(name) = name {
        metadata.insert("name".into(), name.into());
    }
}
