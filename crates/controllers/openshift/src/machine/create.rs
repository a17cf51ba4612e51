//! Makes a machine: everything is checked first, then come the public address, the interface, the disks that have to be
//! made on their own, and the virtual machine. Each request is the same when it is sent again, and the virtual machine's
//! is refused where one exists: so a second attempt never makes a second one.

use super::build::{self, Extras};
use super::error::Error;
use super::making::Making;
use super::names::Names;
use super::{Controller, Flow, Target, Work, check, provider_spec, status};
use crate::{account, sizes};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_api::openshift::{AzureMachineProviderSpec, Machine};
use capstan_azure::client::When;
use capstan_azure::model::LoadBalancer;
use capstan_azure::{Put, Size};
use capstan_core::Class;
use capstan_core::disks::azure::ultra_enabled;
use capstan_core::disks::init;
use capstan_kube::Next;
use jiff::Timestamp;
use kube::ResourceExt as _;
use std::time::Duration;

impl Controller {
    /// `mend`: Azure has begun the virtual machine and could not finish; ask it again.
    pub(super) async fn create(&self, work: &mut Work, mend: bool) -> Result<Flow, Error> {
        match self.made(work, mend).await {
            Ok(flow) => Ok(flow),
            Err(error) => self.judged(work, error).await,
        }
    }

    async fn made(&self, work: &mut Work, mend: bool) -> Result<Flow, Error> {
        // First what needs nobody else: a bad spec is refused even while its secrets are missing.
        let spec = provider_spec(&work.machine)?;
        check::spec(&work.machine.name_any(), &spec).map_err(Error::Refused)?;
        check::mounts(&work.machine).map_err(Error::Refused)?;
        check::user_data(&work.machine).map_err(Error::Refused)?;
        let target = self.target(&work.machine).await?;
        let Target { spec, names, account } = &target;
        check::place(names).map_err(Error::Refused)?;
        let mut making = self.memory.making(&work.uid).of(&work.machine);
        let mut extras = match self.surrounded(work, &target, &mut making).await {
            Ok(Surrounded::By(extras)) => extras,
            Ok(Surrounded::NotYet(after)) => {
                self.memory.keep_making(&work.uid, Some(making));
                return Ok(Flow::Rest(Next::After(after)));
            }
            Err(error) => {
                self.memory.keep_making(&work.uid, Some(making.after_trouble()));
                return Err(error);
            }
        };
        let nic = making.interface().cloned().unwrap_or_default();
        let addresses = status::addresses(&names.machine, &nic, making.public_address());
        // Should the virtual machine be refused, all of it is asked for again.
        self.memory.keep_making(&work.uid, Some(making.after_trouble()));
        let windows = spec.os_disk.os_type.eq_ignore_ascii_case("Windows");
        if windows || spec.ssh_public_key.as_deref().unwrap_or_default().is_empty() {
            extras.admin_password = Some(password());
        }
        let mut vm = build::virtual_machine(names, spec, &extras);
        let when = if mend { When::Always } else { When::Absent };
        if mend && let Some(properties) = vm.properties.as_mut() {
            // What the guest was given first cannot be changed.
            properties.os_profile = None;
        }
        let Put { value: made, operation } = match account.client.put_vm(&names.group, &names.machine, &vm, when).await
        {
            Err(error) if error.is_precondition_failed() && !mend => return self.look(work).await,
            Err(error) => return Err(self.refused(work, &target, error).await),
            Ok(put) => put,
        };
        self.memory.keep_making(&work.uid, None);
        self.memory.follow(&work.uid, operation.clone());
        let now = Timestamp::now();
        let after = status::provisioning(&work.machine, names, &made, operation.as_ref(), addresses, now);
        self.write_status(work, &after).await?;
        match operation {
            Some(operation) => Ok(Flow::Rest(Next::After(operation.due_in(Timestamp::now())))),
            None => self.settle(work).await,
        }
    }

