//! OpenShift machines on Azure: one Machine object, one virtual machine.
//!
//! A pass reads what is known, asks [`plan::plan`] for one step, carries it out and asks again, until the step is to
//! wait. It may be killed between any two effects: the next pass sees what was done and goes on. Nothing is polled that
//! tells by itself: operations are followed as Azure's Retry-After says, Nodes and pods by watches.

mod build;
mod check;
mod create;
mod delete;
mod disk_list;
mod error;
mod fate;
mod leaving;
mod link;
mod making;
mod memory;
mod metrics;
mod names;
mod plan;
mod spec;
mod status;
mod subnets;

pub use error::Error;

use crate::Options;
use crate::account::{Account, Accounts};
use capstan_api::openshift::{AzureMachineProviderSpec, MACHINE_FINALIZER, Machine};
use capstan_azure::model::VirtualMachine;
use capstan_azure::operation::Follow;
use capstan_azure::{Clients, Operation, Progress};
use capstan_core::{Class, Clock};
use capstan_kube::cache::Change;
use capstan_kube::drain::Drainer;
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Classified as _, Context, Next, Reconciler, Recorder, Trigger};
use disk_list::DiskLists;
use futures::{Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeAddress};
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use memory::Memory;
use metrics::Metrics;
use names::Names;
use plan::{Observed, Step, Vm, plan};
use spec::provider_spec;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use subnets::Subnets;

/// As many as there are calls to Azure at once: more passes would wait for those, each with its copies of the machine.
const CONCURRENCY: u16 = 32;

/// The name that events of machines are reported under.
const COMPONENT: &str = "azure-controller";

/// How soon to ask again about something that Azure does without telling us of an operation.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);

/// Runs the machine controller until the context is shut down.
pub async fn run(ctx: Context, clients: Clients, options: Options) -> Result<(), Error> {
    let (machines, nodes) = (ctx.cache::<Machine>(), ctx.nodes());
    let reconciler = Reconciler::new("machine", &ctx, machines.clone()).concurrency(CONCURRENCY);
    let trigger = reconciler.trigger();
    let reconciler = reconciler.on(concerned(nodes.clone(), machines.clone()));
    machines.ready().await?;
    nodes.ready().await?;
    let metrics = Metrics::new(&ctx.metrics, machines.clone());
    let controller = Arc::new(Controller {
        accounts: Accounts::new(ctx.client.clone(), clients, Clock::system()),
        drainer: Drainer::new(&ctx),
        events: ctx.recorder(COMPONENT),
        memory: Memory::default(),
        disk_lists: DiskLists::default(),
        subnets: Subnets::default(),
        ctx,
        machines,
        nodes,
        trigger,
        metrics,
        options,
    });
    let forgetful = controller.clone();
    let forgetting = controller.machines.subscribe().for_each(move |change| {
        if change.gone {
            forgetful.memory.forget(&change.object.uid().unwrap_or_default());
        }
        std::future::ready(())
    });
    let running = reconciler.run(move |machine| {
        let controller = controller.clone();
        async move { controller.pass(machine).await }
    });
    tokio::select! {
        () = running => {}
        () = forgetting => {}
    }
    Ok(())
}

/// Changes of Nodes that matter to a machine, as the machines that they matter to.
fn concerned(nodes: Cache<Node>, machines: Cache<Machine>) -> impl Stream<Item = ObjectRef<Machine>> + Send {
    let mut prints: HashMap<String, u64> = HashMap::new();
    nodes.subscribe().flat_map(move |Change { object: node, gone }| {
        let name = node.name_any();
        let print = link::fingerprint(&node);
        let news = if gone {
            prints.remove(&name).is_some()
        } else {
            prints.insert(name, print) != Some(print)
        };
        let concerned = if news {
            machines_of(&node, &machines)
        } else {
            Vec::new()
        };
        futures::stream::iter(concerned)
    })
}

