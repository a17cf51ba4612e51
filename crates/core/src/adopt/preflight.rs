//! What Capstan refuses although its peers accept it. `capstan adopt` reports it before anything is switched.

use serde::Serialize;

use super::{Deployment, Facts, Peer, Step, capstan, manual};
use crate::validate::vcenter::contains_server;

/// The annotation of a VSphereClusterIdentity that names the servers its password may be sent to.
const ALLOWED_SERVERS: &str = "capstan.dev/allowed-servers";

/// A VSphereCluster, as far as signing in to its vCenter goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VsphereCluster {
    pub namespace: String,
    pub name: String,
    pub server: String,
    /// Whether `spec.thumbprint` is set.
    pub thumbprint: bool,
    pub identity: VsphereIdentity,
}

/// The identity of a VSphereCluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum VsphereIdentity {
    /// `spec.identityRef` is not set.
    Unset,
    /// A Secret in the namespace of the cluster.
    Secret {
        /// Whether it has the CA of the server.
        ca: bool,
    },
    Shared {
        name: String,
        secret_name: String,
        /// Whether the Secret has the CA of the server. `None`: the namespace of Capstan does not have the Secret.
        ca: Option<bool>,
        /// The servers that its annotation names.
        servers: Option<Vec<String>>,
    },
}

/// An object of Azure, by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    pub namespace: String,
    pub name: String,
}

/// An AzureClusterIdentity whose client secret is in another namespace, which has not granted its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ungranted {
    pub identity: Place,
    pub secret: Place,
}

/// Returns a step that a person does before anything is switched over.
fn first(obstacle: String, text: String) -> Step {
    Step {
        obstacle: Some(obstacle),
        ..manual(text, false)
    }
}

/// Returns the values of a flag of all installations of Capstan for a peer.
fn flag<'a>(facts: &'a Facts, peer: Peer, name: &str) -> Vec<&'a str> {
    capstan(facts, peer).flat_map(|capstan| capstan.values(name)).collect()
}

fn names(list: &[&str], namespace: &str) -> bool {
    list.iter().any(|entry| *entry == "*" || *entry == namespace)
}

/// Lets Capstan make the Secrets `<pool>-azure-json`.
const AZURE_JSON: &str = "--azure-json";
/// How a user gives this command the flags that Capstan will have.
const OR_INSTALL: &str = "or install Capstan with 0 replicas and";

/// Returns what has to be done for the VSphereClusters before CAPV stops.
pub(super) fn vsphere(facts: &Facts) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let found = facts
        .vsphere_clusters
        .iter()
        .flat_map(|cluster| of_cluster(facts, cluster));
    for step in found {
        // Many clusters share one identity.
        if !steps.contains(&step) {
            steps.push(step);
        }
    }
    steps
}

