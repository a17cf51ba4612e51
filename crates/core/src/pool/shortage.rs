//! Instances that the cloud does not make: how long a pool waits before it asks again, and when it asks for no more.

use std::time::Duration;

use super::{Retry, ScaleSet};
use crate::Class;
use crate::backoff::exponential;

/// After so many tries without room the pool asks for no more than it has: a capacity that Azure cannot make is of no use, and
/// an autoscaler that sees it would wait for it instead of turning elsewhere.
pub const TRIES: u32 = 3;
/// After a failed creation the next try waits this long, twice as long each time.
const FIRST_RETRY: Duration = Duration::from_secs(30);
const LONGEST_RETRY: Duration = Duration::from_secs(600);
/// A pool that asks for no more tries again after this long: room comes back within hours, seldom within minutes.
pub const NO_ROOM_RETRY: Duration = Duration::from_secs(1800);

/// Why instances were not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The cloud refused that capacity, because it has no room for it.
    Refused { capacity: usize },
    /// The cloud accepted that capacity, and had no room for more than these.
    NotMade { capacity: usize, existing: usize },
    /// An instance failed.
    Instance,
    /// Several failed, or the whole operation.
    Instances,
}

/// How the cloud answered a change that it did not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub class: Class,
    /// The status of HTTP.
    pub status: u16,
    /// Whether the cloud names a lack of quota or of machines.
    pub no_room: bool,
}

/// Returns why no instances were made after the cloud refused that capacity. `None`: the refusal says nothing about instances.
/// Another change may be under way, the cloud may be in trouble, or the change itself is refused for good.
pub fn cause(refusal: Refusal, capacity: usize) -> Option<Cause> {
    match (refusal.class, refusal.status) {
        (Class::Terminal | Class::Throttled(_), _) | (Class::Transient, 500..) => None,
        (Class::Transient, _) if refusal.no_room => Some(Cause::Refused { capacity }),
        (Class::Transient, 409) => None,
        (Class::Transient, _) => Some(Cause::Instances),
    }
}

/// Returns how long to wait after so many tries before this one. A single instance that failed is replaced at once; only
/// further ones wait.
pub fn wait(before: u32, cause: Cause) -> Duration {
    match cause {
        Cause::Instance if before == 0 => Duration::ZERO,
        Cause::Refused { .. } | Cause::NotMade { .. } if before + 1 >= TRIES => NO_ROOM_RETRY,
        Cause::Refused { .. } | Cause::NotMade { .. } | Cause::Instance | Cause::Instances => {
            exponential(FIRST_RETRY, LONGEST_RETRY, before + 1)
        }
    }
}

/// Returns the capacity that is not to be asked for after so many tries. A capacity that the cloud refuses costs nothing: fewer
/// are asked for. One that it accepts and cannot make is given back.
pub fn refused(tries: u32, cause: Cause) -> Option<usize> {
    match cause {
        Cause::NotMade { existing, .. } if tries >= TRIES => Some(existing + 1),
        Cause::NotMade { capacity, .. } | Cause::Refused { capacity } => Some(capacity),
        Cause::Instance | Cause::Instances => None,
    }
}

/// Returns the largest capacity that may be asked for now. What the cloud had no room for a moment ago is not asked for;
/// whatever needs less is. A capacity that somebody else has set stays: whoever set it turns elsewhere by itself.
pub(super) fn most(set: &ScaleSet, desired: usize) -> usize {
    let kept = if set.scaled_by_others {
        desired.min(set.capacity)
    } else {
        0
    };
    match set.retry {
        Retry::Waiting { refused, tries } if tries >= TRIES => refused.saturating_sub(1).max(kept),
        Retry::Waiting { refused, .. } => refused.saturating_sub(1).max(set.capacity),
        Retry::Paused => set.capacity,
        Retry::NotNeeded | Retry::Due => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const NO_ROOM: Cause = Cause::Refused { capacity: 3 };

    #[rstest]
    #[case::a_single_instance(0, Cause::Instance, 0)]
    #[case::a_second_one(1, Cause::Instance, 60)]
    #[case::several(0, Cause::Instances, 30)]
    #[case::again_and_again(9, Cause::Instances, 600)]
    #[case::no_room(0, NO_ROOM, 30)]
    #[case::no_room_again(1, NO_ROOM, 60)]
    #[case::no_room_at_all(2, NO_ROOM, 1800)]
    fn creation_slows_down_with_every_try(#[case] before: u32, #[case] cause: Cause, #[case] seconds: u64) {
        assert_eq!(wait(before, cause), Duration::from_secs(seconds));
    }

    #[rstest]
    #[case::no_room(Class::Transient, 409, true, Some(Cause::Refused { capacity: 4 }))]
    #[case::no_room_by_another_status(Class::Transient, 400, true, Some(Cause::Refused { capacity: 4 }))]
    #[case::another_change_is_under_way(Class::Transient, 409, false, None)]
    #[case::another_refusal_that_may_pass(Class::Transient, 404, false, Some(Cause::Instances))]
    #[case::the_cloud_is_in_trouble(Class::Transient, 503, true, None)]
    #[case::the_change_is_refused_for_good(Class::Terminal, 400, true, None)]
    #[case::too_many_calls(Class::Throttled(Duration::from_secs(1)), 429, false, None)]
    fn a_refusal_tells_whether_there_is_room(
        #[case] class: Class,
        #[case] status: u16,
        #[case] no_room: bool,
        #[case] expected: Option<Cause>,
    ) {
        let refusal = Refusal { class, status, no_room };
        assert_eq!(cause(refusal, 4), expected);
    }

    #[rstest]
    #[case::our_own_pool(false, 6, 6, 4)]
    #[case::others_keep_what_they_asked_for(true, 6, 6, 6)]
    #[case::and_no_more_than_that(true, 6, 7, 6)]
    #[case::nor_is_more_asked_for(true, 8, 6, 6)]
    fn a_capacity_that_is_not_made_is_given_back_by_whoever_asked_for_it(
        #[case] scaled_by_others: bool,
        #[case] desired: usize,
        #[case] capacity: usize,
        #[case] expected: usize,
    ) {
        let set = ScaleSet {
            capacity,
            scaled_by_others,
            retry: Retry::Waiting {
                refused: 5,
                tries: TRIES,
            },
            ..ScaleSet::default()
        };
        assert_eq!(most(&set, desired), expected);
    }

    #[rstest]
    #[case::refused(3, Cause::Refused { capacity: 6 }, Some(6))]
    #[case::not_made(2, Cause::NotMade { capacity: 6, existing: 4 }, Some(6))]
    #[case::not_made_again(3, Cause::NotMade { capacity: 6, existing: 4 }, Some(5))]
    #[case::failed(3, Cause::Instances, None)]
    fn what_is_not_made_is_given_back_in_the_end(
        #[case] tries: u32,
        #[case] cause: Cause,
        #[case] expected: Option<usize>,
    ) {
        assert_eq!(refused(tries, cause), expected);
    }
}
