//! Leader election, and the fence that goes with it.
//!
//! Invariant: no write passes the [`Fence`] later than the renew deadline after the last renewal was *sent*, by our own
//! clocks, whether or not the API server answers; another candidate takes the lease only the whole duration after it
//! *saw* that renewal. A request that is on its way has the time between the two. Each write of the Lease names the
//! version that it replaces, so a renewal can never revive a lease that another candidate has taken.

mod group;

use std::sync::Arc;
use std::time::{Duration, Instant};

use capstan_core::Clock;
use capstan_core::adopt::HOLDER;
use capstan_core::interceptor::{Effect, Interceptor, Verdict};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use parking_lot::Mutex;
use tracing::{info, warn};

pub use group::Group;

use crate::error::Error;

/// A request about the lease fails after this long: late is worse than failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The lease is released in so many tries, each within [`RELEASE_TIMEOUT`]: a stop must not exceed its grace period.
const RELEASE_TRIES: usize = 3;
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Clone, Debug)]
pub struct Settings {
    pub namespace: String,
    pub name: String,
    pub identity: Identity,
    /// How long others wait after the last renewal that they observed.
    pub duration: Duration,
    /// How long we go on after the last renewal that we sent; shorter than `duration`.
    pub renew_deadline: Duration,
    /// How often we read whether the lease is free.
    pub retry_period: Duration,
    /// How often we renew the lease.
    pub renew_period: Duration,
    pub clock: Clock,
}

/// The holder of a lease: `HOST-BOOT_NAMESPACE_PID_START`. A later process of the same machine learns from it that this
/// one has ended, and need not wait until the lease expires. Host names repeat, and so do the first namespaces of two
/// kernels; the kernel's id of this boot does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(String);

impl Identity {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn of_this_process() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".to_owned());
        let pid = std::process::id();
        let start = process_start(pid).unwrap_or_else(|| Clock::system().now().as_nanosecond().to_string());
        let (host, boot) = (host.trim().replace('_', "-"), boot());
        let space = boot.as_ref().and_then(|_| pid_namespace());
        let (boot, space) = (boot.as_deref().unwrap_or(UNKNOWN), space.as_deref().unwrap_or(UNKNOWN));
        Self(format!("{host}-{boot}_{space}_{pid}_{start}"))
    }

    /// Returns the holder of the leases of peers, for an installation of Capstan with this lease of its own. All replicas share
    /// it: among them the own lease decides, so a new leader need not wait for the leases of the one before. Another
    /// installation has another own lease, so it must wait for them.
    pub fn of_installation(namespace: &str, name: &str) -> Self {
        Self(format!("{HOLDER}{namespace}/{name}"))
    }

    /// Returns the holder of the leases of peers, for a Capstan without leader election: no other process is like it.
    pub fn of_single_installation() -> Self {
        Self(format!("{HOLDER}{}", Self::of_this_process().0))
    }

    /// Whether `holder` was a process of this machine (same host, same process namespace) that has ended.
    fn is_certainly_gone(&self, holder: &str) -> bool {
        let parts = |text: &str| text.split('_').map(str::to_owned).collect::<Vec<_>>();
        let (ours, theirs) = (parts(&self.0), parts(holder));
        let ([our_host, our_space, ..], [host, space, pid, start]) = (ours.as_slice(), theirs.as_slice()) else {
            return false;
        };
        let same_machine = ours.len() == 4 && our_host == host && our_space == space && space != UNKNOWN;
        let Ok(pid) = pid.parse() else { return false };
        same_machine && process_start(pid).as_ref() != Some(start)
    }
}

const UNKNOWN: &str = "none";

fn boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

fn pid_namespace() -> Option<String> {
    let link = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    Some(digits).filter(|digits| !digits.is_empty())
}

/// Returns the kernel's own count at which a process started; none for one that has ended and was not reaped yet.
fn process_start(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?;
    (!matches!(state, "Z" | "X")).then(|| start.to_owned())
}

/// A moment by both clocks: the steady one stands still while a virtual machine is suspended, the wall clock may be set.
/// A moment has passed as soon as one of them shows it.
#[derive(Clone, Copy, Debug)]
struct Moment {
    clock: Clock,
    steady: Instant,
    wall: Timestamp,
}

impl Moment {
    fn now(clock: Clock) -> Self {
        Self {
            clock,
            steady: clock.instant(),
            wall: clock.now(),
        }
    }

