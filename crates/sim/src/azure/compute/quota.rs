//! Cores per region and family.

use serde_json::{Value, json};

use super::skus;
use crate::azure::wire::{Answer, Fail, Reply, same, text};
use crate::azure::world::World;

impl World {
    /// Cores in use in a region: all, and of one family.
    fn cores(&self, location: &str, family: &str) -> (u64, u64) {
        let mut used = (0, 0);
        let mut count = |size: &str, n: u64| {
            let Some(size) = skus::find_size(size) else { return };
            used.0 += size.cores * n;
            used.1 += if size.family == family { size.cores * n } else { 0 };
        };
        for doc in self.docs.values() {
            let here = same(&skus::plain(doc.location()), &skus::plain(location));
            if here && doc.kind() == "Microsoft.Compute/virtualMachines" && doc.hidden("power") != "deallocated" {
                count(
                    text(&doc.body, "/properties/hardwareProfile/vmSize").unwrap_or_default(),
                    1,
                );
            }
        }
        for fleet in self
            .fleets
            .values()
            .filter(|fleet| skus::plain(&fleet.location) == skus::plain(location))
        {
            for instance in fleet.instances.values() {
                count(fleet.size(instance), 1);
            }
        }
        used
    }

    /// Whether `n` more VMs of a size fit.
    pub fn quota(&self, location: &str, size: &str, n: u64) -> Result<(), Fail> {
        let Some(size) = skus::find_size(size) else {
            return Ok(());
        };
        if self.config.family_cores.is_none() && self.config.regional_cores >= 100_000 {
            return Ok(());
        }
        let (all, family) = self.cores(location, size.family);
        let more = size.cores * n;
        let refused = |code: &str, what: &str, limit: u64, used: u64| {
            let message = format!(
                "Operation could not be completed as it results in exceeding approved {what} quota. Additional details - Deployment \
                 Model: Resource Manager, Location: {location}, Current Limit: {limit}, Current Usage: {used}, Additional Required: \
                 {more}, (Minimum) New Limit Required: {}. Setup Alerts when Quota reaches threshold. Learn more at \
                 https://aka.ms/quotamonitoringalerting",
                used + more
            );
            Fail::conflict(code, message)
        };
        if all + more > self.config.regional_cores {
            return Err(refused(
                "OperationNotAllowed",
                "Total Regional Cores",
                self.config.regional_cores,
                all,
            ));
        }
        match self.config.family_cores {
            Some(limit) if family + more > limit => Err(refused(
                "QuotaExceeded",
                &format!("{} Cores", size.family),
                limit,
                family,
            )),
            _ => Ok(()),
        }
    }

    /// `GET …/locations/{l}/usages`.
    pub fn usages(&self, location: &str) -> Reply {
        let usage = |name: &str, used: u64, limit: u64| json!({ "unit": "Count", "currentValue": used, "limit": limit, "name": { "value": name, "localizedValue": name } });
        let (all, _) = self.cores(location, "");
        let mut value: Vec<Value> = vec![usage("cores", all, self.config.regional_cores)];
        let mut families: Vec<&str> = skus::SIZES.iter().map(|size| size.family).collect();
        families.dedup();
        for family in families {
            let limit = self.config.family_cores.unwrap_or(self.config.regional_cores);
            value.push(usage(family, self.cores(location, family).1, limit));
        }
        Ok(Answer::ok(json!({ "value": value })))
    }
}
