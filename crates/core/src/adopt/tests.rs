use std::collections::BTreeMap;

use super::*;
use rstest::rstest;

fn deployment(peer: Peer, namespace: &str, args: &[&str]) -> Deployment {
    Deployment {
        namespace: namespace.to_owned(),
        name: peer.deployment().to_owned(),
        replicas: 1,
        pods: 1,
        rolled_out: true,
        args: args.iter().map(ToString::to_string).collect(),
        operator: None,
    }
}

fn facts(peer: Peer, deployment: Deployment) -> Facts {
    Facts {
        peers: BTreeMap::from([(peer, deployment)]),
        capstan_namespace: "capstan-system".to_owned(),
        ..Facts::default()
    }
}

fn capstan(args: &[&str]) -> Vec<Deployment> {
    vec![Deployment {
        namespace: "capstan-vsphere-system".to_owned(),
        name: "capstan".to_owned(),
        replicas: 1,
        pods: 1,
        rolled_out: true,
        args: args.iter().map(ToString::to_string).collect(),
        operator: None,
    }]
}

fn actions(way: &Way) -> Vec<&Action> {
    way.steps.iter().filter_map(|step| step.action.as_ref()).collect()
}

#[rstest]
#[case::not_named(&["--leader-elect"], true)]
#[case::off(&["--feature-gates=A=true,MachinePool=false"], false)]
#[case::on(&["--feature-gates=MachinePool=true"], true)]
#[case::the_last_counts(&["--feature-gates=MachinePool=true,MachinePool=false"], false)]
fn a_gate_is_read_as_the_program_reads_it(#[case] args: &[&str], #[case] expected: bool) {
    assert_eq!(
        deployment(Peer::Capz, "capz-system", args).gate(MACHINE_POOL, true),
        expected
    );
}

#[rstest]
#[case::added(&["--v=0"], &["--v=0", "--feature-gates=MachinePool=false"])]
#[case::changed(&["--feature-gates=MachinePool=true,ASOAPI=true"], &["--feature-gates=ASOAPI=true,MachinePool=false"])]
fn a_gate_is_set_beside_the_others(#[case] args: &[&str], #[case] expected: &[&str]) {
    let args: Vec<String> = args.iter().map(ToString::to_string).collect();
    assert_eq!(with_gate(&args, MACHINE_POOL, false), expected);
}

#[rstest]
#[case::nothing_else_has_changed(&["--feature-gates=ASOAPI=true,MachinePool=false"], &["--feature-gates=MachinePool=true,ASOAPI=true"])]
#[case::the_peer_was_upgraded(
    &["--new-flag", "--feature-gates=MachinePool=false,EdgeZone=false"], &["--new-flag", "--feature-gates=EdgeZone=false,MachinePool=true"])]
#[case::somebody_has_removed_the_gate(&["--v=2"], &["--v=2", "--feature-gates=MachinePool=true"])]
fn a_gate_gets_its_old_value_back_and_the_rest_stays(#[case] now: &[&str], #[case] expected: &[&str]) {
    let owned = |args: &[&str]| -> Vec<String> { args.iter().map(ToString::to_string).collect() };
    let before = owned(&["--feature-gates=MachinePool=true,ASOAPI=true"]);
    assert_eq!(with_gate_of(&before, &owned(now), MACHINE_POOL), expected);
}

#[test]
fn a_cluster_without_peers_has_no_way() {
    assert_eq!(ways(&Facts::default()), Vec::new());
}

/// A cluster of CAPZ with the gate on, a workload identity, and webhooks of pools.
fn capz_with_webhooks(gated: &[&str]) -> Facts {
    let mut facts = facts(
        Peer::Capz,
        deployment(Peer::Capz, "capz-system", &["--feature-gates=MachinePool=true"]),
    );
    facts.workload_identities = vec!["team/wi".to_owned()];
    facts.webhooks = vec![Webhooks {
        kind: WebhookKind::Validating,
        name: "capz-validating-webhook-configuration".to_owned(),
        service: "capz-system".to_owned(),
        fail_closed: 25,
        gated: gated.iter().map(ToString::to_string).collect(),
    }];
    facts
}

#[test]
fn capz_goes_on_without_its_pools_and_loses_the_webhooks_that_it_does_not_answer_any_more_first() {
    let facts = capz_with_webhooks(&["validation.azuremachinepool", "azuremachinepoolmachine.kb.io"]);
    let way = &ways(&facts)[0];
    let [
        Action::DropWebhooks { name, webhooks, .. },
        Action::DisableGate { gate, .. },
    ] = actions(way)[..]
    else {
        panic!("{way:#?}");
    };
    assert_eq!(name, "capz-validating-webhook-configuration");
    assert_eq!(webhooks, &facts.webhooks[0].gated);
    assert_eq!(gate, MACHINE_POOL);
    assert!(
        way.steps[0]
            .text
            .contains("system:serviceaccount:capstan-system:capstan"),
        "{way:#?}"
    );
    assert!(way.steps[3].text.ends_with("--controllers azure-pools"), "{way:#?}");
    assert!(
        way.steps.iter().all(|step| !step.done && step.obstacle.is_none()),
        "{way:#?}"
    );
}

