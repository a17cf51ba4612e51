//! The metadata document of a machine: its name and its network, in the form that cloud-init's VMware data source reads.

use std::fmt::Write;

use super::types::{DesiredVm, DhcpOverrides, NetworkDevice, Nic, Route};

/// Renders the document. Cards that the spec does not know are matched by their MAC address too.
///
/// CAPV compares the document as text and reconfigures a machine whose document differs, so this one is the same to the last
/// byte: it begins with an empty line.
pub fn render(desired: &DesiredVm, nics: &[Nic]) -> String {
    let mut out = Yaml("\n".to_owned());
    let name = text(&desired.name);
    out.line(0, format_args!("instance-id: {name}"));
    out.line(0, format_args!("local-hostname: {name}"));
    let (v4, v6) = waits(&desired.networks);
    out.line(0, format_args!("wait-on-network:"));
    out.line(1, format_args!("ipv4: {v4}"));
    out.line(1, format_args!("ipv6: {v6}"));
    out.line(0, format_args!("network:"));
    out.line(1, format_args!("version: 2"));
    out.line(1, format_args!("ethernets:"));
    let unknown = NetworkDevice::default();
    for index in 0..desired.networks.len().max(nics.len()) {
        let device = desired.networks.get(index).unwrap_or(&unknown);
        let mac = nics
            .get(index)
            .map(|nic| nic.mac.as_str())
            .or(device.mac.as_deref())
            .unwrap_or_default();
        out.ethernet(index, device, mac);
    }
    out.routes(1, &desired.routes);
    out.0
}

/// Whether the guest has to wait for an address of either family before it goes on.
fn waits(devices: &[NetworkDevice]) -> (bool, bool) {
    let has = |v6: bool| {
        devices.iter().any(|device| {
            let dhcp = if v6 { device.dhcp6 } else { device.dhcp4 };
            dhcp || device.addresses.iter().any(|address| address.contains(':') == v6)
        })
    };
    (has(false), has(true))
}

/// A string that YAML reads as nothing else: JSON's form is one of YAML's.
fn text(value: &str) -> String {
    serde_json::Value::from(value).to_string()
}

/// Returns a boolean or a single word as it is, and quotes everything else.
fn word(value: &str) -> String {
    match value.chars().all(|c| c.is_ascii_alphanumeric()) && !value.is_empty() {
        true => value.to_owned(),
        false => text(value),
    }
}

struct Yaml(String);

impl Yaml {
    fn line(&mut self, depth: usize, content: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.0, "{:indent$}{content}", "", indent = depth * 2);
    }

    fn ethernet(&mut self, index: usize, device: &NetworkDevice, mac: &str) {
        self.line(2, format_args!("id{index}:"));
        self.line(3, format_args!("match:"));
        self.line(4, format_args!("macaddress: {}", text(mac)));
        let name = device.device_name.clone().unwrap_or_else(|| format!("eth{index}"));
        self.line(3, format_args!("set-name: {}", text(&name)));
        self.line(3, format_args!("wakeonlan: true"));
        self.line(3, format_args!("dhcp4: {}", device.dhcp4));
        self.line(3, format_args!("dhcp6: {}", device.dhcp6));
        self.line(3, format_args!("accept-ra: {}", device.dhcp6));
        self.overrides("dhcp4-overrides", device.dhcp4_overrides.as_ref());
        self.overrides("dhcp6-overrides", device.dhcp6_overrides.as_ref());
        self.list(3, "addresses", &device.addresses);
        for (key, gateway) in [("gateway4", &device.gateway4), ("gateway6", &device.gateway6)] {
            if let Some(gateway) = gateway {
                self.line(3, format_args!("{key}: {}", text(gateway)));
            }
        }
        if let Some(mtu) = device.mtu {
            self.line(3, format_args!("mtu: {mtu}"));
        }
        self.routes(3, &device.routes);
        if !device.nameservers.is_empty() || !device.search_domains.is_empty() {
            self.line(3, format_args!("nameservers:"));
            self.list(4, "addresses", &device.nameservers);
            self.list(4, "search", &device.search_domains);
        }
    }

    fn overrides(&mut self, key: &str, overrides: Option<&DhcpOverrides>) {
        let Some(set) = overrides else { return };
        let words = |value: &Option<String>| value.as_deref().map(text);
        let flag = |value: Option<bool>| value.map(|v| v.to_string());
        let entries = [
            ("hostname", words(&set.hostname)),
            ("route-metric", set.route_metric.map(|v| v.to_string())),
            ("send-hostname", flag(set.send_hostname)),
            ("use-dns", flag(set.use_dns)),
            ("use-domains", set.use_domains.as_deref().map(word)),
            ("use-hostname", flag(set.use_hostname)),
            ("use-mtu", flag(set.use_mtu)),
            ("use-ntp", flag(set.use_ntp)),
            ("use-routes", words(&set.use_routes)),
        ];
        if entries.iter().all(|(_, value)| value.is_none()) {
            return;
        }
        self.line(3, format_args!("{key}:"));
        for (name, value) in entries {
            if let Some(value) = value {
                self.line(4, format_args!("{name}: {value}"));
            }
        }
    }

    fn routes(&mut self, depth: usize, routes: &[Route]) {
        if routes.is_empty() {
            return;
        }
        self.line(depth, format_args!("routes:"));
        for route in routes {
            self.line(depth, format_args!("- to: {}", text(&route.to)));
            self.line(depth + 1, format_args!("via: {}", text(&route.via)));
            self.line(depth + 1, format_args!("metric: {}", route.metric));
        }
    }

    fn list(&mut self, depth: usize, key: &str, values: &[String]) {
        if values.is_empty() {
            return;
        }
        self.line(depth, format_args!("{key}:"));
        for value in values {
            self.line(depth, format_args!("- {}", text(value)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_names_the_machine_and_its_cards() {
        let desired = DesiredVm {
            name: "node-1".into(),
            networks: vec![
                NetworkDevice {
                    dhcp4: true,
                    ..NetworkDevice::default()
                },
                NetworkDevice {
                    addresses: vec!["10.0.0.5/24".into(), "fd00::5/64".into()],
                    gateway4: Some("10.0.0.1".into()),
                    nameservers: vec!["10.0.0.2".into()],
                    mtu: Some(9000),
                    routes: vec![Route {
                        to: "10.9.0.0/16".into(),
                        via: "10.0.0.9".into(),
                        metric: 3,
                    }],
                    dhcp4_overrides: Some(DhcpOverrides {
                        use_dns: Some(false),
                        use_domains: Some("route".into()),
                        ..DhcpOverrides::default()
                    }),
                    ..NetworkDevice::default()
                },
            ],
            ..DesiredVm::default()
        };
        let nics = [
            Nic {
                mac: "00:50:56:aa:00:01".into(),
                ..Nic::default()
            },
            Nic {
                mac: "00:50:56:aa:00:02".into(),
                ..Nic::default()
            },
        ];
        let document = render(&desired, &nics);
        assert!(document.starts_with("\ninstance-id: \"node-1\"\n"), "{document:?}");
        insta::assert_snapshot!(document.trim_start());
    }
}
