//! Calls, answers and ARM's errors.
//!
//! Paths are matched without regard to case, as Azure does, but names keep the case they were created with.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use serde_json::{Map, Value, json};

/// One request, parsed as far as every handler needs it.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: Method,
    /// The path as sent, without query.
    pub path: String,
    /// The path in lower case: the key of the resource it names.
    pub key: String,
    /// The path's segments as sent.
    pub segments: Vec<String>,
    /// Query parameters; names in lower case.
    pub query: BTreeMap<String, String>,
    pub headers: HeaderMap,
    pub raw: Bytes,
    /// The body, if it is JSON.
    pub body: Value,
    /// Scheme and authority the client used, for links in answers.
    pub base: String,
    /// The faults that the handler of this call must simulate.
    pub ordeal: Ordeal,
}

/// Faults that a handler carries out, rather than the server around it.
#[derive(Clone, Debug, Default)]
pub struct Ordeal {
    /// The operation this call starts never ends.
    pub stall: bool,
    /// The disks of a deleted VM stay, whatever their deleteOption.
    pub keep_disks: bool,
}

impl Call {
    pub fn new(method: Method, target: &str, headers: HeaderMap, raw: Bytes, base: String) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = decode(path, false);
        let path = path.trim_end_matches('/').to_owned();
        let segments: Vec<String> = path.split('/').filter(|s| !s.is_empty()).map(str::to_owned).collect();
        let query = pairs(query).map(|(name, value)| (name.to_lowercase(), value)).collect();
        let body = serde_json::from_slice(&raw).unwrap_or(Value::Null);
        Self {
            method,
            key: path.to_lowercase(),
            path,
            segments,
            query,
            headers,
            raw,
            body,
            base,
            ordeal: Ordeal::default(),
        }
    }

    pub fn segment(&self, i: usize) -> &str {
        self.segments.get(i).map_or("", String::as_str)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    pub fn api_version(&self) -> &str {
        self.query.get("api-version").map_or("", String::as_str)
    }

    /// Whether `$expand` names this part.
    pub fn expands(&self, part: &str) -> bool {
        self.query
            .get("$expand")
            .is_some_and(|expand| expand.to_lowercase().contains(&part.to_lowercase()))
    }

    pub fn form(&self) -> BTreeMap<String, String> {
        pairs(std::str::from_utf8(&self.raw).unwrap_or_default()).collect()
    }
}

fn pairs(query: &str) -> impl Iterator<Item = (String, String)> + '_ {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(name, true), decode(value, true))
    })
}

/// Percent-decoding, with `+` as a space in queries and forms.
fn decode(text: &str, form: bool) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while let Some(&byte) = bytes.get(i) {
        let hex = (byte == b'%')
            .then(|| text.get(i + 1..i + 3).and_then(|hex| u8::from_str_radix(hex, 16).ok()))
            .flatten();
        out.push(hex.unwrap_or(if form && byte == b'+' { b' ' } else { byte }));
        i += if hex.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Percent-encoding of everything that is not plainly safe in a query value.
pub fn encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
        out
    })
}

/// The answer of a handler.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: Vec<(&'static str, String)>,
    /// `Null` means no body.
    pub body: Value,
}

impl Answer {
    pub fn new(status: StatusCode, body: Value) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body,
        }
    }

    pub fn ok(body: Value) -> Self {
        Self::new(StatusCode::OK, body)
    }

    pub fn created(body: Value) -> Self {
        Self::new(StatusCode::CREATED, body)
    }

    pub fn accepted() -> Self {
        Self::new(StatusCode::ACCEPTED, Value::Null)
    }

    pub fn empty() -> Self {
        Self::new(StatusCode::OK, Value::Null)
    }

    pub fn no_content() -> Self {
        Self::new(StatusCode::NO_CONTENT, Value::Null)
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// Tells that Resource Manager itself refused, before the resource's own service saw the call.
pub const FAILURE_CAUSE: &str = "x-ms-failure-cause";

/// Refusals of Resource Manager itself.
const OF_THE_GATEWAY: [&str; 13] = [
    "AuthenticationFailed",
    "AuthorizationFailed",
    "ExpiredAuthenticationToken",
    "InvalidAuthenticationToken",
    "InvalidRequestContent",
    "InvalidResourceNamespace",
    "InvalidResourceType",
    "LocationRequired",
    "MissingSubscriptionRegistration",
    "RequestContentTooLarge",
    "ResourceGroupNotFound",
    "ResourceNotFound",
    "SubscriptionNotFound",
];

/// An error as ARM words it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Fail {
    pub status: u16,
    pub code: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u64>,
}

