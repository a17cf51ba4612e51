//! The VSphereVM that a VSphereMachine stands for. Pure.

use capstan_api::capi::{CLUSTER_NAME_LABEL, WATCH_FILTER_LABEL};
use capstan_api::vsphere::{
    NetworkDeviceSpec, VSphereCluster, VSphereDeploymentZoneSpec, VSphereFailureDomainSpec, VSphereMachine, VSphereVM,
    VSphereVMSpec, VirtualMachineCloneSpec,
};
use capstan_core::validate::vcenter::same_server;
use capstan_core::validate::vsphere::LONGEST_WINDOWS_NAME;
use capstan_core::vm::naming;
use capstan_kube::capi::Machine;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;

use crate::conditions as names;

/// A zone with the failure domain that it is about.
pub struct Zone<'a> {
    pub zone: &'a VSphereDeploymentZoneSpec,
    pub domain: &'a VSphereFailureDomainSpec,
}

/// The VM's name: the machine's, or what its naming strategy makes of it; cut to what Windows takes.
pub fn name(owner: &VSphereMachine, machine: &str) -> Result<String, String> {
    let strategy = owner
        .spec
        .naming_strategy
        .as_ref()
        .and_then(|strategy| strategy.template.as_deref());
    let name = match strategy.filter(|template| !template.is_empty()) {
        Some(template) => cut(naming::fill(template, machine)?),
        None => machine.to_owned(),
    };
    let windows = owner
        .spec
        .clone_spec
        .os
        .as_ref()
        .is_some_and(|os| os.as_str() == "Windows");
    if !windows || machine.len() <= LONGEST_WINDOWS_NAME || !name.is_ascii() || name.len() < 10 {
        return Ok(name);
    }
    let (head, tail) = (&name[..9], &name[name.len() - 5..]);
    Ok(format!("{}-{tail}", head.trim_end_matches('-')))
}

