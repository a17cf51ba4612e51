//! One request at a time: a token, its turn in the budget, a connection, the interceptors, the answer, and the figures that
//! the answer carries.

use crate::budget::policy::{Kind, Policy};
use crate::budget::{Ask, Budget, StoppedFor, Throttled};
use crate::error::{null_is_empty, optional};
use crate::operation::retry_after;
use crate::owned::{Owned, Resource};
use crate::path::Path;
use crate::skus::Catalogues;
use crate::token::Tokens;
use crate::{Allowed, ArmError, Cloud, Credential, Error, Operation, Progress, Settings};
use bytes::BytesMut;
use capstan_core::Clock;
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, System};
use http::header::{AUTHORIZATION, CONTENT_TYPE, IF_MATCH, IF_NONE_MATCH};
use http::{HeaderMap, Method};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;

mod call;

pub use call::When;
pub(crate) use call::{Address, Answer, Call};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Azure answers within a minute or not at all. After a slower answer the caller reads the resource instead.
const CALL_TIMEOUT: Duration = Duration::from_secs(90);

/// Bytes of one answer that are read at most. The largest that Azure gives us, a region's catalogue, has about 5 MiB.
pub const MAX_ANSWER: usize = 32 << 20;

/// Pages of one list that are read at most; Azure puts 50 to 100 resources on one.
const MAX_PAGES: usize = 2000;

/// So many calls are under way at once: each holds a connection, and connections cost memory on both sides.
const AT_ONCE: usize = 32;

/// Connections that were idle for this long are closed, so that an idle program holds none.
const IDLE_CONNECTION: Duration = Duration::from_secs(60);

/// All clients of a process share this: connections, tokens, budget, catalogues.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    http: reqwest::Client,
    tokens: Tokens,
    budget: Budget,
    lines: tokio::sync::Semaphore,
    pub(crate) catalogues: Catalogues,
}

/// Hands out clients, all sharing connections, tokens and budget. Cheap to clone.
#[derive(Clone)]
pub struct Clients {
    shared: Arc<Shared>,
    interceptors: Interceptors,
}

impl Clients {
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let http = http_client(&settings)?;
        let tokens = Tokens::new(&settings, http.clone());
        let budget = Budget::new(settings.clock, settings.metrics.clone());
        let interceptors = settings.interceptors.clone();
        let shared = Arc::new(Shared {
            settings,
            http,
            tokens,
            budget,
            lines: tokio::sync::Semaphore::new(AT_ONCE),
            catalogues: Catalogues::default(),
        });
        Ok(Self { shared, interceptors })
    }

    /// Returns clients whose requests pass these interceptors too. They share connections, tokens and budget with these.
    pub fn behind(&self, interceptors: Vec<Arc<dyn Interceptor>>) -> Self {
        Self {
            shared: self.shared.clone(),
            interceptors: self.interceptors.and(interceptors),
        }
    }

    /// Returns clients of another Azure: endpoints, tokens and budget are its own.
    pub fn in_cloud(&self, cloud: Cloud) -> Result<Self, Error> {
        Self::new(Settings {
            cloud,
            interceptors: self.interceptors.clone(),
            ..self.shared.settings.clone()
        })
    }

    /// The Azure that requests go to.
    pub fn cloud(&self) -> &Cloud {
        &self.shared.settings.cloud
    }

    /// What credentials of tenants may use.
    pub fn allowed(&self) -> &Allowed {
        &self.shared.settings.allowed
    }

    pub fn client(&self, credential: &Credential, subscription: &str) -> Client {
        Client {
            shared: self.shared.clone(),
            interceptors: self.interceptors.clone(),
            principal: credential.identity().to_string().to_lowercase().into(),
            credential: Arc::new(credential.clone()),
            subscription: subscription.into(),
            location: "".into(),
        }
    }
}

