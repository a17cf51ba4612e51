//! One request to Azure, and its answer.

use bytes::Bytes;
use http::{HeaderMap, Method};
use serde::Serialize;

use crate::Error;
use crate::budget::policy::{Kind, Policy};
use crate::path::{Followed, Path};

/// A precondition on the resource's version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum When {
    #[default]
    Always,
    /// Only if nothing of this name exists.
    Absent,
    /// Only if it still has this ETag.
    Unchanged(String),
}

/// The address of a request.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    /// Built by this crate, with the api-version and the rest of the query.
    Path(Path),
    /// Given by Azure, with its own query. Only ever read.
    Followed(Followed),
}

/// One request to Azure.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub method: Method,
    pub address: Address,
    pub version: &'static str,
    pub query: Vec<(&'static str, String)>,
    pub body: Option<Bytes>,
    pub when: When,
    pub policy: Policy,
}

pub(crate) struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Call {
    pub(crate) fn new(method: Method, path: Path, version: &'static str, policy: Policy) -> Self {
        Self {
            method,
            address: Address::Path(path),
            version,
            query: Vec::new(),
            body: None,
            when: When::Always,
            policy,
        }
    }

    /// Reads an address that Azure gave.
    pub(crate) fn follow(address: &str, policy: Policy) -> Self {
        Self {
            method: Method::GET,
            address: Address::Followed(Followed::new(address)),
            version: "",
            query: Vec::new(),
            body: None,
            when: When::Always,
            policy,
        }
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    pub(crate) fn when(mut self, when: When) -> Self {
        self.when = when;
        self
    }

    pub(crate) fn body<B: Serialize>(mut self, body: &B) -> Result<Self, Error> {
        let bytes = serde_json::to_vec(body).map_err(|source| Error::Answer {
            call: self.name(),
            source,
        })?;
        self.body = Some(bytes.into());
        Ok(self)
    }

    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.method, self.target())
    }

    /// The path, for people and for the budget.
    pub(crate) fn target(&self) -> String {
        match &self.address {
            Address::Path(path) => path.to_string(),
            Address::Followed(followed) => followed.path().to_owned(),
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.method {
            Method::GET | Method::HEAD => Kind::Read,
            Method::DELETE => Kind::Delete,
            _ => Kind::Write,
        }
    }

    /// The resource without the action of a POST, as operations remember it.
    pub(crate) fn resource(&self) -> String {
        let resource = match (&self.address, &self.method) {
            (Address::Path(path), &Method::POST) => path.parent().to_string(),
            _ => self.target(),
        };
        format!("{resource}?api-version={}", self.version)
    }
}
