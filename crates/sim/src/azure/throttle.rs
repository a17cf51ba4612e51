//! Azure's published limits as token buckets: Resource Manager's own per subscription and principal, and Compute's per
//! resource and per subscription and region.

use std::collections::HashMap;
use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::time::Instant;

use super::wire::{Answer, Call, Fail};

/// Refill per minute and size of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub per_minute: u32,
    pub max: u32,
}

const fn limit(per_minute: u32, max: u32) -> Limit {
    Limit { per_minute, max }
}

/// Compute's limits of a policy: per resource (where there is one), then per subscription and region.
pub fn compute(policy: &str) -> Option<(Option<Limit>, Limit)> {
    Some(match policy {
        "PutVM" | "UpdateVM" | "DeleteVM" => (Some(limit(4, 12)), limit(500, 1500)),
        "GetVM" => (Some(limit(12, 36)), limit(8000, 24000)),
        "ListVMs" => (None, limit(300, 900)),
        "GetOperation" => (Some(limit(15, 45)), limit(5000, 15000)),
        "PutVMScaleSet" => (Some(limit(4, 12)), limit(125, 375)),
        "UpdateVMScaleSet" => (Some(limit(4, 12)), limit(500, 1500)),
        "DeleteVMScaleSet" => (Some(limit(4, 12)), limit(175, 525)),
        "GetVMScaleSet" => (Some(limit(12, 36)), limit(800, 2400)),
        "GetVMScaleSetInstanceView" | "ListVMScaleSets" | "ListVMScaleSetVMs" => {
            (Some(limit(10, 30)), limit(360, 1080))
        }
        "UpdateVMScaleSetVMs" | "DeleteVMScaleSetVMs" => (Some(limit(4, 12)), limit(500, 1500)),
        "GetVMScaleSetVM" => (Some(limit(12, 36)), limit(2000, 6000)),
        _ => return None,
    })
}

/// Resource Manager's limits: 25 reads and 10 writes or deletes a second.
fn arm(method: &Method) -> (&'static str, Limit) {
    match *method {
        Method::GET | Method::HEAD => ("x-ms-ratelimit-remaining-subscription-reads", limit(1500, 250)),
        Method::DELETE => ("x-ms-ratelimit-remaining-subscription-deletes", limit(600, 200)),
        _ => ("x-ms-ratelimit-remaining-subscription-writes", limit(600, 200)),
    }
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    level: f64,
    at: Instant,
}

#[derive(Default)]
pub struct Buckets {
    levels: HashMap<String, Bucket>,
}

impl Buckets {
    /// Takes a token. Returns the time until there is one, where there is none.
    fn take(&mut self, name: String, limit: Limit, now: Instant) -> Result<u32, Duration> {
        let rate = f64::from(limit.per_minute) / 60.0;
        let bucket = self.levels.entry(name).or_insert(Bucket {
            level: f64::from(limit.max),
            at: now,
        });
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        bucket.level = (bucket.level + passed * rate).min(f64::from(limit.max));
        bucket.at = now;
        if bucket.level < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.level) / rate));
        }
        bucket.level -= 1.0;
        Ok(bucket.level as u32)
    }

    /// Counts a call in every bucket that it belongs to. Returns the headers with the remaining calls, also with a
    /// refusal.
    pub fn count(&mut self, call: &Call, policy: &str, region: &str, now: Instant) -> Result<Headers, Box<Refusal>> {
        let subscription = call.segment(1).to_lowercase();
        let (header, arm_limit) = arm(&call.method);
        let left = self
            .take(format!("{subscription}/{header}"), arm_limit, now)
            .map_err(|wait| {
                let fail = refused("SubscriptionRequestsThrottled", policy, wait);
                let headers = vec![(header, "0".to_owned())];
                Box::new(Refusal { fail, headers })
            })?;
        let mut headers = vec![(header, left.to_string())];
        let Some((per_resource, per_region)) = compute(policy).filter(|_| !of_network(call)) else {
            return Ok(headers);
        };
        let of_resource = per_resource.map(|limit| {
            let key = format!("{}/{policy}", resource(&call.key, policy));
            (key, limit, format!("{policy}Resource"))
        });
        let of_region = (
            format!("{subscription}/{region}/{policy}"),
            per_region,
            format!("{policy}SubscriptionMaximum"),
        );
        let mut remaining = Vec::new();
        for (key, limit, name) in of_resource.into_iter().chain([of_region]) {
            let taken = self.take(key, limit, now);
            let left = taken.as_ref().copied().unwrap_or_default();
            remaining.push(format!("Microsoft.Compute/{name};{left}"));
            if let Err(wait) = taken {
                headers.push((REMAINING, remaining.join(",")));
                let fail = refused("OperationNotAllowed", &name, wait);
                return Err(Box::new(Refusal { fail, headers }));
            }
        }
        headers.push((REMAINING, remaining.join(",")));
        Ok(headers)
    }
}

