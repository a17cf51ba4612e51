//! vCenter's REST API, which alone has tags and cluster modules: one session beside that of SOAP, renewed when vCenter has
//! forgotten it.
//!
//! Invariant: an id changes neither depth nor query of an address: manifests name some of them, and a path that leads elsewhere
//! reaches every object of the vCenter. Everything else in a path is a word of our own.

use std::borrow::Cow;
use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::body::{MAX_REST, Text};
use crate::error::{Error, Fault, Result};
use crate::session::{Refusal, turn};
use crate::soap::NoAnswer;
use crate::vcenter::Vcenter;

const SESSION: Path = Path::new("/rest/com/vmware/cis/session");
/// A REST call that has not been answered by then is taken for lost.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(60);
/// Entries of an answer at most: one of two bytes takes some hundred in memory.
const MAX_ENTRIES: usize = 60_000;

/// The REST session of a vCenter.
#[derive(Default)]
pub(crate) struct Rest {
    pub token: Option<String>,
    refusal: Refusal,
}

/// The envelope of every answer.
#[derive(Deserialize)]
pub(crate) struct Value<T> {
    pub value: T,
}

/// The path and query of a call.
#[derive(Clone, Debug)]
pub(crate) struct Path(Cow<'static, str>);

impl Path {
    pub(crate) const fn new(path: &'static str) -> Self {
        Self(Cow::Borrowed(path))
    }

    pub(crate) fn word(self, word: &'static str) -> Self {
        Self((self.0.into_owned() + word).into())
    }

    /// Adds an id of vCenter: a UUID, a managed object id or a URN.
    pub(crate) fn id(self, field: &'static str, id: &str) -> Result<Self> {
        let allowed = |character: char| character.is_ascii_alphanumeric() || "-_:.".contains(character);
        if id.chars().all(allowed) && id.chars().any(|character| character != '.') {
            return Ok(Self((self.0.into_owned() + id).into()));
        }
        Err(Error::Invalid {
            field,
            value: id.to_owned(),
            reason: "an id has letters, digits, \"-\", \"_\", \":\" and \".\" only".to_owned(),
        })
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// No body.
pub(crate) const NOTHING: Option<&()> = None;

impl Vcenter {
    /// A call within the REST session; a session that vCenter has forgotten is renewed once.
    pub(crate) async fn rest<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &Path,
        body: Option<&impl Serialize>,
        write: bool,
    ) -> Result<T> {
        let alone = self.0.rest_circuit.enter()?;
        let token = self.rest_token(None, alone.is_some()).await?;
        let call = |token: String| self.rest_call(method, path, body, write, token);
        let text = match call(token.clone()).await {
            Err(error) if error.is_not_authenticated() => {
                call(self.rest_token(Some(token), alone.is_some()).await?).await?
            }
            result => result?,
        };
        parse(&format!("{method} {path}"), &text)
    }

    /// As [`Vcenter::rest`], for a list; an empty one may come as null.
    pub(crate) async fn rest_list<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &Path,
        body: Option<&impl Serialize>,
    ) -> Result<Vec<T>> {
        let answer: Value<Option<Vec<T>>> = self.rest(method, path, body, false).await?;
        Ok(answer.value.unwrap_or_default())
    }

    async fn rest_call(
        &self,
        method: &str,
        path: &Path,
        body: Option<&impl Serialize>,
        write: bool,
        token: String,
    ) -> Result<Text> {
        let verb = reqwest::Method::from_bytes(method.as_bytes()).unwrap_or(reqwest::Method::GET);
        let request = self
            .0
            .http
            .request(verb, format!("{}{path}", self.0.base))
            .timeout(ANSWER);
        let request = request.header("vmware-api-session-id", token);
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        let call = format!("{method} {path}");
        self.through(method, &path.0, write, self.rest_send(&call, request))
            .await
    }

    async fn rest_send(&self, method: &str, request: reqwest::RequestBuilder) -> Result<Text> {
        let answer = self.dispatch(request).await.map_err(|NoAnswer { error, is_silent }| {
            if is_silent {
                self.0.rest_circuit.silent(&error);
            }
            error
        })?;
        self.0.rest_circuit.answered();
        let status = answer.response.status();
        let text = self.body(method, answer, MAX_REST).await?;
        if status.is_success() {
            return Ok(text);
        }
        Err(Error::Http {
            server: self.0.login.server.clone(),
            method: method.to_owned(),
            status: status.as_u16(),
            body: text.chars().take(300).collect(),
        })
    }

    /// The session's token; a new one if there is none, or if it still is the one that vCenter refused.
    /// A caller that is not `alone` does not log in after another has found out that nobody answers.
    async fn rest_token(&self, refused: Option<String>, alone: bool) -> Result<String> {
        let mut rest = turn(self.0.clock, &self.0.login.server, &self.0.rest).await?;
        match &rest.token {
            Some(token) if Some(token) != refused.as_ref() => return Ok(token.clone()),
            _ => {}
        }
        let silence = self.0.rest_circuit.silence().filter(|_| !alone);
        if let Some(error) = silence.or_else(|| rest.refusal.holds(self.0.clock.instant())) {
            return Err(error);
        }
        let result = self.rest_login().await;
        rest.refusal.note(self.0.clock.instant(), &result);
        let fresh = result?;
        rest.token = Some(fresh.clone());
        Ok(fresh)
    }

    async fn rest_login(&self) -> Result<String> {
        let login = &self.0.login;
        let request = self.0.http.post(format!("{}{SESSION}", self.0.base)).timeout(ANSWER);
        let request = request.basic_auth(&login.username, Some(login.password.reveal()));
        let answer = self
            .through("POST", &SESSION.0, false, self.rest_send("POST session", request))
            .await;
        let text = answer.map_err(|error| match error {
            Error::Http { status: 401, body, .. } => Error::Login {
                server: login.server.clone(),
                user: login.username.clone(),
                fault: Box::new(Fault::read(None, &body)),
            },
            error => error,
        })?;
        let fresh: Value<String> = parse("POST session", &text)?;
        Ok(fresh.value)
    }

    pub(crate) async fn rest_logout(&self, token: &str) -> Result<()> {
        let request = self.0.http.delete(format!("{}{SESSION}", self.0.base)).timeout(ANSWER);
        let request = request.header("vmware-api-session-id", token);
        self.through("DELETE", &SESSION.0, false, self.rest_send("DELETE session", request))
            .await
            .map(|_| ())
    }
}

/// Reads the answer to a call; an empty one is null.
fn parse<T: DeserializeOwned>(call: &str, text: &str) -> Result<T> {
    if text.bytes().filter(|byte| *byte == b',').count() > MAX_ENTRIES {
        return Err(Error::Xml(format!(
            "{call} answered with more than {MAX_ENTRIES} entries"
        )));
    }
    let text = if text.trim().is_empty() { "null" } else { text };
    serde_json::from_str(text)
        .map_err(|cause| Error::Xml(format!("{call} answered what is not the JSON expected: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_id_changes_neither_depth_nor_query_of_an_address(id in "([a-z:]|\\.|/|\\?|#|%2[fF]|%2e|\\\\|&|=|;|@|\\n|\\t| |ä){0,8}") {
            let path = Path::new("/rest/vcenter/cluster/modules/vm/").id("cluster module", &id);
            let Ok(path) = path.map(|path| path.word("/members?action=add")) else { return Ok(()) };
            let url = reqwest::Url::parse(&format!("https://vcenter{path}")).unwrap();
            prop_assert_eq!(url.host_str(), Some("vcenter"));
            let expected = ["rest", "vcenter", "cluster", "modules", "vm", &id, "members"];
            prop_assert_eq!(url.path_segments().unwrap().collect::<Vec<_>>(), expected);
            prop_assert_eq!((url.query(), url.fragment()), (Some("action=add"), None));
        }
    }

    #[test]
    fn an_id_that_leads_elsewhere_is_refused_with_the_field_and_the_value() {
        for id in [
            "",
            ".",
            "..",
            "../../vm/vm-42",
            "../../vm/vm-42/power/stop?x=",
            "a%2Fb",
            "a#",
            "a b",
        ] {
            let error = Path::new("/rest/").id("cluster module", id).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("cluster module {id:?} is not valid")),
                "{error}"
            );
        }
        for id in [
            "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b",
            "urn:vmomi:InventoryServiceTag:5b3f:GLOBAL",
            "domain-c7",
        ] {
            assert!(Path::new("/rest/").id("tag", id).is_ok());
        }
    }

    #[test]
    fn an_answer_of_many_small_entries_is_refused_with_their_number() {
        let list = |entries: usize| format!(r#"{{"value": [""{}]}}"#, r#","""#.repeat(entries));
        let read = |text: &str| parse::<Value<Vec<String>>>("GET tags", text).map(|answer| answer.value.len());
        assert_eq!(read(&list(MAX_ENTRIES)).unwrap(), MAX_ENTRIES + 1);
        let refused = read(&list(MAX_ENTRIES + 1)).unwrap_err().to_string();
        assert!(
            refused.contains("GET tags answered with more than 60000 entries"),
            "{refused}"
        );
        assert!(parse::<()>("DELETE session", " ").is_ok());
    }
}
