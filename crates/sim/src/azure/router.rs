//! The handler of each path.

use http::Method;
use serde_json::{Value, json};

use super::access;
use super::compute::skus;
use super::tokens::{self, Tokens};
use super::wire::{Answer, Call, Fail, Reply};
use super::world::World;

/// Handles a call; `Unguarded` paths need no token.
pub fn route(world: &mut World, tokens: &mut Tokens, call: &Call) -> Reply {
    let key = call.key.as_str();
    if key.ends_with("/oauth2/v2.0/token") || (key.ends_with("/oauth2/token") && !key.starts_with("/metadata")) {
        return tokens.token(world, call);
    }
    if key.ends_with("/.well-known/openid-configuration") {
        return tokens::openid(call);
    }
    match key {
        "/metadata/identity/oauth2/token" => return tokens.managed(world, call),
        "/metadata/endpoints" => return tokens::endpoints(call),
        "/common/discovery/instance" => return tokens::instance_discovery(call),
        _ => {}
    }
    if world.config.require_token {
        tokens.check(call, world.now())?;
    }
    match call.segment(0).to_lowercase().as_str() {
        "subscriptions" => subscriptions(world, call),
        "tenants" => Ok(Answer::ok(
            json!({ "value": [{ "id": format!("/tenants/{}", world.config.tenant), "tenantId": world.config.tenant }] }),
        )),
        "providers" => Ok(Answer::ok(json!({ "value": [] }))),
        _ => Err(Fail::new(
            404,
            "InvalidResourceType",
            format!("There is nothing at {}.", call.path),
        )),
    }
}

fn subscriptions(world: &mut World, call: &Call) -> Reply {
    let known = world.config.subscription.clone();
    let describe = || {
        json!({ "id": format!("/subscriptions/{known}"), "subscriptionId": known, "tenantId": world.config.tenant,
            "displayName": "Simulated", "state": "Enabled", "authorizationSource": "RoleBased",
            "subscriptionPolicies": { "locationPlacementId": "Public_2014-09-01", "quotaId": "PayAsYouGo_2014-09-01", "spendingLimit": "Off" } })
    };
    if call.segments.len() == 1 {
        return Ok(Answer::ok(json!({ "value": [describe()] })));
    }
    access::check(&world.config, call)?;
    if !call.segment(1).eq_ignore_ascii_case(&known) {
        return Err(Fail::new(
            404,
            "SubscriptionNotFound",
            format!("The subscription '{}' could not be found.", call.segment(1)),
        ));
    }
    if call.key.ends_with("/providers/microsoft.resources/tags/default") {
        return world.tags(call);
    }
    match call.segment(2).to_lowercase().as_str() {
        "" => Ok(Answer::ok(describe())),
        "locations" => Ok(Answer::ok(skus::locations(&known))),
        "resources" => world.page(
            call,
            world.keys(&format!("/subscriptions/{}/resourcegroups/", known.to_lowercase())),
            |key| {
                world
                    .docs
                    .get(key)
                    .filter(|_| key.contains("/providers/"))
                    .map(|doc| doc.body.clone())
            },
        ),
        "resourcegroups" if call.segment(4).eq_ignore_ascii_case("providers") => resource(world, call),
        "resourcegroups" => world.groups(call),
        "providers" => provider(world, call),
        _ => Err(Fail::new(
            404,
            "InvalidResourceType",
            format!("There is nothing at {}.", call.path),
        )),
    }
}

fn provider(world: &mut World, call: &Call) -> Reply {
    let kind = call.segment(4).to_lowercase();
    let namespace = call.segment(3).to_lowercase();
    match (
        namespace.as_str(),
        kind.as_str(),
        call.segment(6).to_lowercase().as_str(),
    ) {
        (_, "" | "register" | "unregister", _) => world.provider(call),
        ("microsoft.compute", "skus", _) => skus::list(call),
        (_, "locations", "operations" | "diskoperations") => world.operation(call, call.segment(7), false),
        (_, "locations", "operationresults") => world.operation(call, call.segment(7), true),
        (_, "locations", "usages") => world.usages(call.segment(5)),
        (_, "locations", "vmsizes") => skus::sizes(call.segment(5)),
        (_, "locations", _) => Ok(Answer::ok(json!({ "value": [] }))),
        _ if call.method == Method::GET && call.segments.len() == 5 => {
            let answer = world.list_everywhere(call)?;
            let shouted = world.config.strict.upper_case_groups && namespace == "microsoft.compute";
            Ok(if shouted { upper_case_groups(answer) } else { answer })
        }
        _ => Err(Fail::new(
            404,
            "InvalidResourceType",
            format!("There is nothing at {}.", call.path),
        )),
    }
}

fn resource(world: &mut World, call: &Call) -> Reply {
    world.group(call)?;
    let namespace = call.segment(5).to_lowercase();
    world.registered(call, &namespace)?;
    if call.segments.len() < 7 {
        return Err(Fail::new(
            404,
            "InvalidResourceType",
            format!("There is nothing at {}.", call.path),
        ));
    }
    let bodiless = call.body.is_null() && matches!(call.method, Method::PUT | Method::PATCH);
    if bodiless {
        return Err(Fail::bad(
            "InvalidRequestContent",
            "The request content was invalid and could not be deserialized.",
        ));
    }
    let shouted = world.config.strict.upper_case_groups && call.method == Method::GET && is_shouted(call);
    let answer = match (namespace.as_str(), call.segment(6).to_lowercase().as_str()) {
        ("microsoft.compute", "virtualmachines") => world.vms(call),
        ("microsoft.compute", "virtualmachinescalesets") => world.scale_sets(call),
        ("microsoft.compute", "disks") => world.disks(call),
        ("microsoft.compute", "availabilitysets") => world.availability_sets(call),
        ("microsoft.network", _) => world.network(call),
        _ => world.generic(call),
    }?;
    Ok(if shouted { upper_case_groups(answer) } else { answer })
}

/// Compute spells the resource group in upper case in lists of machines, and wherever instances of scale sets stand.
fn is_shouted(call: &Call) -> bool {
    let is = |i: usize, word: &str| call.segment(i).eq_ignore_ascii_case(word);
    is(5, "Microsoft.Compute")
        && (is(6, "virtualMachines") && call.segments.len() == 7
            || is(6, "virtualMachineScaleSets") && is(8, "virtualMachines"))
}

fn upper_case_groups(mut answer: Answer) -> Answer {
    fn walk(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value {
                        Value::String(id) if name == "id" => *id = shout(id),
                        value => walk(value),
                    }
                }
            }
            Value::Array(items) => items.iter_mut().for_each(walk),
            _ => {}
        }
    }
    walk(&mut answer.body);
    answer
}

/// The id of a resource of Compute with its group in upper case; other ids as they are.
fn shout(id: &str) -> String {
    let parts: Vec<&str> = id.split('/').collect();
    let of_compute = parts
        .get(6)
        .is_some_and(|namespace| namespace.eq_ignore_ascii_case("Microsoft.Compute"));
    let upper = |(i, part): (usize, &&str)| {
        if i == 4 && of_compute {
            part.to_uppercase()
        } else {
            (*part).to_owned()
        }
    };
    parts.iter().enumerate().map(upper).collect::<Vec<_>>().join("/")
}
