//! The addresses of a running machine.

use std::net::IpAddr;

use super::types::{GuestNic, NetworkDevice, ObservedVm};

/// A network card with the addresses that the guest reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub mac: String,
    pub connected: bool,
    pub network: Option<String>,
    pub addresses: Vec<String>,
}

/// The network side of a running machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub interfaces: Vec<Interface>,
    pub addresses: Vec<String>,
}

/// Returns one entry for each network card of the VM, with the addresses that others can reach. A guest may report several
/// interfaces with the MAC address of one card (VLANs, bonds, bridges); the card has the addresses of all of them.
pub fn report(observed: &ObservedVm) -> Report {
    let interfaces: Vec<Interface> = observed
        .nics
        .iter()
        .map(|nic| {
            let guests: Vec<&GuestNic> = observed
                .guest
                .iter()
                .filter(|guest| guest.mac.eq_ignore_ascii_case(&nic.mac))
                .collect();
            let mut addresses: Vec<String> = Vec::new();
            for address in guests.iter().flat_map(|guest| &guest.addresses) {
                let text = address.to_string();
                if is_reachable(address) && !addresses.contains(&text) {
                    addresses.push(text);
                }
            }
            Interface {
                mac: nic.mac.clone(),
                connected: if guests.is_empty() {
                    nic.connected
                } else {
                    guests.iter().any(|guest| guest.connected)
                },
                network: guests.iter().find_map(|guest| guest.network.clone()),
                addresses,
            }
        })
        .collect();
    let addresses = interfaces
        .iter()
        .flat_map(|interface| interface.addresses.clone())
        .collect();
    Report { interfaces, addresses }
}

/// Whether other machines can reach an address: it is neither of the machine itself nor of its link.
fn is_reachable(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            !(v4.is_loopback() || v4.is_link_local() || v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast())
        }
        IpAddr::V6(v6) => {
            !(v6.is_loopback() || v6.is_unspecified() || v6.is_multicast() || (v6.segments()[0] & 0xffc0) == 0xfe80)
        }
    }
}

/// Whether a card has neither DHCP nor an address: the clone waits until a user sets `ipAddrs`.
pub fn waits_for_static_address(devices: &[NetworkDevice]) -> bool {
    devices
        .iter()
        .any(|d| !d.skip_allocation && !d.dhcp4 && !d.dhcp6 && d.addresses.is_empty() && !d.pooled)
}
