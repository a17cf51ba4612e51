//! Interceptors for tests: record requests, stop the process after the n-th write, lose or delay an answer.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use capstan_core::interceptor::{Effect, Interceptor, System, Verdict};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Selects effects.
pub type Filter = fn(&Effect) -> bool;

/// Whether an effect is a write.
pub fn writes(effect: &Effect) -> bool {
    effect.write
}

/// Whether an effect is a write to Kubernetes.
pub fn kube_writes(effect: &Effect) -> bool {
    effect.write && effect.system == System::Kube
}

/// Whether an effect is a write that must not get lost. Events are best effort.
pub fn writes_but_events(effect: &Effect) -> bool {
    effect.write && !(effect.system == System::Kube && effect.target.contains("/events"))
}

/// Records effects in the order in which they are sent.
pub struct Ledger {
    filter: Filter,
    effects: Mutex<Vec<Effect>>,
}

impl Ledger {
    /// Records every write.
    pub fn new() -> Arc<Self> {
        Self::of(writes)
    }

    /// Records the effects that `filter` selects.
    pub fn of(filter: Filter) -> Arc<Self> {
        Arc::new(Self {
            filter,
            effects: Mutex::default(),
        })
    }

    pub fn effects(&self) -> Vec<Effect> {
        self.effects.lock().clone()
    }

    pub fn clear(&self) {
        self.effects.lock().clear();
    }

