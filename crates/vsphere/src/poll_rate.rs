//! Decides how many objects are watched, and how often the rest is read.
//!
//! Some servers compute updates of all watched objects again for every change in their inventory, which is expensive while
//! hundreds of clones are under way. So the view is a window: in busy times it holds the oldest few objects and stays as it
//! is, and all objects are read in one call after the other. The quieter it gets, the wider the window, until all objects are
//! watched and nothing is sent any more.
//!
//! Invariants: an object outside the window is read at least every [`SHORT_WAIT`]. Without changes the window grows until it
//! holds all objects. One object that changes makes no busy time.

use std::time::{Duration, Instant};

/// The number of objects in the view in busy times.
pub(crate) const WINDOW: usize = 8;
/// The window grows by this factor with every quiet round, and shrinks by it when one change follows another.
const GROWTH: usize = 4;
/// No window is wider: vCenter does not like views without bounds.
const WIDEST: usize = 8192;
/// The longest time between reads of an object outside the window, and the length of the busy time after a change.
pub(crate) const SHORT_WAIT: Duration = Duration::from_secs(1);
/// Reads of objects outside the window are this far apart in busy times. In quiet times each doubles the time until the
/// next, up to [`SHORT_WAIT`].
const BETWEEN_READS: Duration = Duration::from_millis(150);

/// The rate of one poll.
///
/// A vCenter computes updates once and sends differences, so everything is watched there, and whatever has to be read is read
/// once a second at most. govmomi's simulator computes everything again for every change.
#[derive(Debug)]
pub(crate) struct PollRate {
    /// The smallest window.
    fewest: usize,
    /// The shortest time between two reads.
    shortest: Duration,
    window: usize,
    /// The time between reads of the objects outside.
    pause: Duration,
    /// When an object last changed.
    moved: Option<Instant>,
    /// Whether many objects were waited for at some time since the last quiet time.
    crowded: bool,
}

impl PollRate {
    /// Returns the rate for a server by the name that it gives itself.
    pub(crate) fn of(full_name: &str) -> Self {
        if full_name.contains("simulator") {
            Self::with(WINDOW, BETWEEN_READS)
        } else {
            Self::with(WIDEST, SHORT_WAIT)
        }
    }

    fn with(fewest: usize, shortest: Duration) -> Self {
        Self {
            fewest,
            shortest,
            window: fewest,
            pause: shortest,
            moved: None,
            crowded: false,
        }
    }
}

impl PollRate {
    /// Returns the size of the view.
    pub(crate) fn window(&self) -> usize {
        self.window
    }

    /// Returns the time between reads of the objects outside.
    pub(crate) fn pause(&self) -> Duration {
        self.pause
    }

    /// Whether an object has changed just now, and many are waited for or were since the last quiet time: the next change will
    /// come soon.
    pub(crate) fn is_busy(&self, now: Instant) -> bool {
        self.crowded && self.has_moved(now)
    }

    fn has_moved(&self, now: Instant) -> bool {
        self.moved.is_some_and(|last| now.duration_since(last) < SHORT_WAIT)
    }

    /// Notes that an object has changed while `pending` are waited for.
    pub(crate) fn note_change(&mut self, pending: usize, now: Instant) {
        if self.has_moved(now) {
            self.window = (self.window / GROWTH).max(self.fewest);
        }
        self.crowded = pending > self.fewest || self.is_busy(now);
        self.moved = Some(now);
        self.pause = self.shortest;
    }

    /// Notes that a read found no change: in quiet times more is watched and less is read.
    pub(crate) fn note_quiet(&mut self, now: Instant) {
        if self.has_moved(now) {
            return;
        }
        if self.pause < SHORT_WAIT {
            self.pause = (self.pause * 2).min(SHORT_WAIT);
        } else {
            self.widen();
        }
    }