    fn after(self, time: Duration) -> Self {
        Self {
            steady: self.steady + time,
            wall: self.wall + time,
            ..self
        }
    }

    fn has_passed(&self) -> bool {
        self.clock.instant() >= self.steady || self.clock.now() >= self.wall
    }
}

/// Lets writes pass only while the lease is certainly ours. Reads always pass.
#[derive(Clone, Debug, Default)]
pub struct Fence(Arc<Mutex<Option<Moment>>>);

impl Fence {
    pub fn is_open(&self) -> bool {
        self.until().is_some_and(|until| !until.has_passed())
    }

    fn until(&self) -> Option<Moment> {
        *self.0.lock()
    }

    fn set(&self, until: Option<Moment>) {
        *self.0.lock() = until;
    }
}

impl Interceptor for Fence {
    fn before(&self, effect: &Effect) -> Verdict {
        if !effect.write || self.is_open() {
            return Verdict::Pass;
        }
        Verdict::Refuse(format!(
            "this replica is no longer the leader: {} {} was not sent",
            effect.method, effect.target
        ))
    }
}

/// The next action on a lease as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It is free, or its holder is gone: take it.
    Take,
    /// It is ours: renew it.
    Renew,
    /// Another candidate holds it.
    Wait,
}

/// `unchanged` is how long, by our own clock, the lease has been as it is: clocks of other machines do not count.
fn decide(spec: &LeaseSpec, identity: &Identity, unchanged: Duration, default_duration: Duration) -> Step {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok());
    let duration = seconds.map_or(default_duration, Duration::from_secs);
    match holder {
        "" => Step::Take,
        ours if ours == identity.0 => Step::Renew,
        other if unchanged >= duration || identity.is_certainly_gone(other) => Step::Take,
        _ => Step::Wait,
    }
}

/// The lease as last read, and since when it has been so.
struct Observed {
    spec: LeaseSpec,
    since: Instant,
}

/// A candidate for leadership, and the leader once it has won.
pub struct Elector {
    api: Api<Lease>,
    settings: Settings,
    fence: Fence,
    /// The lease as we last wrote it; `None` when it has to be read first.
    held: Option<Lease>,
    observed: Option<Observed>,
}

impl Elector {
    /// `client` must not retry by itself and must not pass the fence.
    pub fn new(client: kube::Client, settings: Settings, fence: Fence) -> Self {
        let api = Api::namespaced(client, &settings.namespace);
        Self {
            api,
            settings,
            fence,
            held: None,
            observed: None,
        }
    }

    /// Waits until we are the leader. The fence is open then.
    pub async fn win(&mut self) {
        let mut waiting_for = None;
        while !self.fence.is_open() {
            match self.attempt().await {
                Ok(()) => {}
                Err(error) => {
                    warn!(lease = %self.settings.name, %error, "cannot read or write the lease of the election")
                }
            }
            if self.fence.is_open() {
                break;
            }
            let holder = self.holder();
            if holder.is_some() && holder != waiting_for {
                info!(lease = %self.settings.name, holder, "waiting for the leader to release the lease");
                waiting_for = holder;
            }
            self.settings.clock.sleep(self.settings.retry_period).await;
        }
        info!(lease = %self.settings.name, identity = %self.settings.identity.0, "this process leads");
    }

    /// Returns the candidate that holds the lease instead of us.
    fn holder(&self) -> Option<String> {
        let observed = self.observed.as_ref()?;
        observed.spec.holder_identity.clone()
    }

    /// Renews the lease; returns when it is lost. The fence is closed then.
    pub async fn keep(&mut self) {
        while self.fence.is_open() {
            self.settings.clock.sleep(self.settings.renew_period).await;
            if let Err(error) = self.attempt().await {
                warn!(lease = %self.settings.name, %error, "cannot renew the lease");
            }
        }
        self.fence.set(None);
        warn!(lease = %self.settings.name, "Capstan lost the lease and refuses all writes");
    }

    /// Releases the lease, so that the next leader need not wait until it expires. Reads first whether it is ours where we
    /// cannot know: a renewal may have been cut off on its way.
    pub async fn release(&mut self) {
        self.fence.set(None);
        let name = self.settings.name.clone();
        for _ in 0..RELEASE_TRIES {
            let known = self.held.take();
            let reason = match capstan_core::clock::timeout(RELEASE_TIMEOUT, self.give_back(known)).await {
                Ok(Ok(true)) => return info!(lease = %name, "released"),
                Ok(Ok(false)) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {} s", RELEASE_TIMEOUT.as_secs()),
            };
            info!(lease = %name, reason, "cannot release the lease yet");
        }
        info!(lease = %name, "did not release the lease: it expires by itself");
    }

