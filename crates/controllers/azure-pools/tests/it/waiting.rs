//! What a pool waits for stops only what needs it.

use anyhow::Result;
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{Pool, Still};

const INFRASTRUCTURE: &str = "infrastructure.cluster.x-k8s.io/v1beta1";

/// What a running pool lacks.
#[derive(Clone, Copy)]
enum Lacking {
    Secret,
    SecretName,
    Subnet,
}

fn secret() -> Value {
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "boot" } })
}

fn subnets(role: &str) -> Value {
    let subnets = json!([{ "name": "node-subnet", "role": role }]);
    json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureCluster", "metadata": { "name": "c" },
        "spec": { "networkSpec": { "subnets": subnets } } })
}

fn secret_name(name: Value) -> Value {
    json!({ "spec": { "template": { "spec": { "bootstrap": { "dataSecretName": name } } } } })
}

fn status_follows(still: &Still, count: usize) -> bool {
    let pool = still.pool();
    let ids = pool["spec"]["providerIDList"].as_array().map_or(0, Vec::len);
    pool["status"]["replicas"] == count && ids == count
}

#[rstest]
#[case::a_bootstrap_secret(Lacking::Secret)]
#[case::the_name_of_a_bootstrap_secret(Lacking::SecretName)]
#[case::a_subnet(Lacking::Subnet)]
#[tokio::test(start_paused = true)]
async fn what_a_pool_lacks_stops_no_machine_from_going(#[case] lacking: Lacking) -> Result<()> {
    let (still, _running) = Still::ready(Pool {
        replicas: 4,
        ..Pool::default()
    })
    .await?;
    let before = still.vm_ids();
    match lacking {
        Lacking::Secret => still.delete(secret()).await?,
        Lacking::SecretName => still.patch_machine_pool(secret_name(Value::Null)).await?,
        Lacking::Subnet => still.patch(subnets("bastion")).await?,
    }
    // What was read of the secret last is too old to be used again.
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    still.scale(3).await?;
    still
        .until("three machines", |still| {
            still.instances().len() == 3 && status_follows(still, 3)
        })
        .await;
    let name = still.machines()[0]["metadata"]["name"].clone();
    let machine =
        json!({ "apiVersion": INFRASTRUCTURE, "kind": "AzureMachinePoolMachine", "metadata": { "name": name } });
    still.delete(machine).await?;
    still
        .until("the end of a machine", |still| {
            before.intersection(&still.vm_ids()).count() == 2
                && !still.machines().iter().any(|m| m["metadata"]["name"] == name)
        })
        .await;
    match lacking {
        Lacking::Secret => {
            let mut secret = secret();
            crate::harness::merge(
                &mut secret,
                &json!({ "stringData": { "value": "#cloud-config\n{}\n" } }),
            );
            still.create(secret).await?;
        }
        Lacking::SecretName => still.patch_machine_pool(secret_name(json!("boot"))).await?,
        Lacking::Subnet => still.patch(subnets("node")).await?,
    }
    still.until_ready(3).await;
    assert_eq!(
        before.intersection(&still.vm_ids()).count(),
        2,
        "no machine goes for it"
    );
    assert_eq!(Still::condition(&still.pool(), "Ready")["status"], "True");
    still.assert_settled().await;
    Ok(())
}