pub type Reply = Result<Answer, Fail>;

impl Fail {
    pub fn new(status: u16, code: impl Into<String>, message: impl Into<String>) -> Self {
        let (code, message) = (code.into(), message.into());
        Self {
            status,
            code,
            message,
            target: None,
            details: Vec::new(),
            retry_after: None,
        }
    }

    pub fn bad(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(400, code, message)
    }

    /// The commonest refusal of Compute.
    pub fn parameter(target: &str, message: impl Into<String>) -> Self {
        Self::bad("InvalidParameter", message).target(target)
    }

    pub fn conflict(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(409, code, message)
    }

    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.target = Some(target.into());
        self
    }

    pub fn after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The inner object, as it also stands in a failed operation's status.
    pub fn error(&self) -> Value {
        let mut error = Map::new();
        error.insert("code".into(), json!(self.code));
        error.insert("message".into(), json!(self.message));
        if let Some(target) = &self.target {
            error.insert("target".into(), json!(target));
        }
        if !self.details.is_empty() {
            error.insert("details".into(), json!(self.details));
        }
        Value::Object(error)
    }

    pub fn answer(&self) -> Answer {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut answer = Answer::new(status, json!({ "error": self.error() }));
        if OF_THE_GATEWAY.contains(&self.code.as_str()) {
            answer = answer.with(FAILURE_CAUSE, "gateway");
        }
        match self.retry_after {
            Some(seconds) => answer.with("retry-after", seconds.to_string()),
            None => answer,
        }
    }
}

/// Reads a string at a JSON pointer.
pub fn text<'a>(value: &'a Value, pointer: &str) -> Option<&'a str> {
    value.pointer(pointer).and_then(Value::as_str)
}

/// Whether two names are the same to Azure.
pub fn same(a: &str, b: &str) -> bool {
    a.eq_ignore_ascii_case(b)
}

/// Returns the object at a key of `value`. Adds it when it is missing.
pub fn object<'a>(value: &'a mut Value, name: &str) -> &'a mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    let slot = &mut value[name];
    if !slot.is_object() {
        *slot = json!({});
    }
    match slot {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

/// PUT and PATCH bodies are merged: objects deeply, everything else replaced, `null` removes. `tags` are replaced whole.
pub fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                if value.is_null() {
                    into.shift_remove(name);
                } else if name == "tags" {
                    into.insert(name.clone(), value.clone());
                } else {
                    merge(into.entry(name.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (into, from) => {
            *into = from.clone();
            strip_nulls(into);
        }
    }
}

fn strip_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(strip_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(strip_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_with_only_a_capacity_leaves_the_rest_alone() {
        let mut doc = json!({"sku": {"name": "a", "capacity": 1}, "tags": {"x": "1"}, "properties": {"list": [1, 2]}});
        merge(
            &mut doc,
            &json!({"sku": {"capacity": 3}, "properties": {"list": [3], "gone": null}}),
        );
        assert_eq!(
            doc,
            json!({"sku": {"name": "a", "capacity": 3}, "tags": {"x": "1"}, "properties": {"list": [3]}})
        );
    }

    #[test]
    fn escaped_paths_and_queries_are_read() {
        let call = Call::new(
            Method::GET,
            "/Subscriptions/a%20b/x?$Expand=instanceView&%24filter=location%20eq+'x'",
            HeaderMap::new(),
            Bytes::new(),
            String::new(),
        );
        assert_eq!(call.key, "/subscriptions/a b/x");
        assert!(call.expands("instanceview"));
        assert_eq!(call.query["$filter"], "location eq 'x'");
    }
}
