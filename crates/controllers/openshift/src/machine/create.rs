//! Creates a machine: checks, public address, interface, the disks that have to be made on their own, virtual machine.

use super::build::{self, Extras};
use super::error::{Error, is_refused, misses_any};
use super::ids::Ids as _;
use super::spec::provider_spec;
use super::state::{State, UserData};
use super::status::Note;
use super::{Controller, Observed, Target, apply, availability_set, check, dependencies, disk_list, status};
use crate::{account, sizes};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_api::openshift::{AzureMachineProviderSpec, Machine};
use capstan_azure::client::When;
use capstan_azure::model::LoadBalancer;
use capstan_azure::{Put, Size};
use capstan_core::disks::init;
use capstan_core::machine::kept;
use capstan_core::machine::names::Names;
use capstan_core::{Class, Classified};
use capstan_kube::runtime::{EventNote, Outcome, Scope};
use kube::ResourceExt as _;
use std::collections::BTreeMap;
use std::time::Duration;

/// The dependencies that are requested together.
pub(super) enum Part {
    Address,
    InterfaceAndDisks,
}

impl Controller {
    /// Checks everything, and reads what the requests need, before the first resource is made.
    pub(super) async fn prepare(
        &self,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let machine = scope.object.clone();
        // The spec comes first: a bad one is refused even while its secrets are missing.
        let spec = provider_spec(&machine)?;
        check::spec(&scope.key.name, &spec).map_err(Error::Invalid)?;
        check::annotations(&machine).map_err(Error::Invalid)?;
        check::user_data(&machine, &scope.key.namespace).map_err(Error::Invalid)?;
        let target = self.target(scope, observed).await?;
        check::place(&target.names).map_err(Error::Invalid)?;
        target.names.check_tags(&target.spec).map_err(Error::Invalid)?;
        let size = self.size(&target).await?;
        if observed.vm.is_none() {
            // A virtual machine that Azure could not finish counts already.
            self.quotas.check(&target, size.as_ref()).await?;
        }
        if self.quotas.is_refused(&target) {
            // A narrow role: its machines should not have to learn at their deletion what else it may not do.
            let Target { names, account, .. } = target.as_ref();
            self.disk_lists
                .learn(&account.client, &names.group, &names.os_disk())
                .await?;
        }
        let kept = self.kept_disks(&machine, &target).await?;
        self.check_conflicting_disks(&target, &kept, state).await?;
        let nvme = size.as_ref().is_some_and(Size::is_nvme_only);
        state.user_data = Some(UserData(self.custom_data(scope, &target.spec, nvme).await?));
        let mut extras = Extras {
            nvme,
            kept,
            ipv6: self.subnets.is_dual_stack(&target).await?,
            ..Extras::default()
        };
        balancers(&target, &mut extras).await?;
        extras.availability_set = availability_set::ensure(&target, size.as_ref()).await?;
        let before = state
            .dependencies
            .take()
            .map(|dependencies| *dependencies)
            .unwrap_or_default();
        state.dependencies = Some(Box::new(before.prepared(&machine, &target, extras)));
        Ok(Outcome::Observe)
    }

    /// Advances a part of the dependencies.
    pub(super) async fn ensure(
        &self,
        part: Part,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let target = self.target(scope, observed).await?;
        let Some(dependencies) = state.dependencies.as_mut() else {
            return Ok(Outcome::Observe);
        };
        let inherited = status::is_inherited(&scope.object);
        let result = match part {
            Part::Address => dependencies.ensure_address(&target, inherited).await,
            Part::InterfaceAndDisks => dependencies.ensure_interface_and_disks(&target, inherited).await,
        };
        self.ensured(result, state)
    }

    fn ensured(&self, result: Result<Option<Duration>, Error>, state: &mut State) -> Result<Outcome, Error> {
        match result {
            Ok(None) => Ok(Outcome::Observe),
            Ok(Some(after)) => Ok(Outcome::Wait(Some(after))),
            Err(error) => {
                let kept = state.dependencies.take().map(|kept| Box::new(kept.after_error()));
                state.dependencies = kept;
                Err(error)
            }
        }
    }

