//! A vCenter in the process: as much of it as the controllers use, under tokio's paused time.
//!
//! The wire format is checked against govmomi's simulator elsewhere. This one is for what that cannot do: simulated time, a
//! seed that decides everything, and a look at every request before it is carried out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use capstan_testkit::apiserver::Rng;
use capstan_vsphere::xml::{Element, Writer};
use capstan_vsphere::{InProcess, MoRef};
use futures::FutureExt;
use http::Response;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::trace::Trace;

mod machine;

/// Checks promises at the requests that change something.
pub trait Monitor: Send + Sync {
    /// A request is about to be carried out: its method and the name of the machine that it is about.
    fn before(&self, vcenter: &Vcenter, method: &str, vm: &str);
}

#[derive(Clone)]
pub struct Vcenter {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
    monitor: Arc<dyn Monitor>,
    trace: Trace,
}

struct State {
    rng: Rng,
    objects: BTreeMap<MoRef, Object>,
    /// Objects that are gone, and when.
    gone: BTreeMap<MoRef, u64>,
    /// Grows with every change.
    sequence: u64,
    made: u64,
    session: u64,
    /// The objects in each view, and when they entered.
    views: BTreeMap<String, BTreeMap<MoRef, u64>>,
    /// The view of each collector.
    collectors: BTreeMap<String, String>,
    /// So many of the next tasks fail.
    failing: usize,
}

#[derive(Clone, Default)]
struct Object {
    values: BTreeMap<String, Element>,
    changed: u64,
}

/// A fault of vim25: its type.
type Fault = &'static str;
type Answer = Result<String, Fault>;

const NOT_FOUND: Fault = "ManagedObjectNotFound";
/// What is watched of a machine begins so; the rest is read only.
const WATCHED: [&str; 3] = ["name", "runtime.", "guest."];
/// How long a task of each kind takes.
const CLONE: (u64, u64) = (5_000, 120_000);
const TASK: (u64, u64) = (200, 8_000);
/// From power-on to the address of the guest, and from the wish to shut down to power-off.
const GUEST: (u64, u64) = (2_000, 90_000);
const LATENCY: (u64, u64) = (5, 300);

fn leaf(name: &str, text: impl ToString) -> Element {
    Element {
        name: name.to_owned(),
        text: text.to_string(),
        ..Element::default()
    }
}

fn node(name: &str, kind: Option<&str>, children: Vec<Element>) -> Element {
    Element {
        name: name.to_owned(),
        kind: kind.map(str::to_owned),
        children,
        ..Element::default()
    }
}

fn link(to: &MoRef) -> Element {
    Element {
        name: "ManagedObjectReference".to_owned(),
        reference: Some(to.kind().to_owned()),
        text: to.value().to_owned(),
        ..Element::default()
    }
}

fn links(to: &[&MoRef]) -> Element {
    node("val", None, to.iter().map(|to| link(to)).collect())
}

fn returned(reference: &MoRef) -> String {
    let mut w = Writer::new();
    w.moref("returnval", reference);
    w.finish()
}

impl State {
    fn touch(&mut self, reference: &MoRef) {
        self.sequence += 1;
        if let Some(object) = self.objects.get_mut(reference) {
            object.changed = self.sequence;
        }
    }

    fn set(&mut self, reference: &MoRef, path: &str, value: Element) {
        let object = self.objects.entry(reference.clone()).or_default();
        object.values.insert(path.to_owned(), value);
        self.touch(reference);
    }

    fn text(&self, reference: &MoRef, path: &str) -> String {
        let value = self.objects.get(reference).and_then(|object| object.values.get(path));
        value.map(|value| value.text.clone()).unwrap_or_default()
    }

    fn named(&self, kind: &str, name: &str) -> Option<MoRef> {
        let mut all = self.objects.keys().filter(|reference| reference.kind() == kind);
        all.find(|reference| self.text(reference, "name") == name).cloned()
    }