/// Cuts a name to the length that a host name may have. The predecessor does the same, so that its VMs are found again.
fn cut(name: String) -> String {
    const LONGEST: usize = 63;
    let mut end = name.len().min(LONGEST);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

/// Returns the VSphereVM that should exist for a VSphereMachine with this UID.
pub fn vm(
    name: &str,
    owner: &VSphereMachine,
    uid: &str,
    machine: &Machine,
    cluster: &VSphereCluster,
    zone: Option<&Zone<'_>>,
) -> VSphereVM {
    let mut spec = owner.spec.clone_spec.clone();
    if let Some(zone) = zone {
        place(&mut spec, zone);
    }
    let empty = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
    if empty(&spec.server) {
        spec.server = cluster.spec.server.clone();
    }
    let server = spec.server.as_deref().zip(cluster.spec.server.as_deref());
    // Another vCenter, which a zone may name, has another certificate.
    if empty(&spec.thumbprint) && server.is_some_and(|(own, cluster)| same_server(own, cluster)) {
        spec.thumbprint = cluster.spec.thumbprint.clone();
    }
    let mut labels = std::collections::BTreeMap::new();
    labels.insert(CLUSTER_NAME_LABEL.to_owned(), machine.spec.cluster_name.clone());
    if let Some(value) = machine.labels().get(names::CONTROL_PLANE_LABEL) {
        labels.insert(names::CONTROL_PLANE_LABEL.to_owned(), value.clone());
    }
    if let Some(value) = owner.labels().get(WATCH_FILTER_LABEL) {
        labels.insert(WATCH_FILTER_LABEL.to_owned(), value.clone());
    }
    let bootstrap = machine
        .spec
        .bootstrap
        .data_secret_name
        .as_ref()
        .map(|secret| ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Secret".into()),
            name: Some(secret.clone()),
            namespace: machine.namespace(),
            ..ObjectReference::default()
        });
    VSphereVM {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: owner.namespace(),
            labels: Some(labels),
            finalizers: Some(vec![names::VM_FINALIZER.to_owned()]),
            owner_references: Some(vec![OwnerReference {
                api_version: VSphereMachine::API_VERSION.to_owned(),
                kind: VSphereMachine::KIND.to_owned(),
                name: owner.name_any(),
                uid: uid.to_owned(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: VSphereVMSpec {
            clone_spec: spec,
            bootstrap_ref: bootstrap,
            bios_uuid: None,
            power_off_mode: owner.spec.power_off_mode.clone(),
            guest_soft_power_off_timeout: owner.spec.guest_soft_power_off_timeout,
        },
        status: None,
    }
}

/// A host's name as a label may have it: without its domain when it is too long, without characters that are not allowed.
pub fn label_value(host: &str) -> Option<String> {
    const LONGEST: usize = 63;
    let host = if host.len() > LONGEST {
        host.split('.').next()?
    } else {
        host
    };
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') {
            c
        } else {
            '-'
        }
    };
    let cleaned: String = host.chars().map(allowed).take(LONGEST).collect();
    let trimmed = cleaned.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!trimmed.is_empty()).then(|| trimmed.to_owned())
}

/// What of an existing VM follows its machine; the rest is as it was made.
pub fn follow(existing: &VSphereVM, desired: &VSphereVM) -> VSphereVM {
    let mut after = existing.clone();
    // Whoever reconciles the machine reconciles its VM.
    if let Some(value) = desired.labels().get(WATCH_FILTER_LABEL) {
        after.labels_mut().insert(WATCH_FILTER_LABEL.to_owned(), value.clone());
    } else if existing.labels().contains_key(WATCH_FILTER_LABEL) {
        after.labels_mut().remove(WATCH_FILTER_LABEL);
    }
    after.spec.power_off_mode = desired.spec.power_off_mode.clone();
    after.spec.guest_soft_power_off_timeout = desired.spec.guest_soft_power_off_timeout;
    after.spec.bootstrap_ref = desired.spec.bootstrap_ref.clone();
    after.spec.clone_spec.thumbprint = desired.spec.clone_spec.thumbprint.clone();
    after.spec.clone_spec.network.devices = desired.spec.clone_spec.network.devices.clone();
    after
}

/// Puts a failure domain's choices in the place of the machine's.
fn place(spec: &mut VirtualMachineCloneSpec, zone: &Zone<'_>) {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (constraint, topology) = (&zone.zone.placement_constraint, &zone.domain.topology);
    spec.server = given(&zone.zone.server).or(spec.server.take());
    spec.datacenter = Some(topology.datacenter.clone());
    spec.folder = given(&constraint.folder).or(spec.folder.take());
    spec.resource_pool = given(&constraint.resource_pool).or(spec.resource_pool.take());
    spec.datastore = given(&topology.datastore).or(spec.datastore.take());
    let devices = &mut spec.network.devices;
    let count = topology.networks.len().max(topology.network_configurations.len());
    if devices.len() < count {
        devices.resize_with(count, NetworkDeviceSpec::default);
    }
    for (device, network) in devices.iter_mut().zip(&topology.networks) {
        device.network_name = network.clone();
    }
    for (device, network) in devices.iter_mut().zip(&topology.network_configurations) {
        if !network.network_name.is_empty() {
            device.network_name = network.network_name.clone();
        }
        device.dhcp4 = network.dhcp4.unwrap_or(device.dhcp4);
        device.dhcp6 = network.dhcp6.unwrap_or(device.dhcp6);
        if !network.nameservers.is_empty() {
            device.nameservers = network.nameservers.clone();
        }
        if !network.search_domains.is_empty() {
            device.search_domains = network.search_domains.clone();
        }
        device.dhcp4_overrides = network.dhcp4_overrides.clone().or(device.dhcp4_overrides.take());
        device.dhcp6_overrides = network.dhcp6_overrides.clone().or(device.dhcp6_overrides.take());
        if !network.addresses_from_pools.is_empty() {
            device.addresses_from_pools = network.addresses_from_pools.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn owner(extra: serde_json::Value) -> VSphereMachine {
        let mut spec = json!({"template": "t", "network": {"devices": [{"networkName": "a", "dhcp4": true}]}});
        for (key, value) in extra.as_object().unwrap() {
            spec[key] = value.clone();
        }
        serde_json::from_value(json!({"metadata": {"name": "m", "namespace": "ns", "uid": "u"}, "spec": spec})).unwrap()
    }

    #[rstest]
    #[case::plain(json!({}), "worker-abc12", "worker-abc12")]
    #[case::template(json!({"namingStrategy": {"template": "vm-{{ .machine.name }}"}}), "m1", "vm-m1")]
    #[case::cut(json!({"namingStrategy": {"template": "{{ .machine.name | trunc -5 }}"}}), "worker-abc12", "abc12")]
    #[case::long(
        json!({"namingStrategy": {"template": "{{ .machine.name }}-prod-eu-central"}}),
        "cluster-with-a-long-name-md-0-workers-with-a-name-x7d2k-abcde",
        "cluster-with-a-long-name-md-0-workers-with-a-name-x7d2k-abcde-p",
    )]
    #[case::windows(json!({"os": "Windows"}), "windows-worker-abc12", "windows-w-abc12")]
    #[case::windows_dash(json!({"os": "Windows"}), "workers1-long-abc12", "workers1-abc12")]
    #[case::short_windows(json!({"os": "Windows"}), "win-abc12", "win-abc12")]
    fn a_vm_is_named_after_its_machine(
        #[case] extra: serde_json::Value,
        #[case] machine: &str,
        #[case] expected: &str,
    ) {
        assert_eq!(name(&owner(extra), machine).as_deref(), Ok(expected));
    }

    #[rstest]
    #[case("esx-7.example.com", Some("esx-7.example.com"))]
    #[case("fd00::7", Some("fd00--7"))]
    #[case("[fd00::7]", Some("fd00--7"))]
    #[case("", None)]
    #[case(
        "esx.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        Some("esx")
    )]
    fn a_host_is_named_as_a_label_may_be(#[case] host: &str, #[case] expected: Option<&str>) {
        assert_eq!(label_value(host).as_deref(), expected);
    }

    #[test]
    fn a_failure_domain_overrides_what_it_names() {
        let machine: Machine = serde_json::from_value(json!({
            "metadata": {"name": "m", "namespace": "ns", "labels": {"cluster.x-k8s.io/control-plane": ""}},
            "spec": {"clusterName": "c", "bootstrap": {"dataSecretName": "s"}},
        }))
        .unwrap();
        let zone = serde_json::from_value(json!({"server": "vc2", "placementConstraint": {"folder": "f"}})).unwrap();
        let side = json!({"name": "r", "type": "Datacenter", "tagCategory": "c"});
        let domain = serde_json::from_value(json!({
            "region": side, "zone": side,
            "topology": {"datacenter": "dc2", "datastore": "ds2", "networks": ["n1", "n2"]},
        }))
        .unwrap();
        let mut cluster = VSphereCluster::default();
        cluster.spec.server = Some("vc1".into());
        cluster.spec.thumbprint = Some("of vc1".into());
        let made = vm(
            "m",
            &owner(json!({"resourcePool": "p"})),
            "u",
            &machine,
            &cluster,
            Some(&Zone {
                zone: &zone,
                domain: &domain,
            }),
        );
        let spec = &made.spec.clone_spec;
        assert_eq!(
            (spec.server.as_deref(), spec.datacenter.as_deref()),
            (Some("vc2"), Some("dc2"))
        );
        assert_eq!(spec.thumbprint, None, "another server has another certificate");
        let unzoned = vm("m", &owner(json!({})), "u", &machine, &cluster, None);
        assert_eq!(unzoned.spec.clone_spec.thumbprint.as_deref(), Some("of vc1"));
        assert_eq!(
            (spec.folder.as_deref(), spec.resource_pool.as_deref()),
            (Some("f"), Some("p"))
        );
        let networks: Vec<_> = spec
            .network
            .devices
            .iter()
            .map(|d| (d.network_name.as_str(), d.dhcp4))
            .collect();
        assert_eq!(networks, [("n1", true), ("n2", false)]);
        assert_eq!(
            made.labels().get("cluster.x-k8s.io/cluster-name").map(String::as_str),
            Some("c")
        );
        assert!(made.labels().contains_key("cluster.x-k8s.io/control-plane"));
        assert_eq!(made.owner_references()[0].uid, "u");
    }

    #[test]
    fn a_vm_has_the_watch_filter_of_its_machine_and_follows_it() {
        let machine: Machine =
            serde_json::from_value(json!({"metadata": {"name": "m"}, "spec": {"clusterName": "c"}})).unwrap();
        let made = |filter: Option<&str>| {
            let mut owner = owner(json!({}));
            owner.metadata.labels = filter.map(|value| [(WATCH_FILTER_LABEL.to_owned(), value.to_owned())].into());
            vm("m", &owner, "u", &machine, &VSphereCluster::default(), None)
        };
        let filter = |vm: &VSphereVM| vm.labels().get(WATCH_FILTER_LABEL).cloned();
        assert_eq!(filter(&made(Some("a"))).as_deref(), Some("a"));
        for (before, after) in [(None, Some("a")), (Some("a"), Some("b")), (Some("a"), None)] {
            let followed = follow(&made(before), &made(after));
            assert_eq!(filter(&followed).as_deref(), after);
        }
        // Without the label nothing is written.
        let plain = made(None);
        assert_eq!(follow(&plain, &plain), plain);
    }
}
