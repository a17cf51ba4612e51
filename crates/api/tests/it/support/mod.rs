//! The replaced controllers' modules, as pinned in `tools/crds`.

pub mod templates;

use serde_json::Value;
use std::{
    fs,
    io::{Write, stderr},
    path::{Path, PathBuf},
    process::Command,
};

/// Goes past libtest's capture: a skipped comparison must not look like a passed one.
pub fn say(line: &str) {
    let _ = writeln!(stderr(), "{line}");
}

/// The directory of a pinned module, downloaded if need be; none without Go or a network.
pub fn module(path: &str) -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/crds");
    let pins = fs::read_to_string(tools.join("go.mod")).unwrap();
    let pin = pins
        .lines()
        .find_map(|line| line.trim().strip_prefix(path))
        .expect("the module is pinned")
        .trim();
    module_at(path, pin)
}

/// The directory of a module in this version.
pub fn module_at(path: &str, version: &str) -> Option<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/crds");
    let output = Command::new("go")
        .current_dir(&tools)
        .args(["mod", "download", "-json", &format!("{path}@{version}")])
        .output();
    let answer: Value = serde_json::from_slice(&output.ok()?.stdout).ok()?;
    if let Some(error) = answer.get("Error") {
        assert!(!error.to_string().contains("checksum mismatch"), "{path}: {error}");
        return None;
    }
    Some(answer["Dir"].as_str()?.into())
}
