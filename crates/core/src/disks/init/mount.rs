//! What a user writes to have a disk mounted: `DISK:PATH:FORMAT[:OPTIONS]`, or `DISK:swap`.

use std::fmt;
use std::str::FromStr;

use super::{InitError, KnownDisk};

/// File systems that both Ignition and cloud-init make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Xfs,
    Ext4,
    Btrfs,
    Vfat,
    Swap,
}

impl Format {
    pub const ALL: [Format; 5] = [Format::Xfs, Format::Ext4, Format::Btrfs, Format::Vfat, Format::Swap];

    pub fn as_str(self) -> &'static str {
        match self {
            Format::Xfs => "xfs",
            Format::Ext4 => "ext4",
            Format::Btrfs => "btrfs",
            Format::Vfat => "vfat",
            Format::Swap => "swap",
        }
    }

    /// Project quota on xfs lets the kubelet and the container runtime limit what a pod writes there.
    fn default_options(self) -> &'static str {
        match self {
            Format::Xfs => "defaults,prjquota",
            _ => "defaults",
        }
    }
}

/// One mount as asked for; the disk is a name that [`super::resolve`] looks up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountRequest {
    pub disk: String,
    /// None for swap.
    pub path: Option<String>,
    pub format: Format,
    pub options: Option<String>,
}

impl MountRequest {
    pub(super) fn on(&self, disk: &KnownDisk) -> Mount {
        Mount {
            device: disk.device.clone(),
            label: partition_label(&disk.label),
            path: self.path.clone(),
            format: self.format,
            options: self
                .options
                .clone()
                .unwrap_or_else(|| self.format.default_options().to_owned()),
        }
    }
}

/// One mount, bound to a device of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub device: String,
    /// GPT label of the one partition that fills the disk.
    pub label: String,
    pub path: Option<String>,
    pub format: Format,
    pub options: String,
}

impl Mount {
    /// Where the guest finds the partition.
    pub fn partition(&self) -> String {
        format!("/dev/disk/by-partlabel/{}", self.label)
    }
}

/// GPT labels hold 36 characters; colons are not allowed by Ignition, and udev escapes much else.
fn partition_label(stem: &str) -> String {
    const GPT_LABEL: usize = 36;
    let clean: String = stem
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '-' || c == '_' {
                c
            } else {
                '-'
            }
        })
        .collect();
    format!("{}p1", clean.chars().take(GPT_LABEL - 2).collect::<String>())
}

impl FromStr for MountRequest {
    type Err = InitError;

    fn from_str(text: &str) -> Result<Self, InitError> {
        let bad = |reason: String| InitError::Syntax {
            text: text.to_owned(),
            reason,
        };
        let mut parts = text.splitn(4, ':');
        let disk = parts
            .next()
            .filter(|disk| !disk.is_empty())
            .ok_or_else(|| bad("a disk is missing".into()))?;
        let path = parts
            .next()
            .ok_or_else(|| bad("write DISK:PATH:FORMAT, for example lun0:/var/lib/etcd:xfs".into()))?;
        if path == Format::Swap.as_str() {
            return Ok(Self {
                disk: disk.into(),
                path: None,
                format: Format::Swap,
                options: None,
            });
        }
        let path = mount_point(path).map_err(&bad)?;
        let format = parts
            .next()
            .ok_or_else(|| bad("a format is missing, for example :xfs".into()))?;
        let format = Format::ALL
            .into_iter()
            .find(|known| known.as_str() == format && *known != Format::Swap)
            .ok_or_else(|| {
                bad(format!(
                    "format {format:?} is not one of xfs, ext4, btrfs, vfat (swap: write DISK:swap)"
                ))
            })?;
        let options = parts.next().filter(|options| !options.is_empty()).map(str::to_owned);
        Ok(Self {
            disk: disk.into(),
            path: Some(path),
            format,
            options,
        })
    }
}

fn mount_point(path: &str) -> Result<String, String> {
    if !path.starts_with('/') {
        return Err(format!("path {path:?} must be absolute"));
    }
    if path.chars().any(char::is_control) || path.split('/').any(|part| part == "." || part == "..") {
        return Err(format!(
            "path {path:?} must not contain \".\", \"..\" or control characters"
        ));
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return Err("a data disk cannot be mounted at /".to_owned());
    }
    Ok(format!("/{}", parts.join("/")))
}

impl fmt::Display for MountRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            None => write!(f, "{}:swap", self.disk),
            Some(path) => {
                write!(f, "{}:{path}:{}", self.disk, self.format.as_str())?;
                self.options.iter().try_for_each(|options| write!(f, ":{options}"))
            }
        }
    }
}