fn http_client(settings: &Settings) -> Result<reqwest::Client, Error> {
    let mut builder = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(CALL_TIMEOUT)
        .pool_idle_timeout(IDLE_CONNECTION)
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .https_only(false)
        .user_agent(concat!("capstan/", env!("CARGO_PKG_VERSION")));
    if settings.in_process.is_some() {
        // Nobody is connected to, so nobody is trusted, and the system's roots need not be read.
        builder = builder.tls_certs_only([]);
    }
    if let Some(path) = &settings.ca_file {
        let refuse = |reason: String| Error::Invalid {
            field: "SSL_CERT_FILE",
            value: path.display().to_string(),
            reason,
        };
        let pem = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
        let roots = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| refuse(error.to_string()))?;
        builder = builder.tls_certs_merge(roots);
    }
    builder.build().map_err(|source| Error::Network {
        call: "setting up the http client".into(),
        source,
    })
}

/// One subscription, reached with one credential. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
    interceptors: Interceptors,
    credential: Arc<Credential>,
    /// Who signs in: Azure counts calls by it.
    principal: Arc<str>,
    subscription: Arc<str>,
    location: Arc<str>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({} in {})", self.credential.identity(), self.subscription)
    }
}

/// The answer to a PUT or PATCH.
#[derive(Clone, Debug, PartialEq)]
pub struct Put<T> {
    pub value: T,
    /// The operation that Azure has started, if it is not over already.
    pub operation: Option<Operation>,
}

impl Client {
    pub fn subscription(&self) -> &str {
        &self.subscription
    }

    /// Names the identity that the client signs in as, so that answers about its rights can be kept apart.
    pub fn identity(&self) -> &str {
        &self.principal
    }

    pub(crate) fn principal(&self) -> &Arc<str> {
        &self.principal
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.shared.settings.clock
    }

    pub fn location(&self) -> &str {
        &self.location
    }

    /// The same client, its calls counted in this region.
    pub fn at(&self, location: &str) -> Self {
        Self {
            location: location.to_lowercase().into(),
            ..self.clone()
        }
    }

    fn ask(&self, call: &Call) -> Ask {
        Ask {
            principal: self.principal.clone(),
            subscription: self.subscription.clone(),
            location: self.location.clone(),
            policy: call.policy,
            kind: call.kind(),
            resource: call.policy.per_resource().map(|_| call.target().to_lowercase().into()),
        }
    }

    fn url(&self, call: &Call) -> Result<reqwest::Url, Error> {
        let manager = &self.shared.settings.cloud.resource_manager;
        let path = match &call.address {
            Address::Path(path) => path,
            Address::Followed(followed) => return Ok(followed.url(manager)),
        };
        let mut url = path.url(manager)?;
        let mut pairs = url.query_pairs_mut();
        pairs.append_pair("api-version", call.version);
        call.query.iter().for_each(|(name, value)| {
            pairs.append_pair(name, value);
        });
        drop(pairs);
        Ok(url)
    }

    /// Sends one request and returns whatever Azure answered, errors included.
    async fn exchange(&self, call: &Call) -> Result<Answer, Error> {
        let ask = self.ask(call);
        let throttled = |StoppedFor(after)| Error::Throttled {
            policy: call.policy.name(),
            after,
        };
        // A caller that cannot sign in spends no budget.
        self.token().await?;
        self.shared.budget.acquire(&ask).await.map_err(throttled)?;
        let interceptors = &self.interceptors;
        let intercepted = |reason| Error::Intercepted {
            call: call.name(),
            reason,
        };
        let effect = Effect {
            system: System::Azure,
            method: call.method.to_string(),
            target: call.target(),
            write: call.kind() != Kind::Read,
        };
        // Again, from memory: the turn may have come after the first one expired.
        let token = self.token().await?;
        let line = self.shared.lines.acquire().await.ok();
        // The answers to earlier calls may have stopped the bucket since this call's turn came.
        if let Some(stop) = self.shared.budget.stopped(&ask) {
            return Err(throttled(stop));
        }
        // Last of all: the fence may have closed while this call waited, and nothing waits from here on.
        interceptors.before(&effect).enforce().await.map_err(intercepted)?;
        let result = self.transmit(call, &token).await;
        drop(line);
        let code = result.as_ref().map_or(0, |answer| answer.status);
        let labels = crate::metrics::CallLabels {
            policy: call.policy.name(),
            method: call.method.to_string(),
            code,
        };
        self.shared.settings.metrics.calls.get_or_create(&labels).inc();
        if effect.write {
            tracing::info!(method = %call.method, path = effect.target, code, "azure call");
        } else {
            tracing::debug!(method = %call.method, path = effect.target, code, "azure call");
        }
        if let Ok(answer) = &result {
            self.learn(&ask, answer);
        }
        interceptors.after(&effect).enforce().await.map_err(intercepted)?;
        result
    }

