//! Every request, in a form that tests can assert on, and counts by policy.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use super::wire::Call;

/// Requests that are kept; older ones only stay in the counts.
const KEPT: usize = 50_000;

/// One request. `status` is 0 while it is being worked on, and 599 when it got no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    pub n: u64,
    pub time: String,
    pub method: String,
    pub path: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub query: String,
    pub policy: &'static str,
    pub status: u16,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub agent: String,
}

impl Request {
    pub fn is_write(&self) -> bool {
        self.method != "GET" && self.method != "HEAD" && self.policy != "SignIn"
    }
}

pub const UNANSWERED: u16 = 599;

#[derive(Default)]
pub struct Log {
    kept: VecDeque<Request>,
    next: u64,
    pub counts: BTreeMap<&'static str, u64>,
    pub statuses: BTreeMap<u16, u64>,
}

impl Log {
    pub fn open(&mut self, call: &Call, policy: &'static str, time: String) -> u64 {
        self.next += 1;
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        let query: Vec<String> = call
            .query
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        self.kept.push_back(Request {
            n: self.next,
            time,
            method: call.method.to_string(),
            path: call.path.clone(),
            query: query.join("&"),
            policy,
            status: 0,
            agent: call.header("user-agent").unwrap_or_default().to_owned(),
        });
        *self.counts.entry(policy).or_default() += 1;
        self.next
    }

    pub fn close(&mut self, n: u64, status: u16) -> Option<Request> {
        *self.statuses.entry(status).or_default() += 1;
        let at = self.kept.binary_search_by_key(&n, |request| request.n).ok()?;
        let request = self.kept.get_mut(at)?;
        request.status = status;
        Some(request.clone())
    }

    pub fn all(&self) -> Vec<Request> {
        self.kept.iter().cloned().collect()
    }

    pub fn clear(&mut self) {
        *self = Self {
            next: self.next,
            ..Self::default()
        };
    }
}
