//! Rights: which action a call is, and whether the client's role allows it.
//!
//! As in Azure, a refusal comes before anything else is looked at, and it names client, action and scope.

use http::Method;

use super::config::Config;
use super::wire::{Call, Fail};

/// The actions that machine-api-operator's CredentialsRequest for Azure asks for. It may delete disks, and neither read
/// nor write them.
pub const OPENSHIFTS_ROLE: [&str; 32] = [
    "Microsoft.Compute/availabilitySets/delete",
    "Microsoft.Compute/availabilitySets/read",
    "Microsoft.Compute/availabilitySets/write",
    "Microsoft.Compute/diskEncryptionSets/read",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Compute/galleries/images/versions/read",
    "Microsoft.Compute/skus/read",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",
    "Microsoft.Network/applicationSecurityGroups/read",
    "Microsoft.Network/loadBalancers/backendAddressPools/join/action",
    "Microsoft.Network/loadBalancers/read",
    "Microsoft.Network/loadBalancers/write",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkInterfaces/loadBalancers/read",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkSecurityGroups/read",
    "Microsoft.Network/networkSecurityGroups/write",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Network/publicIPAddresses/join/action",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/routeTables/read",
    "Microsoft.Network/virtualNetworks/delete",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Network/virtualNetworks/subnets/read",
    "Microsoft.Resources/subscriptions/resourceGroups/read",
];

/// Refuses a call to a resource whose action the client's role does not have.
pub fn check(config: &Config, call: &Call) -> Result<(), Fail> {
    let Some(allowed) = &config.allowed_actions else {
        return Ok(());
    };
    let Some(action) = action(call) else { return Ok(()) };
    if allowed.iter().any(|pattern| fits(pattern, &action)) {
        return Ok(());
    }
    let message = format!(
        "The client '{0}' with object id '{0}' does not have authorization to perform action '{action}' over scope '{1}' or the \
         scope is invalid. If access was recently granted, please refresh your credentials.",
        config.client_id, call.path
    );
    Err(Fail::new(403, "AuthorizationFailed", message))
}

/// `Microsoft.Compute/virtualMachineScaleSets/delete/action`; none for what every client may do: operations, locations.
fn action(call: &Call) -> Option<String> {
    let at = call
        .segments
        .iter()
        .position(|segment| segment.eq_ignore_ascii_case("providers"))?;
    let rest = &call.segments[at + 1..];
    let (namespace, rest) = rest.split_first()?;
    let usages = rest.get(2).is_some_and(|kind| kind.eq_ignore_ascii_case("usages"));
    if rest
        .first()
        .is_none_or(|kind| kind.eq_ignore_ascii_case("locations") && !usages)
    {
        return None;
    }
    let kinds: Vec<&str> = rest.iter().step_by(2).map(String::as_str).collect();
    let named = rest.len().is_multiple_of(2);
    let verb = match call.method {
        Method::GET | Method::HEAD => "read",
        Method::DELETE => "delete",
        // An action is the last segment, and stands where a type would.
        Method::POST if !named => "action",
        _ => "write",
    };
    Some(format!("{namespace}/{}/{verb}", kinds.join("/")))
}

/// Whether a pattern with `*` fits, without regard to case.
fn fits(pattern: &str, action: &str) -> bool {
    let (pattern, action) = (pattern.to_lowercase(), action.to_lowercase());
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| action.strip_prefix(first)) else {
        return false;
    };
    let Some(last) = pattern
        .contains('*')
        .then(|| pattern.rsplit('*').next().unwrap_or_default())
    else {
        return rest.is_empty();
    };
    let between: Vec<&str> = parts.collect();
    for part in &between[..between.len().saturating_sub(1)] {
        match rest.find(part) {
            Some(found) => rest = &rest[found + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(method: Method, path: &str) -> Option<String> {
        let call = Call::new(method, path, http::HeaderMap::new(), bytes::Bytes::new(), String::new());
        action(&call)
    }

    #[test]
    fn a_call_is_an_action_as_azure_names_it() {
        let group = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute";
        let cases = [
            (Method::GET, "/disks/d", "Microsoft.Compute/disks/read"),
            (Method::GET, "/disks", "Microsoft.Compute/disks/read"),
            (
                Method::PUT,
                "/virtualMachines/m",
                "Microsoft.Compute/virtualMachines/write",
            ),
            (Method::DELETE, "/disks/d", "Microsoft.Compute/disks/delete"),
            (
                Method::POST,
                "/virtualMachineScaleSets/p/manualupgrade",
                "Microsoft.Compute/virtualMachineScaleSets/manualupgrade/action",
            ),
            (
                Method::GET,
                "/virtualMachineScaleSets/p/virtualMachines/3",
                "Microsoft.Compute/virtualMachineScaleSets/virtualMachines/read",
            ),
        ];
        for (method, path, expected) in cases {
            assert_eq!(of(method, &format!("{group}{path}")).as_deref(), Some(expected));
        }
        let operation = "/subscriptions/s/providers/Microsoft.Compute/locations/eastus/operations/o";
        assert_eq!(of(Method::GET, operation), None);
        let usages = "/subscriptions/s/providers/Microsoft.Compute/locations/eastus/usages";
        let expected = Some("Microsoft.Compute/locations/usages/read");
        assert_eq!(of(Method::GET, usages).as_deref(), expected);
    }

    #[test]
    fn patterns_fit_as_in_a_role() {
        assert!(fits("*", "Microsoft.Compute/disks/read"));
        assert!(fits("Microsoft.Compute/*/read", "microsoft.compute/disks/read"));
        assert!(fits("Microsoft.Compute/disks/delete", "Microsoft.Compute/disks/delete"));
        assert!(!fits(
            "Microsoft.Compute/disks/delete",
            "Microsoft.Compute/disks/deleted"
        ));
        assert!(!fits("Microsoft.Compute/*/read", "Microsoft.Compute/disks/write"));
        assert!(!fits("Microsoft.Network/*", "Microsoft.Compute/disks/read"));
    }
}
