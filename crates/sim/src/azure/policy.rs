//! The throttling policy of Azure that a call belongs to. The request log and fault rules have its name.

use http::Method;

use super::wire::Call;

/// The policy's name; `Arm` for what only Resource Manager itself counts.
pub fn of(call: &Call) -> &'static str {
    let segments: Vec<&str> = call.key.split('/').filter(|s| !s.is_empty()).collect();
    match segments.first() {
        Some(&"subscriptions") => {}
        Some(&"metadata") if segments.get(1) != Some(&"identity") => return "Metadata",
        Some(&"sim") => return "Admin",
        _ if call.key.contains("/oauth2/")
            || call.key.contains("/.well-known/")
            || call.key.contains("/discovery/") =>
        {
            return "SignIn";
        }
        _ => return "Arm",
    }
    let Some(at) = segments.iter().position(|s| *s == "providers") else {
        return if segments.get(2) == Some(&"resourcegroups") {
            verb(call, ["GetGroup", "PutGroup", "DeleteGroup"])
        } else {
            "Arm"
        };
    };
    let rest = &segments[at + 1..];
    if call.key.ends_with("/microsoft.resources/tags/default") {
        return "Tags";
    }
    match rest {
        ["microsoft.compute", "skus"] => "GetSkus",
        [
            _,
            "locations",
            _,
            "operations" | "diskoperations" | "operationresults",
            _,
        ] => "GetOperation",
        ["microsoft.compute", "virtualmachines", rest @ ..] => vm(call, rest),
        ["microsoft.compute", "virtualmachinescalesets", rest @ ..] => scale_set(call, rest),
        ["microsoft.compute", "disks"] => "ListDisks",
        ["microsoft.compute", "disks", ..] => verb(call, ["GetDisk", "PutDisk", "DeleteDisk"]),
        ["microsoft.compute", "availabilitysets", ..] => verb(
            call,
            ["GetAvailabilitySet", "PutAvailabilitySet", "DeleteAvailabilitySet"],
        ),
        ["microsoft.compute", ..] => verb(call, ["GetCompute", "PutCompute", "DeleteCompute"]),
        ["microsoft.network", "networkinterfaces", ..] => verb(call, ["GetNic", "PutNic", "DeleteNic"]),
        ["microsoft.network", "publicipaddresses", ..] => verb(call, ["GetPublicIp", "PutPublicIp", "DeletePublicIp"]),
        ["microsoft.network", ..] => verb(call, ["GetNetwork", "PutNetwork", "DeleteNetwork"]),
        _ => "Arm",
    }
}

fn verb(call: &Call, [get, put, delete]: [&'static str; 3]) -> &'static str {
    match call.method {
        Method::GET | Method::HEAD => get,
        Method::DELETE => delete,
        _ => put,
    }
}

fn vm(call: &Call, rest: &[&str]) -> &'static str {
    match (&call.method, rest) {
        (&Method::GET, []) => "ListVMs",
        (&Method::GET, _) => "GetVM",
        (&Method::PUT, _) => "PutVM",
        (&Method::PATCH, _) => "UpdateVM",
        (&Method::DELETE, _) => "DeleteVM",
        _ => "UpdateVM",
    }
}

fn scale_set(call: &Call, rest: &[&str]) -> &'static str {
    match (&call.method, rest) {
        (&Method::GET, []) => "ListVMScaleSets",
        (&Method::GET, [_]) => "GetVMScaleSet",
        (&Method::PUT, [_]) => "PutVMScaleSet",
        (&Method::PATCH, [_]) => "UpdateVMScaleSet",
        (&Method::DELETE, [_]) => "DeleteVMScaleSet",
        (&Method::GET, [_, "virtualmachines"]) => "ListVMScaleSetVMs",
        (&Method::GET, [_, "instanceview"]) => "GetVMScaleSetInstanceView",
        (&Method::GET, [_, "virtualmachines", ..]) => "GetVMScaleSetVM",
        (&Method::GET, _) => "GetVMScaleSet",
        (&Method::DELETE, [_, "virtualmachines", ..]) | (_, [_, "delete"]) => "DeleteVMScaleSetVMs",
        _ => "UpdateVMScaleSetVMs",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(
        "GET",
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines",
        "ListVMs"
    )]
    #[case(
        "PUT",
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a",
        "PutVM"
    )]
    #[case(
        "POST",
        "/subscriptions/s/resourceGroups/g/providers/microsoft.compute/virtualmachinescalesets/a/delete",
        "DeleteVMScaleSetVMs"
    )]
    #[case(
        "GET",
        "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/a/virtualMachines",
        "ListVMScaleSetVMs"
    )]
    #[case(
        "GET",
        "/subscriptions/s/providers/Microsoft.Compute/locations/eastus/DiskOperations/1",
        "GetOperation"
    )]
    #[case("POST", "/tenant/oauth2/v2.0/token", "SignIn")]
    #[case("GET", "/metadata/identity/oauth2/token", "SignIn")]
    #[case("GET", "/metadata/endpoints", "Metadata")]
    #[case("GET", "/subscriptions/s", "Arm")]
    fn calls_fall_under_their_policy(#[case] method: &str, #[case] path: &str, #[case] policy: &str) {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let call = Call::new(method, path, Default::default(), Default::default(), String::new());
        assert_eq!(of(&call), policy);
    }
}
