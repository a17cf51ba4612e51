//! Which namespaces may use an object of another namespace.
//!
//! Invariant: a Secret is used for objects of its own namespace, and for those of another namespace only when its owner
//! has granted that namespace by an annotation on the Secret. Whoever names a Secret of others does not learn whether
//! it exists.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};

/// The namespaces, separated by commas, whose objects may use the Secret; `*` grants all of them.
pub const ALLOWED_NAMESPACES_ANNOTATION: &str = "capstan.dev/allowed-namespaces";

/// Whether objects of `namespace` may use the Secret.
pub fn allows(secret: &Secret, namespace: &str) -> bool {
    let is_own = secret.metadata.namespace.as_deref() == Some(namespace);
    !namespace.is_empty() && (is_own || grants(granted(secret), namespace))
}

/// Returns the value of the Secret's annotation.
pub fn granted(secret: &Secret) -> &str {
    let granted = secret.annotations().get(ALLOWED_NAMESPACES_ANNOTATION);
    granted.map(String::as_str).unwrap_or_default()
}

/// Whether the value of the annotation names `namespace`.
pub fn grants(granted: &str, namespace: &str) -> bool {
    let mut names = granted.split(',').map(str::trim);
    !namespace.is_empty() && names.any(|name| name == "*" || name == namespace)
}

/// The same answer for a Secret that does not exist and for one that grants nothing.
pub fn refusal(namespace: &str, name: &str, user: &str) -> String {
    format!(
        "secret {namespace}/{name} does not exist, or does not allow namespace {user}: annotate it with \
         {ALLOWED_NAMESPACES_ANNOTATION}={user}"
    )
}

/// Whether a label selector selects these labels, by the rules of Kubernetes: an empty selector selects everything. The
/// error says what is wrong with the selector.
pub fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Result<bool, String> {
    let selector = Selector::try_from(selector.clone()).map_err(|error| error.to_string())?;
    Ok(selector.matches(labels))
}

/// Whether a label selector has no requirement at all.
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.iter().flatten().next().is_none()
        && selector.match_expressions.iter().flatten().next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::its_own_namespace(None, "home", true)]
    #[case::another_namespace(None, "a", false)]
    #[case::no_namespace(Some("*"), "", false)]
    #[case::a_granted_namespace(Some("b, a"), "a", true)]
    #[case::one_that_is_not_granted(Some("b,c"), "a", false)]
    #[case::an_empty_grant(Some(""), "a", false)]
    #[case::a_part_of_a_name(Some("team-a"), "team", false)]
    #[case::every_namespace(Some("*"), "a", true)]
    fn a_secret_is_used_where_it_is_or_where_its_owner_grants_it(
        #[case] granted: Option<&str>,
        #[case] namespace: &str,
        #[case] expected: bool,
    ) {
        let mut secret = Secret::default();
        secret.metadata.namespace = Some("home".to_owned());
        if let Some(granted) = granted {
            let annotations = secret.annotations_mut();
            annotations.insert(ALLOWED_NAMESPACES_ANNOTATION.to_owned(), granted.to_owned());
        }
        assert_eq!(allows(&secret, namespace), expected);
    }

    #[test]
    fn a_selector_that_cannot_be_read_selects_nothing_and_says_why() {
        let selector = serde_json::json!({ "matchExpressions": [{ "key": "a", "operator": "Near" }] });
        let selector: LabelSelector = serde_json::from_value(selector).unwrap();
        let error = selects(&selector, &BTreeMap::new()).unwrap_err();
        assert!(!error.is_empty());
    }
}
