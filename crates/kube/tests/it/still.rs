//! The runtime on an API server inside the test process, under paused time: no test here waits, and none can lose a race.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use capstan_core::Clock;
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_kube::client::Transport;
use capstan_kube::runtime::{Reconcile, Reconciler};
use capstan_kube::{Context, Options};
use capstan_testkit::apiserver::{Answer, ApiServer, Settings};
use capstan_testkit::interceptors::Ledger;
use futures::FutureExt;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use k8s_openapi::api::core::v1::{ConfigMap, ReplicationController};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use rstest::rstest;
use serde_json::{Value, json};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, ServiceExt};

use crate::example;
use crate::stub::Stub;

/// Longer than any wait of the runtime.
const LONG: Duration = Duration::from_secs(3600);
/// An API server ends each watch after this long, and the next one shows everything.
const LATE: Duration = Duration::from_secs(300);

fn context(transport: Transport, interceptors: Vec<Arc<dyn Interceptor>>) -> Result<Context> {
    let options = Options {
        namespace: Some("default".to_owned()),
        transport: Some(transport),
        clock: Clock::starting_at(Settings::default().start),
        interceptors: Interceptors::new(interceptors),
        ..Options::default()
    };
    Ok(Context::new(kube::Config::new("http://in-process".parse()?), options)?)
}

/// Waits until `holds`, for as long as [`LONG`].
async fn until(what: &str, holds: impl Fn() -> bool) -> Result<()> {
    let clock = Clock::system();
    let began = clock.instant();
    while !holds() {
        ensure!(clock.since(began) < LONG, "{what}");
        clock.sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

const OLD_FINALIZER: &str = "capstan.dev/old";
const FINALIZER: &str = "capstan.dev/new";

/// Takes two finalizers off ConfigMaps that are being deleted.
fn releasing() -> Stub {
    Stub::releasing([OLD_FINALIZER, FINALIZER], |map| {
        std::future::ready(Ok(map.metadata.deletion_timestamp.is_some())).boxed()
    })
}

/// Fails the first request that changes a ConfigMap with this code.
fn failing_once(server: &ApiServer, code: u16) -> Transport {
    let (server, left) = (server.clone(), Arc::new(AtomicBool::new(true)));
    BoxCloneSyncService::new(tower::service_fn(move |request: Request<Body>| {
        let changes = request.method() == Method::PATCH && request.uri().path().contains("/configmaps/");
        let fails = changes && left.swap(false, Ordering::SeqCst);
        let server = server.clone();
        async move {
            if !fails {
                return server.oneshot(request).await;
            }
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                "reason": if code == 409 { "Conflict" } else { "InternalError" }, "message": "the test injects it"});
            let body = Full::from(status.to_string()).map_err(|never| match never {});
            Ok::<_, BoxError>(Response::builder().status(code).body(Answer::new(body))?)
        }
    }))
}

/// A ConfigMap that somebody deletes and that waits for its finalizer.
async fn deleted_map(server: &ApiServer) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(server.client(), "default");
    let map = serde_json::from_value(json!({"metadata": {"name": "held", "finalizers": [FINALIZER]}}))?;
    maps.create(&PostParams::default(), &map).await?;
    maps.delete("held", &DeleteParams::default()).await?;
    Ok(())
}

#[rstest]
#[case::conflict(409)]
#[case::internal_error(500)]
#[tokio::test(start_paused = true)]
async fn a_failed_removal_of_the_last_finalizer_is_tried_again(#[case] code: u16) -> Result<()> {
    let server = ApiServer::new(Settings::default());
    deleted_map(&server).await?;
    let context = context(failing_once(&server, code), vec![])?;
    let reconciler = Reconciler::new(&context, context.cache::<ConfigMap>());
    let running = tokio::spawn(reconciler.run(Arc::new(releasing())));
    until("the object is never released", || {
        server.objects("configmaps").is_empty()
    })
    .await?;
    context.shutdown.cancel();
    running.await?;
    Ok(())
}

/// What the controller of [`hanging`] counts.
#[derive(Default)]
struct Counts {
    hangs: AtomicUsize,
    panics: AtomicUsize,
    reconciled: AtomicUsize,
}

/// Creates so many objects in a namespace.
async fn create_maps(server: &ApiServer, namespace: &str, number: usize) -> Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(server.client(), namespace);
    for n in 0..number {
        let map = serde_json::from_value(json!({"metadata": {"name": format!("m{n}")}}))?;
        maps.create(&PostParams::default(), &map).await?;
    }
    Ok(())
}