    fn next(&mut self, kind: &str, prefix: &str) -> MoRef {
        self.made += 1;
        MoRef::new(kind, format!("{prefix}{}", self.made))
    }

    fn between(&mut self, (from, to): (u64, u64)) -> Duration {
        let range = Duration::from_millis(from)..=Duration::from_millis(to);
        self.rng.between(&range)
    }

    fn remove(&mut self, reference: &MoRef) {
        self.sequence += 1;
        if self.objects.remove(reference).is_some() {
            self.gone.insert(reference.clone(), self.sequence);
        }
    }

    /// Objects of a filter: those that it names, and all that its steps reach.
    fn selected(&self, filter: &Element) -> Vec<MoRef> {
        let mut found: Vec<MoRef> = Vec::new();
        for set in filter.all("objectSet") {
            let steps: Vec<(&str, &str)> = set
                .all("selectSet")
                .filter_map(|step| Some((step.text_at("type")?, step.text_at("path")?)))
                .collect();
            let mut open: Vec<MoRef> = set.moref_at("obj").into_iter().collect();
            while let Some(reference) = open.pop() {
                let Some(object) = self.objects.get(&reference) else {
                    continue;
                };
                if found.contains(&reference) {
                    continue;
                }
                for (_, path) in steps.iter().filter(|(kind, _)| reference.kind().ends_with(kind)) {
                    let Some(value) = object.values.get(*path) else {
                        continue;
                    };
                    open.extend(value.moref().into_iter().chain(value.morefs()));
                }
                found.push(reference);
            }
        }
        found
    }

    fn retrieve(&self, filter: &Element) -> String {
        let mut w = Writer::new();
        w.nest("returnval", |w| {
            for reference in self.selected(filter) {
                let wanted = filter
                    .all("propSet")
                    .find(|set| set.text_at("type") == Some(reference.kind()));
                let (Some(wanted), Some(object)) = (wanted, self.objects.get(&reference)) else {
                    continue;
                };
                w.nest("objects", |w| {
                    w.moref("obj", &reference);
                    for path in wanted.all("pathSet") {
                        if let Some(value) = object.values.get(&path.text) {
                            w.nest("propSet", |w| {
                                w.text("name", &path.text).element_named("val", value);
                            });
                        }
                    }
                });
            }
        });
        w.finish()
    }

    /// What has changed in a view since a version; nothing if nothing has.
    fn updates(&self, collector: &str, since: u64) -> Option<String> {
        let view = self.views.get(self.collectors.get(collector)?)?;
        let mut w = Writer::new();
        let mut any = false;
        for (reference, entered) in view {
            let kind = match (self.objects.get(reference), self.gone.get(reference)) {
                (Some(_), _) if *entered > since => "enter",
                (Some(object), _) if object.changed > since => "modify",
                (None, Some(gone)) if *gone > since => "leave",
                _ => continue,
            };
            any = true;
            w.nest("objectSet", |w| {
                w.text("kind", kind).moref("obj", reference);
                let values = self.objects.get(reference).map(|object| &object.values);
                for (path, value) in values.into_iter().flatten() {
                    let watched = WATCHED.iter().any(|start| path.starts_with(start));
                    if watched || reference.kind() == "Task" {
                        w.nest("changeSet", |w| {
                            w.text("name", path).text("op", "assign").element_named("val", value);
                        });
                    }
                }
            });
        }
        any.then(|| {
            let inner = w.finish();
            format!(
                "<returnval><version>{}</version><filterSet>{inner}</filterSet></returnval>",
                self.sequence
            )
        })
    }
}

impl Vcenter {
    pub fn new(seed: u64, monitor: Arc<dyn Monitor>, trace: Trace) -> Self {
        let mut state = State {
            rng: Rng::new(seed ^ 0x5c),
            objects: BTreeMap::new(),
            gone: BTreeMap::new(),
            sequence: 0,
            made: 100,
            session: 1,
            views: BTreeMap::new(),
            collectors: BTreeMap::new(),
            failing: 0,
        };
        machine::inventory(&mut state);
        Self {
            state: Arc::new(Mutex::new(state)),
            changed: Arc::default(),
            monitor,
            trace,
        }
    }

