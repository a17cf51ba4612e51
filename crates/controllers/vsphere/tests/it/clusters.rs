//! Clusters and their vCenter: identities, credentials, failure domains, and the Nodes of machines that go.

use crate::world;

use anyhow::Result;
use capstan_api::vsphere::{
    VSphereCluster, VSphereClusterIdentity, VSphereDeploymentZone, VSphereFailureDomain, VSphereMachine, VSphereVM,
};
use capstan_testkit::vcsim::{Fault, Options};
use k8s_openapi::api::core::v1::{Namespace, Node, Secret};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use world::{World, spec};

fn available(text: &'static str) -> impl Fn(&VSphereCluster) -> bool {
    move |cluster| {
        let status = cluster.status.clone().unwrap_or_default();
        let said = status
            .conditions
            .iter()
            .any(|c| c.message.as_deref().unwrap_or_default().contains(text));
        if text.is_empty() { status.ready } else { said }
    }
}

async fn merge<K>(api: &Api<K>, name: &str, patch: Value) -> Result<()>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_serves_the_namespaces_that_it_allows_and_no_other() -> Result<()> {
    let world = World::start_alone(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let name = format!("identity-{}", world.namespace);
    let home = Api::<Secret>::namespaced(world.client.clone(), &world.namespace);
    let identity: VSphereClusterIdentity = serde_json::from_value(json!({
        "metadata": {"name": name}, "spec": {"secretName": "vcenter", "allowedNamespaces": {"selector": {"matchLabels": {"vcenter": name}}}},
    }))?;
    let identities: Api<VSphereClusterIdentity> = Api::all(world.client.clone());
    identities.create(&PostParams::default(), &identity).await?;
    assert!(home.get_opt("vcenter").await?.is_some());
    let clusters = world.api::<VSphereCluster>();
    let by_identity = json!({"spec": {"identityRef": {"kind": "VSphereClusterIdentity", "name": name}}});
    merge(&clusters, "c", by_identity).await?;
    world
        .until::<VSphereCluster>("c", available("does not allow namespace"))
        .await?;
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    merge(
        &namespaces,
        &world.namespace,
        json!({"metadata": {"labels": {"vcenter": name}}}),
    )
    .await?;
    world
        .until::<VSphereCluster>("c", available("may not be used for server"))
        .await?;
    let servers = json!({"metadata": {"annotations": {"capstan.dev/allowed-servers": world.vcsim.server}}});
    merge(&identities, &name, servers).await?;
    let settled = |cluster: &VSphereCluster| {
        let conditions = cluster.status.clone().unwrap_or_default().conditions;
        conditions
            .iter()
            .any(|c| c.type_ == "VCenterAvailable" && c.status == "True")
    };
    world.until::<VSphereCluster>("c", settled).await?;
    // Without the identity and its Secret no machine of the cluster could be deleted in vCenter.
    let protected = |secret: &Secret| {
        let mut owners = secret.owner_references().iter();
        owners.any(|owner| owner.kind == "VSphereClusterIdentity") && secret.finalizers().len() == 1
    };
    world.until::<Secret>("vcenter", protected).await?;
    identities.delete(&name, &Default::default()).await?;
    let text = world.event_of_all(&name, "StillInUse").await?;
    assert!(text.contains(&format!("{}/c", world.namespace)), "{text}");
    assert!(protected(&home.get("vcenter").await?));
    let by_secret = json!({"spec": {"identityRef": {"kind": "Secret", "name": "vcenter"}}});
    merge(&clusters, "c", by_secret).await?;
    let gone =
        kube::runtime::wait::await_condition(identities, &name, |i: Option<&VSphereClusterIdentity>| i.is_none());
    tokio::time::timeout(world::PATIENCE, gone).await??;
    let of_cluster = |secret: &Secret| holders(secret) == ["c"] && secret.finalizers().len() == 1;
    world.until::<Secret>("vcenter", of_cluster).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_told_and_a_right_one_taken_up() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let secrets = world.api::<Secret>();
    merge(&secrets, "vcenter", json!({"stringData": {"password": "wrong"}})).await?;
    world
        .until::<VSphereCluster>("c", available("refused the login"))
        .await?;
    let password = world.vcsim.password.clone();
    merge(&secrets, "vcenter", json!({"stringData": {"password": password}})).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vcenter_that_answers_no_more_is_told_and_one_that_answers_again_too() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let available = |cluster: &VSphereCluster, answers: &str| {
        let conditions = cluster.status.clone().unwrap_or_default().conditions;
        let mut found = conditions.iter().filter(|c| c.type_ == "VCenterAvailable");
        found.any(|c| c.status == answers)
    };
    let clusters = world.api::<VSphereCluster>();
    let away = Fault {
        method: "CurrentTime".into(),
        kind: "status".into(),
        status: 503,
        message: "Service Unavailable".into(),
        ..Fault::default()
    };
    for answers in ["True", "False", "True"] {
        match answers {
            "False" => world.vcsim.admin.inject(&away).await?,
            _ => world.vcsim.admin.clear_faults().await?,
        }
        // Whoever marks a cluster wants it to be looked at; else that is done every ten minutes.
        let marked = async {
            for look in 0.. {
                let mark = json!({"metadata": {"annotations": {"look": format!("{answers}-{look}")}}});
                merge(&clusters, "c", mark).await?;
                if available(&clusters.get("c").await?, answers) {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            }
            anyhow::Ok(())
        };
        let told = tokio::time::timeout(world::PATIENCE, marked).await;
        told.map_err(|_| anyhow::anyhow!("VCenterAvailable does not become {answers}"))??;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_goes_where_its_failure_domain_says_and_takes_its_node_along() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let zone = format!("zone-{}", world.namespace);
    let side = |kind: &str| json!({"name": "a", "type": kind, "tagCategory": "c", "autoConfigure": true});
    let domain: VSphereFailureDomain = serde_json::from_value(json!({
        "metadata": {"name": zone},
        "spec": {"region": side("Datacenter"), "zone": side("ComputeCluster"), "topology": {
            "datacenter": "DC0", "computeCluster": "DC0_C0", "datastore": "LocalDS_1", "networks": ["DC0_DVPG0"],
        }},
    }))?;
    let wanted: VSphereDeploymentZone = serde_json::from_value(json!({
        "metadata": {"name": zone, "labels": {"zone": zone}},
        "spec": {"server": world.vcsim.server, "failureDomain": zone, "controlPlane": true,
            "placementConstraint": {"resourcePool": "/DC0/host/DC0_C0/Resources", "folder": "/DC0/vm"}},
    }))?;
    let zones: Api<VSphereDeploymentZone> = Api::all(world.client.clone());
    Api::<VSphereFailureDomain>::all(world.client.clone())
        .create(&PostParams::default(), &domain)
        .await?;
    zones.create(&PostParams::default(), &wanted).await?;
    let select = json!({"spec": {"failureDomainSelector": {"matchLabels": {"zone": zone}}}});
    merge(&world.api::<VSphereCluster>(), "c", select).await?;
    let offered = zone.clone();
    let offers = move |cluster: &VSphereCluster| {
        cluster
            .status
            .as_ref()
            .is_some_and(|status| status.failure_domains.contains_key(&offered))
    };
    world.until::<VSphereCluster>("c", offers).await?;

    let name = format!("m-{}", world.namespace);
    let mut placed = spec("pvscsi", json!({"failureDomain": zone}));
    placed["datastore"] = json!("LocalDS_0");
    let kubeconfig = tokio::fs::read_to_string(world.plane.kubeconfig()).await?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "c-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
        "stringData": {"value": kubeconfig}, "type": "cluster.x-k8s.io/secret",
    });
    world.create::<Secret>(secret).await?;
    world.machine(&name, placed).await?;
    let (_, _, info) = world.ready(&name).await?;
    assert!(info.path.starts_with("[LocalDS_1]"), "{}", info.path);
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name}, "spec": {"providerID": format!("vsphere://{}", info.bios_uuid)},
    }))?;
    let nodes: Api<Node> = Api::all(world.client.clone());
    nodes.create(&PostParams::default(), &node).await?;
    world.delete(&name).await?;
    assert!(
        nodes.get_opt(&name).await?.is_none(),
        "the node of a machine that is gone"
    );
    assert!(world.api::<VSphereMachine>().get_opt(&name).await?.is_none());
    zones.delete(&zone, &Default::default()).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_kubeconfig_is_reported_on_the_cluster_with_its_field_and_the_machine_still_goes() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let good = tokio::fs::read_to_string(world.plane.kubeconfig()).await?;
    let hostile = good.replace("user:\n", "user:\n    exec: {apiVersion: v1, command: touch}\n");
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "c-kubeconfig", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
        "stringData": {"value": hostile}, "type": "cluster.x-k8s.io/secret",
    });
    world.create::<Secret>(secret).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    world.delete("m").await?;
    let refused = world
        .until::<VSphereCluster>("c", condition("WorkloadClusterAvailable", "False"))
        .await?;
    let conditions = refused.status.unwrap_or_default().conditions;
    let text: Vec<_> = conditions.iter().filter_map(|c| c.message.clone()).collect();
    assert!(text.iter().any(|text| text.contains("users[].user.exec")), "{text:?}");
    merge(
        &world.api::<Secret>(),
        "c-kubeconfig",
        json!({"stringData": {"value": good}}),
    )
    .await?;
    let absent = |cluster: &VSphereCluster| {
        let conditions = cluster.status.clone().unwrap_or_default().conditions;
        conditions.iter().all(|c| c.type_ != "WorkloadClusterAvailable")
    };
    world.until::<VSphereCluster>("c", absent).await?;
    Ok(())
}

