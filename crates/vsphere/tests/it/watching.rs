//! The long poll against a simulated vCenter, with waiters that come and go all the time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use capstan_core::interceptor::{Effect, Interceptor, Interceptors, Verdict};
use capstan_testkit::vcsim::{Fault, Options};
use capstan_testkit::{Vcsim, vcsim};
use capstan_vsphere::{CloneSpec, ConfigSpec, Error, Login, MoRef, Sessions, Settings, Trust, Vcenter};
use futures::future::try_join_all;

const PATIENCE: Duration = Duration::from_secs(180);

/// Sees what becomes of the view: its changes, and the answers of the poll.
#[derive(Default)]
struct Sequence {
    seen: Mutex<Vec<(&'static str, Instant)>>,
    /// How many changes of the view never come through.
    stuck: Mutex<u32>,
}

impl Interceptor for Sequence {
    fn before(&self, effect: &Effect) -> Verdict {
        if effect.method != "ModifyListView" {
            return Verdict::Pass;
        }
        let mut stuck = self.stuck.lock().unwrap();
        if *stuck > 0 {
            *stuck -= 1;
            return Verdict::Hang;
        }
        self.seen.lock().unwrap().push(("change", Instant::now()));
        Verdict::Pass
    }

    fn after(&self, effect: &Effect) -> Verdict {
        if effect.method == "WaitForUpdatesEx" {
            self.seen.lock().unwrap().push(("answer", Instant::now()));
        }
        Verdict::Pass
    }
}

async fn start(interceptor: Arc<Sequence>) -> Result<(Vcsim, Sessions, Vcenter)> {
    let sim = vcsim(Options::default()).await?;
    let sessions = Sessions::new(Settings {
        interceptors: Interceptors::new(vec![interceptor]),
        ..Settings::default()
    });
    let login = Login {
        server: sim.server.clone(),
        username: sim.username.clone(),
        password: sim.password.clone().into(),
        trust: Trust::Ca(sim.ca.clone()),
        tenant: None,
    };
    let vcenter = sessions.get(&login).await?;
    Ok((sim, sessions, vcenter))
}

async fn machine(vcenter: &Vcenter, number: u64) -> Result<MoRef> {
    let datacenter = vcenter.datacenter(None).await?;
    let template = vcenter.template(&datacenter, "pvscsi").await?;
    let pool = vcenter.resource_pool(&datacenter, None).await?;
    let spec = CloneSpec {
        pool: Some(pool.reference.clone()),
        ..CloneSpec::default()
    };
    let name = format!("w-{number}");
    let clone = vcenter
        .clone_vm(&template.reference, &datacenter.vm_folder, &name, &spec)
        .await?;
    clone.wait().await?.context("nothing was made")
}

/// Each in its own time, so that somebody comes and somebody goes at any moment.
async fn machine_with_many_tasks(vcenter: &Vcenter, number: u64, tasks: u64) -> Result<()> {
    let made = machine(vcenter, number).await?;
    for task in 0..tasks {
        let spec = ConfigSpec {
            num_cpus: Some(1 + (task % 4) as i32),
            ..ConfigSpec::default()
        };
        vcenter.reconfigure(&made, &spec).await?.wait().await?;
        tokio::time::sleep(Duration::from_millis((number * 13 + task * 7) % 60)).await;
    }
    Ok(())
}

/// The simulator ends in a deadlock when a view is changed while its poll takes in the change before.
#[tokio::test(flavor = "multi_thread")]
async fn a_view_is_not_changed_again_before_its_poll_has_answered() -> Result<()> {
    let interceptor = Arc::new(Sequence::default());
    let (sim, sessions, vcenter) = start(interceptor.clone()).await?;
    let begun = Instant::now();
    let all = try_join_all((0..7).map(|number| machine_with_many_tasks(&vcenter, number, 40)));
    tokio::time::timeout(PATIENCE, all).await.context("took too long")??;
    let counters = sim.admin.counters().await?;
    println!("{counters:?}");
    let seen = interceptor.seen.lock().unwrap().clone();
    // Whoever has waited for a second goes on without an answer: a busy machine may need that.
    let hasty = |pair: &&[(&str, Instant)]| {
        pair[0].0 == "change" && pair[1].0 == "change" && pair[1].1 - pair[0].1 < Duration::from_secs(1)
    };
    let hasty = seen.windows(2).filter(hasty).count();
    assert_eq!(hasty, 0, "changes without an answer in between: {counters:?}");
    // A simulator that gets no time for ten seconds looks stuck.
    let views = 1 + begun.elapsed().as_secs() / 10;
    assert!(
        counters["CreateListView"] <= views,
        "the poll started again: {counters:?}"
    );
    sessions.close().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poll_that_is_stuck_on_the_server_is_made_anew() -> Result<()> {
    let interceptor = Arc::new(Sequence::default());
    let (sim, sessions, vcenter) = start(interceptor.clone()).await?;
    machine(&vcenter, 0).await?;
    *interceptor.stuck.lock().unwrap() = 1;
    let made = tokio::time::timeout(PATIENCE, machine(&vcenter, 1)).await;
    made.context("the wait did not outlive a stuck poll")??;
    assert_eq!(sim.admin.counters().await?["CreateListView"], 2);
    sessions.close().await;
    Ok(())
}

/// Longer than the longest pause between two tries of the poll.
const QUIET: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread")]
async fn an_account_that_is_let_in_no_more_is_tried_once_and_for_nobody_not_at_all() -> Result<()> {
    let (sim, sessions, vcenter) = start(Arc::default()).await?;
    let made = machine(&vcenter, 0).await?;
    let refused = Fault::call("Login", "InvalidLogin", "Cannot complete login.");
    sim.admin.inject(&Fault { times: 0, ..refused }).await?;
    let unauthorized = Fault {
        method: "POST /rest/com/vmware/cis/session".into(),
        kind: "status".into(),
        status: 401,
        ..Fault::default()
    };
    sim.admin.inject(&unauthorized).await?;
    sim.admin.reset_counters().await?;
    sim.admin.drop_sessions().await?;
    for _ in 0..3 {
        let mut watch = vcenter.watch_vm(&made);
        let told = async {
            loop {
                if let Err(error) = watch.next().await {
                    return error;
                }
            }
        };
        let error = tokio::time::timeout(PATIENCE, told).await.context("not told")?;
        assert!(matches!(error, Error::Login { .. }), "{error}");
        let error = vcenter.attached_tags(&made).await.expect_err("no session");
        assert!(matches!(error, Error::Login { .. }), "{error}");
    }
    let logins = |counters: &std::collections::BTreeMap<String, u64>| {
        ["Login", "POST /rest/com/vmware/cis/session"].map(|name| counters.get(name).copied().unwrap_or_default())
    };
    let counters = sim.admin.counters().await?;
    assert_eq!(logins(&counters), [1, 1], "{counters:?}");
    // The poll may just have been on its way.
    tokio::time::sleep(Duration::from_secs(1)).await;
    sim.admin.reset_counters().await?;
    tokio::time::sleep(QUIET).await;
    let counters = sim.admin.counters().await?;
    assert!(
        !counters.contains_key("CreatePropertyCollector"),
        "nobody waits: {counters:?}"
    );
    assert_eq!(logins(&counters), [0, 0], "{counters:?}");
    sessions.close().await;
    Ok(())
}
