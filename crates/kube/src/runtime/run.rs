//! Runs a controller: queue, concurrency, state, backoff, shutdown, metrics, spans.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use capstan_core::{Class, Classified};
use futures::{FutureExt, Stream, StreamExt};
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::runtime::Controller;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tracing::Instrument;

use super::places::Places;
use super::{EventNote, ObjectKey, Outcome, Preview, READ_YOUR_WRITES, Reconcile, Report, Scope, Version, Writes};
use crate::backoff::Backoff;
use crate::cache::{Cache, Object};
use crate::context::Context;
use crate::events::Recorder;

/// How long running reconciles may go on after a shutdown was asked for.
const GRACE: Duration = Duration::from_secs(10);
/// A plan that is never satisfied would keep one object busy without end; after this many rounds it waits for its turn.
const ROUNDS: usize = 64;

type SharedBackoff<K> = Arc<Backoff<ObjectRef<K>>>;

/// Asks for a reconcile from outside: a cloud task ended, a node changed.
pub struct Trigger<K: Object> {
    sender: mpsc::UnboundedSender<ObjectRef<K>>,
    backoff: SharedBackoff<K>,
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
    pub fn wake(&self, object: ObjectRef<K>) {
        self.backoff.nudge(&object);
        let _ = self.sender.send(object);
    }
}

/// The controller of kind `K` before it runs.
pub struct Reconciler<K: Object> {
    context: Context,
    cache: Cache<K>,
    controller: Controller<K>,
    backoff: SharedBackoff<K>,
    trigger: Trigger<K>,
    api: fn(kube::Client, &str) -> Api<K>,
    concurrency: Option<u16>,
}

impl<K: Object + Resource<Scope = NamespaceResourceScope>> Reconciler<K> {
    pub fn new(context: &Context, cache: Cache<K>) -> Self {
        Self::with(context, cache, |client, namespace| Api::namespaced(client, namespace))
    }
}

impl<K: Object + Resource<Scope = ClusterResourceScope>> Reconciler<K> {
    pub fn cluster_wide(context: &Context, cache: Cache<K>) -> Self {
        Self::with(context, cache, |client, _| Api::all(client))
    }
}

impl<K: Object> Reconciler<K> {
    fn with(context: &Context, cache: Cache<K>, api: fn(kube::Client, &str) -> Api<K>) -> Self {
        let backoff = SharedBackoff::<K>::default();
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
        let woken = futures::stream::unfold(receiver, |mut woken| async move { Some((woken.recv().await?, woken)) });
        Self {
            context: context.clone(),
            controller: Controller::for_shared_stream(changes, cache.store()).reconcile_on(woken),
            cache,
            backoff,
            trigger,
            api,
            concurrency: None,
        }
    }

    /// At most this many reconciles at once, instead of the controller's own default.
    pub fn concurrency(mut self, concurrency: u16) -> Self {
        self.concurrency = Some(concurrency);
        self
    }

    /// A handle that asks for reconciles from outside.
    pub fn trigger(&self) -> Trigger<K> {
        self.trigger.clone()
    }

    /// A change of another kind's object (or its deletion) asks for a reconcile of the objects that `concerns` names.
    pub fn watches<Other: Object>(
        self,
        other: &Cache<Other>,
        concerns: impl Fn(&Other) -> Vec<ObjectRef<K>> + Send + Sync + 'static,
    ) -> Self {
        self.on(other
            .subscribe()
            .flat_map(move |change| futures::stream::iter(concerns(&change.object))))
    }

    /// Each reference that `stream` yields asks for a reconcile.
    pub fn on(mut self, stream: impl Stream<Item = ObjectRef<K>> + Send + 'static) -> Self {
        let backoff = self.backoff.clone();
        self.controller = self
            .controller
            .reconcile_on(stream.inspect(move |object| backoff.nudge(object)));
        self
    }