    pub fn len(&self) -> usize {
        self.effects.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many recorded effects `filter` selects.
    pub fn count(&self, filter: impl Fn(&Effect) -> bool) -> usize {
        self.effects.lock().iter().filter(|effect| filter(effect)).count()
    }

    /// Returns how many effects of each method and kind of object there are, as `3 PATCH nodes, 1 POST pods/eviction`.
    pub fn summary(&self) -> String {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for effect in self.effects.lock().iter() {
            *counts
                .entry(format!("{} {}", effect.method, kind(&effect.target)))
                .or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        counts.join(", ")
    }

    /// Returns one line for each effect on a target that contains `part`.
    pub fn about(&self, part: &str) -> Vec<String> {
        let effects = self.effects.lock();
        let about = effects.iter().filter(|effect| effect.target.contains(part));
        about.map(line).collect()
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let effects = self.effects.lock();
        effects.iter().try_for_each(|effect| writeln!(f, "{}", line(effect)))
    }
}

/// Returns the kind of object in the path of a request to Kubernetes, with its subresource: `pods/eviction`.
fn kind(path: &str) -> String {
    let mut parts = path.trim_matches('/').split('/').peekable();
    // `/api/v1/…` or `/apis/group/version/…`
    let skipped = if parts.next() == Some("api") { 1 } else { 2 };
    let parts: Vec<&str> = parts.skip(skipped).collect();
    let parts = match parts.as_slice() {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        all => all,
    };
    match parts {
        [kind, _, subresource, ..] => format!("{kind}/{subresource}"),
        [kind, ..] => (*kind).to_owned(),
        [] => path.to_owned(),
    }
}

/// Returns an effect as one line of text.
pub fn line(effect: &Effect) -> String {
    format!("{:?} {} {}", effect.system, effect.method, effect.target)
}

impl Interceptor for Ledger {
    fn before(&self, effect: &Effect) -> Verdict {
        if (self.filter)(effect) {
            self.effects.lock().push(effect.clone());
        }
        Verdict::Pass
    }
}

/// Stops the process after its n-th write: the other system carries the write out, the answer never arrives, and no
/// further request is sent.
pub struct StopAfter {
    allowed: usize,
    filter: Filter,
    done: watch::Sender<Vec<Effect>>,
}

impl StopAfter {
    pub fn new(writes: usize) -> Arc<Self> {
        Self::counting(writes, self::writes)
    }

    /// Counts only the effects that `filter` selects.
    pub fn counting(effects: usize, filter: Filter) -> Arc<Self> {
        Arc::new(Self {
            allowed: effects.max(1),
            filter,
            done: watch::Sender::default(),
        })
    }

    pub fn has_stopped(&self) -> bool {
        self.done.borrow().len() >= self.allowed
    }

    /// Waits until the process has stopped.
    pub async fn stopped(&self) {
        let mut done = self.done.subscribe();
        let stopped = done.wait_for(|done| done.len() >= self.allowed).await;
        drop(stopped);
    }

    /// Returns the effect after which the process stopped.
    pub fn last(&self) -> Option<Effect> {
        self.done.borrow().get(self.allowed - 1).cloned()
    }
}

impl Interceptor for StopAfter {
    fn before(&self, _: &Effect) -> Verdict {
        if self.has_stopped() {
            return Verdict::Hang;
        }
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        if !self.has_stopped() && (self.filter)(effect) {
            self.done.send_modify(|done| done.push(effect.clone()));
        }
        self.before(effect)
    }
}

/// Loses the answer to the n-th write: the other system carries the write out, and the client reports an error.
pub struct LoseAnswer {
    number: usize,
    filter: Filter,
    answers: Mutex<usize>,
}

impl LoseAnswer {
    pub fn new(number: usize) -> Arc<Self> {
        Self::to(number, writes)
    }

    /// Counts only the effects that `filter` selects.
    pub fn to(number: usize, filter: Filter) -> Arc<Self> {
        let answers = Mutex::default();
        Arc::new(Self {
            number,
            filter,
            answers,
        })
    }

    /// Whether an answer was lost.
    pub fn has_lost(&self) -> bool {
        *self.answers.lock() >= self.number
    }
}

impl Interceptor for LoseAnswer {
    fn before(&self, _: &Effect) -> Verdict {
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        if !(self.filter)(effect) {
            return Verdict::Pass;
        }
        let mut answers = self.answers.lock();
        *answers += 1;
        if *answers == self.number {
            return Verdict::Refuse("the answer was lost".to_owned());
        }
        Verdict::Pass
    }
}

/// Delays the answers to the effects that the filter selects.
pub struct Delay {
    filter: Filter,
    time: Mutex<Duration>,
}

impl Delay {
    pub fn new(filter: Filter, time: Duration) -> Arc<Self> {
        Arc::new(Self {
            filter,
            time: Mutex::new(time),
        })
    }

    /// From now on delays by this time.
    pub fn set(&self, time: Duration) {
        *self.time.lock() = time;
    }
}

impl Interceptor for Delay {
    fn before(&self, _: &Effect) -> Verdict {
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        let time = *self.time.lock();
        if time.is_zero() || !(self.filter)(effect) {
            return Verdict::Pass;
        }
        Verdict::Delay(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effect(system: System, method: &str, target: &str) -> Effect {
        Effect {
            system,
            method: method.to_owned(),
            target: target.to_owned(),
            write: method != "GET",
        }
    }

    #[tokio::test]
    async fn a_process_stops_after_its_nth_write_and_sends_nothing_more() {
        let stop = StopAfter::counting(2, writes_but_events);
        let [read, write] = ["GET", "PATCH"].map(|method| effect(System::Kube, method, "/api/v1/nodes/n"));
        let event = effect(System::Kube, "POST", "/apis/events.k8s.io/v1/namespaces/d/events");
        let lost = effect(System::Azure, "PUT", "/events/m");
        assert_eq!(stop.after(&write), Verdict::Pass);
        assert_eq!((stop.after(&event), stop.after(&read)), (Verdict::Pass, Verdict::Pass));
        assert!(!stop.has_stopped());
        assert_eq!(stop.after(&lost), Verdict::Hang);
        stop.stopped().await;
        assert_eq!(stop.last(), Some(lost));
        assert_eq!((stop.before(&read), stop.after(&read)), (Verdict::Hang, Verdict::Hang));
    }

    #[test]
    fn one_answer_is_lost() {
        let (lose, put) = (LoseAnswer::new(2), effect(System::Azure, "PUT", "/x"));
        let verdicts: Vec<bool> = (0..3).map(|_| lose.after(&put) == Verdict::Pass).collect();
        assert_eq!((verdicts, lose.has_lost()), (vec![true, false, true], true));
    }

    #[test]
    fn a_ledger_has_what_its_filter_selects() {
        let ledger = Ledger::of(kube_writes);
        for effect in [
            effect(System::Azure, "PUT", "/x"),
            effect(System::Kube, "GET", "/x"),
            effect(System::Kube, "PUT", "/x"),
        ] {
            ledger.before(&effect);
        }
        assert_eq!(ledger.about("/x"), ["Kube PUT /x"]);
    }

    #[test]
    fn a_summary_counts_methods_and_kinds() {
        let ledger = Ledger::new();
        for (method, path) in [
            ("POST", "/api/v1/namespaces/d/pods/p/eviction"),
            ("PATCH", "/api/v1/nodes/n"),
            ("PATCH", "/api/v1/nodes/m"),
            ("DELETE", "/apis/g/v1/namespaces/d/machines/m"),
        ] {
            ledger.before(&effect(System::Kube, method, path));
        }
        assert_eq!(
            ledger.summary(),
            "1 DELETE machines, 2 PATCH nodes, 1 POST pods/eviction"
        );
    }
}
