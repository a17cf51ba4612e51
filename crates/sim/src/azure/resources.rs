//! The operations of Resource Manager for every kind: groups, providers, lists, tags, and resources without rules of
//! their own.

use std::collections::BTreeMap;

use http::Method;
use serde_json::{Value, json};

use super::config::{Config, Network};
use super::wire::{Answer, Call, Fail, Reply, merge, same, text};
use super::world::{Doc, UNLISTED, World};

/// Provider namespaces a subscription knows.
const PROVIDERS: [&str; 8] = [
    "Microsoft.Authorization",
    "Microsoft.Compute",
    "Microsoft.ContainerService",
    "Microsoft.KeyVault",
    "Microsoft.ManagedIdentity",
    "Microsoft.Network",
    "Microsoft.Resources",
    "Microsoft.Storage",
];

/// Kinds whose names Azure always spells in its own case.
const KINDS: [&str; 20] = [
    "availabilitySets",
    "capacityReservationGroups",
    "disks",
    "diskEncryptionSets",
    "galleries",
    "images",
    "snapshots",
    "virtualMachines",
    "virtualMachineScaleSets",
    "applicationSecurityGroups",
    "loadBalancers",
    "natGateways",
    "networkInterfaces",
    "networkSecurityGroups",
    "publicIPAddresses",
    "publicIPPrefixes",
    "routeTables",
    "virtualNetworks",
    "subnets",
    "userAssignedIdentities",
];

pub fn providers(config: &Config) -> BTreeMap<String, bool> {
    let registered = |name: &&str| !config.unregistered.iter().any(|unregistered| same(unregistered, name));
    PROVIDERS
        .iter()
        .map(|name| (name.to_lowercase(), registered(name)))
        .collect()
}

/// Azure's own spelling of a provider namespace.
fn provider_name(name: &str) -> String {
    PROVIDERS
        .iter()
        .find(|known| same(known, name))
        .map_or(name.to_owned(), |known| (*known).to_owned())
}

fn kind_name(name: &str) -> String {
    KINDS
        .iter()
        .find(|known| same(known, name))
        .map_or(name.to_owned(), |known| (*known).to_owned())
}

/// A resource's place, read off its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub subscription: String,
    pub group: String,
    pub namespace: String,
    pub kind: String,
    pub name: String,
}

impl Place {
    /// The place of the resource (not its parts or actions) that the path leads to.
    pub fn of(call: &Call) -> Self {
        Self {
            subscription: call.segment(1).to_owned(),
            group: call.segment(3).to_owned(),
            namespace: provider_name(call.segment(5)),
            kind: kind_name(call.segment(6)),
            name: call.segment(7).to_owned(),
        }
    }

    pub fn sibling(&self, namespace: &str, kind: &str, name: &str) -> Self {
        Self {
            namespace: namespace.into(),
            kind: kind.into(),
            name: name.into(),
            ..self.clone()
        }
    }

    pub fn id(&self) -> String {
        let Self {
            subscription,
            group,
            namespace,
            kind,
            name,
        } = self;
        format!("/subscriptions/{subscription}/resourceGroups/{group}/providers/{namespace}/{kind}/{name}")
    }

    pub fn key(&self) -> String {
        self.id().to_lowercase()
    }

    /// The first fields of every document.
    pub fn head(&self) -> Value {
        json!({ "name": self.name, "id": self.id(), "type": format!("{}/{}", self.namespace, self.kind) })
    }

    pub fn not_found(&self) -> Fail {
        let Self {
            group,
            namespace,
            kind,
            name,
            ..
        } = self;
        let message = format!(
            "The Resource '{namespace}/{kind}/{name}' under resource group '{group}' was not found. For more details please go to \
             https://aka.ms/ARMResourceNotFoundFix"
        );
        Fail::new(404, "ResourceNotFound", message)
    }
}

