//! The admission policy that keeps VSphereMachineTemplates unchanged.
//!
//! Cluster API finds out whether the template of a ClusterClass must be replaced: it applies the new template to the old one as a
//! dry run. A rule in the schema would reject that, as it rejects every change: a rule sees neither the dry run nor the annotation
//! of the topology controller. An admission policy sees both.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MatchResources, NamedRuleWithOperations, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, Validation,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::vsphere::{TEMPLATE_FROZEN, VSphereMachineTemplate};

const NAME: &str = "capstan-vspheremachinetemplates";
const NOT_A_DRY_RUN: &str = "!(has(request.dryRun) && request.dryRun && has(object.metadata.annotations) && \
    'topology.cluster.x-k8s.io/dry-run' in object.metadata.annotations)";

/// Returns the policy, and the binding that puts it into effect.
pub fn template_policy() -> (ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding) {
    let one = |text: &str| Some(vec![text.to_owned()]);
    let metadata = ObjectMeta {
        name: Some(NAME.to_owned()),
        ..ObjectMeta::default()
    };
    let updates = NamedRuleWithOperations {
        api_groups: one(VSphereMachineTemplate::GROUP),
        api_versions: one("*"),
        operations: one("UPDATE"),
        resources: one("vspheremachinetemplates"),
        ..NamedRuleWithOperations::default()
    };
    let policy = ValidatingAdmissionPolicySpec {
        failure_policy: Some("Fail".into()),
        match_constraints: Some(MatchResources {
            resource_rules: Some(vec![updates]),
            ..MatchResources::default()
        }),
        match_conditions: Some(vec![MatchCondition {
            name: "is-no-dry-run-of-a-topology".into(),
            expression: NOT_A_DRY_RUN.into(),
        }]),
        validations: Some(vec![Validation {
            expression: "object.spec.template.spec == oldObject.spec.template.spec".into(),
            message: Some(TEMPLATE_FROZEN.into()),
            reason: Some("Invalid".into()),
            ..Validation::default()
        }]),
        ..ValidatingAdmissionPolicySpec::default()
    };
    let binding = ValidatingAdmissionPolicyBindingSpec {
        policy_name: NAME.into(),
        validation_actions: vec!["Deny".into()],
        ..ValidatingAdmissionPolicyBindingSpec::default()
    };
    let policy = ValidatingAdmissionPolicy {
        metadata: metadata.clone(),
        spec: Some(policy),
        ..ValidatingAdmissionPolicy::default()
    };
    let binding = ValidatingAdmissionPolicyBinding {
        metadata,
        spec: binding,
    };
    (policy, binding)
}
