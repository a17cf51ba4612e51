//! Faults on demand, by rule: which calls, from the how-many-th on, how often, and what happens to them.

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use super::wire::{Call, Fail};

/// The effect of a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Action {
    /// The call waits before it is worked on.
    #[serde(rename_all = "camelCase")]
    Delay { millis: u64 },
    /// The call is refused, nothing is done.
    #[serde(rename_all = "camelCase")]
    Answer {
        status: u16,
        #[serde(default)]
        code: Option<String>,
        #[serde(default)]
        message: Option<String>,
        #[serde(default)]
        retry_after: Option<u64>,
    },
    /// The work is done, but the connection closes without an answer.
    Drop,
    /// The connection closes before anything is done.
    Refuse,
    /// The operation that the call starts continues until it is released.
    Stall,
    /// A resource ends as Failed although Azure has accepted its PUT. The rule's path is matched against the id of what is
    /// provisioned, and each one counts: `times: 1` fails one instance of many. Without a path only VMs and instances fail.
    #[serde(rename_all = "camelCase")]
    FailProvisioning { code: String, message: String },
    /// No room for new VMs and instances. Without a zone: anywhere; without a size: any. With `SkuNotAvailable` a VM's PUT
    /// is refused outright, otherwise the operation fails.
    #[serde(rename_all = "camelCase")]
    NoCapacity {
        #[serde(default)]
        zone: Option<String>,
        #[serde(default)]
        vm_size: Option<String>,
        /// `SkuNotAvailable`, `AllocationFailed` or `ZonalAllocationFailed`; by default as Azure would.
        #[serde(default)]
        code: Option<String>,
    },
    /// The disks of a deleted VM stay, whatever their deleteOption.
    KeepDisks,
    /// A VM or instance runs, and its Node never joins. The rule's path is matched against its id, and each one counts.
    NeverJoin,
}

/// A rule. Fields that are not given match everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    #[serde(default)]
    pub method: Option<String>,
    /// A regular expression that the path contains, without regard to case.
    #[serde(default)]
    pub path: Option<String>,
    /// As in the log, for example `PutVM`.
    #[serde(default)]
    pub policy: Option<String>,
    /// Lets this many matching calls pass first.
    #[serde(default)]
    pub skip: u64,
    /// The number of calls that it affects. Without it, all.
    #[serde(default)]
    pub times: Option<u64>,
    pub action: Action,
}

impl Fault {
    pub fn new(action: Action) -> Self {
        Self {
            method: None,
            path: None,
            policy: None,
            skip: 0,
            times: None,
            action,
        }
    }

    pub fn answer(status: u16) -> Self {
        Self::new(Action::Answer {
            status,
            code: None,
            message: None,
            retry_after: None,
        })
    }

    /// 429 with this many seconds in `Retry-After`.
    pub fn throttle(seconds: u64) -> Self {
        Self::new(Action::Answer {
            status: 429,
            code: None,
            message: None,
            retry_after: Some(seconds),
        })
    }

    pub fn method(mut self, method: &str) -> Self {
        self.method = Some(method.into());
        self
    }

    pub fn path(mut self, path: &str) -> Self {
        self.path = Some(path.into());
        self
    }

    pub fn policy(mut self, policy: &str) -> Self {
        self.policy = Some(policy.into());
        self
    }

    pub fn skip(mut self, calls: u64) -> Self {
        self.skip = calls;
        self
    }

    pub fn times(mut self, times: u64) -> Self {
        self.times = Some(times);
        self
    }
}

struct Armed {
    id: u64,
    fault: Fault,
    path: Option<Regex>,
    seen: u64,
    struck: u64,
}

impl Armed {
    fn matches(&self, call: &Call, policy: &str) -> bool {
        let fault = &self.fault;
        fault
            .method
            .as_ref()
            .is_none_or(|method| method.eq_ignore_ascii_case(call.method.as_str()))
            && self.path.as_ref().is_none_or(|path| path.is_match(&call.path))
            && fault
                .policy
                .as_ref()
                .is_none_or(|wanted| wanted.eq_ignore_ascii_case(policy))
    }

