//! The series that alerts name come from real calls.

use anyhow::{Context, Result};
use capstan_testkit::vcsim;
use capstan_testkit::vcsim::Options;
use capstan_vsphere::{Login, Metrics, Sessions, Settings, Trust};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use crate::vcsim::{clone, in_time, login};

const RULES: &str = include_str!("../../../../deploy/prometheus/rules.yaml");

/// Returns the series of vSphere in the rules, with the outcome where a rule selects one.
fn series() -> Vec<(String, Option<String>)> {
    let prefix = "capstan_vsphere_";
    let found = RULES.match_indices(prefix).map(|(at, _)| {
        let text = &RULES[at..];
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let (name, rest) = text.split_at(text.find(|c| !is_name(c)).unwrap_or(text.len()));
        let selected = rest.strip_prefix("{outcome=\"").and_then(|rest| rest.split('"').next());
        (name.to_owned(), selected.map(str::to_owned))
    });
    found.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_series_that_alerts_name_come_from_calls_logins_and_tasks() -> Result<()> {
    in_time(async {
        let sim = vcsim(Options::default()).await?;
        let metrics = Metrics::default();
        let sessions = Sessions::new(Settings {
            metrics: metrics.clone(),
            ..Settings::default()
        });
        let trusted = login(&sim, Trust::Ca(sim.ca.clone()));
        let vcenter = sessions.get(&trusted).await?;
        clone(&vcenter, "pvscsi", "m", 0, false).await?;
        let wrong = Login {
            password: "wrong".into(),
            ..trusted.clone()
        };
        assert!(sessions.get(&wrong).await.is_err());
        // Nothing listens on the first port.
        let away = Login {
            server: "127.0.0.1:1".into(),
            ..trusted
        };
        assert!(sessions.get(&away).await.is_err());
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry)?;
        let all = series();
        assert!(all.len() > 4, "{all:?}");
        for (name, outcome) in all {
            let is_it = |line: &&str| {
                let rest = line.strip_prefix(name.as_str());
                let rest = rest.filter(|rest| rest.starts_with(['{', ' ']));
                let selected = outcome.as_ref().map(|outcome| format!("outcome=\"{outcome}\""));
                rest.is_some_and(|rest| selected.is_none_or(|selected| rest.contains(&selected)))
            };
            let found = text.lines().find(is_it);
            found.with_context(|| format!("no series {name} with outcome {outcome:?} in\n{text}"))?;
        }
        Ok(())
    })
    .await
}
