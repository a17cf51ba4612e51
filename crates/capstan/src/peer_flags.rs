//! Flags of the controllers that Capstan replaces, so that its image runs with the arguments of their Deployments.
//!
//! A flag that Capstan has under another name is an alias in [`crate::run`]. Here are the others. Capstan accepts those that
//! change nothing for it and names them in the log. It refuses those whose meaning it cannot keep, and names what to use
//! instead.

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::controllers::Name;

/// Flags without a meaning here: limits of another runtime, its profiler, its way to log, kinds that Capstan does not manage.
const WITHOUT_EFFECT: [&str; 39] = [
    "additional-sync-machine-annotations",
    "additional-sync-machine-labels",
    "api-call-timeout",
    "azurecluster-concurrency",
    "azuremachine-concurrency",
    "azuremachinepool-concurrency",
    "azuremachinepoolmachine-concurrency",
    "bootstrap-config-gvk",
    "clustercache-client-burst",
    "clustercache-client-qps",
    "clustercache-concurrency",
    "contention-profiling",
    "debouncing-timer",
    "images-json",
    "kube-api-burst",
    "kube-api-qps",
    "logtostderr",
    "max-concurrent-reconciles",
    "network-provider",
    "pod-name",
    "profiler-address",
    "providerserviceaccount-concurrency",
    "reconcile-timeout",
    "reconciler-requeue",
    "service-reconcile-timeout",
    "servicediscovery-concurrency",
    "skip-crd-migration-phases",
    "tls-cipher-suites",
    "tls-curve-preferences",
    "tls-min-version",
    "v",
    "virtualmachinegroup-concurrency",
    "vm-operator-api-version",
    "vspherecluster-concurrency",
    "vsphereclusteridentity-concurrency",
    "vspheredeploymentzone-concurrency",
    "vspheremachine-concurrency",
    "vspheremachinetemplate-concurrency",
    "vspherevm-concurrency",
];

/// Flags whose meaning Capstan cannot keep, and what to use instead.
const REFUSED: [(&str, &str); 5] = [
    (
        "credentials-file",
        "set VSPHERE_USERNAME and VSPHERE_PASSWORD, and name the namespaces that may use them with --vcenter-account-namespaces",
    ),
    (
        "disable-controllers-or-webhooks",
        "name the controllers that should run with --controllers",
    ),
    (
        "webhook-cert-dir",
        "Capstan makes and renews the certificate of its webhook itself",
    ),
    (
        "webhook-cert-name",
        "Capstan makes and renews the certificate of its webhook itself",
    ),
    (
        "webhook-key-name",
        "Capstan makes and renews the certificate of its webhook itself",
    ),
];

const FEATURE_GATES: &str = "feature-gates";

/// The flags of peers on a command line.
#[derive(Default)]
pub struct PeerFlags {
    without_effect: Vec<&'static str>,
    refused: Vec<(&'static str, &'static str)>,
    gates: Vec<String>,
}

/// What the flags of peers ask for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Whether the machines of every control plane and MachineDeployment are kept on different hosts.
    pub anti_affinity: bool,
    /// Flags and feature gates that change nothing.
    pub without_effect: Vec<String>,
}

impl PeerFlags {
    /// Returns what the flags ask for, or an error for the first that Capstan cannot follow.
    pub fn wishes(&self, controllers: &[Name]) -> Result<Wishes> {
        if let Some((flag, instead)) = self.refused.first() {
            bail!("--{flag} is a flag of another controller that Capstan does not have: {instead}");
        }
        let mut wishes = Wishes {
            without_effect: self.without_effect.iter().map(|flag| format!("--{flag}")).collect(),
            ..Wishes::default()
        };
        for gate in self.gates.iter().filter(|gate| !gate.is_empty()) {
            let (name, value) = gate
                .split_once('=')
                .with_context(|| format!("--{FEATURE_GATES} {gate:?}: is not NAME=true or NAME=false"))?;
            let on: bool = value
                .parse()
                .with_context(|| format!("--{FEATURE_GATES} {gate:?}: the value is neither true nor false"))?;
            match (name, on) {
                ("MachinePool", false) if controllers.contains(&Name::AzurePools) => {
                    bail!("--{FEATURE_GATES} {gate:?}: leave azure-pools out of --controllers instead");
                }
                ("SkipMachinePoolModelReconciliation", true) if controllers.contains(&Name::AzurePools) => {
                    bail!(
                        "--{FEATURE_GATES} {gate:?}: Capstan always brings scale sets to their model; pause the pools instead"
                    );
                }
                ("NodeAntiAffinity", on) => wishes.anti_affinity = on,
                (_, _) => wishes.without_effect.push(format!("--{FEATURE_GATES}={gate}")),
            }
        }
        Ok(wishes)
    }
}

