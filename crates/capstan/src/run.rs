//! `capstan run`: the manager of a cluster.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use capstan_azure::{Allowed, ClientIdOf, Namespaces};
use capstan_azure_pools::SignIn;
use capstan_core::Memory;
use capstan_kube::lease::{self, Identity};
use capstan_kube::serve::Server;
use capstan_kube::webhook;
use clap::{ArgAction, Args};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::access::Access;
use crate::controllers::Name;
use crate::manager::Manager;
use crate::peer_flags::PeerFlags;
use crate::serve::{self, Status};
use crate::{duration, logs, size};

/// Run the controllers against a cluster
///
/// In a cluster Capstan uses its service account, elsewhere --kubeconfig, KUBECONFIG or ~/.kube/config. Any number of replicas
/// may run: they elect a leader, and a leader whose lease has expired writes nothing, neither to the cluster nor to a cloud.
/// SIGTERM stops Capstan in order and releases the lease.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan run --kubeconfig ~/.kube/config --controllers vsphere
  capstan run --namespace openshift-machine-api --controllers openshift --log-format json")]
pub struct Run {
    /// Use this kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Run these controllers; each waits until its definitions are installed [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    controllers: Vec<Name>,
    /// Reconcile objects in this namespace only [default: all namespaces]
    #[arg(long, env = "WATCH_NAMESPACE")]
    namespace: Option<String>,
    /// Reconcile only objects of Cluster API whose label cluster.x-k8s.io/watch-filter has this value [default: all]
    #[arg(long, value_name = "VALUE")]
    watch_filter: Option<String>,
    /// Read Azure and vCenter again at this interval even if nothing changed, for example 5m [default: 10m]
    #[arg(long, alias = "sync-period", value_parser = duration::parse, value_name = "TIME")]
    resync: Option<Duration>,
    /// Keep at most this much of what workload clusters and vCenters have, for example 96Mi: their Nodes, pods that are drained, and machines. Some
    /// 400 Nodes need 1Mi. Namespaces that want more than their equal share give way to the others
    #[arg(long, value_parser = size::parse, default_value = "48Mi", value_name = "SIZE")]
    foreign_memory: usize,
    /// Serve /healthz and /readyz at this address; "0" for none
    #[arg(long, alias = "health-addr", default_value = ":9440", value_parser = address, value_name = "ADDRESS")]
    health: Address,
    /// Serve /metrics at this address; "0" for none. HTTPS, for accounts that may get the path /metrics; plain HTTP for all
    /// clients on a loopback address
    #[arg(
        long,
        alias = "metrics-bind-address",
        alias = "diagnostics-address",
        default_value = ":8443"
    )]
    #[arg(value_parser = address, value_name = "ADDRESS")]
    metrics: Address,
    /// Use tls.crt and tls.key in this folder for /metrics [default: a self-signed certificate]
    #[arg(long, value_name = "DIR")]
    metrics_cert_dir: Option<PathBuf>,
    /// Serve /metrics as plain HTTP, to all clients that can reach the address
    #[arg(long, alias = "insecure-diagnostics", default_value_t = false, action = ArgAction::Set, num_args = 0..=1)]
    #[arg(
        require_equals = true,
        default_missing_value = "true",
        hide_default_value = true,
        hide_possible_values = true,
        value_name = "BOOL"
    )]
    insecure_metrics: bool,
    /// Write logs in this format
    #[arg(long, alias = "logging-format", value_enum, default_value = "pretty")]
    log_format: logs::Format,
    /// Log at this level, for example debug, or info,capstan_azure=debug; RUST_LOG overrides it
    #[arg(long, default_value = "info", value_name = "FILTER")]
    log_level: String,
    #[command(flatten)]
    election: Election,
    /// Make the Secret POOL-azure-json for each AzureMachinePool, as CAPZ does while it runs the pools; needs the right to create and
    /// update Secrets
    #[arg(long, help_heading = "Azure")]
    azure_json: bool,
    #[command(flatten)]
    azure: Azure,
    #[command(flatten)]
    vsphere: Vsphere,
    #[command(flatten)]
    webhooks: Webhooks,
    #[command(flatten)]
    peers: PeerFlags,
}

/// An address to listen at. `None`: do not listen.
#[derive(Clone, Copy)]
struct Address(Option<SocketAddr>);

fn address(text: &str) -> Result<Address, String> {
    if text == "0" || text.is_empty() {
        return Ok(Address(None));
    }
    let parsed = match text.strip_prefix(':') {
        Some(port) => port.parse().ok().map(everywhere),
        None => text.replace("localhost:", "127.0.0.1:").parse().ok(),
    };
    let parsed = parsed.ok_or_else(|| format!("{text:?} is not an address; write it as 127.0.0.1:8080 or :8080"))?;
    Ok(Address(Some(parsed)))
}