fn of_cluster(facts: &Facts, cluster: &VsphereCluster) -> Vec<Step> {
    let VsphereCluster {
        namespace,
        name,
        server,
        ..
    } = cluster;
    let servers = flag(facts, Peer::Capv, "--vcenter-servers");
    let mut steps = Vec::new();
    let mut ca = false;
    match &cluster.identity {
        VsphereIdentity::Secret { ca: has } => ca = *has,
        VsphereIdentity::Unset => {
            let namespaces = flag(facts, Peer::Capv, "--vcenter-account-namespaces");
            if !names(&namespaces, namespace) || !contains_server(&servers, server) {
                steps.push(first(
                    format!(
                        "VSphereCluster {namespace}/{name}: spec.identityRef is not set, and Capstan's own account serves only \
                         namespaces and servers that its flags name"
                    ),
                    format!(
                        "set spec.identityRef of VSphereCluster {namespace}/{name}, {OR_INSTALL} VSPHERE_USERNAME, \
                         VSPHERE_PASSWORD, --vcenter-account-namespaces={namespace} and --vcenter-servers={server}"
                    ),
                ));
            }
        }
        VsphereIdentity::Shared {
            name: identity,
            secret_name,
            ca: has,
            servers: named,
        } => {
            ca = has.unwrap_or_default();
            if has.is_none() {
                let home = &facts.capstan_namespace;
                steps.push(first(
                    format!(
                        "VSphereClusterIdentity {identity}: spec.secretName {secret_name:?}: Secret {home}/{secret_name} does \
                         not exist; Capstan reads it in its own namespace"
                    ),
                    format!("copy Secret {secret_name} from the namespace of CAPV to {home}"),
                ));
            }
            let allowed = match named {
                Some(named) => contains_server(named, server),
                None => contains_server(&servers, server),
            };
            if !allowed {
                steps.push(first(
                    format!(
                        "VSphereClusterIdentity {identity}: metadata.annotations[{ALLOWED_SERVERS}] does not name {server:?}; \
                         Capstan sends its password only to servers that its owner names"
                    ),
                    format!(
                        "annotate VSphereClusterIdentity {identity} with {ALLOWED_SERVERS}={server}, {OR_INSTALL} \
                         --vcenter-servers={server}"
                    ),
                ));
            }
        }
    }
    if !cluster.thumbprint && !ca && !capstan(facts, Peer::Capv).any(is_insecure) {
        steps.push(first(
            format!(
                "VSphereCluster {namespace}/{name}: spec.thumbprint is not set; Capstan verifies the certificate of {server:?}, \
                 which CAPV does not"
            ),
            format!(
                "set spec.thumbprint of VSphereCluster {namespace}/{name}, or put the CA of {server} into the Secret of its \
                 identity as ca.crt, {OR_INSTALL} --insecure-vcenter"
            ),
        ));
    }
    steps
}

fn is_insecure(capstan: &Deployment) -> bool {
    let set = ["--insecure-vcenter", "--insecure-vcenter=true"];
    capstan.args.iter().any(|arg| set.contains(&arg.as_str()))
}