    /// Runs until the context's shutdown.
    pub async fn run<R: Reconcile<Object = K>>(self, reconcile: Arc<R>) {
        let shutdown = self.context.shutdown.clone();
        // kube's controller would wait on the store itself, which wakes only one of several that share it.
        tokio::select! {
            () = shutdown.cancelled() => return,
            ready = self.cache.ready() => {
                if ready.is_err() {
                    return;
                }
            }
        }
        let concurrency = self.concurrency.unwrap_or(R::CONCURRENCY);
        let wake = self.trigger.sender.clone();
        let running = Arc::new(Running {
            recorder: self.context.recorder(R::COMPONENT),
            context: self.context,
            backoff: self.backoff,
            trigger: self.trigger,
            api: self.api,
            cells: Cells::default(),
            places: Places::new(concurrency, wake),
            reconcile,
        });
        if let Some(preview) = running.context.preview.clone() {
            let concurrency = usize::from(concurrency);
            let objects = futures::stream::iter(self.cache.select(None, |_| true));
            let plans = objects.for_each_concurrent(concurrency, |object| running.preview(&preview, object));
            tokio::select! {
                () = plans => preview.finish(R::NAME),
                () = shutdown.cancelled() => {}
            }
            return shutdown.cancelled().await;
        }
        let forgetting = {
            let running = running.clone();
            self.cache.subscribe().for_each(move |change| {
                if change.gone
                    && let Some(uid) = &change.object.meta().uid
                {
                    running.cells.0.lock().remove(uid);
                }
                if change.gone {
                    running.places.gone(&ObjectRef::from_obj(change.object.as_ref()));
                }
                std::future::ready(())
            })
        };
        // Places limit the concurrency; kube's own limit is the same for all namespaces together.
        let results = self
            .controller
            .graceful_shutdown_on(shutdown.clone().cancelled_owned())
            .run(one, on_error, running.clone())
            .for_each(|_| std::future::ready(()));
        tokio::select! {
            () = results => {}
            () = forgetting => {}
            () = async { shutdown.cancelled().await; running.context.clock.sleep(GRACE).await } => {
                tracing::warn!(controller = R::NAME, "reconciles still running after the grace period are dropped");
            }
        }
    }
}

/// What is kept of one object between reconciles.
struct Cell<K, S> {
    state: S,
    /// As the API server answered our last write of the object itself: the cache may be older.
    newest: Option<Arc<K>>,
    writes: Writes,
    live: bool,
    released: bool,
    status_written: Option<std::time::Instant>,
}

impl<K, S: Default> Default for Cell<K, S> {
    fn default() -> Self {
        Self {
            state: S::default(),
            newest: None,
            writes: Writes::default(),
            live: false,
            released: false,
            status_written: None,
        }
    }
}

type SharedCell<K, S> = Arc<tokio::sync::Mutex<Cell<K, S>>>;

/// By UID.
struct Cells<K, S>(Mutex<HashMap<String, SharedCell<K, S>>>);

impl<K, S> Default for Cells<K, S> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

struct Running<R: Reconcile> {
    context: Context,
    backoff: SharedBackoff<R::Object>,
    trigger: Trigger<R::Object>,
    recorder: Recorder,
    api: fn(kube::Client, &str) -> Api<R::Object>,
    cells: Cells<R::Object, R::State>,
    places: Arc<Places<R::Object>>,
    reconcile: Arc<R>,
}

/// Why a reconcile failed.
#[derive(Debug, thiserror::Error)]
enum Failure<E> {
    #[error(transparent)]
    Error(E),
    #[error("the reconcile panicked, which is a bug in Capstan: {0}")]
    Panicked(String),
}

impl<E: Classified> Classified for Failure<E> {
    fn class(&self) -> Class {
        match self {
            Self::Error(error) => error.class(),
            Self::Panicked(_) => Class::Transient,
        }
    }
}

/// Numbers reconciles in the log.
static RECONCILES: AtomicU64 = AtomicU64::new(1);

async fn one<R: Reconcile>(object: Arc<R::Object>, running: Arc<Running<R>>) -> Result<Action, Infallible> {
    let reference = ObjectRef::from_obj(object.as_ref());
    // Without a place it is triggered again as soon as there is one. Whoever has one gives it back at the end, also when there
    // is nothing to do.
    let Some(_place) = running.places.take(&reference) else {
        return Ok(Action::await_change());
    };
    if !running.context.reconciles(object.as_ref()) {
        return Ok(Action::await_change());
    }
    let (print, now) = (fingerprint(object.as_ref()), running.context.clock.instant());
    if let Some(wait) = running.backoff.remaining(&reference, print, now) {
        return Ok(Action::requeue(wait));
    }
    let span = tracing::info_span!(
        "reconcile",
        controller = R::NAME,
        namespace = object.namespace(),
        // The log calls the span itself "name".
        object = object.name_any(),
        reconcile = RECONCILES.fetch_add(1, Ordering::Relaxed),
    );
    let requeue = running.attempt(object, &reference, print).instrument(span).await;
    Ok(requeue.map_or_else(Action::await_change, Action::requeue))
}

