//! Which subnets have IPv6 addresses. Read once for all machines that are created in a subnet at about the same time.

use super::Target;
use super::error::Error;
use capstan_azure::model::Subnet;
use capstan_core::{Class, Classified, Clock, Memo};
use std::time::Duration;

/// A subnet gets a second address space once in its life, if ever; machines created this soon after it may miss it.
const FRESH: Duration = Duration::from_secs(300);

/// More subnets than one cluster has machines in.
const SUBNETS: usize = 100;

/// By account, subscription, group, network and subnet.
pub struct Subnets(Memo<[String; 5], bool>);

impl Subnets {
    pub fn new(clock: Clock) -> Self {
        Self(Memo::new(clock, SUBNETS))
    }

    /// Whether interfaces in the machine's subnet get an IPv6 address too.
    pub async fn is_dual_stack(&self, target: &Target) -> Result<bool, Error> {
        let Target { spec, names, account } = target;
        let vnet = spec.vnet.as_deref().unwrap_or_default();
        let (subscription, group) = (names.subscription.as_str(), names.network_group.as_str());
        let account_id = account.client.identity();
        let key = [account_id, subscription, group, vnet, spec.subnet.as_str()].map(str::to_lowercase);
        let read = async {
            let found = account.client.get_subnet(group, vnet, &spec.subnet).await?;
            Ok(found.is_some_and(|subnet| has_ipv6(&subnet)))
        };
        match self.0.get(&key, FRESH, read).await {
            Ok(dual) => Ok(dual),
            // Who may join a network need not be allowed to read it; and what is wrong with it, the answer to the
            // interface's own request says. The next machine asks again: rights take minutes to spread.
            Err(error) => unreadable(error, &names.machine, &spec.subnet),
        }
    }
}

fn unreadable(error: capstan_azure::Error, machine: &str, subnet: &str) -> Result<bool, Error> {
    if error.class() == Class::Terminal || error.arm().is_some_and(|arm| arm.status == 403) {
        tracing::warn!(machine, %error, "the subnet cannot be read and is taken for one without IPv6");
        return Ok(false);
    }
    Err(Error::doing(format!("reading subnet {subnet}"))(error))
}

fn has_ipv6(subnet: &Subnet) -> bool {
    let Some(properties) = &subnet.properties else {
        return false;
    };
    let many = properties.address_prefixes.iter().flatten();
    properties
        .address_prefix
        .iter()
        .chain(many)
        .any(|prefix| prefix.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    #[rstest]
    #[case::one_prefix(json!({"addressPrefix": "10.0.0.0/24"}), false)]
    #[case::two(json!({"addressPrefixes": ["10.0.0.0/24", "fd00:db8::/64"]}), true)]
    #[case::several_of_one_kind(json!({"addressPrefixes": ["10.0.0.0/24", "10.0.1.0/24"]}), false)]
    #[case::nothing_said(json!({}), false)]
    fn a_subnet_is_dual_stack_by_its_prefixes(#[case] properties: Value, #[case] dual: bool) {
        let subnet: Subnet = serde_json::from_value(json!({"properties": properties})).unwrap();
        assert_eq!(has_ipv6(&subnet), dual);
    }
}
