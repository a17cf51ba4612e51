//! Decisions by tables; the elector against an API server of one Lease that answers as the test wants.

use super::*;
use capstan_core::interceptor::System;
use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use rstest::rstest;
use serde_json::{Value, json};
use tower::BoxError;

const SECOND: Duration = Duration::from_secs(1);

fn lease(holder: &str, seconds: Option<i32>) -> LeaseSpec {
    LeaseSpec {
        holder_identity: (!holder.is_empty()).then(|| holder.to_owned()),
        lease_duration_seconds: seconds,
        ..LeaseSpec::default()
    }
}

#[rstest]
#[case::free("", Some(15), 0, Step::Take)]
#[case::ours("me", Some(15), 99, Step::Renew)]
#[case::just_seen("other", Some(15), 0, Step::Wait)]
#[case::almost_expired("other", Some(15), 14, Step::Wait)]
#[case::expired("other", Some(15), 15, Step::Take)]
#[case::the_holders_own_duration_counts("other", Some(60), 59, Step::Wait)]
#[case::without_a_duration_ours_counts("other", None, 30, Step::Take)]
#[case::a_nonsense_duration("other", Some(-1), 29, Step::Wait)]
fn a_lease_is_taken_only_when_nobody_can_hold_it(
    #[case] holder: &str,
    #[case] seconds: Option<i32>,
    #[case] unchanged: u32,
    #[case] expected: Step,
) {
    let step = decide(
        &lease(holder, seconds),
        &Identity::new("me"),
        SECOND * unchanged,
        SECOND * 30,
    );
    assert_eq!(step, expected);
}

#[test]
fn a_dead_process_of_this_machine_is_not_waited_for() {
    let us = Identity::of_this_process();
    let with = |pid: &str, start: &str| {
        let parts: Vec<&str> = us.0.split('_').collect();
        format!("{}_{}_{pid}_{start}", parts[0], parts[1])
    };
    assert!(us.is_certainly_gone(&with("4194305", "1")), "no such process");
    assert!(
        us.is_certainly_gone(&with("1", "1")),
        "the number belongs to another process by now"
    );
    assert!(!us.is_certainly_gone(&us.0), "we live");
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    let (pid, start) = (ended.id().to_string(), process_start(ended.id()));
    while process_start(ended.id()).is_some() {
        std::thread::yield_now();
    }
    let start = start.unwrap_or_else(|| "1".to_owned());
    assert!(
        us.is_certainly_gone(&with(&pid, &start)),
        "it ended, though nobody reaped it"
    );
    ended.wait().unwrap();
    assert!(
        !us.is_certainly_gone("other-host_4026531836_4194305_1"),
        "we cannot know"
    );
    assert!(!us.is_certainly_gone("4b1c-some-uuid"), "we cannot know");
    // Another machine of the same name: its first namespace has the same number as ours may have.
    let boot = boot().unwrap();
    let elsewhere = with("4194305", "1").replace(&boot, "11111111-2222-3333-4444-555555555555");
    assert!(
        us.0.contains(&boot) && !us.is_certainly_gone(&elsewhere),
        "we cannot know"
    );
}

#[test]
fn a_closed_fence_refuses_writes_to_every_system_and_lets_reads_pass() {
    let effect = |system, write| Effect {
        system,
        method: "PUT".into(),
        target: "/x".into(),
        write,
    };
    let fence = Fence::default();
    for system in [System::Azure, System::Vsphere, System::Kube] {
        assert!(matches!(fence.before(&effect(system, true)), Verdict::Refuse(_)));
        assert_eq!(fence.before(&effect(system, false)), Verdict::Pass);
    }
    let now = Moment::now(Clock::system());
    fence.set(Some(now.after(SECOND * 60)));
    assert_eq!(fence.before(&effect(System::Azure, true)), Verdict::Pass);
    // Either clock closes it.
    fence.set(Some(Moment {
        steady: now.steady + SECOND * 60,
        wall: now.wall - SECOND,
        ..now
    }));
    assert!(!fence.is_open());
}

/// An API server that knows one Lease.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    lease: Option<Value>,
    version: u64,
    /// The next write is carried out, but its answer never comes.
    swallow: bool,
    /// The next write finds that somebody else has touched the lease.
    touch: bool,
}

