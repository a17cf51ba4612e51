//! The internal load balancer of a control plane machine whose spec does not name it.
//!
//! Control plane machines of early installations joined it without saying so. A machine that is made again from such a spec
//! would not be behind it, so the spec is completed, as machine-api-provider-azure does.

use super::Target;
use super::spec::provider_spec;
use capstan_api::openshift::Machine;
use capstan_azure::ResourceId;
use capstan_azure::model::{LoadBalancer, NetworkInterface};
use kube::ResourceExt as _;
use serde_json::Value;
use std::collections::BTreeSet;

/// Label with the role of a machine. The creator of the machine sets it.
const ROLE_LABEL: &str = "machine.openshift.io/cluster-api-machine-role";

/// Whether the spec of a control plane machine names no internal balancer.
pub fn is_unnamed(machine: &Machine) -> bool {
    let is_control_plane = machine.labels().get(ROLE_LABEL).is_some_and(|role| role == "master");
    let names_none = |machine: &Machine| {
        provider_spec(machine).is_ok_and(|spec| spec.internal_load_balancer.is_none_or(|name| name.is_empty()))
    };
    is_control_plane && names_none(machine)
}

/// Returns the internal balancer that the machine's interface is behind. What cannot be read now is read another time.
pub async fn find(target: &Target) -> Option<String> {
    let (client, names) = (&target.account.client, &target.names);
    let read = async {
        let Some(nic) = client.get_nic(&names.group, &names.nic()).await? else {
            return Ok(None);
        };
        for id in balancers_of(&nic) {
            let found = client.get_load_balancer(&id.group, id.name()).await?;
            if found.is_some_and(|found| is_internal(&found)) {
                return Ok(Some(id.name().to_owned()));
            }
        }
        Ok(None)
    };
    let found: Result<Option<String>, capstan_azure::Error> = read.await;
    found
        .inspect_err(|error| tracing::warn!(%error, machine = names.machine, "cannot read the machine's balancers"))
        .ok()
        .flatten()
}

/// Returns the machine with the balancer in its spec.
pub fn named(mut machine: Machine, balancer: String) -> Machine {
    if let Some(Value::Object(spec)) = &mut machine.spec.provider_spec.value {
        spec.insert("internalLoadBalancer".to_owned(), Value::String(balancer));
    }
    machine
}

/// Returns the balancers whose pools the interface is in.
fn balancers_of(nic: &NetworkInterface) -> Vec<ResourceId> {
    let configurations = nic.ip_configurations().iter().filter_map(|one| one.properties.as_ref());
    let pools = configurations.flat_map(|one| one.load_balancer_backend_address_pools.iter().flatten());
    let ids = pools.filter_map(|pool| pool.id.as_deref()?.split("/backendAddressPools/").next());
    let ids: BTreeSet<&str> = ids.collect();
    ids.into_iter().filter_map(|id| id.parse().ok()).collect()
}

fn is_internal(balancer: &LoadBalancer) -> bool {
    let properties = balancer.properties.as_ref();
    let frontends = properties.and_then(|properties| properties.frontend_ip_configurations.as_deref());
    let is_private = |address: Option<&Value>| address.and_then(Value::as_str).is_some_and(|ip| !ip.is_empty());
    frontends.unwrap_or_default().iter().any(|frontend| {
        let properties = frontend.properties.as_ref();
        is_private(properties.and_then(|properties| properties.rest.get("privateIPAddress")))
    })
}
