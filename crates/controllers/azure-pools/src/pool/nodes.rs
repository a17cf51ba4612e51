//! Nodes: which of them are the pool's, and when their changes call for a refresh from Azure.

use std::collections::BTreeSet;
use std::sync::Arc;

use capstan_api::azure::AzureMachinePoolMachine;
use capstan_kube::nodes::provider_id;
use capstan_kube::workload::{self, Lookup};
use futures::StreamExt;
use kube::ResourceExt;
use kube::api::ListParams;

use super::Actor;
use super::member::{Member, NodeState, join};
use crate::error::Error;

/// This many nodes are looked up at once; each is a read of memory unless the cluster is in trouble.
const LOOKUPS: usize = 16;

impl Actor<'_> {
    /// Returns all machines of the pool, with their nodes.
    pub(super) async fn members(&self) -> Result<Vec<Member>, Error> {
        let snapshot = self.state.snapshot.as_ref();
        let instances = snapshot
            .map(|snapshot| snapshot.instances.as_slice())
            .unwrap_or_default();
        let (objects, workload) = (self.objects().await?, self.workload());
        let (workload, pool) = (&workload, self.pool().name_any());
        let pairs = join(&pool, instances, &objects);
        let members = pairs.into_iter().map(|(name, instance, object)| async move {
            let owner = object.as_ref().and_then(|object| self.owner(object));
            let mut member = Member::new(name, instance, object, owner);
            member.node = node(workload, &member).await;
            member
        });
        let members: Vec<_> = members.collect();
        Ok(futures::stream::iter(members).buffered(LOOKUPS).collect().await)
    }

    /// Returns the objects of a pool whose cluster and scale set are gone.
    pub(super) async fn orphans(&self) -> Result<Vec<Member>, Error> {
        let pool = self.pool().name_any();
        let pairs = join(&pool, &[], &self.objects().await?);
        let members = pairs.into_iter().map(|(name, instance, object)| {
            let owner = object.as_ref().and_then(|object| self.owner(object));
            Member::new(name, instance, object, owner)
        });
        Ok(members.collect())
    }

    async fn objects(&self) -> Result<Vec<Arc<AzureMachinePoolMachine>>, Error> {
        let key = &self.scope.key;
        let owned =
            |object: &AzureMachinePoolMachine| object.owner_references().iter().any(|owner| owner.uid == key.uid);
        if !self.scope.live {
            return Ok(self.controller.machines.select(Some(&key.namespace), owned));
        }
        let api = self.scope.api_of::<AzureMachinePoolMachine>();
        let listed = api.list(&ListParams::default()).await?.items.into_iter();
        Ok(listed.filter(|object| owned(object)).map(Arc::new).collect())
    }

    fn owner(&self, object: &AzureMachinePoolMachine) -> Option<Arc<capstan_kube::capi::Machine>> {
        let owner = object.owner_references().iter().find(|owner| owner.kind == "Machine")?;
        let found = self
            .controller
            .owner_machines
            .get(object.namespace().as_deref(), &owner.name)?;
        (found.uid().as_deref() == Some(&owner.uid)).then_some(found)
    }

    /// Whether a machine's node takes pods by now.
    pub(super) async fn is_available(&self, member: &Member) -> bool {
        node(&self.workload(), member).await.is_available()
    }

    /// Whether the nodes show something that the last list of instances does not.
    pub(super) async fn nodes_show_changes(&mut self, members: &[Member]) -> bool {
        let deleting = self.state.deleting();
        let is_deleting = |m: &&Member| {
            m.instance
                .as_ref()
                .is_some_and(|i| i.is("Deleting") || deleting.contains(&i.id))
        };
        let lost = members.iter().filter(|member| !is_deleting(member)).any(|member| {
            let was_ready = self.state.ready.contains(member.provider_id());
            was_ready && matches!(member.node, NodeState::Missing | NodeState::NotReady(_))
        });
        let before = std::mem::take(&mut self.state.ready);
        let ready = |member: &&Member| member.node.is_ready();
        self.state.ready = members
            .iter()
            .filter(ready)
            .map(|member| member.provider_id().to_owned())
            .collect();
        // A cluster that does not answer takes no readiness away.
        let unknown = members.iter().filter(|m| matches!(m.node, NodeState::Unknown(_)));
        let kept: Vec<_> = unknown
            .map(|m| m.provider_id().to_owned())
            .filter(|id| before.contains(id))
            .collect();
        self.state.ready.extend(kept);

        let creating = || {
            members
                .iter()
                .filter(|m| m.instance.as_ref().is_some_and(|i| i.is("Creating")))
        };
        let newly = |m: &Member| !before.contains(m.provider_id());
        let all_made =
            creating().next().is_some() && creating().all(|member| member.node.is_ready()) && creating().any(newly);
        let going = || members.iter().filter(is_deleting);
        let all_gone = going().next().is_some()
            && going().all(|member| matches!(member.node, NodeState::Missing))
            && going().any(|member| before.contains(member.provider_id()));
        lost || all_made || all_gone || self.unknown_nodes(members).await
    }

    /// Whether a node has joined whose instance was not listed yet. Azure may list it later: the list is read again until then.
    pub(super) async fn unknown_nodes(&mut self, members: &[Member]) -> bool {
        let Some(set) = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref()) else {
            return false;
        };
        let Ok(connection) = self.workload().connection().await else {
            return false;
        };
        let prefix = format!("azure://{}/virtualmachines/", set.id).to_ascii_lowercase();
        let known: BTreeSet<String> = members
            .iter()
            .map(|member| member.provider_id().to_ascii_lowercase())
            .collect();
        let nodes = connection.nodes.select(None, |node| {
            let id = node
                .spec
                .as_ref()
                .and_then(|spec| spec.provider_id.as_deref())
                .unwrap_or_default();
            id.to_ascii_lowercase().starts_with(&prefix) && workload::is_ready(node)
        });
        let ids = nodes.iter().filter_map(|node| node.spec.as_ref()?.provider_id.clone());
        let unknown: BTreeSet<String> = ids
            .map(|id| id.to_ascii_lowercase())
            .filter(|id| !known.contains(id))
            .collect();
        let new = unknown.difference(&self.state.unknown_nodes).next().is_some();
        self.state.unknown_nodes = unknown;
        new
    }
}

/// Finds the Node of a machine: by its provider id, or by its name while it has no provider id yet. It may run pods by then,
/// and a cluster without a cloud controller manager never gives it one.
async fn node(workload: &workload::Cluster, member: &Member) -> NodeState {
    let found = match (workload.by_provider_id(member.provider_id()).await, member.node_name()) {
        (Lookup::Missing, Some(name)) => match workload.by_name(&name).await {
            // The Node of another machine.
            Lookup::Found(node) if provider_id(&node).is_some() => Lookup::Missing,
            found => found,
        },
        (found, _) => found,
    };
    match found {
        Lookup::Found(node) if workload::is_ready(&node) => NodeState::Ready(node),
        Lookup::Found(node) => NodeState::NotReady(node),
        Lookup::Missing => NodeState::Missing,
        Lookup::Unreachable(why) => NodeState::Unknown(why),
    }
}
