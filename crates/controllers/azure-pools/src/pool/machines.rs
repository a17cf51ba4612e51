//! The AzureMachinePoolMachines of a pool: created for each instance, released when it is gone, with its state.

use std::collections::BTreeMap;
use std::sync::Arc;

use capstan_api::azure::{
    AzureMachinePool, AzureMachinePoolMachine, AzureMachinePoolMachineSpec, AzureMachinePoolMachineStatus,
    MACHINE_POOL_LABEL, UPDATE_INSTANCE_ANNOTATION,
};
use capstan_api::capi::CLUSTER_NAME_LABEL;
use capstan_core::pool::Drain;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::{capi, patch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Resource, ResourceExt};

use super::member::{IRREPARABLE_ANNOTATION, MODEL_ANNOTATION, Member, NodeState, VM_ID_ANNOTATION, VM_ID_LABEL};
use super::state::InstanceSnapshot;
use crate::Controller;
use crate::error::Error;

pub const FINALIZER: &str = "azuremachinepoolmachine.infrastructure.cluster.x-k8s.io";
/// Cluster API's core finds a pool's machines by it.
const POOL_NAME_LABEL: &str = "cluster.x-k8s.io/pool-name";

const BOOTSTRAP_SUCCEEDED: &str = "BootstrapSucceeded";
const NODE_HEALTHY: &str = "NodeHealthy";
const DRAINING: &str = "DrainingSucceeded";

/// So many are named in one call: its address has to stay short.
const NAMED_AT_ONCE: usize = 50;

impl Member {
    /// The label by which its object, and no other, is known.
    fn vm_id(&self) -> Option<&str> {
        self.object.as_ref()?.labels().get(VM_ID_LABEL).map(String::as_str)
    }
}

/// The kube writes of one pool.
pub struct Writer<'a> {
    pub controller: &'a Controller,
    pub pool: &'a AzureMachinePool,
    pub cluster_name: &'a str,
    pub machine_pool: &'a str,
}

