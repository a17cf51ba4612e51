//! Addresses of Resource Manager, built segment by segment.
//!
//! Invariant: a name changes neither host, depth nor query of an address. Every name is checked by Azure's rules and then
//! escaped; everything else in a path is a word of our own (`&'static str`). An address that Azure itself gave is only
//! ever read, and only at our own Resource Manager.

use crate::Error;
use capstan_core::azure_names::AzureName;
use reqwest::Url;
use std::fmt;

/// The path of a resource, a list or an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn subscription(id: &str) -> Result<Self, Error> {
        Self(vec!["subscriptions".to_owned()]).name(AzureName::Subscription, id)
    }

    pub(crate) fn group(self, name: &str) -> Result<Self, Error> {
        self.word("resourceGroups").name(AzureName::ResourceGroup, name)
    }

    pub(crate) fn provider(self, namespace: &'static str) -> Self {
        self.word("providers").word(namespace)
    }

    /// One level deeper: a resource by its type and name.
    pub(crate) fn resource(self, kind: &'static str, rule: AzureName, name: &str) -> Result<Self, Error> {
        self.word(kind).name(rule, name)
    }

    /// A list, or an action of a POST.
    pub(crate) fn word(mut self, word: &'static str) -> Self {
        self.0.push(word.to_owned());
        self
    }

    fn name(mut self, rule: AzureName, name: &str) -> Result<Self, Error> {
        rule.check(name)?;
        self.0.push(name.to_owned());
        Ok(self)
    }

    /// The resource of an action.
    pub(crate) fn parent(&self) -> Self {
        let kept = self.0.len().saturating_sub(1);
        Self(self.0[..kept].to_vec())
    }

    pub(crate) fn url(&self, manager: &Url) -> Result<Url, Error> {
        let mut url = manager.clone();
        url.set_path("");
        url.set_query(None);
        url.path_segments_mut()
            .map_err(|()| Error::Invalid {
                field: "AZURE_RESOURCE_MANAGER_ENDPOINT",
                value: manager.to_string(),
                reason: "an address without a path".to_owned(),
            })?
            .clear()
            .extend(&self.0);
        Ok(url)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|segment| write!(f, "/{segment}"))
    }
}

/// Path and query of an address that Azure gave: a page of a list, or an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Followed {
    path: String,
    query: Option<String>,
}

impl Followed {
    /// Drops scheme and host: the token is sent to the configured Resource Manager only.
    pub(crate) fn new(address: &str) -> Self {
        let rest = match address.split_once("://") {
            Some((_, rest)) => rest.find('/').map_or("/", |start| &rest[start..]),
            None => address,
        };
        let (path, query) = rest.split_once('?').map_or((rest, None), |(p, q)| (p, Some(q)));
        Self {
            path: path.to_owned(),
            query: query.map(ToOwned::to_owned),
        }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn url(&self, manager: &Url) -> Url {
        let mut url = manager.clone();
        url.set_path(&self.path);
        url.set_query(self.query.as_deref());
        url
    }
}