pub type Headers = Vec<(&'static str, String)>;

/// A call beyond a limit.
#[derive(Debug)]
pub struct Refusal {
    fail: Fail,
    headers: Headers,
}

impl Refusal {
    pub fn answer(self) -> Answer {
        let mut answer = self.fail.answer();
        answer.headers.extend(self.headers);
        answer
    }
}

/// What remains of Compute's buckets, as one value joined by commas.
pub const REMAINING: &str = "x-ms-ratelimit-remaining-resource";

/// Returns the remaining calls without throttling.
pub fn full(call: &Call) -> Headers {
    let (header, limit) = arm(&call.method);
    vec![(header, (limit.max - 1).to_string())]
}

/// Whether Network answers a call: about its own operations, and about interfaces, also those of instances.
fn of_network(call: &Call) -> bool {
    call.key.contains("/providers/microsoft.network/") || call.key.contains("/networkinterfaces")
}

/// The resource whose bucket a call empties: the scale set itself for calls on its instances as a batch or list.
fn resource<'a>(key: &'a str, policy: &str) -> &'a str {
    match policy {
        "ListVMScaleSetVMs" | "GetVMScaleSetInstanceView" => key.rsplit_once('/').map_or(key, |(set, _)| set),
        _ => key,
    }
}

fn refused(code: &str, bucket: &str, wait: Duration) -> Fail {
    let message = "The server rejected the request because too many requests have been received for this subscription.";
    let message = message.to_owned();
    let mut fail = Fail::new(429, code, message.clone()).after(wait.as_secs_f64().ceil().max(1.0) as u64);
    fail.details = vec![json!({ "code": "TooManyRequests", "target": bucket, "message": message })];
    fail
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> Call {
        Call::new(Method::GET, path, Default::default(), Default::default(), String::new())
    }

    #[test]
    fn a_vm_read_too_often_is_refused_until_its_bucket_fills_again() {
        let (mut buckets, now) = (Buckets::default(), Instant::now());
        let call = get("/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a");
        for _ in 0..36 {
            buckets.count(&call, "GetVM", "eastus", now).unwrap();
        }
        let refused = buckets.count(&call, "GetVM", "eastus", now).unwrap_err();
        assert_eq!((refused.fail.status, refused.fail.retry_after), (429, Some(5)));
        assert_eq!(refused.headers[1].1, "Microsoft.Compute/GetVMResource;0");
        let now = now + Duration::from_secs(5);
        let headers = buckets.count(&call, "GetVM", "eastus", now).unwrap();
        assert!(
            headers[1]
                .1
                .starts_with("Microsoft.Compute/GetVMResource;0,Microsoft.Compute/GetVMSubscriptionMaximum;")
        );
        let other = get("/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/b");
        buckets.count(&other, "GetVM", "eastus", now).unwrap();
    }
}
