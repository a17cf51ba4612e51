//! Disk initialisation: partition, format and mount data disks at first boot, so that users need not edit user data by hand.
//!
//! Invariants: nothing that is already in the user data is lost; doing it twice is doing it once; a disk that already
//! carries a file system keeps it (a retained disk that comes back is mounted, never formatted again).

mod cloud_init;
mod ignition;
mod mount;
mod systemd;

pub use cloud_init::merge as merge_cloud_init;
pub use ignition::{DEFAULT_VERSION, merge as merge_ignition};
pub use mount::{Format, Mount, MountRequest};
pub use systemd::escape_path;

/// On a Machine or MachineSet: the mounts of its data disks, in the syntax of [`MountRequest`], separated by commas or white space. The
/// controller then merges them into the user data when it creates the machine.
pub const MOUNTS_ANNOTATION: &str = "capstan.dev/disk-mounts";

/// Why mounts could not be rendered.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InitError {
    #[error("mount {text:?}: {reason}")]
    Syntax { text: String, reason: String },
    #[error("mount {text:?}: no data disk {disk:?}; the machine has {known}")]
    UnknownDisk { text: String, disk: String, known: String },
    #[error("mounts {first:?} and {second:?} both use {what}")]
    Clash {
        first: String,
        second: String,
        what: String,
    },
    #[error("user data: {0}")]
    UserData(String),
}

/// Reads a whole annotation or several command-line values. Options may hold commas of their own: a part without a colon
/// belongs to the mount before it.
pub fn parse_requests(text: &str) -> Result<Vec<MountRequest>, InitError> {
    let mut parts: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let mut continues = false;
        for part in word.split(',').filter(|part| !part.is_empty()) {
            match parts.last_mut() {
                Some(last) if continues && !part.contains(':') => {
                    last.push(',');
                    last.push_str(part);
                }
                _ => parts.push(part.to_owned()),
            }
            continues = true;
        }
    }
    parts.iter().map(|part| part.parse()).collect()
}

/// A disk that a machine has, as mounts may refer to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownDisk {
    /// Any of these names it: `lun0`, a name suffix, a vSphere disk's name.
    pub names: Vec<String>,
    /// Where the guest finds it.
    pub device: String,
    /// Stem of the partition label.
    pub label: String,
}

impl KnownDisk {
    /// An Azure data disk: by LUN, as the guest agent's udev rules show it.
    pub fn azure(lun: i32, name_suffix: &str) -> Self {
        let by_lun = format!("lun{lun}");
        let mut names = vec![by_lun.clone()];
        if !name_suffix.is_empty() && name_suffix != by_lun {
            names.push(name_suffix.to_owned());
        }
        Self {
            names,
            device: format!("/dev/disk/azure/scsi1/{by_lun}"),
            label: by_lun,
        }
    }

    /// An Azure data disk of a size without SCSI: by LUN, as the udev rules of azure-vm-utils show it.
    pub fn azure_nvme(lun: i32, name_suffix: &str) -> Self {
        Self {
            device: format!("/dev/disk/azure/data/by-lun/{lun}"),
            ..Self::azure(lun, name_suffix)
        }
    }
}

/// Binds each request to a disk of the machine. A disk and a mount point are used once at most.
pub fn resolve(requests: &[MountRequest], disks: &[KnownDisk]) -> Result<Vec<Mount>, InitError> {
    let mut mounts: Vec<(&MountRequest, Mount)> = Vec::with_capacity(requests.len());
    for request in requests {
        let disk = disks
            .iter()
            .find(|disk| disk.names.contains(&request.disk))
            .ok_or_else(|| unknown(request, disks))?;
        let mount = request.on(disk);
        for (other, earlier) in &mounts {
            let what = if earlier.device == mount.device {
                format!("disk {}", request.disk)
            } else if mount.path.is_some() && earlier.path == mount.path {
                format!("path {}", mount.path.as_deref().unwrap_or_default())
            } else {
                continue;
            };
            return Err(InitError::Clash {
                first: other.to_string(),
                second: request.to_string(),
                what,
            });
        }
        mounts.push((request, mount));
    }
    Ok(mounts.into_iter().map(|(_, mount)| mount).collect())
}

fn unknown(request: &MountRequest, disks: &[KnownDisk]) -> InitError {
    let known = disks
        .iter()
        .map(|disk| disk.names.join("/"))
        .collect::<Vec<_>>()
        .join(", ");
    InitError::UnknownDisk {
        text: request.to_string(),
        disk: request.disk.clone(),
        known: if known.is_empty() {
            "no data disks".to_owned()
        } else {
            known
        },
    }
}

/// Merges mounts into user data of either kind; the data shows which one it is.
pub fn merge(user_data: &str, mounts: &[Mount]) -> Result<String, InitError> {
    let start = user_data.trim_start();
    if start.starts_with('{') || start.is_empty() {
        merge_ignition(user_data, mounts)
    } else if start.starts_with('#') {
        merge_cloud_init(user_data, mounts)
    } else {
        Err(InitError::UserData(
            "neither an Ignition config (a JSON object) nor a cloud-config (first line \"#cloud-config\"): mounts cannot be added"
                .to_owned(),
        ))
    }
}

#[cfg(test)]
mod tests;
