//! The dependencies of a virtual machine: its public address, its interface, and the disks that have to be made on their
//! own. Azure needs them before it can be asked for the virtual machine.
//!
//! Invariants: a resource with our name that somebody else made is never changed; and no reconcile waits here for Azure:
//! it ends, and the machine is reconciled again when Azure may be asked.

use super::Target;
use super::build::{self, Extras};
use super::error::{Error, is_refused, misses_any};
use capstan_api::openshift::Machine;
use capstan_azure::client::When;
use capstan_azure::model::{NetworkInterface, PublicIpAddress};
use capstan_azure::{Error as AzureError, Put, Request};
use capstan_core::machine::names::Tags;
use capstan_core::machine::{self, Progress};
use jiff::Timestamp;
use std::collections::HashMap;
use std::time::Duration;

/// How far a machine's dependencies are.
#[derive(Clone, Debug, Default)]
pub struct Dependencies {
    generation: Option<i64>,
    /// Input of the requests besides the spec, without the user data; read before the first of them.
    pub extras: Option<Extras>,
    wants_address: bool,
    public_ip: Request<PublicIpAddress>,
    nic: Request<NetworkInterface>,
    disks: Vec<(String, Request<()>)>,
    /// Known to be the machine's: a further request need not ask again.
    own_address: bool,
    own_interface: bool,
}

impl Dependencies {
    /// Whether they were made for the spec as it is now.
    pub fn is_of(&self, machine: &Machine) -> bool {
        self.generation == machine.metadata.generation
    }

    /// Everything was checked and read for this spec. Operations that run for the same spec are kept.
    pub fn prepared(self, machine: &Machine, target: &Target, extras: Extras) -> Self {
        let before = if self.is_of(machine) { self } else { self.again() };
        let disks = target.spec.data_disks.iter();
        let first = disks.filter(|disk| build::made_first(disk, &extras.kept));
        let mut requests: HashMap<String, Request<()>> = before.disks.into_iter().collect();
        let disks = first.map(|disk| {
            let name = target.names.data_disk(&disk.name_suffix);
            let request = requests.remove(&name).unwrap_or_default();
            (name, request)
        });
        let disks = disks.collect();
        Self {
            generation: machine.metadata.generation,
            extras: Some(extras),
            wants_address: target.spec.public_ip,
            disks,
            ..before
        }
    }

    pub fn progress(&self, now: Timestamp) -> machine::Dependencies {
        let disks = self.disks.iter().map(|(_, stage)| progress(stage, now));
        machine::Dependencies {
            prepared: self.extras.is_some(),
            address: self.wants_address.then(|| progress(&self.public_ip, now)),
            interface: progress(&self.nic, now),
            disks: disks.fold(Progress::Done, least),
        }
    }

    /// As they are kept after an error: what Azure works on is polled further, everything else is sent again.
    pub fn after_error(self) -> Self {
        let disks = self.disks.iter().map(|(_, stage)| matches!(stage, Request::Running(_)));
        let network = [
            matches!(self.public_ip, Request::Running(_)),
            matches!(self.nic, Request::Running(_)),
        ];
        if disks.chain(network).any(|running| running) {
            self
        } else {
            self.again()
        }
    }

    fn again(self) -> Self {
        Self {
            generation: self.generation,
            own_address: self.own_address,
            own_interface: self.own_interface,
            ..Self::default()
        }
    }

    pub fn interface(&self) -> Option<&NetworkInterface> {
        self.nic.value()
    }

    pub fn public_address(&self) -> Option<&PublicIpAddress> {
        self.public_ip.value()
    }

    /// Advances the public address. Returns how long to wait, or nothing once it is there.
    pub async fn ensure_address(&mut self, target: &Target, inherited: bool) -> Result<Option<Duration>, Error> {
        let name = target.names.public_ip();
        let send = put_address(target, inherited, &mut self.own_address);
        let advanced = self.public_ip.advance(&target.account.client, send).await;
        let what = format!("failed to create public ip {name} for machine {}", target.names.machine);
        advanced.map_err(|error| refused(error, &format!("a public ip address named {name}"), what))
    }

    /// Advances interface and disks. Returns how long to wait, or nothing once they are there.
    pub async fn ensure_interface_and_disks(
        &mut self,
        target: &Target,
        inherited: bool,
    ) -> Result<Option<Duration>, Error> {
        let extras = self.extras.clone().unwrap_or_default();
        let nic = interface(&mut self.nic, &mut self.own_interface, target, &extras, inherited);
        // Both are awaited whatever one of them answers: an operation that runs must not be forgotten.
        let (nic, disks) = futures::join!(nic, disks(&mut self.disks, target));
        let refused = matches!(&disks, Err(Error::Azure { source, .. }) if is_refused(source));
        if refused && matches!(nic, Ok(None)) && extras.joins_a_balancer() {
            leave_balancers(target, &extras).await;
        }
        Ok([nic?, disks?].into_iter().flatten().min())
    }
}

fn progress<T>(stage: &Request<T>, now: Timestamp) -> Progress {
    match stage {
        Request::NotSent => Progress::NotRequested,
        Request::Running(operation) => Progress::Pending(operation.due_in(now)),
        Request::Done(_) => Progress::Done,
    }
}