#[test]
fn webhooks_that_refuse_every_write_are_dropped_although_the_gate_is_off_already() {
    let mut facts = capz_with_webhooks(&["validation.azuremachinepool"]);
    let off = deployment(Peer::Capz, "capz-system", &["--feature-gates=MachinePool=false"]);
    facts.peers = BTreeMap::from([(Peer::Capz, off)]);
    facts.capstan = capstan(&["run"]);
    let steps = &ways(&facts)[0].steps;
    let left: Vec<_> = steps
        .iter()
        .filter(|step| step.action.is_some() && !step.done)
        .collect();
    assert!(
        matches!(&left[..], [step] if step.obstacle.is_none() && matches!(step.action, Some(Action::DropWebhooks { .. }))),
        "{left:#?}"
    );
}

#[rstest]
#[case::a_cluster("AzureManagedCluster", 1, true)]
#[case::a_control_plane("AzureManagedControlPlane", 2, true)]
#[case::a_pool("AzureManagedMachinePool", 1, true)]
#[case::none("AzureManagedMachinePool", 0, false)]
#[case::azure_service_operator("AzureASOManagedMachinePool", 1, false)]
fn the_gate_stays_on_while_capz_runs_aks_clusters(#[case] kind: &str, #[case] count: usize, #[case] stays: bool) {
    let mut facts = capz_with_webhooks(&[]);
    facts.objects.insert(kind.to_owned(), count);
    let way = &ways(&facts)[0];
    let obstacle = way.steps.iter().find_map(|step| step.obstacle.as_ref());
    assert_eq!(
        obstacle.is_some_and(|obstacle| obstacle.contains(&format!("{count} {kind}"))),
        stays,
        "{way:#?}"
    );
}

/// The resources of the webhooks of CAPZ 1.26; main.go registers those of the gate inside it.
#[rstest]
#[case("azuremachinepools", true)]
#[case("azuremachinepoolmachines", true)]
#[case("azuremanagedclusters", true)]
#[case("azuremanagedclustertemplates", true)]
#[case("azuremanagedcontrolplanes", true)]
#[case("azuremanagedcontrolplanetemplates", true)]
#[case("azuremanagedmachinepools", true)]
#[case("azuremanagedmachinepooltemplates", true)]
#[case("azureasomanagedclusters", false)]
#[case("azureasomanagedcontrolplanes", false)]
#[case("azureasomanagedmachinepools", false)]
#[case("azureclusters", false)]
#[case("azureclusteridentities", false)]
#[case("azureclustertemplates", false)]
#[case("azuremachines", false)]
#[case("azuremachinetemplates", false)]
fn capz_answers_webhooks_of_pools_and_aks_only_with_the_gate(#[case] resource: &str, #[case] expected: bool) {
    assert_eq!(is_gated(resource), expected);
}

#[test]
fn nothing_is_switched_over_while_capstan_runs_already() {
    let mut capz = facts(Peer::Capz, deployment(Peer::Capz, "capz-system", &[]));
    capz.capstan = capstan(&["run"]);
    let obstacles = |facts: &Facts| {
        ways(facts)[0]
            .steps
            .iter()
            .filter(|step| step.obstacle.is_some())
            .count()
    };
    assert_eq!(obstacles(&capz), 1);
    let mut capv = facts(Peer::Capv, deployment(Peer::Capv, "capv-system", &[]));
    capv.capstan = capstan(&["run"]);
    assert_eq!(obstacles(&capv), 1);
    // One that waits for the lease of CAPV acts only when CAPV does not.
    capv.capstan = capstan(&["run", "--hold-leases=capv-system/capv-controller-manager-runtime"]);
    assert_eq!(obstacles(&capv), 0);
    // Nor is one in the way that runs other controllers.
    capv.capstan = capstan(&["run", "--controllers=openshift,azure-pools"]);
    assert_eq!(obstacles(&capv), 0);
    capv.capstan = capstan(&["run", "--controllers", "vsphere"]);
    assert_eq!(obstacles(&capv), 1);
}

