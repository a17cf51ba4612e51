//! What a virtual machine needs before Azure can be asked for it: its public address, its interface, and the disks that
//! have to be made on their own.
//!
//! Invariants: nothing that somebody else made under our names is changed; and nobody waits here for Azure's work: a
//! machine is left alone until Azure may be asked again, and others have their turn meanwhile.

use super::Target;
use super::build::{self, Extras};
use super::error::Error;
use capstan_api::openshift::Machine;
use capstan_azure::client::When;
use capstan_azure::model::{NetworkInterface, PublicIpAddress};
use capstan_azure::{Error as AzureError, Put, Request};
use std::time::Duration;

/// How far a machine's surroundings are. Kept between the passes that it takes to make them.
#[derive(Clone, Debug, Default)]
pub struct Making {
    generation: Option<i64>,
    /// What the requests need besides the spec, without the user data; read before the first of them.
    pub extras: Option<Extras>,
    public_ip: Request<PublicIpAddress>,
    nic: Request<NetworkInterface>,
    disks: Vec<(String, Request<()>)>,
    /// Seen to be ours by this process: a further request need not ask again.
    own_address: bool,
    own_interface: bool,
}

impl Making {
    /// Begins anew where the spec has changed since.
    pub fn of(self, machine: &Machine) -> Self {
        if self.generation == machine.metadata.generation {
            return self;
        }
        Self {
            generation: machine.metadata.generation,
            ..self.again()
        }
    }

    /// As it is kept after trouble: what Azure works on is followed further, everything else is sent again.
    pub fn after_trouble(self) -> Self {
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

    pub fn public_address(&self) -> Option<&str> {
        let properties = self.public_ip.value()?.properties.as_ref()?;
        properties.ip_address.as_deref()
    }

    /// Goes on as far as that is possible now: how long to leave it alone, or nothing once all of it is there.
    pub async fn advance(&mut self, target: &Target, inherited: bool) -> Result<Option<Duration>, Error> {
        let extras = self.extras.clone().unwrap_or_default();
        if target.spec.public_ip {
            let address = self.address(target, inherited).await?;
            if address.is_some() {
                return Ok(address);
            }
        }
        let nic = interface(&mut self.nic, &mut self.own_interface, target, &extras, inherited);
        // Both are heard out: what Azure has begun is not to be forgotten.
        let (nic, disks) = futures::join!(nic, disks(&mut self.disks, target));
        Ok([nic?, disks?].into_iter().flatten().min())
    }

    async fn address(&mut self, target: &Target, inherited: bool) -> Result<Option<Duration>, Error> {
        let name = target.names.public_ip();
        let send = put_address(target, inherited, &mut self.own_address);
        let advanced = self.public_ip.advance(&target.account.client, send).await;
        let what = format!("failed to create public ip {name} for machine {}", target.names.machine);
        advanced.map_err(|error| refused(error, &format!("a public ip address named {name}"), what))
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
    advanced.map_err(|error| refused(error, &format!("a network interface named {name}"), what))
}

fn when(own: bool) -> When {
    if own { When::Always } else { When::Absent }
}

/// Puts the address there, unless somebody else has put one there.
async fn put_address(target: &Target, inherited: bool, own: &mut bool) -> Result<Put<PublicIpAddress>, AzureError> {
    let Target { spec, names, account } = target;
    let (client, name) = (&account.client, names.public_ip());
    let wanted = build::public_ip(names, spec);
    match client.put_public_ip(&names.group, &name, &wanted, when(*own)).await {
        Err(error) if error.is_precondition_failed() => {
            let found = client.get_public_ip(&names.group, &name).await?;
            if found.is_some_and(|found| !names.has_made(found.tags.as_ref(), inherited)) {
                return Err(error);
            }
        }
        result => {
            *own |= result.is_ok();
            return result;
        }
    }
    *own = true;
    client.put_public_ip(&names.group, &name, &wanted, When::Always).await
}

/// The same for the interface.
async fn put_interface(
    target: &Target,
    extras: &Extras,
    inherited: bool,
    own: &mut bool,
) -> Result<Put<NetworkInterface>, AzureError> {
    let Target { spec, names, account } = target;
    let (client, name) = (&account.client, names.nic());
    let wanted = build::nic(names, spec, extras);
    match client.put_nic(&names.group, &name, &wanted, when(*own)).await {
        Err(error) if error.is_precondition_failed() => {
            let found = client.get_nic(&names.group, &name).await?;
            if found.is_some_and(|found| !names.has_made(found.tags.as_ref(), inherited)) {
                return Err(error);
            }
        }
        result => {
            *own |= result.is_ok();
            return result;
        }
    }
    *own = true;
    client.put_nic(&names.group, &name, &wanted, When::Always).await
}

fn refused(error: AzureError, what: &str, doing: String) -> Error {
    if error.is_precondition_failed() {
        return Error::Refused(format!("{what} exists already and was not made for this machine"));
    }
    Error::doing(doing)(error)
}

/// Disks with a performance of their own; all at once.
async fn disks(stages: &mut Vec<(String, Request<()>)>, target: &Target) -> Result<Option<Duration>, Error> {
    let (spec, names) = (&target.spec, &target.names);
    let client = &target.account.client;
    let wanted: Vec<_> = spec.data_disks.iter().filter(|disk| build::made_first(disk)).collect();
    if stages.is_empty() {
        let names = wanted.iter().map(|disk| names.data_disk(&disk.name_suffix));
        *stages = names.map(|name| (name, Request::NotSent)).collect();
    }
    let made = wanted.into_iter().zip(stages).map(|(disk, (name, stage))| async move {
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
