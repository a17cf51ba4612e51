//! A simulated vCenter for one test: it starts in a second, ends with its owner, and fails on demand.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::parts;

/// Maximum time of the last save; it writes a file of some KiB.
const SAVE_GRACE: Duration = Duration::from_secs(60);

/// The settings of a simulated vCenter.
#[derive(Clone, Debug)]
pub struct Options {
    pub username: String,
    pub password: String,
    pub clusters: u32,
    pub hosts: u32,
    pub datastores: u32,
    /// Datastore clusters; the first, `DC0_POD0`, has all datastores but `LocalDS_0`.
    pub datastore_clusters: u32,
    pub pools: u32,
    /// Virtual machines in each resource pool.
    pub machines: u32,
    /// Opaque (NSX) networks.
    pub opaque_networks: u32,
    /// The duration of a clone.
    pub clone_delay: Duration,
    /// The time from power-on until a guest gets addresses; `None`: never.
    pub guest_ip_delay: Option<Duration>,
    /// Refuse units that the controller type does not have, as a real vCenter does.
    pub unit_limits: bool,
    /// Do not compare the order of elements with the WSDL, which costs time.
    pub any_order: bool,
    /// `name=…,controller=…` and so on; empty means one template for each controller type (`pvscsi`, `pvscsi-13`,
    /// `lsi`, `lsisas`, `sata`, `nvme`, `nvme-21`, `ide`, `two-disks`, `no-snapshot`).
    pub templates: Vec<String>,
    /// `vms=…,hosts=…[,enabled=false]`: groups of the first compute cluster with a rule between them; the hosts' group has
    /// its first host.
    pub host_groups: Vec<String>,
    /// `name=…,item=…,template=…`: content libraries with a VM template each, a copy of a template.
    pub libraries: Vec<String>,
    /// The API version that it reports, such as `7.0.3.0`.
    pub api_version: Option<String>,
    /// `method:milliseconds` for other methods.
    pub method_delays: Vec<String>,
    /// Listen on this address (`127.0.0.1:8989`) instead of any free port.
    pub listen: Option<String>,
    /// A folder in which its certificate and its machines outlive it.
    pub state: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            username: "administrator@vsphere.local".into(),
            password: "secret".into(),
            clusters: 1,
            hosts: 3,
            datastores: 2,
            datastore_clusters: 0,
            pools: 1,
            machines: 0,
            opaque_networks: 0,
            clone_delay: Duration::ZERO,
            guest_ip_delay: Some(Duration::ZERO),
            unit_limits: true,
            any_order: false,
            templates: Vec::new(),
            host_groups: Vec::new(),
            libraries: Vec::new(),
            api_version: None,
            method_delays: Vec::new(),
            listen: None,
            state: None,
        }
    }
}

/// A running vCenter simulator; it ends when this is dropped.
pub struct Vcsim {
    pub url: String,
    /// `host:port`, as manifests give it.
    pub server: String,
    pub username: String,
    pub password: String,
    /// SHA-1, with colons, as manifests give it.
    pub thumbprint: String,
    pub thumbprint_sha256: String,
    /// Its certificate in PEM, which is its own CA.
    pub ca: String,
    pub admin: Admin,
    child: Child,
    stdin: Option<ChildStdin>,
    keeps_state: bool,
}

/// The effect on some calls of one method.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    pub method: String,
    /// `fault`, `task`, `drop-devices`, `status`, `close` or `lose-answer`.
    pub kind: String,
    /// The first call that is hit, from 1.
    pub nth: u32,
    /// The number of calls that it affects; 0 means all.
    pub times: u32,
    /// Only clones of this name.
    pub name: String,
    /// The vim25 type of the fault.
    pub fault: String,
    pub message: String,
    pub status: u16,
    /// The time for which a task runs before it fails.
    pub delay_ms: u64,
}

impl Fault {
    /// The task that a method starts fails once.
    pub fn task(method: &str, fault: &str, message: &str) -> Self {
        Self {
            method: method.into(),
            kind: "task".into(),
            times: 1,
            fault: fault.into(),
            message: message.into(),
            ..Self::default()
        }
    }

