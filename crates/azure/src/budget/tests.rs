use super::*;
use crate::ArmError;
use policy::Limit;
use proptest::prelude::*;

fn now() -> Instant {
    Clock::system().instant()
}

fn ask(policy: Policy, kind: Kind, resource: &str) -> Ask {
    Ask {
        principal: "p".into(),
        subscription: "s".into(),
        location: "eastus".into(),
        policy,
        kind,
        resource: Some(resource.into()),
    }
}

/// In any window there are no more calls than what may go at once plus what refills in it.
fn within(limit: Limit, times: &[Instant]) -> bool {
    let mut sorted = times.to_vec();
    sorted.sort();
    (0..sorted.len()).all(|first| {
        (first..sorted.len()).all(|last| {
            let window = (sorted[last] - sorted[first]).as_secs_f64();
            (last - first + 1) as f64 <= f64::from(limit.burst) + limit.per_second() * window + 1e-6
        })
    })
}

fn headers(pairs: &[(&'static str, &str)]) -> http::HeaderMap {
    pairs
        .iter()
        .map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()))
        .collect()
}

fn throttled(seconds: u64) -> Throttled {
    Throttled {
        after: Duration::from_secs(seconds),
        wide: Wide::Region,
    }
}

#[tokio::test(start_paused = true)]
async fn a_429_stops_its_bucket_and_no_other() {
    let budget = Budget::default();
    let puts = ask(Policy::VmPut, Kind::Write, "a");
    budget.acquire(&puts).await.unwrap();
    budget.learn(&puts, &http::HeaderMap::new(), Some(throttled(60)));

    assert_eq!(budget.acquire(&puts).await, Err(StoppedFor(Duration::from_secs(60))));
    assert_eq!(
        budget.acquire(&ask(Policy::VmPut, Kind::Write, "b")).await,
        Err(StoppedFor(Duration::from_secs(60)))
    );
    budget.acquire(&ask(Policy::VmGet, Kind::Read, "a")).await.unwrap();
    tokio::time::advance(Duration::from_secs(60)).await;
    budget.acquire(&puts).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn another_principal_spends_nothing_of_ours_in_our_own_subscription() {
    let budget = Budget::default();
    let ours = ask(Policy::VmPut, Kind::Write, "a");
    let theirs = Ask {
        principal: "stranger".into(),
        ..ours.clone()
    };
    for _ in 0..12 {
        budget.acquire(&theirs).await.unwrap();
    }
    budget.learn(&theirs, &http::HeaderMap::new(), Some(throttled(600)));
    assert!(budget.acquire(&theirs).await.is_err());
    for _ in 0..12 {
        let before = now();
        budget.acquire(&ours).await.unwrap();
        assert_eq!(now() - before, Duration::ZERO);
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_subscriptions_leaves_the_number_of_buckets_bounded() {
    let budget = Budget::default();
    let stopped = ask(Policy::VmPut, Kind::Write, "stopped");
    budget.acquire(&stopped).await.unwrap();
    budget.learn(&stopped, &http::HeaderMap::new(), Some(throttled(6000)));
    for n in 0..2 * MOST_BUCKETS {
        let one = Ask {
            subscription: format!("s{n}").into(),
            ..ask(Policy::VmPut, Kind::Write, "a")
        };
        budget.acquire(&one).await.unwrap();
    }
    assert!(budget.lock().buckets.len() <= MOST_BUCKETS + 3);
    assert!(
        budget.acquire(&stopped).await.is_err(),
        "a stopped bucket is not forgotten"
    );
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_when_the_429_comes_hear_of_it_and_send_nothing() {
    let budget = Arc::new(Budget::default());
    let puts = ask(Policy::VmPut, Kind::Write, "a");
    for _ in 0..12 {
        budget.acquire(&puts).await.unwrap();
    }
    let waiting = tokio::spawn({
        let (budget, puts) = (budget.clone(), puts.clone());
        async move { budget.acquire(&puts).await }
    });
    tokio::task::yield_now().await;
    budget.learn(&puts, &http::HeaderMap::new(), Some(throttled(300)));
    assert!(matches!(waiting.await.unwrap(), Err(StoppedFor(_))));
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_turn_came_before_the_429_hears_of_it_before_it_is_sent() {
    let budget = Budget::default();
    let (first, second) = (
        ask(Policy::VmPut, Kind::Write, "a"),
        ask(Policy::VmPut, Kind::Write, "b"),
    );
    budget.acquire(&first).await.unwrap();
    budget.acquire(&second).await.unwrap();
    assert_eq!(budget.stopped(&second), None);
    budget.learn(&first, &http::HeaderMap::new(), Some(throttled(7)));
    assert_eq!(budget.stopped(&second), Some(StoppedFor(Duration::from_secs(7))));
}

/// Counts the calls of many callers that a server throttles for a whole minute, with answers within 50 ms.
async fn a_minute_of_429s(callers: usize, after: Option<Duration>) -> usize {
    let (budget, sent) = (
        Arc::new(Budget::default()),
        Arc::new(std::sync::atomic::AtomicUsize::new(0)),
    );
    let end = now() + Duration::from_secs(60);
    let tasks: Vec<_> = (0..callers)
        .map(|n| {
            let (budget, sent) = (budget.clone(), sent.clone());
            let ask = ask(Policy::VmPut, Kind::Write, &n.to_string());
            tokio::spawn(async move {
                while now() < end {
                    if let Err(StoppedFor(left)) = budget.acquire(&ask).await {
                        tokio::time::sleep(left).await;
                        continue;
                    }
                    if now() >= end {
                        return;
                    }
                    sent.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    let error = ArmError::parse(429, b"", after);
                    let throttled = Throttled::read(&error, &http::HeaderMap::new());
                    budget.learn(&ask, &http::HeaderMap::new(), Some(throttled));
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    sent.load(std::sync::atomic::Ordering::SeqCst)
}

#[tokio::test(start_paused = true)]
async fn a_minute_of_429s_costs_a_crowd_a_few_calls_more_than_its_first() {
    for (after, most) in [
        (None, 4),
        (Some(Duration::from_secs(10)), 12),
        (Some(Duration::from_secs(2)), 60),
    ] {
        let sent = a_minute_of_429s(50, after).await;
        println!("50 callers, Retry-After {after:?}: {sent} calls in a minute of 429s");
        assert!((50..=50 + most).contains(&sent), "{after:?}: {sent}");
    }
}

#[tokio::test(start_paused = true)]
async fn headers_lower_the_budget_and_never_raise_it() {
    let budget = Budget::default();
    let reads = ask(Policy::Other, Kind::Read, "a");
    let started = now();
    budget.learn(
        &reads,
        &headers(&[("x-ms-ratelimit-remaining-subscription-reads", "1")]),
        None,
    );
    budget.acquire(&reads).await.unwrap();
    assert_eq!(now() - started, Duration::ZERO);
    budget.learn(
        &reads,
        &headers(&[("x-ms-ratelimit-remaining-subscription-reads", "11999")]),
        None,
    );
    budget.acquire(&reads).await.unwrap();
    assert!(now() - started >= Duration::from_millis(40), "{:?}", now() - started);
}

#[tokio::test(start_paused = true)]
async fn compute_counters_are_read_by_policy_and_resource() {
    let budget = Budget::default();
    let puts = ask(Policy::VmPut, Kind::Write, "a");
    let left = "Microsoft.Compute/PutVMResource;0,Microsoft.Compute/PutVMSubscriptionMaximum;1400";
    budget.learn(&puts, &headers(&[("x-ms-ratelimit-remaining-resource", left)]), None);
    let started = now();
    budget.acquire(&ask(Policy::VmPut, Kind::Write, "b")).await.unwrap();
    assert_eq!(now() - started, Duration::ZERO);
    budget.acquire(&puts).await.unwrap();
    assert!(now() - started >= Duration::from_secs(14));
}

#[tokio::test(start_paused = true)]
async fn deletes_go_before_puts_that_came_earlier() {
    let budget = Arc::new(Budget::default());
    let done = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..12 {
        budget.acquire(&ask(Policy::VmPut, Kind::Write, "a")).await.unwrap();
    }
    let tasks: Vec<_> = [("put", Kind::Write), ("delete", Kind::Delete)]
        .into_iter()
        .map(|(name, kind)| {
            let (budget, done) = (budget.clone(), done.clone());
            tokio::spawn(async move {
                budget.acquire(&ask(Policy::VmPut, kind, "a")).await.unwrap();
                done.lock().push(name);
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*done.lock(), ["delete", "put"]);
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_goes_away_gives_up_its_place() {
    let budget = Arc::new(Budget::default());
    let puts = ask(Policy::VmPut, Kind::Write, "a");
    for _ in 0..12 {
        budget.acquire(&puts).await.unwrap();
    }
    let gone = tokio::spawn({
        let (budget, puts) = (budget.clone(), puts.clone());
        async move { budget.acquire(&puts).await }
    });
    tokio::task::yield_now().await;
    gone.abort();
    let _ = gone.await;
    let started = now();
    budget.acquire(&puts).await.unwrap();
    assert!(now() - started < Duration::from_secs(16));
    assert_eq!(budget.metrics.waiting.get(), 0);
}

#[test]
fn a_429_tells_which_bucket_ran_dry() {
    let body = |code: &str, target: &str| {
        format!(
            r#"{{"error":{{"code":"{code}","message":"","details":[{{"code":"TooManyRequests","target":"{target}","message":""}}]}}}}"#
        )
    };
    let wide =
        |text: String| Throttled::read(&ArmError::parse(429, text.as_bytes(), None), &http::HeaderMap::new()).wide;
    assert_eq!(wide(body("OperationNotAllowed", "PutVMResource")), Wide::Resource);
    assert_eq!(
        wide(body("OperationNotAllowed", "PutVMSubscriptionMaximum")),
        Wide::Region
    );
    assert_eq!(wide(body("OperationNotAllowed", "HighCostGet30Min")), Wide::Region);
    assert_eq!(wide(body("SubscriptionRequestsThrottled", "x")), Wide::Manager);
    assert_eq!(wide(String::new()), Wide::Region);
}

#[derive(Clone, Debug)]
struct Step {
    delay_ms: u64,
    policy: Policy,
    kind: Kind,
    resource: u8,
    remaining: Option<u32>,
    throttle: Option<u64>,
    give_up_ms: Option<u64>,
}

fn step() -> impl Strategy<Value = Step> {
    let kinds = prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(Kind::Delete)];
    // Few policies and resources, so that they meet in the same buckets.
    let policies = prop::sample::select(vec![
        Policy::VmPut,
        Policy::VmGet,
        Policy::ScaleSetCreate,
        Policy::Other,
    ]);
    (
        (0u64..30_000, policies, kinds, 0u8..3),
        prop::option::weighted(0.1, 0u32..300),
        prop::option::weighted(0.05, 1u64..60),
        prop::option::weighted(0.1, 0u64..20_000),
    )
        .prop_map(
            |((delay_ms, policy, kind, resource), remaining, throttle, give_up_ms)| Step {
                delay_ms,
                policy,
                kind,
                resource,
                remaining,
                throttle,
                give_up_ms,
            },
        )
}

async fn one(budget: Arc<Budget>, step: Step, log: Arc<Mutex<Vec<(Key, Instant)>>>, stops: Arc<Mutex<Vec<Stop>>>) {
    tokio::time::sleep(Duration::from_millis(step.delay_ms)).await;
    let ask = ask(step.policy, step.kind, &step.resource.to_string());
    let patience = step
        .give_up_ms
        .map_or(Duration::from_secs(100_000), Duration::from_millis);
    let granted = tokio::time::timeout(patience, budget.acquire(&ask)).await;
    if !matches!(granted, Ok(Ok(()))) {
        return;
    }
    let now = now();
    log.lock().extend(ask.keys().into_iter().map(|key| (key, now)));
    let name = format!("x-ms-ratelimit-remaining-subscription-{}", step.kind.name());
    let mut map = http::HeaderMap::new();
    if let Some(left) = step.remaining {
        map.insert(http::HeaderName::try_from(name).unwrap(), left.into());
    }
    budget.learn(&ask, &map, step.throttle.map(throttled));
    if let Some(seconds) = step.throttle {
        let policy = step
            .policy
            .per_region()
            .map_or(Scope::Manager(step.kind), |_| Scope::Region(step.policy));
        stops
            .lock()
            .push((ask.key(policy), now, now + Duration::from_secs(seconds)));
    }
}

type Stop = (Key, Instant, Instant);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_interleaving_exceeds_the_published_limits(steps in prop::collection::vec(step(), 1..160)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (budget, log, stops) = (Arc::new(Budget::default()), Arc::default(), Arc::default());
            let tasks: Vec<_> = steps
                .into_iter()
                .map(|step| tokio::spawn(one(budget.clone(), step, Arc::clone(&log), Arc::clone(&stops))))
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            let mut by_key: HashMap<Key, Vec<Instant>> = HashMap::new();
            for (key, at) in log.lock().drain(..) {
                by_key.entry(key).or_default().push(at);
            }
            for (key, times) in &by_key {
                let limit = match &key.scope {
                    Scope::Manager(kind) => kind.limit(),
                    Scope::Region(policy) => policy.per_region().unwrap(),
                    Scope::Resource(policy, _) => policy.per_resource().unwrap(),
                };
                assert!(within(limit, times), "{key:?} {times:?}");
            }
            for (key, from, until) in stops.lock().iter() {
                let meanwhile = by_key[key].iter().filter(|at| *at > from && *at < until).count();
                assert_eq!(meanwhile, 0, "{key:?} was stopped");
            }
            assert!(budget.lock().queue.is_empty());
        });
    }
}
