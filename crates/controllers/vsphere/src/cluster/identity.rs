//! VSphereClusterIdentity: reports whether its Secret can be used.

use std::sync::Arc;

use capstan_api::vsphere::VSphereClusterIdentity;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Context, Next, Reconciler};
use futures::StreamExt;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource};

use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;

/// Runs the identities.
pub async fn run(context: &Context, own: Cache<VSphereClusterIdentity>, credentials: Arc<Credentials>) {
    let (known, by_name) = (own.clone(), credentials.clone());
    let by_secret = credentials.changes().flat_map(move |secret| {
        let named = |identity: &VSphereClusterIdentity| by_name.secret_of_identity(identity).as_ref() == Some(&secret);
        let found = known.select(None, named);
        let found: Vec<_> = found.iter().map(|i| ObjectRef::from_obj(i.as_ref())).collect();
        futures::stream::iter(found)
    });
    let reconciler = Reconciler::new("vsphereclusteridentity", context, own).on(by_secret);
    let client = context.client.clone();
    reconciler
        .run(move |identity| {
            let (api, credentials) = (Api::all(client.clone()), credentials.clone());
            async move { pass(api, credentials, identity).await }
        })
        .await;
}

async fn pass(
    api: Api<VSphereClusterIdentity>,
    credentials: Arc<Credentials>,
    own: Arc<VSphereClusterIdentity>,
) -> Result<Next, Error> {
    if own.meta().deletion_timestamp.is_some() {
        patch::remove_finalizer(&api, own.as_ref(), names::OLD_IDENTITY_FINALIZER).await?;
        return Ok(Next::Wait);
    }
    let fault = match credentials.check_identity(&own).await {
        Ok(()) => None,
        Err(error) if error.is_told() => Some(error.to_string()),
        Err(error) => return Err(error),
    };
    let now = Timestamp::now();
    let mut after = VSphereClusterIdentity::clone(&own);
    let status = after.status.get_or_insert_default();
    status.ready = fault.is_none();
    match &fault {
        None => conditions::mark_true(&mut status.conditions, names::CREDENTIALS_AVAILABLE, now),
        Some(text) => {
            let (type_, reason) = (names::CREDENTIALS_AVAILABLE, "SecretNotAvailable");
            conditions::mark_false(&mut status.conditions, type_, Severity::Warning, reason, text, now)
        }
    };
    conditions::summarize(&mut status.conditions, &[names::CREDENTIALS_AVAILABLE], now);
    patch::status(&api, own.as_ref(), &after, Lock::Open).await?;
    Ok(Next::Wait)
}