/// Returns the address of a webhook, for which peers give a port alone.
fn webhook_address(text: &str) -> Result<Address, String> {
    match text.parse::<u16>() {
        Ok(port) => address(&if port == 0 { "0".to_owned() } else { format!(":{port}") }),
        Err(_) => address(text),
    }
}

/// Returns the address that stands for all addresses of this machine, of IPv6 too where one socket serves both.
fn everywhere(port: u16) -> SocketAddr {
    let apart = std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() != "0");
    let both = !apart && TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    let ip = if both {
        IpAddr::V6(Ipv6Addr::UNSPECIFIED)
    } else {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED)
    };
    SocketAddr::new(ip, port)
}

#[derive(Args)]
#[command(next_help_heading = "Leader election")]
struct Election {
    /// Elect a leader among the replicas; without an election only one replica may run
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    leader_elect: bool,
    /// Use a Lease of this name
    #[arg(
        long,
        aliases = ["leader-election-id", "leader-elect-resource-name"],
        default_value = "capstan",
        value_name = "NAME"
    )]
    leader_elect_name: String,
    /// Use a Lease in this namespace [default: the namespace of the service account or kubeconfig]
    #[arg(long, aliases = ["leader-election-namespace", "leader-elect-resource-namespace"], value_name = "NAMESPACE")]
    leader_elect_namespace: Option<String>,
    /// Take over from a leader that has not renewed its lease for this long
    #[arg(long, default_value = "15s", value_parser = duration::parse, value_name = "TIME")]
    leader_elect_lease_duration: Duration,
    /// Refuse all writes this long after the last renewal of the own lease
    #[arg(long, default_value = "10s", value_parser = duration::parse, value_name = "TIME")]
    leader_elect_renew_deadline: Duration,
    /// Renew or read the lease at this interval
    #[arg(long, default_value = "2s", value_parser = duration::parse, value_name = "TIME")]
    leader_elect_retry_period: Duration,
    /// Hold these leases of controllers that Capstan replaces, too, and write nothing without them: while Capstan leads, those
    /// controllers stand by; "capstan adopt" names the leases
    #[arg(long, value_delimiter = ',', value_parser = lease_name, value_name = "NAMESPACE/NAME,...")]
    hold_leases: Vec<(String, String)>,
}

fn lease_name(text: &str) -> Result<(String, String), String> {
    let parts = text
        .split_once('/')
        .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty());
    let (namespace, name) = parts.ok_or_else(|| format!("{text:?} is not NAMESPACE/NAME"))?;
    Ok((namespace.to_owned(), name.to_owned()))
}

impl Election {
    fn settings(&self, config: &kube::Config) -> Result<Option<lease::Settings>> {
        if !self.leader_elect {
            return Ok(None);
        }
        let (lease, renew, retry) = (
            self.leader_elect_lease_duration,
            self.leader_elect_renew_deadline,
            self.leader_elect_retry_period,
        );
        if !(retry < renew && renew < lease) {
            bail!(
                "--leader-elect-retry-period {retry:?} must be less than --leader-elect-renew-deadline {renew:?}, and that \
                 less than --leader-elect-lease-duration {lease:?}"
            );
        }
        Ok(Some(lease::Settings {
            namespace: self
                .leader_elect_namespace
                .clone()
                .unwrap_or_else(|| config.default_namespace.clone()),
            name: self.leader_elect_name.clone(),
            identity: Identity::of_this_process(),
            duration: lease,
            renew_deadline: renew,
            retry_period: retry,
            renew_period: retry,
            clock: capstan_core::Clock::system(),
        }))
    }
}

