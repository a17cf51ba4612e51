//! systemd units for mounts and swap, with names escaped as `systemd-escape --path` does it.

use super::mount::{Format, Mount};

/// The unit name (without its ending) that systemd expects for a path.
pub fn escape_path(path: &str) -> String {
    let trimmed = path
        .split('/')
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("/");
    if trimmed.is_empty() {
        return "-".to_owned();
    }
    let mut out = String::with_capacity(trimmed.len());
    for (index, byte) in trimmed.bytes().enumerate() {
        match byte {
            b'/' => out.push('-'),
            b'.' if index == 0 => out.push_str("\\x2e"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => out.push(byte as char),
            other => out.push_str(&format!("\\x{other:02x}")),
        }
    }
    out
}

/// Name and contents of the unit that brings a mount up at boot.
pub fn unit(mount: &Mount) -> (String, String) {
    let what = mount.partition();
    let device = escape_path(&what);
    match (&mount.path, mount.format) {
        (Some(path), format) => {
            let fsck = format!("systemd-fsck@{device}.service");
            let contents = format!(
                "[Unit]\nDescription=Data disk {label}\nRequires={fsck}\nAfter={fsck}\nBefore=local-fs.target\n\n\
                 [Mount]\nWhat={what}\nWhere={path}\nType={format}\nOptions={options}\n\n\
                 [Install]\nRequiredBy=local-fs.target\n",
                label = mount.label,
                path = specifiers(path),
                format = format.as_str(),
                options = specifiers(&mount.options),
            );
            (format!("{}.mount", escape_path(path)), contents)
        }
        (None, _) => {
            let contents = format!(
                "[Unit]\nDescription=Data disk {label} as swap\nBefore=swap.target\n\n[Swap]\nWhat={what}\n\n\
                 [Install]\nRequiredBy=swap.target\n",
                label = mount.label
            );
            (format!("{device}.{}", Format::Swap.as_str()), contents)
        }
    }
}

/// A percent sign starts a specifier in unit files.
fn specifiers(value: &str) -> String {
    value.replace('%', "%%")
}
