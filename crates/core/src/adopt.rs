//! The way from a peer to Capstan: which controllers run a cluster now, what has to happen in which order, and what is in
//! the way. Pure; `capstan adopt` observes and carries out.
//!
//! Invariants: at every point of the way at most one of Capstan and its peer acts on a machine, and every step that is
//! carried out can be undone.

mod facts;
mod guard;
mod preflight;

use facts::{AKS, VSPHERE_VERSIONS};
pub use facts::{
    Definition, Deployment, Facts, INJECT_CA, Lease, MACHINE_POOL, Operator, Peer, WebhookKind, Webhooks, is_gated,
    with_gate, with_gate_of,
};
pub use guard::acts;
pub use preflight::{Place, Ungranted, VsphereCluster, VsphereIdentity};
use serde::{Deserialize, Serialize};

/// A change that Capstan can make and undo.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "action")]
pub enum Action {
    /// Lets Capstan hold the peer's leases.
    GrantLeases {
        namespace: String,
        leases: Vec<String>,
    },
    /// Switches a feature gate of the peer off. Its Deployment restarts.
    DisableGate {
        namespace: String,
        deployment: String,
        gate: String,
    },
    ScaleDown {
        namespace: String,
        deployment: String,
    },
    /// Removes those webhooks from a configuration that its Service does not answer any more.
    DropWebhooks {
        kind: WebhookKind,
        name: String,
        webhooks: Vec<String>,
    },
    /// Stops cert-manager from writing the CA of the peer into the conversion of definitions.
    StopInjection {
        definitions: Vec<String>,
    },
    /// Removes a webhook configuration whose Service does not answer any more.
    RemoveWebhooks {
        kind: WebhookKind,
        name: String,
    },
}

/// One step of the way, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    pub text: String,
    /// What `--execute` does. `None`: a person does it.
    #[serde(skip_serializing_if = "Option::is_none", flatten)]
    pub action: Option<Action>,
    pub done: bool,
    /// What has to be removed first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

/// The way from one peer to Capstan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Way {
    pub peer: Peer,
    pub steps: Vec<Step>,
    /// What is good to know.
    pub notes: Vec<String>,
}

/// Returns the way from every peer that is there.
pub fn ways(facts: &Facts) -> Vec<Way> {
    let way = |(peer, deployment): (&Peer, &Deployment)| match peer {
        Peer::Capz => capz(facts, deployment),
        Peer::Capv => capv(facts, deployment),
        Peer::MachineApi => machine_api(facts, deployment),
    };
    facts.peers.iter().map(way).collect()
}

fn manual(text: impl Into<String>, done: bool) -> Step {
    Step {
        text: text.into(),
        action: None,
        done,
        obstacle: None,
    }
}

fn automatic(text: impl Into<String>, action: Action, done: bool, obstacle: Option<String>) -> Step {
    Step {
        text: text.into(),
        action: Some(action),
        done,
        obstacle: obstacle.filter(|_| !done),
    }
}

/// CAPZ goes on without its machine pools: it still runs AzureClusters and AzureMachines.
fn capz(facts: &Facts, deployment: &Deployment) -> Way {
    let off = !deployment.gate(MACHINE_POOL, true);
    let gate = Action::DisableGate {
        namespace: deployment.namespace.clone(),
        deployment: deployment.name.clone(),
        gate: MACHINE_POOL.to_owned(),
    };
    let mut steps = stop_others(facts, Peer::Capz);
    steps.extend(preflight::azure(facts));
    steps.extend(facts.workload_identities.iter().map(|identity| {
        let account = format!("system:serviceaccount:{}:capstan", facts.capstan_namespace);
        let text = format!("in Azure, let the identity of AzureClusterIdentity {identity} trust the subject {account}");
        manual(text, false)
    }));
    // Before the gate: without its webhooks the API server refuses every write to pools, also those of Capstan.
    let answered = |webhooks: &&Webhooks| webhooks.service == deployment.namespace && !webhooks.gated.is_empty();
    for webhooks in facts.webhooks.iter().filter(answered) {
        let text = format!(
            "remove from {} {} the {} webhooks that CAPZ does not answer without feature gate {MACHINE_POOL}",
            webhooks.kind,
            webhooks.name,
            webhooks.gated.len()
        );
        let action = Action::DropWebhooks {
            kind: webhooks.kind,
            name: webhooks.name.clone(),
            webhooks: webhooks.gated.clone(),
        };
        steps.push(automatic(text, action, false, None));
    }
    // Both would act on the pools while it restarts.
    let running = running(facts, Peer::Capz).filter(|_| !off);
    steps.push(automatic(
        format!(
            "switch feature gate {MACHINE_POOL} of Deployment {} off; it restarts",
            place(deployment)
        ),
        gate,
        // The old pods run the pools until they are gone.
        off && deployment.rolled_out,
        aks(facts).or(running).or(undone(deployment)).filter(|_| !off),
    ));
    steps.push(start(facts, Peer::Capz, String::new()));
    let mut notes = vec![
        "CAPZ continues with AzureClusters, AzureMachines and the kinds of Azure Service Operator, and keeps their webhooks"
            .to_owned(),
    ];
    notes.extend(aks(facts).filter(|_| off));
    if deployment.replicas == 0 {
        notes.push(format!(
            "Deployment {} has no replicas: its webhooks refuse every write to its kinds until it runs again",
            place(deployment)
        ));
    }
    if !facts.without_azure_json.is_empty() {
        notes.push(format!(
            "pools without a Secret <pool>-azure-json: {}",
            facts.without_azure_json.join(", ")
        ));
    }
    Way {
        peer: Peer::Capz,
        steps,
        notes,
    }
}

