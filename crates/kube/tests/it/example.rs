//! A whole controller, as small as it can be: it keeps as many Pods as a ReplicationController asks for. CONTRIBUTING.md walks through
//! it. A controller of the product has its plan in `capstan-core` and one file for each part; here all parts are in one file.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use capstan_core::plan::{Describe, Impact};
use capstan_core::{Class, Classified};
use capstan_kube::objects::delete_named;
use capstan_kube::runtime::{EventNote, Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context, Options};
use capstan_testkit::ControlPlane;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, ReplicationController};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::wait::await_condition;
use kube::{Resource, ResourceExt};
use serde_json::json;

/// A Pod that a step is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Subject {
    name: String,
    uid: String,
}

/// Everything that the plan depends on.
struct Observed {
    desired: usize,
    /// Pods that nobody is deleting.
    pods: Vec<Subject>,
}

/// One effect, with its subject.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Create,
    Delete(Subject),
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Create => f.write_str("creates a Pod"),
            Self::Delete(pod) => write!(f, "deletes Pod {pod:?}"),
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        Impact::Cluster
    }
}

/// The only place that decides. Selection is stable: the same Pods give the same victims.
fn plan(observed: &Observed) -> Plan<Step> {
    let mut pods = observed.pods.clone();
    pods.sort();
    let create = (pods.len()..observed.desired).map(|_| Step::Create);
    let delete = pods.iter().skip(observed.desired).cloned().map(Step::Delete);
    Plan {
        steps: create.chain(delete).collect(),
        requeue: None,
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] capstan_kube::Error),
    #[error("spec.template: is missing; the controller needs it to create Pods")]
    Invalid,
}

impl Classified for Error {
    fn class(&self) -> Class {
        match self {
            Self::Kube(error) => error.class(),
            Self::Invalid => Class::Terminal,
        }
    }
}

struct Controller {
    pods: Cache<Pod>,
}

impl Reconcile for Controller {
    type Object = ReplicationController;
    type State = ();
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "example";
    const COMPONENT: &'static str = "example-controller";

    async fn observe(&self, scope: &mut Scope<ReplicationController>, _: &mut ()) -> Result<Option<Observed>, Error> {
        if scope.is_deleting() {
            return Ok(None);
        }
        let uid = scope.key.uid.clone();
        let counts = |pod: &Pod| {
            let owned = pod.owner_references().iter().any(|owner| owner.uid == uid);
            owned && pod.meta().deletion_timestamp.is_none()
        };
        let pods = if scope.live {
            let all = scope.api_of::<Pod>().list(&ListParams::default()).await;
            let all = all.map_err(capstan_kube::Error::from)?.items.into_iter();
            let all: Vec<_> = all.filter(counts).map(Arc::new).collect();
            // The next reconcile waits until the cache shows them, too.
            all.iter().for_each(|pod| scope.wrote(&self.pods, pod.as_ref()));
            all
        } else {
            self.pods.select(Some(&scope.key.namespace), counts)
        };
        let subject = |pod: Arc<Pod>| Some((pod.name_any(), pod.uid()?));
        let pods = pods.into_iter().filter_map(subject);
        let spec = scope.object.spec.as_ref();
        Ok(Some(Observed {
            desired: spec
                .and_then(|spec| spec.replicas)
                .map_or(1, |replicas| usize::try_from(replicas).unwrap_or_default()),
            pods: pods.map(|(name, uid)| Subject { name, uid }).collect(),
        }))
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        plan(observed)
    }

    async fn apply(
        &self,
        step: Step,
        _: &mut Observed,
        scope: &mut Scope<ReplicationController>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        let api = scope.api_of::<Pod>();
        match step {
            Step::Create => {
                let pod = pod(&scope.object).ok_or(Error::Invalid)?;
                // The answer may be lost although the API server created the Pod: then the next reconcile reads live.
                let created = api.create(&PostParams::default(), &pod).await;
                let created = created.map_err(|error| scope.doubt(error.into()))?;
                scope.wrote(&self.pods, &created);
            }
            Step::Delete(subject) => {
                let deleted = delete_named(&api, &subject.name, subject.uid).await;
                // It is not deleted where somebody else was faster.
                let deleted = deleted.map_err(|error| scope.doubt(error))?;
                if deleted && let Some(pod) = self.pods.get(Some(&scope.key.namespace), &subject.name) {
                    scope.deleted(&self.pods, pod.as_ref());
                }
            }
        }
        Ok(Outcome::Done)
    }

