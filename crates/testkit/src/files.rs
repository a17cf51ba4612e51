//! Paths and files: a per-user cache outside any clone, so that a second clone starts at once.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// `$CAPSTAN_CACHE`, or `capstan` in the user's cache directory.
pub fn cache_dir() -> PathBuf {
    let from = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    from("CAPSTAN_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|dir| dir.join("capstan")))
        .or_else(|| from("HOME").map(|dir| dir.join(".cache/capstan")))
        .unwrap_or_else(|| std::env::temp_dir().join("capstan-cache"))
}

/// Holds an exclusive lock on a file until it is dropped, or until the process that holds it ends.
pub struct Lock(#[expect(dead_code, reason = "held for its lock alone")] File);

impl Lock {
    /// Takes the lock. Calls `on_wait` once when another process has it.
    pub fn take(path: &Path, on_wait: impl FnOnce()) -> Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let file = File::create(path).with_context(|| format!("cannot open the lock {}", path.display()))?;
        if file.try_lock().is_err() {
            on_wait();
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Self(file))
    }

    /// Takes the lock unless another process has it.
    pub fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = File::create(path).with_context(|| format!("cannot open the lock {}", path.display()))?;
        Ok(file.try_lock().is_ok().then_some(Self(file)))
    }
}

pub fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a secret file: only its owner can read it, and it appears complete, since other processes wait for it.
pub fn write_private(path: &Path, text: impl AsRef<[u8]>) -> Result<()> {
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let file = File::options().write(true).create_new(true).mode(0o600).open(&fresh);
    file.and_then(|mut file| file.write_all(text.as_ref()))
        .and_then(|()| fs::rename(&fresh, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The last lines of a log, for an error message.
pub fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