#[rstest]
#[case::runs(1, 1, true)]
#[case::is_about_to_start(1, 0, true)]
#[case::has_a_pod_that_has_not_stopped_yet(0, 1, true)]
#[case::has_stopped(0, 0, false)]
fn a_controller_acts_until_its_last_pod_is_gone(#[case] replicas: i32, #[case] pods: i32, #[case] acts: bool) {
    let mut facts = facts(Peer::Capv, deployment(Peer::Capv, "capv-system", &[]));
    facts.capstan = capstan(&["run"]);
    facts.capstan[0].replicas = replicas;
    facts.capstan[0].pods = pods;
    assert_eq!(revert_obstacle(&facts).is_some(), acts);
    let peer = facts.peers.get_mut(&Peer::Capv).unwrap();
    (peer.replicas, peer.pods) = (replicas, pods);
    let way = &ways(&facts)[0];
    let stopped = |step: &&Step| matches!(step.action, Some(Action::ScaleDown { .. }));
    assert_eq!(
        way.steps.iter().find(stopped).map(|step| step.done),
        Some(!acts),
        "{way:#?}"
    );
}

#[rstest]
#[case::the_old_pod_still_runs_the_pools(false, false)]
#[case::all_pods_are_new(true, true)]
fn the_gate_is_off_once_no_pod_runs_with_it_on(#[case] rolled_out: bool, #[case] done: bool) {
    let mut off = deployment(Peer::Capz, "capz-system", &["--feature-gates=MachinePool=false"]);
    off.rolled_out = rolled_out;
    let way = &ways(&facts(Peer::Capz, off))[0];
    let gate = |step: &&Step| matches!(step.action, Some(Action::DisableGate { .. }));
    assert_eq!(
        way.steps.iter().find(gate).map(|step| step.done),
        Some(done),
        "{way:#?}"
    );
}

#[rstest]
#[case(&["--controllers=a,b"], &["a", "b"])]
#[case(&["--controllers", "a, b", "--v=2"], &["a", "b"])]
#[case(&["--controllers-max=3", "--controllers"], &[])]
#[case(&["--controllers=a", "--controllers=b"], &["a", "b"])]
fn the_values_of_a_flag_are_read_as_the_program_reads_them(#[case] args: &[&str], #[case] expected: &[&str]) {
    assert_eq!(deployment(Peer::Capv, "a", args).values("--controllers"), expected);
}

#[test]
fn capv_stops_after_capstan_may_hold_its_lease_and_before_its_webhooks_go() {
    let mut facts = facts(Peer::Capv, deployment(Peer::Capv, "capv-system", &[]));
    let webhooks = |service: &str| Webhooks {
        kind: WebhookKind::Mutating,
        name: format!("{service}-mutating"),
        service: service.to_owned(),
        fail_closed: 3,
        gated: Vec::new(),
    };
    facts.webhooks = vec![webhooks("capi-system"), webhooks("capv-system")];
    facts.definitions = vec![Definition {
        name: "vspherevms.infrastructure.cluster.x-k8s.io".to_owned(),
        served: vec!["v1beta1".to_owned(), "v1beta2".to_owned()],
        stored: vec!["v1beta1".to_owned(), "v1beta2".to_owned()],
        conversion: Some("capv-system".to_owned()),
        injected: Some("capv-system/capv-serving-cert".to_owned()),
    }];
    let way = &ways(&facts)[0];
    let order: Vec<&str> = actions(way)
        .iter()
        .map(|action| match action {
            Action::GrantLeases { .. } => "grant",
            Action::ScaleDown { .. } => "scale",
            Action::RemoveWebhooks { name, .. } => name.as_str(),
            Action::DropWebhooks { .. } => "drop",
            Action::StopInjection { .. } => "injection",
            Action::DisableGate { .. } => "gate",
        })
        .collect();
    assert_eq!(order, ["grant", "scale", "capv-system-mutating", "injection"]);
    assert!(
        way.steps
            .iter()
            .any(|step| step.text.contains("capstan crds") && !step.done),
        "{way:#?}"
    );
    let last = &way.steps.last().unwrap().text;
    assert!(
        last.contains("--hold-leases capv-system/capv-controller-manager-runtime"),
        "{last}"
    );
}

#[test]
fn openshift_changes_nothing_and_is_done_once_capstan_holds_the_leases() {
    let mut facts = facts(
        Peer::MachineApi,
        deployment(Peer::MachineApi, "openshift-machine-api", &[]),
    );
    facts.cluster_version_operator = true;
    assert_eq!(actions(&ways(&facts)[0]), Vec::<&Action>::new());
    let lease = |name: &&str| Lease {
        namespace: "openshift-machine-api".to_owned(),
        name: (*name).to_owned(),
        holder: format!("{HOLDER}capstan-system/capstan"),
        expired: false,
    };
    facts.leases = Peer::MachineApi.leases().iter().map(lease).collect();
    assert!(ways(&facts)[0].steps[1].done);
    for other in ["somebody", "capstan-like"] {
        facts.leases[1].holder = other.to_owned();
        assert!(!ways(&facts)[0].steps[1].done, "{other}");
    }
}