    /// Counts a match. Returns whether the fault affects the call.
    fn strike(&mut self) -> bool {
        self.seen += 1;
        let strikes = self.seen > self.fault.skip && self.fault.times.is_none_or(|times| self.struck < times);
        self.struck += u64::from(strikes);
        strikes
    }
}

#[derive(Default)]
pub struct Faults {
    armed: Vec<Armed>,
    next: u64,
}

/// A rule as it stands now, for the admin API.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Standing {
    pub id: u64,
    pub seen: u64,
    pub struck: u64,
    #[serde(flatten)]
    pub fault: Fault,
}

impl Faults {
    pub fn add(&mut self, fault: Fault) -> Result<u64, regex::Error> {
        let path = fault
            .path
            .as_deref()
            .map(|path| RegexBuilder::new(path).case_insensitive(true).build())
            .transpose()?;
        self.next += 1;
        self.armed.push(Armed {
            id: self.next,
            fault,
            path,
            seen: 0,
            struck: 0,
        });
        Ok(self.next)
    }

    pub fn remove(&mut self, id: u64) -> bool {
        let before = self.armed.len();
        self.armed.retain(|armed| armed.id != id);
        self.armed.len() < before
    }

    pub fn clear(&mut self) {
        self.armed.clear();
    }

    pub fn list(&self) -> Vec<Standing> {
        let standing = |armed: &Armed| Standing {
            id: armed.id,
            seen: armed.seen,
            struck: armed.struck,
            fault: armed.fault.clone(),
        };
        self.armed.iter().map(standing).collect()
    }

    /// Returns the actions for this call.
    pub fn strike(&mut self, call: &Call, policy: &str) -> Vec<Action> {
        let by_call = |armed: &&mut Armed| {
            !matches!(
                armed.fault.action,
                Action::NoCapacity { .. } | Action::FailProvisioning { .. } | Action::NeverJoin
            )
        };
        let matching = self
            .armed
            .iter_mut()
            .filter(by_call)
            .filter(|armed| armed.matches(call, policy));
        matching
            .filter_map(|armed| armed.strike().then(|| armed.fault.action.clone()))
            .collect()
    }

    /// Returns the reason for which the VM or instance with this id will fail, if it will.
    pub fn fail_provisioning(&mut self, method: &str, id: &str) -> Option<Fail> {
        let armed = self.armed.iter_mut().find(|armed| {
            let fault = &armed.fault;
            matches!(fault.action, Action::FailProvisioning { .. })
                && fault
                    .method
                    .as_ref()
                    .is_none_or(|wanted| wanted.eq_ignore_ascii_case(method))
                && armed.path.as_ref().is_none_or(|path| path.is_match(id))
        })?;
        if !armed.strike() {
            return None;
        }
        match &armed.fault.action {
            Action::FailProvisioning { code, message } => Some(Fail::conflict(code, message)),
            _ => None,
        }
    }

    /// The same for a disk, an interface, an address or a scale set: only where a rule names its path.
    pub fn fail_resource(&mut self, method: &str, id: &str) -> Option<Fail> {
        let named = |armed: &Armed| {
            matches!(armed.fault.action, Action::FailProvisioning { .. })
                && armed.path.as_ref().is_some_and(|path| path.is_match(id))
        };
        if self.armed.iter().any(named) {
            self.fail_provisioning(method, id)
        } else {
            None
        }
    }

    /// Whether the Node of the VM or instance with this id never joins.
    pub fn never_joins(&mut self, id: &str) -> bool {
        let mut armed = self.armed.iter_mut();
        let armed = armed.find(|armed| {
            armed.fault.action == Action::NeverJoin && armed.path.as_ref().is_none_or(|path| path.is_match(id))
        });
        armed.is_some_and(Armed::strike)
    }

    /// Returns the error of a lack of capacity for one more VM of this size in this zone, if there is a lack.
    pub fn no_capacity(&mut self, call: &Call, size: &str, zone: Option<&str>, location: &str) -> Option<Fail> {
        let armed = self.armed.iter_mut().find(|armed| match &armed.fault.action {
            Action::NoCapacity { zone: z, vm_size, .. } => {
                z.as_deref().is_none_or(|z| Some(z) == zone)
                    && vm_size
                        .as_deref()
                        .is_none_or(|wanted| wanted.eq_ignore_ascii_case(size))
                    && armed.matches(call, "")
            }
            _ => false,
        })?;
        if !armed.strike() {
            return None;
        }
        let Action::NoCapacity { code, .. } = &armed.fault.action else {
            return None;
        };
        let default = if zone.is_some() {
            "ZonalAllocationFailed"
        } else {
            "AllocationFailed"
        };
        Some(allocation(code.as_deref().unwrap_or(default), size, location))
    }
}