#[derive(Args, Default)]
#[command(next_help_heading = "Azure")]
pub struct Azure {
    /// Use this Azure cloud: AzurePublicCloud, AzureUSGovernmentCloud or AzureChinaCloud
    #[arg(long, env = "AZURE_ENVIRONMENT", value_name = "NAME")]
    azure_environment: Option<String>,
    /// Get tokens from this authority
    #[arg(long, env = "AZURE_AUTHORITY_HOST", value_name = "URL")]
    azure_authority_host: Option<String>,
    /// Use the Resource Manager at this address
    #[arg(long, env = "AZURE_RESOURCE_MANAGER_ENDPOINT", value_name = "URL")]
    azure_resource_manager_endpoint: Option<String>,
    /// Trust the certificates in this PEM file, besides those of the system
    #[arg(long, env = "SSL_CERT_FILE", value_name = "FILE")]
    azure_ca_file: Option<String>,
    /// Let AzureClusters without identityRef, and credentials Secrets of Machines that hold no credential, use the credential
    /// of this process, in these namespaces [without names: in all]
    #[arg(long, num_args = 0.., require_equals = true, default_missing_value = "*", value_delimiter = ',', value_name = "NAMESPACE,...")]
    allow_environment_identity: Vec<String>,
    /// Let AzureClusterIdentities and credentials Secrets of a namespace name these client ids only, where the token or the machine
    /// of this process is enough to sign in as them; "*" for every namespace [default: all client ids in all namespaces]
    #[arg(long, value_delimiter = ',', value_name = "NAMESPACE=CLIENT-ID,...")]
    allow_client_ids: Vec<ClientIdOf>,
    /// Let AzureClusterIdentities and credentials Secrets of Machines name certificates, tokens and credential files in this folder;
    /// repeat it for several [default: none]
    #[arg(long, value_name = "DIR")]
    azure_credential_folder: Vec<PathBuf>,
}

impl Azure {
    /// Returns the credentials that tenants may use to sign in.
    fn allowed(&self) -> Allowed {
        let names = &self.allow_environment_identity;
        let environment_identity = if names.is_empty() {
            Namespaces::None
        } else if names.iter().any(|name| name == "*") {
            Namespaces::All
        } else {
            Namespaces::Only(names.iter().cloned().collect())
        };
        Allowed {
            environment_identity,
            client_ids: self.allow_client_ids.iter().cloned().collect(),
            folders: self.azure_credential_folder.clone(),
        }
    }

    /// Returns the way in which AzureClusters sign in.
    pub fn sign_in(&self) -> Result<SignIn> {
        Ok(SignIn {
            allowed: self.allowed(),
            ..SignIn::from_vars(|name| std::env::var(name).ok())?
        })
    }

    pub fn settings(&self) -> Result<capstan_azure::Settings> {
        let settings = capstan_azure::Settings::from_vars(|name| match name {
            "AZURE_ENVIRONMENT" => self.azure_environment.clone(),
            "AZURE_AUTHORITY_HOST" => self.azure_authority_host.clone(),
            "AZURE_RESOURCE_MANAGER_ENDPOINT" => self.azure_resource_manager_endpoint.clone(),
            "SSL_CERT_FILE" => self.azure_ca_file.clone(),
            other => std::env::var(other).ok(),
        })?;
        Ok(capstan_azure::Settings {
            allowed: self.allowed(),
            ..settings
        })
    }
}

#[derive(Args, Default)]
#[command(next_help_heading = "vSphere")]
pub struct Vsphere {
    /// Send shared credentials to these vCenters: VSphereClusterIdentities without the annotation
    /// capstan.dev/allowed-servers, and VSPHERE_USERNAME; "*" for every server [default: none]
    #[arg(long, value_delimiter = ',', value_name = "HOST[:PORT],...")]
    vcenter_servers: Vec<String>,
    /// Let the VSphereClusters of these namespaces use VSPHERE_USERNAME and VSPHERE_PASSWORD instead of an identity of their own;
    /// "*" for all [default: none]
    #[arg(long, value_delimiter = ',', value_name = "NAMESPACE,...")]
    vcenter_account_namespaces: Vec<String>,
    /// Accept every certificate of a vCenter for which neither a thumbprint nor a CA is given; conditions report it
    #[arg(long)]
    insecure_vcenter: bool,
    /// Run at most this many clones in one vCenter at a time; the others wait, and namespaces take turns [default: any number]
    #[arg(long, value_name = "NUMBER")]
    vcenter_clones: Option<NonZeroUsize>,
    /// Run at most this many clones on one datastore at a time [default: any number]
    #[arg(long, value_name = "NUMBER")]
    datastore_clones: Option<NonZeroUsize>,
}

impl Vsphere {
    pub fn options(&self) -> capstan_vsphere_machines::Options {
        let mut options = capstan_vsphere_machines::Options::from_env();
        options.credentials.servers = self.vcenter_servers.clone();
        options.credentials.account_namespaces = self.vcenter_account_namespaces.clone();
        options.credentials.insecure = self.insecure_vcenter;
        options.clones = capstan_vsphere_machines::CloneLimits {
            per_vcenter: self.vcenter_clones.map(NonZeroUsize::get),
            per_datastore: self.datastore_clones.map(NonZeroUsize::get),
        };
        options
    }
}

