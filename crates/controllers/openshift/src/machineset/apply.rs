//! Carries a plan out: adopts, creates and deletes in parallel, and writes the status when it changed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use capstan_api::openshift::{
    AzureMachineProviderSpec, MACHINE_FINALIZER, Machine, MachineSet, MachineSetStatus, MachineSpec,
};
use capstan_core::disks::init::MOUNTS_ANNOTATION;
use capstan_kube::patch::{self, Lock};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::core::Selector;

use super::plan::Plan;
use super::{Error, STATUS_PACE, Sets, lock};

/// So many creates or deletes of one set are under way at once.
const PARALLEL: usize = 16;
/// Upstream's word for a set that cannot be acted upon.
const INVALID: &str = "InvalidConfiguration";

impl Sets {
    pub(super) async fn carry_out(&self, set: &MachineSet, plan: &Plan) -> Result<(), Error> {
        let api = self.context.api::<Machine>(&set.namespace().unwrap_or_default());
        self.adopt(set, &api, &plan.adopt).await?;
        self.create(set, &api, plan.create).await?;
        self.delete(set, &api, &plan.delete).await
    }

    async fn adopt(&self, set: &MachineSet, api: &Api<Machine>, names: &[String]) -> Result<(), Error> {
        if names.is_empty() || !self.still_there(set).await? {
            return Ok(());
        }
        for name in names {
            let Some(machine) = self.machines.get(set.namespace().as_deref(), name) else {
                continue;
            };
            let mut adopted = machine.as_ref().clone();
            adopted.owner_references_mut().push(controller_reference(set));
            if let Some(adopted) = patch::object(api, machine.as_ref(), &adopted, Lock::Version).await? {
                self.expect(set, &adopted);
            }
        }
        Ok(())
    }

    /// A cached set may be gone: what it adopted then would be deleted with it.
    async fn still_there(&self, set: &MachineSet) -> Result<bool, Error> {
        let api = self.context.api::<MachineSet>(&set.namespace().unwrap_or_default());
        let live = api.get_opt(&set.name_any()).await.map_err(capstan_kube::Error::from)?;
        Ok(live.is_some_and(|live| live.uid() == set.uid() && live.metadata.deletion_timestamp.is_none()))
    }

    async fn create(&self, set: &MachineSet, api: &Api<Machine>, count: usize) -> Result<(), Error> {
        let machine = machine(set);
        let made = futures::stream::iter(0..count)
            .map(|_| async {
                api.create(&PostParams::default(), &machine)
                    .await
                    .map_err(capstan_kube::Error::from)
            })
            .buffer_unordered(PARALLEL)
            .collect::<Vec<_>>()
            .await;
        let mut failed = None;
        for made in made {
            match made {
                Ok(machine) => self.expect(set, &machine),
                Err(error) => failed = Some(self.doubt(set, error)),
            }
        }
        let Some(error) = failed else { return Ok(()) };
        self.recorder
            .warning(set, "FailedCreate", format!("cannot create a machine: {error}"))
            .await;
        Err(error.into())
    }