/// Returns why the gate has to stay on: no other controller runs clusters of AKS.
fn aks(facts: &Facts) -> Option<String> {
    let found = AKS.iter().filter_map(|kind| {
        let count = facts.objects.get(*kind).filter(|count| **count > 0)?;
        Some(format!("{count} {kind}"))
    });
    let found: Vec<String> = found.collect();
    (!found.is_empty()).then(|| {
        format!(
            "{}: CAPZ reconciles them only with feature gate {MACHINE_POOL}, and Capstan does not; leave the gate on, and \
             separate the two by --namespace or --watch-filter",
            found.join(", ")
        )
    })
}

/// Returns why a change of the Deployment would not last.
fn undone(deployment: &Deployment) -> Option<String> {
    let operator = deployment.operator?;
    Some(format!(
        "{operator} puts Deployment {} back: make this change there",
        place(deployment)
    ))
}

/// Returns the steps for further instances of a peer: `--execute` takes over from one.
fn stop_others(facts: &Facts, peer: Peer) -> Vec<Step> {
    let others = facts.more_peers.iter().filter(|(other, _)| *other == peer);
    let acting = others.filter_map(|(_, deployment)| Some((deployment, acts(peer, deployment, &[], false)?)));
    let step = |(deployment, why)| Step {
        obstacle: Some(why),
        ..manual(format!("stop Deployment {}, too", place(deployment)), false)
    };
    acting.map(step).collect()
}

/// Capstan takes everything of CAPV: its Deployment stops, and its webhooks with it.
fn capv(facts: &Facts, deployment: &Deployment) -> Way {
    let peer = Peer::Capv;
    let leases = deployment.leases(peer);
    let mut steps = stop_others(facts, peer);
    steps.extend(preflight::vsphere(facts));
    steps.push(automatic(
        format!(
            "let Capstan hold the lease of CAPV in namespace {}",
            deployment.namespace
        ),
        Action::GrantLeases {
            namespace: deployment.namespace.clone(),
            leases: leases.clone(),
        },
        facts.granted.contains(&deployment.namespace),
        None,
    ));
    steps.push(automatic(
        format!("scale Deployment {} to 0", place(deployment)),
        Action::ScaleDown {
            namespace: deployment.namespace.clone(),
            deployment: deployment.name.clone(),
        },
        !deployment.runs(),
        running(facts, peer)
            .filter(|_| !holds(facts, deployment, &leases))
            .or(undone(deployment)),
    ));
    for webhooks in facts
        .webhooks
        .iter()
        .filter(|webhooks| webhooks.service == deployment.namespace)
    {
        let text = format!(
            "remove {} {}: {} of its webhooks refuse every write once CAPV has stopped",
            webhooks.kind, webhooks.name, webhooks.fail_closed
        );
        let action = Action::RemoveWebhooks {
            kind: webhooks.kind,
            name: webhooks.name.clone(),
        };
        steps.push(automatic(text, action, false, None));
    }
    let definitions: Vec<&Definition> = facts.definitions.iter().filter(|other| is_of(peer, other)).collect();
    steps.extend(stop_injection(&definitions));
    steps.push(install(facts, &definitions));
    let hold = format!(" --hold-leases {}/{}", deployment.namespace, leases.join(","));
    steps.push(start(facts, peer, hold));
    let notes = vec![
        "the finalizers of CAPV's machines and clusters are Capstan's, too; Capstan takes those of zones and identities off"
            .to_owned(),
    ];
    Way { peer, steps, notes }
}

