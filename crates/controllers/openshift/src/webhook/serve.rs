//! The HTTPS side: answers reviews of the API server.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};

use super::configuration::{MUTATE, VALIDATE};
use super::review::{self, Request};
use crate::sizes::Sizes;
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_kube::webhook;

#[derive(Clone)]
pub struct Rules {
    pub cluster_id: Arc<str>,
    /// The admission of machine-api-operator runs beside this one.
    pub operator: bool,
    pub sizes: Option<Sizes>,
}

pub fn routes(rules: Rules) -> Router {
    let routes = Router::new()
        .route(MUTATE, post(mutate))
        .route(VALIDATE, post(validate));
    webhook::bounded(routes.with_state(rules))
}

type Review = AdmissionReview<DynamicObject>;

/// Returns the request and the answer that lets it pass. `None`: the review holds no request.
fn opened(review: Review) -> Option<(Request, AdmissionResponse)> {
    let request: AdmissionRequest<DynamicObject> = review.try_into().ok()?;
    let response = AdmissionResponse::from(&request);
    Some((request.into(), response))
}

fn no_request() -> Json<Review> {
    Json(AdmissionResponse::invalid("the review holds no request").into_review())
}

async fn mutate(State(rules): State<Rules>, Json(review): Json<Review>) -> Json<Review> {
    let Some((request, response)) = opened(review) else {
        return no_request();
    };
    let patch = review::defaults(&request, &rules.cluster_id);
    let mut response = review::patched(response, &patch);
    if let (true, Some(spec)) = (rules.operator, review::changed_spec(&request)) {
        response.warnings = also(response.warnings, dropped_by_operator(&spec));
    }
    Json(response.into_review())
}

async fn validate(State(rules): State<Rules>, Json(review): Json<Review>) -> Json<Review> {
    let Some((request, response)) = opened(review) else {
        return no_request();
    };
    let mut findings = review::validate(&request);
    // Azure is not asked about a request that is refused anyway.
    if let (true, Some(sizes)) = (findings.is_ok(), &rules.sizes)
        && let Some(spec) = review::changed_spec(&request)
    {
        // The objects of the review are not kept while Azure is asked.
        let (user, namespace) = review::sender(request);
        let warnings = sizes.warnings(&user, &namespace, &spec).await;
        findings.warnings.extend(warnings);
    }
    Json(review::answer(response, findings).into_review())
}

/// Adds warnings to those of an answer.
fn also(warnings: Option<Vec<String>>, more: Vec<String>) -> Option<Vec<String>> {
    let all: Vec<String> = warnings.into_iter().flatten().chain(more).collect();
    (!all.is_empty()).then_some(all)
}

/// Returns warnings about the fields that the admission of machine-api-operator does not know: it is called after this one
/// and drops them.
fn dropped_by_operator(spec: &AzureMachineProviderSpec) -> Vec<String> {
    let placement = spec.os_disk.disk_settings.placement.as_ref().map(|_| {
        "providerSpec.osDisk.diskSettings: the admission of machine-api-operator drops placement: Azure chooses the place of \
         the ephemeral disk"
            .to_owned()
    });
    let disks = spec.data_disks.iter().enumerate();
    let own = disks.filter(|(_, disk)| disk.disk_iops_read_write.is_some() || disk.disk_mbps_read_write.is_some());
    own.map(|(index, _)| {
        format!(
            "providerSpec.dataDisks[{index}]: the admission of machine-api-operator drops diskIOPSReadWrite and \
             diskMBpsReadWrite: the disk gets Azure's default performance"
        )
    })
    .chain(placement)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{good, ultra};

    #[test]
    fn warnings_are_added_to_those_of_the_answer() {
        let warnings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(also(None, vec![]), None);
        assert_eq!(also(Some(warnings(&["a"])), vec![]), Some(warnings(&["a"])));
        assert_eq!(
            also(Some(warnings(&["a"])), warnings(&["b"])),
            Some(warnings(&["a", "b"]))
        );
    }

    #[test]
    fn fields_that_another_admission_drops_are_named() {
        let mut spec = good();
        spec.data_disks = vec![ultra(0), ultra(1)];
        assert!(dropped_by_operator(&spec).is_empty());
        spec.data_disks[1].disk_iops_read_write = Some(500);
        spec.os_disk.disk_settings.placement = Some("NvmeDisk".into());
        let warnings = dropped_by_operator(&spec);
        assert!(
            warnings.len() == 2 && warnings[0].starts_with("providerSpec.dataDisks[1]: "),
            "{warnings:?}"
        );
    }
}
