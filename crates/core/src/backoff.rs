//! How long to wait before the next try. One function for every retry in the product.

use std::time::Duration;

/// The wait after the `failures`-th failure in a row (1 is the first): `first`, doubling, at most `longest`.
pub fn exponential(first: Duration, longest: Duration, failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(longest)
}

/// Spreads equal waits over the upper half of the time, so that many objects that failed together do not retry together.
/// `share` is in 0..1.
pub fn jittered(wait: Duration, share: f64) -> Duration {
    wait.mul_f64(0.5 + 0.5 * share.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, 1)]
    #[case(1, 1)]
    #[case(2, 2)]
    #[case(5, 16)]
    #[case(6, 30)]
    #[case(u32::MAX, 30)]
    fn a_wait_doubles_up_to_the_longest(#[case] failures: u32, #[case] seconds: u64) {
        let wait = exponential(Duration::from_secs(1), Duration::from_secs(30), failures);
        assert_eq!(wait, Duration::from_secs(seconds));
    }

    #[test]
    fn jitter_never_more_than_halves_a_wait() {
        let wait = Duration::from_secs(10);
        assert_eq!(jittered(wait, 0.0), Duration::from_secs(5));
        assert_eq!(jittered(wait, 1.0), wait);
        assert_eq!(jittered(wait, 7.0), wait);
    }
}
