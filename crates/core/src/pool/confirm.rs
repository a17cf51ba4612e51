//! Decisions that need the outcome of a step, or a newer look at a node than the plan had.

use std::collections::BTreeSet;

use super::Selected;
use crate::Class;

/// Returns the machines that are still to go. One that the plan took because it was not available, and that is available by
/// now, stays for the next plan.
pub fn still_due(selected: &[Selected], available: &BTreeSet<String>) -> Vec<Selected> {
    let due = |one: &&Selected| !(one.unless_available && available.contains(&one.name));
    selected.iter().filter(due).cloned().collect()
}

/// Returns why an update in place is given up after the cloud has refused to begin it. `None`: it is worth another try.
pub fn refused_update(class: Class) -> Option<&'static str> {
    match class {
        Class::Terminal => Some("UpdateRefused"),
        Class::Transient | Class::Throttled(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use rstest::rstest;

    fn select(text: &str) -> Vec<Selected> {
        let one = |word: &str| Selected {
            name: word.trim_end_matches('?').to_owned(),
            unless_available: word.ends_with('?'),
            by_owner: false,
        };
        text.split_whitespace().map(one).collect()
    }

    #[rstest]
    #[case::all_go("a b", "", "a b")]
    #[case::one_was_taken_while_it_was_available("a b?", "a", "a b")]
    #[case::one_has_become_available("a? b?", "a", "b")]
    #[case::all_have("a? b?", "a b", "")]
    #[case::one_of_another_pool("a?", "b", "a")]
    fn a_machine_that_became_available_stays(#[case] selected: &str, #[case] available: &str, #[case] expected: &str) {
        let available = available.split_whitespace().map(str::to_owned).collect();
        let due = still_due(&select(selected), &available);
        let names: Vec<String> = due.into_iter().map(|one| one.name).collect();
        assert_eq!(names.join(" "), expected);
    }

    #[rstest]
    #[case(Class::Terminal, Some("UpdateRefused"))]
    #[case(Class::Transient, None)]
    #[case(Class::Throttled(Duration::from_secs(1)), None)]
    fn only_a_refusal_for_good_ends_an_update(#[case] class: Class, #[case] expected: Option<&str>) {
        assert_eq!(refused_update(class), expected);
    }
}
