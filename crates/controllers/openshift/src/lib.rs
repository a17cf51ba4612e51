//! The OpenShift Machine API on Azure: machines, the sets that make them, and their admission.

mod account;
mod attach;
#[cfg(test)]
mod fixtures;
pub mod machine;
pub mod machineset;
pub mod sizes;
pub mod webhook;

use capstan_azure::Clients;
use capstan_kube::Context;
use std::time::Duration;

/// How often a machine that nothing happens to is compared with Azure.
const RESYNC: Duration = Duration::from_secs(600);

/// What `capstan run` can set.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often Azure is asked about machines that nothing happens to.
    pub resync: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { resync: RESYNC }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Machine(#[from] machine::Error),
}

/// Runs all controllers of this group until the context is shut down. Tokens and budgets are in `clients`, which all
/// controllers of a process share.
pub async fn run(ctx: Context, clients: Clients, options: Options) -> Result<(), Error> {
    attach::export(&ctx);
    let sets = async {
        machineset::run(ctx.clone()).await;
        Ok(())
    };
    tokio::try_join!(machine::run(ctx.clone(), clients, options), sets)?;
    Ok(())
}
