//! `capstan sim azure`: the simulator as a program.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use k8s_openapi::api::core::v1::Taint;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::Azure;
use super::clock::Span;
use super::config::{Config, Network, Strict, Times};
use super::joiner::{Cluster, Options};
use super::log::Request;

/// The number of lines that wait for a slow reader. Further lines are dropped, so that the simulator does not block.
const LINES: usize = 4096;

const AFTER_HELP: &str = r#"When ready, one line of JSON is printed: url, authority, ca, subscription, tenant, clientId, clientSecret. After it, each
request is printed as a line of JSON with method, path, policy and status.

Python:
  cred = ClientSecretCredential(tenant, clientId, clientSecret, authority=authority,
                                disable_instance_discovery=True, connection_verify=ca)
  compute = ComputeManagementClient(cred, subscription, base_url=url, connection_verify=ca,
                                    credential_scopes=[url + "/.default"])
az:
  export REQUESTS_CA_BUNDLE=ca.pem
  az cloud register -n sim --endpoint-resource-manager $URL --endpoint-active-directory $URL \
     --endpoint-active-directory-resource-id $URL && az cloud set -n sim
  az config set core.instance_discovery=false
  az login --service-principal -u $CLIENT_ID -p $CLIENT_SECRET --tenant $TENANT
Go (and Capstan, and every SDK that reads these variables):
  export SSL_CERT_FILE=ca.pem AZURE_AUTHORITY_HOST=$URL AZURE_RESOURCE_MANAGER_ENDPOINT=$URL
  cloud.Configuration{ActiveDirectoryAuthorityHost: url, Services: map[cloud.ServiceName]cloud.ServiceConfiguration{
      cloud.ResourceManager: {Endpoint: url, Audience: url}}}, with DisableInstanceDiscovery
Programs without such a setting: point management.azure.com and login.microsoftonline.com to this machine in the hosts
file, listen on port 443 with --public-hosts, and set SSL_CERT_FILE. Whoever has the state file of such a simulator can
pose as Azure to everybody who trusts ca.pem: remove both afterwards.

Faults, counters, requests, time and evictions: the admin API under $URL/sim, described in docs/sim-azure.md. For example
  curl --cacert ca.pem -X POST $URL/sim/faults -d '{"policy":"PutVM","times":1,"action":{"kind":"answer","status":429,"retryAfter":5}}'"#;

/// Simulate Azure Resource Manager
#[derive(Args, Clone, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct AzureArgs {
    /// Listen on this address; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Bearer token of the admin API; required unless the listener is on loopback
    #[arg(long, value_name = "TOKEN", env = "CAPSTAN_SIM_ADMIN_TOKEN", hide_env_values = true)]
    pub admin_token: Option<String>,
    /// Let the certificate name management.azure.com and login.microsoftonline.com, too
    #[arg(long)]
    pub public_hosts: bool,
    /// File to write the certificate authority's certificate to
    #[arg(long, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// File to load state from, and to save it to
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Cluster that the Nodes of running VMs and instances join
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Other clusters, by the name of a scale set or VM (or a prefix with * at its end)
    #[arg(long, value_name = "NAME=FILE")]
    pub join: Vec<String>,
    /// Time from a VM's start until its Node is ready
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub node_ready_after: Span,
    /// Label of joining Nodes
    #[arg(long, value_name = "NAME=VALUE")]
    pub node_label: Vec<String>,
    /// Taint of joining Nodes
    #[arg(long, value_name = "KEY[=VALUE]:EFFECT")]
    pub node_taint: Vec<String>,
    /// Kubelet version of joining Nodes
    #[arg(long, value_name = "VERSION")]
    pub node_version: Option<String>,
    /// Refuse calls beyond Azure's published limits
    #[arg(long)]
    pub throttle: bool,
    /// Seconds in Retry-After of compute operations
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub retry_after: u64,
    /// Seconds in Retry-After of network operations
    #[arg(long, value_name = "SECONDS", default_value_t = 1)]
    pub network_retry_after: u64,
    /// Seed of names and times
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Items per page of a list
    #[arg(long, default_value_t = 200)]
    pub page_size: usize,
    /// Quota of cores per region
    #[arg(long, default_value_t = 100_000)]
    pub regional_cores: u64,
    /// Quota of cores per family and region
    #[arg(long)]
    pub family_cores: Option<u64>,
    /// Seconds that a token is valid
    #[arg(long, default_value_t = 3599)]
    pub token_lifetime: u64,
    #[arg(long, default_value_t = Config::default().subscription)]
    pub subscription: String,
    #[arg(long, default_value_t = Config::default().tenant)]
    pub tenant: String,
    #[arg(long, default_value_t = Config::default().client_id)]
    pub client_id: String,
    #[arg(long, default_value_t = Config::default().client_secret)]
    pub client_secret: String,
    /// Resource group with a network that exists from the start
    #[arg(long, value_name = "GROUP/VNET/SUBNET[,SUBNET][@LOCATION]")]
    pub network: Vec<String>,
    /// Reject and spell as Azure does, also where clients commonly fail (docs/sim-azure.md)
    #[arg(long)]
    pub strict: bool,
    /// Action that the client may take, such as 'Microsoft.Compute/*/read'; not given: all
    #[arg(long, value_name = "ACTION")]
    pub allow_action: Vec<String>,
    /// Provider namespace that a client must register first
    #[arg(long, value_name = "NAMESPACE")]
    pub unregistered: Vec<String>,
    #[command(flatten)]
    pub times: TimeArgs,
}