/// Returns the one of two that can be advanced first.
fn least(one: Progress, other: Progress) -> Progress {
    match (one, other) {
        (Progress::NotRequested, _) | (_, Progress::NotRequested) => Progress::NotRequested,
        (Progress::Pending(one), Progress::Pending(other)) => Progress::Pending(one.min(other)),
        (Progress::Pending(wait), Progress::Done) | (Progress::Done, Progress::Pending(wait)) => {
            Progress::Pending(wait)
        }
        (Progress::Done, Progress::Done) => Progress::Done,
    }
}

async fn interface(
    stage: &mut Request<NetworkInterface>,
    own: &mut bool,
    target: &Target,
    extras: &Extras,
    inherited: bool,
) -> Result<Option<Duration>, Error> {
    let name = target.names.nic();
    let send = put_interface(target, extras, inherited, own);
    let advanced = stage.advance(&target.account.client, send).await;
    let what = format!("failed to create nic {name} for machine {}", target.names.machine);
    let wait = advanced.map_err(|error| {
        // Azure may not see the address yet that was just made.
        if target.spec.public_ip && misses_any(&error, &[target.names.public_ip()]) {
            return Error::NotReady(format!("{what}: {error}"));
        }
        refused(error, &format!("a network interface named {name}"), what.clone())
    })?;
    let properties = stage.value().and_then(|nic| nic.properties.as_ref());
    if properties.is_some_and(|properties| properties.provisioning_state.as_deref() == Some("Failed")) {
        // Azure accepted the request and could not finish it. In a balancer's pool such an interface blocks the balancer.
        *stage = Request::NotSent;
        return Err(Error::NotReady(format!(
            "{what}: Azure could not finish it, it ended Failed"
        )));
    }
    Ok(wait)
}

/// Takes the interface out of the pools of its balancers: a member without a virtual machine keeps Azure and the cloud
/// provider from configuring them. The next attempt puts it back.
pub async fn leave_balancers(target: &Target, extras: &Extras) {
    let Target { spec, names, account } = target;
    let alone = build::nic(names, spec, &extras.without_balancers());
    let left = account
        .client
        .put_nic(&names.group, &names.nic(), &alone, When::Always)
        .await;
    if let Err(error) = left {
        tracing::warn!(%error, nic = names.nic(), "the interface stays in the pools of its balancers until the next attempt");
    }
}

/// Creates or updates a resource, unless somebody else has made one of its name. `tags` reads those of the one that is there.
async fn put_own<T, Sent: Future<Output = Result<Put<T>, AzureError>>>(
    put: impl Fn(When) -> Sent,
    tags: impl Future<Output = Result<Option<Option<Tags>>, AzureError>>,
    is_own: impl FnOnce(Option<&Tags>) -> bool,
    own: &mut bool,
) -> Result<Put<T>, AzureError> {
    match put(if *own { When::Always } else { When::Absent }).await {
        Err(error) if error.is_precondition_failed() => {
            if tags.await?.is_some_and(|tags| !is_own(tags.as_ref())) {
                return Err(error);
            }
        }
        result => {
            *own |= result.is_ok();
            return result;
        }
    }
    *own = true;
    put(When::Always).await
}

async fn put_address(target: &Target, inherited: bool, own: &mut bool) -> Result<Put<PublicIpAddress>, AzureError> {
    let Target { spec, names, account } = target;
    let (client, name, wanted) = (&account.client, names.public_ip(), build::public_ip(names, spec));
    let found = async {
        let found = client.get_public_ip(&names.group, &name).await?;
        Ok(found.map(|found| found.tags))
    };
    let put = |when| client.put_public_ip(&names.group, &name, &wanted, when);
    put_own(put, found, |tags| names.has_made(tags, inherited), own).await
}

async fn put_interface(
    target: &Target,
    extras: &Extras,
    inherited: bool,
    own: &mut bool,
) -> Result<Put<NetworkInterface>, AzureError> {
    let Target { spec, names, account } = target;
    let (client, name, wanted) = (&account.client, names.nic(), build::nic(names, spec, extras));
    let found = async {
        let found = client.get_nic(&names.group, &name).await?;
        Ok(found.map(|found| found.tags))
    };
    let put = |when| client.put_nic(&names.group, &name, &wanted, when);
    put_own(put, found, |tags| names.has_made(tags, inherited), own).await
}

fn refused(error: AzureError, what: &str, doing: String) -> Error {
    if error.is_precondition_failed() {
        return Error::Invalid(format!("{what} exists already and was not made for this machine"));
    }
    Error::doing(doing)(error)
}

/// Advances the disks with a performance of their own, all at once.
async fn disks(stages: &mut [(String, Request<()>)], target: &Target) -> Result<Option<Duration>, Error> {
    let (spec, names) = (&target.spec, &target.names);
    let client = &target.account.client;
    let wanted = stages.iter_mut().filter_map(|(name, stage)| {
        let mut disks = spec.data_disks.iter();
        let disk = disks.find(|disk| names.data_disk(&disk.name_suffix) == *name)?;
        Some((disk, name, stage))
    });
    let made = wanted.map(|(disk, name, stage)| async move {
        let send = async {
            let put = client
                .put_disk(&names.group, name, &build::disk(names, spec, disk))
                .await?;
            Ok(put.operation)
        };
        let finished = stage.finish(client, send).await;
        finished.map_err(Error::doing(format!(
            "failed to create Data Disk: {name} for vm {}",
            names.machine
        )))
    });
    let made = futures::future::join_all(made).await;
    let waits: Vec<Option<Duration>> = made.into_iter().collect::<Result<_, _>>()?;
    Ok(waits.into_iter().flatten().min())
}
