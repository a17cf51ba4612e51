//! What an AzureClusterIdentity must fulfil: a tenant that is one, and no fields of another type of identity.

use capstan_api::azure::{AzureClusterIdentitySpec, IdentityType};

use super::azure_cluster::name_error;
use super::{FieldError, Findings};
use crate::azure_names::AzureName;

pub fn validate(spec: &AzureClusterIdentitySpec) -> Findings {
    let own = [
        ("resourceID", &spec.resource_id, IdentityType::UserAssignedMsi),
        (
            "userAssignedIdentityCredentialsPath",
            &spec.user_assigned_identity_credentials_path,
            IdentityType::UserAssignedIdentityCredential,
        ),
        (
            "userAssignedIdentityCredentialsCloudType",
            &spec.user_assigned_identity_credentials_cloud_type,
            IdentityType::UserAssignedIdentityCredential,
        ),
    ];
    let misplaced = own
        .into_iter()
        .filter(|(_, value, of)| value.as_ref().is_some_and(|value| !value.is_empty()) && spec.type_ != *of);
    let errors = misplaced.map(|(field, _, of)| {
        let detail = format!("can only be set when AzureClusterIdentity is of type {}", of.as_str());
        FieldError::forbidden(format!("spec.{field}"), detail)
    });
    let tenant = name_error("spec.tenantID".to_owned(), AzureName::Tenant, Some(&spec.tenant_id));
    Findings {
        errors: tenant.into_iter().chain(errors).collect(),
        warnings: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case("ServicePrincipal", json!({}), "")]
    #[case("UserAssignedMSI", json!({ "resourceID": "r" }), "")]
    #[case("ServicePrincipal", json!({ "resourceID": "" }), "")]
    #[case("ServicePrincipal", json!({ "resourceID": "r" }),
        "spec.resourceID: Forbidden: can only be set when AzureClusterIdentity is of type UserAssignedMSI")]
    #[case("UserAssignedIdentityCredential", json!({ "userAssignedIdentityCredentialsPath": "p" }), "")]
    #[case("WorkloadIdentity", json!({ "userAssignedIdentityCredentialsPath": "p" }),
        "spec.userAssignedIdentityCredentialsPath: Forbidden: can only be set when AzureClusterIdentity is of type UserAssignedIdentityCredential")]
    fn fields_belong_to_their_type(#[case] kind: &str, #[case] fields: serde_json::Value, #[case] expected: &str) {
        let mut spec = json!({ "type": kind, "clientID": "c", "tenantID": "t" });
        for (field, value) in fields.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        let spec = serde_json::from_value(spec).unwrap();
        assert_eq!(validate(&spec).message(), expected);
    }

    #[rstest]
    #[case("contoso.onmicrosoft.com", true)]
    #[case("", true)]
    #[case("t/../attacker", false)]
    #[case("t?x=", false)]
    fn a_tenant_cannot_change_the_address_of_a_sign_in(#[case] tenant: &str, #[case] accepted: bool) {
        let spec = json!({ "type": "ServicePrincipal", "clientID": "c", "tenantID": tenant });
        let message = validate(&serde_json::from_value(spec).unwrap()).message();
        assert_eq!(message.is_empty(), accepted, "{message}");
        assert!(accepted || message.contains("spec.tenantID"), "{message}");
    }
}
