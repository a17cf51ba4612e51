//! Azure's published limits over the wire: the simulator counts every call as Azure does, and refuses beyond.

use anyhow::{Context as _, Result};
use capstan_azure::model::NetworkInterface;
use capstan_azure::{Client, Clients, Cloud, Credential, Owned, Resource as _, Secret, Settings};
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_core::{Class, Classified};
use capstan_sim::azure::{Azure, Config, Handle, Request};
use futures::future::{join_all, try_join_all};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const GROUP: &str = "capstan";

/// A client of its own process, as far as budgets go.
fn client(sim: &Handle) -> Result<Client> {
    client_behind(sim, Interceptors::default())
}

fn client_behind(sim: &Handle, interceptors: Interceptors) -> Result<Client> {
    let settings = Settings {
        interceptors,
        ca_file: Some(sim.ca_file.clone()),
        ..Settings::new(Cloud::custom("sim", &sim.url, &sim.url)?)
    };
    let credential = Credential::Secret {
        tenant: sim.tenant.clone(),
        client_id: sim.client_id.clone(),
        secret: Secret::new(sim.client_secret.clone()),
    };
    Ok(Clients::new(settings)?
        .client(&credential, &sim.subscription)
        .at("eastus"))
}

async fn throttling() -> Result<Handle> {
    Azure::start(Config {
        throttle: true,
        ..Config::instant()
    })
    .await
}

fn refusals(requests: &[Request]) -> usize {
    requests.iter().filter(|request| request.status == 429).count()
}

/// Deletes, and comes back when told to wait, as the controllers do.
async fn delete(client: &Client, name: String) -> Result<()> {
    loop {
        let id = format!(
            "/subscriptions/{}/resourceGroups/{GROUP}/providers/Microsoft.Network/networkInterfaces/{name}",
            client.subscription()
        );
        let nic: NetworkInterface = serde_json::from_value(json!({ "id": id, "type": NetworkInterface::TYPE }))?;
        match client.delete_nic(&Owned::by_tags(&nic, |_| true)?).await {
            Ok(_) => return Ok(()),
            Err(error) => match error.class() {
                Class::Throttled(after) => tokio::time::sleep(after).await,
                _ => return Err(error.into()),
            },
        }
    }
}

/// Resource Manager lets 200 deletes go at once, and 10 a second from then on.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_of_calls_keeps_within_the_limits_without_a_storm() -> Result<()> {
    const CALLS: usize = 260;
    let sim = throttling().await?;
    let client = client(&sim)?;
    // Signed in before the crowd comes.
    client.get_vm(GROUP, "any").await?;
    sim.clear_requests();
    let began = Instant::now();
    try_join_all((0..CALLS).map(|n| delete(&client, format!("nic-{n}")))).await?;
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(5),
        "60 calls beyond the burst took {took:?}"
    );
    let requests = sim.arm_requests();
    let refused = refusals(&requests);
    // The buckets of both sides fill from the first call on, which arrives later than it went: on a busy machine some calls
    // at the edge are refused. Without a budget the 60 beyond the burst would be, and most of them again and again.
    assert!(
        refused <= CALLS / 5,
        "{refused} of {} calls were refused",
        requests.len()
    );
    assert_eq!(requests.len(), CALLS + refused, "each refused call came again once");
    Ok(())
}

/// Somebody else with the same subscription has used the bucket up: Compute lets 36 reads of one machine go at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_somebody_else_emptied_is_left_alone_for_as_long_as_azure_says() -> Result<()> {
    let sim = throttling().await?;
    let (other, ours) = (client(&sim)?, client(&sim)?);
    try_join_all((0..36).map(|_| other.get_vm(GROUP, "busy"))).await?;
    assert_eq!(refusals(&sim.arm_requests()), 0, "the first 36 are within the limit");

    // On a slow machine a token or two may have come back meanwhile.
    let error = loop {
        sim.clear_requests();
        if let Err(error) = ours.get_vm(GROUP, "busy").await {
            break error;
        }
    };
    let since = Instant::now();
    let Class::Throttled(after) = error.class() else {
        anyhow::bail!("{error} is no throttling");
    };
    assert!(!after.is_zero() && after <= Duration::from_secs(5), "{after:?}");
    for _ in 0..20 {
        let answer = ours.get_vm(GROUP, "busy").await;
        if since.elapsed() < after {
            let error = answer.err().context("the bucket is stopped")?;
            assert!(matches!(error.class(), Class::Throttled(_)));
        }
    }
    // The other machines have buckets of their own.
    assert!(ours.get_vm(GROUP, "idle").await?.is_none());
    let sent = sim.arm_requests();
    if since.elapsed() < after {
        assert_eq!(sent.len(), 2, "nothing more was sent to the stopped bucket: {sent:?}");
    }
    let mut refused = refusals(&sent);
    loop {
        match ours.get_vm(GROUP, "busy").await {
            Ok(_) => break,
            Err(error) => match error.class() {
                Class::Throttled(after) => tokio::time::sleep(after).await,
                _ => return Err(error.into()),
            },
        }
    }
    refused = refusals(&sim.arm_requests()) - refused;
    assert!(
        refused <= 1,
        "after the wait the call went through, not {refused} refusals later"
    );
    Ok(())
}

/// Shuts for writes once the first of them has been answered, as the fence does when the lease is lost.
#[derive(Default)]
struct Shutting(AtomicBool);

impl Interceptor for Shutting {
    fn before(&self, effect: &Effect) -> Verdict {
        if effect.write && self.0.load(SeqCst) {
            return Verdict::Refuse("shut".to_owned());
        }
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        self.0.fetch_or(effect.write, SeqCst);
        Verdict::Pass
    }
}

// One thread: the interceptor shuts before any of those who wait can have the line of the call that was answered.
#[tokio::test]
async fn a_call_that_waits_for_its_turn_while_the_fence_shuts_is_never_sent() -> Result<()> {
    const AT_ONCE: usize = 32;
    const CALLS: usize = 40;
    let sim = Azure::start(Config::instant()).await?;
    let interceptor = Arc::new(Shutting::default());
    let client = client_behind(&sim, Interceptors::new(vec![interceptor.clone()]))?;
    client.get_vm(GROUP, "any").await?;
    sim.clear_requests();
    let crowd = || join_all((0..CALLS).map(|n| delete(&client, format!("nic-{n}"))));
    let answers = crowd().await;
    let sent = sim.arm_requests().len();
    assert!(sent <= AT_ONCE, "{sent} calls had a line when it shut");
    assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), CALLS - sent);
    // Those that were refused gave their lines back.
    assert!(crowd().await.iter().all(Result::is_err));
    interceptor.0.store(false, SeqCst);
    delete(&client, "nic".to_owned()).await?;
    assert_eq!(sim.arm_requests().len(), sent + 1);
    Ok(())
}