    /// Asks Azure for the virtual machine. The request is the same when it is sent again, and with [`When::Absent`] Azure
    /// refuses it where one exists: a second attempt never makes a second one.
    pub(super) async fn request_vm(
        &self,
        when: When,
        observed: &mut Observed,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Outcome, Error> {
        let target = self.target(scope, observed).await?;
        let Target { spec, names, account } = target.as_ref();
        let Some(dependencies) = state.dependencies.take() else {
            return Ok(Outcome::Observe);
        };
        let mut extras = dependencies.extras.clone().unwrap_or_default();
        let nic = dependencies.interface().cloned().unwrap_or_default();
        let addresses = status::addresses(&names.machine, &nic, dependencies.public_address());
        // Should Azure refuse the virtual machine, all of it is asked for again.
        state.dependencies = Some(Box::new(dependencies.after_error()));
        extras.custom_data = match state.user_data.take() {
            Some(UserData(kept)) => kept,
            None => self.custom_data(scope, spec, extras.nvme).await?,
        };
        let windows = spec.os_disk.os_type.eq_ignore_ascii_case("Windows");
        if windows || spec.ssh_public_key.as_deref().unwrap_or_default().is_empty() {
            extras.admin_password = Some(password());
        }
        let mut vm = build::virtual_machine(names, spec, &extras);
        let retry = when == When::Always;
        if let (true, Some(properties)) = (retry, vm.properties.as_mut()) {
            // Azure refuses changes of the guest's first settings.
            properties.os_profile = None;
        }
        let Put { value: made, operation } = match account.client.put_vm(&names.group, &names.machine, &vm, when).await
        {
            Err(error) if error.is_precondition_failed() && !retry => {
                state.may_exist = true;
                return Ok(Outcome::Observe);
            }
            Err(error) if misses_any(&error, &references(names, spec, &extras)) => {
                return Err(Error::NotReady(format!("cannot create vm {}: {error}", names.machine)));
            }
            Err(error) => {
                if is_refused(&error) && extras.joins_a_balancer() {
                    dependencies::leave_balancers(&target, &extras).await;
                }
                return Err(self.explain_rejection(&target, &extras.kept, state, error).await);
            }
            Ok(put) => put,
        };
        state.dependencies = None;
        state.follow(operation.clone());
        let requested = apply::requested(&target, &made, operation.clone(), addresses);
        observed.notes.push(Note::Requested(Box::new(requested)));
        for (suffix, disk) in &extras.kept {
            let text = format!("Data Disk {suffix} is the kept disk {disk}");
            observed.notes.event(EventNote::normal("KeptDiskAttached", text));
        }
        match (operation, made.provisioning_state().as_str()) {
            (Some(operation), _) => Ok(Outcome::Wait(Some(operation.due_in(scope.now())))),
            (None, "Failed" | "Canceled") => Err(Error::NotReady(format!(
                "Azure could not finish vm {}: it ended {}",
                names.machine,
                made.provisioning_state()
            ))),
            (None, _) => self.record_provisioned(observed, scope, state).await,
        }
    }

    /// Returns what the size can do in the region. Refuses a spec that asks for more.
    async fn size(&self, target: &Target) -> Result<Option<Size>, Error> {
        let Target { spec, names, account } = target;
        match sizes::look_up(&account.client, spec, &names.location).await {
            Ok(sizes::Verdict { size, refusals }) => match refusals.into_iter().next() {
                Some(refusal) => Err(Error::Invalid(refusal)),
                None => Ok(size),
            },
            Err(error) if sizes::is_unreadable(&error) => {
                tracing::warn!(machine = names.machine, %error, "the account may not read sizes: Azure checks the size itself");
                Ok(None)
            }
            Err(error) => Err(Error::doing("reading Azure's sizes")(error)),
        }
    }

    /// Returns the kept disks that the machine's annotation asks for, by `nameSuffix`.
    async fn kept_disks(&self, machine: &Machine, target: &Target) -> Result<BTreeMap<String, String>, Error> {
        let Some(text) = machine.annotations().get(kept::ATTACH_ANNOTATION) else {
            return Ok(BTreeMap::new());
        };
        let Target { spec, names, account } = target;
        let wishes = kept::wishes(text, &spec.data_disks);
        let wishes = wishes.map_err(|why| Error::Invalid(format!("annotation {}: {why}", kept::ATTACH_ANNOTATION)))?;
        let Some(listing) = self
            .disk_lists
            .get(&account.client, &names.group, disk_list::NEEDED)
            .await?
        else {
            return Err(Error::NotReady(format!(
                "annotation {}: the account may not read disks: grant it Microsoft.Compute/disks/read and \
                 Microsoft.Compute/disks/write",
                kept::ATTACH_ANNOTATION
            )));
        };
        let machines = self.machines.select(None, |_| true);
        let machine = kept::Machine {
            names,
            spec,
            vm: &names.vm_id().to_string(),
            exists: &|uid| machines.iter().any(|other| other.metadata.uid.as_deref() == Some(uid)),
        };
        kept::choose(&machine, &wishes, &listing).map_err(Error::NotReady)
    }

    /// Begins nothing while a disk is in the way that somebody else has to decide about: one that an earlier attempt ran
    /// into, or one that our request for a disk of its own would take over, old data and all.
    async fn check_conflicting_disks(
        &self,
        target: &Target,
        kept: &BTreeMap<String, String>,
        state: &mut State,
    ) -> Result<(), Error> {
        let Target { spec, names, account } = target;
        let first = spec.data_disks.iter().filter(|disk| build::made_first(disk, kept));
        let first = first.map(|disk| names.data_disk(&disk.name_suffix));
        let taken = |disk: &String| kept.values().any(|kept| kept.eq_ignore_ascii_case(disk));
        let before = state.conflicting_disks.clone().into_iter().filter(|disk| !taken(disk));
        for disk in before.chain(first) {
            let found = account.client.get_disk(&names.group, &disk).await;
            match found.map_err(Error::doing(format!("reading disk {disk}")))? {
                Some(found) if !names.made(found.tags.as_ref()) => {
                    return Err(Error::NotReady(conflict(
                        &disk,
                        found.id.as_deref().unwrap_or_default(),
                    )));
                }
                _ => {}
            }
        }
        state.conflicting_disks.clear();
        Ok(())
    }

    /// Returns why Azure did not take the virtual machine. A conflict is explained by the disks in the way, if any.
    async fn explain_rejection(
        &self,
        target: &Target,
        kept: &BTreeMap<String, String>,
        state: &mut State,
        error: capstan_azure::Error,
    ) -> Error {
        let Target { spec, names, account } = target;
        if error.arm().is_none_or(|arm| arm.code != "ConflictingUserInput") {
            return rejection(names, error);
        }
        let Ok(Some(listing)) = self
            .disk_lists
            .get(&account.client, &names.group, disk_list::OPTIONAL)
            .await
        else {
            return rejection(names, error);
        };
        let new = spec
            .data_disks
            .iter()
            .filter(|disk| !kept.contains_key(&disk.name_suffix));
        let wanted = new.map(|disk| names.data_disk(&disk.name_suffix));
        let in_the_way = wanted.filter_map(|disk| {
            let found = listing.get(&disk.to_lowercase())?;
            (!names.made(found.tags.as_ref())).then(|| (disk, found.id.clone()))
        });
        let in_the_way: Vec<(String, String)> = in_the_way.collect();
        if in_the_way.is_empty() {
            return rejection(names, error);
        }
        let text: Vec<String> = in_the_way.iter().map(|(disk, id)| conflict(disk, id)).collect();
        state.conflicting_disks = in_the_way.into_iter().map(|(disk, _)| disk).collect();
        Error::NotReady(text.join("; "))
    }

    /// Returns the user data as the request has it: encoded once, with the mounts that the annotation asks for.
    async fn custom_data(
        &self,
        scope: &Scope<Machine>,
        spec: &AzureMachineProviderSpec,
        nvme: bool,
    ) -> Result<String, Error> {
        let reference = spec.user_data_secret.clone().unwrap_or_default();
        let key = account::Key {
            namespace: scope.key.namespace.clone(),
            name: reference.name.unwrap_or_default(),
        };
        let secret = account::read_bytes(&self.context.client, &key, "user data").await?;
        let data = secret.get("userData").cloned().ok_or_else(|| {
            let account::Key { namespace, name } = &key;
            Error::NotReady(format!("user data secret {namespace}/{name} has no key userData"))
        })?;
        let Some(mounts) = scope.object.annotations().get(init::MOUNTS_ANNOTATION) else {
            return Ok(STANDARD.encode(data));
        };
        let rendered = mounted(&data, mounts, spec, nvme)
            .map_err(|error| Error::Invalid(format!("annotation {}: {error}", init::MOUNTS_ANNOTATION)))?;
        Ok(STANDARD.encode(rendered))
    }
}

fn mounted(data: &[u8], mounts: &str, spec: &AzureMachineProviderSpec, nvme: bool) -> Result<String, init::InitError> {
    let known = if nvme {
        init::KnownDisk::azure_nvme
    } else {
        init::KnownDisk::azure
    };
    let text = std::str::from_utf8(data).map_err(|_| init::InitError::UserData("not text".to_owned()))?;
    let disks: Vec<_> = spec
        .data_disks
        .iter()
        .map(|disk| known(disk.lun, &disk.name_suffix))
        .collect();
    init::merge(text, &init::resolve(&init::parse_requests(mounts)?, &disks)?)
}

/// The message about a disk in the way.
fn conflict(disk: &str, id: &str) -> String {
    format!(
        "Data Disk {disk} remains from an earlier machine of this name (deletionPolicy Detach) as {id}: delete it, or \
         choose another nameSuffix or another machine name; the machine is created as soon as the disk is out of the way. \
         To use its data, set the annotation {}",
        kept::ATTACH_ANNOTATION
    )
}

/// Azure's rejection of the virtual machine, in the words that users search for; other errors as they are.
fn rejection(names: &Names, error: capstan_azure::Error) -> Error {
    match (error.class(), error.arm()) {
        (Class::Terminal, Some(arm)) => Error::Invalid(check::refused(&names.machine, arm)),
        _ => Error::Azure {
            doing: format!("cannot create vm {}", names.machine),
            source: error,
        },
    }
}

/// Returns the names of the resources that the request for a virtual machine refers to and that were made or read for it.
fn references(names: &Names, spec: &AzureMachineProviderSpec, extras: &Extras) -> Vec<String> {
    let last = |id: &String| id.rsplit('/').next().unwrap_or_default().to_owned();
    let first = spec
        .data_disks
        .iter()
        .filter(|disk| build::made_first(disk, &extras.kept));
    let first = first.map(|disk| names.data_disk(&disk.name_suffix));
    let set = extras.availability_set.iter().map(last);
    let mut all = vec![names.nic()];
    all.extend(set.chain(first).chain(extras.kept.values().cloned()));
    all
}

/// Returns a password that Azure accepts. Nobody learns it.
fn password() -> String {
    format!("Aa1!{}", uuid::Uuid::new_v4().simple())
}

/// Reads the backend pools and address translation rules of the load balancers that the spec names.
async fn balancers(target: &Target, extras: &mut Extras) -> Result<(), Error> {
    let Target { spec, names, account } = target;
    let given = |name: &Option<String>| name.clone().filter(|name| !name.is_empty());
    let public = given(&spec.public_load_balancer);
    for name in [public.clone(), given(&spec.internal_load_balancer)]
        .into_iter()
        .flatten()
    {
        let doing = || format!("reading load balancer {name}");
        let found = account
            .client
            .get_load_balancer(&names.group, &name)
            .await
            .map_err(Error::doing(doing()))?;
        let Some(LoadBalancer {
            properties: Some(properties),
            ..
        }) = found
        else {
            return Err(Error::NotReady(format!(
                "load balancer {name} does not exist in {}",
                names.group
            )));
        };
        let (ipv4, ipv6) = build::backend_pools(&properties);
        extras.backend_pools.extend(ipv4);
        extras.backend_pools_v6.extend(ipv6);
        let rule = spec.nat_rule.filter(|_| public.as_deref() == Some(name.as_str()));
        let all = properties.inbound_nat_rules.unwrap_or_default();
        let rule = rule.and_then(|index| all.get(usize::try_from(index).ok()?)?.id.clone());
        extras.nat_rules.extend(rule);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{good, ultra};

    #[test]
    fn mounts_name_the_device_that_the_size_shows() {
        let mut spec = good();
        spec.data_disks = vec![ultra(3)];
        let rendered = |nvme| mounted(br#"{"ignition":{"version":"3.2.0"}}"#, "lun3:/data:xfs", &spec, nvme).unwrap();
        assert!(
            rendered(false).contains("/dev/disk/azure/scsi1/lun3"),
            "{}",
            rendered(false)
        );
        assert!(
            rendered(true).contains("/dev/disk/azure/data/by-lun/3"),
            "{}",
            rendered(true)
        );
    }
}