fn machines_of(node: &Node, machines: &Cache<Machine>) -> Vec<ObjectRef<Machine>> {
    let name = node.name_any();
    let of_node = |machine: &Machine| {
        let status = machine.status.as_ref();
        let linked = status.and_then(|status| status.node_ref.as_ref()?.name.as_deref()) == Some(name.as_str());
        let addresses = status.map(|status| status.addresses.as_slice()).unwrap_or_default();
        linked || link::belongs(node, machine.spec.provider_id.as_deref().unwrap_or_default(), addresses)
    };
    machines
        .select(None, of_node)
        .iter()
        .map(|machine| ObjectRef::from_obj(machine.as_ref()))
        .collect()
}

pub(crate) struct Controller {
    ctx: Context,
    accounts: Accounts,
    machines: Cache<Machine>,
    nodes: Cache<Node>,
    drainer: Drainer,
    events: Recorder,
    trigger: Trigger<Machine>,
    memory: Memory,
    disk_lists: DiskLists,
    subnets: Subnets,
    metrics: Metrics,
    options: Options,
}

/// One pass over one machine.
struct Work {
    /// As the API server has it, as far as we know.
    machine: Arc<Machine>,
    uid: String,
    vm: Vm,
    /// What the API server itself said of the machine's Node, once it was asked.
    node: Option<Option<Arc<Node>>>,
}

/// Whether a pass goes on.
enum Flow {
    Again,
    Rest(Next),
}

/// What is needed to talk to Azure about one machine.
struct Target {
    spec: AzureMachineProviderSpec,
    names: Names,
    account: Account,
}

impl Controller {
    async fn pass(&self, cached: Arc<Machine>) -> Result<Next, Error> {
        let uid = cached.uid().unwrap_or_default();
        if self.memory.released(&uid) {
            return Ok(Next::Wait);
        }
        let mut work = Work {
            machine: self.memory.newest(&cached),
            uid,
            vm: Vm::NotAsked,
            node: None,
        };
        loop {
            let node = self.node_of(&work.machine).or_else(|| work.node.clone().flatten());
            let following = self.following(&work).is_some();
            let look = self.memory.next_look(
                &work.machine,
                self.options.resync,
                self.is_unwell(&work, node.as_deref()),
            );
            let step = plan(&Observed {
                machine: &work.machine,
                following,
                look_due: look.is_zero(),
                vm: work.vm,
                node: node.is_some(),
                node_asked: work.node.is_some() || self.memory.vm_gone(&work.uid),
            });
            tracing::debug!(machine = %work.machine.name_any(), ?step, "next step");
            match self.apply(step, &mut work, node, look).await? {
                Flow::Again => {}
                Flow::Rest(next) => return Ok(next),
            }
        }
    }

    async fn apply(&self, step: Step, work: &mut Work, node: Option<Arc<Node>>, look: Duration) -> Result<Flow, Error> {
        match step {
            Step::Leave => Ok(Flow::Rest(Next::Wait)),
            Step::Guard => self.guard(work).await,
            Step::Follow => self.follow(work).await,
            Step::Look => self.look(work).await,
            Step::Create => self.create(work, false).await,
            Step::Mend => self.create(work, true).await,
            Step::Watch => {
                let names = self.target(&work.machine).await?.names;
                self.memory.follow(&work.uid, Some(watching(&names)));
                Ok(Flow::Rest(Next::After(WATCH_INTERVAL)))
            }
            Step::Settle => self.settle(work).await,
            Step::Link => match node {
                Some(node) => self.link(work, &node, look).await,
                None => Ok(Flow::Rest(Next::After(look))),
            },
            Step::AwaitNode => Ok(Flow::Rest(Next::After(look))),
            Step::Vanished => {
                self.fail(work, "UpdateError", "can't find created instance", "FailedUpdate")
                    .await
            }
            Step::Taken => {
                let name = work.machine.name_any();
                let text = format!("a virtual machine named {name} exists already and was not made for this machine");
                self.refuse(work, &text).await
            }
            Step::FindNode => self.find_node(work).await,
            Step::HoldDrain | Step::Drain | Step::HoldTerminate | Step::Destroy => self.end(step, work, node).await,
        }
    }

    fn api(&self, machine: &Machine) -> Api<Machine> {
        self.ctx.api(&machine.namespace().unwrap_or_default())
    }

