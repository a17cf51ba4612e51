//! Leader election, and the fence that goes with it.
//!
//! Invariant: no write passes the [`Fence`] later than the renew deadline after the last renewal was *sent*, by our own
//! clocks, whether or not the API server answers; another candidate takes the lease only the whole duration after it
//! *saw* that renewal. The time between the two is what a request on its way may still need. Each write of the Lease
//! names the version that it replaces, so a renewal can never revive a lease that somebody else has taken.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use capstan_core::door::{Door, Effect, Verdict};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use tracing::{info, warn};

use crate::error::Error;

/// A request about the lease is given up after this long: late is worse than failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Settings {
    pub namespace: String,
    pub name: String,
    pub identity: Identity,
    /// How long others wait after the last renewal that they saw.
    pub duration: Duration,
    /// How long we go on after the last renewal that we sent; shorter than `duration`.
    pub renew_deadline: Duration,
    /// How often we renew, or look whether the lease is free.
    pub retry_period: Duration,
}

/// Who holds a lease: `HOST_NAMESPACE_PID_START`, which tells a later process of the same machine that this one is
/// gone, so that it need not wait the lease out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity(String);

impl Identity {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn of_this_process() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".to_owned());
        let pid = std::process::id();
        let start = process_start(pid).unwrap_or_else(|| {
            let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
            since.as_nanos().to_string()
        });
        Self(format!(
            "{}_{}_{pid}_{start}",
            host.trim().replace('_', "-"),
            pid_namespace()
        ))
    }

    /// Whether `holder` was a process of this machine (same host, same process namespace) that no longer lives.
    fn is_certainly_gone(&self, holder: &str) -> bool {
        let parts = |text: &str| text.split('_').map(str::to_owned).collect::<Vec<_>>();
        let (ours, theirs) = (parts(&self.0), parts(holder));
        let ([our_host, our_space, ..], [host, space, pid, start]) = (ours.as_slice(), theirs.as_slice()) else {
            return false;
        };
        let same_machine = ours.len() == 4 && our_host == host && our_space == space && space != UNKNOWN_NAMESPACE;
        let Ok(pid) = pid.parse() else { return false };
        same_machine && process_start(pid).as_ref() != Some(start)
    }
}

const UNKNOWN_NAMESPACE: &str = "none";

fn pid_namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    if digits.is_empty() {
        UNKNOWN_NAMESPACE.to_owned()
    } else {
        digits
    }
}

/// The kernel's own count at which a process started; none for one that has ended and was not reaped yet.
fn process_start(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?;
    (!matches!(state, "Z" | "X")).then(|| start.to_owned())
}

/// A moment by both clocks: the steady one stands still while a virtual machine is suspended, the wall clock may be set.
/// Whichever says first that a moment has passed is believed.
#[derive(Clone, Copy, Debug)]
struct Moment {
    steady: Instant,
    wall: SystemTime,
}

impl Moment {
    fn now() -> Self {
        Self {
            steady: Instant::now(),
            wall: SystemTime::now(),
        }
    }

    fn after(self, time: Duration) -> Self {
        Self {
            steady: self.steady + time,
            wall: self.wall + time,
        }
    }

    fn has_passed(&self) -> bool {
        Instant::now() >= self.steady || SystemTime::now() >= self.wall
    }
}

/// Lets writes pass only while the lease is surely ours. Reads always pass.
#[derive(Clone, Debug, Default)]
pub struct Fence(Arc<Mutex<Option<Moment>>>);

impl Fence {
    pub fn is_open(&self) -> bool {
        self.until().is_some_and(|until| !until.has_passed())
    }

