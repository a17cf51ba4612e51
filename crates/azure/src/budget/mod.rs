//! The request budget: every call waits its turn in the buckets that Azure will count it in.
//!
//! Invariants: in no window of time do more calls go than the published limits allow; while a bucket is stopped by a 429
//! no call of it goes at all; deletes go before writes and writes before reads, each in the order of arrival; a call is
//! counted for the principal that signs in, whatever subscription it names; the number of buckets is bounded.

pub mod bucket;
pub mod policy;

use crate::metrics::{BucketLabels, Metrics};
use bucket::Bucket;
use capstan_core::Clock;
use parking_lot::{Mutex, MutexGuard};
use policy::{Kind, Policy};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Buckets that are full again are forgotten when there are more than this.
const PRUNE_ABOVE: usize = 4096;

/// With more than this, buckets that are in use are forgotten too.
const MOST_BUCKETS: usize = 3 * PRUNE_ABOVE;

/// The buckets in which Azure counts a call.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The identity that signs in. Azure counts the calls of each principal on its own.
    pub principal: Arc<str>,
    pub subscription: Arc<str>,
    pub location: Arc<str>,
    pub policy: Policy,
    pub kind: Kind,
    /// The resource, where Azure counts by resource too.
    pub resource: Option<Arc<str>>,
}

/// A 429 stopped the bucket for this long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoppedFor(pub Duration);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Scope {
    Manager(Kind),
    Region(Policy),
    Resource(Policy, Arc<str>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    principal: Arc<str>,
    subscription: Arc<str>,
    location: Arc<str>,
    scope: Scope,
}

impl Ask {
    fn key(&self, scope: Scope) -> Key {
        Key {
            principal: self.principal.clone(),
            subscription: self.subscription.clone(),
            location: self.location.clone(),
            scope,
        }
    }

    fn keys(&self) -> Vec<Key> {
        let region = self.policy.per_region().map(|_| Scope::Region(self.policy));
        let resource = self.policy.per_resource().and(self.resource.clone());
        [
            Some(Scope::Manager(self.kind)),
            region,
            resource.map(|id| Scope::Resource(self.policy, id)),
        ]
        .into_iter()
        .flatten()
        .map(|scope| self.key(scope))
        .collect()
    }
}

type Place = (Kind, u64);

#[derive(Default)]
struct State {
    buckets: HashMap<Key, Bucket>,
    /// The waiting calls and their buckets, in the order of their turns.
    queue: BTreeMap<Place, Vec<Key>>,
    arrivals: u64,
    prune_above: usize,
}

enum Turn {
    Go,
    Wait(Duration),
    Stopped(Duration),
}

impl State {
    fn bucket(&mut self, key: &Key, now: Instant) -> Option<&mut Bucket> {
        let limit = match &key.scope {
            Scope::Manager(kind) => Some(kind.limit()),
            Scope::Region(policy) => policy.per_region(),
            Scope::Resource(policy, _) => policy.per_resource(),
        }?;
        Some(
            self.buckets
                .entry(key.clone())
                .or_insert_with(|| Bucket::new(limit, now)),
        )
    }

    fn turn(&mut self, place: Place, now: Instant) -> Turn {
        let keys = self.queue.get(&place).cloned().unwrap_or_default();
        let stopped = keys.iter().filter_map(|key| self.bucket(key, now)?.stopped(now)).max();
        if let Some(left) = stopped {
            return Turn::Stopped(left);
        }
        let mut wait = Duration::ZERO;
        for key in &keys {
            let ahead = self
                .queue
                .range(..place)
                .filter(|(_, others)| others.contains(key))
                .count();
            if let Some(bucket) = self.bucket(key, now) {
                wait = wait.max(bucket.wait(u32::try_from(ahead).unwrap_or(u32::MAX), now));
            }
        }
        if !wait.is_zero() {
            return Turn::Wait(wait);
        }
        for key in &keys {
            if let Some(bucket) = self.bucket(key, now) {
                bucket.take();
            }
        }
        self.queue.remove(&place);
        Turn::Go
    }