    /// The machine's Node: the one that it is linked to, or the one that is to be linked.
    fn node_of(&self, machine: &Machine) -> Option<Arc<Node>> {
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
            .select(None, |node| link::belongs(node, provider, addresses))
            .into_iter()
            .next()
    }

    fn is_unwell(&self, work: &Work, node: Option<&Node>) -> bool {
        let linked = work
            .machine
            .status
            .as_ref()
            .is_some_and(|status| status.node_ref.is_some());
        linked && node.is_none_or(link::is_unwell)
    }

    /// The operation that is under way, from memory or from what an earlier process wrote down.
    fn following(&self, work: &Work) -> Option<Operation> {
        let deleting = work.machine.metadata.deletion_timestamp.is_some();
        let known = self
            .memory
            .operation(&work.uid)
            .or_else(|| status::operation(&work.machine).filter(|_| !self.memory.forgotten(&work.uid)));
        known.filter(|operation| (operation.method == "DELETE") == deleting && !self.memory.vm_gone(&work.uid))
    }

    /// What the spec says, as admission leaves it, and the account that it names.
    async fn target(&self, machine: &Machine) -> Result<Target, Error> {
        let spec = provider_spec(machine)?;
        let namespace = machine.namespace().unwrap_or_default();
        let secret = spec.credentials_secret.as_ref();
        let account = if machine.metadata.deletion_timestamp.is_some() {
            self.accounts.get_or_last(secret, &namespace).await?
        } else {
            self.accounts.get(secret, &namespace).await?
        };
        let names = names::names(machine, &spec, &account.place);
        names.check().map_err(Error::Refused)?;
        let account = Account {
            client: account.client.at(&names.location),
            ..account
        };
        Ok(Target { spec, names, account })
    }

    async fn write_status(&self, work: &mut Work, after: &Machine) -> Result<(), Error> {
        let before = status::of(&work.machine).phase;
        if let Some(written) = patch::status(&self.api(after), work.machine.as_ref(), after, Lock::Open).await? {
            self.metrics.phase(before.as_deref(), &written);
            work.machine = self.memory.wrote(written);
        }
        Ok(())
    }

    async fn write_object(&self, work: &mut Work, after: &Machine) -> Result<(), Error> {
        if let Some(written) = patch::object(&self.api(after), work.machine.as_ref(), after, Lock::Open).await? {
            work.machine = self.memory.wrote(written);
        }
        Ok(())
    }

    async fn guard(&self, work: &mut Work) -> Result<Flow, Error> {
        let api = self.api(&work.machine);
        if let Some(written) = patch::add_finalizer(&api, work.machine.as_ref(), MACHINE_FINALIZER).await? {
            work.machine = self.memory.wrote(written);
        }
        Ok(Flow::Again)
    }

    /// Asks about the operation when Azure said that it may be asked, and not before.
    async fn follow(&self, work: &mut Work) -> Result<Flow, Error> {
        let Some(mut operation) = self.following(work) else {
            return Ok(Flow::Again);
        };
        let due = operation.due_in(Timestamp::now());
        if !due.is_zero() {
            return Ok(Flow::Rest(Next::After(due)));
        }
        let client = self.target(&work.machine).await?.account.client;
        let progress = client.poll(&mut operation).await;
        match progress {
            Ok(Progress::Running(after)) => {
                self.memory.follow(&work.uid, Some(operation));
                Ok(Flow::Rest(Next::After(after)))
            }
            Ok(Progress::Done(_)) => {
                self.memory.follow(&work.uid, None);
                if status::vm_id(&work.machine).is_none() {
                    // Its status was never written: what it would say is read off the machine.
                    return self.look(work).await;
                }
                self.memory.looked(&work.machine);
                work.vm = Vm::Whole;
                self.settle(work).await
            }
            Err(error) if error.ended_operation() => {
                self.memory.follow(&work.uid, None);
                let text = error
                    .arm()
                    .map(|arm| check::refused(&work.machine.name_any(), arm))
                    .unwrap_or_default();
                match error.class() {
                    // One that is not there any more was deleted by somebody else: it is made anew.
                    Class::Terminal if !error.is_not_found() => self.refuse(work, &text).await,
                    _ => Err(self.hindered(work, Error::NotYet(text)).await),
                }
            }
            Err(source) => Err(Error::Azure {
                doing: "following the virtual machine's creation".into(),
                source,
            }),
        }
    }

