//! Capstan and a controller that it replaces, on one API server under paused time: they never write at the same time.

use std::collections::BTreeMap;
use std::time::Duration;

use capstan_core::Clock;
use http::{Method, Request, Response};
use jiff::Timestamp;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tower::BoxError;

use super::*;
use crate::lease::{Identity, Settings};

const SECOND: Duration = Duration::from_secs(1);
/// A new pod needs this long before its process runs.
const POD_START: Duration = Duration::from_secs(5);
const LEASES: [&str; 3] = ["machines", "sets", "links"];

/// An API server that knows Leases.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<(u64, BTreeMap<String, Value>)>>);

impl Server {
    fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().answer(request));
        kube::Client::new(service, "default")
    }

    fn elector(
        &self,
        name: &str,
        identity: &str,
        [duration, deadline, renew, retry]: [u32; 4],
        clock: Clock,
    ) -> Elector {
        let settings = Settings {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            identity: Identity::new(identity),
            duration: SECOND * duration,
            renew_deadline: SECOND * deadline,
            retry_period: SECOND * retry,
            renew_period: SECOND * renew,
            clock,
        };
        Elector::new(self.client(), settings, Fence::default())
    }

    fn holder(&self, name: &str) -> Option<String> {
        let leases = &self.0.lock().1;
        leases.get(name)?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let method = request.method().clone();
        let named = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let body = request.into_body().collect_bytes().await?;
        let mut state = self.0.lock();
        let (version, leases) = &mut *state;
        let refuse = |code: u16, reason: &str| {
            (
                code,
                json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code}),
            )
        };
        let (code, answer) = if method == Method::GET {
            leases
                .get(&named)
                .map_or_else(|| refuse(404, "NotFound"), |lease| (200, lease.clone()))
        } else {
            let mut lease: Value = serde_json::from_slice(&body)?;
            let name = lease["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let stored = leases
                .get(&name)
                .map(|lease| lease["metadata"]["resourceVersion"].clone());
            if stored.unwrap_or_default() == lease["metadata"]["resourceVersion"] {
                *version += 1;
                lease["metadata"]["resourceVersion"] = json!(version.to_string());
                leases.insert(name, lease.clone());
                (200, lease)
            } else {
                refuse(409, "Conflict")
            }
        };
        Ok(Response::builder()
            .status(code)
            .body(answer.to_string().into_bytes().into())?)
    }
}

/// The old controllers: each has its lease, with the times of machine-api-provider-azure.
fn old(server: &Server, identity: &str, clock: Clock) -> Vec<Elector> {
    let times = [120, 110, 20, 20];
    LEASES
        .iter()
        .map(|name| server.elector(name, identity, times, clock))
        .collect()
}

fn capstan(server: &Server, clock: Clock) -> Group {
    installed(server, "capstan-system", "capstan", clock)
}

/// An installation of Capstan with this lease of its own.
fn installed(server: &Server, namespace: &str, name: &str, clock: Clock) -> Group {
    let leases = LEASES.map(|name| ("default".to_owned(), name.to_owned()));
    let holder = Identity::of_installation(namespace, name);
    Group::of_peers(&server.client(), &leases, &holder, clock)
}

fn fences(electors: &[Elector]) -> Vec<Fence> {
    electors.iter().map(|elector| elector.fence.clone()).collect()
}

/// Runs an elector for as long as the task lives.
fn run(mut elector: Elector) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            elector.win().await;
            elector.keep().await;
        }
    })
}

fn run_group(mut group: Group) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            group.win().await;
            group.keep().await;
        }
    })
}

/// Waits until `so`, and checks at every second that no two of these are at work at once.
async fn until(what: &str, parties: &[&[Fence]], so: impl Fn() -> bool) {
    for _ in 0..600 {
        let at_work = parties
            .iter()
            .filter(|fences| fences.iter().any(Fence::is_open))
            .count();
        assert!(at_work <= 1, "{what}: {at_work} at work");
        if so() {
            return;
        }
        tokio::time::sleep(SECOND).await;
    }
    panic!("{what} did not come");
}

fn open(fences: &[Fence]) -> bool {
    fences.iter().all(Fence::is_open)
}

fn clock() -> Clock {
    Clock::starting_at(Timestamp::UNIX_EPOCH)
}

