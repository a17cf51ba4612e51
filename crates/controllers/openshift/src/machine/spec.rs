//! A machine's provider spec. Pure.

use super::error::Error;
use capstan_api::openshift::{AzureMachineProviderSpec, CLUSTER_ID_LABEL, FieldError, Machine, MachineSet};
use capstan_core::validate::openshift::with_defaults;
use kube::ResourceExt as _;
use serde_json::{Map, Value};

/// Returns the spec with admission's defaults. Of a machine that is being deleted, whatever can be read of it.
pub fn provider_spec(machine: &Machine) -> Result<AzureMachineProviderSpec, Error> {
    let refused = |error: FieldError| Error::Invalid(error.to_string());
    let given = machine.spec.provider_spec.value.clone();
    let mut raw = given.unwrap_or_else(|| Value::Object(Map::new()));
    if machine.metadata.deletion_timestamp.is_some() {
        (raw, _) = AzureMachineProviderSpec::legible(&raw);
    }
    let spec = AzureMachineProviderSpec::from_raw(&raw).map_err(refused)?;
    let cluster = machine
        .labels()
        .get(CLUSTER_ID_LABEL)
        .map(String::as_str)
        .unwrap_or_default();
    AzureMachineProviderSpec::from_raw(&with_defaults(&raw, &spec, cluster)).map_err(refused)
}

/// Returns the spec of a set's machines with admission's defaults, if it can be read.
pub fn of_template(set: &MachineSet) -> Option<AzureMachineProviderSpec> {
    let template = &set.spec.template;
    let raw = template.spec.provider_spec.value.as_ref()?;
    let spec = AzureMachineProviderSpec::from_raw(raw).ok()?;
    let cluster = template.metadata.labels.get(CLUSTER_ID_LABEL);
    let cluster = cluster.map(String::as_str).unwrap_or_default();
    AzureMachineProviderSpec::from_raw(&with_defaults(raw, &spec, cluster)).ok()
}

/// Whether the spec cannot be read.
pub fn is_unreadable(machine: &Machine) -> bool {
    let raw = machine.spec.provider_spec.value.as_ref();
    raw.is_some_and(|raw| AzureMachineProviderSpec::from_raw(raw).is_err())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn machine(deleting: bool, value: Value) -> Machine {
        let mut machine: Machine = serde_json::from_value(json!({
            "metadata": {"name": "m"}, "spec": {"providerSpec": {"value": value}},
        }))
        .unwrap();
        if deleting {
            machine.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        }
        machine
    }

    #[test]
    fn what_can_be_read_of_a_spec_is_enough_to_take_its_machine_away() {
        let value = json!({"DataDisks": [{"lun": "one"}], "publicIP": "perhaps", "resourceGroup": "mine", "odd": 1});
        assert!(provider_spec(&machine(false, value.clone())).is_err());
        let left = provider_spec(&machine(true, value)).unwrap();
        assert_eq!(left.resource_group.as_deref(), Some("mine"));
        assert!(left.data_disks.is_empty() && !left.public_ip);
        assert!(provider_spec(&machine(true, json!(7))).is_ok());
    }
}
