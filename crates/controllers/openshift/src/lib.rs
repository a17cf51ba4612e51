//! The OpenShift Machine API on Azure: machines, the sets that make them, and their admission.

mod account;
mod attach;
#[cfg(test)]
mod fixtures;
pub mod machine;
pub mod machineset;
mod platform;
pub mod sizes;
pub mod webhook;

use capstan_azure::Clients;
use capstan_core::backoff::exponential;
use capstan_kube::Context;
use capstan_kube::runtime::Reconcile;
use platform::{Facts, Platform};
use std::time::Duration;

/// Between two tries to read the platform: an API server that starts answers within seconds, and a missing right is
/// granted by hand.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(30);

/// The names of the controllers that [`run`] runs.
pub const CONTROLLERS: [&str; 2] = [<machine::Controller as Reconcile>::NAME, machineset::NAME];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Machine(#[from] machine::Error),
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error("cannot reach the Azure of this cluster: {0}")]
    Azure(#[from] capstan_azure::Error),
}

/// Runs all controllers of this group until the context is shut down. Tokens and budgets are in `clients`, which all
/// controllers of a process share.
pub async fn run(context: Context, clients: Clients) -> Result<(), Error> {
    let Some(platform) = platform(&context).await else {
        return Ok(());
    };
    match platform {
        Platform::Plain => controllers(context, clients, Facts::default()).await,
        Platform::Azure(cluster) => {
            let clients = platform::clients(&clients, &cluster)?;
            if context.preview.is_none() {
                return succeed(context, clients).await;
            }
            // A preview writes nothing: it needs no lease.
            let namespace = platform::namespace(context.namespace.as_ref());
            let context = context.narrowed(Vec::new(), Some(namespace), context.shutdown.clone())?;
            let facts = Facts::watch(&context).await?;
            controllers(context, clients, facts).await
        }
        Platform::Other(platform) => {
            tracing::info!(
                platform,
                "the machines of this cluster are not on Azure: Capstan does not reconcile them"
            );
            if let Some(preview) = &context.preview {
                let reason =
                    format!("the machines of this cluster are on {platform}, not on Azure: they are left alone");
                preview.skip(&CONTROLLERS, reason);
            }
            context.shutdown.cancelled().await;
            Ok(())
        }
    }
}

/// Reads the platform of the cluster as often as it takes: an API server that does not answer must not end the process.
/// Returns nothing once the context is shut down.
async fn platform(context: &Context) -> Option<Platform> {
    for failures in 1.. {
        let error = match Platform::read(&context.client).await {
            Ok(platform) => return Some(platform),
            Err(error) => error,
        };
        let retry = exponential(FIRST_RETRY, LONGEST_RETRY, failures);
        tracing::warn!(%error, ?retry, "cannot read Infrastructure cluster, which names the platform");
        tokio::select! {
            () = context.clock.sleep(retry) => {}
            () = context.shutdown.cancelled() => break,
        }
    }
    None
}

/// Runs the controllers while the leases of the controllers that they replace are held.
async fn succeed(context: Context, clients: Clients) -> Result<(), Error> {
    let mut leases = platform::leases(&context)?;
    let clients = clients.behind(leases.fences());
    let namespace = platform::namespace(context.namespace.as_ref());
    while !context.shutdown.is_cancelled() {
        tokio::select! {
            () = leases.win() => {}
            () = context.shutdown.cancelled() => return Ok(()),
        }
        let term = context.shutdown.child_token();
        let _ended = term.clone().drop_guard();
        let fenced = context.narrowed(leases.fences(), Some(namespace.clone()), term.clone())?;
        let work = async {
            let facts = Facts::watch(&fenced).await?;
            controllers(fenced, clients.clone(), facts).await
        };
        tokio::pin!(work);
        tokio::select! {
            result = &mut work => result?,
            () = leases.keep() => {
                term.cancel();
                // The fences reject its writes already; the controllers only have to end.
                work.await?;
            }
        }
    }
    Ok(())
}

async fn controllers(context: Context, clients: Clients, facts: Facts) -> Result<(), Error> {
    let attachments = async {
        attach::run(&context).await;
        Ok(())
    };
    let has_operator = facts.has_operator();
    let sets = async {
        machineset::run(context.clone(), clients.clone(), has_operator).await;
        Ok(())
    };
    let machines = machine::run(context.clone(), clients.clone(), facts);
    tokio::try_join!(machines, sets, attachments)?;
    Ok(())
}
