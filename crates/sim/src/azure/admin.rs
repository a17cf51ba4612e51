//! The admin API under `/sim`: faults, counters, requests, time, and changes that no controller makes.

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::clock::duration;
use super::config::{Strict, Times};
use super::faults::Fault;
use super::server::{Core, Shared};
use super::wire::{Answer, Call, merge, text};

pub fn handle(shared: &Shared, call: &Call) -> Answer {
    let answer = {
        let mut core = shared.lock();
        if !allowed(core.world.config.admin_token.as_deref(), call) {
            let why = json!({ "error": "the admin API needs the token that --admin-token gave" });
            return Answer::new(StatusCode::UNAUTHORIZED, why);
        }
        act(&mut core, call).unwrap_or_else(|why| Answer::new(StatusCode::BAD_REQUEST, json!({ "error": why })))
    };
    shared.wake.notify_one();
    shared.changed.notify_one();
    answer
}

fn allowed(token: Option<&str>, call: &Call) -> bool {
    let Some(token) = token else { return true };
    let given = call
        .header("authorization")
        .and_then(|value| value.strip_prefix("Bearer "));
    given.is_some_and(|given| {
        // All bytes are compared, so that the time taken reveals nothing.
        let differences = given
            .bytes()
            .zip(token.bytes())
            .fold(0, |all, (one, other)| all | (one ^ other));
        given.len() == token.len() && differences == 0
    })
}

fn act(core: &mut Core, call: &Call) -> Result<Answer, String> {
    let done = || Ok(Answer::no_content());
    match (&call.method, call.segment(1), call.segment(2)) {
        (&Method::GET, "requests", _) => Ok(Answer::ok(json!({ "value": core.log.all() }))),
        (&Method::DELETE, "requests", _) => {
            core.log.clear();
            done()
        }
        (&Method::GET, "counters", _) => Ok(Answer::ok(counters(core))),
        (&Method::GET, "faults", _) => Ok(Answer::ok(json!({ "value": core.world.faults.list() }))),
        (&Method::POST, "faults", "") => {
            let fault: Fault = serde_json::from_value(call.body.clone()).map_err(|e| e.to_string())?;
            let id = core.world.faults.add(fault).map_err(|e| e.to_string())?;
            Ok(Answer::created(json!({ "id": id })))
        }
        (&Method::DELETE, "faults", "") => {
            core.world.faults.clear();
            done()
        }
        (&Method::DELETE, "faults", id) => {
            core.world
                .faults
                .remove(id.parse().map_err(|_| format!("{id:?} is not the id of a fault"))?);
            done()
        }
        (&Method::POST, "release", _) => Ok(Answer::ok(json!({ "released": core.world.release() }))),
        (&Method::GET, "time", _) => Ok(Answer::ok(json!({ "time": core.world.clock.stamp() }))),
        (&Method::POST, "time", _) => {
            let by = text(&call.body, "/advance").ok_or("give the time to add, as {\"advance\": \"60s\"}")?;
            core.world.clock.advance(duration(by)?);
            core.world.advance();
            Ok(Answer::ok(json!({ "time": core.world.clock.stamp() })))
        }
        (&Method::GET, "times", _) => Ok(Answer::ok(json!(core.world.config.times))),
        (&Method::PUT | &Method::PATCH, "times", _) => {
            let mut times = json!(core.world.config.times);
            merge(&mut times, &call.body);
            core.world.config.times = serde_json::from_value::<Times>(times).map_err(|e| e.to_string())?;
            Ok(Answer::ok(json!(core.world.config.times)))
        }
        (&Method::PATCH, "settings", _) => settings(core, &call.body),
        (&Method::POST, "evict", _) => {
            let id = named(&call.body)?;
            core.world.evicted(&id.to_lowercase());
            done()
        }
        (&Method::POST, "delete", _) => {
            let id = named(&call.body)?;
            if core.world.vanish(id) {
                done()
            } else {
                Err(format!("there is no resource {id}"))
            }
        }
        (&Method::POST, "revoke", _) => {
            core.tokens.revoke();
            done()
        }
        (&Method::GET, "state", _) => Ok(Answer::ok(json!({ "ids": core.world.docs.keys().collect::<Vec<_>>() }))),
        _ => Err(format!(
            "{} {} is not part of the admin API; see docs/sim-azure.md",
            call.method, call.path
        )),
    }
}

fn named(body: &Value) -> Result<&str, String> {
    text(body, "/id").ok_or_else(|| "give the resource as {\"id\": \"/subscriptions/…\"}".into())
}

fn counters(core: &Core) -> Value {
    let instances: usize = core.world.fleets.values().map(|fleet| fleet.instances.len()).sum();
    let statuses: serde_json::Map<String, Value> = core
        .log
        .statuses
        .iter()
        .map(|(status, count)| (status.to_string(), json!(count)))
        .collect();
    json!({ "policies": core.log.counts, "statuses": statuses, "signIns": core.tokens.sign_ins,
        "resources": core.world.docs.len(), "instances": instances,
        "operations": core.world.operations.values().filter(|operation| operation.end.is_none()).count() })
}

/// Settings that can change while the simulator runs.
fn settings(core: &mut Core, body: &Value) -> Result<Answer, String> {
    let config = &mut core.world.config;
    for (name, value) in body.as_object().ok_or("give an object")? {
        if name == "allowedActions" {
            config.allowed_actions = serde_json::from_value(value.clone()).map_err(|error| error.to_string())?;
            continue;
        }
        let number = value.as_u64();
        match (name.as_str(), number, value.as_bool()) {
            ("throttle", _, Some(on)) => config.throttle = on,
            ("strict", _, Some(on)) => config.strict = if on { Strict::ALL } else { Strict::NONE },
            ("retryAfter", Some(seconds), _) => config.retry_after = seconds,
            ("networkRetryAfter", Some(seconds), _) => config.network_retry_after = seconds,
            ("pageSize", Some(size), _) => config.page_size = size.max(1) as usize,
            ("regionalCores", Some(cores), _) => config.regional_cores = cores,
            ("familyCores", Some(cores), _) => config.family_cores = Some(cores),
            _ => return Err(format!("{name} = {value}: no such setting, or not a value for it")),
        }
    }
    Ok(Answer::no_content())
}
