//! One set of rules for three callers: admission, the controllers and `capstan check` all ask these pure functions, so that an
//! object is refused with the same words wherever it is met. Every rule names the field, the value and what to do.

pub mod azure_cluster;
pub mod azure_identity;
pub mod azure_pool;
pub mod openshift;
pub mod schema;
pub mod storage_class;
pub mod vcenter;
pub mod vsphere;

use std::fmt;

use serde_json::Value;

/// What is wrong with one field of an object, worded as the API server words it.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    /// `providerSpec.dataDisks[0].lun`
    pub path: String,
    pub kind: FieldErrorKind,
    /// What the value should have been, or what to do about it.
    pub detail: String,
}

#[derive(Clone, Debug, PartialEq)]
pub enum FieldErrorKind {
    Required,
    Invalid(Value),
    Forbidden,
}

impl FieldError {
    pub fn invalid(path: impl Into<String>, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            kind: FieldErrorKind::Invalid(value.into()),
            detail: detail.into(),
        }
    }

    pub fn required(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            kind: FieldErrorKind::Required,
            detail: detail.into(),
        }
    }

    pub fn forbidden(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            kind: FieldErrorKind::Forbidden,
            detail: detail.into(),
        }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path)?;
        match &self.kind {
            FieldErrorKind::Required => write!(f, "Required value")?,
            FieldErrorKind::Invalid(value) => write!(f, "Invalid value: {value}")?,
            FieldErrorKind::Forbidden => write!(f, "Forbidden")?,
        }
        if self.detail.is_empty() {
            Ok(())
        } else {
            write!(f, ": {}", self.detail)
        }
    }
}

impl std::error::Error for FieldError {}

/// What was found in one object: errors refuse it, warnings do not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    pub errors: Vec<FieldError>,
    pub warnings: Vec<String>,
}

impl Findings {
    pub fn is_ok(&self) -> bool {
        self.errors.is_empty()
    }

    /// All errors in one line, in brackets when there are several, as the API server joins them.
    pub fn message(&self) -> String {
        match self.errors.as_slice() {
            [] => String::new(),
            [one] => one.to_string(),
            many => format!(
                "[{}]",
                many.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            ),
        }
    }
}
