//! Answers: objects, and the API server's `Status` for failures.

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};

use tower::BoxError;

use super::kinds::Kind;

/// The body of an answer: one document, or a watch.
pub type Answer = UnsyncBoxBody<Bytes, BoxError>;

fn whole(bytes: Bytes) -> Answer {
    Answer::new(Full::new(bytes).map_err(|never| match never {}))
}

/// A request that the API server rejects.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    pub details: Value,
}

impl Failure {
    fn new(code: u16, reason: &'static str, message: String, details: Value) -> Self {
        Self {
            code,
            reason,
            message,
            details,
        }
    }

    pub fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", kind.qualified());
        Self::new(404, "NotFound", message, details(kind, name))
    }

    /// A version of a group is served, but not this kind of it.
    pub fn no_such_kind() -> Self {
        let message = "the server could not find the requested resource".to_owned();
        Self::new(404, "NotFound", message, json!({}))
    }

    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", kind.qualified());
        Self::new(409, "AlreadyExists", message, details(kind, name))
    }

    pub fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {why}",
            kind.qualified()
        );
        Self::new(409, "Conflict", message, details(kind, name))
    }

    pub fn stale(kind: &Kind, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    pub fn invalid(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("{} \"{name}\" is invalid: {why}", kind.qualified_kind());
        let mut details = details(kind, name);
        details["kind"] = json!(kind.kind);
        Self::new(422, "Invalid", message, details)
    }

    pub fn bad_request(message: &str) -> Self {
        Self::new(400, "BadRequest", message.to_owned(), Value::Null)
    }

    pub fn not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message.to_owned(), json!({}))
    }

    pub fn unsupported(media_type: &str) -> Self {
        let message = format!("the body of the request was in an unknown format: {media_type}");
        Self::new(415, "UnsupportedMediaType", message, json!({}))
    }

    pub fn expired(version: u64, oldest: u64) -> Self {
        let message = format!("too old resource version: {version} ({oldest})");
        Self::new(410, "Expired", message, Value::Null)
    }

    /// A budget that refuses an eviction.
    pub fn budget(cause: String) -> Self {
        let message = "Cannot evict pod as it would violate the pod's disruption budget.".to_owned();
        let details = json!({"causes": [{"reason": "DisruptionBudget", "message": cause}]});
        Self::new(429, "TooManyRequests", message, details)
    }

    pub fn several_budgets() -> Self {
        let message =
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        Self::new(500, "", message.to_owned(), Value::Null)
    }

    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

fn details(kind: &Kind, name: &str) -> Value {
    let mut details = json!({"kind": kind.plural});
    if !name.is_empty() {
        details["name"] = json!(name);
    }
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    details
}

/// The answer to a deletion or eviction that is done.
pub fn success(kind: &Kind, name: &str, uid: &str) -> Value {
    let mut details = details(kind, name);
    details["uid"] = json!(uid);
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

pub fn respond(code: u16, body: &Value) -> Response<Answer> {
    with_body(code, "application/json", whole(Bytes::from(body.to_string())))
}

/// Returns the answer to a path that is not served.
pub fn no_such_path() -> Response<Answer> {
    let text = Bytes::from_static(b"404 page not found\n");
    with_body(404, "text/plain; charset=utf-8", whole(text))
}

pub fn with_body(code: u16, media_type: &'static str, body: Answer) -> Response<Answer> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let value = header::HeaderValue::from_static(media_type);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}