/// The port of the webhooks in a cluster.
const WEBHOOK_PORT: u16 = 9443;
/// The Service in front of it, in the namespace of Capstan.
const WEBHOOK_SERVICE: &str = "capstan-webhook";

#[derive(Args)]
#[command(next_help_heading = "Webhooks")]
struct Webhooks {
    /// Serve webhooks (admission of OpenShift's machines, conversion of vSphere's kinds) at this address; "0" for none [default: :9443 in a cluster, a free port if the API server is on
    /// this machine, else none]
    #[arg(long, alias = "webhook-port", value_parser = webhook_address, value_name = "ADDRESS")]
    webhook: Option<Address>,
    /// Let the API server reach the webhook through this Service [default in a cluster: capstan-webhook in its own namespace]
    #[arg(long, value_name = "NAMESPACE/NAME")]
    webhook_service: Option<String>,
    /// Let the API server reach the webhook at this host and port
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "webhook_service")]
    webhook_host: Option<String>,
}

impl Webhooks {
    fn options(&self, config: &kube::Config, no_kubeconfig: bool) -> Result<Option<webhook::Options>> {
        let in_cluster = no_kubeconfig && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let host = config.cluster_url.host().unwrap_or_default();
        let beside = matches!(host, "localhost" | "[::1]") || host.starts_with("127.");
        let listen = match (self.webhook, in_cluster, beside) {
            (Some(Address(listen)), ..) => listen,
            (None, true, _) => Some(everywhere(WEBHOOK_PORT)),
            (None, false, true) => Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            (None, false, false) => None,
        };
        let Some(listen) = listen else { return Ok(None) };
        let namespace = &config.default_namespace;
        let address = match (&self.webhook_service, &self.webhook_host) {
            (Some(service), _) => {
                let (namespace, name) = service
                    .split_once('/')
                    .with_context(|| format!("--webhook-service {service:?} is not NAMESPACE/NAME"))?;
                Some(service_address(namespace, name))
            }
            (None, Some(host)) => Some(webhook::Address::Url(host.clone())),
            (None, None) => in_cluster.then(|| service_address(namespace, WEBHOOK_SERVICE)),
        };
        // Replicas behind one Service share one certificate.
        let secret_namespace = matches!(address, Some(webhook::Address::Service { .. })).then(|| namespace.clone());
        Ok(Some(webhook::Options {
            listen,
            address,
            secret_namespace,
            ..webhook::Options::default()
        }))
    }
}

fn service_address(namespace: &str, name: &str) -> webhook::Address {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    webhook::Address::Service {
        namespace,
        name,
        port: 443,
    }
}

pub async fn run(args: Run) -> Result<()> {
    let controllers = if args.controllers.is_empty() {
        Name::ALL.to_vec()
    } else {
        args.controllers.clone()
    };
    let wishes = args.peers.wishes(&controllers)?;
    logs::start(args.log_format, &args.log_level);
    let config = cluster(args.kubeconfig.as_deref(), args.context.clone()).await?;
    let status = Arc::new(Status::new(&args.election.leader_elect_name));
    serve_health(args.health, status.clone()).await?;
    serve_metrics(&args, &config, status.clone()).await?;
    info!(version = env!("CARGO_PKG_VERSION"), cluster = %config.cluster_url, "Capstan starts");
    if !wishes.without_effect.is_empty() {
        info!(
            flags = wishes.without_effect.join(" "),
            "these flags of other controllers have no effect"
        );
    }
    let mut vsphere = args.vsphere.options();
    vsphere.anti_affinity |= wishes.anti_affinity;
    let manager = Manager {
        controllers,
        watch_filter: args.watch_filter.filter(|value| !value.is_empty()),
        namespace: args.namespace.filter(|namespace| !namespace.is_empty()),
        azure: args.azure.settings()?,
        azure_sign_in: args.azure.sign_in()?,
        azure_json: args.azure_json,
        vsphere,
        resync: args.resync,
        memory: Arc::new(Memory::new(args.foreign_memory)),
        lease: args.election.settings(&config)?,
        hold: args.election.hold_leases,
        webhook: args.webhooks.options(&config, args.kubeconfig.is_none())?,
        admission: capstan_openshift::webhook::Options::default(),
        convert: true,
        registrar: None,
        status,
        config,
    };
    manager.run(stop_on_signal()?).await
}

async fn serve_health(address: Address, status: Arc<Status>) -> Result<()> {
    let Some(address) = address.0 else { return Ok(()) };
    // Probes ask until the process ends.
    let server = Server::new(serve::health(status), CancellationToken::new());
    let bound = server.listen(address).await;
    let bound = bound.with_context(|| format!("cannot listen on {address}; choose another address with --health"))?;
    info!(address = %bound, "serving health");
    Ok(())
}