    /// What Azure does not tell today it may tell tomorrow: a look that fails never ends a machine, nor its next look.
    async fn look(&self, work: &mut Work) -> Result<Flow, Error> {
        self.looked_at(work).await.map_err(|error| match error {
            Error::Kube(_) => error,
            error => error.retried(),
        })
    }

    async fn looked_at(&self, work: &mut Work) -> Result<Flow, Error> {
        let target = self.target(&work.machine).await?;
        let Target { names, account, .. } = &target;
        let found = account.client.get_vm_with_instance_view(&names.group, &names.machine);
        let found = found
            .await
            .map_err(Error::doing(format!("looking for vm {}", names.machine)))?;
        self.memory.looked(&work.machine);
        let Some(vm) = found else {
            work.vm = Vm::Absent;
            return Ok(Flow::Again);
        };
        let recorded = status::recorded_vm(&work.machine);
        work.vm = match vm.provisioning_state().as_str() {
            _ if !names.owns_vm(&vm, recorded.as_ref()) => Vm::Foreign,
            "Failed" | "Canceled" => Vm::Broken,
            "Succeeded" | "" => Vm::Whole,
            _ => Vm::Busy,
        };
        if work.vm == Vm::Foreign {
            return Ok(Flow::Again);
        }
        if work.machine.spec.provider_id.is_some() {
            self.saw(work, &target, &vm).await?;
        } else if status::vm_id(&work.machine).is_none() {
            let addresses = self.addresses_of(&target).await?;
            let after = status::provisioning(&work.machine, names, &vm, None, addresses, Timestamp::now());
            self.write_status(work, &after).await?;
        }
        Ok(Flow::Again)
    }

    /// Writes down what has changed about a machine that was there before.
    async fn saw(&self, work: &mut Work, target: &Target, vm: &VirtualMachine) -> Result<(), Error> {
        let state = status::state_of(vm);
        if let Some(state) = &state {
            let mut marked = Machine::clone(&work.machine);
            marked
                .annotations_mut()
                .insert(status::INSTANCE_STATE.to_owned(), state.clone());
            self.write_object(work, &marked).await?;
        }
        let known = work.machine.status.as_ref();
        let addresses = if known.is_none_or(|status| status.addresses.is_empty()) {
            self.addresses_of(target).await?
        } else {
            Vec::new()
        };
        let after = status::seen(&work.machine, state.as_deref(), addresses, Timestamp::now());
        self.write_status(work, &after).await
    }

    async fn addresses_of(&self, target: &Target) -> Result<Vec<NodeAddress>, Error> {
        let Target { spec, names, account } = target;
        let client = &account.client;
        let nic = client.get_nic(&names.group, &names.nic()).await;
        let nic = nic
            .map_err(Error::doing(format!("reading nic {}", names.nic())))?
            .unwrap_or_default();
        let mut public = None;
        if spec.public_ip {
            let found = client.get_public_ip(&names.group, &names.public_ip()).await;
            let found = found.map_err(Error::doing(format!("reading public ip {}", names.public_ip())))?;
            public = found.and_then(|found| found.properties?.ip_address);
        }
        Ok(status::addresses(&names.machine, &nic, public.as_deref()))
    }

    async fn settle(&self, work: &mut Work) -> Result<Flow, Error> {
        let Target { spec, names, .. } = self.target(&work.machine).await?;
        let spot = spec.spot_vm_options.is_some();
        let zone = spec.zone.as_deref();
        let after = status::identified(&work.machine, &names, spec.vm_size.as_deref(), zone, spot, VM_RUNNING);
        self.write_object(work, &after).await?;
        let mut after = status::provisioned(&work.machine, VM_RUNNING, Timestamp::now());
        // Where the Node came before Azure's last word, Provisioned would be over as it is written.
        if let Some(node) = self.node_of(&work.machine) {
            self.dress(&work.machine, &node).await?;
            after = status::running(&after, link::reference(&node), Timestamp::now());
        }
        self.write_status(work, &after).await?;
        self.memory.looked(&work.machine);
        let text = format!("Created machine {:?}", names.machine);
        self.events.normal(work.machine.as_ref(), "Created", text).await;
        Ok(Flow::Again)
    }

