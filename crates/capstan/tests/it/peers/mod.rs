//! Capstan and the controllers that it replaces, one after the other over the same objects and the same cloud.
//!
//! These tests build the peers, which takes minutes: `just peers` runs them, the ordinary command does not. With `PEERS_OUT`
//! set to a folder each step writes the objects there, to compare them field by field.

mod capv;
mod capz;
mod played;

mod clusterctl;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, manifests};
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::program::{LIMIT, Started, capstan, signal, until, wait};

/// How often the state of the world is read.
const ASK: Duration = Duration::from_millis(500);
/// How long nothing may change before the world counts as settled: longer than the pauses that the peers make between two
/// steps of one machine.
const QUIET: Duration = Duration::from_secs(12);

/// `capstan run`, with its log.
struct Capstan {
    child: Started,
    log: PathBuf,
}

impl Capstan {
    fn start(plane: &ControlPlane, args: &[&str], variables: &[(&str, String)]) -> Result<Self> {
        Self::start_led(plane, &["--leader-elect=false"], args, variables)
    }

    /// With the flags of its leader election.
    fn start_led(plane: &ControlPlane, election: &[&str], args: &[&str], variables: &[(&str, String)]) -> Result<Self> {
        let log = plane.dir().join("capstan.log");
        let file = std::fs::File::options().create(true).append(true).open(&log)?;
        let child = capstan()
            .args(["run", "--log-format", "json"])
            .args(election)
            .args(["--health", "0", "--metrics", "0", "--kubeconfig"])
            .arg(plane.kubeconfig())
            .args(args)
            .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()?;
        Ok(Self {
            child: Started(child),
            log,
        })
    }

    /// How often it has logged a message that begins so.
    fn said(&self, message: &str) -> usize {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let message = format!("\"message\":\"{message}");
        text.lines().filter(|line| line.contains(&message)).count()
    }

    /// Waits until it has logged a message that begins so, this many times.
    fn until_said(&self, message: &str, times: usize) -> Result<()> {
        until(|| self.said(message) >= times).with_context(|| format!("{message:?} {times} times: {}", tail(&self.log)))
    }

    /// Ends it in order.
    fn stop(mut self) -> Result<()> {
        signal(&self.child.0, "-TERM")?;
        let ended = wait(&mut self.child.0, LIMIT)?;
        ensure!(ended.success(), "{ended}: {}", tail(&self.log));
        Ok(())
    }
}

fn tail(log: &std::path::Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// A control plane with Cluster API core, and one namespace of it.
struct Management {
    plane: ControlPlane,
    namespace: String,
    /// The objects that a step leaves, by kind.
    kinds: &'static [&'static str],
}

/// The objects of one moment, by kind and name.
type Objects = BTreeMap<String, Value>;

