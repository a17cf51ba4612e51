//! Machines that are kept together by VM groups and apart by cluster modules.

use std::time::Duration;

use anyhow::{Context, Result};
use capstan_testkit::vcsim::Options;
use capstan_testkit::{Vcsim, vcsim};
use capstan_vsphere::{CloneSpec, DiskMove, Error, Login, MoRef, Trust, Vcenter};
use futures::future::try_join_all;

const PATIENCE: Duration = Duration::from_secs(180);
const MACHINES: usize = 12;

async fn start(options: Options) -> Result<(Vcsim, Vcenter, MoRef)> {
    let sim = vcsim(options).await?;
    let login = Login {
        server: sim.server.clone(),
        username: sim.username.clone(),
        password: sim.password.clone().into(),
        trust: Trust::Ca(sim.ca.clone()),
        tenant: None,
    };
    let vcenter = Vcenter::connect(login, Default::default()).await?;
    let datacenter = vcenter.datacenter(None).await?;
    let cluster = vcenter.cluster(&datacenter, None).await?;
    Ok((sim, vcenter, cluster))
}

async fn clones(vcenter: &Vcenter) -> Result<Vec<MoRef>> {
    let datacenter = vcenter.datacenter(None).await?;
    let template = vcenter.template(&datacenter, "pvscsi").await?;
    let spec = CloneSpec {
        pool: Some(vcenter.resource_pool(&datacenter, None).await?.reference.clone()),
        disk_move: DiskMove::Linked,
        snapshot: template.current_snapshot.clone(),
        ..CloneSpec::default()
    };
    try_join_all((0..MACHINES).map(async |n| {
        let (template, folder) = (&template.reference, &datacenter.vm_folder);
        let task = vcenter.clone_vm(template, folder, &format!("m{n}"), &spec).await?;
        task.wait().await?.context("nothing was made")
    }))
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn many_that_join_a_vm_group_at_once_are_all_in_it_afterwards() -> Result<()> {
    let test = async {
        let host_groups = vec![
            "vms=vms-a,hosts=hosts-a".to_owned(),
            "vms=vms-b,hosts=hosts-b,enabled=false".to_owned(),
        ];
        let options = Options {
            host_groups,
            pools: 0,
            ..Options::default()
        };
        let (sim, vcenter, cluster) = start(options).await?;
        let vms = clones(&vcenter).await?;
        try_join_all(vms.iter().map(|vm| vcenter.join_vm_group(&cluster, "vms-a", vm))).await?;
        sim.admin.drop_sessions().await?;
        vcenter.join_vm_group(&cluster, "vms-a", &vms[0]).await?;
        let groups = vcenter.groups(&cluster).await?;
        let mut members = groups.machines("vms-a").context("no group")?;
        members.sort();
        let mut expected = vms.clone();
        expected.sort();
        assert_eq!(members, expected);
        assert_eq!(groups.machines("vms-b"), Some(Vec::new()));
        assert_eq!(groups.hosts("hosts-a").map(|hosts| hosts.len()), Some(1));
        assert_eq!(groups.rule_is_enabled("vms-a", "hosts-a"), Some(true));
        assert_eq!(groups.rule_is_enabled("vms-b", "hosts-b"), Some(false));
        assert_eq!(groups.rule_is_enabled("vms-a", "hosts-b"), None);
        let missing = vcenter.join_vm_group(&cluster, "none", &vms[0]).await;
        assert!(
            matches!(missing, Err(Error::NotFound { kind: "VM group", .. })),
            "{missing:?}"
        );
        Ok(())
    };
    tokio::time::timeout(PATIENCE, test).await.context("took too long")?
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_takes_its_machines_in_and_who_is_not_taken_in_is_told() -> Result<()> {
    let test = async {
        let options = Options {
            pools: 0,
            ..Options::default()
        };
        let (sim, vcenter, cluster) = start(options).await?;
        assert!(vcenter.cluster_modules().await?.is_empty());
        let vms = clones(&vcenter).await?;
        let module = vcenter.create_cluster_module(&cluster).await?;
        try_join_all(vms.iter().map(|vm| vcenter.add_to_cluster_module(&module, vm))).await?;
        sim.admin.drop_sessions().await?;
        vcenter.add_to_cluster_module(&module, &vms[0]).await?;
        assert_eq!(vcenter.cluster_module_members(&module).await?.len(), MACHINES);
        let stranger = MoRef::vm("vm-of-another-cluster");
        let refused = vcenter.add_to_cluster_module(&module, &stranger).await;
        assert!(
            refused
                .as_ref()
                .is_err_and(|error| error.to_string().contains("compute cluster")),
            "{refused:?}"
        );
        for _ in 0..2 {
            vcenter.remove_from_cluster_module(&module, &vms[0]).await?;
        }
        assert_eq!(vcenter.cluster_module_members(&module).await?.len(), MACHINES - 1);
        for _ in 0..2 {
            vcenter.delete_cluster_module(&module).await?;
        }
        let gone = vcenter.add_to_cluster_module(&module, &vms[0]).await;
        assert!(matches!(gone, Err(Error::NotFound { .. })), "{gone:?}");
        vcenter.remove_from_cluster_module(&module, &vms[0]).await?;
        Ok(())
    };
    tokio::time::timeout(PATIENCE, test).await.context("took too long")?
}