    async fn delete(&self, set: &MachineSet, api: &Api<Machine>, machines: &[(String, String)]) -> Result<(), Error> {
        let results = futures::stream::iter(machines.to_vec())
            .map(|(name, uid)| async move {
                let preconditions = Some(Preconditions {
                    uid: Some(uid.clone()),
                    resource_version: None,
                });
                let params = DeleteParams {
                    preconditions,
                    ..DeleteParams::default()
                };
                (uid, api.delete(&name, &params).await.map_err(capstan_kube::Error::from))
            })
            .buffer_unordered(PARALLEL)
            .collect::<Vec<_>>()
            .await;
        let mut failed = None;
        for (uid, result) in results {
            match result {
                Ok(_) => self.expected.deleted(&set.uid().unwrap_or_default(), uid),
                // Gone, or another machine of that name: either way ours is no longer there.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => failed = Some(self.doubt(set, error)),
            }
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn expect(&self, set: &MachineSet, machine: &Machine) {
        let version = machine.resource_version().unwrap_or_default();
        self.expected.wrote(
            &set.uid().unwrap_or_default(),
            machine.uid().unwrap_or_default(),
            version,
        );
    }

    fn doubt(&self, set: &MachineSet, error: capstan_kube::Error) -> capstan_kube::Error {
        if error.is_ambiguous() {
            lock(&self.uncertain).insert(set.uid().unwrap_or_default());
        }
        error
    }

    /// Write the counts when they changed; `Some` when that has to wait a moment.
    pub(super) async fn write_status(
        &self,
        set: &MachineSet,
        plan: &Plan,
        selector: &Selector,
    ) -> Result<Option<Duration>, Error> {
        let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        let before = set.status.clone().unwrap_or_default();
        let after = MachineSetStatus {
            replicas: number(plan.counts.replicas),
            fully_labeled_replicas: Some(number(plan.counts.fully_labeled)),
            ready_replicas: Some(number(plan.counts.ready)),
            available_replicas: Some(number(plan.counts.available)),
            observed_generation: set.metadata.generation,
            label_selector: Some(selector.to_string()),
            error_reason: None,
            error_message: None,
            ..before.clone()
        };
        if set.status.is_some() && after == before {
            return Ok(None);
        }
        let uid = set.uid().unwrap_or_default();
        let last = lock(&self.written).get(&uid).map(Instant::elapsed);
        if let Some(last) = last.filter(|last| *last < STATUS_PACE)
            && before.observed_generation == after.observed_generation
        {
            return Ok(Some(STATUS_PACE - last));
        }
        self.patch_status(set, after).await?;
        Ok(None)
    }

    /// Say in status and event why nothing is done.
    pub(super) async fn refuse(&self, set: &MachineSet, error: &Error) -> Result<(), Error> {
        let after = MachineSetStatus {
            error_reason: Some(INVALID.to_owned()),
            error_message: Some(error.to_string()),
            observed_generation: set.metadata.generation,
            ..set.status.clone().unwrap_or_default()
        };
        if set.status.as_ref() != Some(&after) {
            self.patch_status(set, after).await?;
            self.recorder.warning(set, "FailedValidate", error.to_string()).await;
        }
        Ok(())
    }

    async fn patch_status(&self, set: &MachineSet, status: MachineSetStatus) -> Result<(), Error> {
        let api = self.context.api::<MachineSet>(&set.namespace().unwrap_or_default());
        let after = MachineSet {
            status: Some(status),
            ..set.clone()
        };
        match patch::status(&api, set, &after, Lock::Open).await {
            Ok(_) => {
                let mut written = lock(&self.written);
                written.retain(|_, at| at.elapsed() < STATUS_PACE);
                written.insert(set.uid().unwrap_or_default(), Instant::now());
                Ok(())
            }
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn controller_reference(set: &MachineSet) -> OwnerReference {
    OwnerReference {
        api_version: MachineSet::API_VERSION.to_owned(),
        kind: MachineSet::KIND.to_owned(),
        name: set.name_any(),
        uid: set.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Our machine controller will take care of it: it may be born with the finalizer that would be written at once.
fn is_ours(spec: &MachineSpec) -> bool {
    let kind = spec.provider_spec.value.as_ref().and_then(|value| value.get("kind"));
    kind.is_some_and(|kind| kind == AzureMachineProviderSpec::KIND)
}

/// A machine from the template; the API server completes its name, which is never used twice.
fn machine(set: &MachineSet) -> Machine {
    let template = &set.spec.template;
    Machine {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", set.name_any())),
            namespace: set.namespace(),
            labels: Some(template.metadata.labels.clone()),
            annotations: Some(annotations(set)).filter(|annotations| !annotations.is_empty()),
            owner_references: Some(vec![controller_reference(set)]),
            finalizers: is_ours(&template.spec).then(|| vec![MACHINE_FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone(),
        status: None,
    }
}

/// The template's, and the set's own wish for mounts where the template has none.
fn annotations(set: &MachineSet) -> BTreeMap<String, String> {
    let mut annotations = set.spec.template.metadata.annotations.clone();
    if let Some(mounts) = set.annotations().get(MOUNTS_ANNOTATION) {
        annotations
            .entry(MOUNTS_ANNOTATION.to_owned())
            .or_insert_with(|| mounts.clone());
    }
    annotations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_ours_are_born_with_their_finalizer_and_others_are_not() {
        let mut set = MachineSet::new("workers", Default::default());
        assert!(machine(&set).finalizers().is_empty());
        set.spec.template.spec.provider_spec.value = Some(serde_json::json!({"kind": "AWSMachineProviderConfig"}));
        assert!(machine(&set).finalizers().is_empty());
        set.spec.template.spec.provider_spec.value = Some(serde_json::json!({"kind": "AzureMachineProviderSpec"}));
        assert_eq!(machine(&set).finalizers(), [MACHINE_FINALIZER]);
    }

    #[test]
    fn mounts_named_on_the_set_reach_its_machines_unless_the_template_names_its_own() {
        let mut set = MachineSet::new("workers", Default::default());
        assert_eq!(machine(&set).metadata.annotations, None);
        set.annotations_mut()
            .insert(MOUNTS_ANNOTATION.into(), "lun0:/a:xfs".into());
        set.annotations_mut().insert("other".into(), "stays".into());
        let of = |set: &MachineSet| machine(set).annotations().clone();
        assert_eq!(
            of(&set),
            BTreeMap::from([(MOUNTS_ANNOTATION.into(), "lun0:/a:xfs".into())])
        );
        let template = &mut set.spec.template.metadata.annotations;
        template.insert(MOUNTS_ANNOTATION.into(), "lun0:/b:xfs".into());
        assert_eq!(
            of(&set),
            BTreeMap::from([(MOUNTS_ANNOTATION.into(), "lun0:/b:xfs".into())])
        );
    }
}