impl World {
    /// Creates a resource group with a network in it.
    pub fn make_network(&mut self, network: &Network) {
        let group = format!(
            "/subscriptions/{}/resourceGroups/{}",
            self.config.subscription, network.group
        );
        self.put_group(&group, &json!({ "location": network.location }));
        let vnet = format!("{group}/providers/Microsoft.Network/virtualNetworks/{}", network.vnet);
        let subnets: Vec<Value> = network
            .subnets
            .iter()
            .enumerate()
            .map(|(i, name)| {
                json!({ "name": name, "id": format!("{vnet}/subnets/{name}"),
                    "properties": { "addressPrefix": format!("10.{i}.0.0/16"), "provisioningState": "Succeeded" } })
            })
            .collect();
        let body = json!({ "name": network.vnet, "id": vnet, "type": "Microsoft.Network/virtualNetworks", "location": network.location,
            "properties": { "provisioningState": "Succeeded", "addressSpace": { "addressPrefixes": ["10.0.0.0/8"] }, "subnets": subnets } });
        self.docs.insert(vnet.to_lowercase(), Doc::new(body));
    }

    fn put_group(&mut self, id: &str, body: &Value) -> bool {
        let name = id.rsplit('/').next().unwrap_or_default();
        let fresh = !self.docs.contains_key(&id.to_lowercase());
        let doc = self.docs.entry(id.to_lowercase()).or_insert_with(|| {
            Doc::new(
                json!({ "id": id, "name": name, "type": "Microsoft.Resources/resourceGroups",
                "properties": { "provisioningState": "Succeeded" } }),
            )
        });
        merge(&mut doc.body, body);
        doc.version += 1;
        fresh
    }

    /// `/subscriptions/{s}/resourceGroups…`, without providers.
    pub fn groups(&mut self, call: &Call) -> Reply {
        if call.segments.len() == 3 {
            let prefix = format!("{}/", call.key);
            let keys = self
                .keys(&prefix)
                .into_iter()
                .filter(|key| !key[prefix.len()..].contains('/'))
                .collect();
            return self.page(call, keys, |key| self.docs.get(key).map(|doc| doc.body.clone()));
        }
        if call.segment(4) == "resources" {
            self.group(call)?;
            let prefix = format!("{}/providers/", call.key.trim_end_matches("/resources"));
            return self.page(call, self.keys(&prefix), |key| {
                self.docs.get(key).map(|doc| summary(&doc.body))
            });
        }
        let found = self.docs.get(&call.key);
        match (&call.method, found) {
            (&Method::GET, Some(doc)) => Ok(Answer::ok(doc.body.clone())),
            (&Method::HEAD, Some(_)) => Ok(Answer::no_content()),
            (&Method::PUT | &Method::PATCH, _) => {
                let id = format!("/subscriptions/{}/resourceGroups/{}", call.segment(1), call.segment(3));
                let fresh = self.put_group(&id, &call.body);
                let body = self.docs[&call.key].body.clone();
                Ok(if fresh { Answer::created(body) } else { Answer::ok(body) })
            }
            (&Method::DELETE, Some(_)) => {
                self.delete_group(&call.key);
                Ok(Answer::empty())
            }
            _ => Err(group_not_found(call.segment(3))),
        }
    }

    fn delete_group(&mut self, key: &str) {
        let prefix = format!("{key}/");
        for key in self.keys(&prefix) {
            self.touch(&key);
            self.docs.remove(&key);
        }
        let sets: Vec<String> = self
            .fleets
            .keys()
            .filter(|set| set.starts_with(&prefix))
            .cloned()
            .collect();
        for set in sets {
            self.set_removed(&set);
        }
        self.docs.remove(key);
    }

    /// The group a path leads through must exist.
    pub fn group(&self, call: &Call) -> Result<&Doc, Fail> {
        let key: Vec<&str> = call.key.split('/').take(5).collect();
        self.docs
            .get(&key.join("/"))
            .ok_or_else(|| group_not_found(call.segment(3)))
    }

