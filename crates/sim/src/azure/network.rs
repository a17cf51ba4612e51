//! Microsoft.Network: interfaces, addresses, networks, balancers. A resource in use cannot be deleted.

use http::Method;
use serde_json::{Value, json};

use super::compute::{rules, skus};
use super::operations::Lane;
use super::resources::Place;
use super::wire::{Answer, Call, Fail, Reply, merge, same, text};
use super::world::{Doc, Effect, Range, World};

/// Fixed at the creation of an availability set.
const FIXED_OF_AVAILABILITY_SETS: [&str; 2] = ["platformFaultDomainCount", "platformUpdateDomainCount"];

pub fn nic_in_use(nic: &str, by: &str) -> Fail {
    Fail::bad(
        "NicInUse",
        format!(
            "Network Interface {nic} is used by existing resource {by}. In order to delete the network interface, it must be \
             dissociated from the resource. To learn more, see aka.ms/deletenic."
        ),
    )
}

impl World {
    /// `…/Microsoft.Network/{kind}…`.
    pub fn network(&mut self, call: &Call) -> Reply {
        let kind = call.segment(6).to_lowercase();
        let part = call.segment(8).to_lowercase();
        match (&call.method, call.segments.len(), kind.as_str(), part.as_str()) {
            (&Method::GET, 7, _, _) => self.list(call),
            (_, 9 | 10, "virtualnetworks", "subnets") => self.subnets(call),
            (&Method::GET, 8, _, _) => self
                .render(&call.key, call)
                .map(Answer::ok)
                .ok_or_else(|| Place::of(call).not_found()),
            (&Method::PUT, 8, kind, _) => self.put_network(call, kind),
            (&Method::PATCH, 8, _, _) => self.patch_tags(call),
            (&Method::DELETE, 8, kind, _) => self.delete_network(call, kind),
            _ => self.generic(call),
        }
    }

    fn put_network(&mut self, call: &Call, kind: &str) -> Reply {
        let place = Place::of(call);
        let current = self.docs.get(&call.key);
        let fresh = current.is_none();
        self.precondition(call, current.map(|doc| doc.version))?;
        let mut body = current.map_or_else(|| place.head(), |doc| doc.body.clone());
        merge(&mut body, &call.body);
        if text(&body, "/location").is_none() {
            return Err(Fail::bad(
                "LocationRequired",
                "The location property is required for this definition.",
            ));
        }
        match kind {
            "networkinterfaces" => {
                self.check_nic(&place, &body)?;
                self.dress_nic(&mut body);
            }
            "publicipaddresses" => {
                let n = self.address();
                super::compute::storage::default(&mut body["properties"], "publicIPAllocationMethod", json!("Dynamic"));
                super::compute::storage::default(&mut body["properties"], "publicIPAddressVersion", json!("IPv4"));
                super::compute::storage::default(
                    &mut body["properties"],
                    "ipAddress",
                    json!(format!("20.{}.{}.{}", 40 + n / 62500, (n / 250) % 250, n % 250 + 1)),
                );
                super::compute::storage::default(&mut body["properties"], "idleTimeoutInMinutes", json!(4));
                super::compute::storage::default(&mut body["properties"], "ipTags", json!([]));
                super::compute::storage::default(&mut body, "sku", json!({ "name": "Standard" }));
                super::compute::storage::default(&mut body["sku"], "tier", json!("Regional"));
                if let Some(label) = text(&body, "/properties/dnsSettings/domainNameLabel") {
                    let location = text(&body, "/location").unwrap_or_default();
                    let name = format!("{label}.{location}.cloudapp.azure.com");
                    body["properties"]["dnsSettings"]["fqdn"] = json!(name);
                }
            }
            _ => name_parts(&mut body, &place),
        }
        self.link_addresses(&place, &body);
        let mut doc = self.docs.remove(&call.key).unwrap_or_else(|| Doc::new(Value::Null));
        if text(&body, "/properties/resourceGuid").is_none() {
            body["properties"]["resourceGuid"] = json!(self.chance.uuid());
        }
        doc.body = body;
        let takes = self.config.times.network.draw(&mut self.chance);
        let fail = self.faults.fail_resource(call.method.as_str(), &call.path);
        let end = if fail.is_some() { "Failed" } else { "Succeeded" };
        // Interfaces and balancers are there at once, also while their operation is under way.
        let ready = fail.is_none() && !call.ordeal.stall && ["networkinterfaces", "loadbalancers"].contains(&kind);
        doc.set_state(if ready { end } else { "Updating" });
        let location = doc.location().to_owned();
        self.docs.insert(call.key.clone(), doc);
        let effect = Effect::State(call.key.clone(), end.into());
        let operation = self.begin(call, Lane::Network, vec![(takes, effect)], fail.as_ref());
        let mut body = self.render(&call.key, call).unwrap_or_default();
        let updating = text(&body, "/properties/provisioningState") == Some("Updating");
        // A new address is not known before it is there.
        if let (true, Some(properties)) = (fresh && updating, body["properties"].as_object_mut()) {
            properties.shift_remove("ipAddress");
        }
        let answer = if fresh { Answer::created(body) } else { Answer::ok(body) };
        Ok(self.follow(call, answer, &operation, &location))
    }