    pub fn in_process(&self) -> InProcess {
        let vcenter = self.clone();
        InProcess::new(move |request| {
            let vcenter = vcenter.clone();
            async move {
                let cookie = request
                    .headers()
                    .get("cookie")
                    .and_then(|value| value.to_str().ok())
                    .unwrap_or_default();
                let body = request.body().and_then(|body| body.as_bytes()).unwrap_or_default();
                let (cookie, body) = (cookie.to_owned(), String::from_utf8_lossy(body).into_owned());
                vcenter.answer(&cookie, &body).await
            }
            .boxed()
        })
    }

    /// vCenter forgets all sessions, as it does when it restarts.
    pub fn forget_sessions(&self) {
        let mut state = self.state.lock();
        state.session += 1;
        state.views.clear();
        state.collectors.clear();
    }

    pub fn fail_tasks(&self, number: usize) {
        self.state.lock().failing = number;
    }

    async fn answer(&self, cookie: &str, body: &str) -> Response<String> {
        let latency = self.state.lock().between(LATENCY);
        tokio::time::sleep(latency).await;
        let tree = Element::parse(body).unwrap_or_default();
        let call = tree
            .child("Body")
            .and_then(|body| body.children.first())
            .cloned()
            .unwrap_or_default();
        let session = format!("vmware_soap_session={}", self.state.lock().session);
        let open = ["RetrieveServiceContent", "Login"].contains(&call.name.as_str());
        let answer = match open || cookie == session {
            true => self.carry_out(&call).await,
            false => Err("NotAuthenticated"),
        };
        let envelope = |inner: String| {
            format!(
                "<Envelope xmlns:xsi=\"http://www.w3.org/2001/XMLSchema-instance\" \
                 xmlns:xsd=\"http://www.w3.org/2001/XMLSchema\"><Body>{inner}</Body></Envelope>"
            )
        };
        let name = &call.name;
        let (status, text) = match answer {
            Ok(inner) => (200, format!("<{name}Response>{inner}</{name}Response>")),
            Err(fault) => (
                500,
                format!(
                    "<Fault><faultstring>{fault}</faultstring><detail><{fault}Fault xsi:type=\"{fault}\"/></detail></Fault>"
                ),
            ),
        };
        let mut response = Response::new(envelope(text));
        *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
        if let Ok(value) = format!("{session}; Path=/").parse() {
            response.headers_mut().insert("set-cookie", value);
        }
        response
    }

