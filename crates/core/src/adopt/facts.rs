//! What is there before a cluster changes its controller: the peers with their Deployments, leases, webhooks and definitions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::preflight::{Place, Ungranted, VsphereCluster};

/// A controller that Capstan replaces, in whole or in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Peer {
    /// Cluster API provider Azure: Capstan takes its machine pools, and leaves clusters, machines and AKS to it.
    #[serde(rename = "CAPZ")]
    Capz,
    /// Cluster API provider vSphere: Capstan takes everything.
    #[serde(rename = "CAPV")]
    Capv,
    /// OpenShift's machine-api-provider-azure, with the MachineSet and node link controllers beside it.
    #[serde(rename = "machine-api-provider-azure")]
    MachineApi,
}

impl Peer {
    pub const ALL: [Self; 3] = [Self::Capz, Self::Capv, Self::MachineApi];

    /// The name of its Deployment, in every installation that its own manifests make.
    pub fn deployment(self) -> &'static str {
        match self {
            Self::Capz => "capz-controller-manager",
            Self::Capv => "capv-controller-manager",
            Self::MachineApi => "machine-api-controllers",
        }
    }

    /// The leases that its controllers hold while they act.
    pub fn leases(self) -> &'static [&'static str] {
        match self {
            Self::Capz => &["controller-leader-election-capz"],
            Self::Capv => &["capv-controller-manager-runtime"],
            Self::MachineApi => &[
                "cluster-api-provider-azure-leader",
                "cluster-api-provider-machineset-leader",
                "cluster-api-provider-nodelink-leader",
            ],
        }
    }

    /// The controllers of `capstan run` that replace it.
    pub fn controllers(self) -> &'static str {
        match self {
            Self::Capz => "azure-pools",
            Self::Capv => "vsphere",
            Self::MachineApi => "openshift",
        }
    }

    /// What the names of its definitions begin with.
    pub fn definitions(self) -> &'static [&'static str] {
        match self {
            Self::Capz => &[
                "azuremachinepools.",
                "azuremachinepoolmachines.",
                "azureclusteridentities.",
            ],
            Self::Capv => &["vsphere"],
            Self::MachineApi => &["machines.machine.openshift.io", "machinesets.machine.openshift.io"],
        }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Capz => "CAPZ",
            Self::Capv => "CAPV",
            Self::MachineApi => "machine-api-provider-azure",
        })
    }
}

/// A Deployment of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Deployment {
    pub namespace: String,
    pub name: String,
    /// The replicas that it asks for.
    pub replicas: i32,
    /// The pods that there are, also those that are about to stop.
    pub pods: i32,
    /// Whether all its pods have its newest arguments.
    pub rolled_out: bool,
    /// The arguments of its container `manager`, or of its only one.
    pub args: Vec<String>,
    /// Who undoes every change of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<Operator>,
}

/// Something that puts Deployments back as they are elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Operator {
    #[serde(rename = "Cluster API Operator")]
    ClusterApi,
    #[serde(rename = "Argo CD")]
    ArgoCd,
    Flux,
    #[serde(rename = "Operator Lifecycle Manager")]
    Olm,
}

impl Operator {
    /// Returns the operator that an object names by its labels, annotations or owners' API versions.
    pub fn of<'a>(mut keys: impl Iterator<Item = &'a str>, mut owners: impl Iterator<Item = &'a str>) -> Option<Self> {
        let group = |version: &'a str| version.split_once('/').map(|(group, _)| group);
        if owners.any(|version| group(version) == Some("operator.cluster.x-k8s.io")) {
            return Some(Self::ClusterApi);
        }
        keys.find_map(|key| match key {
            "argocd.argoproj.io/tracking-id" | "argocd.argoproj.io/instance" => Some(Self::ArgoCd),
            "kustomize.toolkit.fluxcd.io/name" | "helm.toolkit.fluxcd.io/name" => Some(Self::Flux),
            "olm.owner" => Some(Self::Olm),
            _ => None,
        })
    }
}

impl std::fmt::Display for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ClusterApi => "Cluster API Operator",
            Self::ArgoCd => "Argo CD",
            Self::Flux => "Flux",
            Self::Olm => "Operator Lifecycle Manager",
        })
    }
}

impl Deployment {
    /// Whether it acts, or will. A pod acts until it is gone.
    pub fn runs(&self) -> bool {
        self.replicas > 0 || self.pods > 0
    }

    /// Returns the values of a flag that takes a list: `--flag=a,b` or `--flag a,b`.
    pub fn values(&self, flag: &str) -> Vec<&str> {
        let mut args = self.args.iter().map(String::as_str);
        let mut found = Vec::new();
        while let Some(arg) = args.next() {
            let list = match arg.strip_prefix(flag) {
                Some("") => args.next().unwrap_or_default(),
                Some(rest) => rest.strip_prefix('=').unwrap_or_default(),
                None => "",
            };
            found.extend(list.split(',').map(str::trim).filter(|value| !value.is_empty()));
        }
        found
    }

    /// Returns the names of the leases that the controllers of this peer hold while they act.
    pub fn leases(&self, peer: Peer) -> Vec<String> {
        match (peer, self.values("--leader-election-id").last()) {
            (Peer::Capv, Some(name)) => vec![(*name).to_owned()],
            _ => peer.leases().iter().map(ToString::to_string).collect(),
        }
    }

    /// Whether this installation of Capstan runs the controllers that replace the peer.
    pub(super) fn replaces(&self, peer: Peer) -> bool {
        let named = self.values("--controllers");
        named.is_empty() || named.contains(&peer.controllers())
    }