/// Times are written 20s, 500ms, or as a range 15s..40s.
#[derive(Args, Clone, Debug)]
pub struct TimeArgs {
    #[arg(long, value_name = "TIME", default_value_t = Times::default().vm_create)]
    pub vm_create: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().vm_update)]
    pub vm_update: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().vm_delete)]
    pub vm_delete: Span,
    /// Start, power off, restart, deallocate
    #[arg(long, value_name = "TIME", default_value_t = Times::default().vm_power)]
    pub vm_power: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().instance_create)]
    pub instance_create: Span,
    /// Manual upgrade and reimage
    #[arg(long, value_name = "TIME", default_value_t = Times::default().instance_update)]
    pub instance_update: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().instance_delete)]
    pub instance_delete: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().network)]
    pub network_time: Span,
    #[arg(long, value_name = "TIME", default_value_t = Times::default().disk)]
    pub disk: Span,
    /// Time from simulateEviction to the eviction
    #[arg(long, value_name = "TIME", default_value_t = Times::default().eviction)]
    pub eviction: Span,
    /// Time from an instance's creation until lists show it
    #[arg(long, value_name = "TIME", default_value_t = Times::default().listing)]
    pub listing: Span,
    /// Latency of every call
    #[arg(long, value_name = "TIME", default_value_t = Times::default().latency)]
    pub latency: Span,
}

impl AzureArgs {
    pub fn config(&self) -> anyhow::Result<Config> {
        let times = &self.times;
        let mut networks = vec![Network::default()];
        for text in &self.network {
            networks.push(network(text)?);
        }
        Ok(Config {
            listen: self.listen,
            admin_token: self.admin_token.clone(),
            public_hosts: self.public_hosts,
            subscription: self.subscription.clone(),
            tenant: self.tenant.clone(),
            client_id: self.client_id.clone(),
            client_secret: self.client_secret.clone(),
            start: None,
            seed: self.seed,
            times: Times {
                vm_create: times.vm_create,
                vm_update: times.vm_update,
                vm_delete: times.vm_delete,
                vm_power: times.vm_power,
                instance_create: times.instance_create,
                instance_update: times.instance_update,
                instance_delete: times.instance_delete,
                network: times.network_time,
                disk: times.disk,
                eviction: times.eviction,
                listing: times.listing,
                latency: times.latency,
            },
            strict: if self.strict { Strict::ALL } else { Strict::NONE },
            allowed_actions: (!self.allow_action.is_empty()).then(|| self.allow_action.clone()),
            retry_after: self.retry_after,
            network_retry_after: self.network_retry_after,
            throttle: self.throttle,
            page_size: self.page_size,
            regional_cores: self.regional_cores,
            family_cores: self.family_cores,
            token_lifetime: Duration::from_secs(self.token_lifetime),
            require_token: true,
            networks,
            unregistered: self.unregistered.clone(),
            state: self.state.clone(),
            ca_file: self.ca_file.clone(),
            joiner: self.joiner()?,
        })
    }