    /// Network resources take only tags by PATCH.
    fn patch_tags(&mut self, call: &Call) -> Reply {
        let doc = self
            .docs
            .get_mut(&call.key)
            .ok_or_else(|| Place::of(call).not_found())?;
        if let Some(tags) = call.body.get("tags") {
            doc.body["tags"] = tags.clone();
            doc.version += 1;
        }
        self.render(&call.key, call)
            .map(Answer::ok)
            .ok_or_else(|| Place::of(call).not_found())
    }

    fn check_nic(&self, place: &Place, body: &Value) -> Result<(), Fail> {
        let missing = |id: &str| {
            Fail::bad(
                "InvalidResourceReference",
                format!(
                    "Resource {id} referenced by resource {} was not found. Please make sure that the referenced resource exists, and \
                     that both resources are in the same region.",
                    place.id()
                ),
            )
        };
        let configs = body.pointer("/properties/ipConfigurations").and_then(Value::as_array);
        if configs.is_none_or(Vec::is_empty) {
            return Err(Fail::bad(
                "NetworkInterfaceMustHaveAtLeastOneIpConfiguration",
                format!(
                    "Network interface {} must have one or more IP configurations.",
                    place.id()
                ),
            ));
        }
        for config in configs.into_iter().flatten() {
            if let Some(subnet) = text(config, "/properties/subnet/id").filter(|subnet| !self.has_subnet(subnet)) {
                return Err(missing(subnet));
            }
            if let Some(ip) = text(config, "/properties/publicIPAddress/id").filter(|ip| self.get(ip).is_none()) {
                return Err(missing(ip));
            }
        }
        self.check_pools(body)?;
        match text(body, "/properties/networkSecurityGroup/id").filter(|group| self.get(group).is_none()) {
            Some(group) => Err(missing(group)),
            None => Ok(()),
        }
    }