    /// A call fails once.
    pub fn call(method: &str, fault: &str, message: &str) -> Self {
        Self {
            kind: "fault".into(),
            ..Self::task(method, fault, message)
        }
    }
}

/// The simulator's admin endpoint: counters and faults.
#[derive(Clone, Debug)]
pub struct Admin {
    url: String,
    http: reqwest::Client,
}

impl Admin {
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Calls per method since the start or the last reset.
    pub async fn counters(&self) -> Result<BTreeMap<String, u64>> {
        let answer = self.http.get(format!("{}/counters", self.url)).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    /// All calls since the start or the last reset.
    pub async fn calls(&self) -> Result<u64> {
        Ok(self.counters().await?.values().sum())
    }

    pub async fn reset_counters(&self) -> Result<()> {
        self.send(self.http.delete(format!("{}/counters", self.url))).await
    }

    /// Returns the disk move types that each clone requested: for the whole clone, then for each disk.
    pub async fn moves(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let answer = self.http.get(format!("{}/moves", self.url)).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    /// All machines leave a VM group.
    pub async fn clear_group(&self, name: &str) -> Result<()> {
        self.send(self.http.post(format!("{}/groups/clear?name={name}", self.url)))
            .await
    }

    /// Returns how many clones were under way at once.
    pub async fn most_clones(&self) -> Result<u64> {
        let answer = self.http.get(format!("{}/clones", self.url)).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    pub async fn inject(&self, fault: &Fault) -> Result<()> {
        self.send(self.http.post(format!("{}/faults", self.url)).json(fault))
            .await
    }

    pub async fn clear_faults(&self) -> Result<()> {
        self.send(self.http.delete(format!("{}/faults", self.url))).await
    }

    /// A machine's disk at this unit becomes a first class disk, as the volumes of CSI drivers are.
    pub async fn make_volume(&self, vm: &str, unit: i32) -> Result<()> {
        let url = format!("{}/volumes?vm={vm}&unit={unit}", self.url);
        self.send(self.http.post(url)).await
    }

    /// Whether vCenter can read the files of a machine. While it cannot, the machine has no configuration.
    pub async fn set_accessible(&self, vm: &str, is: bool) -> Result<()> {
        let url = format!("{}/accessible?vm={vm}&is={is}", self.url);
        self.send(self.http.post(url)).await
    }

    /// Changes the free space of a datastore and its mode of maintenance (`normal`, `inMaintenance`).
    pub async fn set_datastore(&self, name: &str, free_gib: u64, maintenance: &str) -> Result<()> {
        let url = format!(
            "{}/datastores?name={name}&freeGiB={free_gib}&maintenance={maintenance}",
            self.url
        );
        self.send(self.http.post(url)).await
    }

    /// Refuses logins beyond so many sessions, as a vCenter does; 0 for any number.
    pub async fn limit_sessions(&self, sessions: u32) -> Result<()> {
        self.send(self.http.post(format!("{}/sessions/limit?n={sessions}", self.url)))
            .await
    }

    /// Makes the folders of a path, such as `one/two`, below the datacenter's folder of machines.
    pub async fn make_folders(&self, path: &str) -> Result<()> {
        self.send(self.http.post(format!("{}/folders?path={path}", self.url)))
            .await
    }

    /// Makes a port group of an NSX segment. Several may have one name if it starts with `NSX-`.
    pub async fn make_portgroup(&self, name: &str, segment: &str) -> Result<()> {
        let url = format!("{}/portgroups?name={name}&segment={segment}", self.url);
        self.send(self.http.post(url)).await
    }

    /// Returns the references of the objects that govmomi's finder finds. `kind` is vm, folder, datastore, network, pool, cluster or
    /// datacenter.
    pub async fn find(&self, kind: &str, path: &str) -> Result<Vec<String>> {
        let request = self.http.get(format!("{}/find", self.url));
        let answer = request.query(&[("kind", kind), ("path", path)]).send().await?;
        Ok(answer.error_for_status()?.json().await?)
    }

    /// Every session ends at once.
    pub async fn drop_sessions(&self) -> Result<()> {
        self.send(self.http.post(format!("{}/sessions/drop", self.url))).await
    }

    /// Cuts connections, drops sessions, and refuses new connections for `down`.
    pub async fn restart(&self, down: Duration) -> Result<()> {
        let url = format!("{}/restart?downMs={}", self.url, down.as_millis());
        self.send(self.http.post(url)).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<()> {
        let answer = request.send().await?;
        if !answer.status().is_success() {
            bail!("vcsim: {}", answer.text().await?);
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Ready {
    url: String,
    admin: String,
    username: String,
    password: String,
    sha1: String,
    sha256: String,
    ca: String,
}

/// Starts a simulated vCenter; builds it first if need be.
pub async fn vcsim(options: Options) -> Result<Vcsim> {
    tokio::task::spawn_blocking(move || start(&options))
        .await
        .context("starting vcsim was interrupted")?
}

fn start(options: &Options) -> Result<Vcsim> {
    let mut child = command(options)?.spawn().context("cannot start vcsim")?;
    let stdin = child.stdin.take();
    let stdout = child.stdout.take().context("vcsim has no stdout")?;
    let mut line = String::new();
    BufReader::new(stdout)
        .read_line(&mut line)
        .context("vcsim printed nothing")?;
    let ready: Ready = match serde_json::from_str(&line) {
        Ok(ready) => ready,
        Err(cause) => {
            // It ended before it was ready; its reason is on stderr already.
            let _ = child.kill();
            bail!("vcsim did not start: {cause} in {line:?}");
        }
    };
    let server = ready
        .url
        .trim_start_matches("https://")
        .trim_end_matches("/sdk")
        .to_owned();
    Ok(Vcsim {
        url: ready.url,
        server,
        username: ready.username,
        password: ready.password,
        thumbprint: ready.sha1,
        thumbprint_sha256: ready.sha256,
        ca: ready.ca,
        admin: Admin {
            url: ready.admin,
            http: reqwest::Client::builder().no_proxy().build()?,
        },
        child,
        stdin,
        keeps_state: options.state.is_some(),
    })
}

fn command(options: &Options) -> Result<Command> {
    let mut command = Command::new(parts::VCSIM.path()?);
    let mut delays = options.method_delays.clone();
    if !options.clone_delay.is_zero() {
        delays.push(format!("CloneVM_Task:{}", options.clone_delay.as_millis()));
    }
    let guest_ip = options.guest_ip_delay.map_or(-1, |delay| delay.as_millis() as i64);
    command
        // The lifeline is its standard input, which closes when this process ends in any way.
        .arg("-exit-on-stdin-close")
        .args(["-username", &options.username, "-password", &options.password])
        .args([
            "-cluster",
            &options.clusters.to_string(),
            "-host",
            &options.hosts.to_string(),
        ])
        .args([
            "-ds",
            &options.datastores.to_string(),
            "-pool",
            &options.pools.to_string(),
            "-vm",
            &options.machines.to_string(),
        ])
        .args([
            "-nsx",
            &options.opaque_networks.to_string(),
            "-method-delay",
            &delays.join(","),
        ])
        .args(["-pod", &options.datastore_clusters.to_string()])
        .args(["-guest-ip-delay", &guest_ip.to_string()])
        .arg(format!("-unit-limits={}", options.unit_limits))
        .arg(format!("-any-order={}", options.any_order))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    for template in &options.templates {
        command.args(["-template", template]);
    }
    for group in &options.host_groups {
        command.args(["-host-group", group]);
    }
    for library in &options.libraries {
        command.args(["-library", library]);
    }
    if let Some(version) = &options.api_version {
        command.args(["-api-version", version]);
    }
    if let Some(listen) = &options.listen {
        command.args(["-l", listen]);
    }
    if let Some(state) = &options.state {
        fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
        command.arg("-state").arg(state);
    }
    Ok(command)
}

impl Vcsim {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// It saves when its standard input closes, and then ends.
    fn wait_for_save(&mut self) {
        let since = Instant::now();
        while since.elapsed() < SAVE_GRACE && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Vcsim {
    fn drop(&mut self) {
        drop(self.stdin.take());
        if self.keeps_state {
            self.wait_for_save();
        }
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
