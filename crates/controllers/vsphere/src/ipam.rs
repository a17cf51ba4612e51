//! Addresses from pools that an IPAM provider hands out, by the contract of `ipam.cluster.x-k8s.io`.
//!
//! Invariant: there is one claim for each pool that a network card names, owned by its VSphereVM. Its name follows from the
//! VM and the place in the spec, so that it is found again and never made twice.

use std::net::IpAddr;
use std::time::Duration;

use capstan_api::vsphere::VSphereVM;
use capstan_kube::{Cache, Context, cache};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{LocalObjectReference, TypedLocalObjectReference};
use kube::runtime::reflector::ObjectRef;
use kube::{CustomResource, Resource, ResourceExt};
use serde::{Deserialize, Serialize};

use parking_lot::Mutex;

use crate::error::Error;
use capstan_core::vm::NetworkDevice;

/// After this long a watch that has shown nothing is in trouble: most likely the kinds are not installed.
const SHOWN: Duration = Duration::from_secs(10);

/// A claim to an address of a pool.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, PartialEq, Serialize)]
#[kube(
    group = "ipam.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "IPAddressClaim",
    plural = "ipaddressclaims",
    namespaced,
    status = "ClaimStatus",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSpec {
    pub pool_ref: TypedLocalObjectReference,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimStatus {
    #[serde(default)]
    pub address_ref: LocalObjectReference,
    #[serde(default)]
    pub conditions: Vec<ClaimCondition>,
}

/// The part of a condition that our messages use; the rest differs between versions.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct ClaimCondition {
    #[serde(rename = "type", default)]
    pub type_: String,
    #[serde(default)]
    pub status: String,
    #[serde(default)]
    pub message: Option<String>,
}

/// An address that was handed out.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, PartialEq, Serialize)]
#[kube(
    group = "ipam.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "IPAddress",
    plural = "ipaddresses",
    namespaced,
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct AddressSpec {
    #[serde(default)]
    pub claim_ref: LocalObjectReference,
    pub address: String,
    #[serde(default)]
    pub prefix: Option<i32>,
    #[serde(default)]
    pub gateway: Option<String>,
}

/// An address that a VM claims from a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimedAddress {
    pub name: String,
    /// The index of the network device in the spec.
    pub device: usize,
    pub pool: TypedLocalObjectReference,
}

/// An address that a pool handed out for a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    pub device: usize,
    pub address: IpAddr,
    pub prefix: u8,
    pub gateway: Option<IpAddr>,
}

/// Returns the addresses that the network devices of a VM claim, in the order of the spec. A device with skipIPAllocation claims
/// them, too, as CAPV does: such a device only may have none.
pub fn desired(vm: &VSphereVM) -> Vec<ClaimedAddress> {
    let devices = vm.spec.clone_spec.network.devices.iter().enumerate();
    devices
        .flat_map(|(index, device)| {
            let pools = device.addresses_from_pools.iter().enumerate();
            pools.map(move |(pool, reference)| ClaimedAddress {
                name: format!("{}-{index}-{pool}", vm.name_any()),
                device: index,
                pool: reference.clone(),
            })
        })
        .collect()
}

/// Returns the address of an IPAddress. It is checked, because users make pools.
pub fn given(device: usize, name: &str, spec: &AddressSpec) -> Result<Given, String> {
    let wrong = |field: &str, value: &str| format!("IPAddress {name:?}: {field} {value:?} is not valid");
    let parse = |field: &str, text: &str| text.parse::<IpAddr>().map_err(|_| wrong(field, text));
    let address = parse("spec.address", &spec.address)?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let prefix = spec.prefix.unwrap_or(i32::from(longest));
    let prefix = u8::try_from(prefix)
        .ok()
        .filter(|prefix| *prefix <= longest)
        .ok_or_else(|| wrong("spec.prefix", &prefix.to_string()))?;
    let gateway = match spec.gateway.as_deref().filter(|gateway| !gateway.is_empty()) {
        Some(gateway) => Some(parse("spec.gateway", gateway)?),
        None => None,
    };
    Ok(Given {
        device,
        address,
        prefix,
        gateway,
    })
}