    /// Fills in what Azure gives an interface: addresses and ids of its parts. It gets a MAC with its machine.
    pub fn dress_nic(&mut self, body: &mut Value) {
        let id = text(body, "/id").unwrap_or_default().to_owned();
        let n = self.address();
        let mut primary = true;
        for config in body
            .pointer_mut("/properties/ipConfigurations")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let name = text(config, "/name").unwrap_or("ipconfig").to_owned();
            config["id"] = json!(format!("{id}/ipConfigurations/{name}"));
            config["type"] = json!("Microsoft.Network/networkInterfaces/ipConfigurations");
            let properties = &mut config["properties"];
            super::compute::storage::default(properties, "privateIPAddressVersion", json!("IPv4"));
            let ipv6 = text(properties, "/privateIPAddressVersion").is_some_and(|version| same(version, "IPv6"));
            let range = text(properties, "/subnet/id").and_then(|subnet| self.subnet_range(subnet));
            let own = if ipv6 {
                format!("fd00::{:x}", n + 3)
            } else {
                range.unwrap_or_default().address(n)
            };
            for (field, value) in [
                ("privateIPAddress", json!(own)),
                ("privateIPAllocationMethod", json!("Dynamic")),
                ("primary", json!(primary)),
                ("provisioningState", json!("Succeeded")),
            ] {
                super::compute::storage::default(properties, field, value);
            }
            primary = false;
        }
        let properties = &mut body["properties"];
        for (field, value) in [
            ("enableAcceleratedNetworking", json!(false)),
            ("vnetEncryptionSupported", json!(false)),
            ("enableIPForwarding", json!(false)),
            ("hostedWorkloads", json!([])),
            ("tapConfigurations", json!([])),
            ("nicType", json!("Standard")),
        ] {
            super::compute::storage::default(properties, field, value);
        }
        super::compute::storage::default(
            properties,
            "dnsSettings",
            json!({ "dnsServers": [], "appliedDnsServers": [],
            "internalDomainNameSuffix": "internal.cloudapp.net" }),
        );
        properties["provisioningState"] = json!("Succeeded");
    }

    /// The IPv4 addresses of a subnet.
    pub fn subnet_range(&self, subnet: &str) -> Option<Range> {
        let key = subnet.to_lowercase();
        let (vnet, name) = key.rsplit_once("/subnets/")?;
        let subnets = self.docs.get(vnet)?.body["properties"]["subnets"].as_array()?;
        let found = subnets
            .iter()
            .find(|one| text(one, "/name").is_some_and(|one| same(one, name)))?;
        let many = found["properties"]["addressPrefixes"].as_array().into_iter().flatten();
        text(found, "/properties/addressPrefix")
            .into_iter()
            .chain(many.filter_map(Value::as_str))
            .find_map(Range::parse)
    }

    /// A public address knows which configuration has it.
    fn link_addresses(&mut self, place: &Place, body: &Value) {
        let holder = place.id();
        let mine = |doc: &Doc| {
            text(&doc.body, "/properties/ipConfiguration/id").is_some_and(|id| id.starts_with(&format!("{holder}/")))
        };
        for doc in self
            .docs
            .values_mut()
            .filter(|doc| doc.kind() == "Microsoft.Network/publicIPAddresses" && mine(doc))
        {
            unlink(doc);
        }
        for name in ["ipConfigurations", "frontendIPConfigurations"] {
            for config in body["properties"][name].as_array().into_iter().flatten() {
                let Some(ip) = text(config, "/properties/publicIPAddress/id") else {
                    continue;
                };
                if let Some(doc) = self.docs.get_mut(&ip.to_lowercase()) {
                    doc.body["properties"]["ipConfiguration"] = json!({ "id": config["id"] });
                    doc.version += 1;
                }
            }
        }
    }

    fn delete_network(&mut self, call: &Call, kind: &str) -> Reply {
        let Some(doc) = self.docs.get(&call.key) else {
            return Ok(Answer::no_content());
        };
        self.precondition(call, Some(doc.version))?;
        let location = doc.location().to_owned();
        self.unused(kind, doc)?;
        if let Some(doc) = self.docs.get_mut(&call.key) {
            doc.set_state("Deleting");
        }
        let takes = self.config.times.network.draw(&mut self.chance);
        let operation = self.begin(
            call,
            Lane::Network,
            vec![(takes, Effect::Remove(call.key.clone()))],
            None,
        );
        let answer = if self.docs.contains_key(&call.key) {
            Answer::accepted()
        } else {
            Answer::empty()
        };
        Ok(self.follow(call, answer, &operation, &location))
    }

    /// Refuses the deletion of a resource in use.
    fn unused(&self, kind: &str, doc: &Doc) -> Result<(), Fail> {
        let id = doc.id();
        match kind {
            "networkinterfaces" => match text(&doc.body, "/properties/virtualMachine/id") {
                Some(vm) => Err(nic_in_use(id, vm)),
                None => Ok(()),
            },
            "publicipaddresses" => match text(&doc.body, "/properties/ipConfiguration/id") {
                Some(config) => Err(Fail::bad(
                    "PublicIPAddressCannotBeDeleted",
                    format!(
                        "Public IP address {id} can not be deleted since it is still allocated to resource {config}. In order to delete the public IP, disassociate/detach the Public IP address from the resource.  To learn how to do this, see aka.ms/deletepublicip."
                    ),
                )),
                None => Ok(()),
            },
            "virtualnetworks" => {
                let subnets = doc
                    .body
                    .pointer("/properties/subnets")
                    .and_then(Value::as_array)
                    .cloned()
                    .unwrap_or_default();
                subnets
                    .iter()
                    .try_for_each(|subnet| self.subnet_unused(text(subnet, "/id").unwrap_or_default()))
            }
            "networksecuritygroups" => match self.user_of("networkSecurityGroup", id) {
                Some(user) => Err(Fail::bad(
                    "InUseNetworkSecurityGroupCannotBeDeleted",
                    format!(
                        "Network security group {id} cannot be deleted because it is in use by the following resources: {user}. In order to delete the Network security group, remove the association with the resource(s)."
                    ),
                )),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// The interface that refers to this resource under the given name.
    fn user_of(&self, name: &str, id: &str) -> Option<String> {
        let pointer = format!("/properties/{name}/id");
        let uses = |doc: &&Doc| text(&doc.body, &pointer).is_some_and(|used| same(used, id));
        self.docs.values().find(uses).map(|doc| doc.id().to_owned())
    }

    fn subnet_unused(&self, subnet: &str) -> Result<(), Fail> {
        let in_nics = self
            .docs
            .values()
            .filter(|doc| doc.kind() == "Microsoft.Network/networkInterfaces")
            .find_map(|doc| {
                let configs = doc
                    .body
                    .pointer("/properties/ipConfigurations")
                    .and_then(Value::as_array)?;
                let config = configs
                    .iter()
                    .find(|config| text(config, "/properties/subnet/id").is_some_and(|id| same(id, subnet)))?;
                text(config, "/id").map(str::to_owned)
            });
        let in_sets = || {
            let uses = |fleet: &&super::compute::fleet::Fleet| {
                !fleet.instances.is_empty()
                    && super::compute::scale_set::subnets(&fleet.newest()["properties"]["virtualMachineProfile"])
                        .iter()
                        .any(|id| same(id, subnet))
            };
            self.fleets.values().find(uses).map(|fleet| fleet.id.clone())
        };
        match in_nics.or_else(in_sets) {
            Some(user) => {
                let name = subnet.rsplit('/').next().unwrap_or_default();
                Err(Fail::bad(
                    "InUseSubnetCannotBeDeleted",
                    format!(
                        "Subnet {name} is in use by {user} and cannot be deleted. In order to delete the subnet, delete all the resources within the subnet. See aka.ms/deletesubnet."
                    ),
                ))
            }
            None => Ok(()),
        }
    }

    pub fn has_subnet(&self, id: &str) -> bool {
        let Some((vnet, name)) = id.rsplit_once("/subnets/") else {
            return false;
        };
        self.get(vnet).is_some_and(|doc| {
            let subnets = doc.body.pointer("/properties/subnets").and_then(Value::as_array);
            subnets
                .into_iter()
                .flatten()
                .any(|subnet| text(subnet, "/name").is_some_and(|known| same(known, name)))
        })
    }

    /// Subnets live inside their network.
    fn subnets(&mut self, call: &Call) -> Reply {
        let place = Place::of(call);
        let doc = self.docs.get_mut(&place.key()).ok_or_else(|| place.not_found())?;
        let mut subnets = doc
            .body
            .pointer("/properties/subnets")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let name = call.segment(9).to_owned();
        if name.is_empty() {
            return Ok(Answer::ok(json!({ "value": subnets })));
        }
        let at = subnets
            .iter()
            .position(|subnet| text(subnet, "/name").is_some_and(|known| same(known, &name)));
        let id = format!("{}/subnets/{name}", place.id());
        let not_found = || Fail::new(404, "NotFound", format!("Resource {id} not found."));
        match (&call.method, at) {
            (&Method::GET, Some(at)) => Ok(Answer::ok(subnets[at].clone())),
            (&Method::GET, None) => Err(not_found()),
            (&Method::PUT, at) => {
                let mut subnet = at.map_or_else(|| json!({ "name": name, "id": id }), |at| subnets[at].clone());
                merge(&mut subnet, &call.body);
                subnet["properties"]["provisioningState"] = json!("Succeeded");
                match at {
                    Some(at) => subnets[at] = subnet.clone(),
                    None => subnets.push(subnet.clone()),
                }
                doc.body["properties"]["subnets"] = json!(subnets);
                doc.version += 1;
                Ok(if at.is_some() {
                    Answer::ok(subnet)
                } else {
                    Answer::created(subnet)
                })
            }
            (&Method::DELETE, Some(at)) => {
                self.subnet_unused(&id)?;
                subnets.remove(at);
                if let Some(doc) = self.docs.get_mut(&place.key()) {
                    doc.body["properties"]["subnets"] = json!(subnets);
                    doc.version += 1;
                }
                Ok(Answer::empty())
            }
            (&Method::DELETE, None) => Ok(Answer::no_content()),
            _ => Err(Fail::new(
                405,
                "MethodNotAllowed",
                format!("{} is not possible on {}.", call.method, call.path),
            )),
        }
    }

    /// Deletes an interface, and the public addresses that are marked for deletion with it.
    pub fn remove_nic(&mut self, key: &str) {
        let Some(doc) = self.docs.remove(key) else { return };
        for config in doc
            .body
            .pointer("/properties/ipConfigurations")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let Some(ip) = text(config, "/properties/publicIPAddress/id") else {
                continue;
            };
            let option = text(config, "/properties/publicIPAddress/properties/deleteOption").unwrap_or("Detach");
            if same(option, "Delete") {
                self.docs.remove(&ip.to_lowercase());
            } else if let Some(doc) = self.docs.get_mut(&ip.to_lowercase()) {
                unlink(doc);
            }
        }
    }

    /// An interface outlives its VM.
    pub fn leave_nic(&mut self, key: &str) {
        if let Some(doc) = self.docs.get_mut(key) {
            if let Some(properties) = doc.body["properties"].as_object_mut() {
                properties.shift_remove("virtualMachine");
            }
            doc.version += 1;
        }
    }

    /// `…/Microsoft.Compute/availabilitySets…`.
    pub fn availability_sets(&mut self, call: &Call) -> Reply {
        match (&call.method, call.segments.len()) {
            (&Method::GET, 8) => self
                .render(&call.key, call)
                .map(Answer::ok)
                .ok_or_else(|| Place::of(call).not_found()),
            (&Method::DELETE, 8) if !self.members(&call.key).is_empty() => {
                let message = format!(
                    "Availability Set '{}' cannot be deleted. Before deleting an Availability Set please ensure that it does not contain any VM.",
                    call.segment(7)
                );
                Err(Fail::conflict("OperationNotAllowed", message))
            }
            // Azure answers 200 to a PUT of an availability set, new or not.
            (&Method::PUT, 8) => {
                fault_domains(&call.body)?;
                if let (true, Some(doc)) = (self.config.strict.fixed_properties, self.docs.get(&call.key)) {
                    rules::fixed(&FIXED_OF_AVAILABILITY_SETS, &doc.body, &call.body)?;
                }
                self.generic(call).map(|answer| Answer {
                    status: http::StatusCode::OK,
                    ..answer
                })
            }
            _ => self.generic(call),
        }
    }
}

/// Refuses an availability set with more fault domains than its region has.
fn fault_domains(body: &Value) -> Result<(), Fail> {
    let location = skus::find_location(text(body, "/location").unwrap_or_default());
    let count = body
        .pointer("/properties/platformFaultDomainCount")
        .and_then(Value::as_u64);
    match (location, count) {
        (Some(location), Some(count)) if !(1..=location.fault_domains).contains(&count) => Err(Fail::parameter(
            "platformFaultDomainCount",
            format!(
                "The specified fault domain count {count} must fall in the range 1 to {}.",
                location.fault_domains
            ),
        )),
        _ => Ok(()),
    }
}

fn unlink(doc: &mut Doc) {
    if let Some(properties) = doc.body["properties"].as_object_mut() {
        properties.shift_remove("ipConfiguration");
    }
    doc.version += 1;
}

/// Parts of networks and balancers have ids of their own.
fn name_parts(body: &mut Value, place: &Place) {
    let id = place.id();
    for list in [
        "subnets",
        "frontendIPConfigurations",
        "backendAddressPools",
        "inboundNatRules",
        "inboundNatPools",
        "loadBalancingRules",
        "probes",
        "outboundRules",
        "securityRules",
    ] {
        for part in body["properties"]
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let name = text(part, "/name").unwrap_or_default().to_owned();
            part["id"] = json!(format!("{id}/{list}/{name}"));
            part["properties"]["provisioningState"] = json!("Succeeded");
        }
    }
}
