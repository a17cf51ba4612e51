//! Errors of Azure, with Azure's own code, message and details.

use capstan_core::azure_names::InvalidName;
use capstan_core::{Class, Classified};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A bucket is stopped for this long when Azure answers 429 without `Retry-After`.
pub const DEFAULT_THROTTLE: Duration = Duration::from_secs(30);

/// Codes of failures that end by themselves: capacity, quota and internal errors. Long-running operations report them without
/// an HTTP status, so the code decides.
const TRANSIENT_CODES: &[&str] = &[
    "AllocationFailed",
    "AnotherOperationInProgress",
    "Canceled",
    "Conflict",
    // Azure has forgotten the deletion and the resource is still there: the next request brings the reason.
    "DeletionNotCarriedOut",
    "DiskServiceInternalError",
    "GatewayTimeout",
    "InternalError",
    "InternalExecutionError",
    "InternalOperationError",
    "InternalServerError",
    "NetworkingInternalOperationError",
    // After a failed creation Azure keeps the interface for the machine that failed, for three minutes.
    "NicReservedForAnotherVm",
    "OperationNotAllowed",
    "OperationPreempted",
    "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
    "OSProvisioningInternalError",
    "OSProvisioningTimedOut",
    // Read from the resource, without a reason: the next attempt brings it.
    "ProvisioningCanceled",
    "ProvisioningFailed",
    "QuotaExceeded",
    "ReferencedResourceNotProvisioned",
    "RetryableError",
    "ServerTimeout",
    "ServiceUnavailable",
    "SkuNotAvailable",
    "SubnetIsFull",
    // A fault of the account, not of the machine: an operator corrects the Secret, or Azure restores the subscription.
    "SubscriptionNotFound",
    "SubscriptionRequestsThrottled",
    "TooManyRequests",
    "ZonalAllocationFailed",
];

/// Codes of Azure for a lack of machines of that size in that place.
const NO_ROOM_CODES: &[&str] = &[
    "AllocationFailed",
    "OverconstrainedAllocationRequest",
    "OverconstrainedZonalAllocationRequest",
    "SkuNotAvailable",
    "ZonalAllocationFailed",
];

/// Codes of Azure for a request that refers to something that is not there, whatever the status.
const MISSING_REFERENCE_CODES: &[&str] = &["InvalidResourceReference", "NotFound", "ResourceNotFound"];

/// Azure refuses to change what it fixes when it makes a resource, for example the priority of a scale set. It says so as a
/// conflict, but no time ends that.
pub const FIXED_PROPERTY: &str = "PropertyChangeNotAllowed";

/// Azure's error body, kept whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ArmError {
    /// HTTP status of the answer; 0 where a long-running operation reported the failure.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    #[serde(deserialize_with = "null_is_empty")]
    pub code: String,
    #[serde(deserialize_with = "null_is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    #[serde(deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<ArmError>,
    #[serde(skip)]
    pub retry_after: Option<Duration>,
}

fn is_zero(status: &u16) -> bool {
    *status == 0
}

/// Reads `null` as an empty value: servers written in Go answer `null` where Azure leaves a field out.
pub(crate) fn null_is_empty<'de, D, T>(de: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(de)?.unwrap_or_default())
}

#[derive(Deserialize)]
struct Envelope {
    error: ArmError,
}

impl ArmError {
    /// Reads an error answer; a body that is not Azure's is quoted (shortened) as the message.
    pub fn parse(status: u16, body: &[u8], retry_after: Option<Duration>) -> Self {
        let mut error = serde_json::from_slice::<Envelope>(body)
            .map(|envelope| envelope.error)
            .or_else(|_| serde_json::from_slice::<ArmError>(body))
            .unwrap_or_default();
        if error.code.is_empty() {
            error.code = http::StatusCode::from_u16(status)
                .ok()
                .and_then(|known| known.canonical_reason())
                .unwrap_or("Unknown")
                .replace(' ', "");
        }
        if error.message.is_empty() {
            error.message = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
        }
        error.status = status;
        error.retry_after = retry_after;
        error
    }

    /// This error's code, or that of one of its details.
    pub fn has_code(&self, code: &str) -> bool {
        self.code.eq_ignore_ascii_case(code) || self.details.iter().any(|detail| detail.has_code(code))
    }

    /// Whether a quota is used up.
    pub fn is_quota(&self) -> bool {
        let named = self.code.contains("Quota") || self.message.contains("quota");
        named || self.has_code("OperationNotAllowed") || self.details.iter().any(Self::is_quota)
    }

    /// Whether Azure had no room for more machines: fewer may fit, or others.
    pub fn has_no_room(&self) -> bool {
        self.is_quota() || NO_ROOM_CODES.iter().any(|code| self.has_code(code))
    }

    fn ends_by_itself(&self) -> bool {
        TRANSIENT_CODES.iter().any(|code| self.has_code(code))
            || self.code.contains("Quota")
            || self.code.ends_with("LimitReached")
    }
}