    /// `/subscriptions/{s}/providers[/{namespace}[/register]]`.
    pub fn provider(&mut self, call: &Call) -> Reply {
        let describe = |name: &str, registered: bool, subscription: &str| {
            let name = provider_name(name);
            json!({ "id": format!("/subscriptions/{subscription}/providers/{name}"), "namespace": name, "resourceTypes": [],
                "registrationPolicy": "RegistrationRequired",
                "registrationState": if registered { "Registered" } else { "NotRegistered" } })
        };
        let subscription = call.segment(1).to_owned();
        let name = call.segment(3).to_lowercase();
        if name.is_empty() {
            let all: Vec<Value> = self
                .providers
                .iter()
                .map(|(name, registered)| describe(name, *registered, &subscription))
                .collect();
            return Ok(Answer::ok(json!({ "value": all })));
        }
        if let (&Method::POST, action @ ("register" | "unregister")) =
            (&call.method, call.segment(4).to_lowercase().as_str())
        {
            self.providers.insert(name.clone(), action == "register");
        }
        match self.providers.get(&name) {
            Some(registered) => Ok(Answer::ok(describe(&name, *registered, &subscription))),
            None => Err(Fail::new(
                404,
                "InvalidResourceNamespace",
                format!("The resource namespace '{}' is invalid.", call.segment(3)),
            )),
        }
    }

    /// A namespace must be registered before its resources are written.
    pub fn registered(&self, call: &Call, namespace: &str) -> Result<(), Fail> {
        if call.method == Method::GET || self.providers.get(&namespace.to_lowercase()).copied().unwrap_or(true) {
            return Ok(());
        }
        let name = provider_name(namespace);
        let message = format!(
            "The subscription is not registered to use namespace '{name}'. See https://aka.ms/rps-not-found for how to register subscriptions."
        );
        let mut fail = Fail::conflict("MissingSubscriptionRegistration", message.clone());
        fail.details = vec![json!({ "code": "MissingSubscriptionRegistration", "target": name, "message": message })];
        Err(fail)
    }

    /// All resources of a kind in a subscription.
    pub fn list_everywhere(&self, call: &Call) -> Reply {
        let infix = format!(
            "/providers/{}/{}/",
            call.segment(3).to_lowercase(),
            call.segment(4).to_lowercase()
        );
        let prefix = format!("/subscriptions/{}/resourcegroups/", call.segment(1).to_lowercase());
        let direct = |key: &String| key.split_once(&infix).is_some_and(|(_, name)| !name.contains('/'));
        let keys = self.keys(&prefix).into_iter().filter(direct);
        let keys = keys.filter(|key| self.is_listed(key)).collect();
        self.page(call, keys, |key| self.render(key, call).filter(|body| fits(body, call)))
    }

    /// All resources of a kind in a group.
    pub fn list(&self, call: &Call) -> Reply {
        let prefix = format!("{}/", call.key);
        let keys = self
            .keys(&prefix)
            .into_iter()
            .filter(|key| !key[prefix.len()..].contains('/') && self.is_listed(key))
            .collect();
        self.page(call, keys, |key| self.render(key, call).filter(|body| fits(body, call)))
    }

    fn is_listed(&self, key: &str) -> bool {
        self.docs.get(key).is_none_or(|doc| !doc.hidden.contains_key(UNLISTED))
    }

