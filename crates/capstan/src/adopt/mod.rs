//! `capstan adopt`: the way from a peer's controllers to Capstan, and back.
//!
//! Invariant: without `--execute` and `--revert` it only reads. Every change is recorded before it is made, so that a run that
//! was stopped in the middle can be reverted, too.

mod execute;
mod observe;
mod preflight;

pub use observe::deployment;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use capstan_core::adopt::{self, Facts, Peer, Way};
use clap::Args;
use serde::Serialize;

use crate::controllers::Name;
use crate::plain::plain;
use crate::plan::Output;
use crate::run::cluster;

/// The exit code while something is left to do.
const LEFT: u8 = 2;

/// Take a cluster over from CAPZ, CAPV or machine-api-provider-azure, or return it
///
/// Finds the controllers that run the cluster now, with their leases, webhooks, definitions, feature gates and identities, and
/// prints the way to Capstan: the steps in order, who takes each, and what is in the way. It only reads.
///
/// With --execute it takes the steps that can be undone, and records them in ConfigMap capstan-adoption. You take the other
/// steps. With --revert it undoes the recorded steps, last step first. Run it with an account that has the rights for these
/// steps; Capstan's own account does not. Exits with 2 while steps are left, with 0 when all are done.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan adopt
  capstan adopt --execute
  capstan adopt --revert")]
pub struct Adopt {
    /// Use this kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The namespace in which Capstan is or will be installed
    #[arg(long, default_value = "capstan-system", value_name = "NAMESPACE")]
    capstan_namespace: String,
    /// Take over only what these controllers replace [default: all]
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAME,...",
        conflicts_with = "revert"
    )]
    controllers: Vec<Name>,
    /// Take the steps that can be undone
    #[arg(long, conflicts_with = "revert")]
    execute: bool,
    /// Undo the steps that --execute took
    #[arg(long)]
    revert: bool,
    /// Print in this format
    #[arg(long, short = 'o', value_enum, default_value = "table")]
    output: Output,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    ways: Vec<Way>,
    /// What was carried out or undone by this run.
    carried_out: Vec<String>,
    facts: Facts,
}

pub async fn run(args: Adopt) -> Result<ExitCode> {
    let config = cluster(args.kubeconfig.as_deref(), args.context.clone()).await?;
    let client = kube::Client::try_from(config).context("cannot make a Kubernetes client")?;
    let observe = async || {
        let mut facts = observe::facts(&client, &args.capstan_namespace).await?;
        let asked = |peer: &Peer| {
            args.controllers
                .iter()
                .any(|name| name.to_string() == peer.controllers())
        };
        facts.peers.retain(|peer, _| args.controllers.is_empty() || asked(peer));
        facts.more_peers.retain(|(peer, _)| facts.peers.contains_key(peer));
        anyhow::Ok(facts)
    };
    let mut facts = observe().await?;
    let mut carried_out = Vec::new();
    if args.revert {
        carried_out = execute::revert(&client, &facts).await?;
    } else if args.execute {
        carried_out = execute::execute(&client, &facts).await?;
    }
    if args.revert || args.execute {
        facts = observe().await?;
    }
    let ways = adopt::ways(&facts);
    let left = ways.iter().flat_map(|way| &way.steps).any(|step| !step.done);
    let report = Report {
        ways,
        carried_out,
        facts,
    };
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => serde_json::to_string_pretty(&report)?,
    };
    writeln!(std::io::stdout(), "{}", plain(text.trim_end()))?;
    Ok(if left && !args.revert {
        ExitCode::from(LEFT)
    } else {
        ExitCode::SUCCESS
    })
}

impl Report {
    fn table(&self) -> String {
        let mut text = String::new();
        for done in &self.carried_out {
            let _ = writeln!(text, "done: {done}");
        }
        if self.ways.is_empty() {
            let _ = writeln!(text, "No controller that Capstan replaces runs in this cluster.");
        }
        for Way { peer, steps, notes } in &self.ways {
            let _ = writeln!(text, "From {peer} to Capstan:");
            for (number, step) in (1..).zip(steps) {
                let who = match (step.done, &step.action) {
                    (true, _) => "done",
                    (false, Some(_)) => "--execute does it",
                    (false, None) => "you do it",
                };
                let _ = writeln!(text, "  {number}. {} [{who}]", step.text);
                if let Some(obstacle) = &step.obstacle {
                    let _ = writeln!(text, "     in the way: {obstacle}");
                }
            }
            for note in notes {
                let _ = writeln!(text, "  - {note}");
            }
        }
        self.found(&mut text);
        text
    }

    /// Lists what was found.
    fn found(&self, text: &mut String) {
        let facts = &self.facts;
        let more = facts.more_peers.iter().map(|(_, deployment)| deployment);
        for deployment in facts.peers.values().chain(more).chain(&facts.capstan) {
            let operator = deployment.operator;
            let operator = operator.map(|operator| format!(", put back by {operator}"));
            let _ = writeln!(
                text,
                "found: Deployment {}/{}, replicas {}, pods {}{}",
                deployment.namespace,
                deployment.name,
                deployment.replicas,
                deployment.pods,
                operator.unwrap_or_default()
            );
        }
        for lease in &facts.leases {
            let holder = match (lease.holder.as_str(), lease.expired) {
                ("", _) => "not held".to_owned(),
                (holder, true) => format!("held by {holder} until it expired"),
                (holder, false) => format!("held by {holder}"),
            };
            let _ = writeln!(text, "found: Lease {}/{}, {holder}", lease.namespace, lease.name);
        }
        for webhooks in &facts.webhooks {
            let _ = writeln!(
                text,
                "found: {} {}, answered in {}, {} webhooks fail closed",
                webhooks.kind, webhooks.name, webhooks.service, webhooks.fail_closed
            );
        }
        for definition in &facts.definitions {
            let converted = definition.conversion.as_ref();
            let converted = converted
                .map(|namespace| format!(", converted in {namespace}"))
                .unwrap_or_default();
            let _ = writeln!(
                text,
                "found: {}, serves {}, stores {}{converted}",
                definition.name,
                definition.served.join(" "),
                definition.stored.join(" ")
            );
        }
        for (kind, count) in facts.objects.iter().filter(|(_, count)| **count > 0) {
            let _ = writeln!(text, "found: {count} {kind}");
        }
        for (finalizer, count) in &facts.finalizers {
            let _ = writeln!(text, "found: finalizer {finalizer} of {count} objects");
        }
    }
}
