//! The definitions for clusters that are made from a ClusterClass.
//!
//! Cluster API finds out whether a template has to be replaced by applying the new one to the old one as a dry run. A rule
//! in the schema refuses that as it refuses every change, since it sees neither that it is a dry run nor the annotation that
//! says whose. So the rule moves into an admission policy, which sees both.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MatchResources, NamedRuleWithOperations, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, Validation,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSONSchemaProps};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::vsphere::{TEMPLATE_FROZEN, VSphereMachineTemplate};

const NAME: &str = "capstan-vspheremachinetemplates";
const NOT_A_DRY_RUN: &str = "!(has(request.dryRun) && request.dryRun && has(object.metadata.annotations) && \
    'topology.cluster.x-k8s.io/dry-run' in object.metadata.annotations)";

/// Every definition, without the rule that an admission policy checks instead.
pub fn crds_for_cluster_class() -> Vec<CustomResourceDefinition> {
    let mut all = super::crds();
    let templates = all
        .iter_mut()
        .filter(|crd| crd.spec.names.kind == VSphereMachineTemplate::KIND);
    for version in templates.flat_map(|crd| &mut crd.spec.versions) {
        let schema = version
            .schema
            .as_mut()
            .and_then(|schema| schema.open_api_v3_schema.as_mut());
        let spec = schema.and_then(|schema| ["spec", "template", "spec"].iter().try_fold(schema, property));
        if let Some(rules) = spec.and_then(|spec| spec.x_kubernetes_validations.as_mut()) {
            rules.retain(|rule| rule.message.as_deref() != Some(TEMPLATE_FROZEN));
        }
    }
    all
}

fn property<'a>(schema: &'a mut JSONSchemaProps, name: &&str) -> Option<&'a mut JSONSchemaProps> {
    schema.properties.as_mut()?.get_mut(*name)
}

/// The policy that keeps templates as they are, and what puts it into effect.
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