/// Whether a cluster has a condition with this status.
fn condition(type_: &'static str, status: &'static str) -> impl Fn(&VSphereCluster) -> bool {
    move |cluster| {
        let conditions = cluster.status.clone().unwrap_or_default().conditions;
        conditions.iter().any(|c| c.type_ == type_ && c.status == status)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_verified_unless_a_flag_says_otherwise_and_a_condition_reports_that() -> Result<()> {
    let mut world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let clusters = world.api::<VSphereCluster>();
    merge(&clusters, "c", json!({"spec": {"thumbprint": null}})).await?;
    world.until::<VSphereCluster>("c", available("is not trusted")).await?;
    let ca = world.vcsim.ca.clone();
    merge(&world.api::<Secret>(), "vcenter", json!({"stringData": {"ca.crt": ca}})).await?;
    world
        .until::<VSphereCluster>("c", condition("VCenterAvailable", "True"))
        .await?;
    let status = clusters.get("c").await?.status.unwrap_or_default();
    assert!(
        !status
            .conditions
            .iter()
            .any(|c| c.type_ == "VCenterCertificateVerified")
    );
    world.crash().await;
    merge(&world.api::<Secret>(), "vcenter", json!({"data": {"ca.crt": null}})).await?;
    world.credentials.insecure = true;
    world.run(Default::default()).await?;
    world
        .until::<VSphereCluster>("c", condition("VCenterCertificateVerified", "False"))
        .await?;
    world
        .until::<VSphereCluster>("c", available("--insecure-vcenter"))
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_cannot_name_another_server_than_its_cluster() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    world
        .machine("m", spec("pvscsi", json!({"server": "attacker.example"})))
        .await?;
    let refused = |machine: &VSphereMachine| {
        let conditions = machine.status.clone().unwrap_or_default().conditions;
        let mut messages = conditions.iter().filter_map(|c| c.message.as_deref());
        messages.any(|text| text.contains("spec.server \"attacker.example\" is not the vCenter"))
    };
    world.until::<VSphereMachine>("m", refused).await?;
    assert!(world.api::<VSphereVM>().get_opt("m").await?.is_none());
    let vm = json!({
        "kind": "VSphereVM",
        "metadata": {"name": "by-hand", "labels": {"cluster.x-k8s.io/cluster-name": "c"}},
        "spec": spec("pvscsi", json!({"server": "attacker.example"})),
    });
    world.create::<VSphereVM>(vm).await?;
    world
        .condition_of_vm("by-hand", "spec.server \"attacker.example\"")
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_more_than_a_host_and_a_port_is_refused_with_field_and_value() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let clusters = world.api::<VSphereCluster>();
    merge(&clusters, "c", json!({"spec": {"server": "http://10.0.0.5:2379/x?y="}})).await?;
    let refused = available("spec.server: Invalid value: \"http://10.0.0.5:2379/x?y=\"");
    world.until::<VSphereCluster>("c", refused).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_cannot_sign_in_does_not_keep_a_zone_from_the_next_one() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let wrong = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "wrong"},
        "stringData": {"username": world.vcsim.username, "password": "wrong"},
    });
    world.create::<Secret>(wrong).await?;
    let first = json!({
        "kind": "VSphereCluster", "metadata": {"name": "a"},
        "spec": {
            "server": world.vcsim.server, "thumbprint": world.vcsim.thumbprint,
            "identityRef": {"kind": "Secret", "name": "wrong"},
        },
    });
    world.create::<VSphereCluster>(first).await?;
    let name = format!("next-{}", world.namespace);
    let side = |kind: &str| json!({"name": name, "type": kind, "tagCategory": kind, "autoConfigure": true});
    let domain: VSphereFailureDomain = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"region": side("Datacenter"), "zone": side("ComputeCluster"), "topology": {
            "datacenter": "DC0", "computeCluster": "DC0_C0",
        }},
    }))?;
    let zone: VSphereDeploymentZone = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"server": world.vcsim.server, "failureDomain": name, "placementConstraint": {}},
    }))?;
    let params = PostParams::default();
    Api::all(world.client.clone()).create(&params, &domain).await?;
    Api::all(world.client.clone()).create(&params, &zone).await?;
    assert!(world.zone_says(&name, "").await?);
    assert!(
        world.vcsim.admin.counters().await?["Login"] >= 2,
        "the first cluster was tried"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_owned_by_its_cluster_and_outlives_a_deletion_until_the_machines_are_gone() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let cluster = world.until::<VSphereCluster>("c", available("")).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let uid = cluster.metadata.uid.clone();
    let owned = move |secret: &Secret| {
        let mut owners = secret.metadata.owner_references.iter().flatten();
        let kept = secret
            .metadata
            .finalizers
            .as_ref()
            .is_some_and(|finalizers| !finalizers.is_empty());
        kept && owners.any(|owner| owner.kind == "VSphereCluster" && Some(&owner.uid) == uid.as_ref())
    };
    world.until::<Secret>("vcenter", owned).await?;
    world.api::<Secret>().delete("vcenter", &Default::default()).await?;
    world.delete("m").await?;
    world.api::<VSphereCluster>().delete("c", &Default::default()).await?;
    world.gone::<VSphereCluster>("c").await?;
    world.gone::<Secret>("vcenter").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_thumbprint_of_the_cluster_reaches_its_machines() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let renewed = world.vcsim.thumbprint_sha256.clone();
    merge(
        &world.api::<VSphereCluster>(),
        "c",
        json!({"spec": {"thumbprint": renewed}}),
    )
    .await?;
    let reached = move |vm: &VSphereVM| vm.spec.clone_spec.thumbprint.as_ref() == Some(&renewed);
    world.until::<VSphereVM>("m", reached).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_thumbprint_of_the_cluster_reaches_a_machine_that_is_being_deleted() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    world.machine("m", spec("pvscsi", json!({}))).await?;
    world.ready("m").await?;
    let (clusters, right) = (world.api::<VSphereCluster>(), world.vcsim.thumbprint.clone());
    let old = ["00"; 20].join(":");
    merge(&clusters, "c", json!({"spec": {"thumbprint": old}})).await?;
    let reached = move |vm: &VSphereVM| vm.spec.clone_spec.thumbprint.as_ref() == Some(&old);
    world.until::<VSphereVM>("m", reached).await?;
    let machines = world.api::<VSphereMachine>();
    machines.delete("m", &Default::default()).await?;
    world.condition_of_vm("m", "thumbprint").await?;
    merge(&clusters, "c", json!({"spec": {"thumbprint": right}})).await?;
    world.gone::<VSphereMachine>("m").await
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_belong_to_nobody_go_when_they_are_deleted() -> Result<()> {
    let world = World::start(Options::default()).await?;
    let machine: VSphereMachine = serde_json::from_value(json!({
        "metadata": {"name": "alone", "finalizers": ["vspheremachine.infrastructure.cluster.x-k8s.io"]},
        "spec": spec("pvscsi", json!({})),
    }))?;
    let cluster: VSphereCluster = serde_json::from_value(json!({
        "metadata": {"name": "alone", "finalizers": ["vspherecluster.infrastructure.cluster.x-k8s.io"]},
        "spec": {"server": "vc.example.com"},
    }))?;
    let (machines, clusters) = (world.api::<VSphereMachine>(), world.api::<VSphereCluster>());
    machines.create(&Default::default(), &machine).await?;
    clusters.create(&Default::default(), &cluster).await?;
    machines.delete("alone", &Default::default()).await?;
    clusters.delete("alone", &Default::default()).await?;
    world.gone::<VSphereMachine>("alone").await?;
    world.gone::<VSphereCluster>("alone").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_for_another_purpose_stays_unowned_and_survives_its_cluster() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    world
        .until::<Secret>("vcenter", |secret| holders(secret) == ["c"])
        .await?;
    let tls = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "type": "kubernetes.io/tls",
        "stringData": {"tls.crt": "certificate", "tls.key": "key"},
    });
    world.create::<Secret>(tls).await?;
    let clusters = world.api::<VSphereCluster>();
    let named = json!({"spec": {"identityRef": {"kind": "Secret", "name": "tls"}}});
    merge(&clusters, "c", named).await?;
    world
        .until::<VSphereCluster>("c", available("cannot be used as an identity"))
        .await?;
    let released = |secret: &Secret| holders(secret).is_empty() && secret.finalizers().is_empty();
    world.until::<Secret>("vcenter", released).await?;
    clusters.delete("c", &Default::default()).await?;
    world.gone::<VSphereCluster>("c").await?;
    let tls = world.api::<Secret>().get("tls").await?;
    assert!(released(&tls), "{:?}", tls.metadata);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_of_two_clusters_is_kept_until_the_second_is_gone() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let first = world.api::<VSphereCluster>().get("c").await?;
    let second = json!({
        "kind": "VSphereCluster",
        "metadata": {"name": "d", "ownerReferences": first.metadata.owner_references},
        "spec": {
            "server": world.vcsim.server, "thumbprint": world.vcsim.thumbprint,
            "identityRef": {"kind": "Secret", "name": "vcenter"},
        },
    });
    world.create::<VSphereCluster>(second).await?;
    let both = |secret: &Secret| holders(secret) == ["c", "d"];
    world.until::<Secret>("vcenter", both).await?;
    let (clusters, secrets) = (world.api::<VSphereCluster>(), world.api::<Secret>());
    clusters.delete("c", &Default::default()).await?;
    world.gone::<VSphereCluster>("c").await?;
    let secret = secrets.get("vcenter").await?;
    assert_eq!((holders(&secret), secret.finalizers().len()), (vec!["d".to_owned()], 1));
    clusters.delete("d", &Default::default()).await?;
    world.gone::<VSphereCluster>("d").await?;
    // The garbage collector may have deleted the Secret with its last cluster.
    let left = secrets.get_opt("vcenter").await?;
    assert!(left.is_none_or(|secret| secret.finalizers().is_empty()));
    Ok(())
}

