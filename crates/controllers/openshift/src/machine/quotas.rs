//! The quotas of regions. Read once for all machines that are created in a region at about the same time.

use super::Target;
use super::error::Error;
use crate::account::Account;
use crate::sizes;
use capstan_azure::Size;
use capstan_core::machine::quota::{Need, Room, Usage};
use capstan_core::{Clock, Memo};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A hundred machines that are created together cost one call. A machine that waits for quota learns after this long that
/// there is room.
const FRESH: Duration = Duration::from_secs(30);

/// An account that may not read quotas is asked for them again after this long: rights take minutes to spread.
const REFUSED: Duration = Duration::from_secs(600);

/// Capstan reads quotas again this long after a read that failed: longer than Azure usually throttles, so that this read, which
/// is only advice, does not keep the requests after it waiting without end.
const UNKNOWN: Duration = Duration::from_secs(120);

/// More regions than the accounts of one cluster have machines in.
const REGIONS: usize = 100;

/// Azure's answer about one region. Only a quota that is known to be full keeps a machine from being created.
#[derive(Clone)]
enum Answer {
    Known(Arc<Mutex<Room>>),
    /// The account may not read quotas.
    Refused,
    /// Azure did not answer.
    Unknown,
}

/// By account, subscription and region.
pub struct Quotas(Memo<[String; 3], Answer>);

impl Quotas {
    pub fn new(clock: Clock) -> Self {
        Self(Memo::new(clock, REGIONS))
    }

    /// Refuses a machine that the region has no quota for. OpenShift's own role may not read quotas: then Azure refuses the
    /// virtual machine itself.
    pub async fn check(&self, target: &Target, size: Option<&Size>) -> Result<(), Error> {
        let Target { spec, names, account } = target;
        let Some(size) = size else { return Ok(()) };
        // What Azure may count the size for at least: it must never be refused for more.
        let Some(v_cpus) = size.v_cpus_available.into_iter().chain(size.v_cpus).min() else {
            return Ok(());
        };
        let need = Need {
            size: &size.name,
            family: &size.family,
            v_cpus: i64::from(v_cpus),
            spot: spec.spot_vm_options.is_some(),
            reserved: spec
                .capacity_reservation_group_id
                .as_deref()
                .is_some_and(|id| !id.is_empty()),
        };
        match self.answer(account, &names.location).await? {
            Answer::Known(room) => {
                let admitted = room.lock().admit(&names.uid, &need, &names.location);
                admitted.map_err(Error::NotReady)
            }
            Answer::Refused | Answer::Unknown => Ok(()),
        }
    }

    /// Whether the account is known to have no right to read quotas.
    pub fn is_refused(&self, target: &Target) -> bool {
        let key = key(&target.account, &target.names.location);
        self.0.has(&key, |_, answer| matches!(answer, Answer::Refused))
    }

    async fn answer(&self, account: &Account, location: &str) -> Result<Answer, Error> {
        let (client, key) = (&account.client, key(account, location));
        let fresh = |age: Duration, answer: &Answer| match answer {
            Answer::Known(_) => age < FRESH,
            Answer::Refused => age < REFUSED,
            Answer::Unknown => age < UNKNOWN,
        };
        let read = async {
            Ok(match client.usages(location).await {
                Ok(found) => {
                    let room = Room::new(found.into_iter().map(usage).collect());
                    Answer::Known(Arc::new(Mutex::new(room)))
                }
                Err(error) if sizes::is_unreadable(&error) => {
                    tracing::warn!(location, %error, "the account may not read quotas (Microsoft.Compute/locations/usages/read): Azure checks them itself");
                    Answer::Refused
                }
                Err(error) => {
                    tracing::warn!(location, %error, "cannot read the quotas: Azure checks them itself");
                    Answer::Unknown
                }
            })
        };
        self.0.get_if(&key, fresh, read).await
    }
}

fn key(account: &Account, location: &str) -> [String; 3] {
    let client = &account.client;
    [client.identity(), client.subscription(), location].map(str::to_lowercase)
}

fn usage(found: capstan_azure::usages::Usage) -> Usage {
    Usage {
        name: found.name.value,
        label: found.name.localized_value,
        used: found.current_value,
        limit: found.limit,
    }
}
