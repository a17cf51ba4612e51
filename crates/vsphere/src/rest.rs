//! vCenter's REST API, which alone has tags and cluster modules: one session beside that of SOAP, renewed when vCenter has
//! forgotten it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::body::MAX_REST;
use crate::error::{Error, Fault, Result};
use crate::session::Refusal;
use crate::vcenter::Vcenter;

const SESSION: &str = "/rest/com/vmware/cis/session";
/// A REST call that has not been answered by then is taken for lost.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(60);

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

/// No body.
pub(crate) const NOTHING: Option<&()> = None;

impl Vcenter {
    /// A call within the REST session; a session that vCenter has forgotten is renewed once.
    pub(crate) async fn rest<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        write: bool,
    ) -> Result<T> {
        let token = self.rest_token(None).await?;
        let call = |token: String| self.rest_call(method, path, body, write, token);
        let text = match call(token.clone()).await {
            Err(error) if error.is_not_authenticated() => call(self.rest_token(Some(token)).await?).await?,
            result => result?,
        };
        let text = if text.trim().is_empty() { "null" } else { &text };
        serde_json::from_str(text).map_err(|cause| {
            Error::Xml(format!(
                "{method} {path} answered what is not the JSON expected: {cause}"
            ))
        })
    }

    /// As [`Vcenter::rest`], for a list; an empty one may come as null.
    pub(crate) async fn rest_list<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Vec<T>> {
        let answer: Value<Option<Vec<T>>> = self.rest(method, path, body, false).await?;
        Ok(answer.value.unwrap_or_default())
    }

    async fn rest_call(
        &self,
        method: &str,
        path: &str,
        body: Option<&impl Serialize>,
        write: bool,
        token: String,
    ) -> Result<String> {
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
        self.through(
            method,
            path,
            write,
            self.rest_send(&format!("{method} {path}"), request),
        )
        .await
    }

    async fn rest_send(&self, method: &str, request: reqwest::RequestBuilder) -> Result<String> {
        let answer = self.dispatch(request).await.map_err(|none| none.error)?;
        let status = answer.response.status();
        let text = self.body(method, answer, MAX_REST).await?;
        if status.is_success() {
            return Ok(text.to_owned());
        }
        Err(Error::Http {
            server: self.0.login.server.clone(),
            method: method.to_owned(),
            status: status.as_u16(),
            body: text.chars().take(300).collect(),
        })
    }

    /// The session's token; a new one if there is none, or if it still is the one that vCenter refused.
    async fn rest_token(&self, refused: Option<String>) -> Result<String> {
        let mut rest = self.0.rest.lock().await;
        match &rest.token {
            Some(token) if Some(token) != refused.as_ref() => return Ok(token.clone()),
            _ => {}
        }
        if let Some(error) = rest.refusal.holds(self.0.clock.instant()) {
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
            .through("POST", SESSION, false, self.rest_send("POST session", request))
            .await;
        let text = answer.map_err(|error| match error {
            Error::Http { status: 401, body, .. } => Error::Login {
                server: login.server.clone(),
                user: login.username.clone(),
                fault: Box::new(Fault::read(None, &body)),
            },
            error => error,
        })?;
        let fresh: Value<String> = serde_json::from_str(&text)
            .map_err(|cause| Error::Xml(format!("the REST session answer is not the JSON expected: {cause}")))?;
        Ok(fresh.value)
    }

    pub(crate) async fn rest_logout(&self, token: &str) -> Result<()> {
        let request = self.0.http.delete(format!("{}{SESSION}", self.0.base)).timeout(ANSWER);
        let request = request.header("vmware-api-session-id", token);
        self.through("DELETE", SESSION, false, self.rest_send("DELETE session", request))
            .await
            .map(|_| ())
    }
}
