//! Reads what the plan depends on: caches, the state of this process, and live where the plan demands it.

use super::error::Error;
use super::ids::{self, Ids as _};
use super::spec::provider_spec;
use super::state::State;
use super::status::Notes;
use super::{Controller, Observed, Target, node, status};
use crate::account::Account;
use capstan_api::openshift::Machine;
use capstan_azure::Operation;
use capstan_azure::model::VirtualMachine;
use capstan_core::machine::control_plane::{self, Member};
use capstan_core::machine::{self, NodeLookup, Read, Vm};
use capstan_kube::runtime::Scope;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams};
use std::sync::Arc;

impl Controller {
    pub(super) async fn observe_machine(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
    ) -> Result<Option<Observed>, Error> {
        let machine = scope.object.clone();
        if !machine::is_of_azure(&machine) {
            return Ok(None);
        }
        let (now, deleting) = (scope.now(), scope.is_deleting());
        let node = self.node_of(&machine);
        let linked = machine.status.as_ref().is_some_and(|status| status.node_ref.is_some());
        let unwell = linked && node.as_deref().is_none_or(node::is_unwell);
        let operation = operation(scope, state);
        let mut observed = Observed {
            plan: machine::Observed {
                vm: Vm::NotObserved,
                operation: operation.map(|operation| operation.due_in(now)),
                may_exist: state.may_exist,
                next_observation: state.next_observation(&machine, self.context.resync, unwell, scope.instant()),
                control_plane_before: node
                    .as_deref()
                    .filter(|node| deleting && node::is_control_plane(node))
                    .and_then(|node| self.control_plane_before(&machine, node)),
                node: node.map_or(NodeLookup::NotCached, NodeLookup::Found),
                drained: state.drained.clone(),
                inherited: status::is_inherited(&machine),
                dependencies: state
                    .dependencies
                    .as_ref()
                    .filter(|dependencies| dependencies.is_of(&machine))
                    .map(|dependencies| dependencies.progress(now))
                    .unwrap_or_default(),
                teardown: state
                    .teardown
                    .as_ref()
                    .map(|teardown| teardown.progress(now))
                    .unwrap_or_default(),
                machine,
            },
            vm: None,
            target: None,
            notes: Notes::default(),
        };
        while let Some(read) = machine::next_read(&observed.plan) {
            match read {
                Read::Node => observed.plan.node = self.find_node(&scope.object).await?,
                // An answer that does not come today may come tomorrow: it never fails a machine.
                Read::Vm => {
                    let result = self.observe_vm(scope, state, &mut observed).await;
                    result.map_err(|error| match error {
                        Error::Kube(_) => error,
                        error => error.retryable(),
                    })?;
                }
            }
        }
        Ok(Some(observed))
    }

    async fn observe_vm(
        &self,
        scope: &mut Scope<Machine>,
        state: &mut State,
        observed: &mut Observed,
    ) -> Result<(), Error> {
        let target = self.target(scope, observed).await?;
        let Target { names, account, .. } = target.as_ref();
        let found = account.client.get_vm_with_instance_view(&names.group, &names.machine);
        let found = found
            .await
            .map_err(Error::doing(format!("reading vm {}", names.machine)))?;
        state.observed(&scope.object, scope.instant());
        state.may_exist = false;
        let recorded = status::recorded_vm(&scope.object);
        observed.plan.vm = match &found {
            None => Vm::Absent,
            Some(vm) if !names.owns_vm(vm, recorded.as_ref()) => Vm::Foreign,
            Some(vm) => vm_state(vm),
        };
        observed.plan.next_observation = self.context.resync;
        observed.vm = found;
        Ok(())
    }

    /// Returns the machine's Node from the cache: the one that it is linked to, or the one that is to be linked.
    pub(super) fn node_of(&self, machine: &Machine) -> Option<Arc<Node>> {
        let status = machine.status.as_ref();
        if let Some(name) = status.and_then(|status| status.node_ref.as_ref()?.name.as_deref()) {
            return self.nodes.get(None, name);
        }
        let provider = machine.spec.provider_id.as_deref().unwrap_or_default();
        let addresses = status.map(|status| status.addresses.as_slice()).unwrap_or_default();
        if provider.is_empty() && addresses.is_empty() {
            return None;
        }
        self.nodes
            .select(None, |node| node::belongs(node, provider, addresses))
            .into_iter()
            .next()
    }

