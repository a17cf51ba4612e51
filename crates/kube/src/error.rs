//! The one error of this crate. Invariant: whatever the API server answers has a class, so that no caller has to guess
//! whether to retry.

use std::time::Duration;

use capstan_core::Class;
pub use capstan_core::Classified;

use crate::bounds::Unbounded;
use crate::client::{Refused, TimedOut};

/// How long to stay away when the API server says 429 without a `retryAfterSeconds`.
const THROTTLED_DEFAULT: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}", describe(.0))]
    Api(Box<kube::Error>),
    #[error("cannot read the client configuration of {what}: {reason}")]
    Config { what: String, reason: String },
    #[error("cluster {cluster} is unreachable: {reason}")]
    Unreachable { cluster: String, reason: String },
    #[error("cannot serialize {what}: {reason}")]
    Serialize { what: &'static str, reason: String },
    #[error("{kind} has no {field}: it was not read from the API server")]
    Incomplete { kind: String, field: &'static str },
    #[error("the watch of {kind} ended before its first list was complete")]
    WatchEnded { kind: String },
}

impl From<kube::Error> for Error {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Api(error) => class_of(error),
            Self::Unreachable { .. } | Self::Config { .. } | Self::WatchEnded { .. } => Class::Transient,
            Self::Serialize { .. } | Self::Incomplete { .. } => Class::Terminal,
        }
    }
}

impl Error {
    /// The HTTP status code, when the API server answered at all.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api(error) => code(error),
            _ => None,
        }
    }

    pub fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    pub fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    /// Whether the request may have been carried out although we got no answer.
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Api(error) => !matches!(error.as_ref(), kube::Error::Api(status) if status.code < 500),
            _ => false,
        }
    }
}

/// The HTTP status code of a kube error, when the API server answered.
pub fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// The class of a kube error. A refusal by RBAC is transient: it is mended without a change of our object.
pub fn class_of(error: &kube::Error) -> Class {
    let kube::Error::Api(status) = error else {
        return Class::Transient;
    };
    match status.code {
        429 => {
            let seconds = status
                .details
                .as_ref()
                .map(|d| d.retry_after_seconds)
                .unwrap_or_default();
            Class::Throttled(if seconds == 0 {
                THROTTLED_DEFAULT
            } else {
                Duration::from_secs(seconds.into())
            })
        }
        422 => Class::Terminal,
        _ => Class::Transient,
    }
}

/// Why an answer was given up that was beyond the bounds.
pub(crate) fn unbounded(error: &kube::Error) -> Option<Unbounded> {
    match error {
        kube::Error::Service(source) => source.downcast_ref().copied(),
        _ => None,
    }
}

/// One sentence of ours about an error of a tenant's cluster. Neither the answer nor the names in it are
/// repeated: they may come from any server that a kubeconfig leads to, and the sentence goes into a condition.
pub fn classified(error: &kube::Error) -> String {
    let sentence = match error {
        kube::Error::Api(status) => {
            let code = status.code;
            return match code {
                401 => "the API server rejects the credentials (401)".to_owned(),
                403 => "the API server forbids the request (403)".to_owned(),
                404 => "the API server does not know the resource (404)".to_owned(),
                429 => "the API server is overloaded (429)".to_owned(),
                500.. => format!("the API server fails ({code})"),
                _ => format!("the API server rejects the request ({code})"),
            };
        }
        kube::Error::Service(source) => {
            if let Some(refused) = source.downcast_ref::<Refused>() {
                return refused.to_string();
            }
            if let Some(unbounded) = unbounded(error) {
                return unbounded.to_string();
            }
            of_connection(source.as_ref())
        }
        kube::Error::HyperError(source) => of_connection(source),
        kube::Error::ReadEvents(source) => of_connection(source),
        kube::Error::SerdeError(_)
        | kube::Error::FromUtf8(_)
        | kube::Error::HttpError(_)
        | kube::Error::LinesCodecMaxLineLengthExceeded => "the answer is not one of a Kubernetes API server",
        kube::Error::RustlsTls(_) => {
            "the client certificate, its key or the certificate authority of the kubeconfig is not valid"
        }
        kube::Error::Auth(_) => "the token of the kubeconfig is not valid",
        _ => "the request cannot be made",
    };
    sentence.to_owned()
}

/// Why there was no answer.
fn of_connection(error: &(dyn std::error::Error + 'static)) -> &'static str {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let sentence = causes.find_map(|cause| {
        if cause.is::<TimedOut>() {
            return Some("the API server does not answer in time");
        }
        // rustls reaches us inside an I/O error, as text.
        if cause.to_string().contains("certificate") {
            return Some(
                "the certificate of the API server is not trusted, or the API server rejects the client certificate",
            );
        }
        match cause.downcast_ref::<std::io::Error>()?.kind() {
            std::io::ErrorKind::ConnectionRefused => Some("the API server refuses the connection"),
            std::io::ErrorKind::TimedOut => Some("the API server does not answer in time"),
            _ => None,
        }
    });
    sentence.unwrap_or("no connection to the API server")
}

/// The API server's own sentence, without the debug dump that kube appends.
fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{} ({})", status.message, status.code),
        other => {
            let mut text = other.to_string();
            let mut source = std::error::Error::source(other);
            while let Some(inner) = source {
                let inner_text = inner.to_string();
                if !text.contains(&inner_text) {
                    text = format!("{text}: {inner_text}");
                }
                source = inner.source();
            }
            text
        }
    }
}