    /// A token for Resource Manager; an Azure inside this process asks for none.
    async fn token(&self) -> Result<String, Error> {
        match &self.shared.settings.in_process {
            Some(_) => Ok(String::new()),
            None => self.shared.tokens.get(&self.credential).await,
        }
    }

    async fn transmit(&self, call: &Call, token: &str) -> Result<Answer, Error> {
        let network = |source: reqwest::Error| Error::Network {
            call: call.name(),
            source: source.without_url(),
        };
        let mut request = self
            .shared
            .http
            .request(call.method.clone(), self.url(call)?)
            .header(AUTHORIZATION, format!("Bearer {token}"));
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.clone());
        } else if call.method == Method::POST {
            request = request.header("content-length", "0");
        }
        request = match &call.when {
            When::Always => request,
            When::Absent => request.header(IF_NONE_MATCH, "*"),
            When::Unchanged(etag) => request.header(IF_MATCH, etag),
        };
        if let Some(azure) = &self.shared.settings.in_process {
            let answer = azure.send(request.build().map_err(network)?).await;
            return answer.map_err(|reason| Error::Intercepted {
                call: call.name(),
                reason,
            });
        }
        let mut response = request.send().await.map_err(network)?;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(network)? {
            let limit = self.shared.settings.max_answer;
            if body.len() + chunk.len() > limit {
                return Err(Error::Oversized {
                    call: call.name(),
                    limit,
                });
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Answer {
            status,
            headers,
            body: body.freeze(),
        })
    }

    fn retry_after(&self, headers: &HeaderMap) -> Option<Duration> {
        retry_after(headers, self.clock().now())
    }

    fn learn(&self, ask: &Ask, answer: &Answer) {
        let throttled = (answer.status == 429).then(|| {
            let error = ArmError::parse(429, &answer.body, self.retry_after(&answer.headers));
            Throttled::read(&error, &answer.headers)
        });
        if answer.status == 401 {
            self.shared.tokens.refused(&self.credential);
        }
        if (200..300).contains(&answer.status) {
            self.shared.settings.metrics.admit(&ask.subscription, &ask.location);
        }
        self.shared.budget.learn(ask, &answer.headers, throttled);
    }

    /// Sends one request; an error answer is an error.
    pub(crate) async fn send(&self, call: &Call) -> Result<Answer, Error> {
        let answer = self.exchange(call).await?;
        if (200..300).contains(&answer.status) {
            return Ok(answer);
        }
        let error = ArmError::parse(answer.status, &answer.body, self.retry_after(&answer.headers));
        Err(Error::Arm {
            call: call.name(),
            error: Box::new(error),
        })
    }

    pub(crate) async fn read<T: DeserializeOwned>(&self, call: Call) -> Result<T, Error> {
        let answer = self.send(&call).await?;
        serde_json::from_slice(&answer.body).map_err(|source| Error::Answer {
            call: call.name(),
            source,
        })
    }

    /// Reads one resource. An answer of another type is an error.
    pub(crate) async fn get<T: Resource + DeserializeOwned>(&self, call: Call) -> Result<Option<T>, Error> {
        let name = call.name();
        let Some(found) = optional(self.read::<T>(call).await)? else {
            return Ok(None);
        };
        of_type(name, found).map(Some)
    }

    /// The names by which a proven resource is deleted: it must be in this client's subscription.
    pub(crate) fn own<'a, T>(&self, owned: &'a Owned<T>) -> Result<(&'a str, &'a str), Error> {
        let id = owned.id();
        if !id.subscription.eq_ignore_ascii_case(&self.subscription) {
            return Err(Error::NotOwned {
                resource: id.to_string(),
                reason: format!("this client works in subscription {}", self.subscription),
            });
        }
        Ok((&id.group, id.name()))
    }

    /// A resource group of this subscription.
    pub(crate) fn group(&self, name: &str) -> Result<Path, Error> {
        Path::subscription(&self.subscription)?.group(name)
    }

    /// PUT, PATCH: the resource as answered, and its operation.
    pub(crate) async fn change<T: DeserializeOwned>(&self, call: Call) -> Result<Put<T>, Error> {
        let answer = self.send(&call).await?;
        let operation = self.started(&call, &answer);
        let value = serde_json::from_slice(&answer.body).map_err(|source| Error::Answer {
            call: call.name(),
            source,
        })?;
        Ok(Put { value, operation })
    }

    /// DELETE, POST: the operation. Deleting a resource that does not exist succeeds.
    pub(crate) async fn start(&self, call: Call) -> Result<Option<Operation>, Error> {
        let result = self.send(&call).await;
        match result {
            Err(error) if call.method == Method::DELETE && error.is_not_found() => Ok(None),
            result => result.map(|answer| self.started(&call, &answer)),
        }
    }

    fn started(&self, call: &Call, answer: &Answer) -> Option<Operation> {
        Operation::started(
            call.method.as_str(),
            &call.resource(),
            answer.status,
            &answer.headers,
            &answer.body,
            self.clock().now(),
        )
    }

    /// All pages of a list.
    pub(crate) async fn list<T: DeserializeOwned>(&self, call: Call) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        let mut next = Some(call);
        let mut pages = 0;
        while let Some(call) = next.take() {
            pages += 1;
            if pages > MAX_PAGES {
                return Err(Error::Oversized {
                    call: call.name(),
                    limit: MAX_PAGES,
                });
            }
            let page: Page<T> = self.read(call.clone()).await?;
            items.extend(page.value);
            next = page
                .next_link
                .filter(|link| !link.is_empty())
                .map(|link| Call::follow(&link, call.policy));
        }
        Ok(items)
    }

    /// Polls an operation once. Its failure is an error with Azure's code and message.
    pub async fn poll(&self, operation: &mut Operation) -> Result<Progress, Error> {
        let call = Call::follow(operation.address(), Policy::Operation);
        let answer = self.exchange(&call).await?;
        operation.answered(answer.status, &answer.headers, &answer.body, self.clock().now())
    }

    /// Polls an operation to its end, exactly as often as Azure asks, and waits while Azure throttles.
    pub async fn wait(&self, mut operation: Operation) -> Result<Option<serde_json::Value>, Error> {
        let mut pause = operation.due_in(self.clock().now());
        loop {
            self.clock().sleep(pause).await;
            pause = match self.poll(&mut operation).await {
                Ok(Progress::Running(after)) => after,
                Ok(Progress::Done(value)) => return Ok(value),
                Err(Error::Arm { error, .. }) if error.status == 429 => {
                    error.retry_after.unwrap_or(crate::error::DEFAULT_THROTTLE)
                }
                Err(Error::Throttled { after, .. }) => after,
                Err(error) => return Err(error),
            };
        }
    }

    /// The resource after its operation has ended.
    pub async fn settled<T: DeserializeOwned>(&self, put: Put<T>) -> Result<T, Error> {
        let Some(operation) = put.operation else {
            return Ok(put.value);
        };
        self.wait(operation.clone()).await?;
        self.outcome(&operation).await
    }

    /// The resource that an operation has worked on.
    pub async fn outcome<T: DeserializeOwned>(&self, operation: &Operation) -> Result<T, Error> {
        self.read(Call::follow(&operation.resource, Policy::Other)).await
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", bound = "T: DeserializeOwned")]
struct Page<T> {
    #[serde(default = "Vec::new", deserialize_with = "null_is_empty")]
    value: Vec<T>,
    next_link: Option<String>,
}

/// Refuses an answer that names another type. Only a proof of ownership requires that the type is there.
fn of_type<T: Resource>(call: String, found: T) -> Result<T, Error> {
    match found.kind() {
        Some(kind) if !kind.eq_ignore_ascii_case(T::TYPE) => Err(Error::WrongType {
            call,
            expected: T::TYPE,
            found: kind.to_owned(),
        }),
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests;
