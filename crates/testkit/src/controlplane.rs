//! etcd, kube-apiserver, kube-controller-manager and kwok on free loopback ports.
//!
//! The kubeconfig file appears only when all of them answer, so a process that sees the file can use it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{Api, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::parts;
use crate::pki::{Identity, Pki};
use crate::process::{Lifeline, Process};
use crate::{clusterapi, files, gobuild, manifests, shared};

/// Maximum time until a control plane answers. It takes about 4 s on an idle machine, and took 80 s on one that was
/// building several things at once.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(300);
/// The interval at which a starting program is asked whether it is ready.
pub(crate) const ASK: Duration = Duration::from_millis(50);
/// Another process may take a port between our look and the program's bind.
const ATTEMPTS: usize = 3;
/// kwok does not change Nodes and Pods with this label and value: the test sets their status.
pub const KWOK_LABEL: &str = "capstan.dev/kwok";
pub const KWOK_OFF: &str = "off";

/// The settings of a control plane.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder of state and logs. Without it, a folder of its own that is removed at the end.
    pub dir: Option<PathBuf>,
    /// Keep Nodes and Pods alive.
    pub kwok: bool,
    /// Run namespaces, garbage collection, disruption budgets.
    pub controller_manager: bool,
    /// Run the Cluster API core manager, with its CRDs, conversion and admission.
    pub capi_core: bool,
    /// Further flags for kube-apiserver.
    pub apiserver_flags: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dir: None,
            kwok: true,
            controller_manager: true,
            capi_core: false,
            apiserver_flags: Vec::new(),
        }
    }
}

/// A running control plane. One that was started by this value ends with it; a shared one ends with the test run.
pub struct ControlPlane {
    dir: PathBuf,
    kubeconfig: PathBuf,
    processes: Vec<Process>,
    lifeline: Option<Lifeline>,
    remove_dir: bool,
}

impl ControlPlane {
    /// Returns the control plane of this test run. The first caller starts it. Isolate by [`Self::namespace`].
    pub async fn shared() -> Result<Self> {
        let dir = tokio::task::spawn_blocking(shared::find_or_start).await??;
        Ok(Self::attached(dir))
    }

    /// One of your own.
    pub async fn start(options: Options) -> Result<Self> {
        let own = options.dir.is_none();
        let dir = match options.dir.clone() {
            Some(dir) => dir,
            None => shared::fresh_dir("own")?,
        };
        let mut plane = Self::launch(dir, &options, Lifeline::own).await?;
        plane.remove_dir = own;
        Ok(plane)
    }

    pub(crate) fn attached(dir: PathBuf) -> Self {
        let kubeconfig = dir.join("kubeconfig");
        Self {
            dir,
            kubeconfig,
            processes: Vec::new(),
            lifeline: None,
            remove_dir: false,
        }
    }