/// Returns the VSphereClusters that own a Secret.
fn holders(secret: &Secret) -> Vec<String> {
    let owners = secret.owner_references().iter();
    let clusters = owners.filter(|owner| owner.kind == "VSphereCluster");
    let mut names: Vec<String> = clusters.map(|owner| owner.name.clone()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_waits_for_vms_that_have_no_machine_before_it_releases_its_secret() -> Result<()> {
    let world = World::start(Options::default()).await?;
    world.until::<VSphereCluster>("c", available("")).await?;
    let vm = json!({
        "kind": "VSphereVM",
        "metadata": {
            "name": "left", "labels": {"cluster.x-k8s.io/cluster-name": "c"}, "finalizers": ["example.com/held"],
        },
        "spec": spec("pvscsi", json!({"server": "attacker.example"})),
    });
    world.create::<VSphereVM>(vm).await?;
    world.condition_of_vm("left", "spec.server").await?;
    world.api::<VSphereCluster>().delete("c", &Default::default()).await?;
    world.api::<VSphereVM>().delete("left", &Default::default()).await?;
    // The finalizer of the test is the last one: Capstan has nothing to delete in vCenter.
    let released = |vm: &VSphereVM| vm.finalizers() == ["example.com/held"];
    world.until::<VSphereVM>("left", released).await?;
    // Whoever releases this cluster has reconciled the other one before.
    let later = json!({
        "kind": "VSphereCluster",
        "metadata": {"name": "later", "finalizers": ["vspherecluster.infrastructure.cluster.x-k8s.io"]},
        "spec": {"server": "vc.example.com"},
    });
    world.create::<VSphereCluster>(later).await?;
    world
        .api::<VSphereCluster>()
        .delete("later", &Default::default())
        .await?;
    world.gone::<VSphereCluster>("later").await?;
    assert!(world.api::<VSphereCluster>().get_opt("c").await?.is_some());
    assert_eq!(world.api::<Secret>().get("vcenter").await?.finalizers().len(), 1);
    merge(
        &world.api::<VSphereVM>(),
        "left",
        json!({"metadata": {"finalizers": null}}),
    )
    .await?;
    world.gone::<VSphereCluster>("c").await
}