/// [`Running::attempt`] takes care of failures.
fn on_error<R: Reconcile>(_: Arc<R::Object>, error: &Infallible, _: Arc<Running<R>>) -> Action {
    match *error {}
}

impl<R: Reconcile> Running<R> {
    /// Reconciles an object, and notes how that ended. Returns when it is due again.
    async fn attempt(&self, object: Arc<R::Object>, reference: &ObjectRef<R::Object>, print: u64) -> Option<Duration> {
        let began = self.context.clock.instant();
        let result = AssertUnwindSafe(self.reconcile(object.clone())).catch_unwind().await;
        let result = match result {
            Ok(result) => result.map_err(Failure::Error),
            Err(panic) => {
                let failure = Failure::Panicked(panic_message(panic.as_ref()));
                self.after_panic(object.as_ref(), &failure).await;
                Err(failure)
            }
        };
        let outcome = match &result {
            Ok(_) => "ok",
            Err(Failure::Error(_)) => "error",
            Err(Failure::Panicked(_)) => "panic",
        };
        let metrics = &self.context.metrics;
        metrics.reconciled(R::NAME, outcome, self.context.clock.since(began));
        match result {
            Ok(requeue) => {
                self.backoff.forget(reference);
                requeue
            }
            Err(error) => {
                let now = self.context.clock.instant();
                let wait = self.backoff.failed(reference, error.class(), print, now);
                tracing::warn!(controller = R::NAME, object = %reference, %error, retry = ?wait, "reconcile failed");
                wait
            }
        }
    }

    /// The state of the object may be half written, and nobody knows which writes were sent: the next reconcile begins again
    /// and reads live.
    async fn after_panic(&self, object: &R::Object, failure: &Failure<R::Error>) {
        if let Some(uid) = &object.meta().uid
            && let Some(cell) = self.cells.0.lock().get_mut(uid)
        {
            let live = Cell {
                live: true,
                ..Cell::default()
            };
            *cell = Arc::new(tokio::sync::Mutex::new(live));
        }
        self.recorder
            .warning(object, "ReconcilePanicked", failure.to_string())
            .await;
    }

    /// Plans an object and applies no step.
    async fn preview(&self, preview: &Preview, object: Arc<R::Object>) {
        if !self.context.reconciles(object.as_ref()) {
            return;
        }
        let key = match ObjectKey::of(object.as_ref()) {
            Ok(key) => key,
            Err(error) => {
                return tracing::warn!(controller = R::NAME, %error, "cannot plan for an object without a name or a UID");
            }
        };
        let mut scope = self.scope(key, object, &mut Cell::default());
        let mut state = R::State::default();
        preview.plan(self.reconcile.as_ref(), &mut scope, &mut state).await;
    }

    fn scope(&self, key: ObjectKey, object: Arc<R::Object>, cell: &mut Cell<R::Object, R::State>) -> Scope<R::Object> {
        Scope {
            context: self.context.clone(),
            key,
            object,
            live: cell.live,
            api: self.api,
            trigger: self.trigger.clone(),
            writes: std::mem::take(&mut cell.writes),
            uncertain: false,
            released: false,
            own_write: false,
            status_written: cell.status_written,
        }
    }

    async fn reconcile(&self, cached: Arc<R::Object>) -> Result<Option<Duration>, R::Error> {
        let key = ObjectKey::of(cached.as_ref())?;
        let cell = self.cells.0.lock().entry(key.uid.clone()).or_default().clone();
        let mut cell = cell.lock().await;
        if cell.released {
            return Ok(None);
        }
        let now = self.context.clock.instant();
        if cell.writes.pending(now) {
            let age = cell.writes.age(now);
            if age < READ_YOUR_WRITES {
                return Ok(Some(READ_YOUR_WRITES - age));
            }
            // Every reconcile reads live until the caches show the writes.
            cell.live = true;
        }
        let object = newest(&mut cell.newest, cached);
        let mut scope = self.scope(key, object, &mut cell);
        let result = self.rounds(&mut scope, &mut cell.state).await;
        cell.live = scope.uncertain || (scope.live && result.is_err());
        // After an error a finalizer of ours may be left: the next reconcile has to remove it.
        cell.released = scope.released && result.is_ok();
        cell.status_written = scope.status_written;
        cell.writes = scope.writes;
        if scope.own_write {
            cell.newest = Some(scope.object);
        }
        result
    }