    fn until(&self) -> Option<Moment> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, until: Option<Moment>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

impl Door for Fence {
    fn enter(&self, effect: &Effect) -> Verdict {
        if !effect.write || self.is_open() {
            return Verdict::Pass;
        }
        Verdict::Refuse(format!(
            "the lease is not ours any more: {} {} was not sent",
            effect.method, effect.target
        ))
    }
}

/// What to do about a lease as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It is free, or its holder is gone: take it.
    Take,
    /// It is ours: renew it.
    Renew,
    /// Somebody else has it.
    Wait,
}

/// `unchanged` is how long, by our own clock, we have seen the lease as it is: clocks of other machines are not asked.
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

/// The lease as last read, and since when it has looked like that.
struct Seen {
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
    seen: Option<Seen>,
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
            seen: None,
        }
    }

    /// Waits until we are the leader. The fence is open then.
    pub async fn win(&mut self) {
        let mut waiting_for = None;
        while !self.fence.is_open() {
            match self.attempt().await {
                Ok(()) => {}
                Err(error) => warn!(lease = %self.settings.name, %error, "cannot take part in the election"),
            }
            if self.fence.is_open() {
                break;
            }
            let holder = self.seen.as_ref().and_then(|seen| seen.spec.holder_identity.clone());
            if holder.is_some() && holder != waiting_for {
                info!(lease = %self.settings.name, holder, "waiting for the leader to go");
                waiting_for = holder;
            }
            tokio::time::sleep(self.settings.retry_period).await;
        }
        info!(lease = %self.settings.name, identity = %self.settings.identity.0, "leading");
    }

    /// Renews the lease; returns when it is lost. The fence is closed then.
    pub async fn keep(&mut self) {
        while self.fence.is_open() {
            tokio::time::sleep(self.settings.retry_period).await;
            if let Err(error) = self.attempt().await {
                warn!(lease = %self.settings.name, %error, "cannot renew the lease");
            }
        }
        self.fence.set(None);
        warn!(lease = %self.settings.name, "the lease is lost: all writes are refused from here on");
    }

    /// Gives the lease back, so that the next one need not wait it out.
    pub async fn release(&mut self) {
        self.fence.set(None);
        let Some(mut lease) = self.held.take() else { return };
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
            spec.renew_time = Some(MicroTime(Timestamp::now()));
        }
        let name = self.settings.name.clone();
        let params = PostParams::default();
        let write = self.api.replace(&name, &params, &lease);
        match tokio::time::timeout(REQUEST_TIMEOUT, write).await {
            Ok(Ok(_)) => info!(lease = %name, "released"),
            _ => info!(lease = %name, "not released: it expires by itself"),
        }
    }

    /// One look at the lease, and one write if it is ours to take or renew.
    async fn attempt(&mut self) -> Result<(), Error> {
        let held = self.held.take();
        let limit = REQUEST_TIMEOUT.min(self.settings.renew_deadline / 2);
        match tokio::time::timeout(limit, self.try_once(held)).await {
            Ok(result) => result,
            Err(_) => Err(Error::Unreachable {
                cluster: "of the lease".to_owned(),
                reason: format!("no answer within {} ms", limit.as_millis()),
            }),
        }
    }

    async fn try_once(&mut self, held: Option<Lease>) -> Result<(), Error> {
        let current = match held {
            Some(lease) => Some(lease),
            None => self.api.get_opt(&self.settings.name).await?,
        };
        let Some(mut lease) = current else {
            let sent = Moment::now();
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
            Step::Renew => spec.renew_time = Some(MicroTime(Timestamp::now())),
        }
        let sent = Moment::now();
        match self
            .api
            .replace(&self.settings.name, &PostParams::default(), &lease)
            .await
        {
            Ok(written) => self.won(written, sent),
            // Somebody was faster; the next look shows who.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn won(&mut self, lease: Lease, sent: Moment) {
        self.held = Some(lease);
        self.seen = None;
        self.fence.set(Some(sent.after(self.settings.renew_deadline)));
    }

    fn unchanged(&mut self, spec: &LeaseSpec) -> Duration {
        match &self.seen {
            Some(seen) if seen.spec == *spec => seen.since.elapsed(),
            _ => {
                self.seen = Some(Seen {
                    spec: spec.clone(),
                    since: Instant::now(),
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
        let now = MicroTime(Timestamp::now());
        LeaseSpec {
            holder_identity: Some(self.settings.identity.0.clone()),
            lease_duration_seconds: Some(i32::try_from(self.settings.duration.as_secs().max(1)).unwrap_or(i32::MAX)),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_core::door::World;
    use rstest::rstest;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(holder: &str, seconds: Option<i32>) -> LeaseSpec {
        LeaseSpec {
            holder_identity: (!holder.is_empty()).then(|| holder.to_owned()),
            lease_duration_seconds: seconds,
            ..LeaseSpec::default()
        }
    }

    #[rstest]
    #[case::free("", Some(15), 0, Step::Take)]
    #[case::ours("me", Some(15), 99, Step::Renew)]
    #[case::just_seen("other", Some(15), 0, Step::Wait)]
    #[case::almost_expired("other", Some(15), 14, Step::Wait)]
    #[case::expired("other", Some(15), 15, Step::Take)]
    #[case::the_holders_own_duration_counts("other", Some(60), 59, Step::Wait)]
    #[case::without_a_duration_ours_counts("other", None, 30, Step::Take)]
    #[case::a_nonsense_duration("other", Some(-1), 29, Step::Wait)]
    fn a_lease_is_taken_only_when_nobody_can_hold_it(
        #[case] holder: &str,
        #[case] seconds: Option<i32>,
        #[case] unchanged: u32,
        #[case] expected: Step,
    ) {
        let step = decide(
            &lease(holder, seconds),
            &Identity::new("me"),
            SECOND * unchanged,
            SECOND * 30,
        );
        assert_eq!(step, expected);
    }

    #[test]
    fn a_dead_process_of_this_machine_is_not_waited_for() {
        let us = Identity::of_this_process();
        let with = |pid: &str, start: &str| {
            let parts: Vec<&str> = us.0.split('_').collect();
            format!("{}_{}_{pid}_{start}", parts[0], parts[1])
        };
        assert!(us.is_certainly_gone(&with("4194305", "1")), "no such process");
        assert!(
            us.is_certainly_gone(&with("1", "1")),
            "the number belongs to another process by now"
        );
        assert!(!us.is_certainly_gone(&us.0), "we live");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let (pid, start) = (ended.id().to_string(), process_start(ended.id()));
        while process_start(ended.id()).is_some() {
            std::thread::yield_now();
        }
        let start = start.unwrap_or_else(|| "1".to_owned());
        assert!(
            us.is_certainly_gone(&with(&pid, &start)),
            "it ended, though nobody reaped it"
        );
        ended.wait().unwrap();
        assert!(
            !us.is_certainly_gone("other-host_4026531836_4194305_1"),
            "we cannot know"
        );
        assert!(!us.is_certainly_gone("4b1c-some-uuid"), "we cannot know");
    }

    #[test]
    fn a_closed_fence_refuses_writes_to_every_world_and_lets_reads_pass() {
        let effect = |world, write| Effect {
            world,
            method: "PUT".into(),
            target: "/x".into(),
            write,
        };
        let fence = Fence::default();
        for world in [World::Azure, World::Vsphere, World::Kube] {
            assert!(matches!(fence.enter(&effect(world, true)), Verdict::Refuse(_)));
            assert_eq!(fence.enter(&effect(world, false)), Verdict::Pass);
        }
        fence.set(Some(Moment::now().after(SECOND * 60)));
        assert_eq!(fence.enter(&effect(World::Azure, true)), Verdict::Pass);
        // Either clock closes it.
        fence.set(Some(Moment {
            steady: Instant::now() + SECOND * 60,
            wall: SystemTime::now() - SECOND,
        }));
        assert!(!fence.is_open());
    }
}
