//! The Secret `<pool>-azure-json`: who gets one, with what in it, and which one is left alone.

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_azure_pools::Options;
use capstan_core::interceptor::Interceptors;
use http::Method;
use rstest::rstest;
use serde_json::{Value, json};

use crate::still::{NAME, NAMESPACE, Pool, Running, Still};

const IDENTITY: &str = "/resourceGroups/capstan/providers/Microsoft.ManagedIdentity/userAssignedIdentities/nodes";

fn start(still: &Still) -> Result<Running> {
    let options = Options {
        azure_json: true,
        ..Options::default()
    };
    still.start_with(Interceptors::default(), options)
}

fn secret(still: &Still) -> Value {
    let name = format!("{NAME}-azure-json");
    let mut secrets = still.server.objects("secrets").into_iter();
    secrets
        .find(|secret| secret["metadata"]["name"] == name.as_str())
        .unwrap_or_default()
}

/// Returns the settings in the Secret, which are the same under all of its keys.
fn settings(still: &Still) -> Value {
    let data = secret(still)["data"].clone();
    let keys = ["control-plane-azure.json", "worker-node-azure.json", "azure.json"];
    assert!(
        keys.iter()
            .all(|key| data[key] == data[keys[0]] && !data[key].is_null()),
        "{data}"
    );
    let text = STANDARD.decode(data["azure.json"].as_str().unwrap()).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Makes a pool without bootstrap data, as it is before its KubeadmConfig finds the Secret.
async fn waiting(object: Value) -> Result<Still> {
    let still = Still::new(Pool {
        object,
        ..Pool::default()
    })
    .await?;
    let none = json!({ "spec": { "template": { "spec": { "bootstrap": { "dataSecretName": null } } } } });
    still.patch_machine_pool(none).await?;
    Ok(still)
}

#[tokio::test(start_paused = true)]
async fn a_pool_gets_the_settings_before_it_has_bootstrap_data() -> Result<()> {
    let still = waiting(json!({})).await?;
    let running = start(&still)?;
    still.until("the Secret", |still| !secret(still).is_null()).await;
    let (made, found) = (secret(&still), settings(&still));
    let azure = &still.azure;
    for (field, value) in [
        ("tenantId", azure.tenant.as_str()),
        ("subscriptionId", &azure.subscription),
        ("aadClientId", &azure.client_id),
        ("aadClientSecret", &azure.client_secret),
        ("vnetName", "capstan-vnet"),
        ("subnetName", "node-subnet"),
    ] {
        assert_eq!(found[field], value, "{field}");
    }
    assert_eq!(made["metadata"]["labels"], json!({ "c": "owned" }));
    assert_eq!(
        made["metadata"]["ownerReferences"][0]["uid"],
        still.pool()["metadata"]["uid"]
    );
    let warned = |still: &Still| {
        let events = still.server.objects("events");
        events.iter().any(|event| event["reason"] == "VMIdentityNone")
    };
    still.until("the warning", warned).await;

    // A new password reaches the nodes that come; a change by hand is undone.
    let password = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "azure" },
        "stringData": { "clientSecret": "another" } });
    still.patch(password).await?;
    still
        .until("the new password", |still| {
            settings(still)["aadClientSecret"] == "another"
        })
        .await;
    let emptied = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": format!("{NAME}-azure-json") },
        "data": { "azure.json": "e30=" } });
    still.patch(emptied).await?;
    still
        .until("the old content", |still| {
            secret(still)["data"] != json!({}) && secret(still)["data"]["azure.json"] != "e30="
        })
        .await;
    drop(running);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn without_the_flag_no_secret_is_made() -> Result<()> {
    let still = Still::new(Pool::default()).await?;
    let _running = still.start()?;
    still.until_ready(3).await;
    assert!(secret(&still).is_null());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn nodes_with_an_identity_of_their_own_get_its_client_id_and_no_password() -> Result<()> {
    let still = waiting(json!({})).await?;
    let id = format!("/subscriptions/{}{IDENTITY}", still.azure.subscription);
    let body = json!({ "location": "eastus", "properties": { "clientId": "of-the-nodes" } });
    let made = still.azure.direct(Method::PUT, &id, body);
    assert!(made.status.is_success(), "{}", made.body);
    let identity =
        json!({ "identity": "UserAssigned", "userAssignedIdentities": [{ "providerID": format!("azure://{id}") }] });
    still.patch_pool(json!({ "spec": identity })).await?;
    let _running = start(&still)?;
    still.until("the Secret", |still| !secret(still).is_null()).await;
    let found = settings(&still);
    assert_eq!(found["userAssignedIdentityID"], "of-the-nodes");
    assert!(
        found["useManagedIdentityExtension"] == true && found.get("aadClientSecret").is_none(),
        "{found}"
    );
    Ok(())
}

#[rstest]
#[case::of_the_user(json!({}))]
#[case::of_another_cluster(json!({ "labels": { "other": "owned" } }))]
#[tokio::test(start_paused = true)]
async fn a_secret_of_somebody_else_stays_as_it_is(#[case] metadata: Value) -> Result<()> {
    let still = waiting(json!({})).await?;
    let mut theirs =
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": { "azure.json": "e30=" } });
    theirs["metadata"]["name"] = json!(format!("{NAME}-azure-json"));
    still.create(theirs).await?;
    let before = secret(&still);
    let _running = start(&still)?;
    // Long enough for several observations.
    tokio::time::sleep(std::time::Duration::from_secs(3600)).await;
    assert_eq!(secret(&still), before);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_password_of_another_namespace_is_not_copied() -> Result<()> {
    let still = waiting(json!({})).await?;
    let elsewhere = json!({ "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureClusterIdentity",
        "metadata": { "name": "sp" }, "spec": { "clientSecret": { "name": "azure", "namespace": "platform" } } });
    still.patch(elsewhere).await?;
    let _running = start(&still)?;
    let refused = |still: &Still| {
        let events = still.server.objects("events");
        events.iter().any(|event| {
            let message = event["message"].as_str().unwrap_or_default();
            event["reason"] == "ReconcileFailed"
                && message.contains("which is in another namespace: set SystemAssigned or UserAssigned")
        })
    };
    still.until("the refusal", refused).await;
    assert!(secret(&still).is_null());
    // With an identity of the nodes there is nothing to copy.
    still
        .patch_pool(json!({ "spec": { "identity": "SystemAssigned" } }))
        .await?;
    still.until("the Secret", |still| !secret(still).is_null()).await;
    assert!(settings(&still).get("aadClientSecret").is_none());
    assert_eq!(secret(&still)["metadata"]["namespace"], NAMESPACE);
    Ok(())
}