    /// Whether a feature gate is on. A gate that is not named has its default.
    pub fn gate(&self, gate: &str, default: bool) -> bool {
        named_gate(&self.args, gate).unwrap_or(default)
    }
}

const GATES: &str = "--feature-gates=";
/// CAPZ's gate for machine pools.
pub const MACHINE_POOL: &str = "MachinePool";

/// Returns the value that arguments give a feature gate.
fn named_gate(args: &[String], gate: &str) -> Option<bool> {
    let named = args.iter().filter_map(|arg| arg.strip_prefix(GATES));
    let mut named = named
        .flat_map(|gates| gates.split(','))
        .filter_map(|pair| pair.split_once('='));
    let found = named.rfind(|(name, _)| name.trim() == gate);
    found.map(|(_, value)| value.trim() == "true")
}

/// Returns the arguments with the gate as it was before it was switched off. What an upgrade has changed since stays: the old
/// arguments may not be those of the new version.
pub fn with_gate_of(before: &[String], now: &[String], gate: &str) -> Vec<String> {
    if now == with_gate(before, gate, false) {
        return before.to_vec();
    }
    // It was on: else it would not have been switched off.
    with_gate(now, gate, named_gate(before, gate).unwrap_or(true))
}

/// Returns the arguments of a container with one feature gate set.
pub fn with_gate(args: &[String], gate: &str, value: bool) -> Vec<String> {
    let mut found = false;
    let mut args: Vec<String> = args
        .iter()
        .map(|arg| {
            let Some(gates) = arg.strip_prefix(GATES) else {
                return arg.clone();
            };
            found = true;
            let others = gates.split(',').filter(|pair| {
                let name = pair.split_once('=').map_or(*pair, |(name, _)| name);
                name.trim() != gate && !name.trim().is_empty()
            });
            let own = format!("{gate}={value}");
            let gates: Vec<&str> = others.chain([own.as_str()]).collect();
            format!("{GATES}{}", gates.join(","))
        })
        .collect();
    if !found {
        args.push(format!("{GATES}{gate}={value}"));
    }
    args
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lease {
    pub namespace: String,
    pub name: String,
    /// Empty: it has no holder.
    pub holder: String,
    pub expired: bool,
}

/// A webhook configuration of a peer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Webhooks {
    pub kind: WebhookKind,
    pub name: String,
    /// The namespace of the Service that answers.
    pub service: String,
    /// How many of its webhooks refuse every request while the Service does not answer.
    pub fail_closed: usize,
    /// The names of its webhooks that CAPZ answers only with its feature gate [`MACHINE_POOL`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gated: Vec<String>,
}

/// Whether CAPZ answers the webhooks of a resource only with its feature gate [`MACHINE_POOL`]: machine pools, and AKS but for
/// the kinds of Azure Service Operator.
pub fn is_gated(resource: &str) -> bool {
    resource.starts_with("azuremachinepool") || resource.starts_with("azuremanaged")
}

/// The kinds of AKS that CAPZ reconciles only with its feature gate [`MACHINE_POOL`].
pub(super) const AKS: [&str; 3] = [
    "AzureManagedCluster",
    "AzureManagedControlPlane",
    "AzureManagedMachinePool",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum WebhookKind {
    #[serde(rename = "MutatingWebhookConfiguration")]
    Mutating,
    #[serde(rename = "ValidatingWebhookConfiguration")]
    Validating,
}

impl std::fmt::Display for WebhookKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Mutating => "MutatingWebhookConfiguration",
            Self::Validating => "ValidatingWebhookConfiguration",
        })
    }
}

/// A definition of a kind that Capstan manages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Definition {
    pub name: String,
    pub served: Vec<String>,
    pub stored: Vec<String>,
    /// The namespace of the Service that converts between versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversion: Option<String>,
    /// The certificate whose CA cert-manager writes into the conversion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub injected: Option<String>,
}

/// The annotation by which cert-manager writes the CA of a certificate into the conversion of a definition.
pub const INJECT_CA: &str = "cert-manager.io/inject-ca-from";
/// The versions of vSphere's kinds that Capstan's definitions have.
pub(super) const VSPHERE_VERSIONS: [&str; 2] = ["v1beta1", "v1beta2"];

/// Everything that the way depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub peers: BTreeMap<Peer, Deployment>,
    /// Further Deployments of a peer, in other namespaces.
    pub more_peers: Vec<(Peer, Deployment)>,
    /// The installations of Capstan, in all namespaces.
    pub capstan: Vec<Deployment>,
    /// Where Capstan is or will be installed.
    pub capstan_namespace: String,
    pub leases: Vec<Lease>,
    pub webhooks: Vec<Webhooks>,
    pub definitions: Vec<Definition>,
    /// How many objects there are, by kind.
    pub objects: BTreeMap<String, usize>,
    /// How many objects have a finalizer, by its name.
    pub finalizers: BTreeMap<String, usize>,
    /// AzureClusterIdentities that sign in with a token of a service account, which Azure has to trust.
    pub workload_identities: Vec<String>,
    /// Pools without a Secret `<pool>-azure-json`.
    pub without_azure_json: Vec<String>,
    /// Those of them whose bootstrap data needs it.
    pub waiting_for_azure_json: Vec<Place>,
    pub vsphere_clusters: Vec<VsphereCluster>,
    /// AzureClusters with pools and without `spec.identityRef`.
    pub without_identity: Vec<Place>,
    pub ungranted: Vec<Ungranted>,
    /// Whether OpenShift's cluster version operator puts back every change.
    pub cluster_version_operator: bool,
    /// Whether Capstan may use the leases of the peers, by namespace.
    pub granted: Vec<String>,
}
