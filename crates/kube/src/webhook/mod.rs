//! The webhooks of Capstan: one HTTPS server for all of them, which every replica runs.
//!
//! Invariant: the server needs no setup: it makes its certificate, renews it, and keeps the API server pointed at itself.
//! Several replicas share one certificate through a Secret.

mod certificate;
mod conversion;
mod proof;
mod review;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use prometheus_client::metrics::gauge::Gauge;

use crate::serve::{Server, ServerCertificate};
use crate::{Context, backoff};
use certificate::Certificate;
pub use conversion::Conversion;
pub use proof::Proof;
pub use review::bounded;

/// How often the registrations and the certificate are checked: others may change or remove them.
/// While a definition trusts another CA, the API server can read no object of its kind.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// The API server trusts a new CA after this long. Until then Capstan serves the previous certificate, which the new
/// bundle trusts, too.
const NOTICE: Duration = Duration::from_secs(5);
/// Maximum time that the program waits at its end for the removal of the registrations.
const END: Duration = Duration::from_secs(3);
/// On the Secret of the webhooks: the time at which Capstan renews the certificate.
const RENEW_ANNOTATION: &str = "capstan.dev/renew-after";
const SECRET: &str = "capstan-webhook";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Kube(#[from] crate::Error),
    #[error("cannot make or read the webhook's certificate: {0}")]
    Certificate(String),
    #[error("cannot listen on {address} for the webhook: {reason}")]
    Listen { address: SocketAddr, reason: String },
}

/// Where the API server finds the webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `host:port`; an empty host's port 0 stands for the one that was bound.
    Url(String),
    Service {
        namespace: String,
        name: String,
        port: u16,
    },
}

#[derive(Clone, Debug)]
pub struct Options {
    pub listen: SocketAddr,
    /// `None`: the address bound, for an API server on the same machine.
    pub address: Option<Address>,
    /// Keep the certificate in a Secret of this namespace, for all replicas; in memory only when `None`.
    pub secret_namespace: Option<String>,
    /// How often the certificate and the registrations are checked.
    pub check_interval: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            address: None,
            secret_namespace: None,
            check_interval: CHECK_INTERVAL,
        }
    }
}

/// What the API server has to know of the webhooks.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub address: &'a Address,
    /// The CAs to trust, PEM.
    pub bundle: &'a str,
    /// The last part of the path that [proves](Proof) a review.
    pub proof: &'a str,
}

/// One webhook of the server.
pub trait Hook: Send + Sync {
    /// Where nobody proves to be the API server, a webhook does nothing that costs others something.
    fn routes(&self, proof: &Proof) -> Router;

    /// Lets the API server reach the webhook. Writes nothing where that is so already.
    fn register<'a>(&'a self, client: &'a kube::Client, place: Place<'a>) -> BoxFuture<'a, Result<(), Error>>;

    /// Removes the registration, because no process serves the webhook any more.
    fn remove<'a>(&'a self, client: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>>;
}

/// Serves until the context's shutdown.
pub async fn run(context: Context, options: Options, hooks: Vec<Arc<dyn Hook>>) -> Result<(), Error> {
    let (current, proof) = (Arc::new(ServerCertificate::default()), Proof::default());
    let routes = hooks
        .iter()
        .fold(Router::new(), |routes, hook| routes.merge(hook.routes(&proof)));
    let server = Server::new(routes, context.shutdown.clone()).https(current.clone());
    let bound = server.listen(options.listen).await.map_err(|error| Error::Listen {
        address: options.listen,
        reason: error.to_string(),
    })?;
    let address = options
        .address
        .clone()
        .unwrap_or_else(|| Address::Url(bound.to_string()));
    tracing::info!(%bound, ?address, "serving webhooks");
    let renew: Gauge = Gauge::default();
    let metrics = context.metrics.section();
    metrics.register(|registry| {
        registry.register(
            "capstan_webhook_certificate_renew_timestamp_seconds",
            "When the certificate of the webhooks is to be renewed",
            renew.clone(),
        );
    });
    let mut keeper = Keeper {
        renew,
        context: context.clone(),
        options,
        hooks,
        address,
        current,
        proof,
        held: None,
    };
    let mut failures = 0;
    loop {
        let wait = match keeper.ensure(context.clock.now()).await {
            Ok(()) => {
                failures = 0;
                keeper.options.check_interval
            }
            Err(error) => {
                failures += 1;
                tracing::warn!(%error, "webhook not registered");
                backoff::delay(capstan_core::Class::Transient, failures, 1.0).unwrap_or(CHECK_INTERVAL)
            }
        };
        tokio::select! {
            () = context.shutdown.cancelled() => return keeper.end().await,
            () = context.clock.sleep(wait) => {}
        }
    }
}

struct Keeper {
    context: Context,
    options: Options,
    hooks: Vec<Arc<dyn Hook>>,
    address: Address,
    current: Arc<ServerCertificate>,
    proof: Proof,
    held: Option<Certificate>,
    /// When the certificate that is served is to be renewed, as a metric.
    renew: Gauge,
}

