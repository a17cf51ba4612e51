//! What a machine's status and its virtual machine say. Pure.

use super::{CONDITIONS_BY, DATA_DISKS, OPERATION};
use capstan_api::openshift::{AzureMachineProviderStatus, Machine, MachineStatus};
use capstan_azure::model::{NetworkInterface, PublicIpAddress, VirtualMachine};
use capstan_azure::{Operation, ResourceId};
use capstan_core::machine::disks::Attached;
use k8s_openapi::api::core::v1::NodeAddress;

pub fn of(machine: &Machine) -> MachineStatus {
    machine.status.clone().unwrap_or_default()
}

pub fn provider(machine: &Machine) -> AzureMachineProviderStatus {
    let raw = machine
        .status
        .as_ref()
        .and_then(|status| status.provider_status.as_ref());
    raw.and_then(|raw| AzureMachineProviderStatus::from_raw(raw).ok())
        .unwrap_or_default()
}

pub fn vm_id(machine: &Machine) -> Option<String> {
    provider(machine).vm_id.filter(|id| !id.is_empty())
}

/// Whether something may be in Azure for this machine: it names a virtual machine, or one was recorded for it.
pub fn may_have_vm(machine: &Machine) -> bool {
    let identified = machine.spec.provider_id.as_deref().is_some_and(|id| !id.is_empty());
    identified || vm_id(machine).is_some()
}

/// Returns the virtual machine that this controller, or the one before it, recorded as this machine's. Users write
/// `spec.providerID`; only controllers write the status.
pub fn recorded_vm(machine: &Machine) -> Option<ResourceId> {
    let id: ResourceId = vm_id(machine)?.parse().ok()?;
    id.kind().eq_ignore_ascii_case("virtualMachines").then_some(id)
}

/// Whether the controller before this one worked on the machine: it set a condition in the provider's status, and it
/// drops our mark there.
pub fn is_inherited(machine: &Machine) -> bool {
    let provider = provider(machine);
    !provider.conditions.is_empty() && !provider.extra.contains_key(CONDITIONS_BY)
}

/// Returns what `vmId` holds for a virtual machine: its resource id, as upstream has it.
pub fn id_of(vm: &VirtualMachine) -> Option<String> {
    vm.id.clone()
}

/// Whether the machine may have a public address although its spec asks for none: it shows one, no virtual machine was
/// ever recorded for it, or somebody changed its spec. The API server counts changes of the spec: the creation is the
/// first, then the controller sets the provider id, then the deletion counts.
pub fn may_have_public_ip(machine: &Machine) -> bool {
    let shown = machine.status.iter().flat_map(|status| &status.addresses);
    let shown = shown.into_iter().any(|address| address.type_ == "ExternalIP");
    let own =
        1 + i64::from(machine.spec.provider_id.is_some()) + i64::from(machine.metadata.deletion_timestamp.is_some());
    shown || recorded_vm(machine).is_none() || machine.metadata.generation.unwrap_or_default() > own
}

/// Returns the operation that an earlier process was polling.
pub fn operation(machine: &Machine) -> Option<Operation> {
    serde_json::from_value(provider(machine).extra.get(OPERATION)?.clone()).ok()
}

/// Returns the disks that the virtual machine is known to have had.
pub fn attached(machine: &Machine) -> Vec<Attached> {
    let kept = provider(machine).extra.get(DATA_DISKS).cloned();
    kept.and_then(|kept| serde_json::from_value(kept).ok())
        .unwrap_or_default()
}

/// Returns the virtual machine's state in the words of `vmState`: its provisioning state, else its power state. `None`
/// where Azure shows neither.
pub fn state_of(vm: &VirtualMachine) -> Option<String> {
    let provisioning = vm.provisioning_state();
    if !matches!(provisioning.as_str(), "Succeeded" | "") {
        return Some(provisioning.to_string());
    }
    let state = match vm.power_state()?.as_str() {
        "starting" => "Starting",
        "running" => "Running",
        "stopping" => "Stopping",
        "stopped" => "Stopped",
        "deallocating" => "Deallocating",
        "deallocated" => "Deallocated",
        _ => "Unknown",
    };
    Some(state.to_owned())
}

/// Returns a machine's addresses: its name, and those of its interface and its public address.
pub fn addresses(machine: &str, nic: &NetworkInterface, public: Option<&PublicIpAddress>) -> Vec<NodeAddress> {
    let address = |kind: &str, value: &str| NodeAddress {
        type_: kind.to_owned(),
        address: value.to_owned(),
    };
    let mut list = vec![address("Hostname", machine), address("InternalDNS", machine)];
    let dns = nic
        .properties
        .as_ref()
        .and_then(|properties| properties.dns_settings.as_ref());
    if let Some(suffix) = dns.and_then(|dns| dns.internal_domain_name_suffix.as_deref()) {
        list.push(address("InternalDNS", &format!("{machine}.{suffix}")));
    }
    list.extend(nic.private_addresses().iter().map(|ip| address("InternalIP", ip)));
    let public = public.and_then(|public| public.properties.as_ref());
    let ip = public.and_then(|public| public.ip_address.as_deref());
    list.extend(ip.map(|ip| address("ExternalIP", ip)));
    let name = public.and_then(|public| public.dns_settings.as_ref()?.fqdn.as_deref());
    list.extend(name.map(|name| address("ExternalDNS", name)));
    list
}
