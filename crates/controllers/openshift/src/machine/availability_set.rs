//! The availability set of a machine's set, where the region has no zones.

use super::Target;
use super::build;
use super::error::Error;
use crate::sizes;
use capstan_azure::{Client, Owned, Size};
use capstan_core::machine::names::Names;
use capstan_core::validate::openshift::kept_out_of_sets;

/// Returns the availability set: the spec's own, or one for the machine's set where the region has no zones. One that is
/// there is used as it is: its number of fault domains cannot change.
pub async fn ensure(target: &Target, size: Option<&Size>) -> Result<Option<String>, Error> {
    let Target { spec, names, account } = target;
    let id = |name: &str| {
        capstan_azure::ResourceId::compute(&names.subscription, &names.group, "availabilitySets", name).to_string()
    };
    if let Some(name) = spec.availability_set.as_deref().filter(|name| !name.is_empty()) {
        return Ok(Some(if name.starts_with('/') {
            name.to_owned()
        } else {
            id(name)
        }));
    }
    let zoneless = size.is_some_and(|size| size.zones.is_empty());
    if !zoneless || !kept_out_of_sets(spec).is_empty() {
        return Ok(None);
    }
    let Some(name) = names.availability_set() else {
        return Ok(None);
    };
    let client = &account.client;
    let read = async |name: &str| {
        let found = client.get_availability_set(&names.group, name).await;
        found.map_err(Error::doing(format!("reading availability set {name}")))
    };
    if let Some(found) = read(&name).await? {
        return match names.other_cluster(found.tags.as_ref()) {
            None => Ok(Some(id(&name))),
            Some(other) => Err(Error::NotReady(format!(
                "availability set {name} in {} is of cluster {other}, and this machine's set would have one of the same \
                 name: name another one in providerSpec.availabilitySet, or rename the MachineSet",
                names.group
            ))),
        };
    }
    for former in names.former_availability_sets() {
        // Another cluster of the group may have a set of this name, which need not contain the cluster's.
        let found = read(&former).await?;
        if found.is_some_and(|set| names.is_of_cluster(set.tags.as_ref())) {
            return Ok(Some(id(&former)));
        }
    }
    // The catalogue is known: it shows that the size has no zones.
    let catalogue = client.catalogue(&names.location).await.ok();
    let fault_domains = catalogue.and_then(|catalogue| catalogue.max_fault_domains);
    let set = build::availability_set(names, spec, fault_domains);
    let doing = Error::doing(format!("failed to create availability set {name}"));
    client
        .put_availability_set(&names.group, &name, &set)
        .await
        .map_err(doing)?;
    Ok(Some(id(&name)))
}

/// Deletes the availability set that was made for the machine's set, once it is empty.
pub async fn delete_if_empty(target: &Target) -> Result<(), Error> {
    let Target { spec, names, account } = target;
    let own = spec.availability_set.as_deref().is_some_and(|name| !name.is_empty());
    let zone = spec.zone.as_deref().is_some_and(|zone| !zone.is_empty());
    let Some(name) = names
        .availability_set()
        .filter(|_| !own && !zone && spec.spot_vm_options.is_none())
    else {
        return Ok(());
    };
    // Known from the cached catalogue: where sizes have zones, no set was made.
    let size = spec.vm_size.as_deref().unwrap_or_default();
    match account.client.size(&names.location, size).await {
        Ok(None) => return Ok(()),
        Ok(Some(size)) if !size.zones.is_empty() => return Ok(()),
        // An account that may not read the catalogue looks for the set itself.
        Err(error) if !sizes::is_unreadable(&error) => return Err(Error::doing("reading Azure's sizes")(error)),
        Ok(Some(_)) | Err(_) => {}
    }
    for name in std::iter::once(name).chain(names.former_availability_sets()) {
        let deleted = delete_one(&account.client, names, &name).await;
        deleted.map_err(Error::doing(format!("failed to delete availability set {name}")))?;
    }
    Ok(())
}

async fn delete_one(client: &Client, names: &Names, name: &str) -> Result<(), capstan_azure::Error> {
    let Some(set) = client.get_availability_set(&names.group, name).await? else {
        return Ok(());
    };
    let Ok(owned) = Owned::by_tags(&set, |tags| names.is_of_cluster(Some(tags))) else {
        return Ok(());
    };
    let members = set.properties.and_then(|properties| properties.virtual_machines);
    if members.is_some_and(|members| !members.is_empty()) {
        return Ok(());
    }
    match client.delete_availability_set(&owned).await {
        // Another machine has joined it meanwhile.
        Err(error) if error.arm().is_some_and(|arm| arm.status == 409) => Ok(()),
        result => result,
    }
}
