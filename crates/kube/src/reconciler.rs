//! Runs one controller. Invariant: one pass at a time per object, at most `concurrency` passes at once; a pass that
//! failed is retried by our back-off and by nothing else; a shutdown lets running passes finish for [`GRACE`] and then
//! drops them (each may be killed between any two effects).

use std::collections::hash_map::DefaultHasher;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::controller::{self, Action};
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc;

use crate::backoff::Backoff;
use crate::cache::{Cache, Object};
use crate::context::Context;
use crate::error::Classified;

/// How long running passes may go on after a shutdown was asked for.
const GRACE: Duration = Duration::from_secs(10);
/// Enough to keep a cloud busy, few enough not to flood an API server.
const CONCURRENCY: u16 = 32;

/// What a successful pass asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing to do until something changes.
    Wait,
    /// Look again after this long, at the latest.
    After(Duration),
}

type Shared<K> = Arc<Backoff<ObjectRef<K>>>;

/// Asks for a pass from outside: a cloud task ended, a node changed.
pub struct Trigger<K: Object> {
    sender: mpsc::UnboundedSender<ObjectRef<K>>,
    backoff: Shared<K>,
}

impl<K: Object> Clone for Trigger<K> {
    fn clone(&self) -> Self {
        Self {
            sender: self.sender.clone(),
            backoff: self.backoff.clone(),
        }
    }
}

impl<K: Object> Trigger<K> {
    pub fn poke(&self, object: ObjectRef<K>) {
        self.backoff.nudge(&object);
        let _ = self.sender.send(object);
    }
}

/// A controller of kind `K` before it runs.
pub struct Reconciler<K: Object> {
    name: &'static str,
    context: Context,
    cache: Cache<K>,
    controller: Controller<K>,
    concurrency: u16,
    backoff: Shared<K>,
    trigger: Trigger<K>,
}

impl<K: Object> Reconciler<K> {
    pub fn new(name: &'static str, context: &Context, cache: Cache<K>) -> Self {
        let backoff = Shared::<K>::default();
        let (sender, receiver) = mpsc::unbounded_channel();
        let trigger = Trigger {
            sender,
            backoff: backoff.clone(),
        };
        let forget = backoff.clone();
        let changes = cache.subscribe().filter_map(move |change| {
            if change.gone {
                forget.forget(&ObjectRef::from_obj(change.object.as_ref()));
            }
            std::future::ready((!change.gone).then_some(change.object))
        });
        let pokes = futures::stream::unfold(receiver, |mut pokes| async move { Some((pokes.recv().await?, pokes)) });
        let controller = Controller::for_shared_stream(changes, cache.store()).reconcile_on(pokes);
        let context = context.clone();
        Self {
            name,
            context,
            cache,
            controller,
            concurrency: CONCURRENCY,
            backoff,
            trigger,
        }
    }

    pub fn concurrency(mut self, concurrency: u16) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// A handle that asks for passes from outside.
    pub fn trigger(&self) -> Trigger<K> {
        self.trigger.clone()
    }

    /// Objects of another kind (their deletion too) ask for a pass of the objects that `concerns` names.
    pub fn watches<Other: Object>(
        self,
        other: &Cache<Other>,
        concerns: impl Fn(&Other) -> Vec<ObjectRef<K>> + Send + Sync + 'static,
    ) -> Self {
        self.on(other
            .subscribe()
            .flat_map(move |change| futures::stream::iter(concerns(&change.object))))
    }

    /// Each reference that `stream` yields asks for a pass.
    pub fn on(mut self, stream: impl Stream<Item = ObjectRef<K>> + Send + 'static) -> Self {
        let backoff = self.backoff.clone();
        self.controller = self
            .controller
            .reconcile_on(stream.inspect(move |object| backoff.nudge(object)));
        self
    }

    /// Run until the context's shutdown token is cancelled.
    pub async fn run<E, F>(self, pass: impl Fn(Arc<K>) -> F + Send + Sync + 'static)
    where
        E: std::error::Error + Classified + Send + Sync + 'static,
        F: Future<Output = Result<Next, E>> + Send + 'static,
    {
        let Self {
            name,
            context,
            cache,
            controller,
            concurrency,
            backoff,
            trigger: _trigger,
        } = self;
        let shutdown = context.shutdown.clone();
        // kube's controller would wait on the store itself, which wakes only one of several that share it.
        tokio::select! {
            () = shutdown.cancelled() => return,
            ready = cache.ready() => {
                if ready.is_err() {
                    return;
                }
            }
        }
        let state = Arc::new(Running {
            name,
            context,
            backoff,
            pass,
        });
        let results = controller
            .with_config(controller::Config::default().concurrency(concurrency))
            .graceful_shutdown_on(shutdown.clone().cancelled_owned())
            .run(one_pass, on_error, state);
        let drained = results.for_each(|_| std::future::ready(()));
        tokio::select! {
            () = drained => {}
            () = async { shutdown.cancelled().await; tokio::time::sleep(GRACE).await } => {
                tracing::warn!(controller = name, "passes still running after the grace period were dropped");
            }
        }
        drop(cache);
    }
}

struct Running<K: Object, P> {
    name: &'static str,
    context: Context,
    backoff: Shared<K>,
    pass: P,
}

async fn one_pass<K, P, F, E>(object: Arc<K>, running: Arc<Running<K, P>>) -> Result<Action, E>
where
    K: Object,
    P: Fn(Arc<K>) -> F,
    F: Future<Output = Result<Next, E>>,
{
    let key = ObjectRef::from_obj(object.as_ref());
    if let Some(wait) = running
        .backoff
        .remaining(&key, fingerprint(object.as_ref()), Instant::now())
    {
        return Ok(Action::requeue(wait));
    }
    let started = Instant::now();
    let result = (running.pass)(object).await;
    let outcome = if result.is_ok() { "ok" } else { "error" };
    running
        .context
        .metrics
        .reconciled(running.name, outcome, started.elapsed());
    let next = result?;
    running.backoff.forget(&key);
    Ok(match next {
        Next::Wait => Action::await_change(),
        Next::After(time) => Action::requeue(time),
    })
}

fn on_error<K, P, E>(object: Arc<K>, error: &E, running: Arc<Running<K, P>>) -> Action
where
    K: Object,
    E: std::error::Error + Classified,
{
    let key = ObjectRef::from_obj(object.as_ref());
    let wait = running
        .backoff
        .failed(&key, error.class(), fingerprint(object.as_ref()), Instant::now());
    tracing::warn!(controller = running.name, object = %key, %error, retry = ?wait, "pass failed");
    wait.map_or_else(Action::await_change, Action::requeue)
}

/// Tells apart the versions of an object that somebody other than its controller's status writes made.
fn fingerprint<K: Object>(object: &K) -> u64 {
    let meta = object.meta();
    let mut hasher = DefaultHasher::new();
    (&meta.uid, meta.generation, &meta.annotations, &meta.labels).hash(&mut hasher);
    meta.deletion_timestamp.is_some().hash(&mut hasher);
    object.finalizers().hash(&mut hasher);
    hasher.finish()
}