impl Server {
    fn elector(&self, identity: &str, duration: Duration) -> Elector {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| server.clone().answer(request));
        let settings = Settings {
            namespace: "default".to_owned(),
            name: "capstan".to_owned(),
            identity: Identity::new(identity),
            duration,
            renew_deadline: SECOND * 10,
            retry_period: Duration::from_millis(1),
            renew_period: Duration::from_millis(1),
            clock: Clock::system(),
        };
        Elector::new(kube::Client::new(service, "default"), settings, Fence::default())
    }

    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock())
    }

    fn holder(&self) -> Option<String> {
        self.with(|state| {
            state.lease.as_ref()?["spec"]["holderIdentity"]
                .as_str()
                .map(str::to_owned)
        })
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let method = request.method().clone();
        let body = request.into_body().collect_bytes().await?;
        let (code, answer, lost) = self.with(|state| state.answer(&method, &body));
        if lost {
            std::future::pending::<()>().await;
        }
        let answer = Response::builder()
            .status(code)
            .body(answer.to_string().into_bytes().into());
        Ok(answer?)
    }
}

impl State {
    fn answer(&mut self, method: &Method, body: &[u8]) -> (StatusCode, Value, bool) {
        let refuse = |code: StatusCode, reason: &str| {
            let status = json!({"kind": "Status", "status": "Failure", "reason": reason, "code": code.as_u16()});
            (code, status, false)
        };
        if *method == Method::GET {
            return match &self.lease {
                Some(lease) => (StatusCode::OK, lease.clone(), false),
                None => refuse(StatusCode::NOT_FOUND, "NotFound"),
            };
        }
        if std::mem::take(&mut self.touch) {
            self.version += 1;
            if let Some(lease) = &mut self.lease {
                lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
            }
        }
        let mut lease: Value = serde_json::from_slice(body).unwrap();
        let stored = self.lease.as_ref().map(|lease| &lease["metadata"]["resourceVersion"]);
        if stored.is_some_and(|version| *version != lease["metadata"]["resourceVersion"]) {
            return refuse(StatusCode::CONFLICT, "Conflict");
        }
        self.version += 1;
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(lease.clone());
        (StatusCode::OK, lease, std::mem::take(&mut self.swallow))
    }
}

async fn leader(server: &Server) -> Elector {
    let mut elector = server.elector("me", SECOND * 15);
    elector.win().await;
    assert_eq!(server.holder().as_deref(), Some("me"));
    elector
}

#[tokio::test]
async fn a_lease_is_given_back_though_a_renewal_was_cut_off_on_its_way() {
    let server = Server::default();
    let mut elector = leader(&server).await;
    let (version, sent) = (server.with(|state| state.version), server.clone());
    server.with(|state| state.swallow = true);
    let work = async {
        while sent.with(|state| state.version) == version {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = elector.keep() => panic!("the lease is ours for seconds"),
    }
    elector.release().await;
    assert_eq!(server.holder(), None);
}

#[tokio::test]
async fn a_lease_is_given_back_though_taking_it_was_cut_off() {
    let server = Server::default();
    server.with(|state| state.swallow = true);
    let (mut elector, taken) = (server.elector("me", SECOND * 15), server.clone());
    let stop = async {
        while taken.holder().is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = stop => {}
        () = elector.win() => panic!("no answer, no win"),
    }
    elector.release().await;
    assert_eq!(server.holder(), None);
}

#[tokio::test]
async fn a_lease_that_was_touched_since_is_read_again_and_given_back() {
    let server = Server::default();
    let mut elector = leader(&server).await;
    server.with(|state| state.touch = true);
    elector.release().await;
    assert_eq!(server.holder(), None);
}

#[tokio::test]
async fn the_lease_of_somebody_else_is_left_to_them() {
    let server = Server::default();
    let mut elector = leader(&server).await;
    let lease = json!({"metadata": {"name": "capstan", "resourceVersion": "99"}, "spec": {"holderIdentity": "other"}});
    server.with(|state| state.lease = Some(lease));
    elector.release().await;
    assert_eq!(server.holder().as_deref(), Some("other"));
}

#[rstest]
#[case(15_000, 15)]
#[case(1_500, 2)]
#[case(200, 1)]
#[tokio::test]
async fn others_wait_at_least_as_long_as_we_may_go_on(#[case] millis: u64, #[case] seconds: i32) {
    let server = Server::default();
    let elector = server.elector("me", Duration::from_millis(millis));
    assert_eq!(elector.claim(0).lease_duration_seconds, Some(seconds));
}
