//! The AzureMachinePoolMachines of a pool: created for each instance, released when it is gone, with its state.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use capstan_api::azure::{
    AzureMachinePool, AzureMachinePoolMachine, AzureMachinePoolMachineSpec, AzureMachinePoolMachineStatus,
    MACHINE_POOL_LABEL, UPDATE_INSTANCE_ANNOTATION,
};
use capstan_api::capi::{CLUSTER_NAME_LABEL, EXCLUDE_DRAIN_ANNOTATION, WATCH_FILTER_LABEL};
use capstan_core::clock::Clock;
use capstan_core::pool::{Drain, JOIN_PATIENCE};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::objects::{delete_exactly, is_deleting};
use capstan_kube::{capi, patch};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Resource, ResourceExt};

use super::member::{
    CORDONED_ANNOTATION, IRREPARABLE_ANNOTATION, MODEL_ANNOTATION, Member, NodeState, REIMAGE_ANNOTATION,
    REIMAGE_BEGUN, REIMAGE_DUE, VM_ID_ANNOTATION, VM_ID_LABEL,
};
use super::snapshot::InstanceSnapshot;
use crate::error::Error;

pub const FINALIZER: &str = "azuremachinepoolmachine.infrastructure.cluster.x-k8s.io";
/// Label with the name of the MachinePool, by which Cluster API's core finds the machines of a pool.
const POOL_NAME_LABEL: &str = "cluster.x-k8s.io/pool-name";

/// The value of the label that has the cluster's name.
const OWNED: &str = "owned";

/// Kubernetes takes label values up to this length.
const LONGEST_LABEL: usize = 63;

const BOOTSTRAP_SUCCEEDED: &str = "BootstrapSucceeded";
const NODE_HEALTHY: &str = "NodeHealthy";
const DRAINING: &str = "DrainingSucceeded";
const NOT_JOINED: &str =
    "the instance runs, and no node has joined the cluster: read its boot diagnostics and the log of its bootstrap";

/// At most this many are named in one call: its address has to stay short.
const NAMED_AT_ONCE: usize = 50;

impl Member {
    /// The label by which its object, and no other, is known.
    fn vm_id(&self) -> Option<&str> {
        self.object.as_ref()?.labels().get(VM_ID_LABEL).map(String::as_str)
    }
}

/// A write that the caches do not show yet.
pub enum Written {
    Machine(Box<AzureMachinePoolMachine>),
    DeletedMachine(Arc<AzureMachinePoolMachine>),
    DeletedOwner(Arc<capi::Machine>),
}

/// Writes the machines of one pool.
pub struct Writer {
    pub machines: Api<AzureMachinePoolMachine>,
    pub owners: Api<capi::Machine>,
    pub pool: Arc<AzureMachinePool>,
    pub cluster_name: String,
    pub machine_pool: String,
    pub clock: Clock,
}