fn arg(name: &'static str) -> Arg {
    // Booleans are given with and without a value.
    Arg::new(name)
        .long(name)
        .hide(true)
        .num_args(0..=1)
        .action(ArgAction::Append)
}

impl Args for PeerFlags {
    fn augment_args(command: Command) -> Command {
        let gates = arg(FEATURE_GATES).num_args(1).value_delimiter(',');
        let refused = REFUSED.iter().map(|(flag, _)| arg(flag));
        command
            .args(WITHOUT_EFFECT.into_iter().map(arg))
            .args(refused)
            .arg(gates)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PeerFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let gates = matches.get_many::<String>(FEATURE_GATES);
        Ok(Self {
            without_effect: WITHOUT_EFFECT
                .into_iter()
                .filter(|flag| matches.contains_id(flag))
                .collect(),
            refused: REFUSED
                .into_iter()
                .filter(|(flag, _)| matches.contains_id(flag))
                .collect(),
            gates: gates.map(|gates| gates.cloned().collect()).unwrap_or_default(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: PeerFlags,
    }

    fn wishes(flags: &[&str], controllers: &[Name]) -> Result<Wishes, String> {
        let line = Line::try_parse_from(["capstan"].iter().chain(flags)).unwrap();
        line.flags.wishes(controllers).map_err(|error| error.to_string())
    }

    #[test]
    fn flags_that_change_nothing_are_accepted_with_and_without_a_value() {
        let flags = [
            "--v=0",
            "--kube-api-qps",
            "100",
            "--contention-profiling",
            "--vspherevm-concurrency=10",
        ];
        let wishes = wishes(&flags, &Name::ALL).unwrap();
        let named = [
            "--contention-profiling",
            "--kube-api-qps",
            "--v",
            "--vspherevm-concurrency",
        ];
        assert_eq!(wishes.without_effect, named);
        assert!(!wishes.anti_affinity);
    }

    #[test]
    fn feature_gates_are_followed_refused_or_named() {
        let gates = "--feature-gates=MachinePool=true,NodeAntiAffinity=true,PriorityQueue=false";
        let found = wishes(&[gates], &Name::ALL).unwrap();
        assert!(found.anti_affinity);
        let named = [
            "--feature-gates=MachinePool=true",
            "--feature-gates=PriorityQueue=false",
        ];
        assert_eq!(found.without_effect, named);
        let off = "--feature-gates=MachinePool=false";
        let refused = wishes(&[off], &Name::ALL).unwrap_err();
        assert!(refused.contains("leave azure-pools out of --controllers"), "{refused}");
        assert!(wishes(&[off], &[Name::Vsphere]).is_ok());
        let refused = wishes(&["--feature-gates=MachinePool=yes"], &Name::ALL).unwrap_err();
        assert!(
            refused.contains("\"MachinePool=yes\": the value is neither true nor false"),
            "{refused}"
        );
    }

    #[test]
    fn flags_that_cannot_be_followed_are_refused_with_what_to_use_instead() {
        for (flag, instead) in REFUSED {
            let refused = wishes(&[&format!("--{flag}=x")], &Name::ALL).unwrap_err();
            assert!(refused.contains(flag) && refused.contains(instead), "{refused}");
        }
    }
}