/// A loopback address is open to this machine only, so Capstan asks for no token there.
async fn serve_metrics(args: &Run, config: &kube::Config, status: Arc<Status>) -> Result<()> {
    let Some(address) = args.metrics.0 else { return Ok(()) };
    let plain = args.insecure_metrics || address.ip().is_loopback();
    let forever = CancellationToken::new();
    let server = if plain {
        Server::new(serve::metrics(status, None), forever)
    } else {
        let client = kube::Client::try_from(config.clone()).context("cannot make a client for the metrics")?;
        let routes = serve::metrics(status, Some(Access::new(client)));
        Server::new(routes, forever).https(serve::certificate(args.metrics_cert_dir.clone())?)
    };
    let bound = server.listen(address).await;
    let bound = bound.with_context(|| format!("cannot listen on {address}; choose another address with --metrics"))?;
    info!(address = %bound, https = !plain, "serving metrics");
    Ok(())
}

/// Returns the access to the cluster of a kubeconfig file, or to the cluster that this program runs in.
pub async fn cluster(kubeconfig: Option<&std::path::Path>, context: Option<String>) -> Result<kube::Config> {
    let options = KubeConfigOptions {
        context,
        ..KubeConfigOptions::default()
    };
    if let Some(file) = kubeconfig {
        let read = Kubeconfig::read_from(file).with_context(|| format!("cannot read {}", file.display()))?;
        let config = kube::Config::from_custom_kubeconfig(read, &options).await;
        return config.with_context(|| format!("cannot use {}", file.display()));
    }
    if options.context.is_some() {
        return kube::Config::from_kubeconfig(&options)
            .await
            .context("cannot use the kubeconfig");
    }
    kube::Config::infer()
        .await
        .context("no cluster: give --kubeconfig, or set KUBECONFIG")
}

/// Returns a token that the first SIGINT or SIGTERM cancels. A second signal ends the process at once.
pub fn stop_on_signal() -> Result<CancellationToken> {
    let stop = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let told = stop.clone();
    tokio::spawn(async move {
        for round in 0.. {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if round > 0 {
                std::process::exit(130);
            }
            info!("Capstan stops");
            told.cancel();
        }
    });
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn a_port_alone_is_served_at_every_address_that_there_is() {
        let listening = TcpListener::bind(address(":0").unwrap().0.unwrap()).unwrap();
        let port = listening.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // Where the machine has IPv6 at all.
        if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn the_operator_names_who_may_use_the_environments_identity() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            azure: Azure,
        }
        let read = |flags: &[&str]| {
            let line = <Line as clap::Parser>::try_parse_from(["capstan"].iter().chain(flags)).unwrap();
            line.azure.settings().unwrap().allowed.environment_identity
        };
        let both = Namespaces::Only(["team-a".to_owned(), "team-b".to_owned()].into());
        assert_eq!(read(&[]), Namespaces::None);
        assert_eq!(read(&["--allow-environment-identity"]), Namespaces::All);
        assert_eq!(read(&["--allow-environment-identity=team-a,team-b"]), both);
    }

    #[test]
    fn the_operator_names_the_client_ids_of_a_namespace() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            azure: Azure,
        }
        let read = |flags: &[&str]| <Line as clap::Parser>::try_parse_from(["capstan"].iter().chain(flags));
        let line = read(&["--allow-client-ids=team-a=a,team-b=b", "--allow-client-ids=team-a=c"])
            .unwrap_or_else(|e| panic!("{e}"));
        let allowed = line.azure.settings().unwrap().allowed.client_ids;
        for (namespace, id, expected) in [
            ("team-a", "a", true),
            ("team-a", "c", true),
            ("team-b", "b", true),
            ("team-b", "a", false),
        ] {
            assert_eq!(allowed.check(namespace, id).is_ok(), expected, "{namespace} {id}");
        }
        assert!(read(&["--allow-client-ids=team-a"]).is_err());
    }

    #[test]
    fn addresses_are_read_as_users_write_them() {
        let read = |text: &str| address(text).map(|address| address.0);
        assert_eq!(read("0"), Ok(None));
        assert_eq!(read("localhost:1"), Ok(Some(SocketAddr::from(([127, 0, 0, 1], 1)))));
        assert_eq!(read("0.0.0.0:1"), Ok(Some(SocketAddr::from(([0, 0, 0, 0], 1)))));
        assert!(read(":port").is_err_and(|said| said.contains("\":port\" is not an address")));
    }
}
