//! Whether a peer acts on the objects of Capstan's controllers, judged by its Deployments.

use super::facts::{Deployment, MACHINE_POOL, Peer};

const ELECTION: &str = "--leader-elect";

/// Returns why Capstan must not act beside this Deployment of a peer.
///
/// `held`: the leases, by namespace and name, without which Capstan does not act anyway. `acted`: Capstan has acted beside the
/// Deployment until now.
pub fn acts(peer: Peer, deployment: &Deployment, held: &[(String, String)], acted: bool) -> Option<String> {
    let Deployment { namespace, name, .. } = deployment;
    if !deployment.runs() {
        return None;
    }
    match peer {
        Peer::Capz if deployment.gate(MACHINE_POOL, true) => Some(format!(
            "{peer} runs machine pools: feature gate {MACHINE_POOL} of Deployment {namespace}/{name} is on; \"capstan adopt \
             --execute\" switches it off, or separate the two by --namespace or --watch-filter"
        )),
        // The pods of another rollout have had the gate off, too.
        Peer::Capz if !deployment.rolled_out && !acted => Some(format!(
            "pods of Deployment {namespace}/{name} may still run machine pools: its rollout is under way"
        )),
        Peer::Capz => None,
        Peer::Capv => {
            let elects = deployment.values(ELECTION).last() != Some(&"false");
            let leases = deployment.leases(peer);
            let is_held = leases
                .iter()
                .all(|lease| held.contains(&(namespace.clone(), lease.clone())));
            (!elects || !is_held).then(|| {
                format!(
                    "{peer} runs: scale Deployment {namespace}/{name} to 0, or hold its lease with --hold-leases \
                     {namespace}/{}",
                    leases.join(",")
                )
            })
        }
        // Capstan holds its leases wherever it finds OpenShift.
        Peer::MachineApi => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const GATE_ON: &[&str] = &["--feature-gates=MachinePool=true"];
    const GATE_OFF: &[&str] = &["--feature-gates=MachinePool=false"];

    #[rstest]
    #[case::the_gate_is_on(Peer::Capz, GATE_ON, 1, true, &[], true, true)]
    #[case::the_gate_is_on_by_default(Peer::Capz, &[], 1, true, &[], true, true)]
    #[case::nothing_runs(Peer::Capz, GATE_ON, 0, true, &[], false, false)]
    #[case::the_gate_is_off(Peer::Capz, GATE_OFF, 1, true, &[], false, false)]
    #[case::old_pods_have_the_gate_on(Peer::Capz, GATE_OFF, 1, false, &[], false, true)]
    #[case::an_upgrade_without_the_gate(Peer::Capz, GATE_OFF, 1, false, &[], true, false)]
    #[case::capv_runs(Peer::Capv, &["--leader-elect"], 1, true, &[], false, true)]
    #[case::capv_is_stopped(Peer::Capv, &[], 0, true, &[], false, false)]
    #[case::its_lease_is_held(Peer::Capv, &["--leader-elect"], 1, true, &["capv-system"], false, false)]
    #[case::its_lease_has_another_name(Peer::Capv, &["--leader-election-id=x"], 1, true, &["capv-system"], false, true)]
    #[case::another_lease_is_held(Peer::Capv, &[], 1, true, &["other"], false, true)]
    #[case::it_has_no_lease(Peer::Capv, &["--leader-elect=false"], 1, true, &["capv-system"], false, true)]
    #[case::openshift(Peer::MachineApi, &[], 1, true, &[], false, false)]
    fn capstan_does_not_act_beside_a_peer_that_acts(
        #[case] peer: Peer,
        #[case] args: &[&str],
        #[case] pods: i32,
        #[case] rolled_out: bool,
        #[case] held: &[&str],
        #[case] acted: bool,
        #[case] expected: bool,
    ) {
        let deployment = Deployment {
            namespace: "capv-system".to_owned(),
            name: peer.deployment().to_owned(),
            replicas: 0,
            pods,
            rolled_out,
            args: args.iter().map(ToString::to_string).collect(),
            operator: None,
        };
        let lease = |namespace: &&str| (namespace.to_string(), "capv-controller-manager-runtime".to_owned());
        let held: Vec<_> = held.iter().map(lease).collect();
        let said = acts(peer, &deployment, &held, acted);
        assert_eq!(said.is_some(), expected, "{said:?}");
    }
}