    /// Everything is looked at before the first resource is made; then come those that the virtual machine needs.
    async fn surrounded(&self, work: &Work, target: &Target, making: &mut Making) -> Result<Surrounded, Error> {
        let (machine, spec) = (&work.machine, &target.spec);
        let mut custom_data = None;
        if making.extras.is_none() {
            let size = self.size(target).await?;
            self.unobstructed(work, target).await?;
            custom_data = Some(self.custom_data(machine, spec).await?);
            let mut extras = Extras {
                ipv6: self.subnets.is_dual_stack(target).await?,
                ..Extras::default()
            };
            balancers(target, &mut extras).await?;
            extras.availability_set = availability_set(target, size.as_ref()).await?;
            making.extras = Some(extras);
        }
        if let Some(after) = making.advance(target, status::is_inherited(machine)).await? {
            return Ok(Surrounded::NotYet(after));
        }
        let custom_data = match custom_data {
            Some(custom_data) => custom_data,
            None => self.custom_data(machine, spec).await?,
        };
        Ok(Surrounded::By(Extras {
            custom_data,
            ..making.extras.clone().unwrap_or_default()
        }))
    }

    /// What the size can do there; refused where it cannot do what the spec asks for.
    async fn size(&self, target: &Target) -> Result<Option<Size>, Error> {
        let Target { spec, names, account } = target;
        match sizes::look_up(&account.client, spec, &names.location).await {
            Ok(sizes::Verdict { size, refusals }) => match refusals.into_iter().next() {
                Some(refusal) => Err(Error::Refused(refusal)),
                None => Ok(size),
            },
            Err(error) if sizes::is_unreadable(&error) => {
                tracing::warn!(machine = names.machine, %error, "the size is not checked beforehand");
                Ok(None)
            }
            Err(error) => Err(Error::doing("reading the sizes that azure has")(error)),
        }
    }

    /// Nothing is begun while a disk is in the way that somebody else has to decide about: one that an earlier attempt ran
    /// into, or one that our request for a disk of its own would quietly take over, old data and all.
    async fn unobstructed(&self, work: &Work, target: &Target) -> Result<(), Error> {
        let Target { spec, names, account } = target;
        let first = spec.data_disks.iter().filter(|disk| build::made_first(disk));
        let first = first.map(|disk| names.data_disk(&disk.name_suffix));
        for disk in self.memory.obstacles(&work.uid).into_iter().chain(first) {
            let found = account.client.get_disk(&names.group, &disk).await;
            match found.map_err(Error::doing(format!("looking for disk {disk}")))? {
                Some(found) if !names.made(found.tags.as_ref()) => {
                    return Err(Error::NotYet(left_behind(
                        &disk,
                        found.id.as_deref().unwrap_or_default(),
                    )));
                }
                _ => {}
            }
        }
        self.memory.set_obstacles(&work.uid, Vec::new());
        Ok(())
    }

    /// Why Azure did not take the virtual machine. Its conflicts are told by what stands in the way, if that is known.
    async fn refused(&self, work: &Work, target: &Target, error: capstan_azure::Error) -> Error {
        let Target { spec, names, account } = target;
        if error.arm().is_none_or(|arm| arm.code != "ConflictingUserInput") {
            return refusal(names, error);
        }
        let Ok(listing) = self.disk_lists.get(&account.client, &names.group).await else {
            return refusal(names, error);
        };
        let wanted = spec.data_disks.iter().map(|disk| names.data_disk(&disk.name_suffix));
        let in_the_way = wanted.filter_map(|disk| {
            let found = listing.get(&disk.to_lowercase())?;
            (!names.made(found.tags.as_ref())).then(|| (disk, found.id.clone()))
        });
        let in_the_way: Vec<(String, String)> = in_the_way.collect();
        if in_the_way.is_empty() {
            return refusal(names, error);
        }
        let text: Vec<String> = in_the_way.iter().map(|(disk, id)| left_behind(disk, id)).collect();
        let disks = in_the_way.into_iter().map(|(disk, _)| disk).collect();
        self.memory.set_obstacles(&work.uid, disks);
        Error::NotYet(text.join("; "))
    }

