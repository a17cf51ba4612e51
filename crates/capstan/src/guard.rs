//! Keeps a controller from acting beside the controller that it replaces.
//!
//! Invariant: a controller starts only after the Deployments of its peer were read, and the interceptor refuses its writes while one
//! of them, as far as the watch has shown, acts on the same objects. `capstan_core::adopt::acts` decides.

use std::collections::BTreeMap;
use std::sync::Arc;

use capstan_core::adopt::{self, Peer};
use capstan_core::interceptor::{Effect, Interceptor, Verdict};
use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::Deployment;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::adopt::deployment;
use crate::controllers::Name;

/// Whether a controller may act.
#[derive(Clone, Debug)]
enum State {
    /// The Deployments were not read yet.
    Unread,
    /// This Deployment acts, for this reason.
    Blocked(Arc<Deployment>, String),
    Clear,
}

/// What is known about the peer of one controller. Clones share it.
#[derive(Clone, Debug)]
pub struct Guard(watch::Receiver<State>);

impl Guard {
    /// Watches the peer of a controller until `stop`. Returns nothing for a controller that needs no guard.
    pub fn of(name: Name, held: &[(String, String)], client: &Client, stop: CancellationToken) -> Option<Self> {
        let peer = match name {
            // It holds the leases of its peers.
            Name::Openshift => return None,
            Name::AzurePools => Peer::Capz,
            Name::Vsphere => Peer::Capv,
        };
        let (sender, receiver) = watch::channel(State::Unread);
        let (client, held) = (client.clone(), held.to_vec());
        tokio::spawn(async move {
            tokio::select! {
                () = observe(peer, &held, client, sender) => {}
                () = stop.cancelled() => {}
            }
        });
        Some(Self(receiver))
    }

    /// Returns why the controller may not act, once that is another reason than `known`; nothing once it may act.
    pub async fn reason(&mut self, known: Option<&str>) -> Option<(Arc<Deployment>, String)> {
        let news = |state: &State| match state {
            State::Unread => false,
            State::Blocked(_, reason) => Some(reason.as_str()) != known,
            State::Clear => true,
        };
        let found = self.0.wait_for(news).await.map(|state| match &*state {
            State::Blocked(deployment, reason) => Some((deployment.clone(), reason.clone())),
            State::Unread | State::Clear => None,
        });
        match found {
            Ok(reason) => reason,
            // The process stops.
            Err(_) => std::future::pending().await,
        }
    }

    /// Waits until the controller may not act any more.
    pub async fn blocked(&mut self) {
        let blocked = self.0.wait_for(|state| !matches!(state, State::Clear)).await.map(drop);
        if blocked.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Interceptor for Guard {
    fn before(&self, effect: &Effect) -> Verdict {
        match &*self.0.borrow() {
            State::Blocked(_, reason) if effect.write => {
                Verdict::Refuse(format!("{reason}; {} {} was not sent", effect.method, effect.target))
            }
            _ => Verdict::Pass,
        }
    }
}

/// Tells whether the peer acts, again and again.
async fn observe(peer: Peer, held: &[(String, String)], client: Client, sender: watch::Sender<State>) {
    let api: Api<Deployment> = Api::all(client);
    let config = watcher::Config::default().fields(&format!("metadata.name={}", peer.deployment()));
    let mut events = watcher::watcher(api, config).default_backoff().boxed();
    let mut known = BTreeMap::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => known.clear(),
            Ok(Event::InitApply(found)) => _ = known.insert(found.namespace(), Arc::new(found)),
            Ok(Event::InitDone) => publish(peer, held, &known, &sender),
            Ok(Event::Apply(found)) => {
                known.insert(found.namespace(), Arc::new(found));
                publish(peer, held, &known, &sender);
            }
            Ok(Event::Delete(gone)) => {
                known.remove(&gone.namespace());
                publish(peer, held, &known, &sender);
            }
            Err(error) => warn!(
                %peer,
                deployment = peer.deployment(),
                error = %error,
                "cannot read whether the controller that Capstan replaces runs; Capstan does not start before it can, see deploy/controllers"
            ),
        }
    }
}

/// Publishes whether Capstan may act beside these Deployments.
fn publish(
    peer: Peer,
    held: &[(String, String)],
    known: &BTreeMap<Option<String>, Arc<Deployment>>,
    sender: &watch::Sender<State>,
) {
    let acted = matches!(*sender.borrow(), State::Clear);
    let blocked = known.values().find_map(|found| {
        let reason = adopt::acts(peer, &deployment(found)?, held, acted)?;
        Some(State::Blocked(found.clone(), reason))
    });
    let state = blocked.unwrap_or(State::Clear);
    sender.send_if_modified(|before| {
        let same = match (&*before, &state) {
            (State::Blocked(_, old), State::Blocked(_, new)) => old == new,
            (State::Clear, State::Clear) => true,
            _ => false,
        };
        *before = state;
        !same
    });
}

#[cfg(test)]
mod tests {
    use capstan_core::interceptor::System;

    use super::*;

    #[test]
    fn no_write_passes_while_the_peer_acts() {
        let (sender, receiver) = watch::channel(State::Clear);
        let guard = Guard(receiver);
        let verdict = |write| {
            guard.before(&Effect {
                system: System::Azure,
                method: "PUT".to_owned(),
                target: "/x".to_owned(),
                write,
            })
        };
        assert_eq!(verdict(true), Verdict::Pass);
        sender.send_replace(State::Blocked(Arc::default(), "CAPZ runs".to_owned()));
        assert_eq!(
            verdict(true),
            Verdict::Refuse("CAPZ runs; PUT /x was not sent".to_owned())
        );
        assert_eq!(verdict(false), Verdict::Pass);
    }
}
