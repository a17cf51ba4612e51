//! Carries out the steps of a plan: adopts, creates and deletes machines in parallel.

use std::collections::BTreeMap;

use capstan_api::openshift::{AzureMachineProviderSpec, MACHINE_FINALIZER, Machine, MachineSet, MachineSpec};
use capstan_core::machineset::Subject;
use capstan_core::validate::openshift::DISK_ANNOTATIONS;
use capstan_kube::objects::delete_named;
use capstan_kube::patch::{self, Lock};
use capstan_kube::runtime::{ObjectKey, Scope};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use kube::api::PostParams;

use super::{Controller, Error};

/// At most this many creates or deletes of one set are under way at once.
const PARALLEL: usize = 16;

impl Controller {
    pub(super) async fn adopt(&self, scope: &mut Scope<MachineSet>, machines: Vec<Subject>) -> Result<(), Error> {
        let api = scope.api_of::<Machine>();
        for Subject { name, .. } in machines {
            let Some(machine) = self.machines.get(Some(&scope.key.namespace), &name) else {
                continue;
            };
            let mut adopted = machine.as_ref().clone();
            adopted.owner_references_mut().push(controller_reference(&scope.key));
            // The lock makes sure that it is the machine that the plan was about.
            if let Some(adopted) = patch::object(&api, machine.as_ref(), &adopted, Lock::Version).await? {
                scope.wrote(&self.machines, &adopted);
            }
        }
        Ok(())
    }

    pub(super) async fn create(&self, scope: &mut Scope<MachineSet>, count: usize) -> Result<(), Error> {
        let (api, machine) = (scope.api_of::<Machine>(), machine(&scope.key, &scope.object));
        let created = futures::stream::iter(0..count)
            .map(|_| async { api.create(&PostParams::default(), &machine).await })
            .buffer_unordered(PARALLEL)
            .collect::<Vec<_>>()
            .await;
        let mut failed = None;
        for created in created {
            match created {
                Ok(machine) => scope.wrote(&self.machines, &machine),
                Err(error) => failed = Some(scope.doubt(error.into())),
            }
        }
        failed.map_or(Ok(()), |error| Err(Error::Create(error)))
    }

    pub(super) async fn delete(&self, scope: &mut Scope<MachineSet>, machines: Vec<Subject>) -> Result<(), Error> {
        let api = scope.api_of::<Machine>();
        let deleted = futures::stream::iter(machines)
            .map(|subject| {
                let api = &api;
                async move {
                    let result = delete_named(api, &subject.name, subject.uid.clone()).await;
                    (subject, result)
                }
            })
            .buffer_unordered(PARALLEL)
            .collect::<Vec<_>>()
            .await;
        let mut failed = None;
        for (subject, result) in deleted {
            match result {
                Ok(true) => {
                    if let Some(machine) = self.machines.get(Some(&scope.key.namespace), &subject.name) {
                        scope.deleted(&self.machines, machine.as_ref());
                    }
                }
                // It is gone, or another machine has its name: nothing is left to delete.
                Ok(false) => {}
                Err(error) => failed = Some(scope.doubt(error)),
            }
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Controller {
    pub(super) async fn annotate(
        &self,
        scope: &mut Scope<MachineSet>,
        annotations: BTreeMap<String, String>,
    ) -> Result<(), Error> {
        let mut after = MachineSet::clone(&scope.object);
        after.annotations_mut().extend(annotations);
        scope.write_object(&after, Lock::Open).await?;
        Ok(())
    }
}

fn controller_reference(set: &ObjectKey) -> OwnerReference {
    OwnerReference {
        api_version: MachineSet::API_VERSION.to_owned(),
        kind: MachineSet::KIND.to_owned(),
        name: set.name.clone(),
        uid: set.uid.clone(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Whether our machine controller reconciles it: then it is created with the finalizer that it needs anyway.
fn is_azure(spec: &MachineSpec) -> bool {
    let kind = spec.provider_spec.value.as_ref().and_then(|value| value.get("kind"));
    kind.is_some_and(|kind| kind == AzureMachineProviderSpec::KIND)
}

/// A machine from the template; the API server completes its name, which is never used twice.
fn machine(key: &ObjectKey, set: &MachineSet) -> Machine {
    let template = &set.spec.template;
    Machine {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", key.name)),
            namespace: Some(key.namespace.clone()),
            labels: Some(template.metadata.labels.clone()),
            annotations: Some(annotations(set)).filter(|annotations| !annotations.is_empty()),
            owner_references: Some(vec![controller_reference(key)]),
            finalizers: is_azure(&template.spec).then(|| vec![MACHINE_FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone(),
        status: None,
    }
}

/// The template's annotations, and the set's own annotations about disks where the template has none.
fn annotations(set: &MachineSet) -> BTreeMap<String, String> {
    let mut annotations = set.spec.template.metadata.annotations.clone();
    for key in DISK_ANNOTATIONS {
        if let Some(value) = set.annotations().get(key) {
            annotations.entry(key.to_owned()).or_insert_with(|| value.clone());
        }
    }
    annotations
}

#[cfg(test)]
mod tests {
    use super::*;
    use capstan_core::disks::init::MOUNTS_ANNOTATION;

    fn key() -> ObjectKey {
        ObjectKey {
            namespace: "ns".into(),
            name: "workers".into(),
            uid: "u".into(),
        }
    }

    #[test]
    fn machines_of_ours_are_born_with_their_finalizer_and_others_are_not() {
        let mut set = MachineSet::new("workers", Default::default());
        assert!(machine(&key(), &set).finalizers().is_empty());
        set.spec.template.spec.provider_spec.value = Some(serde_json::json!({"kind": "AWSMachineProviderConfig"}));
        assert!(machine(&key(), &set).finalizers().is_empty());
        set.spec.template.spec.provider_spec.value = Some(serde_json::json!({"kind": "AzureMachineProviderSpec"}));
        assert_eq!(machine(&key(), &set).finalizers(), [MACHINE_FINALIZER]);
    }

    #[test]
    fn mounts_named_on_the_set_reach_its_machines_unless_the_template_names_its_own() {
        let mut set = MachineSet::new("workers", Default::default());
        assert_eq!(machine(&key(), &set).metadata.annotations, None);
        set.annotations_mut()
            .insert(MOUNTS_ANNOTATION.into(), "lun0:/a:xfs".into());
        set.annotations_mut().insert("other".into(), "stays".into());
        let of = |set: &MachineSet| machine(&key(), set).annotations().clone();
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