    /// Asks the API server for the machine's Node, which the cache does not show.
    async fn find_node(&self, machine: &Machine) -> Result<NodeLookup, Error> {
        let api = Api::<Node>::all(self.context.client.clone());
        let status = machine.status.as_ref();
        let linked = status.and_then(|status| status.node_ref.as_ref()?.name.as_deref());
        let provider = machine.spec.provider_id.as_deref().unwrap_or_default();
        let addresses = status.map(|status| status.addresses.as_slice()).unwrap_or_default();
        let belongs = |node: &Node| node::belongs(node, provider, addresses);
        let found = match linked {
            Some(name) => api.get_opt(name).await?,
            // Nodes of Azure are named after their machines. All are read only when the cache is known to be late.
            None => match api.get_opt(&machine.name_any()).await?.filter(belongs) {
                None if self.nodes.trouble().is_some() => {
                    let all = api.list(&ListParams::default()).await?;
                    all.items.into_iter().find(belongs)
                }
                found => found,
            },
        };
        Ok(match found {
            Some(node) => {
                tracing::info!(node = %node.name_any(), "the API server has a Node that the cache lacks");
                NodeLookup::Found(Arc::new(node))
            }
            None => NodeLookup::Absent,
        })
    }

    /// Returns the control plane node that has to be drained before this one.
    fn control_plane_before(&self, machine: &Machine, node: &Node) -> Option<String> {
        let machines = self.machines.select(machine.namespace().as_deref(), |machine| {
            machine.metadata.deletion_timestamp.is_some()
        });
        let member = |node: &Node| Member {
            node: node.name_any(),
            cordoned: node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true),
            deleted: machines
                .iter()
                .find(|machine| {
                    self.node_of(machine)
                        .is_some_and(|other| other.name_any() == node.name_any())
                })
                .and_then(|machine| Some((machine.metadata.deletion_timestamp.as_ref()?.0, machine.name_any()))),
        };
        let others = self.nodes.select(None, |other| {
            node::is_control_plane(other) && other.name_any() != node.name_any()
        });
        let others: Vec<Member> = others.iter().map(|other| member(other)).collect();
        control_plane::before(&member(node), &others).map(ToOwned::to_owned)
    }

    /// Returns what is needed to talk to Azure: the spec as admission leaves it, and the account that it names.
    pub(super) async fn target(&self, scope: &Scope<Machine>, observed: &mut Observed) -> Result<Arc<Target>, Error> {
        if let Some(target) = &observed.target {
            return Ok(target.clone());
        }
        let (machine, namespace) = (scope.object.as_ref(), &scope.key.namespace);
        let spec = provider_spec(machine)?;
        let secret = spec.credentials_secret.as_ref();
        let account = if scope.is_deleting() {
            self.accounts.get_or_last(secret, namespace).await?
        } else {
            self.accounts.get(secret, namespace).await?
        };
        let names = ids::names(&scope.key, machine, &spec, &account.place, self.facts.cluster());
        names.check().map_err(Error::Invalid)?;
        ids::check_subscription(machine, &names)?;
        let account = Account {
            client: account.client.at(&names.location),
            ..account
        };
        let target = Arc::new(Target { spec, names, account });
        observed.target = Some(target.clone());
        Ok(target)
    }
}

fn vm_state(vm: &VirtualMachine) -> Vm {
    match vm.provisioning_state().as_str() {
        // The guest was late to report. The virtual machine runs, and asking for it again would change nothing.
        "Failed" if vm.power_state().is_some_and(|state| state.as_str() == "running") => Vm::Ready,
        "Failed" | "Canceled" => Vm::Failed,
        "Succeeded" | "" => Vm::Ready,
        _ => Vm::Updating,
    }
}

/// Returns the operation that runs in Azure, from memory or from the status that an earlier process wrote.
pub(super) fn operation(scope: &Scope<Machine>, state: &State) -> Option<Operation> {
    let gone = state.teardown.as_ref().is_some_and(|teardown| teardown.vm_gone);
    let recorded = || status::operation(&scope.object).filter(|_| !state.operation_over);
    let known = state.operation.clone().or_else(recorded);
    known.filter(|operation| (operation.method == "DELETE") == scope.is_deleting() && !gone)
}
