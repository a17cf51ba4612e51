//! Every type of AzureClusterIdentity becomes a credential, or a reason that names what to change.

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_api::azure::AzureCluster;
use capstan_azure::Credential;
use capstan_azure_pools::SignIn;
use capstan_sim::azure::Config;
use rstest::rstest;
use serde_json::{Value, json};

use crate::harness::merge;
use crate::still::{NAMESPACE, Still};

const MODERN: &str = include_str!("../../../../azure/src/certificate/fixtures/modern.pfx.txt");
const LEGACY: &str = include_str!("../../../../azure/src/certificate/fixtures/legacy.pfx.txt");
const PEM: &str = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";

fn base64(text: &str) -> String {
    STANDARD.encode(text)
}

/// A Secret's value that is the file itself.
fn file(pfx: &str) -> String {
    pfx.replace('\n', "")
}

async fn credential(type_: &str, data: Value, spec: Value) -> Result<Result<Credential, String>> {
    let still = Still::empty(Config::default()).await?;
    still
        .create(json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "azure" }, "data": data }))
        .await?;
    let mut identity = json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "AzureClusterIdentity",
        "metadata": { "name": "sp" },
        "spec": { "type": type_, "tenantID": "t", "clientID": "app",
            "clientSecret": { "name": "azure", "namespace": NAMESPACE }, "allowedNamespaces": {} }
    });
    merge(&mut identity["spec"], &spec);
    still.create(identity).await?;
    let cluster: AzureCluster = serde_json::from_value(json!({
        "metadata": { "name": "c", "namespace": NAMESPACE },
        "spec": { "location": "l", "identityRef": { "kind": "AzureClusterIdentity", "name": "sp" } }
    }))?;
    let credential = SignIn::default().credential(&still.server.client(), &cluster).await;
    Ok(credential.map_err(|error| error.to_string()))
}

#[rstest]
#[case::pem(json!({ "clientSecret": base64(PEM) }))]
#[case::a_file_of_today_with_a_password(json!({ "certificate": file(MODERN), "password": base64("pässword\n") }))]
#[case::a_file_of_today_under_the_other_key(json!({ "clientSecret": file(MODERN), "password": base64("pässword") }))]
#[case::an_old_file_without_a_password(json!({ "clientSecret": file(LEGACY) }))]
#[case::a_file_in_base64(json!({ "clientSecret": base64(LEGACY) }))]
#[tokio::test(start_paused = true)]
async fn a_certificate_signs_in_however_it_is_packed(#[case] data: Value) -> Result<()> {
    let read = credential("ServicePrincipalCertificate", data, json!({})).await?;
    let Ok(Credential::Certificate {
        tenant, client_id, pem, ..
    }) = read
    else {
        panic!("{read:?}");
    };
    assert_eq!((tenant.as_str(), client_id.as_str()), ("t", "app"));
    assert!(pem.reveal().starts_with("-----BEGIN CERTIFICATE-----"));
    Ok(())
}

#[rstest]
#[case::a_wrong_password("ServicePrincipalCertificate", json!({ "certificate": file(MODERN), "password": base64("other") }),
    json!({}), "the password of the PKCS#12 file is wrong or missing")]
#[case::something_else("ServicePrincipalCertificate", json!({ "certificate": base64("hello") }), json!({}),
    "neither PEM nor PKCS#12")]
#[case::no_such_key("ServicePrincipalCertificate", json!({ "other": "" }), json!({}), "has no key clientSecret")]
#[case::a_file_of_the_hosts("ServicePrincipalCertificate", json!({}), json!({ "certPath": "/etc/passwd" }),
    "certPath \"/etc/passwd\" is not a readable file")]
#[case::no_path("UserAssignedIdentityCredential", json!({}), json!({}), "userAssignedIdentityCredentialsPath is not set")]
#[case::a_type_of_tomorrow("Passkey", json!({}), json!({}), "type \"Passkey\" is not known")]
#[tokio::test(start_paused = true)]
async fn what_cannot_sign_in_is_refused_with_the_reason(
    #[case] type_: &str,
    #[case] data: Value,
    #[case] spec: Value,
    #[case] expected: &str,
) -> Result<()> {
    let refusal = credential(type_, data, spec).await?.unwrap_err();
    assert!(
        refusal.starts_with("identity ") && refusal.contains(expected),
        "{refusal}"
    );
    Ok(())
}

#[rstest]
#[case::secret("ServicePrincipal", "Secret {")]
#[case::secret_by_hand("ManualServicePrincipal", "Secret {")]
#[case::token("WorkloadIdentity", "WorkloadIdentity {")]
#[case::machine("UserAssignedMSI", "ManagedIdentity {")]
#[tokio::test(start_paused = true)]
async fn the_other_types_sign_in_as_before(#[case] type_: &str, #[case] expected: &str) -> Result<()> {
    let data = json!({ "clientSecret": base64("s") });
    let credential = credential(type_, data, json!({})).await?.unwrap();
    assert!(format!("{credential:?}").starts_with(expected), "{credential:?}");
    Ok(())
}