    async fn link(&self, work: &mut Work, node: &Node, look: Duration) -> Result<Flow, Error> {
        self.dress(&work.machine, node).await?;
        let after = status::running(&work.machine, link::reference(node), Timestamp::now());
        self.write_status(work, &after).await?;
        Ok(Flow::Rest(Next::After(look)))
    }

    async fn dress(&self, machine: &Machine, node: &Node) -> Result<(), Error> {
        let dressed = link::dressed(machine, node);
        let api: Api<Node> = Api::all(self.ctx.client.clone());
        let taints = |node: &Node| node.spec.as_ref().and_then(|spec| spec.taints.clone());
        // Taints are one list that others write too.
        let lock = if taints(&dressed) == taints(node) {
            Lock::Open
        } else {
            Lock::Version
        };
        patch::object(&api, node, &dressed, lock).await?;
        Ok(())
    }

    /// The spec cannot become a machine: it has failed for good, with the words that users search for.
    async fn refuse(&self, work: &mut Work, why: &str) -> Result<Flow, Error> {
        let name = work.machine.name_any();
        let message = format!("failed to reconcile machine {name:?}: failed to create vm {name}: {why}");
        self.fail(work, "InvalidConfiguration", &message, "FailedCreate").await
    }

    async fn fail(&self, work: &mut Work, reason: &str, message: &str, event: &str) -> Result<Flow, Error> {
        let mut marked = Machine::clone(&work.machine);
        marked
            .annotations_mut()
            .insert(status::INSTANCE_STATE.to_owned(), "Unknown".to_owned());
        self.write_object(work, &marked).await?;
        let after = status::failed(&work.machine, reason, message, Timestamp::now());
        self.write_status(work, &after).await?;
        self.metrics.failed(event, work.machine.as_ref(), reason);
        self.events
            .warning(work.machine.as_ref(), event, format!("{reason}: {message}"))
            .await;
        Ok(Flow::Rest(Next::Wait))
    }

    /// Something stands in the way that may pass: say so, and hand the error back for a retry.
    async fn hindered(&self, work: &mut Work, error: Error) -> Error {
        let begun = work
            .machine
            .status
            .as_ref()
            .is_some_and(|status| status.phase.is_some());
        if begun && error.is_held() {
            // Said when Azure refused; that we keep to it is no news.
            return error;
        }
        let name = work.machine.name_any();
        let message = format!("failed to reconcile machine {name:?}: failed to create vm {name}: {error}");
        let after = status::hindered(&work.machine, &message, Timestamp::now());
        if let Err(error) = self.write_status(work, &after).await {
            return error;
        }
        self.metrics
            .failed("FailedCreate", work.machine.as_ref(), "CreateError");
        self.events
            .warning(work.machine.as_ref(), "FailedCreate", format!("CreateError: {message}"))
            .await;
        error
    }

    /// What became of an attempt to make the machine.
    async fn judged(&self, work: &mut Work, error: Error) -> Result<Flow, Error> {
        match (&error, error.class()) {
            (Error::Kube(_), _) => Err(error),
            (_, Class::Terminal) => {
                let text = error.to_string();
                self.refuse(work, &text).await
            }
            _ => Err(self.hindered(work, error).await),
        }
    }
}

const VM_RUNNING: &str = "Running";

/// Follows the virtual machine itself, where no operation is known.
fn watching(names: &Names) -> Operation {
    Operation {
        method: "PUT".to_owned(),
        resource: format!("{}?api-version=2024-07-01", names.vm_id()),
        follow: Follow::Resource,
        not_before: Timestamp::now() + WATCH_INTERVAL,
    }
}
