//! A controller that marks every object of a kind with an annotation, for tests of the runtime.

use std::marker::PhantomData;

use capstan_core::plan::{Describe, Impact};
use capstan_core::{Class, Classified};
use capstan_kube::cache::Object;
use capstan_kube::patch::Lock;
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Report, Scope};
use jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

const MARK: &str = "capstan.dev/marked";
/// The object with this name makes the controller panic.
pub const PANICS: &str = "panics";

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(#[from] capstan_kube::Error);

impl Classified for Error {
    fn class(&self) -> Class {
        self.0.class()
    }
}

/// The only step of a controller.
#[derive(Debug)]
pub struct Step;

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("changes the object")
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        Impact::Cluster
    }
}

pub fn is_marked<K: ResourceExt>(object: Option<&K>) -> bool {
    object.is_some_and(|object| object.annotations().contains_key(MARK))
}

/// Marks every object that it reconciles.
pub struct Marking<K>(pub PhantomData<fn(K)>);

impl<K: Object + Serialize + ResourceExt> Reconcile for Marking<K> {
    type Object = K;
    type State = ();
    type Observed = bool;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "marking";
    const COMPONENT: &'static str = "marking-controller";

    async fn observe(&self, scope: &mut Scope<K>, _: &mut ()) -> Result<Option<bool>, Error> {
        assert!(scope.key.name != PANICS, "the test injects a panic");
        Ok(Some(is_marked(Some(scope.object.as_ref()))))
    }

    fn plan(is_marked: &bool, _: Timestamp) -> Plan<Step> {
        if *is_marked { Plan::idle() } else { Plan::step(Step) }
    }

    async fn apply(&self, _: Step, _: &mut bool, scope: &mut Scope<K>, _: &mut ()) -> Result<Outcome, Error> {
        let mut after = scope.object.as_ref().clone();
        after.annotations_mut().insert(MARK.to_owned(), "true".to_owned());
        scope.write_object(&after, Lock::Open).await?;
        Ok(Outcome::Done)
    }

    fn status(_: &K, _: Option<&bool>, _: Result<(), &Error>, _: Timestamp) -> Report<K> {
        Report::nothing()
    }
}
