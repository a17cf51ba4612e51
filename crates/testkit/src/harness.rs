//! What the integration tests of every controller share: a namespace on a control plane, objects in it, their events, and
//! controllers that can be stopped as a crash stops them.

use std::fmt::Debug;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::StreamExt as _;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::ControlPlane;

/// No wait of a test takes longer, on a busy machine too.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Prints past the test runner, which keeps back what a passing test prints.
pub fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A namespace of a test's own.
pub struct Harness {
    pub plane: ControlPlane,
    pub client: Client,
    pub namespace: String,
}

impl Harness {
    /// Installs Capstan's definitions, and makes a namespace whose name begins with `prefix`.
    pub async fn new(plane: ControlPlane, prefix: &str) -> Result<Self> {
        plane.install_crds().await?;
        Ok(Self {
            client: plane.client().await?,
            namespace: plane.namespace(prefix).await?,
            plane,
        })
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates an object from exactly these fields.
    pub async fn create<K>(&self, value: Value) -> Result<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned,
    {
        self.create_at(&K::url_path(&(), Some(&self.namespace)), &value).await
    }

    /// Creates an object at the path of its kind.
    pub async fn create_at<K: DeserializeOwned>(&self, path: &str, value: &Value) -> Result<K> {
        let request = http::Request::post(path).header("content-type", "application/json");
        Ok(self.client.request(request.body(serde_json::to_vec(value)?)?).await?)
    }

    pub async fn patch<K>(&self, name: &str, patch: Value) -> Result<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Clone + Debug,
    {
        let (api, params) = (self.api::<K>(), PatchParams::default());
        Ok(api.patch(name, &params, &Patch::Merge(patch)).await?)
    }

    /// Returns reasons and messages of the events about an object.
    pub async fn events(&self, name: &str) -> Result<Vec<(String, String)>> {
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let events = self.api::<Event>().list(&about).await?.items;
        let texts = events
            .into_iter()
            .map(|event| (event.reason.unwrap_or_default(), event.message.unwrap_or_default()));
        Ok(texts.collect())
    }

    /// Returns the message of the first event of this reason. An event comes after what it reports: it is waited for.
    pub async fn event(&self, name: &str, reason: &str) -> Result<String> {
        match first_event(self.api(), name, reason).await {
            Ok(message) => Ok(message),
            Err(error) => Err(error.context(format!("events: {:?}", self.events(name).await?))),
        }
    }

    /// The same for an object without a namespace.
    pub async fn event_of_all(&self, name: &str, reason: &str) -> Result<String> {
        first_event(Api::all(self.client.clone()), name, reason).await
    }
}

/// Writes objects of any kind. Each manifest names its kind and, if it is another one, its namespace.
pub struct Objects {
    client: Client,
    namespace: &'static str,
}

impl Objects {
    pub fn new(client: Client, namespace: &'static str) -> Self {
        Self { client, namespace }
    }

    pub fn api(&self, object: &Value) -> Api<DynamicObject> {
        let resource = resource(object);
        if resource.kind == "Node" {
            return Api::all_with(self.client.clone(), &resource);
        }
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(self.namespace);
        Api::namespaced_with(self.client.clone(), namespace, &resource)
    }

    pub async fn create(&self, object: Value) -> Result<()> {
        let api = self.api(&object);
        api.create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?;
        Ok(())
    }

    /// Changes an object; `object` holds its kind, its name and the change.
    pub async fn patch(&self, object: Value) -> Result<()> {
        let (api, patch) = (self.api(&object), Patch::Merge(&object));
        api.patch(name(&object), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Changes the status of an object in the same way.
    pub async fn patch_status(&self, object: Value) -> Result<()> {
        let (api, patch) = (self.api(&object), Patch::Merge(&object));
        api.patch_status(name(&object), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    pub async fn delete(&self, object: Value) -> Result<()> {
        self.api(&object)
            .delete(name(&object), &DeleteParams::default())
            .await?;
        Ok(())
    }
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Returns the kind that an object says it is of.
pub fn resource(object: &Value) -> ApiResource {
    let (group, version) = match object["apiVersion"].as_str().unwrap_or_default().split_once('/') {
        Some((group, version)) => (group, version),
        None => ("", "v1"),
    };
    let kind = object["kind"].as_str().unwrap_or_default();
    let mut resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    // A guess makes another plural of it.
    if kind == "AzureClusterIdentity" {
        resource.plural = "azureclusteridentities".to_owned();
    }
    resource
}

async fn first_event(events: Api<Event>, name: &str, reason: &str) -> Result<String> {
    let about = format!("involvedObject.name={name},reason={reason}");
    let changes = watcher(events, watcher::Config::default().fields(&about)).default_backoff();
    let mut changes = std::pin::pin!(changes);
    let waiting = async {
        while let Some(change) = changes.next().await {
            if let Ok(watcher::Event::Apply(event) | watcher::Event::InitApply(event)) = change {
                return event.message.unwrap_or_default();
            }
        }
        String::new()
    };
    let found = tokio::time::timeout(PATIENCE, waiting).await;
    found.with_context(|| format!("no event {reason} of {name}"))
}

/// Controllers that run beside a test, until it stops them or ends.
#[must_use = "they end when it is dropped"]
pub struct Running {
    task: JoinHandle<()>,
    shutdown: CancellationToken,
}

impl Running {
    /// `shutdown` ends what the controllers have started beside themselves.
    pub fn new(shutdown: CancellationToken, controllers: impl Future<Output = ()> + Send + 'static) -> Self {
        let task = tokio::spawn(controllers);
        Self { task, shutdown }
    }

    /// Stops the controllers as SIGKILL does: in the middle of whatever they do.
    pub async fn kill(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
        self.shutdown.cancel();
    }
}