impl Writer<'_> {
    fn namespace(&self) -> String {
        self.pool.namespace().unwrap_or_default()
    }

    fn api(&self) -> Api<AzureMachinePoolMachine> {
        self.controller.context.api(&self.namespace())
    }

    fn uid(&self) -> String {
        self.pool.uid().unwrap_or_default()
    }

    fn expect(&self, object: &AzureMachinePoolMachine) {
        if let (Some(uid), Some(version)) = (object.uid(), object.resource_version()) {
            self.controller.expectations.wrote(&self.uid(), uid, version);
        }
    }

    /// Makes the object that stands for an instance. Nothing when one of that name is still on its way out.
    pub async fn create(
        &self,
        name: &str,
        instance: &InstanceSnapshot,
        model: Option<&str>,
    ) -> Result<Option<AzureMachinePoolMachine>, Error> {
        let mut labels = BTreeMap::from([
            (CLUSTER_NAME_LABEL.to_owned(), self.cluster_name.to_owned()),
            (POOL_NAME_LABEL.to_owned(), self.machine_pool.to_owned()),
            (MACHINE_POOL_LABEL.to_owned(), self.pool.name_any()),
        ]);
        labels.extend(instance.vm_id.clone().map(|id| (VM_ID_LABEL.to_owned(), id)));
        let model = model.map(|model| (MODEL_ANNOTATION.to_owned(), model.to_owned()));
        let vm_id = instance.vm_id.clone().map(|id| (VM_ID_ANNOTATION.to_owned(), id));
        let notes = Some(model.into_iter().chain(vm_id).collect());
        let mut owner = self.pool.owner_ref(&()).unwrap_or_default();
        (owner.controller, owner.block_owner_deletion) = (None, Some(true));
        let object = AzureMachinePoolMachine {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(self.namespace()),
                labels: Some(labels),
                annotations: notes,
                finalizers: Some(vec![FINALIZER.to_owned()]),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: AzureMachinePoolMachineSpec {
                provider_id: instance.provider_id.clone(),
                instance_id: Some(instance.id.clone()),
            },
            status: None,
        };
        match self.api().create(&PostParams::default(), &object).await {
            Ok(created) => {
                self.expect(&created);
                Ok(Some(created))
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes several machines, in one call for all that can be named by one. VM ids are never used twice, so
    /// that no other machine can be meant.
    pub async fn delete_all(&self, members: &[&Member]) -> Result<(), Error> {
        let by_id = |member: &&&Member| member.owner.is_none() && !member.object_deleting() && member.vm_id().is_some();
        let (together, apart): (Vec<&Member>, Vec<&Member>) = members.iter().partition(by_id);
        for some in together.chunks(NAMED_AT_ONCE) {
            if some.len() == 1 || !self.delete_together(some).await? {
                self.delete_each(some).await?;
            }
        }
        self.delete_each(&apart).await
    }

    async fn delete_each(&self, members: &[&Member]) -> Result<(), Error> {
        for member in members {
            self.delete(member).await?;
        }
        Ok(())
    }

    /// Whether we are allowed to.
    async fn delete_together(&self, members: &[&Member]) -> Result<bool, Error> {
        let ids: Vec<&str> = members.iter().filter_map(|member| member.vm_id()).collect();
        let those = ListParams::default().labels(&format!("{VM_ID_LABEL} in ({})", ids.join(",")));
        match self.api().delete_collection(&DeleteParams::default(), &those).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 403 => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        for object in members.iter().filter_map(|member| member.object.as_ref()) {
            let uid = object.uid().unwrap_or_default();
            self.controller.expectations.deleted(&self.uid(), uid);
        }
        Ok(true)
    }

    /// Deletes a machine: through the Machine that owns it where there is one, so that core drains.
    pub async fn delete(&self, member: &Member) -> Result<(), Error> {
        if let Some(owner) = &member.owner {
            return self.delete_owner(owner).await;
        }
        let Some(object) = member.object.as_ref().filter(|_| !member.object_deleting()) else {
            return Ok(());
        };
        if delete(&self.api(), object.as_ref()).await? {
            self.controller
                .expectations
                .deleted(&self.uid(), object.uid().unwrap_or_default());
        }
        Ok(())
    }

    pub async fn delete_owner(&self, owner: &Arc<capi::Machine>) -> Result<(), Error> {
        if owner.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let api: Api<capi::Machine> = self.controller.context.api(&self.namespace());
        if delete(&api, owner.as_ref()).await? {
            self.controller
                .expectations
                .deleted(&self.uid(), owner.uid().unwrap_or_default());
        }
        Ok(())
    }

    /// Releases an object whose instance is gone.
    pub async fn release(&self, member: &Member) -> Result<(), Error> {
        let Some(object) = &member.object else { return Ok(()) };
        if let Some(owner) = &member.owner {
            self.delete_owner(owner).await?;
        }
        // Without the finalizer a delete is one write, and takes effect at once.
        let released = patch::remove_finalizer(&self.api(), object.as_ref(), FINALIZER).await?;
        if !member.object_deleting() {
            delete(&self.api(), object.as_ref()).await?;
        }
        if released.is_some() || !member.object_deleting() {
            self.controller
                .expectations
                .deleted(&self.uid(), object.uid().unwrap_or_default());
        }
        Ok(())
    }

    /// Asks for an update in place.
    pub async fn start_update(&self, member: &Member) -> Result<(), Error> {
        self.annotate(member, |notes| {
            notes.insert(UPDATE_INSTANCE_ANNOTATION.to_owned(), Timestamp::now().to_string());
        })
        .await
    }

    /// Notes that the instance has the model now.
    pub async fn finish_update(&self, member: &Member, model: &str) -> Result<(), Error> {
        self.annotate(member, |notes| {
            notes.remove(UPDATE_INSTANCE_ANNOTATION);
            notes.insert(MODEL_ANNOTATION.to_owned(), model.to_owned());
        })
        .await
    }

    /// Gives up on an update in place: the machine is replaced instead.
    pub async fn abandon_update(&self, member: &Member, why: &str) -> Result<(), Error> {
        self.annotate(member, |notes| {
            notes.remove(UPDATE_INSTANCE_ANNOTATION);
            notes.insert(IRREPARABLE_ANNOTATION.to_owned(), why.to_owned());
        })
        .await
    }

    /// Notes the model of an instance that Azure says is of the latest.
    pub async fn record_model(&self, member: &Member, model: &str) -> Result<(), Error> {
        self.annotate(member, |notes| {
            notes.insert(MODEL_ANNOTATION.to_owned(), model.to_owned());
        })
        .await
    }

    async fn annotate(&self, member: &Member, change: impl FnOnce(&mut BTreeMap<String, String>)) -> Result<(), Error> {
        let Some(object) = &member.object else { return Ok(()) };
        let mut after = object.as_ref().clone();
        change(after.annotations_mut());
        match patch::object(&self.api(), object.as_ref(), &after, patch::Lock::Open).await {
            Ok(Some(written)) => self.expect(&written),
            Ok(None) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Writes the member's status, if it differs.
    pub async fn report(&self, member: &Member, model_is_latest: bool, version: Option<&str>) -> Result<(), Error> {
        let Some(object) = &member.object else { return Ok(()) };
        let mut after = object.as_ref().clone();
        after.status = Some(status(member, model_is_latest, version, Timestamp::now()));
        match patch::status(&self.api(), object.as_ref(), &after, patch::Lock::Open).await {
            Ok(Some(written)) => self.expect(&written),
            Ok(None) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Deletes exactly this object. Whether it was there.
pub async fn delete<K>(api: &Api<K>, object: &K) -> Result<bool, Error>
where
    K: Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let preconditions = Preconditions {
        uid: object.uid(),
        resource_version: None,
    };
    let params = DeleteParams {
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    match api.delete(&object.name_any(), &params).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A member's status as it should be.
fn status(member: &Member, latest: bool, version: Option<&str>, now: Timestamp) -> AzureMachinePoolMachineStatus {
    let before = member
        .object
        .as_ref()
        .and_then(|object| object.status.clone())
        .unwrap_or_default();
    let mut after = before.clone();
    let instance = member.instance.as_ref();
    let ready = member.node.is_ready() && !instance.is_none_or(|i| i.is("Deleting"));
    if let Some(instance) = instance {
        after.instance_name = Some(instance.name.clone());
        after.instance_id = Some(instance.id.clone());
        // A node that is ready has an instance that is made, even if the list that said Creating is older.
        let made = ready && instance.is("Creating");
        after.provisioning_state = Some(if made {
            "Succeeded".to_owned()
        } else {
            instance.state.clone()
        });
        let failed = member.failed && !ready;
        after.failure_reason = failed.then(|| "CreateError".to_owned());
        after.failure_message = failed.then(|| {
            instance
                .message
                .clone()
                .unwrap_or_else(|| format!("Azure failed to provision instance {}", instance.id))
        });
    }
    after.latest_model_applied = latest;
    after.version = version.map(str::to_owned).or(before.version);
    if !matches!(member.node, NodeState::Unknown(_)) {
        after.ready = ready;
    }
    if let Some(node) = member.node.node() {
        after.node_ref = Some(node_ref(node));
        let kubelet = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        after.version = kubelet
            .map(|info| info.kubelet_version.clone())
            .filter(|v| !v.is_empty())
            .or(after.version);
    }
    mark(&mut after.conditions, member, now);
    after
}

fn node_ref(node: &k8s_openapi::api::core::v1::Node) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.name_any()),
        uid: node.uid(),
        ..ObjectReference::default()
    }
}

fn mark(list: &mut Vec<capstan_api::Condition>, member: &Member, now: Timestamp) {
    let instance = member.instance.as_ref();
    match &member.node {
        NodeState::Ready(_) => {
            conditions::mark_true(list, BOOTSTRAP_SUCCEEDED, now);
            conditions::mark_true(list, NODE_HEALTHY, now)
        }
        NodeState::NotReady(node) => {
            conditions::mark_true(list, BOOTSTRAP_SUCCEEDED, now);
            let message = format!("node {} is not ready", node.name_any());
            conditions::mark_false(list, NODE_HEALTHY, Severity::Warning, "NodeNotReady", &message, now)
        }
        NodeState::Unknown(why) => conditions::mark_unknown(list, NODE_HEALTHY, "WorkloadClusterUnreachable", why, now),
        NodeState::Missing => {
            let failed = instance.filter(|instance| instance.is("Failed"));
            if let Some(instance) = failed {
                let why = instance
                    .message
                    .clone()
                    .unwrap_or_else(|| "Azure reports provisioningState Failed".to_owned());
                conditions::mark_false(list, BOOTSTRAP_SUCCEEDED, Severity::Error, "BootstrapFailed", &why, now);
            } else if !conditions::is_true(list, BOOTSTRAP_SUCCEEDED) {
                conditions::mark_false(
                    list,
                    BOOTSTRAP_SUCCEEDED,
                    Severity::Info,
                    "BootstrapInProgress",
                    "",
                    now,
                );
            }
            let gone = conditions::is_true(list, BOOTSTRAP_SUCCEEDED);
            let (severity, reason) = match gone {
                true => (Severity::Error, "NodeNotFound"),
                false => (Severity::Info, "NodeProvisioning"),
            };
            conditions::mark_false(list, NODE_HEALTHY, severity, reason, "", now)
        }
    };
    match &member.drain {
        Drain::Running { why } => {
            let message = if member.stuck { why.as_str() } else { "" };
            conditions::mark_false(list, DRAINING, Severity::Info, "Draining", message, now);
        }
        Drain::NotRun | Drain::Done(_) if !member.leaving() && !member.updating() => {
            conditions::remove(list, DRAINING);
        }
        Drain::NotRun | Drain::Done(_) => {}
    }
    conditions::summarize(list, &[BOOTSTRAP_SUCCEEDED, NODE_HEALTHY], now);
}
