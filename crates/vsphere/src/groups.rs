//! The groups of a compute cluster: machines and hosts that DRS rules tie together.
//!
//! Kept here: vCenter takes the members of a group as a whole, so that two who read, add and write at once would lose one
//! of them. Joins of one group take turns; each reads the group again, and adds with itself whoever waits behind it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::soap::Call;
use crate::task::Task;
use crate::vcenter::Vcenter;
use crate::xml::{Element, Writer};
use capstan_core::vm::MoRef;

const VM_GROUP: &str = "ClusterVmGroup";
const HOST_GROUP: &str = "ClusterHostGroup";
const VM_HOST_RULE: &str = "ClusterVmHostRuleInfo";

/// The groups and rules of a compute cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    groups: Vec<Element>,
    rules: Vec<Element>,
}

impl Groups {
    fn read(configuration: &Element) -> Self {
        Self {
            groups: configuration.all("group").cloned().collect(),
            rules: configuration.all("rule").cloned().collect(),
        }
    }

    fn group(&self, kind: &str, name: &str) -> Option<&Element> {
        let mut found = self.groups.iter().filter(|group| group.kind.as_deref() == Some(kind));
        found.find(|group| group.text_at("name") == Some(name))
    }

    /// The machines of a VM group.
    pub fn machines(&self, group: &str) -> Option<Vec<MoRef>> {
        let group = self.group(VM_GROUP, group)?;
        Some(group.all("vm").filter_map(Element::moref).collect())
    }

    /// The hosts of a host group.
    pub fn hosts(&self, group: &str) -> Option<Vec<MoRef>> {
        let group = self.group(HOST_GROUP, group)?;
        Some(group.all("host").filter_map(Element::moref).collect())
    }

    /// Whether the rule that ties a VM group to a host group is enabled; `None` when there is no such rule.
    pub fn rule_is_enabled(&self, vm_group: &str, host_group: &str) -> Option<bool> {
        let mut rules = self.rules.iter().filter(|rule| {
            rule.kind.as_deref() == Some(VM_HOST_RULE)
                && rule.text_at("vmGroupName") == Some(vm_group)
                && rule.text_at("affineHostGroupName") == Some(host_group)
        });
        let first = rules.next()?;
        let enabled = |rule: &Element| rule.bool_at("enabled").unwrap_or(false);
        Some(enabled(first) || rules.any(enabled))
    }
}

/// Reads whatever it is given, for tests with mutated documents.
#[cfg(test)]
pub(crate) fn probe(element: &Element) -> Option<bool> {
    let groups = Groups::read(element);
    groups
        .machines("a")
        .and(groups.hosts("a"))
        .and(groups.rule_is_enabled("a", "a"))
}

/// The VMs that wait to join each group.
#[derive(Default)]
pub(crate) struct Queues(Mutex<HashMap<(MoRef, String), Arc<Queue>>>);

#[derive(Default)]
struct Queue {
    waiting: Mutex<BTreeSet<MoRef>>,
    turn: tokio::sync::Mutex<()>,
}

impl Vcenter {
    /// The groups and rules of a compute cluster.
    pub async fn groups(&self, cluster: &MoRef) -> Result<Groups> {
        let object = self.retrieve_one(cluster, &["configurationEx"]).await?;
        Ok(object.get("configurationEx").map(Groups::read).unwrap_or_default())
    }

