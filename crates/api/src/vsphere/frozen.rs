//! The fields of an existing machine that may change. They are few: the clone settles the others.

use crate::cel::{Rule, add, freeze, rule, same};
use serde_json::Value;

const FROZEN: &str = "cannot be modified";
/// Fields of a VSphereMachine that may change. Of `network`, only the devices may.
const MACHINE_MUTABLE: &[&str] = &["providerID", "powerOffMode", "guestSoftPowerOffTimeout", "network"];
/// Fields of a VSphereVM that may change. `os` and `biosUUID` may change once, when they are first set.
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

/// Returns the rule that a Windows guest's name has at most 15 characters, the limit of NetBIOS.
pub(crate) fn vm_name_rule() -> Rule {
    rule(
        "self.?spec.?os.orValue('') != 'Windows' || size(self.metadata.name) < 16",
        "name has to be less than 16 characters for Windows VM",
    )
}