impl Keeper {
    /// Ensures that the certificate is valid, served and trusted. It is trusted before it is served. A replica that wrote
    /// an older bundle than the shared one, because both checked at once, sees that and writes the newer.
    async fn ensure(&mut self, now: Timestamp) -> Result<(), Error> {
        let mut certificate = self.certificate(now).await?;
        if self.held.is_none() {
            self.serve(&certificate)?;
        }
        self.register(&certificate).await?;
        if let Some(namespace) = &self.options.secret_namespace {
            let newest = self.shared(namespace, now).await?;
            if newest != certificate {
                self.register(&newest).await?;
                certificate = newest;
            }
        }
        let renewed = self.held.replace(certificate.clone());
        if renewed.is_some_and(|before| before != certificate) {
            tracing::info!(renew_after = %certificate.renew_after, "the webhook has a new certificate");
            tokio::select! {
                () = self.context.clock.sleep(NOTICE) => {}
                () = self.context.shutdown.cancelled() => {}
            }
        }
        self.serve(&certificate)
    }

    fn serve(&self, certificate: &Certificate) -> Result<(), Error> {
        let (chain, key) = (certificate.certificate.as_bytes(), certificate.key.as_bytes());
        let replaced = self.current.replace(chain, key);
        self.renew.set(certificate.renew_after.as_second());
        replaced.map_err(|error| Error::Certificate(error.to_string()))
    }

    /// Returns the certificate to serve, made or renewed if it is time.
    async fn certificate(&self, now: Timestamp) -> Result<Certificate, Error> {
        match (&self.options.secret_namespace, &self.held) {
            (Some(namespace), _) => self.shared(namespace, now).await,
            (None, Some(held)) if now < held.renew_after => Ok(held.clone()),
            (None, held) => self.made(held.as_ref(), now),
        }
    }

    fn made(&self, before: Option<&Certificate>, now: Timestamp) -> Result<Certificate, Error> {
        certificate::make(&self.hosts(), before.map(|before| before.bundle.as_str()), now)
    }

    async fn register(&self, certificate: &Certificate) -> Result<(), Error> {
        let proof = Proof::of(&certificate.key);
        self.proof.accept(&proof);
        let place = Place {
            address: &self.address,
            bundle: &certificate.bundle,
            proof: &proof,
        };
        for hook in &self.hooks {
            hook.register(&self.context.client, place).await?;
        }
        Ok(())
    }

    /// Returns the certificate that all replicas share. The first replica that finds it missing or old renews it.
    async fn shared(&self, namespace: &str, now: Timestamp) -> Result<Certificate, Error> {
        let api: Api<Secret> = Api::namespaced(self.context.client.clone(), namespace);
        let found = api.get_opt(SECRET).await.map_err(crate::Error::from)?;
        let read = found.as_ref().and_then(from_secret);
        if let Some(certificate) = read.clone().filter(|certificate| now < certificate.renew_after) {
            return Ok(certificate);
        }
        // After the Secret was deleted, the bundle still trusts the certificate that other replicas serve.
        let made = self.made(read.as_ref().or(self.held.as_ref()), now)?;
        let secret = to_secret(&made, found.as_ref());
        let written = match &secret.metadata.resource_version {
            Some(_) => api.replace(SECRET, &PostParams::default(), &secret).await,
            None => api.create(&PostParams::default(), &secret).await,
        };
        match written.map_err(crate::Error::from) {
            Ok(_) => Ok(made),
            // Another copy was first: its certificate is as good.
            Err(error) if error.is_conflict() => {
                let found = api.get(SECRET).await.map_err(crate::Error::from)?;
                from_secret(&found).ok_or(Error::Kube(error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A certificate in memory ends with the program, and so do the registrations that point at it.
    async fn end(&self) -> Result<(), Error> {
        if self.options.secret_namespace.is_some() || self.held.is_none() {
            return Ok(());
        }
        let removed = async {
            for hook in &self.hooks {
                hook.remove(&self.context.client).await?;
            }
            Ok(())
        };
        capstan_core::clock::timeout(END, removed).await.unwrap_or(Ok(()))
    }

    fn hosts(&self) -> Vec<String> {
        match &self.address {
            Address::Url(url) => {
                let host = url.rsplit_once(':').map_or(url.as_str(), |(host, _)| host);
                vec![host.trim_matches(['[', ']']).to_owned()]
            }
            Address::Service { namespace, name, .. } => {
                vec![
                    format!("{name}.{namespace}.svc"),
                    format!("{name}.{namespace}.svc.cluster.local"),
                ]
            }
        }
    }
}

/// The API server refuses to change the type of the Secret that `found` is.
fn to_secret(certificate: &Certificate, found: Option<&Secret>) -> Secret {
    let text = |text: &str| ByteString(text.as_bytes().to_vec());
    let data = BTreeMap::from([
        ("tls.crt".to_owned(), text(&certificate.certificate)),
        ("tls.key".to_owned(), text(&certificate.key)),
        ("ca.crt".to_owned(), text(&certificate.bundle)),
    ]);
    let annotations = BTreeMap::from([(RENEW_ANNOTATION.to_owned(), certificate.renew_after.to_string())]);
    Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.to_owned()),
            annotations: Some(annotations),
            resource_version: found.and_then(ResourceExt::resource_version),
            ..ObjectMeta::default()
        },
        type_: found.and_then(|found| found.type_.clone()),
        data: Some(data),
        ..Secret::default()
    }
}

fn from_secret(secret: &Secret) -> Option<Certificate> {
    let data = secret.data.as_ref()?;
    let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
    Some(Certificate {
        certificate: text("tls.crt")?,
        key: text("tls.key")?,
        bundle: text("ca.crt")?,
        renew_after: secret.annotations().get(RENEW_ANNOTATION)?.parse().ok()?,
    })
}
