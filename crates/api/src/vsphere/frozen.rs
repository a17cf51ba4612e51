//! What may change on a machine that exists: little, since most of it is settled by the clone.

use crate::cel::{Rule, add, freeze, rule, same};
use serde_json::Value;

const FROZEN: &str = "cannot be modified";
/// Fields of a VSphereMachine that may change; of `network` only the devices.
const MACHINE_MUTABLE: &[&str] = &["providerID", "powerOffMode", "guestSoftPowerOffTimeout", "network"];
/// Fields of a VSphereVM that may change; `os` and `biosUUID` once, when they are first set.
const VM_MUTABLE: &[&str] = &[
    "bootstrapRef",
    "thumbprint",
    "powerOffMode",
    "guestSoftPowerOffTimeout",
    "network",
    "os",
    "biosUUID",
];

pub(crate) fn freeze_machine(spec: &mut Value) {
    freeze(spec, MACHINE_MUTABLE, FROZEN);
    add(spec, network_rules());
}

pub(crate) fn freeze_vm(spec: &mut Value) {
    freeze(spec, VM_MUTABLE, FROZEN);
    add(spec, network_rules());
    add(spec, vec![once("os"), once("biosUUID")]);
}

fn network_rules() -> Vec<Rule> {
    ["routes", "preferredAPIServerCidr"]
        .map(|name| {
            let expression = same("self.network", "oldSelf.network", name);
            rule(expression, FROZEN).at(format!(".network.{name}")).forbidden()
        })
        .into()
}

fn once(name: &str) -> Rule {
    let expression = format!(
        "!has(oldSelf.{name}) || oldSelf.{name} == '' || ({})",
        same("self", "oldSelf", name)
    );
    rule(expression, FROZEN).at(format!(".{name}")).forbidden()
}

/// NetBIOS gives a Windows guest 15 characters.
pub(crate) fn vm_name_rule() -> Rule {
    rule(
        "self.?spec.?os.orValue('') != 'Windows' || size(self.metadata.name) < 16",
        "name has to be less than 16 characters for Windows VM",
    )
}