/// Puts the addresses into the network devices. A gateway of the spec stays; else the first address gives it.
pub fn put(devices: &mut [NetworkDevice], all: &[Given]) {
    for given in all {
        let Some(device) = devices.get_mut(given.device) else {
            continue;
        };
        let text = format!("{}/{}", given.address, given.prefix);
        if !device.addresses.contains(&text) {
            device.addresses.push(text);
        }
        let gateway = if given.address.is_ipv4() {
            &mut device.gateway4
        } else {
            &mut device.gateway6
        };
        if gateway.is_none() {
            *gateway = given.gateway.map(|gateway| gateway.to_string());
        }
    }
}

/// The caches of claims and addresses. They start with the first VM that needs them: the kinds may not be installed.
#[derive(Default)]
pub struct Ipam(Mutex<Option<Caches>>);

#[derive(Clone)]
pub struct Caches {
    pub claims: Cache<IPAddressClaim>,
    pub addresses: Cache<IPAddress>,
}

impl Ipam {
    /// Returns the caches. `wake` is called for every VM that a change concerns.
    pub async fn caches(
        &self,
        context: &Context,
        wake: impl Fn(ObjectRef<VSphereVM>) + Clone + Send + 'static,
    ) -> Result<Caches, Error> {
        let caches = self.start(context, wake);
        let ready = async {
            caches.claims.ready().await?;
            caches.addresses.ready().await
        };
        match capstan_core::clock::timeout(SHOWN, ready).await {
            Ok(ready) => ready?,
            Err(_) => {
                let trouble = caches.claims.trouble().or_else(|| caches.addresses.trouble());
                return Err(Error::NotReady(format!(
                    "network.devices[].addressesFromPools: IPAddressClaims cannot be watched, is Cluster API's IPAM installed? {}",
                    trouble.unwrap_or_default()
                )));
            }
        }
        Ok(caches)
    }

    fn start(&self, context: &Context, wake: impl Fn(ObjectRef<VSphereVM>) + Clone + Send + 'static) -> Caches {
        let mut slot = self.0.lock();
        if let Some(caches) = slot.as_ref() {
            return caches.clone();
        }
        let caches = Caches {
            claims: context.cache_where(Default::default(), cache::trim),
            addresses: context.cache_where(Default::default(), cache::trim),
        };
        let mut changes = Box::pin(caches.claims.subscribe());
        let by_claim = wake.clone();
        tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                owner(&change.object).into_iter().for_each(&by_claim);
            }
        });
        let mut changes = Box::pin(caches.addresses.subscribe());
        let claims = caches.claims.store();
        tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                let name = change.object.spec.claim_ref.name.as_str();
                let mut claim = ObjectRef::<IPAddressClaim>::new(name);
                claim.namespace = change.object.namespace();
                let vm = claims.get(&claim).and_then(|claim| owner(&claim));
                vm.into_iter().for_each(&wake);
            }
        });
        *slot = Some(caches.clone());
        caches
    }
}

/// Returns the VM that a claim is for.
fn owner(claim: &IPAddressClaim) -> Option<ObjectRef<VSphereVM>> {
    let mut owners = claim.owner_references().iter();
    let owner = owners.find(|owner| owner.kind == VSphereVM::KIND)?;
    let mut vm = ObjectRef::new(&owner.name);
    vm.namespace = claim.namespace();
    Some(vm)
}

impl IPAddressClaim {
    /// Whether the claim belongs to the VSphereVM with this UID.
    pub fn belongs_to(&self, uid: &str) -> bool {
        self.owner_references().iter().any(|owner| owner.uid == uid)
    }