    fn joiner(&self) -> anyhow::Result<Option<Options>> {
        if self.kubeconfig.is_none() && self.join.is_empty() {
            return Ok(None);
        }
        let pair = |text: &String| {
            let pair = text
                .split_once('=')
                .map(|(name, value)| (name.to_owned(), value.to_owned()));
            pair.with_context(|| format!("{text:?}: write NAME=VALUE"))
        };
        let join = self.join.iter().map(pair).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Some(Options {
            default: self.kubeconfig.clone().map(Cluster::Kubeconfig),
            by_name: join
                .into_iter()
                .map(|(name, file)| (name, Cluster::Kubeconfig(file.into())))
                .collect(),
            ready_after: Some(self.node_ready_after),
            labels: self
                .node_label
                .iter()
                .map(pair)
                .collect::<anyhow::Result<BTreeMap<_, _>>>()?,
            taints: self
                .node_taint
                .iter()
                .map(|text| taint(text))
                .collect::<anyhow::Result<_>>()?,
            kubelet_version: self.node_version.clone(),
        }))
    }
}

fn network(text: &str) -> anyhow::Result<Network> {
    let (path, location) = text.split_once('@').unwrap_or((text, "eastus"));
    let parts: Vec<&str> = path.split('/').collect();
    let [group, vnet, subnets] = parts[..] else {
        anyhow::bail!("{text:?}: write a network as GROUP/VNET/SUBNET[,SUBNET][@LOCATION]");
    };
    let subnets = subnets.split(',').map(str::to_owned).collect();
    Ok(Network {
        group: group.into(),
        location: location.into(),
        vnet: vnet.into(),
        subnets,
    })
}

fn taint(text: &str) -> anyhow::Result<Taint> {
    let (key, effect) = text
        .rsplit_once(':')
        .with_context(|| format!("{text:?}: write a taint as KEY[=VALUE]:EFFECT"))?;
    let (key, value) = key
        .split_once('=')
        .map_or((key, None), |(key, value)| (key, Some(value.to_owned())));
    Ok(Taint {
        key: key.into(),
        value,
        effect: effect.into(),
        time_added: None,
    })
}

/// Prints requests as lines of JSON on standard output. A reader that stops reading never blocks the simulator.
#[derive(Debug)]
pub struct Lines(std::sync::mpsc::SyncSender<String>);

impl Lines {
    fn start() -> Self {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<String>(LINES);
        std::thread::spawn(move || {
            for line in receiver {
                if writeln!(std::io::stdout(), "{line}").is_err() {
                    break;
                }
            }
        });
        Self(sender)
    }

    pub fn print(&self, request: &Request) {
        if let Ok(line) = serde_json::to_string(request) {
            let _ = self.0.try_send(line);
        }
    }
}

/// Runs the simulator until a signal stops it.
pub async fn run(args: AzureArgs) -> anyhow::Result<()> {
    // A process that has read the line below may send a signal.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    if !args.listen.ip().is_loopback() {
        writeln!(
            std::io::stderr(),
            "warning: listening on {}: every client that can reach it can sign in with the simulator's credentials",
            args.listen
        )?;
    }
    let handle = Azure::start_with(args.config()?, Some(Lines::start())).await?;
    let ca = std::path::absolute(&handle.ca_file)?;
    let network = Network::default();
    let ready = json!({ "url": handle.url, "authority": handle.url, "ca": ca, "subscription": handle.subscription,
        "tenant": handle.tenant, "clientId": handle.client_id, "clientSecret": handle.client_secret,
        "admin": format!("{}/sim", handle.url), "resourceGroup": network.group, "location": network.location,
        "vnet": network.vnet, "subnets": network.subnets });
    writeln!(std::io::stdout(), "{ready}")?;
    std::io::stdout().flush()?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    handle.stop()
}
