//! Several leases that count together: the leases of the controllers that Capstan replaces.
//!
//! Invariants: none of the leases is taken before all of them are free, so that no half of the old controllers stands by
//! while the other half works. Once one is lost, the fences of all are closed and none is renewed. A group is not released:
//! it expires. Replicas of one installation of Capstan share the identity, so the next leader among them takes over at once.
//! The old controllers, or another installation, take over once no replica renews the leases any more.

use std::sync::Arc;
use std::time::Duration;

use capstan_core::Clock;
use capstan_core::interceptor::Interceptor;
use futures::FutureExt as _;
use futures::future::{join_all, select_all};
use tracing::{info, warn};

use super::{Elector, Fence, Identity, Settings};

/// The old controllers take over this long after Capstan's last renewal.
const LEASE: Duration = Duration::from_secs(60);
/// Capstan stops this long after its last renewal, which leaves requests on their way the rest of [`LEASE`].
const RENEW_DEADLINE: Duration = Duration::from_secs(40);
/// Two renewals may fail before the deadline.
const RENEW: Duration = Duration::from_secs(15);
/// The old controllers look every 20 s whether a lease is free: Capstan looks more often, so that it comes first.
const RETRY: Duration = Duration::from_secs(2);

/// Electors of one identity.
pub struct Group(Vec<Elector>);

impl Group {
    pub fn new(electors: Vec<Elector>) -> Self {
        Self(electors)
    }

    /// Returns the leases of controllers that Capstan replaces, by their namespaces and names. `holder` is the installation.
    pub fn of_peers(client: &kube::Client, leases: &[(String, String)], holder: &Identity, clock: Clock) -> Self {
        let settings = |(namespace, name): &(String, String)| Settings {
            namespace: namespace.clone(),
            name: name.clone(),
            identity: holder.clone(),
            duration: LEASE,
            renew_deadline: RENEW_DEADLINE,
            retry_period: RETRY,
            renew_period: RENEW,
            clock,
        };
        let electors = leases
            .iter()
            .map(|lease| Elector::new(client.clone(), settings(lease), Fence::default()));
        Self::new(electors.collect())
    }

    /// Whether there is no lease to hold.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the interceptors that let writes pass only while all leases are ours.
    pub fn fences(&self) -> Vec<Arc<dyn Interceptor>> {
        let fences = self.0.iter().map(|elector| elector.fence.clone());
        fences.map(|fence: Fence| Arc::new(fence) as _).collect()
    }

    /// Whether all leases are certainly ours.
    pub fn is_open(&self) -> bool {
        self.0.iter().all(|elector| elector.fence.is_open())
    }

    /// Waits until all leases are ours.
    pub async fn win(&mut self) {
        let mut waiting_for = None;
        loop {
            let holder = self.attempt().await;
            if self.is_open() {
                info!(leases = self.names(), "took over from the controllers of these leases");
                return;
            }
            if holder.is_some() && holder != waiting_for {
                info!(
                    holder,
                    "waiting for the controller that holds this lease: restart it, so that it stands by"
                );
                waiting_for = holder;
            }
            let Some(elector) = self.0.first() else { return };
            elector.settings.clock.sleep(elector.settings.retry_period).await;
        }
    }

    /// Takes all leases if all are free. Returns the first one that is not, with its holder.
    async fn attempt(&mut self) -> Option<String> {
        let free = join_all(self.0.iter_mut().map(Elector::is_free)).await;
        for (free, elector) in free.into_iter().zip(&self.0) {
            let name = &elector.settings.name;
            match free {
                Ok(true) => {}
                Ok(false) => return Some(format!("{name} ({})", elector.holder().unwrap_or_default())),
                Err(error) => {
                    warn!(lease = name, %error, "cannot read the lease");
                    return None;
                }
            }
        }
        let taken = join_all(self.0.iter_mut().map(Elector::attempt)).await;
        for (taken, elector) in taken.into_iter().zip(&self.0) {
            if let Err(error) = taken {
                warn!(lease = elector.settings.name, %error, "cannot take the lease");
            }
        }
        if !self.is_open() {
            self.close();
        }
        None
    }

    /// Renews the leases; returns when one of them is lost. All fences are closed then.
    pub async fn keep(&mut self) {
        if !self.0.is_empty() {
            select_all(self.0.iter_mut().map(|elector| elector.keep().boxed())).await;
        } else {
            std::future::pending::<()>().await;
        }
        self.close();
    }

    fn close(&mut self) {
        for elector in &mut self.0 {
            elector.fence.set(None);
            elector.held = None;
        }
    }

    fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|elector| elector.settings.name.as_str()).collect();
        names.join(", ")
    }
}

#[cfg(test)]
mod tests;