/// A controller of all namespaces, and what it counts. It hangs on every object of namespace `bad`, as on a server that does
/// not answer, panics on those of namespace `panics`, and counts the objects of others.
fn hanging(server: &ApiServer) -> Result<(Context, Arc<Counts>, tokio::task::JoinHandle<()>)> {
    let options = Options {
        transport: Some(BoxCloneSyncService::new(server.clone())),
        clock: Clock::starting_at(Settings::default().start),
        ..Options::default()
    };
    let context = Context::new(kube::Config::new("http://in-process".parse()?), options)?;
    let (reconciler, counts) = (Reconciler::new(&context, context.cache()), Arc::<Counts>::default());
    let counted = counts.clone();
    let stub = Stub::observing(move |map| {
        match map.metadata.namespace.as_deref() {
            Some("bad") => {
                counted.hangs.fetch_add(1, Ordering::SeqCst);
                return std::future::pending().boxed();
            }
            Some("panics") => {
                counted.panics.fetch_add(1, Ordering::SeqCst);
                panic!("the test injects a panic")
            }
            _ => counted.reconciled.fetch_add(1, Ordering::SeqCst),
        };
        std::future::ready(Ok(())).boxed()
    });
    let running = tokio::spawn(reconciler.run(Arc::new(stub)));
    Ok((context, counts, running))
}

