//! `capstan check`: says what is wrong with manifests before they are applied.

use std::path::PathBuf;

use anyhow::Context;
use capstan_api::openshift;
use capstan_core::validate::{self, Findings};
use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use crate::manifest::{self, Object};

/// Names the cluster that a Machine belongs to.
const CLUSTER_LABEL: &str = "machine.openshift.io/cluster-api-cluster";

/// Says what is wrong with manifests before they are applied
///
/// Reads Machines, MachineSets, AzureMachinePools and the vSphere kinds, and applies the rules that admission and the
/// controllers apply, offline. Other kinds are passed over. Exits 1 when an object would be refused.
#[derive(Args)]
pub struct Check {
    /// Manifest files; - is standard input
    #[arg(short = 'f', long = "filename", required = true, value_name = "FILE", num_args = 1..)]
    files: Vec<PathBuf>,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
}

/// True when nothing would be refused.
pub fn run(args: &Check) -> anyhow::Result<bool> {
    let (mut checked, mut errors, mut warnings) = (0, 0, 0);
    for file in &args.files {
        for object in manifest::read(file)? {
            let Some(findings) = findings(&object) else { continue };
            checked += 1;
            errors += findings.errors.len();
            warnings += findings.warnings.len();
            for error in &findings.errors {
                println!("{}: {error}", object.describe());
            }
            for warning in &findings.warnings {
                println!("{}: warning: {warning}", object.describe());
            }
        }
    }
    println!("{checked} checked, {errors} errors, {warnings} warnings");
    Ok(errors == 0 && (warnings == 0 || !args.strict))
}

/// What the rules say of an object; nothing for kinds that have no rules here.
fn findings(object: &Object) -> Option<Findings> {
    let result = match (object.group(), object.kind()) {
        (openshift::Machine::GROUP, "Machine") => machine(object),
        (openshift::Machine::GROUP, "MachineSet") => machine_set(object),
        _ => return None,
    };
    Some(result.unwrap_or_else(|error| unreadable(&error)))
}

/// An object that does not even read is wrong at the place where reading stopped.
fn unreadable(error: &anyhow::Error) -> Findings {
    Findings {
        errors: vec![validate::FieldError::invalid(
            "(object)",
            Value::Null,
            format!("{error:#}"),
        )],
        warnings: Vec::new(),
    }
}

fn machine(object: &Object) -> anyhow::Result<Findings> {
    let machine: openshift::Machine = object.typed()?;
    provider_spec(object.name(), &machine.metadata, machine.spec.provider_spec.value)
}

fn machine_set(object: &Object) -> anyhow::Result<Findings> {
    let set: openshift::MachineSet = object.typed()?;
    let longest = format!(
        "{}-{}",
        object.name(),
        "x".repeat(validate::openshift::GENERATED_SUFFIX - 1)
    );
    provider_spec(&longest, &set.metadata, set.spec.template.spec.provider_spec.value)
}

/// The spec as admission would leave it, defaults filled in.
fn provider_spec(machine_name: &str, metadata: &ObjectMeta, value: Option<Value>) -> anyhow::Result<Findings> {
    let value = value.context("spec.providerSpec.value is missing")?;
    let cluster = metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(CLUSTER_LABEL))
        .map_or("", String::as_str);
    let spec = openshift::AzureMachineProviderSpec::from_raw(&value)?;
    let filled = validate::openshift::with_defaults(&value, &spec, cluster);
    let spec = openshift::AzureMachineProviderSpec::from_raw(&filled)?;
    Ok(validate::openshift::validate(machine_name, &spec))
}