    pub(crate) async fn launch(
        dir: PathBuf,
        options: &Options,
        lifeline: impl Fn() -> Result<Lifeline>,
    ) -> Result<Self> {
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        let programs = tokio::task::spawn_blocking({
            let options = options.clone();
            move || Programs::provide(&options)
        })
        .await??;
        let pki = Pki::open(&dir.join("pki"))?;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let mut plane = Self::attached(dir.clone());
            let started = plane.bring_up(&programs, &pki, options, lifeline()?).await;
            match started {
                Ok(()) => return Ok(plane),
                Err(error) if format!("{error:#}").contains("address already in use") => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| anyhow::anyhow!("no attempt was made")))
    }

    async fn bring_up(&mut self, programs: &Programs, pki: &Pki, options: &Options, lifeline: Lifeline) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        let dir = self.dir.clone();
        let [etcd, peer, fresh] = free_ports()?;
        // One that is started again in its place stays where its clients know it.
        let kept = std::fs::read_to_string(dir.join("port"))
            .ok()
            .and_then(|text| text.parse().ok());
        let secure = kept
            .filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
            .unwrap_or(fresh);
        files::write(&dir.join("port"), secure.to_string())?;
        self.processes
            .push(lifeline.start(&dir, "etcd", etcd_command(&programs.etcd, &dir, etcd, peer))?);
        let mut apiserver = apiserver_command(&programs.apiserver, pki, etcd, secure);
        apiserver.args(&options.apiserver_flags);
        self.processes.push(lifeline.start(&dir, "kube-apiserver", apiserver)?);

        let server = format!("https://127.0.0.1:{secure}");
        let admin = kubeconfig(&server, pki.ca(), &pki.client("capstan-admin", "system:masters")?);
        self.wait_ready(&admin, deadline).await?;
        if let Some(program) = &programs.controller_manager {
            // One identity for all its controllers, which in a real cluster have a service account each.
            let identity = pki.client("system:kube-controller-manager", "system:masters")?;
            let config = dir.join("kube-controller-manager.kubeconfig");
            files::write_private(&config, kubeconfig(&server, pki.ca(), &identity))?;
            let command = controller_manager_command(program, pki, &config);
            self.processes
                .push(lifeline.start(&dir, "kube-controller-manager", command)?);
        }
        if let Some((program, stages)) = &programs.kwok {
            let config = dir.join("kwok.kubeconfig");
            files::write_private(
                &config,
                kubeconfig(&server, pki.ca(), &pki.client("kwok", "system:masters")?),
            )?;
            self.processes
                .push(lifeline.start(&dir, "kwok", kwok_command(program, stages, &config)?)?);
        }
        if programs.controller_manager.is_some() {
            self.wait_service_account(&admin, deadline).await?;
        }
        files::write_private(&self.kubeconfig, admin)?;
        if let Some(program) = &programs.cluster_api {
            let process = clusterapi::start(program, &dir, pki, &lifeline, &self.client().await?).await?;
            self.processes.push(process);
        }
        self.lifeline = Some(lifeline);
        Ok(())
    }

    async fn wait_ready(&mut self, kubeconfig: &str, deadline: Instant) -> Result<()> {
        let client = Client::try_from(config(kubeconfig).await?)?;
        self.wait("kube-apiserver to be ready", deadline, || async {
            let request = http_get("/readyz");
            client.request_text(request).await.is_ok_and(|text| text == "ok")
        })
        .await
    }

    async fn wait_service_account(&mut self, kubeconfig: &str, deadline: Instant) -> Result<()> {
        let accounts: Api<ServiceAccount> = Api::namespaced(Client::try_from(config(kubeconfig).await?)?, "default");
        self.wait(
            "kube-controller-manager to make the default service account",
            deadline,
            || async { accounts.get_opt("default").await.is_ok_and(|found| found.is_some()) },
        )
        .await
    }

    async fn wait<F: Future<Output = bool>>(
        &mut self,
        what: &str,
        deadline: Instant,
        mut done: impl FnMut() -> F,
    ) -> Result<()> {
        loop {
            self.check()?;
            if tokio::time::timeout(Duration::from_secs(2), done())
                .await
                .unwrap_or(false)
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "waited {} s for {what}; see the logs in {}",
                    START_TIMEOUT.as_secs(),
                    self.dir.display()
                );
            }
            tokio::time::sleep(ASK).await;
        }
    }

    /// Fails when one of the programs has ended.
    pub fn check(&mut self) -> Result<()> {
        self.processes.iter_mut().try_for_each(Process::check)
    }

    /// Returns the folder of state and logs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file with the administrator's access.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The administrator's access.
    pub async fn config(&self) -> Result<Config> {
        let text = std::fs::read_to_string(&self.kubeconfig)
            .with_context(|| format!("cannot read {}", self.kubeconfig.display()))?;
        config(&text).await
    }

    /// A client for the calling runtime; do not share one between tests, each of which has a runtime of its own.
    pub async fn client(&self) -> Result<Client> {
        Ok(Client::try_from(self.config().await?)?)
    }

    /// Creates a fresh namespace and waits until pods can be created in it.
    pub async fn namespace(&self, prefix: &str) -> Result<String> {
        let client = self.client().await?;
        let metadata = ObjectMeta {
            generate_name: Some(format!("{prefix}-")),
            ..ObjectMeta::default()
        };
        let namespace = Namespace {
            metadata,
            ..Namespace::default()
        };
        let made = Api::<Namespace>::all(client.clone())
            .create(&PostParams::default(), &namespace)
            .await?;
        let name = made.metadata.name.context("the API server named no namespace")?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client, &name);
        let deadline = Instant::now() + START_TIMEOUT;
        while accounts.get_opt("default").await?.is_none() {
            if Instant::now() > deadline {
                bail!("namespace {name} got no default service account");
            }
            tokio::time::sleep(ASK).await;
        }
        Ok(name)
    }

    /// Installs the CRDs of `deploy/crds` and waits until they are served. Safe to call from every test.
    pub async fn install_crds(&self) -> Result<()> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
        self.install_crds_from(&dir).await
    }

    /// Installs the CRDs of Cluster API without its manager. Tests that play its part write its objects themselves, in
    /// one version each, since there is no conversion webhook.
    pub async fn install_cluster_api_crds(&self) -> Result<()> {
        let dir = tokio::task::spawn_blocking(|| parts::CLUSTER_API_CRDS.path()).await??;
        self.install_crds_from(&dir).await
    }

    /// Installs all CRDs found in a folder's YAML files and waits until they are served.
    pub async fn install_crds_from(&self, dir: &Path) -> Result<()> {
        let crds = manifests::read_dir(dir)?;
        let lock = self.dir.join("crds.lock");
        let _lock = tokio::task::spawn_blocking(move || files::Lock::take(&lock, || ())).await??;
        manifests::install_crds(&self.client().await?, crds).await
    }

    /// Runs kubectl as administrator and returns its output. Fails with its error output.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        let kubectl = tokio::task::spawn_blocking(|| parts::KUBECTL.path()).await??;
        let out = tokio::process::Command::new(kubectl)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(args)
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run kubectl")?;
        if !out.status.success() {
            bail!(
                "kubectl {}: {}",
                args.join(" "),
                String::from_utf8_lossy(&out.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// A program of one's own control plane, to pause or kill it.
    pub fn process(&mut self, name: &str) -> Option<&mut Process> {
        self.processes.iter_mut().find(|process| process.name() == name)
    }

    /// Leaves the programs to their lifeline.
    pub(crate) fn detach(mut self) {
        self.processes.drain(..).for_each(Process::detach);
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // Clients first, the database last.
        while let Some(process) = self.processes.pop() {
            drop(process);
        }
        if let Some(mut lifeline) = self.lifeline.take() {
            lifeline.cut();
        }
        if self.remove_dir {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}

struct Programs {
    etcd: PathBuf,
    apiserver: PathBuf,
    controller_manager: Option<PathBuf>,
    kwok: Option<(PathBuf, PathBuf)>,
    cluster_api: Option<clusterapi::Programs>,
}

impl Programs {
    fn provide(options: &Options) -> Result<Self> {
        let kwok = || Ok::<_, anyhow::Error>((parts::KWOK.path()?, parts::KWOK_STAGES.path()?));
        Ok(Self {
            etcd: parts::ETCD.path()?,
            apiserver: parts::KUBE_APISERVER.path()?,
            controller_manager: options
                .controller_manager
                .then(|| parts::KUBE_CONTROLLER_MANAGER.path())
                .transpose()?,
            kwok: options.kwok.then(kwok).transpose()?,
            cluster_api: options.capi_core.then(clusterapi::Programs::provide).transpose()?,
        })
    }
}

fn etcd_command(program: &Path, dir: &Path, client: u16, peer: u16) -> Command {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let mut command = Command::new(program);
    command
        .arg(format!("--data-dir={}", dir.join("etcd").display()))
        .args([
            "--name=default",
            "--unsafe-no-fsync",
            "--log-level=warn",
            "--force-new-cluster",
        ])
        .args([
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
        ])
        .args([
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
        ])
        .arg(format!("--initial-cluster=default={peer}"));
    command
}

fn apiserver_command(program: &Path, pki: &Pki, etcd: u16, secure: u16) -> Command {
    let mut command = Command::new(program);
    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.file(name).display());
    command
        .args([
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            format!("--secure-port={secure}"),
        ])
        .args([
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
        ])
        .args([
            file("tls-cert-file", "apiserver.crt"),
            file("tls-private-key-file", "apiserver.key"),
        ])
        .args([
            file("client-ca-file", "ca.crt"),
            file("service-account-key-file", "sa.pub"),
        ])
        .arg(file("service-account-signing-key-file", "sa.key"))
        .args([
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
        ])
        .args([
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--profiling=false",
        ])
        // Tests and benches measure the controllers, not the API server's manners.
        .args(["--enable-priority-and-fairness=false", "--max-requests-inflight=3000"])
        .arg("--max-mutating-requests-inflight=1500");
    command
}

fn controller_manager_command(program: &Path, pki: &Pki, kubeconfig: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .arg(format!(
            "--service-account-private-key-file={}",
            pki.file("sa.key").display()
        ))
        .arg(format!("--root-ca-file={}", pki.file("ca.crt").display()))
        .args([
            "--leader-elect=false",
            // A test runs an example controller of that kind.
            "--controllers=*,-replicationcontroller-controller",
            "--secure-port=0",
            "--profiling=false",
            "--kube-api-qps=300",
        ])
        .args(["--kube-api-burst=600", "--concurrent-namespace-syncs=20"]);
    command
}

fn kwok_command(program: &Path, stages: &Path, kubeconfig: &Path) -> Result<Command> {
    let mut command = Command::new(program);
    command
        .arg(format!("--kubeconfig={}", kubeconfig.display()))
        .args(["--manage-all-nodes=true", "--node-lease-duration-seconds=40"])
        .arg(format!(
            "--disregard-status-with-label-selector={KWOK_LABEL}={KWOK_OFF}"
        ));
    for stage in gobuild::yaml_files(stages)? {
        command.arg(format!("--config={}", stage.display()));
    }
    Ok(command)
}

/// Ports below the range from which the kernel gives out ports for outgoing connections, so that none of those takes
/// one before the program binds it.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    let seed = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.subsec_nanos()) ^ std::process::id() << 7;
    let mut held = Vec::new();
    for step in 0..COUNT {
        let port = FIRST + ((seed % u32::from(COUNT)) as u16 + step) % COUNT;
        held.extend(TcpListener::bind(("127.0.0.1", port)).map(|listener| (port, listener)));
        if held.len() == N {
            return Ok(std::array::from_fn(|at| held[at].0));
        }
    }
    bail!("no free loopback ports between {FIRST} and {}", FIRST + COUNT)
}

fn http_get(path: &str) -> http::Request<Vec<u8>> {
    let mut request = http::Request::new(Vec::new());
    if let Ok(uri) = path.parse() {
        *request.uri_mut() = uri;
    }
    request
}

async fn config(kubeconfig: &str) -> Result<Config> {
    let parsed = Kubeconfig::from_yaml(kubeconfig).context("cannot parse the kubeconfig")?;
    Ok(Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await?)
}

fn kubeconfig(server: &str, ca: &str, identity: &Identity) -> String {
    let encode = |pem: &str| BASE64_STANDARD.encode(pem);
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: capstan\n\
         clusters:\n- name: capstan\n  cluster:\n    server: {server}\n    certificate-authority-data: {}\n\
         contexts:\n- name: capstan\n  context:\n    cluster: capstan\n    user: capstan\n\
         users:\n- name: capstan\n  user:\n    client-certificate-data: {}\n    client-key-data: {}\n",
        encode(ca),
        encode(&identity.certificate),
        encode(&identity.key),
    )
}