    fn status(
        object: &ReplicationController,
        observed: Option<&Observed>,
        result: Result<(), &Error>,
        _: Timestamp,
    ) -> Report<ReplicationController> {
        let mut report = Report::nothing();
        if let Some(observed) = observed {
            let mut after = object.clone();
            let status = after.status.get_or_insert_default();
            status.replicas = i32::try_from(observed.pods.len()).unwrap_or(i32::MAX);
            status.observed_generation = object.metadata.generation;
            report = Report::of(after);
        }
        if let Err(error) = result {
            report
                .events
                .push(EventNote::warning("ReconcileFailed", error.to_string()));
        }
        report
    }
}

fn pod(owner: &ReplicationController) -> Option<Pod> {
    let template = owner.spec.as_ref()?.template.clone()?;
    let mut metadata = template.metadata.unwrap_or_default();
    metadata.generate_name = Some(format!("{}-", owner.name_any()));
    metadata.owner_references = Some(vec![owner.controller_owner_ref(&())?]);
    Some(Pod {
        metadata,
        spec: template.spec,
        status: None,
    })
}

/// Runs until the context's shutdown.
pub async fn run(context: Context) {
    let (objects, pods) = (context.cache::<ReplicationController>(), context.cache::<Pod>());
    if pods.ready().await.is_err() {
        return;
    }
    let owner = |pod: &Pod| {
        let owners = pod.owner_references().iter();
        let namespace = pod.namespace().unwrap_or_default();
        let owners = owners.filter(|owner| owner.kind == ReplicationController::kind(&()));
        owners
            .map(|owner| ObjectRef::new(&owner.name).within(&namespace))
            .collect()
    };
    Reconciler::new(&context, objects)
        .watches(&pods, owner)
        .run(Arc::new(Controller { pods }))
        .await;
}

/// A ReplicationController that asks for so many Pods.
pub fn web(replicas: usize) -> serde_json::Result<ReplicationController> {
    serde_json::from_value(json!({
        "metadata": {"name": "web"},
        "spec": {"replicas": replicas, "selector": {"app": "web"}, "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"automountServiceAccountToken": false, "containers": [{"name": "web", "image": "web"}]},
        }},
    }))
}

#[test]
fn the_plan_creates_what_is_missing_and_deletes_the_first_by_name() {
    let pods = |names: &str| {
        let subject = |name: char| Subject {
            name: name.to_string(),
            uid: name.to_string(),
        };
        names.chars().map(subject).collect::<Vec<_>>()
    };
    let steps = |desired: usize, names: &str| {
        let observed = Observed {
            desired,
            pods: pods(names),
        };
        plan(&observed).steps
    };
    assert_eq!(steps(2, ""), [Step::Create, Step::Create]);
    assert_eq!(steps(2, "ba"), []);
    assert_eq!(
        steps(1, "cab"),
        pods("bc").into_iter().map(Step::Delete).collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_controller_keeps_as_many_pods_as_its_object_asks_for() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let namespace = plane.namespace("example").await?;
    let options = Options {
        namespace: Some(namespace.clone()),
        ..Options::default()
    };
    let context = Context::new(plane.config().await?, options)?;
    let running = tokio::spawn(run(context.clone()));
    let client = plane.client().await?;
    let api: Api<ReplicationController> = Api::namespaced(client.clone(), &namespace);
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    api.create(&PostParams::default(), &web(3)?).await?;
    let settled = async |replicas: i32| -> Result<Vec<Pod>> {
        let reached = |object: Option<&ReplicationController>| {
            let status = object.and_then(|object| object.status.as_ref());
            status.is_some_and(|status| status.replicas == replicas)
        };
        let waited = tokio::time::timeout(Duration::from_secs(120), await_condition(api.clone(), "web", reached));
        waited.await.context("the status does not show it")??;
        let found = pods.list(&Default::default()).await?.items;
        Ok(found
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .collect())
    };
    let three = settled(3).await?;
    anyhow::ensure!(three.len() == 3);
    // A Pod that somebody deletes is replaced: its name does not come back, and the count does.
    let name = three[0].name_any();
    pods.delete(&name, &DeleteParams::default().grace_period(0)).await?;
    let replaced = async {
        loop {
            let now = settled(3).await?;
            if now.len() == 3 && now.iter().all(|pod| pod.name_any() != name) {
                return Ok::<_, anyhow::Error>(());
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), replaced).await??;
    let fewer = kube::api::Patch::Merge(json!({"spec": {"replicas": 1}}));
    api.patch("web", &Default::default(), &fewer).await?;
    settled(1).await?;
    context.shutdown.cancel();
    running.await?;
    Ok(())
}