    /// Makes a machine a member of a VM group, and waits until it is one.
    pub async fn join_vm_group(&self, cluster: &MoRef, group: &str, vm: &MoRef) -> Result<()> {
        let key = (cluster.clone(), group.to_owned());
        let queue = self.0.groups.0.lock().entry(key).or_default().clone();
        queue.waiting.lock().insert(vm.clone());
        let _turn = queue.turn.lock().await;
        let groups = self.groups(cluster).await?;
        let missing = || Error::NotFound {
            kind: "VM group",
            path: group.to_owned(),
        };
        let found = groups.group(VM_GROUP, group).ok_or_else(missing)?;
        let members = groups.machines(group).unwrap_or_default();
        if members.contains(vm) {
            queue.waiting.lock().remove(vm);
            return Ok(());
        }
        let mut joining = std::mem::take(&mut *queue.waiting.lock());
        joining.insert(vm.clone());
        joining.retain(|vm| !members.contains(vm));
        match self.extend_group(cluster, found, &joining).await {
            // Whoever waited behind may be gone by now.
            Err(_) if joining.len() > 1 => self.extend_group(cluster, found, &BTreeSet::from([vm.clone()])).await,
            result => result,
        }
    }

    async fn extend_group(&self, cluster: &MoRef, group: &Element, joining: &BTreeSet<MoRef>) -> Result<()> {
        let mut body = Writer::new();
        body.nest_as("spec", "ClusterConfigSpecEx", |w| {
            w.nest_as("groupSpec", "ClusterGroupSpec", |w| {
                w.text("operation", "edit")
                    .element_named("info", &with_machines(group, joining));
            });
        });
        body.value("modify", true);
        let call = Call::write("ReconfigureComputeResource_Task", cluster, body.finish());
        let reference = self.call_for_moref(call).await?;
        Task::new(self.clone(), reference).wait().await.map(|_| ())
    }
}

/// The group as vCenter reported it, with more machines.
fn with_machines(group: &Element, joining: &BTreeSet<MoRef>) -> Element {
    let mut group = group.clone();
    group.children.extend(joining.iter().map(|vm| Element {
        name: "vm".into(),
        reference: Some(vm.kind().to_owned()),
        text: vm.value().to_owned(),
        ..Element::default()
    }));
    group
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CONFIGURATION: &str = r#"<val xsi:type="ClusterConfigInfoEx">
        <rule xsi:type="ClusterAntiAffinityRuleSpec"><key>1</key><enabled>true</enabled><name>apart</name></rule>
        <rule xsi:type="ClusterVmHostRuleInfo"><key>2</key><enabled>false</enabled><name>tie</name>
            <vmGroupName>vms-a</vmGroupName><affineHostGroupName>hosts-a</affineHostGroupName></rule>
        <group xsi:type="ClusterVmGroup"><name>vms-a</name><userCreated>true</userCreated><uniqueID>7</uniqueID>
            <vm type="VirtualMachine">vm-1</vm></group>
        <group xsi:type="ClusterHostGroup"><name>hosts-a</name>
            <host type="HostSystem">host-1</host><host type="HostSystem">host-2</host></group>
    </val>"#;

    #[test]
    fn groups_and_rules_are_read_and_a_group_is_sent_back_whole_with_who_joins() {
        let groups = Groups::read(&Element::parse(CONFIGURATION).unwrap());
        let vm = |value: &str| MoRef::new("VirtualMachine", value);
        assert_eq!(groups.machines("vms-a"), Some(vec![vm("vm-1")]));
        assert_eq!(groups.hosts("hosts-a").map(|hosts| hosts.len()), Some(2));
        assert_eq!((groups.machines("hosts-a"), groups.hosts("none")), (None, None));
        assert_eq!(groups.rule_is_enabled("vms-a", "hosts-a"), Some(false));
        assert_eq!(groups.rule_is_enabled("vms-a", "hosts-b"), None);
        let sent = with_machines(groups.group(VM_GROUP, "vms-a").unwrap(), &BTreeSet::from([vm("vm-2")]));
        let mut w = Writer::new();
        w.element_named("info", &sent);
        let sent = Element::parse(&w.finish()).unwrap();
        let ids: Vec<_> = sent.all("vm").map(|vm| vm.text.as_str()).collect();
        assert_eq!((sent.text_at("uniqueID"), ids), (Some("7"), vec!["vm-1", "vm-2"]));
        assert_eq!(sent.kind.as_deref(), Some(VM_GROUP));
    }
}