    /// Notes that no object was outside, or that nothing changed for a long time.
    pub(crate) fn widen(&mut self) {
        self.window = self.window.saturating_mul(GROWTH).min(WIDEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// An object changes while so many are waited for.
        Change(usize),
        Quiet,
        Widen,
        /// So many milliseconds pass.
        Later(u64),
    }
    use Step::{Change, Later, Quiet, Widen};

    fn walk(steps: &[Step]) -> (PollRate, Instant) {
        let (mut rate, mut now) = (
            PollRate::with(WINDOW, BETWEEN_READS),
            capstan_core::clock::Clock::system().instant(),
        );
        for step in steps {
            match *step {
                Change(pending) => rate.note_change(pending, now),
                Quiet => rate.note_quiet(now),
                Widen => rate.widen(),
                Later(millis) => now += Duration::from_millis(millis),
            }
        }
        (rate, now)
    }

    #[rstest]
    #[case::at_first(&[], WINDOW, 150, false)]
    #[case::one_by_himself(&[Change(1)], WINDOW, 150, false)]
    #[case::one_of_many(&[Change(9)], WINDOW, 150, true)]
    #[case::the_last_of_many(&[Change(9), Later(300), Change(1)], WINDOW, 150, true)]
    #[case::many_long_ago(&[Change(9), Later(1000)], WINDOW, 150, false)]
    #[case::one_long_after_many(&[Change(9), Later(1000), Change(1)], WINDOW, 150, false)]
    #[case::no_news_in_between(&[Change(9), Later(999), Quiet], WINDOW, 150, true)]
    #[case::reads_without_news_come_less_often(&[Change(9), Later(1000), Quiet, Quiet], WINDOW, 600, false)]
    #[case::and_no_less_than_each_second(&[Quiet, Quiet, Quiet], WINDOW, 1000, false)]
    #[case::then_more_is_watched(&[Quiet, Quiet, Quiet, Quiet], 32, 1000, false)]
    #[case::news_bring_the_reads_back(&[Quiet, Quiet, Quiet, Quiet, Change(20)], 32, 150, true)]
    #[case::one_change_after_another_narrows(&[Widen, Widen, Change(20), Later(10), Change(20)], 32, 150, true)]
    #[case::one_alone_narrows_nothing(&[Widen, Widen, Change(20)], 128, 150, true)]
    #[case::never_wider_than_servers_like(&[Widen; 40], WIDEST, 150, false)]
    fn the_pace_follows_what_is_seen(
        #[case] steps: &[Step],
        #[case] window: usize,
        #[case] pause: u64,
        #[case] busy: bool,
    ) {
        let (rate, now) = walk(steps);
        let seen = (rate.window(), rate.pause(), rate.is_busy(now));
        assert_eq!(seen, (window, Duration::from_millis(pause), busy));
    }

    #[test]
    fn a_vcenter_is_watched_as_a_whole_and_read_once_a_second_at_most() {
        let (mut rate, mut now) = (
            PollRate::of("VMware vCenter Server 8.0.3 build-24022515"),
            capstan_core::clock::Clock::system().instant(),
        );
        for pending in [1, 9, 1000, 1000] {
            rate.note_change(pending, now);
            now += Duration::from_millis(10);
            assert_eq!(
                (rate.window(), rate.pause(), rate.is_busy(now)),
                (WIDEST, SHORT_WAIT, false)
            );
        }
        let simulated = PollRate::of("VMware vCenter Server 8.0.2 build-1 (govmomi simulator)");
        assert_eq!((simulated.window(), simulated.pause()), (WINDOW, BETWEEN_READS));
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..1000usize).prop_map(Change),
            Just(Quiet),
            Just(Widen),
            (0..3000u64).prop_map(Later)
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_nobody_goes_unread_and_quiet_ends_in_everything_watched(
            steps in prop::collection::vec(any_step(), 0..60)
        ) {
            let (mut rate, now) = walk(&steps);
            prop_assert!(rate.pause() <= SHORT_WAIT);
            prop_assert!((WINDOW..=WIDEST).contains(&rate.window()));
            let later = now + SHORT_WAIT;
            prop_assert!(!rate.is_busy(later));
            for _ in 0..8 {
                rate.note_quiet(later);
            }
            prop_assert_eq!(rate.window(), WIDEST);
        }
    }
}