    /// Returns the name of the IPAddress that answers the claim.
    pub fn address(&self) -> Option<&str> {
        let status = self
            .status
            .as_ref()
            .filter(|_| self.meta().deletion_timestamp.is_none())?;
        Some(status.address_ref.name.as_str()).filter(|name| !name.is_empty())
    }

    /// Returns why the provider of the pool has not answered the claim.
    pub fn complaint(&self) -> Option<String> {
        let conditions = self.status.as_ref().map(|status| status.conditions.as_slice());
        let mut conditions = conditions.unwrap_or_default().iter();
        let complaint = conditions.find(|c| c.type_ == "Ready" && c.status == "False")?;
        complaint.message.clone().filter(|message| !message.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn spec(address: &str, prefix: Option<i32>, gateway: Option<&str>) -> AddressSpec {
        AddressSpec {
            address: address.into(),
            prefix,
            gateway: gateway.map(str::to_owned),
            ..AddressSpec::default()
        }
    }

    #[rstest]
    #[case::v4(spec("10.0.0.7", Some(24), Some("10.0.0.1")), Ok("10.0.0.7/24"))]
    #[case::v6(spec("fd00::7", Some(64), None), Ok("fd00::7/64"))]
    #[case::alone(spec("10.0.0.7", None, None), Ok("10.0.0.7/32"))]
    #[case::no_address(spec("ten", Some(24), None), Err("spec.address \"ten\""))]
    #[case::too_long(spec("10.0.0.7", Some(33), None), Err("spec.prefix \"33\""))]
    #[case::no_gateway(spec("10.0.0.7", Some(24), Some("x")), Err("spec.gateway \"x\""))]
    fn an_address_is_checked_before_it_is_used(#[case] spec: AddressSpec, #[case] expected: Result<&str, &str>) {
        let found = given(0, "a", &spec);
        match expected {
            Ok(text) => {
                let mut devices = [NetworkDevice::default()];
                put(&mut devices, &[found.unwrap()]);
                assert_eq!(devices[0].addresses, [text]);
            }
            Err(text) => assert!(found.unwrap_err().contains(text)),
        }
    }

    #[test]
    fn a_gateway_of_the_spec_stays_and_families_are_kept_apart() {
        let mut devices = [NetworkDevice {
            gateway4: Some("10.0.0.254".into()),
            ..NetworkDevice::default()
        }];
        let v4 = given(0, "a", &spec("10.0.0.7", Some(24), Some("10.0.0.1"))).unwrap();
        let v6 = given(0, "b", &spec("fd00::7", Some(64), Some("fd00::1"))).unwrap();
        put(&mut devices, &[v4.clone(), v6, v4]);
        assert_eq!(devices[0].addresses, ["10.0.0.7/24", "fd00::7/64"]);
        assert_eq!(
            (devices[0].gateway4.as_deref(), devices[0].gateway6.as_deref()),
            (Some("10.0.0.254"), Some("fd00::1"))
        );
    }

    #[test]
    fn there_is_one_claim_for_each_pool_of_each_card() {
        let pool = |name: &str| json!({"apiGroup": "ipam.cluster.x-k8s.io", "kind": "InClusterIPPool", "name": name});
        let vm: VSphereVM = serde_json::from_value(json!({
            "metadata": {"name": "m"},
            "spec": {"template": "t", "network": {"devices": [
                {"networkName": "a", "addressesFromPools": [pool("v4"), pool("v6")]},
                {"networkName": "b", "dhcp4": true},
                {"networkName": "c", "skipIPAllocation": true, "addressesFromPools": [pool("v4")]},
                {"networkName": "d", "addressesFromPools": [pool("v4")]},
            ]}},
        }))
        .unwrap();
        let names: Vec<(String, usize)> = desired(&vm).into_iter().map(|want| (want.name, want.device)).collect();
        let expected = [("m-0-0", 0), ("m-0-1", 0), ("m-2-0", 2), ("m-3-0", 3)];
        assert_eq!(names, expected.map(|(name, device)| (name.to_owned(), device)));
    }
}