    fn prune(&mut self, now: Instant) {
        if self.buckets.len() <= self.prune_above.max(PRUNE_ABOVE) {
            return;
        }
        self.buckets.retain(|_, bucket| !bucket.is_idle(now));
        // Not at every call: only when there are many new ones again.
        self.prune_above = (2 * self.buckets.len()).min(MOST_BUCKETS);
        if self.buckets.len() < MOST_BUCKETS {
            return;
        }
        // The fullest first: Azure counts on, and its next answer corrects one that was forgotten too early.
        let mut by_use: Vec<(Key, f64)> = self
            .buckets
            .iter()
            .filter(|(_, bucket)| bucket.stopped(now).is_none())
            .map(|(key, bucket)| (key.clone(), bucket.spent()))
            .collect();
        by_use.sort_by(|one, other| one.1.total_cmp(&other.1));
        let surplus = self.buckets.len() - PRUNE_ABOVE;
        for (key, _) in by_use.into_iter().take(surplus) {
            self.buckets.remove(&key);
        }
    }
}

/// All buckets of one process.
#[derive(Default)]
pub struct Budget {
    state: Mutex<State>,
    clock: Clock,
    metrics: Metrics,
}

/// A place in the queue. It is released when the caller drops its call.
struct Ticket<'a> {
    budget: &'a Budget,
    place: Place,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.budget.lock().queue.remove(&self.place);
        self.budget.metrics.waiting.dec();
    }
}

impl Budget {
    pub fn new(clock: Clock, metrics: Metrics) -> Self {
        Self {
            state: Mutex::default(),
            clock,
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns how many buckets there are.
    #[cfg(test)]
    pub fn buckets(&self) -> usize {
        self.lock().buckets.len()
    }

    fn labels(&self, ask: &Ask, policy: &'static str) -> BucketLabels {
        self.metrics.labels(&ask.subscription, &ask.location, policy)
    }

    /// Waits for this call's turn. Callers do not wait for a stopped bucket: they get an error with the time at once.
    pub async fn acquire(&self, ask: &Ask) -> Result<(), StoppedFor> {
        let ticket = self.enqueue(ask);
        loop {
            let turn = self.lock().turn(ticket.place, self.clock.instant());
            match turn {
                Turn::Go => break,
                Turn::Wait(wait) => self.clock.sleep(wait).await,
                Turn::Stopped(left) => {
                    let labels = self.labels(ask, ask.policy.name());
                    self.metrics.held.get_or_create(&labels).inc();
                    return Err(StoppedFor(left));
                }
            }
        }
        self.show(ask);
        Ok(())
    }

    /// Whether a bucket of this call was stopped after its turn had come.
    pub fn stopped(&self, ask: &Ask) -> Option<StoppedFor> {
        let now = self.clock.instant();
        let mut state = self.lock();
        let stops = ask.keys().into_iter();
        let left = stops.filter_map(|key| state.bucket(&key, now)?.stopped(now)).max();
        left.map(StoppedFor)
    }

    fn enqueue(&self, ask: &Ask) -> Ticket<'_> {
        let mut state = self.lock();
        state.prune(self.clock.instant());
        state.arrivals += 1;
        let place = (ask.kind, state.arrivals);
        state.queue.insert(place, ask.keys());
        self.metrics.waiting.inc();
        Ticket { budget: self, place }
    }

    /// Takes from an answer how many calls are left, and whether the bucket is stopped.
    pub fn learn(&self, ask: &Ask, headers: &http::HeaderMap, throttled: Option<Throttled>) {
        let now = self.clock.instant();
        let mut state = self.lock();
        for (scope, remaining) in remaining(ask, headers) {
            if let Some(bucket) = state.bucket(&ask.key(scope), now) {
                bucket.correct(remaining, now);
            }
        }
        if let Some(Throttled { after, wide }) = throttled {
            let labels = self.labels(ask, ask.policy.name());
            self.metrics.throttled.get_or_create(&labels).inc();
            let scope = match (&ask.resource, wide) {
                (_, Wide::Manager) => Scope::Manager(ask.kind),
                (Some(id), Wide::Resource) if ask.policy.per_resource().is_some() => {
                    Scope::Resource(ask.policy, id.clone())
                }
                _ if ask.policy.per_region().is_some() => Scope::Region(ask.policy),
                _ => Scope::Manager(ask.kind),
            };
            if let Some(bucket) = state.bucket(&ask.key(scope), now) {
                bucket.stop(now + after);
            }
        }
        drop(state);
        self.show(ask);
    }

    fn show(&self, ask: &Ask) {
        let mut state = self.lock();
        for (scope, name) in [
            (Scope::Manager(ask.kind), ask.kind.name()),
            (Scope::Region(ask.policy), ask.policy.name()),
        ] {
            if let Some(bucket) = state.bucket(&ask.key(scope), self.clock.instant()) {
                let labels = self.labels(ask, name);
                self.metrics
                    .tokens
                    .get_or_create(&labels)
                    .set(bucket.tokens().floor() as i64);
            }
        }
    }
}

/// The buckets of a call that a 429 empties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wide {
    /// Resource Manager itself refused.
    Manager,
    /// The policy, for the whole subscription and region.
    Region,
    /// The policy, for this one resource.
    Resource,
}