/// The conversion of Capstan's definitions has the CA of Capstan, which cert-manager would overwrite with that of CAPV.
fn stop_injection(definitions: &[&Definition]) -> Option<Step> {
    let injected = definitions.iter().filter(|definition| definition.injected.is_some());
    let definitions: Vec<String> = injected.map(|definition| definition.name.clone()).collect();
    (!definitions.is_empty()).then(|| {
        let text = format!(
            "remove annotation {INJECT_CA} from {} definitions of CAPV: cert-manager would overwrite the CA of Capstan",
            definitions.len()
        );
        automatic(text, Action::StopInjection { definitions }, false, None)
    })
}

/// A definition cannot lose a version that objects are stored in.
fn install(facts: &Facts, definitions: &[&Definition]) -> Step {
    let own = |namespace: &str| {
        let mut installed = facts.capstan.iter().map(|capstan| capstan.namespace.as_str());
        namespace == facts.capstan_namespace || installed.any(|other| other == namespace)
    };
    let converted = |definition: &&Definition| definition.conversion.as_deref().is_some_and(own);
    let done = !definitions.is_empty() && definitions.iter().all(converted);
    let old = definitions.iter().find_map(|definition| {
        let stored = definition.stored.iter().map(String::as_str);
        let old: Vec<&str> = stored.filter(|version| !VSPHERE_VERSIONS.contains(version)).collect();
        (!old.is_empty()).then(|| {
            format!(
                "{}: status.storedVersions has {}, which Capstan's definition does not have: with CAPV running, write every \
                 object once more, and remove the version from status.storedVersions",
                definition.name,
                old.join(", ")
            )
        })
    });
    Step {
        obstacle: old.filter(|_| !done),
        ..manual(
            "install the definitions: capstan crds --controllers vsphere | kubectl apply --server-side --force-conflicts -f -",
            done,
        )
    }
}

/// Nothing is scaled down: OpenShift's operators would put it back. Its controllers stand by while Capstan holds their leases.
fn machine_api(facts: &Facts, deployment: &Deployment) -> Way {
    let peer = Peer::MachineApi;
    let held = facts
        .leases
        .iter()
        .filter(|lease| peer.leases().contains(&lease.name.as_str()));
    let held: Vec<bool> = held
        .map(|lease| lease.holder.starts_with(HOLDER) && !lease.expired)
        .collect();
    let done = held.len() == peer.leases().len() && held.iter().all(|held| *held);
    let restart = format!(
        "restart the old controllers, so that they give their leases up: kubectl -n {} delete pod -l k8s-app=controller",
        deployment.namespace
    );
    let mut notes = vec!["MachineHealthChecks and the webhooks of machine-api-operator continue".to_owned()];
    if facts.cluster_version_operator {
        notes.push(
            "the cluster version operator puts Deployments back: none is changed, and no override is needed".to_owned(),
        );
    }
    Way {
        peer,
        steps: vec![start(facts, peer, String::new()), manual(restart, done)],
        notes,
    }
}

/// Begins the name of the holder of a peer's leases while a Capstan leads. The rest names the installation of Capstan.
pub const HOLDER: &str = "capstan/";

fn start(facts: &Facts, peer: Peer, more: String) -> Step {
    let command = format!(
        "start Capstan with: capstan run --controllers {}{more}",
        peer.controllers()
    );
    let runs = capstan(facts, peer).any(Deployment::runs);
    manual(command, runs)
}

/// Returns the installations of Capstan that run the controllers that replace the peer.
fn capstan(facts: &Facts, peer: Peer) -> impl Iterator<Item = &Deployment> {
    facts.capstan.iter().filter(move |capstan| capstan.replaces(peer))
}

/// Returns why nothing may be switched over while Capstan runs already.
fn running(facts: &Facts, peer: Peer) -> Option<String> {
    let capstan = capstan(facts, peer).find(|capstan| capstan.runs())?;
    Some(format!(
        "Deployment {} runs already, and both would act: scale it to 0 first, and wait until its pods are gone",
        place(capstan)
    ))
}

/// Returns why nothing may be given back: Capstan runs, and both would act.
pub fn revert_obstacle(facts: &Facts) -> Option<String> {
    facts.peers.keys().find_map(|peer| running(facts, *peer))
}

/// Whether every Capstan that runs holds these leases.
fn holds(facts: &Facts, deployment: &Deployment, leases: &[String]) -> bool {
    let mut running = capstan(facts, Peer::Capv).filter(|capstan| capstan.runs());
    running.all(|capstan| {
        let held = capstan.values("--hold-leases");
        let wanted = |lease: &String| format!("{}/{lease}", deployment.namespace);
        leases.iter().all(|lease| held.contains(&wanted(lease).as_str()))
    })
}

fn is_of(peer: Peer, definition: &Definition) -> bool {
    peer.definitions()
        .iter()
        .any(|prefix| definition.name.starts_with(prefix))
}

fn place(deployment: &Deployment) -> String {
    format!("{}/{}", deployment.namespace, deployment.name)
}

#[cfg(test)]
mod tests;
