//! The output of `capstan up`: plain lines while it starts, and commands to try.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use capstan_testkit::parts;
use tracing::warn;

use crate::controllers::Name;

/// Prints a line. A reader that closed the output is no reason to stop.
pub fn say(line: impl AsRef<str>) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", line.as_ref()).and_then(|()| out.flush());
}

/// Reports each step of the start and its duration.
pub struct Steps(Instant);

impl Steps {
    pub fn begin() -> Self {
        Self(Instant::now())
    }

    pub fn done(&mut self, what: impl AsRef<str>) {
        let took = std::mem::replace(&mut self.0, Instant::now()).elapsed();
        say(format!("{} ({:.1} s)", what.as_ref(), took.as_secs_f32()));
    }
}

/// The place of `kubectl`.
pub enum Kubectl {
    InPath,
    In(PathBuf),
    /// It is not installed and cannot be built; everything else runs without it.
    Nowhere,
}

/// Finds kubectl, or builds it, which blocks.
pub fn find_kubectl() -> Kubectl {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|dir| dir.join("kubectl").is_file()) {
        return Kubectl::InPath;
    }
    match parts::KUBECTL.path() {
        Ok(program) => Kubectl::In(program.parent().map(Path::to_owned).unwrap_or_default()),
        Err(error) => {
            warn!(error = format!("{error:#}"), "cannot find or build kubectl");
            Kubectl::Nowhere
        }
    }
}

/// Returns lines to paste into another terminal: first the setup, then three commands to try.
pub fn hints(kubeconfig: &Path, dir: &Path, kubectl: &Kubectl, controllers: &[Name], examples: bool) -> Vec<String> {
    let mut lines = vec![format!("export KUBECONFIG={}", kubeconfig.display())];
    match kubectl {
        Kubectl::InPath => {}
        Kubectl::In(dir) => lines.push(format!("export PATH=\"$PATH:{}\"", dir.display())),
        Kubectl::Nowhere => lines.push("# there is no kubectl yet: https://kubernetes.io/docs/tasks/tools".to_owned()),
    }
    let kinds: Vec<&str> = controllers
        .iter()
        .map(|name| match name {
            Name::Openshift => "machines.machine.openshift.io",
            Name::AzurePools => "azuremachinepools",
            Name::Vsphere => "vspheremachines",
        })
        .collect();
    lines.push(format!("kubectl get {} -A", kinds.join(",")));
    let clouds = format!("cat {}", dir.join("clouds.env").display());
    if !examples {
        lines.push(format!("kubectl explain {}.spec", kinds.first().unwrap_or(&"nodes")));
        lines.push(format!(
            "{clouds} # the addresses and credentials that your manifests need"
        ));
        return lines;
    }
    lines.push(
        match controllers.first() {
            Some(Name::Openshift) | None => {
                "kubectl scale machineset.machine.openshift.io/workers -n openshift-machine-api --replicas=4"
            }
            Some(Name::AzurePools) => "kubectl scale machinepool/workers --replicas=6",
            Some(Name::Vsphere) => "kubectl describe vspherevm/dock-with-disks -n vsphere",
        }
        .to_owned(),
    );
    lines.push(if controllers == [Name::Vsphere] {
        clouds
    } else {
        "kubectl get nodes -w".to_owned()
    });
    lines
}

pub fn write_variables(dir: &Path, variables: &[(&str, String)]) -> Result<()> {
    let lines: String = variables
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect();
    capstan_testkit::write_private(&dir.join("clouds.env"), lines.as_bytes()).context("cannot write clouds.env")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_always_three_things_to_try_after_what_sets_the_terminal_up() {
        let dir = Path::new("/d");
        for controllers in [
            &Name::ALL[..],
            &[Name::Openshift],
            &[Name::AzurePools],
            &[Name::Vsphere],
        ] {
            for examples in [true, false] {
                let lines = hints(&dir.join("kubeconfig"), dir, &Kubectl::InPath, controllers, examples);
                assert_eq!(lines[0], "export KUBECONFIG=/d/kubeconfig");
                assert_eq!(lines.len(), 4, "{lines:?}");
            }
        }
    }

    #[test]
    fn a_kubectl_of_our_own_is_put_into_the_path_and_a_missing_one_is_said() {
        let second = |kubectl| hints(Path::new("k"), Path::new("d"), &kubectl, &Name::ALL, true).swap_remove(1);
        assert_eq!(second(Kubectl::In("/cache".into())), "export PATH=\"$PATH:/cache\"");
        assert!(second(Kubectl::Nowhere).contains("there is no kubectl yet"));
    }
}