    /// Observes, plans and applies until a plan has nothing more to do at once, then reports.
    async fn rounds(&self, scope: &mut Scope<R::Object>, state: &mut R::State) -> Result<Option<Duration>, R::Error> {
        if scope.live && !scope.refresh().await? {
            return Ok(None);
        }
        let mut observed = None;
        let mut result = Ok(None);
        for _ in 0..ROUNDS {
            result = self.round(scope, state, &mut observed).await;
            match result {
                // The next reconcile waits until the caches show the writes.
                Ok(Some(Outcome::Observe)) if !scope.live && scope.writes.pending(scope.instant()) => break,
                Ok(Some(Outcome::Observe)) => {}
                _ => break,
            }
        }
        let requeue = match &result {
            // The cloud has no watch for everything: what needs nothing is observed again, too.
            Ok(Some(Outcome::Wait(requeue))) => Some(requeue.unwrap_or(self.context.resync)),
            Ok(Some(Outcome::Observe | Outcome::Done)) => Some(Duration::ZERO),
            // Not for this controller: it reports nothing either.
            Ok(None) => return Ok(None),
            Err(_) => None,
        };
        if scope.released && result.is_ok() {
            return Ok(None);
        }
        let failure = result.as_ref().map(|_| ());
        let mut report = R::status(scope.object.as_ref(), observed.as_ref(), failure, scope.now());
        report
            .events
            .extend(failure.err().and_then(|error| unreported(&report, error)));
        let paced = self.report(scope, report).await;
        result?;
        Ok(soonest(requeue, paced?))
    }

    async fn round(
        &self,
        scope: &mut Scope<R::Object>,
        state: &mut R::State,
        observed: &mut Option<R::Observed>,
    ) -> Result<Option<Outcome>, R::Error> {
        let Some(fresh) = self.reconcile.observe(scope, state).await? else {
            return Ok(None);
        };
        let plan = R::plan(&fresh, scope.now());
        let observed = observed.insert(fresh);
        for step in plan.steps {
            tracing::debug!(?step, "apply");
            match self.reconcile.apply(step, observed, scope, state).await? {
                Outcome::Done => {}
                Outcome::Observe => return Ok(Some(Outcome::Observe)),
                Outcome::Wait(requeue) => return Ok(Some(Outcome::Wait(soonest(requeue, plan.requeue)))),
            }
        }
        Ok(Some(Outcome::Wait(plan.requeue)))
    }

    /// Writes the status if it differs and records the events. Returns when a write that came too soon is due.
    async fn report(
        &self,
        scope: &mut Scope<R::Object>,
        report: Report<R::Object>,
    ) -> Result<Option<Duration>, R::Error> {
        let mut due = None;
        if let Some(object) = &report.object {
            due = self.pace(scope, report.pace, object)?;
            let before = scope.object.clone();
            if due.is_none() && scope.write_status(object).await? {
                self.reconcile.reported(&before, &scope.object);
            }
        }
        for EventNote { level, reason, message } in report.events {
            self.recorder
                .record(level, scope.object.as_ref(), reason, message)
                .await;
        }
        Ok(due)
    }

    /// Returns how long the status has to wait for its turn.
    fn pace(
        &self,
        scope: &Scope<R::Object>,
        pace: Option<Duration>,
        after: &R::Object,
    ) -> Result<Option<Duration>, R::Error> {
        let (Some(pace), Some(written)) = (pace, scope.status_written) else {
            return Ok(None);
        };
        let left = pace.saturating_sub(self.context.clock.since(written));
        if left.is_zero() || crate::patch::diff(scope.object.as_ref(), after)?.is_none() {
            return Ok(None);
        }
        Ok(Some(left))
    }
}

/// Returns the event about a failure that does not pass by itself, and of which the controller reports nothing.
fn unreported<K, E: std::error::Error + Classified>(report: &Report<K>, error: &E) -> Option<EventNote> {
    let is_silent = report.object.is_none() && report.events.is_empty();
    let lasts = error.class() == Class::Terminal;
    (is_silent && lasts).then(|| EventNote::warning("ReconcileFailed", error.to_string()))
}

/// The newer of what the cache shows and what the API server answered our last write with.
fn newest<K: Object>(own: &mut Option<Arc<K>>, cached: Arc<K>) -> Arc<K> {
    match own {
        Some(own) if !Version::of(cached.as_ref()).shows(&Version::of(own.as_ref())) => own.clone(),
        _ => {
            *own = None;
            cached
        }
    }
}

fn soonest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    a.into_iter().chain(b).min()
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
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