    /// Removes our name from the lease; returns false when it was not there.
    async fn give_back(&self, known: Option<Lease>) -> Result<bool, Error> {
        let lease = match known {
            Some(lease) => Some(lease),
            None => self.api.get_opt(&self.settings.name).await?,
        };
        let Some(mut lease) = lease else { return Ok(false) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.settings.identity.0) {
            return Ok(false);
        }
        spec.holder_identity = None;
        spec.renew_time = Some(MicroTime(self.settings.clock.now()));
        let params = PostParams::default();
        self.api.replace(&self.settings.name, &params, &lease).await?;
        Ok(true)
    }

    /// Reads the lease once, and writes it once if we may take or renew it.
    async fn attempt(&mut self) -> Result<(), Error> {
        let held = self.held.take();
        let limit = REQUEST_TIMEOUT.min(self.settings.renew_deadline / 2);
        match capstan_core::clock::timeout(limit, self.try_once(held)).await {
            Ok(result) => result,
            Err(_) => Err(late(limit)),
        }
    }

    async fn try_once(&mut self, held: Option<Lease>) -> Result<(), Error> {
        let current = match held {
            Some(lease) => Some(lease),
            None => self.api.get_opt(&self.settings.name).await?,
        };
        let Some(mut lease) = current else {
            let sent = Moment::now(self.settings.clock);
            let lease = self.api.create(&PostParams::default(), &self.fresh()).await?;
            self.won(lease, sent);
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        let unchanged = self.unchanged(spec);
        match decide(spec, &self.settings.identity, unchanged, self.settings.duration) {
            Step::Wait => {
                self.fence.set(None);
                return Ok(());
            }
            Step::Take => *spec = self.claim(spec.lease_transitions.unwrap_or_default() + 1),
            Step::Renew => spec.renew_time = Some(MicroTime(self.settings.clock.now())),
        }
        let sent = Moment::now(self.settings.clock);
        match self
            .api
            .replace(&self.settings.name, &PostParams::default(), &lease)
            .await
        {
            Ok(written) => self.won(written, sent),
            // Another candidate was faster; the next read shows which.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Whether the lease can be taken, or is ours already. Reads only.
    async fn is_free(&mut self) -> Result<bool, Error> {
        let read = capstan_core::clock::timeout(REQUEST_TIMEOUT, self.api.get_opt(&self.settings.name));
        let Some(lease) = read.await.map_err(|_| late(REQUEST_TIMEOUT))?? else {
            return Ok(true);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let unchanged = self.unchanged(&spec);
        let step = decide(&spec, &self.settings.identity, unchanged, self.settings.duration);
        Ok(step != Step::Wait)
    }

    fn won(&mut self, lease: Lease, sent: Moment) {
        self.held = Some(lease);
        self.observed = None;
        self.fence.set(Some(sent.after(self.settings.renew_deadline)));
    }

    fn unchanged(&mut self, spec: &LeaseSpec) -> Duration {
        match &self.observed {
            Some(observed) if observed.spec == *spec => self.settings.clock.since(observed.since),
            _ => {
                self.observed = Some(Observed {
                    spec: spec.clone(),
                    since: self.settings.clock.instant(),
                });
                Duration::ZERO
            }
        }
    }

    fn fresh(&self) -> Lease {
        let metadata = ObjectMeta {
            name: Some(self.settings.name.clone()),
            ..ObjectMeta::default()
        };
        Lease {
            metadata,
            spec: Some(self.claim(0)),
        }
    }

    fn claim(&self, transitions: i32) -> LeaseSpec {
        let now = MicroTime(self.settings.clock.now());
        // Rounded up: no other candidate may take it before we have stopped.
        let seconds = self.settings.duration.as_millis().div_ceil(1000).max(1);
        LeaseSpec {
            holder_identity: Some(self.settings.identity.0.clone()),
            lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

fn late(limit: Duration) -> Error {
    Error::Unreachable {
        cluster: "of the lease".to_owned(),
        reason: format!("no answer within {} ms", limit.as_millis()),
    }
}

#[cfg(test)]
mod tests;