#[tokio::test(start_paused = true)]
async fn objects_of_one_namespace_that_hang_do_not_keep_those_of_another_waiting() -> Result<()> {
    let server = ApiServer::new(Settings::default());
    create_maps(&server, "bad", 100).await?;
    let (context, counts, running) = hanging(&server)?;
    let most = usize::from(Stub::CONCURRENCY);
    until("few objects hang", || counts.hangs.load(Ordering::SeqCst) >= most).await?;
    // More than there are places for it: those that wait get theirs.
    create_maps(&server, "good", 20).await?;
    until("the other namespace waits", || {
        counts.reconciled.load(Ordering::SeqCst) >= 20
    })
    .await?;
    let hangs = counts.hangs.load(Ordering::SeqCst);
    ensure!(hangs < 100, "one namespace has no limit");
    context.shutdown.cancel();
    running.await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_object_whose_reconcile_panics_is_tried_less_and_less_often() -> Result<()> {
    let server = ApiServer::new(Settings::default());
    create_maps(&server, "panics", 1).await?;
    let (context, counts, running) = hanging(&server)?;
    let tries = async |time: Duration| {
        let before = counts.panics.load(Ordering::SeqCst);
        context.clock.sleep(time).await;
        counts.panics.load(Ordering::SeqCst) - before
    };
    const MINUTE: Duration = Duration::from_secs(60);
    let first = tries(MINUTE).await;
    let hour = tries(LONG).await;
    let later = tries(MINUTE).await;
    ensure!(first < 20 && later <= 3 && later < first, "{first} tries, then {later}");
    ensure!(hour > 10, "{hour} tries in an hour");
    context.shutdown.cancel();
    running.await?;
    Ok(())
}

fn is_create(effect: &Effect) -> bool {
    effect.method == "POST" && effect.target.ends_with("/pods")
}

/// Holds back the event of the first Pod, and of no other kind.
struct HoldBack(ApiServer);

impl Interceptor for HoldBack {
    fn before(&self, _: &Effect) -> Verdict {
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        if is_create(effect) {
            self.0.set_lag(Duration::ZERO..=Duration::ZERO);
        }
        Verdict::Pass
    }
}

/// The example controller with one ReplicationController, on a server whose watch shows its Pod much later.
struct Late {
    server: ApiServer,
    context: Context,
    ledger: Arc<Ledger>,
    running: tokio::task::JoinHandle<()>,
}

impl Late {
    async fn new(interceptors: Vec<Arc<dyn Interceptor>>) -> Result<Self> {
        let server = ApiServer::new(Settings::default());
        let api: Api<ReplicationController> = Api::namespaced(server.client(), "default");
        api.create(&PostParams::default(), &example::web(1)?).await?;
        server.set_lag(LATE..=LATE);
        let ledger = Ledger::of(|_| true);
        let first: [Arc<dyn Interceptor>; 2] = [ledger.clone(), Arc::new(HoldBack(server.clone()))];
        let interceptors = first.into_iter().chain(interceptors).collect();
        let context = context(BoxCloneSyncService::new(server.clone()), interceptors)?;
        let running = tokio::spawn(example::run(context.clone()));
        until("no Pod is created", || !server.objects("pods").is_empty()).await?;
        Ok(Self {
            server,
            context,
            ledger,
            running,
        })
    }

    /// Returns how many Pods the controller created. Too many of them would be deleted again.
    fn creates(&self) -> usize {
        self.ledger.count(is_create)
    }

    /// Asks for this many Pods, and waits until the status shows them. The cache does not show the first Pod yet, and a change
    /// of the object does not wait for that.
    async fn scale(&self, replicas: usize) -> Result<()> {
        let api: Api<ReplicationController> = Api::namespaced(self.server.client(), "default");
        let change = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        api.patch("web", &PatchParams::default(), &change).await?;
        until("the status is not written", || self.replicas() == replicas).await
    }

    fn replicas(&self) -> Value {
        self.server.objects("replicationcontrollers")[0]["status"]["replicas"].clone()
    }

    async fn stop(self) -> Result<()> {
        self.context.shutdown.cancel();
        Ok(self.running.await?)
    }
}

#[tokio::test(start_paused = true)]
async fn a_reconcile_reads_live_for_as_long_as_the_cache_does_not_show_its_write() -> Result<()> {
    let late = Late::new(vec![]).await?;
    until("the status is not written", || late.replicas() == 1).await?;
    ensure!(late.creates() == 1, "{} Pods created", late.creates());
    late.scale(2).await?;
    ensure!(late.creates() == 2, "{} Pods created", late.creates());
    late.stop().await
}

/// Runs a controller that counts its observations of a ConfigMap with this data, and fails for good where the data says so.
async fn observing(server: &ApiServer, data: Value) -> Result<(Arc<AtomicUsize>, Context)> {
    let maps: Api<ConfigMap> = Api::namespaced(server.client(), "default");
    let map = serde_json::from_value(json!({"metadata": {"name": "watched"}, "data": data}))?;
    maps.create(&PostParams::default(), &map).await?;
    let context = context(BoxCloneSyncService::new(server.clone()), vec![])?;
    let (reconciler, counter) = (
        Reconciler::new(&context, context.cache::<ConfigMap>()),
        Arc::<AtomicUsize>::default(),
    );
    let counted = counter.clone();
    let stub = Stub::observing(move |map| {
        counted.fetch_add(1, Ordering::SeqCst);
        let fails = map.data.as_ref().is_some_and(|data| data.contains_key("fails"));
        let failure = || capstan_kube::Error::Incomplete {
            kind: "ConfigMap".to_owned(),
            field: "data",
        };
        std::future::ready(if fails { Err(failure().into()) } else { Ok(()) }).boxed()
    });
    tokio::spawn(reconciler.run(Arc::new(stub)));
    until("it is never observed", || counter.load(Ordering::SeqCst) > 0).await?;
    Ok((counter, context))
}

#[tokio::test(start_paused = true)]
async fn an_object_that_needs_nothing_is_observed_again_after_the_resync() -> Result<()> {
    let server = ApiServer::new(Settings::default());
    let (counter, context) = observing(&server, json!({})).await?;
    let before = counter.load(Ordering::SeqCst);
    context.clock.sleep(context.resync * 3 + Duration::from_secs(1)).await;
    let again = counter.load(Ordering::SeqCst) - before;
    ensure!(again == 3, "observed {again} times in three resyncs");
    context.shutdown.cancel();
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_failure_of_which_a_controller_reports_nothing_is_an_event() -> Result<()> {
    let server = ApiServer::new(Settings::default());
    let (_, context) = observing(&server, json!({"fails": "true"})).await?;
    let is_reported = || {
        let events = server.objects_of("", "events");
        events.iter().any(|event| event["reason"] == "ReconcileFailed")
    };
    until("the failure is not reported", is_reported).await?;
    context.shutdown.cancel();
    Ok(())
}

/// Panics once, when a Pod was created and before the controller has the answer.
struct PanicAfterCreate(AtomicBool);

impl Interceptor for PanicAfterCreate {
    fn before(&self, _: &Effect) -> Verdict {
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        assert!(
            !is_create(effect) || self.0.swap(true, Ordering::SeqCst),
            "the test injects a panic"
        );
        Verdict::Pass
    }
}

#[tokio::test(start_paused = true)]
async fn a_reconcile_after_a_panic_reads_live_and_creates_nothing_twice() -> Result<()> {
    let late = Late::new(vec![Arc::new(PanicAfterCreate(AtomicBool::new(false)))]).await?;
    until("the status is not written", || late.replicas() == 1).await?;
    ensure!(late.creates() == 1, "{} Pods created", late.creates());
    late.scale(2).await?;
    ensure!(late.creates() == 2, "{} Pods created", late.creates());
    late.stop().await
}

/// What is logged, line by line.
#[derive(Clone, Default)]
struct Log(Arc<parking_lot::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines(&self) -> Vec<Value> {
        let text = String::from_utf8_lossy(&self.0.lock()).into_owned();
        text.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}

#[tokio::test(start_paused = true)]
async fn the_log_of_a_failure_names_the_reconcile() -> Result<()> {
    let (log, server) = (Log::default(), ApiServer::new(Settings::default()));
    let written = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .json()
        .with_writer(move || written.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    deleted_map(&server).await?;
    let context = context(failing_once(&server, 500), vec![])?;
    let reconciler = Reconciler::new(&context, context.cache::<ConfigMap>());
    let running = tokio::spawn(reconciler.run(Arc::new(releasing())));
    until("the object is never released", || {
        // A test on another thread may just have met the same span, and found that nobody wants it.
        tracing::callsite::rebuild_interest_cache();
        server.objects("configmaps").is_empty()
    })
    .await?;
    let lines = log.lines();
    let failed = lines
        .iter()
        .find(|line| line["fields"]["message"] == "reconcile failed");
    let span = failed.map(|line| &line["span"]).cloned().unwrap_or_default();
    ensure!(span["name"] == "reconcile", "{lines:?}");
    ensure!(span["reconcile"].is_u64(), "{span}");
    ensure!(span["namespace"] == "default" && span["object"] == "held", "{span}");
    context.shutdown.cancel();
    running.await?;
    Ok(())
}