impl Writer {
    /// Creates the object that stands for an instance. `None` while an object of that name is being deleted.
    pub async fn create(
        &self,
        name: &str,
        instance: &InstanceSnapshot,
        model: Option<&str>,
    ) -> Result<Option<AzureMachinePoolMachine>, Error> {
        let mut labels = BTreeMap::from([
            (CLUSTER_NAME_LABEL.to_owned(), self.cluster_name.clone()),
            (POOL_NAME_LABEL.to_owned(), label_value(&self.machine_pool)),
            (MACHINE_POOL_LABEL.to_owned(), self.pool.name_any()),
            // The Azure provider of Cluster API selects the machines of a cluster by it, should it run the pool again.
            (self.cluster_name.clone(), OWNED.to_owned()),
        ]);
        labels.extend(instance.vm_id.clone().map(|id| (VM_ID_LABEL.to_owned(), id)));
        let filter = self.pool.labels().get_key_value(WATCH_FILTER_LABEL);
        labels.extend(filter.map(|(label, value)| (label.clone(), value.clone())));
        let model = model.map(|model| (MODEL_ANNOTATION.to_owned(), model.to_owned()));
        let vm_id = instance.vm_id.clone().map(|id| (VM_ID_ANNOTATION.to_owned(), id));
        let notes = Some(model.into_iter().chain(vm_id).collect());
        let mut owner = self.pool.owner_ref(&()).unwrap_or_default();
        (owner.controller, owner.block_owner_deletion) = (None, Some(true));
        let object = AzureMachinePoolMachine {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: self.pool.namespace(),
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
        match self.machines.create(&PostParams::default(), &object).await {
            Ok(created) => Ok(Some(created)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes several machines, in one call for all that can be named by one. VM ids are never used twice, so that the
    /// call cannot hit another machine.
    pub async fn delete_all(&self, members: &[&Member], written: &mut Vec<Written>) -> Result<(), Error> {
        let by_id = |member: &&&Member| !member.object_deleting() && member.vm_id().is_some();
        let (together, apart): (Vec<&Member>, Vec<&Member>) = members.iter().partition(by_id);
        for some in together.chunks(NAMED_AT_ONCE) {
            if some.len() == 1 || !self.delete_together(some, written).await? {
                self.delete_each(some, written).await?;
            }
        }
        self.delete_each(&apart, written).await
    }

    async fn delete_each(&self, members: &[&Member], written: &mut Vec<Written>) -> Result<(), Error> {
        for member in members {
            written.extend(self.delete(member).await?);
        }
        Ok(())
    }

    /// Deletes all of them in one call. Returns whether we are allowed to.
    async fn delete_together(&self, members: &[&Member], written: &mut Vec<Written>) -> Result<bool, Error> {
        let ids: Vec<&str> = members.iter().filter_map(|member| member.vm_id()).collect();
        let those = ListParams::default().labels(&format!("{VM_ID_LABEL} in ({})", ids.join(",")));
        match self.machines.delete_collection(&DeleteParams::default(), &those).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 403 => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let objects = members.iter().filter_map(|member| member.object.clone());
        written.extend(objects.map(Written::DeletedMachine));
        Ok(true)
    }

    async fn delete(&self, member: &Member) -> Result<Option<Written>, Error> {
        match &member.object {
            Some(object) if !member.object_deleting() => {
                let deleted = delete_exactly(&self.machines, object.as_ref()).await?;
                Ok(deleted.then(|| Written::DeletedMachine(object.clone())))
            }
            Some(_) | None => Ok(None),
        }
    }

    pub async fn delete_owner(&self, owner: &Arc<capi::Machine>) -> Result<Option<Written>, Error> {
        if is_deleting(owner.as_ref()) {
            return Ok(None);
        }
        let deleted = delete_exactly(&self.owners, owner.as_ref()).await?;
        Ok(deleted.then(|| Written::DeletedOwner(owner.clone())))
    }

    /// Keeps core from draining the node of a Machine.
    pub async fn exclude_drain(&self, owner: &Arc<capi::Machine>) -> Result<(), Error> {
        let mut after = owner.as_ref().clone();
        after
            .annotations_mut()
            .insert(EXCLUDE_DRAIN_ANNOTATION.to_owned(), String::new());
        match patch::object(&self.owners, owner.as_ref(), &after, patch::Lock::Open).await {
            Err(error) if !error.is_not_found() => Err(error.into()),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Releases an object whose instance is gone.
    pub async fn release(&self, member: &Member) -> Result<Option<Written>, Error> {
        let Some(object) = &member.object else {
            return Ok(None);
        };
        if let Some(owner) = &member.owner {
            self.delete_owner(owner).await?;
        }
        // Without the finalizer a delete is one write, and takes effect at once.
        patch::remove_finalizer(&self.machines, object.as_ref(), FINALIZER).await?;
        if !member.object_deleting() {
            delete_exactly(&self.machines, object.as_ref()).await?;
        }
        Ok(Some(Written::DeletedMachine(object.clone())))
    }

    /// Asks for an update in place.
    pub async fn start_update(&self, member: &Member, reimage: bool) -> Result<Option<Written>, Error> {
        self.annotate(member, |notes| {
            notes.insert(UPDATE_INSTANCE_ANNOTATION.to_owned(), self.clock.now().to_string());
            if member.node.is_cordoned() {
                notes.insert(CORDONED_ANNOTATION.to_owned(), "true".to_owned());
            }
            if reimage {
                notes.insert(REIMAGE_ANNOTATION.to_owned(), REIMAGE_DUE.to_owned());
            }
        })
        .await
    }

    /// Notes that the instance has the model and is reimaged now.
    pub async fn begin_reimage(&self, member: &Member) -> Result<Option<Written>, Error> {
        self.annotate(member, |notes| {
            notes.insert(REIMAGE_ANNOTATION.to_owned(), REIMAGE_BEGUN.to_owned());
        })
        .await
    }

    /// Notes that the instance has the model now.
    pub async fn finish_update(&self, member: &Member, model: &str) -> Result<Option<Written>, Error> {
        self.annotate(member, |notes| {
            notes.remove(UPDATE_INSTANCE_ANNOTATION);
            notes.remove(CORDONED_ANNOTATION);
            notes.remove(REIMAGE_ANNOTATION);
            notes.insert(MODEL_ANNOTATION.to_owned(), model.to_owned());
        })
        .await
    }

    /// Gives up on an update in place: the machine is replaced instead.
    pub async fn abandon_update(&self, member: &Member, why: &str) -> Result<Option<Written>, Error> {
        self.annotate(member, |notes| {
            notes.remove(UPDATE_INSTANCE_ANNOTATION);
            notes.remove(REIMAGE_ANNOTATION);
            notes.insert(IRREPARABLE_ANNOTATION.to_owned(), why.to_owned());
        })
        .await
    }

    /// Notes the model of an instance, and the cluster on an object of an earlier version.
    pub async fn record_model(&self, member: &Member, model: &str) -> Result<Option<Written>, Error> {
        self.amend(member, |object| {
            object
                .annotations_mut()
                .insert(MODEL_ANNOTATION.to_owned(), model.to_owned());
            if member.lacks_cluster_label() {
                object.labels_mut().insert(self.cluster_name.clone(), OWNED.to_owned());
            }
        })
        .await
    }

    async fn annotate(
        &self,
        member: &Member,
        change: impl FnOnce(&mut BTreeMap<String, String>),
    ) -> Result<Option<Written>, Error> {
        self.amend(member, |object| change(object.annotations_mut())).await
    }

    async fn amend(
        &self,
        member: &Member,
        change: impl FnOnce(&mut AzureMachinePoolMachine),
    ) -> Result<Option<Written>, Error> {
        let Some(object) = &member.object else {
            return Ok(None);
        };
        let mut after = object.as_ref().clone();
        change(&mut after);
        written(patch::object(&self.machines, object.as_ref(), &after, patch::Lock::Open).await)
    }

    /// Whether the member's object has this status already.
    pub fn is_written(&self, member: &Member, model_is_latest: bool, version: Option<&str>) -> bool {
        let present = member.object.as_ref().and_then(|object| object.status.clone());
        present == Some(status(member, model_is_latest, version, self.clock.now()))
    }

    /// Writes the member's status, if it differs.
    pub async fn report(
        &self,
        member: &Member,
        model_is_latest: bool,
        version: Option<&str>,
    ) -> Result<Option<Written>, Error> {
        let Some(object) = &member.object else {
            return Ok(None);
        };
        let mut after = object.as_ref().clone();
        after.status = Some(status(member, model_is_latest, version, self.clock.now()));
        written(patch::status(&self.machines, object.as_ref(), &after, patch::Lock::Open).await)
    }
}

/// Returns the object that the API server answered with. One that is gone needs no write.
fn written(answer: Result<Option<AzureMachinePoolMachine>, capstan_kube::Error>) -> Result<Option<Written>, Error> {
    match answer {
        Ok(object) => Ok(object.map(|object| Written::Machine(Box::new(object)))),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns a label value for a name, as Cluster API makes it: a name that is too long is replaced by its hash.
fn label_value(name: &str) -> String {
    if name.len() <= LONGEST_LABEL {
        return name.to_owned();
    }
    // FNV-1a in 32 bits.
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("hash_{}_z", URL_SAFE_NO_PAD.encode(hash.to_be_bytes()))
}

/// Returns the status that a member should have.
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
        // A ready node has an instance that exists, even if an older list says Creating.
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
            let late = member.joining.is_some_and(|waited| waited >= JOIN_PATIENCE);
            let (severity, reason, message) = match (gone, late) {
                (true, _) => (Severity::Error, "NodeNotFound", ""),
                (false, true) => (Severity::Warning, "NodeNotJoined", NOT_JOINED),
                (false, false) => (Severity::Info, "NodeProvisioning", ""),
            };
            conditions::mark_false(list, NODE_HEALTHY, severity, reason, message, now)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_too_long_for_a_label_becomes_cluster_apis_hash() {
        assert_eq!(label_value(&"a".repeat(63)), "a".repeat(63));
        let value = label_value(&"a".repeat(64));
        assert!(
            value.starts_with("hash_") && value.ends_with("_z") && value.len() == 13,
            "{value}"
        );
        assert_ne!(value, label_value(&"a".repeat(65)));
    }
}
