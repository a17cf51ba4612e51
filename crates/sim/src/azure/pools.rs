//! Backend pools of balancers: addresses of one family each. Azure translates no address into the other family.

use serde_json::Value;

use super::wire::{Fail, same, text};
use super::world::World;

/// As Azure names it for interfaces of scale sets, without the part about scale sets.
const MIXED: &str = "AllNicIpConfigurationsOfLbBackendPoolMustHaveSamePrivateIpAddressVersion";

/// A configuration of an interface: its id and the family of its address.
struct Member<'a> {
    id: String,
    family: &'a str,
}

fn members<'a>(nic: &'a Value, pool: &str) -> Vec<Member<'a>> {
    let own = text(nic, "/id").unwrap_or_default();
    let configs = nic.pointer("/properties/ipConfigurations").and_then(Value::as_array);
    let joins = |config: &&Value| pools(config).any(|id| same(id, pool));
    let member = |config: &'a Value| Member {
        id: format!("{own}/ipConfigurations/{}", text(config, "/name").unwrap_or_default()),
        family: family(config),
    };
    configs.into_iter().flatten().filter(joins).map(member).collect()
}

fn family(config: &Value) -> &str {
    text(config, "/properties/privateIPAddressVersion").unwrap_or("IPv4")
}

/// The pools that a configuration joins.
fn pools(config: &Value) -> impl Iterator<Item = &str> {
    let pools = config.pointer("/properties/loadBalancerBackendAddressPools");
    let pools = pools.and_then(Value::as_array).into_iter().flatten();
    pools.filter_map(|pool| text(pool, "/id"))
}

impl World {
    /// Refuses an interface whose address joins a pool of the other family.
    pub fn check_pools(&self, nic: &Value) -> Result<(), Fail> {
        let configs = nic.pointer("/properties/ipConfigurations").and_then(Value::as_array);
        for pool in configs.into_iter().flatten().flat_map(pools) {
            let own = text(nic, "/id").unwrap_or_default();
            let others = self
                .docs
                .values()
                .filter(|doc| doc.kind() == "Microsoft.Network/networkInterfaces" && !same(doc.id(), own));
            let joined = others.flat_map(|doc| members(&doc.body, pool));
            let there: Vec<Member> = self.served(pool).into_iter().chain(joined).collect();
            let new = members(nic, pool);
            let known = there.first().or(new.first());
            let wrong = known.and_then(|known| Some((known, new.iter().find(|one| !same(one.family, known.family))?)));
            if let Some((known, wrong)) = wrong {
                let message = format!(
                    "Network interface ipConfiguration '{}' has privateIpAddressVersion '{}' that does not match with \
                     privateIpAddressVersion '{}' of ipConfiguration '{}' in the same load balancer backend address pool '{pool}'.",
                    wrong.id, wrong.family, known.family, known.id
                );
                return Err(Fail::bad(MIXED, message));
            }
        }
        Ok(())
    }

    /// The frontend that a rule of the balancer leads from to the pool.
    fn served(&self, pool: &str) -> Option<Member<'_>> {
        let balancer = self.get(pool.to_lowercase().split("/backendaddresspools/").next()?)?;
        let properties = &balancer.body["properties"];
        let rules = properties["loadBalancingRules"].as_array()?;
        let leads = |rule: &&Value| text(rule, "/properties/backendAddressPool/id").is_some_and(|id| same(id, pool));
        let rule = rules.iter().find(leads)?;
        let id = text(rule, "/properties/frontendIPConfiguration/id")?;
        let frontends = properties["frontendIPConfigurations"].as_array()?;
        let frontend = frontends
            .iter()
            .find(|one| text(one, "/id").is_some_and(|own| same(own, id)))?;
        let address = text(frontend, "/properties/publicIPAddress/id").and_then(|id| self.get(id));
        let public = address.and_then(|doc| text(&doc.body, "/properties/publicIPAddressVersion"));
        Some(Member {
            id: id.to_owned(),
            family: public.unwrap_or_else(|| family(frontend)),
        })
    }
}
