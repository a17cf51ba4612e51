//! The conversion webhook of the vSphere kinds: converts objects for the API server, and keeps the definitions pointed at it.
//!
//! Invariant: only definitions with the label [`CONVERTED_LABEL`] are changed, and only the way to the webhook in them.

use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use axum::{Json, Router};
use capstan_api::vsphere::v1beta2::{self, CONVERT_PATH, CONVERTED, CONVERTED_LABEL};
use futures::future::BoxFuture;
use k8s_openapi::ByteString;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, ServiceReference, WebhookClientConfig,
};
use kube::api::{Api, ListParams};
use kube::core::Status;
use kube::core::conversion::{ConversionRequest, ConversionResponse, ConversionReview};

use super::{Address, Error, Hook};
use crate::patch::{self, Lock};

/// The API server sends all objects of a list in one review: thousands of objects of some KiB each.
const LONGEST_REVIEW: usize = 64 << 20;

/// Converts for all definitions whose label has this value.
pub struct Conversion(String);

impl Default for Conversion {
    fn default() -> Self {
        Self(CONVERTED.to_owned())
    }
}

impl Conversion {
    /// For definitions whose label has another value.
    pub fn labeled(value: &str) -> Self {
        Self(value.to_owned())
    }

    async fn point_definitions_here(
        &self,
        client: &kube::Client,
        address: &Address,
        bundle: &str,
    ) -> Result<(), Error> {
        let api: Api<CustomResourceDefinition> = Api::all(client.clone());
        let labeled = ListParams::default().labels(&format!("{CONVERTED_LABEL}={}", self.0));
        let all = api.list(&labeled).await.map_err(crate::Error::from)?;
        for crd in &all.items {
            let mut after = crd.clone();
            let conversion = after.spec.conversion.as_mut();
            if let Some(webhook) = conversion.and_then(|conversion| conversion.webhook.as_mut()) {
                webhook.client_config = Some(client_config(address, bundle));
                patch::object(&api, crd, &after, Lock::Open).await?;
            }
        }
        Ok(())
    }
}

impl Hook for Conversion {
    fn routes(&self) -> Router {
        let convert = post(convert).layer(DefaultBodyLimit::max(LONGEST_REVIEW));
        Router::new().route(CONVERT_PATH, convert)
    }

    fn register<'a>(
        &'a self,
        client: &'a kube::Client,
        address: &'a Address,
        bundle: &'a str,
    ) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(self.point_definitions_here(client, address, bundle))
    }

    /// The definitions keep the address: without a webhook the API server can convert nothing anyway.
    fn remove<'a>(&'a self, _: &'a kube::Client) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

/// Converts all objects of a review, or none of them.
async fn convert(Json(review): Json<ConversionReview>) -> Json<ConversionReview> {
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
