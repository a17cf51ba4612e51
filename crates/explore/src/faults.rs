//! Interceptors of one process: seeded faults on its requests, and its end.

use std::sync::Arc;
use std::time::Duration;

use capstan_core::interceptor::{Effect, Interceptor, Verdict};
use capstan_testkit::apiserver::Rng;
use capstan_testkit::interceptors::line;
use parking_lot::Mutex;

use crate::trace::Trace;

/// How often requests go wrong, in percent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Odds {
    pub refused: usize,
    pub lost: usize,
    pub late: usize,
}

/// Sees every request of all processes of a world.
pub struct Faults {
    odds: Mutex<Odds>,
    rng: Mutex<Rng>,
    trace: Trace,
    counts: Mutex<(usize, usize)>,
}

/// A late answer comes after this long at most.
const LATEST: usize = 20_000;

impl Faults {
    pub fn new(seed: u64, trace: Trace) -> Arc<Self> {
        Arc::new(Self {
            odds: Mutex::default(),
            rng: Mutex::new(Rng::new(seed ^ 0xfa17)),
            trace,
            counts: Mutex::default(),
        })
    }

    pub fn set(&self, odds: Odds) {
        *self.odds.lock() = odds;
    }

    /// Returns how many requests and how many writes there were.
    pub fn counts(&self) -> (usize, usize) {
        *self.counts.lock()
    }

    fn draw(&self, percent: usize) -> bool {
        percent > 0 && self.rng.lock().chance(percent)
    }

    fn delay(&self) -> Duration {
        Duration::from_millis(self.rng.lock().below(LATEST) as u64)
    }
}

impl Interceptor for Faults {
    fn before(&self, effect: &Effect) -> Verdict {
        let odds = *self.odds.lock();
        {
            let mut counts = self.counts.lock();
            counts.0 += 1;
            counts.1 += usize::from(effect.write && !effect.target.contains("/events"));
        }
        if self.draw(odds.refused) {
            self.trace.note(format!("refused {}", line(effect)));
            return Verdict::Refuse("the connection was refused".to_owned());
        }
        if effect.write {
            self.trace.note(line(effect));
        }
        if self.draw(odds.late) {
            return Verdict::Delay(self.delay());
        }
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        let odds = *self.odds.lock();
        if self.draw(odds.lost) {
            self.trace.note(format!("answer lost of {}", line(effect)));
            return Verdict::Refuse("the answer was lost".to_owned());
        }
        if self.draw(odds.late) {
            return Verdict::Delay(self.delay());
        }
        Verdict::Pass
    }
}

/// Ends a process: from then on none of its requests is sent or answered.
#[derive(Default)]
pub struct End(Mutex<bool>);

impl End {
    pub fn end(&self) {
        *self.0.lock() = true;
    }
}

impl Interceptor for End {
    fn before(&self, _: &Effect) -> Verdict {
        if *self.0.lock() { Verdict::Hang } else { Verdict::Pass }
    }

    fn after(&self, effect: &Effect) -> Verdict {
        self.before(effect)
    }
}
