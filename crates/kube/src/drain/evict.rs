//! One eviction and the meaning of its answer. Invariant: the pod's UID goes with the request, and the request is sent once.
//!
//! kube's own `Api::evict` puts its options into a field that the API server does not read; this one posts a
//! `policy/v1` Eviction.

use std::time::Duration;

use capstan_core::drain::Eviction;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1 as policy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::{Api, PostParams};
use kube::core::Status;

use crate::error::Error;

/// No object of Kubernetes has a longer name.
const LONGEST_NAME: usize = 253;

/// The API server's answer to an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Evicted,
    Gone,
    Blocked {
        budget: String,
        after: Option<Duration>,
    },
    SeveralBudgets,
    NamespaceTerminating,
    Refused {
        code: u16,
        reason: String,
        after: Option<Duration>,
    },
}

impl Answer {
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Gone => "gone",
            Self::Blocked { .. } => "blocked",
            Self::SeveralBudgets => "several_budgets",
            Self::NamespaceTerminating => "namespace_terminating",
            Self::Refused { .. } => "refused",
        }
    }

    pub(super) fn is_blocked(&self) -> bool {
        matches!(self, Self::Blocked { .. })
    }

    /// The same without the server's own sentence, which a tenant's server may fill with anything.
    pub(super) fn without_words(self) -> Self {
        match self {
            Self::Refused { code, after, .. } => Self::Refused {
                code,
                reason: format!("the API server answers {code}"),
                after,
            },
            answer => answer,
        }
    }
}

/// Sends one eviction. An error means that there was no answer.
pub(super) async fn evict(client: &kube::Client, eviction: &Eviction) -> Result<Answer, Error> {
    let body = policy::Eviction {
        metadata: ObjectMeta {
            name: Some(eviction.name.clone()),
            namespace: Some(eviction.namespace.clone()),
            ..ObjectMeta::default()
        },
        delete_options: Some(DeleteOptions {
            grace_period_seconds: eviction.grace_seconds,
            preconditions: Some(Preconditions {
                uid: Some(eviction.uid.clone()),
                resource_version: None,
            }),
            ..DeleteOptions::default()
        }),
    };
    let api: Api<Pod> = Api::namespaced(client.clone(), &eviction.namespace);
    let answer: Result<Status, kube::Error> = api
        .create_subresource("eviction", &eviction.name, &PostParams::default(), &body)
        .await;
    match answer {
        Ok(_) => Ok(Answer::Evicted),
        Err(kube::Error::Api(status)) => Ok(read(&status, &eviction.namespace)),
        // An answer that is not a Status (an older server sends the Eviction back) is a success all the same.
        Err(kube::Error::SerdeError(_)) => Ok(Answer::Evicted),
        Err(error) => Err(error.into()),
    }
}

fn read(status: &Status, namespace: &str) -> Answer {
    let causes = status.details.iter().flat_map(|details| details.causes.iter());
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    let after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    let refused = |reason: &str| Answer::Refused {
        code: status.code,
        reason: reason.to_owned(),
        after,
    };
    match status.code {
        404 => Answer::Gone,
        // The UID did not match: another pod has the name now.
        409 => Answer::Gone,
        429 => match causes.into_iter().find(|cause| cause.reason == "DisruptionBudget") {
            Some(cause) => Answer::Blocked {
                budget: format!("{namespace}/{}", budget_name(&cause.message)),
                after,
            },
            None => refused(&status.message),
        },
        403 if causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating") => Answer::NamespaceTerminating,
        500 if status.message.contains("more than one PodDisruptionBudget") => Answer::SeveralBudgets,
        _ => refused(&status.message),
    }
}

/// The name in `The disruption budget web needs 2 healthy pods and has 2 currently`. A text that is too long is no name.
fn budget_name(message: &str) -> &str {
    message
        .strip_prefix("The disruption budget ")
        .and_then(|rest| rest.split(' ').next())
        .filter(|name| name.len() <= LONGEST_NAME)
        .unwrap_or("(unnamed)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::response::{StatusCause, StatusDetails};
    use rstest::rstest;

    fn status(code: u16, message: &str, cause: Option<(&str, &str)>, retry_after_seconds: u32) -> Status {
        let causes = cause.map(|(reason, message)| StatusCause {
            reason: reason.into(),
            message: message.into(),
            field: String::new(),
        });
        let details = StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: causes.into_iter().collect(),
            retry_after_seconds,
        };
        Status::failure(message, "").with_code(code).with_details(details)
    }

    fn blocked(budget: &str, after: Option<u64>) -> Answer {
        Answer::Blocked {
            budget: budget.into(),
            after: after.map(Duration::from_secs),
        }
    }

    const NEEDS: &str = "The disruption budget web needs 2 healthy pods and has 2 currently";

    #[rstest]
    #[case::gone(status(404, "not found", None, 0), Answer::Gone)]
    #[case::replaced(status(409, "Precondition failed: UID", None, 0), Answer::Gone)]
    #[case::budget(status(429, "", Some(("DisruptionBudget", NEEDS)), 0), blocked("ns/web", None))]
    #[case::budget_not_counted_yet(
        status(429, "", Some(("DisruptionBudget", "The disruption budget web is still being processed")), 10),
        blocked("ns/web", Some(10))
    )]
    #[case::budget_with_an_endless_name(
        status(429, "", Some(("DisruptionBudget", &format!("The disruption budget {} needs", "x".repeat(254)))), 0),
        blocked("ns/(unnamed)", None)
    )]
    #[case::several(
        status(
            500,
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            None,
            0
        ),
        Answer::SeveralBudgets
    )]
    #[case::ending(status(403, "", Some(("NamespaceTerminating", "")), 0), Answer::NamespaceTerminating)]
    #[case::forbidden(status(403, "no", None, 0), Answer::Refused { code: 403, reason: "no".into(), after: None })]
    #[case::overloaded(status(429, "busy", None, 1), Answer::Refused { code: 429, reason: "busy".into(), after: Some(Duration::from_secs(1)) })]
    fn each_answer_has_its_meaning(#[case] status: Status, #[case] expected: Answer) {
        assert_eq!(read(&status, "ns"), expected);
    }
}