impl Management {
    async fn start(kinds: &'static [&'static str]) -> Result<Self> {
        let options = capstan_testkit::Options {
            capi_core: true,
            dir: std::env::var_os("PEERS_OUT").map(|dir| PathBuf::from(dir).join("plane")),
            ..Default::default()
        };
        let plane = ControlPlane::start(options).await?;
        Ok(Self {
            namespace: plane.namespace("peers").await?,
            plane,
            kinds,
        })
    }

    async fn apply(&self, objects: &[Value]) -> Result<()> {
        let path = self.plane.dir().join("apply.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        std::fs::write(&path, serde_json::to_vec(&list)?)?;
        let path = path.display().to_string();
        self.kubectl(&["apply", "-f", &path]).await.map(drop)
    }

    async fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.plane.kubectl(&[&["-n", &self.namespace], args].concat()).await
    }

    /// Installs the definitions that `capstan crds` prints.
    async fn install_definitions(&self, args: &[&str]) -> Result<()> {
        let out = capstan().arg("crds").args(args).output()?;
        ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let mut crds = manifests::parse(&String::from_utf8(out.stdout)?)?;
        let is_crd = |object: &DynamicObject| {
            let types = object.types.as_ref();
            types.is_some_and(|types| types.kind == "CustomResourceDefinition")
        };
        crds.retain(is_crd);
        manifests::install_crds(&self.plane.client().await?, crds).await
    }

    /// Runs `capstan adopt`; returns what it printed, and fails with that on another exit code.
    async fn adopt(&self, args: &[&str], code: i32) -> Result<String> {
        let mut command = capstan();
        command
            .arg("adopt")
            .args(args)
            .arg("--kubeconfig")
            .arg(self.plane.kubeconfig());
        let out = tokio::task::spawn_blocking(move || command.output()).await??;
        let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        println!("$ capstan adopt {}\n{said}", args.join(" "));
        ensure!(out.status.code() == Some(code), "{:?}: {said}", out.status.code());
        Ok(said)
    }

    /// Waits until `capstan adopt` says that a step is done.
    async fn adopted(&self, step: &str) -> Result<()> {
        let since = Instant::now();
        loop {
            let said = self.adopt(&[], 2).await?;
            if said.lines().any(|line| line.contains(step) && line.ends_with("[done]")) {
                return Ok(());
            }
            ensure!(since.elapsed() < LIMIT, "{step:?} is not done: {said}");
            tokio::time::sleep(ASK).await;
        }
    }

    async fn objects(&self) -> Result<Objects> {
        let mut all = Objects::new();
        for kind in self.kinds {
            let text = self.kubectl(&["get", kind, "-o", "json"]).await?;
            let list: Value = serde_json::from_str(&text)?;
            for object in list["items"].as_array().into_iter().flatten() {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let kind = kind.split('.').next().unwrap_or_default();
                all.insert(format!("{kind}/{name}"), object.clone());
            }
        }
        Ok(all)
    }

    /// Waits until the objects are as wanted; fails with the last error of `wanted`.
    async fn until(&self, wanted: impl Fn(&Objects) -> Result<()>) -> Result<Objects> {
        let since = Instant::now();
        loop {
            // A definition that is just being replaced, or whose converter just starts, cannot be read for a moment.
            let seen = self.objects().await;
            let verdict = match &seen {
                Ok(objects) => wanted(objects),
                Err(error) => Err(anyhow::anyhow!("{error:#}")),
            };
            match (seen, verdict) {
                (Ok(objects), Ok(())) => return Ok(objects),
                (seen, Err(error)) if since.elapsed() > LIMIT => {
                    let seen = seen.unwrap_or_default();
                    let conditions: Vec<String> = seen.iter().map(|(name, object)| story(name, object)).collect();
                    return Err(error.context(conditions.join("\n")));
                }
                _ => tokio::time::sleep(ASK).await,
            }
        }
    }

    /// Waits until no object changes any more for [`QUIET`].
    async fn settled(&self) -> Result<Objects> {
        let since = Instant::now();
        let (mut last, mut unchanged) = (Objects::new(), Instant::now());
        while unchanged.elapsed() < QUIET {
            ensure!(since.elapsed() < LIMIT, "the objects do not settle");
            let now = self.until(|_| Ok(())).await?;
            if now != last {
                (last, unchanged) = (now, Instant::now());
            }
            tokio::time::sleep(ASK).await;
        }
        Ok(last)
    }

    /// Keeps the objects for a comparison, where the caller asked for it.
    fn keep(&self, step: &str, objects: &Objects) -> Result<()> {
        let Some(dir) = std::env::var_os("PEERS_OUT") else {
            return Ok(());
        };
        let file = PathBuf::from(dir).join(format!("{step}.json"));
        std::fs::write(&file, serde_json::to_vec_pretty(objects)?).with_context(|| file.display().to_string())
    }
}

/// Name, generation and conditions of an object, for the message of a test that fails.
fn story(name: &str, object: &Value) -> String {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let texts: Vec<String> = conditions
        .filter(|condition| condition["status"] != "True")
        .map(|condition| {
            let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
            format!(
                "{}={} {}: {}",
                text("type"),
                text("status"),
                text("reason"),
                text("message")
            )
        })
        .collect();
    let phase = object["status"]["phase"].as_str().unwrap_or_default();
    format!("{name} {phase}: {}", texts.join("; "))
}

/// Fails when an object is not the same in both: another UID, another spec, gone or new.
fn same_objects(before: &Objects, after: &Objects) -> Result<()> {
    let names = |objects: &Objects| objects.keys().cloned().collect::<Vec<_>>();
    ensure!(
        names(before) == names(after),
        "objects came or went:\n{:?}\n{:?}",
        names(before),
        names(after)
    );
    for (name, old) in before {
        let new = &after[name];
        let ids = |object: &Value| format!("uid {}, VM {}", object["metadata"]["uid"], object["spec"]["providerID"]);
        println!("{name}: before {}; after {}", ids(old), ids(new));
        ensure!(old["metadata"]["uid"] == new["metadata"]["uid"], "{name} was made anew");
        let [old, new] = [old, new].map(spec);
        ensure!(old == new, "{name} has another spec:\n{old}\n{new}");
    }
    Ok(())
}

/// Returns the spec with the defaults that the admission of CAPV writes into VSphereVMs, and that of CAPZ into pools.
fn spec(object: &Value) -> Value {
    let mut spec = object["spec"].clone();
    let defaults = match object["kind"].as_str() {
        Some("VSphereVM") => vec![("/os", json!("Linux"))],
        Some("AzureMachinePool") => vec![
            (
                "/template/diagnostics",
                json!({"boot": {"storageAccountType": "Managed"}}),
            ),
            (
                "/template/networkInterfaces",
                json!([{"privateIPConfigs": 1, "subnetName": "node-subnet"}]),
            ),
        ],
        _ => Vec::new(),
    };
    for (path, default) in defaults {
        let (parent, field) = path.rsplit_once('/').unwrap_or(("", path));
        if let Some(parent) = spec.pointer_mut(parent)
            && parent[field].is_null()
        {
            parent[field] = default;
        }
    }
    spec
}
