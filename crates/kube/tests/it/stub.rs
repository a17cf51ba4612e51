//! A controller of ConfigMaps that does what a test tells it.

use capstan_kube::runtime::{Outcome, Plan, Reconcile, Report, Scope};
use futures::FutureExt;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::marking::{Error, Step};

/// Returns whether there is a step to apply.
type Observe = Box<dyn Fn(&ConfigMap) -> BoxFuture<'static, Result<bool, Error>> + Send + Sync>;

pub struct Stub {
    observe: Observe,
    /// What its step takes off.
    finalizers: Vec<&'static str>,
}

impl Stub {
    /// Observes and does nothing else.
    pub fn observing(
        observe: impl Fn(&ConfigMap) -> BoxFuture<'static, Result<(), Error>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            observe: Box::new(move |map| observe(map).map(|observed| observed.map(|()| false)).boxed()),
            finalizers: Vec::new(),
        }
    }

    /// Takes these finalizers off the objects that `observe` names.
    pub fn releasing<const N: usize>(
        finalizers: [&'static str; N],
        observe: impl Fn(&ConfigMap) -> BoxFuture<'static, Result<bool, Error>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            observe: Box::new(observe),
            finalizers: finalizers.to_vec(),
        }
    }
}

impl Reconcile for Stub {
    type Object = ConfigMap;
    type State = ();
    type Observed = bool;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "stub";
    const COMPONENT: &'static str = "stub-controller";

    async fn observe(&self, scope: &mut Scope<ConfigMap>, (): &mut ()) -> Result<Option<bool>, Error> {
        (self.observe)(&scope.object).await.map(Some)
    }

    fn plan(has_step: &bool, _: Timestamp) -> Plan<Step> {
        if *has_step { Plan::step(Step) } else { Plan::idle() }
    }

    async fn apply(&self, _: Step, _: &mut bool, scope: &mut Scope<ConfigMap>, (): &mut ()) -> Result<Outcome, Error> {
        for finalizer in &self.finalizers {
            scope.remove_finalizer(finalizer).await?;
        }
        Ok(Outcome::Done)
    }

    fn status(_: &ConfigMap, _: Option<&bool>, _: Result<(), &Error>, _: Timestamp) -> Report<ConfigMap> {
        Report::nothing()
    }
}