    /// Kinds without rules of their own are stored as they come.
    pub fn generic(&mut self, call: &Call) -> Reply {
        let last = call.segments.len().saturating_sub(1);
        let named = (last - 5).is_multiple_of(2);
        if !named {
            return self.list(call);
        }
        let not_found = || Place::of(call).not_found();
        match call.method {
            Method::GET | Method::HEAD => self
                .docs
                .get(&call.key)
                .map(|doc| Answer::ok(doc.body.clone()))
                .ok_or_else(not_found),
            Method::PUT | Method::PATCH => {
                let fresh = !self.docs.contains_key(&call.key);
                if fresh && call.method == Method::PATCH {
                    return Err(not_found());
                }
                if text(&call.body, "/location") == Some("") {
                    return Err(Fail::bad(
                        "LocationRequired",
                        "The location property is required for this definition.",
                    ));
                }
                self.precondition(call, self.docs.get(&call.key).map(|doc| doc.version))?;
                let doc = self.docs.entry(call.key.clone()).or_default();
                merge(&mut doc.body, &call.body);
                let kinds: Vec<String> = call
                    .segments
                    .iter()
                    .skip(6)
                    .step_by(2)
                    .map(|kind| kind_name(kind))
                    .collect();
                doc.body["id"] = json!(call.path);
                doc.body["name"] = json!(call.segment(last));
                doc.body["type"] = json!(format!("{}/{}", provider_name(call.segment(5)), kinds.join("/")));
                doc.set_state("Succeeded");
                Ok(if fresh {
                    Answer::created(doc.body.clone())
                } else {
                    Answer::ok(doc.body.clone())
                })
            }
            Method::DELETE => {
                let prefix = format!("{}/", call.key);
                self.docs.retain(|key, _| !key.starts_with(&prefix));
                Ok(if self.docs.remove(&call.key).is_some() {
                    Answer::empty()
                } else {
                    Answer::no_content()
                })
            }
            _ => Err(Fail::new(
                405,
                "MethodNotAllowed",
                format!("{} is not possible on {}.", call.method, call.path),
            )),
        }
    }

    /// `{scope}/providers/Microsoft.Resources/tags/default`.
    pub fn tags(&mut self, call: &Call) -> Reply {
        let scope = call
            .key
            .trim_end_matches("/providers/microsoft.resources/tags/default")
            .to_owned();
        let path = call.path.clone();
        let doc = self.docs.get_mut(&scope).ok_or_else(|| {
            Fail::new(
                404,
                "ResourceNotFound",
                format!("The resource '{scope}' was not found; no tags can be set on it."),
            )
        })?;
        let given = call
            .body
            .pointer("/properties/tags")
            .cloned()
            .unwrap_or_else(|| json!({}));
        let mut tags = doc.body.get("tags").cloned().unwrap_or_else(|| json!({}));
        match call.method {
            Method::GET => {}
            Method::DELETE => tags = json!({}),
            Method::PATCH => match (text(&call.body, "/operation").unwrap_or("Merge"), &mut tags, &given) {
                ("Delete", Value::Object(tags), Value::Object(given)) => {
                    tags.retain(|name, value| given.get(name) != Some(value));
                }
                ("Replace", tags, given) => *tags = given.clone(),
                (_, Value::Object(tags), Value::Object(given)) => tags.extend(given.clone()),
                _ => {}
            },
            _ => tags = given,
        }
        if call.method != Method::GET {
            doc.body["tags"] = tags.clone();
            doc.version += 1;
        }
        if call.method == Method::DELETE {
            return Ok(Answer::empty());
        }
        Ok(Answer::ok(
            json!({ "id": path, "name": "default", "type": "Microsoft.Resources/tags", "properties": { "tags": tags } }),
        ))
    }
}

fn group_not_found(name: &str) -> Fail {
    Fail::new(
        404,
        "ResourceGroupNotFound",
        format!("Resource group '{name}' could not be found."),
    )
}

fn summary(body: &Value) -> Value {
    let names = ["id", "name", "type", "location", "tags", "zones", "sku"];
    names
        .iter()
        .filter_map(|name| body.get(*name).map(|value| ((*name).to_owned(), value.clone())))
        .collect()
}

/// The one filter Azure's virtual machine list knows.
fn fits(body: &Value, call: &Call) -> bool {
    let Some(filter) = call
        .query
        .get("$filter")
        .filter(|filter| filter.to_lowercase().contains("virtualmachinescaleset/id"))
    else {
        return true;
    };
    let wanted = filter
        .split('\'')
        .rfind(|part| part.starts_with('/'))
        .unwrap_or_default();
    text(body, "/properties/virtualMachineScaleSet/id").is_some_and(|set| same(set, wanted))
}