/// Returns Azure's error for a lack of capacity.
fn allocation(code: &str, size: &str, location: &str) -> Fail {
    let message = match code {
        "SkuNotAvailable" => format!(
            "The requested VM size for resource 'Following SKUs have failed for Capacity Restrictions: {size}' is currently not \
             available in location '{location}'. Please try another size or deploy to a different location or different zone. \
             See https://aka.ms/azureskunotavailable for details."
        ),
        "ZonalAllocationFailed" => "Allocation failed. We do not have sufficient capacity for the requested VM size in this \
             zone. Read more about improving likelihood of allocation success at http://aka.ms/allocation-guidance"
            .into(),
        _ => "Allocation failed. We do not have sufficient capacity for the requested VM size in this region. Read more about \
             improving likelihood of allocation success at http://aka.ms/allocation-guidance"
            .into(),
    };
    Fail::conflict(code, message)
}

/// Returns the answer of an [`Action::Answer`], with ARM's message where none is given.
pub fn refusal(status: u16, code: Option<&str>, message: Option<&str>, retry_after: Option<u64>) -> Fail {
    let (default_code, default_message) = match status {
        429 => (
            "TooManyRequests",
            "The request is being throttled as the limit has been reached for this operation.",
        ),
        409 => (
            "Conflict",
            "The request failed due to conflict with a concurrent request. Please retry later.",
        ),
        503 => (
            "ServiceUnavailable",
            "The service is temporarily unavailable. Please retry later.",
        ),
        500 => ("InternalServerError", "An internal error occurred. Please retry later."),
        504 => ("GatewayTimeout", "The gateway did not receive a response in time."),
        404 => ("NotFound", "The entity was not found."),
        403 => (
            "AuthorizationFailed",
            "The client does not have authorization to perform the action over the scope.",
        ),
        401 => ("AuthenticationFailed", "Authentication failed."),
        _ => ("BadRequest", "The request is refused."),
    };
    let mut fail = Fail::new(status, code.unwrap_or(default_code), message.unwrap_or(default_message));
    if status == 429 && code.is_none() {
        fail.code = "OperationNotAllowed".into();
        fail.details = vec![serde_json::json!({ "code": "TooManyRequests", "message": default_message })];
    }
    fail.retry_after = retry_after;
    fail
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderMap, Method};

    fn call(method: Method, path: &str) -> Call {
        Call::new(method, path, HeaderMap::new(), bytes::Bytes::new(), String::new())
    }

    #[test]
    fn a_rule_strikes_from_the_nth_matching_call_and_only_so_often() {
        let mut faults = Faults::default();
        faults
            .add(
                Fault::answer(500)
                    .method("PUT")
                    .path("/virtualMachines/[^/]+$")
                    .skip(1)
                    .times(2),
            )
            .unwrap();
        let mut struck = Vec::new();
        for _ in 0..5 {
            assert!(
                faults
                    .strike(&call(Method::GET, "/x/virtualmachines/a"), "GetVM")
                    .is_empty()
            );
            struck.push(
                !faults
                    .strike(&call(Method::PUT, "/x/virtualmachines/a"), "PutVM")
                    .is_empty(),
            );
        }
        assert_eq!(struck, [false, true, true, false, false]);
    }

    #[test]
    fn a_full_zone_refuses_only_its_own() {
        let mut faults = Faults::default();
        faults
            .add(Fault::new(Action::NoCapacity {
                zone: Some("2".into()),
                vm_size: None,
                code: None,
            }))
            .unwrap();
        let put = call(Method::PUT, "/x");
        assert!(
            faults
                .no_capacity(&put, "Standard_D2s_v3", Some("1"), "eastus")
                .is_none()
        );
        let refused = faults
            .no_capacity(&put, "Standard_D2s_v3", Some("2"), "eastus")
            .unwrap();
        assert_eq!(refused.code, "ZonalAllocationFailed");
    }
}