/// Refusals of the request's content are terminal; conflicts, quota, capacity, missing
/// rights (role assignments take minutes to spread) and trouble on Azure's side are not.
impl Classified for ArmError {
    fn class(&self) -> Class {
        match (self.status, self.retry_after) {
            (429, after) => Class::Throttled(after.unwrap_or(DEFAULT_THROTTLE)),
            _ if self.has_code(FIXED_PROPERTY) => Class::Terminal,
            (500.. | 408 | 409, Some(after)) => Class::Throttled(after),
            (500.. | 401 | 408 | 409 | 412, _) => Class::Transient,
            (403, _) if self.code.ends_with("AuthorizationFailed") => Class::Transient,
            _ if self.ends_by_itself() => Class::Transient,
            _ => Class::Terminal,
        }
    }
}

impl fmt::Display for ArmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.status != 0 {
            write!(f, "StatusCode={} -- Original Error: ", self.status)?;
        }
        write!(f, "Code=\"{}\" Message=\"{}\"", self.code, self.message)?;
        if let Some(target) = &self.target {
            write!(f, " Target=\"{target}\"")?;
        }
        if !self.details.is_empty() {
            let details: Vec<_> = self.details.iter().map(ToString::to_string).collect();
            write!(f, " Details=[{}]", details.join(", "))?;
        }
        Ok(())
    }
}

/// A call to Azure that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Azure answered with an error.
    #[error("{call}: {error}")]
    Arm { call: String, error: Box<ArmError> },
    /// An earlier 429 stopped the bucket of this call; nothing was sent.
    #[error("azure throttles {policy} requests for another {}s", after.as_secs_f64().ceil())]
    Throttled { policy: &'static str, after: Duration },
    /// Azure refused a poll: the operation's status is not known.
    #[error("{call}: the status of the operation cannot be read: {error}")]
    StatusUnknown { call: String, error: Box<ArmError> },
    #[error("{call}: {source}")]
    Network { call: String, source: reqwest::Error },
    /// An interceptor (the lease fence, or a test) stopped the call.
    #[error("{call}: {reason}")]
    Intercepted { call: String, reason: String },
    #[error("sign-in of {identity} failed: {reason}")]
    SignIn { identity: String, reason: String },
    #[error("credential {identity}: {reason}")]
    Credential { identity: String, reason: String },
    #[error("{call}: azure's answer cannot be read: {source}")]
    Answer { call: String, source: serde_json::Error },
    /// A setting or a name that has to be changed. Nothing was sent.
    #[error("{field} {value:?}: {reason}")]
    Invalid {
        field: &'static str,
        value: String,
        reason: String,
    },
    /// Azure answered with a resource of another type.
    #[error("{call}: azure answered with a resource of type {found:?}, not {expected}")]
    WrongType {
        call: String,
        expected: &'static str,
        found: String,
    },
    /// Azure's answer is larger than what is read.
    #[error("{call}: azure's answer is larger than the limit of {limit}")]
    Oversized { call: String, limit: usize },
    /// Another owner has the resource, or its answer does not show the owner. Nothing was sent.
    #[error("{resource} is not deleted: {reason}")]
    NotOwned { resource: String, reason: String },
}

impl From<InvalidName> for Error {
    fn from(error: InvalidName) -> Self {
        Self::Invalid {
            field: error.kind.noun(),
            value: error.shown(),
            reason: error.reason(),
        }
    }
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Error::Arm { error, .. } => error.class(),
            Error::Throttled { after, .. } => Class::Throttled(*after),
            // An operator corrects the Secret or mounts the token file: a bad credential does not make a machine fail.
            Error::Network { .. }
            | Error::Intercepted { .. }
            | Error::SignIn { .. }
            | Error::Credential { .. }
            | Error::StatusUnknown { .. }
            | Error::WrongType { .. }
            | Error::Oversized { .. }
            | Error::Answer { .. } => Class::Transient,
            Error::Invalid { .. } | Error::NotOwned { .. } => Class::Terminal,
        }
    }
}

