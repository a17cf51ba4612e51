//! Merges mounts into an Ignition config of specification 3.x, leaving everything else in it as it was.

use serde_json::{Map, Value, json};

use super::InitError;
use super::mount::Mount;
use super::systemd::unit;

/// The specification that a config made from nothing gets: every OpenShift since 4.7 reads it.
pub const DEFAULT_VERSION: &str = "3.2.0";

/// Adds one partition, one file system and one unit per mount. Entries of the same device or name are replaced, so that
/// a second merge changes nothing. The result is checked by CoreOS's own types.
pub fn merge(existing: &str, mounts: &[Mount]) -> Result<String, InitError> {
    let mut config = parse(existing)?;
    check(&config)?;
    for mount in mounts {
        put_partition(list(&mut config, "storage", "disks")?, mount)?;
        put(
            list(&mut config, "storage", "filesystems")?,
            "device",
            filesystem(mount),
        );
        let (name, contents) = unit(mount);
        put(
            list(&mut config, "systemd", "units")?,
            "name",
            json!({ "name": name, "enabled": true, "contents": contents }),
        );
    }
    check(&config)?;
    serde_json::to_string_pretty(&config).map_err(|error| InitError::UserData(error.to_string()))
}

fn parse(existing: &str) -> Result<Map<String, Value>, InitError> {
    if existing.trim().is_empty() {
        let mut config = Map::new();
        config.insert("ignition".into(), json!({ "version": DEFAULT_VERSION }));
        return Ok(config);
    }
    match serde_json::from_str(existing) {
        Ok(Value::Object(config)) => Ok(config),
        Ok(_) => Err(InitError::UserData("the Ignition config is not a JSON object".into())),
        Err(error) => Err(InitError::UserData(format!("the Ignition config is not JSON: {error}"))),
    }
}

/// Refuses what CoreOS's own types refuse: other specifications, fields of the wrong type.
fn check(config: &Map<String, Value>) -> Result<(), InitError> {
    let bytes = serde_json::to_vec(config).map_err(|error| InitError::UserData(error.to_string()))?;
    match ignition_config::Config::parse_slice(&bytes) {
        Ok(_) => Ok(()),
        Err(error) => Err(InitError::UserData(format!(
            "not an Ignition config of specification 3.x: {error}"
        ))),
    }
}

/// Size 0 fills the disk. The table is kept if there is one: a disk that was retained keeps its data.
fn partition(mount: &Mount, number: u64) -> Value {
    json!({ "label": mount.label, "number": number, "startMiB": 0, "sizeMiB": 0 })
}

fn filesystem(mount: &Mount) -> Value {
    let mut filesystem = Map::new();
    filesystem.insert("device".into(), mount.partition().into());
    filesystem.insert("format".into(), mount.format.as_str().into());
    if let Some(path) = &mount.path {
        filesystem.insert("path".into(), path.as_str().into());
    }
    filesystem.insert("wipeFilesystem".into(), false.into());
    Value::Object(filesystem)
}

/// The list at `config.section.key`, made if it is not there.
fn list<'a>(config: &'a mut Map<String, Value>, section: &str, key: &str) -> Result<&'a mut Vec<Value>, InitError> {
    let section_value = config.entry(section).or_insert_with(|| json!({}));
    if section_value.is_null() {
        *section_value = json!({});
    }
    match section_value {
        Value::Object(map) => array(map, key),
        _ => Err(InitError::UserData(format!("{section} is not an object"))),
    }
}

fn array<'a>(map: &'a mut Map<String, Value>, key: &str) -> Result<&'a mut Vec<Value>, InitError> {
    let value = map.entry(key).or_insert_with(|| json!([]));
    if value.is_null() {
        *value = json!([]);
    }
    value
        .as_array_mut()
        .ok_or_else(|| InitError::UserData(format!("{key} is not a list")))
}

/// A disk that is described already keeps its partitions: ours comes beside them, or is the one that has its label.
fn put_partition(disks: &mut Vec<Value>, mount: &Mount) -> Result<(), InitError> {
    let device = Value::from(mount.device.as_str());
    let Some(disk) = position(disks, "device", &device).and_then(|index| disks[index].as_object_mut()) else {
        disks.push(json!({ "device": device, "partitions": [partition(mount, 1)] }));
        return Ok(());
    };
    let partitions = array(disk, "partitions")?;
    if position(partitions, "label", &Value::from(mount.label.as_str())).is_none() {
        let is_taken = |number: &u64| partitions.iter().any(|other| other["number"].as_u64() == Some(*number));
        let free = (1..).find(|number| !is_taken(number)).unwrap_or_default();
        partitions.push(partition(mount, free));
    }
    Ok(())
}

fn position(list: &[Value], key: &str, wanted: &Value) -> Option<usize> {
    list.iter().position(|item| item.get(key) == Some(wanted))
}

fn put(list: &mut Vec<Value>, key: &str, item: Value) {
    match position(list, key, &item[key]) {
        Some(index) => list[index] = item,
        None => list.push(item),
    }
}
