//! Conditions of Cluster API v1beta1 and the Machine API. Invariant: setting a condition to the value that it has changes
//! nothing, and `lastTransitionTime` moves only when the status does. Messages are of bounded length: servers of others write
//! parts of them, and etcd would refuse the object.

use capstan_api::common::Condition;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// The condition that sums up the others, listed first.
pub const READY: &str = "Ready";

/// Bytes of a message at most.
const LONGEST_MESSAGE: usize = 4 << 10;

/// The severity of a False.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// It becomes true by itself.
    Info,
    /// A person may have to check it.
    Warning,
    /// A person has to change something.
    Error,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Info => "Info",
            Self::Warning => "Warning",
            Self::Error => "Error",
        }
    }
}

pub fn get<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    get(conditions, type_).is_some_and(|condition| condition.status == "True")
}

pub fn is_false(conditions: &[Condition], type_: &str) -> bool {
    get(conditions, type_).is_some_and(|condition| condition.status == "False")
}

/// Returns since when the condition has its status.
pub fn since(conditions: &[Condition], type_: &str) -> Option<Timestamp> {
    get(conditions, type_).map(|condition| condition.last_transition_time.0)
}

pub fn mark_true(conditions: &mut Vec<Condition>, type_: &str, now: Timestamp) -> bool {
    set(conditions, condition(type_, "True", None, "", "", now))
}

/// OpenShift's True carries a reason and a message.
pub fn mark_true_because(
    conditions: &mut Vec<Condition>,
    type_: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> bool {
    set(conditions, condition(type_, "True", None, reason, message, now))
}

pub fn mark_false(
    conditions: &mut Vec<Condition>,
    type_: &str,
    severity: Severity,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> bool {
    set(
        conditions,
        condition(type_, "False", Some(severity), reason, message, now),
    )
}

pub fn mark_unknown(conditions: &mut Vec<Condition>, type_: &str, reason: &str, message: &str, now: Timestamp) -> bool {
    set(conditions, condition(type_, "Unknown", None, reason, message, now))
}

pub fn remove(conditions: &mut Vec<Condition>, type_: &str) -> bool {
    let before = conditions.len();
    conditions.retain(|condition| condition.type_ != type_);
    conditions.len() != before
}

fn condition(
    type_: &str,
    status: &str,
    severity: Option<Severity>,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Condition {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        severity: severity.map(|severity| severity.as_str().to_owned()),
        // The API server keeps whole seconds.
        last_transition_time: Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
        reason: text(reason),
        message: text(&crate::events::shorten(message, LONGEST_MESSAGE)),
    }
}

/// Puts a condition into the list, Ready first and the others by name. Returns whether anything changed.
pub fn set(conditions: &mut Vec<Condition>, mut new: Condition) -> bool {
    let Some(old) = conditions.iter_mut().find(|condition| condition.type_ == new.type_) else {
        conditions.push(new);
        conditions.sort_by(|a, b| (a.type_ != READY, &a.type_).cmp(&(b.type_ != READY, &b.type_)));
        return true;
    };
    if old.status == new.status {
        new.last_transition_time = old.last_transition_time.clone();
    }
    let changed = *old != new;
    *old = new;
    changed
}

/// Keeps the times of conditions that have the status of `before`, also where the status was another one in between.
pub fn keep_times(before: &[Condition], conditions: &mut [Condition]) {
    for condition in conditions {
        let old = get(before, &condition.type_).filter(|old| old.status == condition.status);
        if let Some(old) = old {
            condition.last_transition_time = old.last_transition_time.clone();
        }
    }
}

/// Set Ready from the conditions `of`: False with the gravest of those that are False, Unknown when one is unknown or
/// missing, else True.
pub fn summarize(conditions: &mut Vec<Condition>, of: &[&str], now: Timestamp) -> bool {
    let present: Vec<&Condition> = of.iter().filter_map(|type_| get(conditions, type_)).collect();
    let gravity = |condition: &Condition| match condition.severity.as_deref() {
        Some("Error") => 0,
        Some("Warning") => 1,
        _ => 2,
    };
    let worst = present
        .iter()
        .filter(|c| c.status == "False")
        .min_by_key(|c| gravity(c));
    let worst = worst.or_else(|| present.iter().find(|c| c.status != "True"));
    let ready = match worst {
        Some(worst) => Condition {
            type_: READY.to_owned(),
            ..(*worst).clone()
        },
        None if present.is_empty() => return false,
        None => condition(READY, "True", None, "", "", now),
    };
    let ready = Condition {
        last_transition_time: condition(READY, "", None, "", "", now).last_transition_time,
        ..ready
    };
    set(conditions, ready)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_condition_that_ends_as_it_began_keeps_its_time() {
        let mut conditions = Vec::new();
        mark_false(&mut conditions, "A", Severity::Error, "Invalid", "no", at(1));
        mark_true(&mut conditions, "B", at(1));
        let before = conditions.clone();
        mark_true(&mut conditions, "A", at(2));
        mark_false(&mut conditions, "A", Severity::Error, "Invalid", "no", at(2));
        mark_false(&mut conditions, "B", Severity::Error, "Gone", "", at(2));
        keep_times(&before, &mut conditions);
        assert_eq!(get(&conditions, "A"), get(&before, "A"));
        assert_eq!(since(&conditions, "B"), Some(at(2)));
    }

    #[test]
    fn setting_what_is_already_so_changes_nothing() {
        let mut list = Vec::new();
        assert!(mark_false(&mut list, "A", Severity::Info, "Why", "because", at(1)));
        let before = list.clone();
        assert!(!mark_false(&mut list, "A", Severity::Info, "Why", "because", at(2)));
        assert_eq!(list, before);
    }

    #[test]
    fn a_message_without_end_is_cut() {
        let mut list = Vec::new();
        mark_false(&mut list, "A", Severity::Error, "Why", &"ä".repeat(1 << 20), at(1));
        let message = list[0].message.clone().unwrap_or_default();
        assert!(message.len() <= LONGEST_MESSAGE && message.ends_with("ä..."));
    }

    #[test]
    fn the_time_moves_with_the_status_only() {
        let mut list = Vec::new();
        mark_false(&mut list, "A", Severity::Info, "Why", "because", at(1));
        assert!(mark_false(&mut list, "A", Severity::Warning, "Other", "", at(2)));
        assert_eq!(since(&list, "A"), Some(at(1)));
        assert!(mark_true(&mut list, "A", at(3)));
        assert_eq!(since(&list, "A"), Some(at(3)));
    }

    #[test]
    fn ready_comes_first_and_tells_the_gravest() {
        let mut list = Vec::new();
        mark_true(&mut list, "C", at(1));
        mark_false(&mut list, "A", Severity::Info, "Soon", "", at(1));
        mark_false(&mut list, "B", Severity::Error, "Never", "", at(1));
        summarize(&mut list, &["A", "B", "C"], at(1));
        assert_eq!(
            list.iter().map(|c| c.type_.as_str()).collect::<Vec<_>>(),
            ["Ready", "A", "B", "C"]
        );
        assert_eq!(
            (list[0].status.as_str(), list[0].reason.as_deref()),
            ("False", Some("Never"))
        );
        mark_true(&mut list, "A", at(2));
        mark_true(&mut list, "B", at(2));
        assert!(summarize(&mut list, &["A", "B", "C"], at(2)));
        assert!(is_true(&list, READY) && list[0].reason.is_none());
    }
}