    /// The user data as it is, encoded once; with the mounts that the machine's annotation asks for.
    async fn custom_data(&self, machine: &Machine, spec: &AzureMachineProviderSpec) -> Result<String, Error> {
        let reference = spec.user_data_secret.clone().unwrap_or_default();
        let name = reference.name.unwrap_or_default();
        let namespace = machine.namespace().unwrap_or_default();
        let key = account::Key { namespace, name };
        let secret = account::read_bytes(&self.ctx.client, &key, "user data").await?;
        let data = secret.get("userData").cloned().ok_or_else(|| {
            let account::Key { namespace, name } = &key;
            Error::NotYet(format!("user data secret {namespace}/{name} has no key userData"))
        })?;
        let Some(mounts) = machine.annotations().get(init::MOUNTS_ANNOTATION) else {
            return Ok(STANDARD.encode(data));
        };
        let rendered = mounted(&data, mounts, spec)
            .map_err(|error| Error::Refused(format!("annotation {}: {error}", init::MOUNTS_ANNOTATION)))?;
        Ok(STANDARD.encode(rendered))
    }
}

/// How far the things are that a virtual machine needs.
enum Surrounded {
    /// Look again after this long.
    NotYet(Duration),
    /// All there, with what the virtual machine's request needs besides the spec.
    By(Extras),
}

fn mounted(data: &[u8], mounts: &str, spec: &AzureMachineProviderSpec) -> Result<String, init::InitError> {
    let text = std::str::from_utf8(data).map_err(|_| init::InitError::UserData("not text".to_owned()))?;
    let disks: Vec<_> = spec
        .data_disks
        .iter()
        .map(|disk| init::KnownDisk::azure(disk.lun, &disk.name_suffix))
        .collect();
    init::merge(text, &init::resolve(&init::parse_requests(mounts)?, &disks)?)
}

/// What a disk in the way is called in condition and event.
fn left_behind(disk: &str, id: &str) -> String {
    format!(
        "Data Disk {disk} remains from an earlier machine of this name (deletionPolicy Detach) as {id}: delete it, or \
         choose another nameSuffix or another machine name; the machine is created as soon as the disk is out of the way"
    )
}

/// Azure's refusal of the virtual machine, in the words that users search for; anything else as it is.
fn refusal(names: &Names, error: capstan_azure::Error) -> Error {
    match (error.class(), error.arm()) {
        (Class::Terminal, Some(arm)) => Error::Refused(check::refused(&names.machine, arm)),
        _ => Error::Azure {
            doing: format!("cannot create vm {}", names.machine),
            source: error,
        },
    }
}

/// Long and mixed enough for Azure; nobody ever learns it.
fn password() -> String {
    format!("Aa1!{}", uuid::Uuid::new_v4().simple())
}

/// The backend pools and address translation rules of the load balancers that the spec names.
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
            return Err(Error::NotYet(format!(
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

/// The availability set: the spec's own, or one for the machine's set where the region has no zones.
async fn availability_set(target: &Target, size: Option<&Size>) -> Result<Option<String>, Error> {
    let Target { spec, names, account } = target;
    let id = |name: &str| {
        capstan_azure::ResourceId::compute(&names.subscription, &names.group, "availabilitySets", name).to_string()
    };
    if let Some(name) = spec.availability_set.as_deref().filter(|name| !name.is_empty()) {
        return Ok(Some(if name.starts_with("/subscriptions/") {
            name.to_owned()
        } else {
            id(name)
        }));
    }
    let zoneless = size.is_some_and(|size| size.zones.is_empty());
    let zone = spec.zone.as_deref().is_some_and(|zone| !zone.is_empty());
    // Azure takes neither spot machines nor Ultra disks into an availability set.
    if !zoneless || zone || spec.spot_vm_options.is_some() || ultra_enabled(spec) == Some(true) {
        return Ok(None);
    }
    let Some(name) = names.availability_set() else {
        return Ok(None);
    };
    let set = build::availability_set(names, spec);
    let made = account.client.put_availability_set(&names.group, &name, &set).await;
    made.map_err(Error::doing(format!("failed to create availability set {name}")))?;
    Ok(Some(id(&name)))
}
