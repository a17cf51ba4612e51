//! The HTTPS side: answers reviews of the API server.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::post;
use axum::{Json, Router};
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};

use super::configuration::{MUTATE, VALIDATE};
use super::review::{self, Request};
use crate::sizes::Sizes;
use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_kube::webhook::{self, Proof};

#[derive(Clone)]
pub struct Rules {
    pub cluster_id: Arc<str>,
    /// The admission of machine-api-operator runs beside this one.
    pub operator: bool,
    pub sizes: Option<Sizes>,
}

/// Reviews that do not prove to be the API server's are answered, too, because a replica may not know the newest proof yet. They
/// make no use of a credential.
pub fn routes(rules: Rules, proof: &Proof) -> Router {
    let unproven = Rules {
        sizes: None,
        ..rules.clone()
    };
    let proven = (rules.clone(), unproven.clone(), proof.clone());
    let by_address = move |Path(given): Path<String>, review: Json<Review>| {
        let (rules, unproven, proof) = proven.clone();
        let rules = if proof.shows(&given) { rules } else { unproven };
        async move { validate(State(rules), review).await }
    };
    let routes = Router::new()
        .route(MUTATE, post(mutate).with_state(rules))
        .route(VALIDATE, post(validate).with_state(unproven))
        .route(&format!("{VALIDATE}/{{proof}}"), post(by_address));
    webhook::bounded(routes)
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
    use serde_json::json;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tower::ServiceExt;

    #[tokio::test(start_paused = true)]
    async fn a_review_that_does_not_prove_to_be_the_api_servers_makes_no_use_of_a_credential() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let silent = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            count.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
        });
        let cloud = capstan_azure::Cloud::custom("sim", "https://localhost:1", "https://localhost:1").unwrap();
        let clients = capstan_azure::Clients::new(capstan_azure::Settings::new(cloud)).unwrap();
        let rules = Rules {
            cluster_id: "c".into(),
            operator: false,
            sizes: Some(Sizes::new(
                kube::Client::new(silent, "default"),
                clients,
                capstan_core::Clock::system(),
            )),
        };
        let proof = Proof::default();
        proof.accept("known-to-the-api-server");
        let routes = routes(rules, &proof);
        let machine = json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": "m", "namespace": "ns"},
            "spec": {"providerSpec": {"value": good()}},
        });
        let resource = json!({"group": "machine.openshift.io", "version": "v1beta1", "resource": "machines"});
        let kind = json!({"group": "machine.openshift.io", "version": "v1beta1", "kind": "Machine"});
        let review = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": kind, "resource": resource, "name": "m", "namespace": "ns", "operation": "CREATE",
            "userInfo": {"username": "admin", "groups": ["system:masters"]}, "object": machine,
        }});
        let ask = async |path: &str| {
            let request = http::Request::post(path).header("Content-Type", "application/json");
            let request = request.body(axum::body::Body::from(review.to_string())).unwrap();
            let response = routes.clone().oneshot(request).await.unwrap();
            let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            let answer: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(answer["response"]["allowed"], true, "{path}: {answer}");
        };
        for forged in ["/validate", "/validate/guessed", "/validate/%20"] {
            ask(forged).await;
            assert_eq!(asked.load(Ordering::SeqCst), 0, "{forged}");
        }
        ask("/validate/known-to-the-api-server").await;
        assert_eq!(
            asked.load(Ordering::SeqCst),
            1,
            "it asks whether the user may read the Secret"
        );
    }

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
