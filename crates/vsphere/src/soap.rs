//! SOAP requests: envelopes, faults, interceptors, and errors in place of answers.

use std::time::Duration;

use capstan_core::interceptor::{Effect, System};
use capstan_core::vm::MoRef;

use crate::body::{self, Answer};
use crate::error::{Error, Fault, Result};
use crate::tls;
use crate::vcenter::Vcenter;
use crate::xml::{Element, escape};

/// A call without an answer by then is lost; vCenter answers within seconds or not at all.
const ANSWER: Duration = Duration::from_secs(90);
/// The first calls to a vCenter are answered by then, or it is unreachable.
const PROBE: Duration = Duration::from_secs(30);
/// Errors quote this much of an answer.
const BODY_SHOWN: usize = 300;
/// The version of the API that every vCenter of today understands.
const FIRST_VERSION: &str = "6.5";

/// One SOAP request.
pub(crate) struct Call<'a> {
    pub method: &'a str,
    pub this: &'a MoRef,
    pub body: String,
    pub write: bool,
    pub timeout: Duration,
}

impl<'a> Call<'a> {
    pub fn read(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            method,
            this,
            body,
            write: false,
            timeout: ANSWER,
        }
    }

    /// A call that shows whether the server answers.
    pub fn probe(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            timeout: PROBE,
            ..Self::read(method, this, body)
        }
    }

    /// Whether the server has not shown yet that it is a vCenter, or that it accepts the account.
    fn is_first(&self) -> bool {
        matches!(self.method, "RetrieveServiceContent" | "Login")
    }

    /// Whether the server answers only when something changes.
    fn is_long(&self) -> bool {
        self.method == "WaitForUpdatesEx"
    }

    pub fn write(method: &'a str, this: &'a MoRef, body: String) -> Self {
        Self {
            write: true,
            ..Self::read(method, this, body)
        }
    }
}

/// Why there is no answer, and whether the server was silent for too long.
pub(crate) struct NoAnswer {
    pub error: Error,
    pub is_silent: bool,
}

impl Vcenter {
    pub(crate) async fn send(&self, call: Call<'_>, cookie: Option<String>) -> Result<Element> {
        self.exchange(&call, cookie).await.map(|(answer, _)| answer)
    }

    /// One request and its answer, through the interceptors; also the session cookie that the answer sets.
    pub(crate) async fn exchange(&self, call: &Call<'_>, cookie: Option<String>) -> Result<(Element, Option<String>)> {
        let _alone = if call.is_long() { None } else { self.0.circuit.enter()? };
        let envelope = envelope(call, "urn:vim25", "");
        let version = self
            .0
            .content
            .get()
            .map_or(FIRST_VERSION, |content| content.about.api_version.as_str());
        let request = self
            .0
            .http
            .post(format!("{}/sdk", self.0.base))
            .header("SOAPAction", format!("\"urn:vim25/{version}\""))
            .header("Content-Type", "text/xml; charset=utf-8")
            .timeout(call.timeout);
        let request = match cookie {
            Some(cookie) => request.header("Cookie", cookie),
            None => request,
        };
        let target = call.this.to_string();
        let soap = self.soap(call, request.body(envelope));
        let result = self.through(call.method, &target, call.write, soap).await;
        if matches!(result, Ok(_) | Err(Error::Fault { .. })) {
            self.0.circuit.answered();
        }
        result
    }

    /// Asks the interceptors before the request is sent and after its answer has come.
    pub(crate) async fn through<T>(
        &self,
        method: &str,
        target: &str,
        write: bool,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let effect = Effect {
            system: System::Vsphere,
            method: method.to_owned(),
            target: target.to_owned(),
            write,
        };
        let refused = |reason| Error::Refused {
            method: method.to_owned(),
            reason,
        };
        self.0.interceptors.before(&effect).enforce().await.map_err(refused)?;
        let began = self.0.clock.instant();
        let result = request.await;
        let took = self.0.clock.since(began);
        tracing::trace!(method, target, ?took, "vCenter answered");
        self.0.metrics.called(method, &result, took);
        if matches!(result, Ok(_) | Err(Error::Fault { .. })) {
            *self.0.answered.lock() = self.0.clock.instant();
        }
        self.0.interceptors.after(&effect).enforce().await.map_err(refused)?;
        result
    }

