//! What to do next with one virtual machine. Pure: facts in, one step out.
//!
//! Kept here: a VM that was up once is never cloned again; nothing of a VM is changed once it runs or was up: its guest
//! may have taken away what it was started with; a VM is not powered on before its devices are as asked for.

mod changes;
mod farewell;
mod guestinfo;
mod metadata;
mod report;

pub use changes::{Changes, changes, check_template, template_disks};
pub use farewell::{Farewell, farewell, foreign_disks};
pub use guestinfo::{METADATA, at_clone};
pub use metadata::render as metadata;
pub use report::{Report, report, waits_for_static_address};

use capstan_core::disks::vsphere::hardware_version;

use crate::domain::{Facts, Memory, Power, UserData, Wanted};

/// The next step towards a machine that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is not there and never was.
    Clone,
    /// It was there once and cannot be found.
    Lost,
    /// Its virtual hardware is older than asked for.
    Upgrade {
        to: String,
    },
    /// Something is not as asked for.
    Reconfigure(Box<Changes>),
    /// Something is not as asked for and cannot be put right.
    Wrong(String),
    PowerOn,
    /// It runs, but has told no address yet.
    AwaitAddresses(Report),
    Up(Report),
}

/// Decides on the next step.
pub fn plan(
    wanted: &Wanted,
    networks: &[String],
    user: Option<&UserData>,
    memory: &Memory,
    facts: Option<&Facts>,
) -> Step {
    let Some(facts) = facts else {
        return if memory.seen { Step::Lost } else { Step::Clone };
    };
    if !memory.seen && facts.power == Power::Off {
        if let Some(to) = upgrade(wanted, facts) {
            return Step::Upgrade { to };
        }
        let changes = changes(wanted, networks, user, memory, facts);
        if !changes.wrong.is_empty() {
            return Step::Wrong(changes.wrong.join("; "));
        }
        if !changes.is_empty() {
            return Step::Reconfigure(Box::new(changes));
        }
    }
    if facts.power != Power::On {
        return Step::PowerOn;
    }
    let report = report(facts);
    if report.addresses.is_empty() {
        Step::AwaitAddresses(report)
    } else {
        Step::Up(report)
    }
}

fn upgrade(wanted: &Wanted, facts: &Facts) -> Option<String> {
    let to = wanted.hardware_version.as_deref()?;
    (hardware_version(to)? > facts.hardware.version).then(|| to.to_owned())
}

#[cfg(test)]
pub(crate) mod tests;