#[rstest]
#[case::of_capv_1_16(&["v1beta1", "v1beta2"], Some("capv-system"), false, false)]
#[case::never_stored_anew(&["v1alpha4", "v1beta1"], None, false, true)]
#[case::one_version_has_no_conversion(&["v1beta1"], None, false, false)]
#[case::of_capstan(&["v1beta1", "v1beta2"], Some("capstan-system"), true, false)]
fn definitions_are_installed_unless_objects_are_stored_in_a_version_that_goes(
    #[case] stored: &[&str],
    #[case] conversion: Option<&str>,
    #[case] done: bool,
    #[case] obstacle: bool,
) {
    let mut facts = facts(Peer::Capv, deployment(Peer::Capv, "capv-system", &[]));
    facts.definitions = vec![Definition {
        name: "vspherevms.infrastructure.cluster.x-k8s.io".to_owned(),
        served: Vec::new(),
        stored: stored.iter().map(ToString::to_string).collect(),
        conversion: conversion.map(str::to_owned),
        injected: None,
    }];
    let way = &ways(&facts)[0];
    let step = way
        .steps
        .iter()
        .find(|step| step.text.contains("capstan crds"))
        .unwrap();
    assert_eq!((step.done, step.obstacle.is_some()), (done, obstacle), "{way:#?}");
}

#[rstest]
#[case::capz(Peer::Capz, &["--feature-gates=MachinePool=true"], true)]
#[case::capz_with_the_gate_off(Peer::Capz, &["--feature-gates=MachinePool=false"], false)]
#[case::capv(Peer::Capv, &[], true)]
fn nothing_is_switched_that_an_operator_would_put_back(
    #[case] peer: Peer,
    #[case] args: &[&str],
    #[case] in_the_way: bool,
) {
    let mut found = deployment(peer, "peer-system", args);
    found.operator = Some(Operator::ArgoCd);
    let way = &ways(&facts(peer, found))[0];
    let obstacle = way.steps.iter().find_map(|step| step.obstacle.as_ref());
    let said = obstacle.is_some_and(|obstacle| obstacle.contains("Argo CD puts Deployment peer-system/"));
    assert_eq!(said, in_the_way, "{way:#?}");
}

#[rstest]
#[case::of_the_cluster_api_operator(&[], &["operator.cluster.x-k8s.io/v1alpha2"], Some(Operator::ClusterApi))]
#[case::of_flux(&["a", "kustomize.toolkit.fluxcd.io/name"], &[], Some(Operator::Flux))]
#[case::of_olm(&["olm.owner"], &[], Some(Operator::Olm))]
#[case::of_nobody(&["app"], &["apps/v1"], None)]
fn an_operator_is_known_by_what_it_leaves(
    #[case] keys: &[&str],
    #[case] owners: &[&str],
    #[case] expected: Option<Operator>,
) {
    assert_eq!(Operator::of(keys.iter().copied(), owners.iter().copied()), expected);
}

#[test]
fn a_second_instance_of_a_peer_is_stopped_first() {
    let mut facts = facts(Peer::Capv, deployment(Peer::Capv, "capv-system", &[]));
    facts.more_peers = vec![(Peer::Capv, deployment(Peer::Capv, "capv-two", &[]))];
    let step = &ways(&facts)[0].steps[0];
    assert!(
        step.obstacle
            .as_ref()
            .is_some_and(|obstacle| obstacle.contains("capv-two/")),
        "{step:?}"
    );
    facts.more_peers[0].1.replicas = 0;
    facts.more_peers[0].1.pods = 0;
    assert_eq!(ways(&facts)[0].steps[0].obstacle, None);
}

#[test]
fn a_pool_that_waits_for_a_secret_of_capz_is_in_the_way() {
    let mut facts = facts(Peer::Capz, deployment(Peer::Capz, "capz-system", &[]));
    facts.waiting_for_azure_json = vec![Place {
        namespace: "team".to_owned(),
        name: "workers".to_owned(),
    }];
    let step = &ways(&facts)[0].steps[0];
    let said = step.obstacle.as_ref();
    assert!(
        said.is_some_and(|said| said.contains("team/workers-azure-json")),
        "{step:?}"
    );
    assert!(step.text.ends_with("--azure-json"), "{step:?}");
    // Capstan will make it.
    let installed = Deployment {
        replicas: 0,
        args: vec!["run".to_owned(), "--azure-json".to_owned()],
        ..Deployment::default()
    };
    facts.capstan = vec![installed];
    assert_eq!(ways(&facts)[0].steps[0].obstacle, None);
}
