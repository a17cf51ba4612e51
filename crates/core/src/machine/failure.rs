//! What becomes of a machine when a step about it has failed. Pure.

use crate::class::Class;

/// A failure, as far as the decision depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The API server did not do its part: nothing is known about Azure, and nothing can be reported.
    pub of_cluster: bool,
    pub class: Class,
    /// Nothing was sent, because an earlier answer of Azure asked for a pause. That answer was reported.
    pub is_paused: bool,
    /// An interface could not be deleted because a virtual machine uses it.
    pub is_interface_in_use: bool,
}

/// What Azure says of a request that it refused.
#[derive(Clone, Copy, Debug)]
pub struct Refusal<'a> {
    /// Azure misses something that the request refers to.
    pub is_not_found: bool,
    pub message: &'a str,
    pub target: Option<&'a str>,
}

impl Refusal<'_> {
    /// Whether Azure misses the resource of this name. One that was just made or read is not seen everywhere at once, or goes
    /// with the last machine that uses it: the request is good, and is sent again.
    pub fn misses(&self, name: &str) -> bool {
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let names_it = |text: &str| {
            text.split(|c| !is_part(c))
                // A name at the end of a sentence.
                .any(|word| !name.is_empty() && word.trim_end_matches('.').eq_ignore_ascii_case(name))
        };
        self.is_not_found && (names_it(self.message) || self.target.is_some_and(names_it))
    }
}

/// After a step of the creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    /// The step is tried again.
    Retry,
    /// The reason is reported, and the step is tried again.
    ReportAndRetry,
    /// The machine can never be created: it has failed.
    Fail,
}

/// Decides about a machine that could not be created. `is_begun`: its status shows a phase.
pub fn of_creation(failure: Failure, is_begun: bool) -> Creation {
    match (failure.of_cluster, failure.class) {
        (true, _) => Creation::Retry,
        (false, Class::Terminal) => Creation::Fail,
        (false, Class::Transient | Class::Throttled(_)) if failure.is_paused && is_begun => Creation::Retry,
        (false, Class::Transient | Class::Throttled(_)) => Creation::ReportAndRetry,
    }
}

/// Whether a machine has failed whose creation Azure accepted and did not finish. A virtual machine that another client has
/// deleted meanwhile is created again.
pub fn ends_creation(class: Class, is_not_found: bool) -> bool {
    match class {
        Class::Terminal => !is_not_found,
        Class::Transient | Class::Throttled(_) => false,
    }
}

/// After a step of the deletion, which is tried again whatever the failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deletion {
    /// A request for the virtual machine was carried out late: it is there after all, and the teardown begins again.
    pub begin_anew: bool,
    pub report: Report,
}

/// What users see of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    Nothing,
    /// The status shows that the machine is being deleted.
    Phase,
    /// The status and an event have the reason.
    Reason,
}

/// Decides about a machine that could not be deleted.
pub fn of_deletion(failure: Failure) -> Deletion {
    let report = match (failure.of_cluster, failure.is_paused) {
        (true, _) => Report::Nothing,
        (false, true) => Report::Phase,
        (false, false) => Report::Reason,
    };
    Deletion {
        begin_anew: failure.is_interface_in_use,
        report,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::time::Duration;

    const PAUSE: Class = Class::Throttled(Duration::from_secs(10));

    fn failure(of_cluster: bool, class: Class, is_paused: bool) -> Failure {
        Failure {
            of_cluster,
            class,
            is_paused,
            is_interface_in_use: false,
        }
    }

    #[rstest]
    #[case::refused(failure(false, Class::Terminal, false), true, Creation::Fail)]
    #[case::refused_at_once(failure(false, Class::Terminal, false), false, Creation::Fail)]
    #[case::passes(failure(false, Class::Transient, false), true, Creation::ReportAndRetry)]
    #[case::throttled(failure(false, PAUSE, false), true, Creation::ReportAndRetry)]
    #[case::pause_that_was_reported(failure(false, PAUSE, true), true, Creation::Retry)]
    #[case::pause_before_the_first_status(failure(false, PAUSE, true), false, Creation::ReportAndRetry)]
    #[case::api_server(failure(true, Class::Transient, false), true, Creation::Retry)]
    #[case::api_server_refuses(failure(true, Class::Terminal, false), true, Creation::Retry)]
    fn only_a_refusal_of_azure_or_of_the_spec_fails_a_machine(
        #[case] failure: Failure,
        #[case] is_begun: bool,
        #[case] expected: Creation,
    ) {
        assert_eq!(of_creation(failure, is_begun), expected);
    }

    #[rstest]
    #[case::quoted("Availability set 'c_workers-as' could not be found.", None, "c_workers-as", true)]
    #[case::by_id(
        "Resource /subscriptions/s/networkInterfaces/M-NIC referenced by resource /virtualMachines/m was not found.",
        None,
        "m-nic",
        true
    )]
    #[case::at_the_end("Cannot find disk m_data.", None, "m_data", true)]
    #[case::by_target("Not found.", Some("/disks/m_data"), "m_data", true)]
    #[case::a_longer_name("Resource /networkInterfaces/m-nic-2 was not found.", None, "m-nic", false)]
    #[case::a_name_that_ends_alike("Resource /images/abc-m was not found.", None, "c-m", false)]
    #[case::another(
        "Resource /images/rhcos referenced by resource /virtualMachines/m was not found.",
        None,
        "m-nic",
        false
    )]
    fn only_a_resource_that_azure_names_is_missed(
        #[case] message: &str,
        #[case] target: Option<&str>,
        #[case] name: &str,
        #[case] expected: bool,
    ) {
        let refusal = Refusal {
            is_not_found: true,
            message,
            target,
        };
        assert_eq!(refusal.misses(name), expected);
        assert!(!refusal.misses(""));
        let other = Refusal {
            is_not_found: false,
            ..refusal
        };
        assert!(!other.misses(name), "a refusal for another reason");
    }

    #[rstest]
    #[case::refused(failure(false, Class::Terminal, false), Report::Reason)]
    #[case::passes(failure(false, Class::Transient, false), Report::Reason)]
    #[case::pause(failure(false, PAUSE, true), Report::Phase)]
    #[case::api_server(failure(true, Class::Transient, false), Report::Nothing)]
    fn a_deletion_is_tried_again_and_says_why_it_failed(#[case] failure: Failure, #[case] expected: Report) {
        let found = of_deletion(failure);
        assert_eq!((found.report, found.begin_anew), (expected, false));
        let late = Failure {
            is_interface_in_use: true,
            ..failure
        };
        assert!(of_deletion(late).begin_anew);
    }

    #[rstest]
    #[case::azure_gave_up(Class::Terminal, false, true)]
    #[case::another_client_deleted_it(Class::Terminal, true, false)]
    #[case::azure_was_in_trouble(Class::Transient, false, false)]
    #[case::azure_asks_for_a_pause(PAUSE, false, false)]
    fn a_creation_that_azure_accepted_ends_a_machine_or_not(
        #[case] class: Class,
        #[case] is_not_found: bool,
        #[case] ends: bool,
    ) {
        assert_eq!(ends_creation(class, is_not_found), ends);
    }
}