    pub(crate) async fn soap(
        &self,
        call: &Call<'_>,
        request: reqwest::RequestBuilder,
    ) -> Result<(Element, Option<String>)> {
        let answer = self.dispatch(request).await.map_err(|NoAnswer { error, is_silent }| {
            if is_silent && !call.is_long() {
                self.0.circuit.silent(&error);
            }
            error
        })?;
        let status = answer.response.status();
        let cookie = session_cookie(answer.response.headers());
        let limit = if call.is_first() {
            body::MAX_HELLO
        } else {
            body::MAX_SOAP
        };
        let text = self.body(call.method, answer, limit).await?;
        let http = |text: &str| Error::Http {
            server: self.0.login.server.clone(),
            method: call.method.to_owned(),
            status: status.as_u16(),
            body: text.chars().take(BODY_SHOWN).collect(),
        };
        if !status.is_success() && status.as_u16() != 500 {
            return Err(http(&text));
        }
        let tree = match Element::parse(&text) {
            Ok(tree) => tree,
            Err(_) if !status.is_success() => return Err(http(&text)),
            Err(error) => return Err(error),
        };
        let body = tree.into_child("Body").ok_or_else(|| http(&text))?;
        if let Some(fault) = body.child("Fault") {
            let detail = fault.child("detail").and_then(|detail| detail.children.first());
            let fault = Box::new(Fault::read(detail, fault.text_at("faultstring").unwrap_or_default()));
            return Err(Error::Fault {
                method: call.method.to_owned(),
                target: call.this.to_string(),
                fault,
            });
        }
        let answer = body.children.into_iter().next().ok_or_else(|| http(&text))?;
        Ok((answer, cookie))
    }

    /// Sends a request to the server, or to the one in the process. The time of the request is measured here and not by the HTTP
    /// client, because an answer may have to wait for its turn.
    pub(crate) async fn dispatch(&self, request: reqwest::RequestBuilder) -> Result<Answer, NoAnswer> {
        let failed = |error: reqwest::Error| NoAnswer {
            is_silent: error.is_timeout(),
            error: self.unreachable(&error),
        };
        let mut request = request.build().map_err(failed)?;
        let time = request.timeout_mut().take();
        let deadline = time.map(|time| self.0.clock.instant() + time);
        let answer = async {
            match &self.0.in_process {
                Some(in_process) => Ok(in_process.send(request).await),
                None => self.0.http.execute(request).await,
            }
        };
        let answered = match deadline {
            None => answer.await,
            Some(end) => match capstan_core::clock::timeout_at(end.into(), answer).await {
                Ok(answered) => answered,
                Err(_) => {
                    let cause = format!("it does not answer within {} s", time.unwrap_or_default().as_secs());
                    let server = self.0.login.server.clone();
                    return Err(NoAnswer {
                        error: Error::Unreachable { server, cause },
                        is_silent: true,
                    });
                }
            },
        };
        let response = answered.map_err(failed)?;
        let deadline = deadline.filter(|_| self.0.in_process.is_none());
        Ok(Answer { response, deadline })
    }

    /// Reads an answer that is not longer than `limit`.
    pub(crate) async fn body(&self, method: &str, answer: Answer, limit: usize) -> Result<body::Text> {
        match body::read(self.0.clock, &self.0.login, answer, limit).await {
            Ok(body::Body::Text(text)) => Ok(text),
            Ok(body::Body::TooLarge) => Err(self.too_large(method, limit)),
            Ok(body::Body::TooSlow) => Err(Error::Unreachable {
                server: self.0.login.server.clone(),
                cause: format!("its answer to {method} does not end in time"),
            }),
            Ok(body::Body::Barred) => Err(Error::Barred {
                server: self.0.login.server.clone(),
                method: method.to_owned(),
            }),
            Err(error) => Err(self.unreachable(&error)),
        }
    }

    pub(crate) fn too_large(&self, method: &str, limit: usize) -> Error {
        Error::TooLarge {
            server: self.0.login.server.clone(),
            method: method.to_owned(),
            limit,
        }
    }

    pub(crate) fn unreachable(&self, error: &reqwest::Error) -> Error {
        let mut cause = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            cause = format!("{cause}: {inner}");
            source = inner.source();
        }
        let server = self.0.login.server.clone();
        match tls::mismatch(&cause) {
            Some((seen, expected)) => Error::Thumbprint { server, seen, expected },
            None if tls::is_rejected(&cause) => Error::Certificate { server, cause },
            None => Error::Unreachable { server, cause },
        }
    }
}

pub(crate) fn envelope(call: &Call<'_>, namespace: &str, header: &str) -> String {
    let Call { method, this, body, .. } = call;
    format!(
        concat!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>",
            "<soapenv:Envelope xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" ",
            "xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\" xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\">",
            "{}<soapenv:Body><{} xmlns=\"{}\"><_this type=\"{}\">{}</_this>{}</{}></soapenv:Body></soapenv:Envelope>"
        ),
        header,
        method,
        namespace,
        escape(this.kind()),
        escape(this.value()),
        body,
        method
    )
}

fn session_cookie(headers: &reqwest::header::HeaderMap) -> Option<String> {
    headers
        .get_all("set-cookie")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .filter_map(|value| value.split(';').next())
        .find(|pair| pair.trim_start().starts_with("vmware_soap_session="))
        .map(|pair| pair.trim().to_owned())
}