impl Error {
    /// Azure's error, where Azure answered with one.
    pub fn arm(&self) -> Option<&ArmError> {
        match self {
            Error::Arm { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Whether the resource does not exist. A missing subscription proves nothing about its resources.
    pub fn is_not_found(&self) -> bool {
        self.arm()
            .is_some_and(|error| error.status == 404 && !error.has_code("SubscriptionNotFound"))
    }

    /// Whether the resource does not exist, or one that the request refers to.
    pub fn misses_a_reference(&self) -> bool {
        self.is_not_found()
            || self
                .arm()
                .is_some_and(|error| MISSING_REFERENCE_CODES.iter().any(|code| error.has_code(code)))
    }

    /// Whether this error of a poll means that the operation has failed, and not only the poll.
    pub fn ended_operation(&self) -> bool {
        self.arm()
            .is_some_and(|error| !matches!(error.status, 401 | 408 | 429 | 500..))
    }

    /// Whether another writer was first: the ETag differs, or the resource exists although none was expected.
    pub fn is_precondition_failed(&self) -> bool {
        self.arm().is_some_and(|error| error.status == 412)
    }
}

/// Turns "not found" into `None`.
pub fn optional<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::bad_request(400, "InvalidParameter", Class::Terminal)]
    #[case::policy(403, "RequestDisallowedByPolicy", Class::Terminal)]
    #[case::role_not_spread_yet(403, "AuthorizationFailed", Class::Transient)]
    #[case::linked_role(403, "LinkedAuthorizationFailed", Class::Transient)]
    #[case::quota_as_conflict(409, "OperationNotAllowed", Class::Transient)]
    #[case::quota_as_refusal(403, "QuotaExceeded", Class::Transient)]
    #[case::ip_limit(400, "PublicIPCountLimitReached", Class::Transient)]
    #[case::no_address_left(400, "SubnetIsFull", Class::Transient)]
    #[case::interface_kept_for_a_failed_machine(400, "NicReservedForAnotherVm", Class::Transient)]
    #[case::failed_without_a_reason(0, "ProvisioningFailed", Class::Transient)]
    #[case::conflict(409, "Conflict", Class::Transient)]
    #[case::fixed_for_good_as_conflict(409, "PropertyChangeNotAllowed", Class::Terminal)]
    #[case::etag(412, "ConditionNotMet", Class::Transient)]
    #[case::server(503, "ServiceUnavailable", Class::Transient)]
    #[case::operation_without_capacity(0, "ZonalAllocationFailed", Class::Transient)]
    #[case::operation_refused(0, "VMExtensionProvisioningError", Class::Terminal)]
    #[case::subscription(404, "SubscriptionNotFound", Class::Transient)]
    #[case::group(404, "ResourceGroupNotFound", Class::Terminal)]
    #[case::throttled(429, "TooManyRequests", Class::Throttled(DEFAULT_THROTTLE))]
    fn azure_errors_are_classed_by_whether_waiting_helps(
        #[case] status: u16,
        #[case] code: &str,
        #[case] class: Class,
    ) {
        let body = serde_json::json!({"error": {"code": code, "message": "m"}}).to_string();
        assert_eq!(ArmError::parse(status, body.as_bytes(), None).class(), class);
    }

    #[rstest]
    #[case::no_machines("ZonalAllocationFailed", "m", true)]
    #[case::none_of_the_size("SkuNotAvailable", "m", true)]
    #[case::quota("QuotaExceeded", "m", true)]
    #[case::quota_as_refusal("OperationNotAllowed", "results in exceeding approved quota", true)]
    #[case::a_broken_image("OSProvisioningTimedOut", "m", false)]
    fn a_lack_of_room_is_told_from_machines_that_fail(#[case] code: &str, #[case] message: &str, #[case] room: bool) {
        let body = serde_json::json!({"error": {"code": code, "message": message}}).to_string();
        assert_eq!(ArmError::parse(409, body.as_bytes(), None).has_no_room(), room);
    }

    #[test]
    fn credentials_that_cannot_be_used_are_no_verdict_on_a_machine() {
        let (identity, reason) = ("i".to_owned(), "r".to_owned());
        let error = Error::Credential { identity, reason };
        assert_eq!(error.class(), Class::Transient);
    }

    #[rstest]
    #[case::resource("ResourceNotFound", true)]
    #[case::with_its_group("ResourceGroupNotFound", true)]
    #[case::subscription("SubscriptionNotFound", false)]
    fn what_is_not_there_is_gone_unless_its_subscription_cannot_be_found(#[case] code: &str, #[case] gone: bool) {
        let body = serde_json::json!({"error": {"code": code, "message": "m"}}).to_string();
        let error = Error::Arm {
            call: "GET".into(),
            error: Box::new(ArmError::parse(404, body.as_bytes(), None)),
        };
        assert_eq!(error.is_not_found(), gone);
        assert_eq!(optional::<()>(Err(error)).is_ok(), gone);
    }

    #[test]
    fn an_error_keeps_code_message_target_and_details() {
        let body = br#"{"error":{"code":"InvalidParameter","message":"no","target":"a.b","details":[{"code":"X","message":"y"}]}}"#;
        let error = ArmError::parse(400, body, None);
        assert_eq!(
            error.to_string(),
            r#"StatusCode=400 -- Original Error: Code="InvalidParameter" Message="no" Target="a.b" Details=[Code="X" Message="y"]"#
        );
        assert!(error.has_code("x"));
    }

    #[test]
    fn a_body_that_is_not_azures_is_quoted() {
        let error = ArmError::parse(502, b"<html>bad gateway</html>", None);
        assert_eq!(
            (error.code.as_str(), error.message.as_str()),
            ("BadGateway", "<html>bad gateway</html>")
        );
        assert_eq!(error.class(), Class::Transient);
    }

    #[test]
    fn a_server_error_with_retry_after_is_obeyed() {
        let error = ArmError::parse(503, b"", Some(Duration::from_secs(7)));
        assert_eq!(error.class(), Class::Throttled(Duration::from_secs(7)));
    }
}