    async fn carry_out(&self, call: &Element) -> Answer {
        let this = call.moref_at("_this").ok_or("InvalidRequest")?;
        match call.name.as_str() {
            "RetrieveServiceContent" => Ok(content()),
            "Login" => Ok("<returnval><key>1</key></returnval>".to_owned()),
            "Logout" | "DestroyPropertyCollector" | "DestroyView" => Ok(String::new()),
            "CurrentTime" => Ok("<returnval>2027-01-15T08:00:00Z</returnval>".to_owned()),
            "CreatePropertyCollector" => Ok(returned(&self.state.lock().next("PropertyCollector", "session-"))),
            "CreateListView" => {
                let mut state = self.state.lock();
                let view = state.next("ListView", "view-");
                state.views.insert(view.value().to_owned(), BTreeMap::new());
                Ok(returned(&view))
            }
            "CreateFilter" => {
                let view = call.text_at("spec.objectSet.obj").unwrap_or_default().to_owned();
                self.state.lock().collectors.insert(this.value().to_owned(), view);
                Ok(returned(&MoRef::new("PropertyFilter", "filter-1")))
            }
            "ModifyListView" => self.modify_view(&this, call),
            "WaitForUpdatesEx" => self.wait(this.value(), call).await,
            "RetrievePropertiesEx" => {
                let filter = call.child("specSet").ok_or("InvalidRequest")?;
                Ok(self.state.lock().retrieve(filter))
            }
            "FindByUuid" => {
                let path = match call.bool_at("instanceUuid") {
                    Some(true) => "config.instanceUuid",
                    _ => "config.uuid",
                };
                let (uuid, state) = (call.text_at("uuid").unwrap_or_default(), self.state.lock());
                let mut vms = state
                    .objects
                    .keys()
                    .filter(|reference| reference.kind() == "VirtualMachine");
                Ok(vms
                    .find(|vm| state.text(vm, path) == uuid)
                    .map(returned)
                    .unwrap_or_default())
            }
            "FindChild" => {
                let (state, name) = (self.state.lock(), call.text_at("name").unwrap_or_default());
                let found = state.named("VirtualMachine", name);
                Ok(found.as_ref().map(returned).unwrap_or_default())
            }
            "FindByInventoryPath" => {
                let (state, path) = (self.state.lock(), call.text_at("inventoryPath").unwrap_or_default());
                let found = match path {
                    "DC0/vm" => Some(MoRef::new("Folder", "group-v3")),
                    "DC0/host/DC0_C0/Resources" => Some(MoRef::new("ResourcePool", "resgroup-8")),
                    path => state.named("VirtualMachine", path.rsplit('/').next().unwrap_or_default()),
                };
                Ok(found.as_ref().map(returned).unwrap_or_default())
            }
            _ => self.change(call, &this),
        }
    }

    fn modify_view(&self, view: &MoRef, call: &Element) -> Answer {
        let mut state = self.state.lock();
        state.sequence += 1;
        let entered = state.sequence;
        let (mut w, known) = (Writer::new(), state.objects.clone());
        let listed = state.views.get_mut(view.value()).ok_or(NOT_FOUND)?;
        for removed in call.all("remove").filter_map(Element::moref) {
            listed.remove(&removed);
        }
        for added in call.all("add").filter_map(Element::moref) {
            match known.contains_key(&added) {
                true => drop(listed.insert(added, entered)),
                false => drop(w.moref("returnval", &added)),
            }
        }
        drop(state);
        self.changed.notify_waiters();
        Ok(w.finish())
    }

    async fn wait(&self, collector: &str, call: &Element) -> Answer {
        let since = call.number_at("version").unwrap_or_default();
        let longest = Duration::from_secs(call.number_at("options.maxWaitSeconds").unwrap_or(60));
        let deadline = tokio::time::Instant::now() + longest;
        loop {
            let changed = self.changed.notified();
            {
                let state = self.state.lock();
                if !state.collectors.contains_key(collector) {
                    return Err(NOT_FOUND);
                }
                if let Some(updates) = state.updates(collector, since) {
                    return Ok(updates);
                }
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Ok(String::new());
            }
        }
    }
}

fn content() -> String {
    let mut w = Writer::new();
    w.nest("returnval", |w| {
        w.moref("rootFolder", &MoRef::new("Folder", "group-d1"))
            .moref(
                "propertyCollector",
                &MoRef::new("PropertyCollector", "propertyCollector"),
            )
            .moref("viewManager", &MoRef::new("ViewManager", "ViewManager"))
            .nest("about", |w| {
                w.text("name", "VMware vCenter Server")
                    .text("fullName", "VMware vCenter Server 8.0.3 build-1")
                    .text("version", "8.0.3")
                    .text("apiType", "VirtualCenter")
                    .text("apiVersion", "8.0.3.0")
                    .text("instanceUuid", "4a6b");
            })
            .moref("sessionManager", &MoRef::new("SessionManager", "SessionManager"))
            .moref("searchIndex", &MoRef::new("SearchIndex", "SearchIndex"));
    });
    w.finish()
}