/// A 429.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttled {
    pub after: Duration,
    pub wide: Wide,
}

impl Throttled {
    /// Reads from Azure's answer which bucket ran dry; in doubt the wider one.
    pub fn read(error: &crate::ArmError, headers: &http::HeaderMap) -> Self {
        let after = error.retry_after.unwrap_or(crate::error::DEFAULT_THROTTLE);
        let manager = error.has_code("SubscriptionRequestsThrottled") || error.has_code("TenantRequestsThrottled");
        let targets = error
            .details
            .iter()
            .chain([error])
            .filter_map(|detail| detail.target.as_deref());
        let dry = counters(headers)
            .filter(|(_, left)| *left == 0)
            .map(|(name, _)| name.to_owned());
        let mut names = targets.map(ToOwned::to_owned).chain(dry).peekable();
        let by_resource = names.peek().is_some()
            && names.all(|name| {
                let name = name.to_ascii_lowercase();
                name.contains("resource") && !name.contains("subscription")
            });
        let wide = match (manager, by_resource) {
            (true, _) => Wide::Manager,
            (_, true) => Wide::Resource,
            _ => Wide::Region,
        };
        Self { after, wide }
    }
}

/// `x-ms-ratelimit-remaining-resource: Microsoft.Compute/PutVM3Min;59,Microsoft.Compute/PutVM30Min;300`
fn counters(headers: &http::HeaderMap) -> impl Iterator<Item = (&str, u32)> {
    headers
        .get_all("x-ms-ratelimit-remaining-resource")
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|entry| entry.trim().rsplit_once(';'))
        .filter_map(|(name, left)| Some((name.rsplit('/').next()?, left.trim().parse().ok()?)))
}

fn remaining(ask: &Ask, headers: &http::HeaderMap) -> Vec<(Scope, u32)> {
    let manager = format!("x-ms-ratelimit-remaining-subscription-{}", ask.kind.name());
    let left = headers
        .get(manager)
        .and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let mut found: Vec<_> = left.map(|left| (Scope::Manager(ask.kind), left)).into_iter().collect();
    for (name, left) in counters(headers) {
        let name = name.to_ascii_lowercase();
        match &ask.resource {
            Some(id) if name.contains("resource") && !name.contains("subscription") => {
                found.push((Scope::Resource(ask.policy, id.clone()), left));
            }
            _ => found.push((Scope::Region(ask.policy), left)),
        }
    }
    found
}

#[cfg(test)]
mod tests;
