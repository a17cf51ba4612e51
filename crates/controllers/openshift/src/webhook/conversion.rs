//! The conversion webhook of the vSphere kinds: converts objects for the API server, and keeps the definitions pointed at it.
//!
//! Invariant: only definitions with the label [`CONVERTED_LABEL`] are changed, and only the way to the webhook in them.

use axum::Json;
use capstan_api::vsphere::v1beta2::{self, CONVERT_PATH, CONVERTED_LABEL};
use capstan_kube::patch::{self, Lock};
use k8s_openapi::ByteString;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, ServiceReference, WebhookClientConfig,
};
use kube::api::{Api, ListParams};
use kube::core::Status;
use kube::core::conversion::{ConversionRequest, ConversionResponse, ConversionReview};

use super::{Address, Error};

/// Converts all objects of a review, or none of them.
pub async fn convert(Json(review): Json<ConversionReview>) -> Json<ConversionReview> {
    let Ok(mut request) = ConversionRequest::from_review(review) else {
        let invalid = Status::failure("the review holds no request", "InvalidRequest");
        return Json(ConversionResponse::invalid(invalid).into_review());
    };
    let objects = std::mem::take(&mut request.objects);
    let desired = request.desired_api_version.clone();
    let converted: Result<Vec<_>, _> = objects
        .into_iter()
        .map(|object| v1beta2::convert(object, &desired))
        .collect();
    let response = ConversionResponse::for_request(request);
    Json(match converted {
        Ok(objects) => response.success(objects).into_review(),
        Err(error) => response
            .failure(Status::failure(&error.to_string(), "ConversionFailed"))
            .into_review(),
    })
}

/// Lets the API server reach and trust the webhook in every definition that Capstan converts.
pub async fn register(client: &kube::Client, address: &Address, bundle: &str) -> Result<(), Error> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let labeled = ListParams::default().labels(CONVERTED_LABEL);
    let all = api.list(&labeled).await.map_err(capstan_kube::Error::from)?;
    for crd in &all.items {
        let mut after = crd.clone();
        if let Some(webhook) = after
            .spec
            .conversion
            .as_mut()
            .and_then(|conversion| conversion.webhook.as_mut())
        {
            webhook.client_config = Some(client_config(address, bundle));
            patch::object(&api, crd, &after, Lock::Open).await?;
        }
    }
    Ok(())
}

fn client_config(address: &Address, bundle: &str) -> WebhookClientConfig {
    let ca_bundle = Some(ByteString(bundle.as_bytes().to_vec()));
    match address {
        Address::Url(host) => WebhookClientConfig {
            ca_bundle,
            url: Some(format!("https://{host}{CONVERT_PATH}")),
            service: None,
        },
        Address::Service { namespace, name, port } => WebhookClientConfig {
            ca_bundle,
            url: None,
            service: Some(ServiceReference {
                namespace: namespace.clone(),
                name: name.clone(),
                path: Some(CONVERT_PATH.to_owned()),
                port: Some(i32::from(*port)),
            }),
        },
    }
}
