//! Admission for Machines and MachineSets: the rules of `capstan_core::validate::openshift` as an admission webhook.

mod configuration;
pub mod review;
mod serve;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use capstan_azure::Clients;
use capstan_kube::webhook::{Error, Hook, Place, Proof};
use capstan_kube::{Context, backoff};
use futures::future::BoxFuture;

use crate::platform::Platform;
use crate::sizes::Sizes;
use configuration::Registration;

/// How long to wait for the cluster's platform where the error says nothing.
const PLATFORM_RETRY: Duration = Duration::from_secs(300);

#[derive(Clone)]
pub struct Options {
    /// Name of the two webhook configurations.
    pub name: String,
    /// The cluster's name, for the label of new machines that do not name their cluster.
    pub cluster_id: String,
    /// Whom to ask about VM sizes, for warnings.
    pub azure: Option<Clients>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "capstan-machine-api".to_owned(),
            cluster_id: String::new(),
            azure: None,
        }
    }
}

/// The admission of Machines and MachineSets.
pub struct Admission {
    rules: serve::Rules,
    name: String,
    namespace: Option<String>,
}

impl Admission {
    /// Reads the cluster's platform first, until the API server answers.
    pub async fn new(context: &Context, mut options: Options) -> Self {
        if let Some(namespace) = &context.namespace {
            // Copies that work in different namespaces of one cluster do not take each other's place.
            options.name = format!("{}-{namespace}", options.name);
        }
        let mut operator = false;
        if let Platform::Azure(cluster) = read_platform(context).await {
            operator = true;
            if options.cluster_id.is_empty() {
                options.cluster_id = cluster.name.clone();
            }
            options.azure = options
                .azure
                .and_then(|clients| crate::platform::clients(&clients, &cluster).ok());
        }
        let rules = serve::Rules {
            cluster_id: options.cluster_id.as_str().into(),
            operator,
            sizes: options
                .azure
                .map(|clients| Sizes::new(context.client.clone(), clients, context.clock)),
        };
        Self {
            rules,
            name: options.name,
            namespace: context.namespace.clone(),
        }
    }
}

impl Hook for Admission {
    fn routes(&self, proof: &Proof) -> Router {
        serve::routes(self.rules.clone(), proof)
    }

    fn register<'a>(&'a self, client: &'a kube::Client, place: Place<'a>) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let registration = Registration {
                name: &self.name,
                place,
                namespace: self.namespace.as_deref(),
            };
            registration.apply(client).await
        })
    }

    fn remove<'a>(&'a self, client: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(configuration::remove(client, &self.name))
    }
}

/// Serves the admission until the context's shutdown.
pub async fn run(context: Context, server: capstan_kube::webhook::Options, options: Options) -> Result<(), Error> {
    let admission = Arc::new(Admission::new(&context, options).await);
    capstan_kube::webhook::run(context, server, vec![admission]).await
}

/// Reads the cluster's platform until the API server answers: machines need the cluster's name from the first one on.
async fn read_platform(context: &Context) -> Platform {
    for failures in 1.. {
        let error = match Platform::read(&context.client).await {
            Ok(platform) => return platform,
            Err(error) => error,
        };
        tracing::warn!(%error, "cannot read the cluster's Infrastructure object");
        let wait = backoff::delay(capstan_core::Class::Transient, failures, 1.0).unwrap_or(PLATFORM_RETRY);
        tokio::select! {
            () = context.shutdown.cancelled() => break,
            () = context.clock.sleep(wait) => {}
        }
    }
    Platform::Plain
}