#[tokio::test(start_paused = true)]
async fn capstan_and_the_old_controllers_hand_over_both_ways_and_never_work_at_once() {
    let (server, clock) = (Server::default(), clock());
    let first = old(&server, "old-1", clock);
    let theirs = fences(&first);
    let running: Vec<_> = first.into_iter().map(run).collect();
    until("the old controllers lead", &[&theirs], || open(&theirs)).await;
    let group = capstan(&server, clock);
    let ours = fences(&group.0);
    let capstans = run_group(group);
    // Capstan stands by for as long as they live.
    for _ in 0..300 {
        tokio::time::sleep(SECOND).await;
        assert!(!ours.iter().any(Fence::is_open));
    }
    // Their pod is replaced: the new one waits as well, and Capstan comes first.
    running.iter().for_each(tokio::task::JoinHandle::abort);
    tokio::time::sleep(POD_START).await;
    let second = old(&server, "old-2", clock);
    let next = fences(&second);
    let _running: Vec<_> = second.into_iter().map(run).collect();
    let parties: [&[Fence]; 3] = [&theirs, &ours, &next];
    until("Capstan leads", &parties, || open(&ours)).await;
    for _ in 0..300 {
        tokio::time::sleep(SECOND).await;
        assert!(open(&ours) && !next.iter().any(Fence::is_open));
    }
    // Capstan is removed.
    capstans.abort();
    until("the old controllers lead again", &parties, || open(&next)).await;
    assert!(
        LEASES
            .iter()
            .all(|name| server.holder(name).as_deref() == Some("old-2"))
    );
}

#[tokio::test(start_paused = true)]
async fn the_next_replica_of_capstan_need_not_wait_for_the_leases_of_the_one_before() {
    let (server, clock) = (Server::default(), clock());
    let mut first = capstan(&server, clock);
    first.win().await;
    let mut second = capstan(&server, clock);
    tokio::time::timeout(SECOND, second.win()).await.unwrap();
    assert!(second.is_open());
}

#[tokio::test(start_paused = true)]
async fn two_installations_of_capstan_never_work_at_once() {
    let others = [("elsewhere", "capstan"), ("capstan-system", "second")];
    for (namespace, name) in others {
        let (server, clock) = (Server::default(), clock());
        let (first, second) = (capstan(&server, clock), installed(&server, namespace, name, clock));
        let (ours, theirs) = (fences(&first.0), fences(&second.0));
        let parties: [&[Fence]; 2] = [&ours, &theirs];
        let first = run_group(first);
        until("the first leads", &parties, || open(&ours)).await;
        let _second = run_group(second);
        for _ in 0..300 {
            tokio::time::sleep(SECOND).await;
            assert!(open(&ours) && !theirs.iter().any(Fence::is_open), "{namespace}/{name}");
        }
        first.abort();
        until("the second leads", &parties, || open(&theirs)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn no_lease_is_taken_while_one_of_the_old_controllers_works() {
    let (server, clock) = (Server::default(), clock());
    let mut sets = server.elector("sets", "old", [120, 110, 20, 20], clock);
    sets.win().await;
    let mut group = capstan(&server, clock);
    let won = tokio::time::timeout(SECOND * 60, group.win()).await;
    assert!(won.is_err());
    assert_eq!((server.holder("machines"), server.holder("links")), (None, None));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_somebody_takes_by_force_closes_every_fence() {
    let (server, clock) = (Server::default(), clock());
    let mut group = capstan(&server, clock);
    group.win().await;
    let taken = json!({"metadata": {"name": "sets", "resourceVersion": "999"},
                       "spec": {"holderIdentity": "old", "leaseDurationSeconds": 120}});
    server.0.lock().1.insert("sets".into(), taken);
    tokio::time::timeout(SECOND * 60, group.keep()).await.unwrap();
    assert!(group.0.iter().all(|elector| !elector.fence.is_open()));
    let machines = server.0.lock().1["machines"].clone();
    tokio::time::sleep(SECOND * 60).await;
    assert_eq!(
        server.0.lock().1["machines"],
        machines,
        "nothing is renewed without the others"
    );
}

#[test]
fn the_old_controllers_wait_longer_than_capstan_writes() {
    assert!(RENEW * 2 < RENEW_DEADLINE && RENEW_DEADLINE < LEASE);
}