/// Returns what has to be done for the AzureClusters with pools before CAPZ leaves the pools.
pub(super) fn azure(facts: &Facts) -> Vec<Step> {
    let allowed = flag(facts, Peer::Capz, "--allow-environment-identity");
    let unset = facts.without_identity.iter();
    let unset = unset.filter(|cluster| !names(&allowed, &cluster.namespace));
    let unset = unset.map(|Place { namespace, name }| {
        first(
            format!(
                "AzureCluster {namespace}/{name}: spec.identityRef is not set, and Capstan's own identity serves only namespaces \
                 that a flag names"
            ),
            format!(
                "set spec.identityRef of AzureCluster {namespace}/{name}, {OR_INSTALL} --allow-environment-identity={namespace}"
            ),
        )
    });
    let ungranted = facts.ungranted.iter().map(|Ungranted { identity, secret }| {
        let Place { namespace, name } = identity;
        let secret = format!("{}/{}", secret.namespace, secret.name);
        first(
            format!(
                "AzureClusterIdentity {namespace}/{name}: spec.clientSecret: Secret {secret} does not exist, or does not allow \
                 namespace {namespace}"
            ),
            format!("annotate Secret {secret} with capstan.dev/allowed-namespaces={namespace}"),
        )
    });
    // With its feature gate off CAPZ does not make the Secret, and the bootstrap data of the pool never appear.
    let made = facts
        .capstan
        .iter()
        .any(|capstan| capstan.args.iter().any(|arg| arg == AZURE_JSON));
    let waiting = facts.waiting_for_azure_json.iter().filter(|_| !made);
    let waiting = waiting.map(|Place { namespace, name }| {
        first(
            format!(
                "AzureMachinePool {namespace}/{name}: its KubeadmConfig reads Secret {namespace}/{name}-azure-json, which does \
                 not exist, and nobody makes it any more"
            ),
            format!("wait until CAPZ has made Secret {namespace}/{name}-azure-json, create it, {OR_INSTALL} {AZURE_JSON}"),
        )
    });
    unset.chain(ungranted).chain(waiting).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::adopt::ways;

    const VC: &str = "vc.example.com";

    fn shared(ca: Option<bool>, servers: Option<&[&str]>) -> VsphereIdentity {
        VsphereIdentity::Shared {
            name: "team".to_owned(),
            secret_name: "vc-account".to_owned(),
            ca,
            servers: servers.map(|list| list.iter().map(ToString::to_string).collect()),
        }
    }

    fn with(peer: Peer, flags: &[&str]) -> Facts {
        Facts {
            peers: [(peer, Deployment::default())].into(),
            capstan_namespace: "capstan-system".to_owned(),
            capstan: vec![Deployment {
                args: flags.iter().map(ToString::to_string).collect(),
                ..Deployment::default()
            }],
            ..Facts::default()
        }
    }

    fn obstacles(facts: &Facts) -> Vec<String> {
        let steps = ways(facts).into_iter().flat_map(|way| way.steps);
        steps.filter_map(|step| step.obstacle).collect()
    }

    #[rstest]
    #[case::a_secret_and_a_thumbprint(true, VsphereIdentity::Secret { ca: false }, &[], &[])]
    #[case::a_secret_with_a_ca(false, VsphereIdentity::Secret { ca: true }, &[], &[])]
    #[case::nothing_to_verify_the_server_with(false, VsphereIdentity::Secret { ca: false }, &[], &["spec.thumbprint is not set"])]
    #[case::capstan_verifies_nothing(false, VsphereIdentity::Secret { ca: false }, &["--insecure-vcenter"], &[])]
    #[case::no_identity(true, VsphereIdentity::Unset, &[], &["spec.identityRef is not set"])]
    #[case::capstans_own_account(true, VsphereIdentity::Unset, &["--vcenter-account-namespaces=a,team", "--vcenter-servers=*"], &[])]
    #[case::capstans_own_account_for_another_server(
        true, VsphereIdentity::Unset, &["--vcenter-account-namespaces=*", "--vcenter-servers=b"], &["spec.identityRef is not set"])]
    #[case::a_shared_identity(true, shared(Some(false), Some(&[VC])), &[], &[])]
    #[case::its_secret_is_elsewhere(true, shared(None, Some(&["*"])), &[], &["Secret capstan-system/vc-account does not exist"])]
    #[case::it_names_no_server(true, shared(Some(true), None), &[], &["capstan.dev/allowed-servers"])]
    #[case::a_flag_names_the_server(true, shared(Some(true), None), &["--vcenter-servers", "a,vc.example.com:443"], &[])]
    #[case::its_own_list_counts(true, shared(Some(true), Some(&["b"])), &["--vcenter-servers=*"], &["capstan.dev/allowed-servers"])]
    #[case::everything_at_once(false, shared(None, None), &[], &["does not exist", "capstan.dev/allowed-servers", "spec.thumbprint"])]
    fn what_capstan_refuses_on_vsphere_is_in_the_way(
        #[case] thumbprint: bool,
        #[case] identity: VsphereIdentity,
        #[case] flags: &[&str],
        #[case] expected: &[&str],
    ) {
        let mut facts = with(Peer::Capv, flags);
        let cluster = VsphereCluster {
            namespace: "team".to_owned(),
            name: "one".to_owned(),
            server: VC.to_owned(),
            thumbprint,
            identity,
        };
        facts.vsphere_clusters = vec![cluster.clone(), cluster];
        let found = obstacles(&facts);
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{found}");
        }
    }

    #[rstest]
    #[case::refused(&[], 2)]
    #[case::allowed_by_a_flag(&["--allow-environment-identity=team"], 1)]
    #[case::allowed_for_others(&["--allow-environment-identity=other"], 2)]
    fn what_capstan_refuses_on_azure_is_in_the_way(#[case] flags: &[&str], #[case] expected: usize) {
        let mut facts = with(Peer::Capz, flags);
        let place = |namespace: &str, name: &str| Place {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        facts.without_identity = vec![place("team", "one")];
        facts.ungranted = vec![Ungranted {
            identity: place("team", "id"),
            secret: place("capz-system", "password"),
        }];
        let found = obstacles(&facts);
        assert_eq!(found.len(), expected, "{found:#?}");
        assert!(
            found
                .iter()
                .any(|text| text
                    .contains("Secret capz-system/password does not exist, or does not allow namespace team")),
            "{found:#?}"
        );
    }
}
