//! What is told of a running machine.

use std::net::IpAddr;

use crate::domain::{Facts, NetworkDevice};

/// A network card with what the guest says of it.
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

/// One entry for each network card of the VM, with the addresses that others can reach it by.
pub fn report(facts: &Facts) -> Report {
    let interfaces: Vec<Interface> = facts
        .nics
        .iter()
        .map(|nic| {
            let guest = facts
                .guest
                .iter()
                .find(|guest| guest.mac.eq_ignore_ascii_case(&nic.mac));
            let addresses = guest.map(|guest| guest.addresses.as_slice()).unwrap_or_default();
            Interface {
                mac: nic.mac.clone(),
                connected: guest.map_or(nic.connected, |guest| guest.connected),
                network: guest.and_then(|guest| guest.network.clone()),
                addresses: addresses
                    .iter()
                    .filter(|a| is_reachable(a))
                    .map(ToString::to_string)
                    .collect(),
            }
        })
        .collect();
    let addresses = interfaces
        .iter()
        .flat_map(|interface| interface.addresses.clone())
        .collect();
    Report { interfaces, addresses }
}

/// Addresses that make sense on the machine itself or its link only are of no use to anybody else.
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

/// A card that has neither DHCP nor an address waits until somebody gives it one.
pub fn waits_for_static_address(devices: &[NetworkDevice]) -> bool {
    devices
        .iter()
        .any(|d| !d.skip_allocation && !d.dhcp4 && !d.dhcp6 && d.addresses.is_empty() && !d.pooled)
}
