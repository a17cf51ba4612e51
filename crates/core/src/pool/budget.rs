//! How many machines may be missing, and how many may be too many, at any time of a rollout.
//!
//! Invariant: both bounds are zero only where the user wrote so with a percentage, as the Azure provider of Cluster API
//! accepts it: then no machine is replaced for a new model. They are never zero by rounding.

use std::fmt;
use std::str::FromStr;

/// `maxSurge` or `maxUnavailable` as the user writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    Number(u32),
    Percent(u32),
}

impl Amount {
    /// Whether it stays zero however large the pool is.
    pub fn is_zero(self) -> bool {
        matches!(self, Self::Number(0) | Self::Percent(0))
    }

    fn rounded_up(self, of: usize) -> usize {
        match self {
            Self::Number(n) => n as usize,
            Self::Percent(p) => (of * p as usize).div_ceil(100),
        }
    }

    fn rounded_down(self, of: usize) -> usize {
        match self {
            Self::Number(n) => n as usize,
            Self::Percent(p) => of * p as usize / 100,
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(n) => write!(f, "{n}"),
            Self::Percent(p) => write!(f, "{p}%"),
        }
    }
}

/// Why a budget cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    #[error("{field}: {value:?} is neither a whole number from 0 nor a percentage such as \"10%\"")]
    Unreadable { field: &'static str, value: String },
    #[error(
        "maxSurge {surge} and maxUnavailable {unavailable} are both zero, so that no machine could ever be replaced: raise one of them"
    )]
    BothZero { surge: Amount, unavailable: Amount },
}

impl TryFrom<i64> for Amount {
    type Error = String;

    fn try_from(value: i64) -> Result<Self, String> {
        u32::try_from(value).map(Self::Number).map_err(|_| value.to_string())
    }
}

impl FromStr for Amount {
    type Err = String;

    /// Reads a percentage; a bare number in quotes is refused, as Kubernetes refuses it.
    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text
            .strip_suffix('%')
            .filter(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()));
        digits
            .and_then(|d| d.parse().ok())
            .map(Self::Percent)
            .ok_or_else(|| text.to_owned())
    }
}

/// Both bounds in machines, for a pool of a known size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// How many machines may exist beyond the desired count.
    pub surge: usize,
    /// How many of the desired machines may be unavailable.
    pub unavailable: usize,
}

impl Budget {
    /// Refuses two numbers that are zero.
    pub fn check(surge: Amount, unavailable: Amount) -> Result<(), BudgetError> {
        if (surge, unavailable) == (Amount::Number(0), Amount::Number(0)) {
            return Err(BudgetError::BothZero { surge, unavailable });
        }
        Ok(())
    }

    /// Surge rounds up and unavailable rounds down. Where rounding leaves both at zero, one machine may be unavailable,
    /// as with Deployments: a small pool would otherwise never be updated.
    pub fn resolve(surge: Amount, unavailable: Amount, desired: usize) -> Result<Self, BudgetError> {
        Self::check(surge, unavailable)?;
        if surge.is_zero() && unavailable.is_zero() {
            return Ok(Self::default());
        }
        let surge = surge.rounded_up(desired);
        let unavailable = unavailable.rounded_down(desired).min(desired);
        Ok(Self {
            surge,
            unavailable: if surge == 0 && unavailable == 0 { 1 } else { unavailable },
        })
    }

    /// Whether no machine may ever be replaced for a new model.
    pub fn is_closed(&self) -> bool {
        *self == Self::default()
    }

    /// Fewer available machines than this must not be left by our doing.
    pub fn floor(&self, desired: usize) -> usize {
        desired.saturating_sub(self.unavailable)
    }

    /// So many machines that are not available may be taken at once.
    pub fn width(&self) -> usize {
        (self.surge + self.unavailable).max(1)
    }

    /// More machines than this must not exist by our doing; those that the cloud is deleting do not count.
    pub fn ceiling(&self, desired: usize) -> usize {
        desired + self.surge
    }
}

#[cfg(test)]
mod tests {
    use super::Amount::{Number, Percent};
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::numbers_stand_as_they_are(Number(2), Number(1), 10, 2, 1)]
    #[case::surge_rounds_up(Percent(10), Number(0), 5, 1, 0)]
    #[case::unavailable_rounds_down(Number(1), Percent(30), 5, 1, 1)]
    #[case::a_tenth_of_a_hundred(Percent(10), Percent(10), 100, 10, 10)]
    #[case::no_more_than_all_can_be_unavailable(Number(0), Number(9), 4, 0, 4)]
    #[case::rounding_to_nothing_leaves_one(Number(0), Percent(10), 5, 0, 1)]
    #[case::surge_beyond_double(Percent(250), Number(0), 2, 5, 0)]
    fn bounds_are_resolved_for_a_pool(
        #[case] surge: Amount,
        #[case] unavailable: Amount,
        #[case] desired: usize,
        #[case] max_surge: usize,
        #[case] max_unavailable: usize,
    ) {
        let budget = Budget::resolve(surge, unavailable, desired).unwrap();
        assert_eq!(
            budget,
            Budget {
                surge: max_surge,
                unavailable: max_unavailable
            }
        );
    }

    #[test]
    fn two_numbers_that_are_zero_are_refused() {
        let (surge, unavailable) = (Number(0), Number(0));
        let refused = Budget::resolve(surge, unavailable, 3).unwrap_err();
        assert_eq!(refused, BudgetError::BothZero { surge, unavailable });
    }

    #[rstest]
    #[case(Percent(0), Number(0))]
    #[case(Number(0), Percent(0))]
    #[case(Percent(0), Percent(0))]
    fn zero_percent_lets_no_machine_be_replaced(#[case] surge: Amount, #[case] unavailable: Amount) {
        assert!(Budget::resolve(surge, unavailable, 3).unwrap().is_closed());
    }

    #[rstest]
    #[case("10%", Ok(Percent(10)))]
    #[case("0%", Ok(Percent(0)))]
    #[case("10", Err("10".to_owned()))]
    #[case("%", Err("%".to_owned()))]
    #[case("-5%", Err("-5%".to_owned()))]
    #[case("1.5%", Err("1.5%".to_owned()))]
    fn percentages_are_read_as_kubernetes_reads_them(#[case] text: &str, #[case] read: Result<Amount, String>) {
        assert_eq!(text.parse::<Amount>(), read);
    }
}
