//! Merges mounts into a cloud-config: `disk_setup`, `fs_setup` and `mounts`.

use serde_json::{Map, Value, json};

use super::InitError;
use super::mount::{Format, Mount};

const HEADER: &str = "#cloud-config";

/// Adds the mounts. Nothing is overwritten on a disk that has a partition table or a file system already.
pub fn merge(existing: &str, mounts: &[Mount]) -> Result<String, InitError> {
    let (header, body) = split_header(existing)?;
    let mut config = parse(body)?;
    for mount in mounts {
        let setup = section(&mut config, "disk_setup", json!({}))?;
        if let Value::Object(disks) = setup {
            disks.insert(
                mount.device.clone(),
                json!({ "table_type": "gpt", "layout": [[100, partition_type(mount.format)]], "overwrite": false }),
            );
        }
        put_fs(section(&mut config, "fs_setup", json!([]))?, mount);
        put_mount(section(&mut config, "mounts", json!([]))?, mount);
    }
    let yaml = serde_saphyr::to_string(&config).map_err(|error| InitError::UserData(error.to_string()))?;
    Ok(format!("{header}{yaml}"))
}

/// Comment lines at the top (`#cloud-config`, `## template: jinja`) are instructions to cloud-init: kept as they are.
fn split_header(existing: &str) -> Result<(String, &str), InitError> {
    if existing.trim().is_empty() {
        return Ok((format!("{HEADER}\n"), ""));
    }
    let comment = |line: &&str| line.starts_with('#') || line.trim().is_empty();
    let body = existing.split_inclusive('\n').take_while(comment).map(str::len).sum();
    let header = &existing[..body];
    if !header.lines().any(|line| line.trim_end() == HEADER) {
        return Err(InitError::UserData(format!(
            "the first lines do not contain {HEADER}: mounts cannot be added"
        )));
    }
    let newline = if header.ends_with('\n') { "" } else { "\n" };
    Ok((format!("{header}{newline}"), &existing[body..]))
}

fn parse(body: &str) -> Result<Map<String, Value>, InitError> {
    if body.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_saphyr::from_str::<Value>(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(Value::Null) => Ok(Map::new()),
        Ok(_) => Err(InitError::UserData("the cloud-config is not a mapping".into())),
        Err(error) => Err(InitError::UserData(format!("the cloud-config is not YAML: {error}"))),
    }
}

/// The section, made with `empty` if it is absent; an error if it is something else.
fn section<'a>(config: &'a mut Map<String, Value>, key: &str, empty: Value) -> Result<&'a mut Value, InitError> {
    let kind = std::mem::discriminant(&empty);
    let value = config.entry(key).or_insert(Value::Null);
    if value.is_null() {
        *value = empty;
    }
    if std::mem::discriminant(value) == kind {
        Ok(value)
    } else {
        Err(InitError::UserData(format!(
            "{key} of the cloud-config has another type than cloud-init expects"
        )))
    }
}

fn partition_type(format: Format) -> u8 {
    match format {
        Format::Swap => 82,
        _ => 83,
    }
}

/// cloud-init makes no GPT labels, so the partition is found by its number on the device.
fn partition(mount: &Mount) -> String {
    format!("{}-part1", mount.device)
}

fn put_fs(list: &mut Value, mount: &Mount) {
    let item = json!({
        "label": null, "filesystem": mount.format.as_str(), "device": partition(mount), "partition": "none", "overwrite": false,
    });
    put(list, |other| other.get("device") == item.get("device"), item.clone());
}

fn put_mount(list: &mut Value, mount: &Mount) {
    let device = partition(mount);
    let (path, options) = match &mount.path {
        Some(path) => (
            path.as_str(),
            format!("{},nofail,x-systemd.requires=cloud-init.service", mount.options),
        ),
        None => ("none", "sw".to_owned()),
    };
    let item = json!([
        device,
        path,
        mount.format.as_str(),
        options,
        "0",
        if mount.path.is_some() { "2" } else { "0" }
    ]);
    put(
        list,
        |other| other.get(0).and_then(Value::as_str) == Some(device.as_str()),
        item.clone(),
    );
}

fn put(list: &mut Value, same: impl Fn(&Value) -> bool, item: Value) {
    if let Value::Array(list) = list {
        match list.iter().position(same) {
            Some(index) => list[index] = item,
            None => list.push(item),
        }
    }
}
