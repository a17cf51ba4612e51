//! `capstan check`: says what is wrong with manifests before they are applied.

pub mod catalogue;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use capstan_api::{azure, openshift, vsphere};
use capstan_core::validate::schema::Checker;
use capstan_core::validate::vsphere as rules;
use capstan_core::validate::{self, Findings};
use clap::Args;
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::{Selector, SelectorExt};
use serde_json::Value;

use crate::manifest::{self, Object};
use crate::plain::plain;
use catalogue::{Catalogue, Verdict};

/// Check manifests before you apply them
///
/// Compares every object of Capstan's kinds with its schema and with the rules of admission and of the controllers, offline;
/// with --azure also with Azure's catalogue of VM sizes. Finds StorageClasses whose disks no machine on Azure can attach.
/// Ignores other kinds. Exits with 1 if the cluster or Azure would refuse an object.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan check -f machineset.yaml
  kustomize build overlays/prod | capstan check --strict -f -
  capstan check --azure -f pool.yaml -f machineset.yaml")]
pub struct Check {
    /// Read these manifest files; - is standard input
    #[arg(short = 'f', long = "filename", required = true, value_name = "FILE", num_args = 1..)]
    files: Vec<PathBuf>,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
    /// Ask Azure, too, whether the VM size exists and which disks it can attach in that zone
    ///
    /// Signs in as Azure's SDKs do: AZURE_SUBSCRIPTION_ID, AZURE_TENANT_ID, AZURE_CLIENT_ID, and AZURE_CLIENT_SECRET,
    /// AZURE_CLIENT_CERTIFICATE_PATH, AZURE_FEDERATED_TOKEN_FILE or the managed identity of the machine.
    #[arg(long)]
    azure: bool,
}

/// Returns whether the cluster would accept every object.
pub async fn run(args: &Check) -> anyhow::Result<bool> {
    let (schemas, mut checker) = (schemas()?, Checker::default());
    let catalogue = args.azure.then(Catalogue::from_env).transpose()?;
    let mut out = std::io::stdout();
    let (mut checked, mut errors, mut warnings) = (0, 0, 0);
    let objects = args.files.iter().map(|file| manifest::read(file));
    let objects: Vec<Object> = objects
        .collect::<anyhow::Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    for object in &objects {
        let Some(findings) = findings(object, &schemas, &mut checker) else {
            continue;
        };
        let asked = match &catalogue {
            // What is wrong by itself is not asked about.
            Some(catalogue) if findings.is_ok() => catalogue.ask(object, &objects).await?,
            _ => Verdict::default(),
        };
        checked += 1;
        errors += findings.errors.len() + asked.refusals.len();
        warnings += findings.warnings.len() + asked.warnings.len();
        let refusals = findings.errors.iter().map(ToString::to_string).chain(asked.refusals);
        for error in refusals {
            writeln!(out, "{}", plain(&format!("{}: {error}", object.describe())))?;
        }
        for warning in findings.warnings.iter().chain(&asked.warnings) {
            let text = format!("{}: warning: {warning}", object.describe());
            writeln!(out, "{}", plain(&text))?;
        }
    }
    writeln!(out, "{checked} checked, {errors} errors, {warnings} warnings")?;
    Ok(errors == 0 && (warnings == 0 || !args.strict))
}

/// Returns the problems of an object; none for kinds of others.
fn findings(object: &Object, schemas: &Schemas, checker: &mut Checker) -> Option<Findings> {
    if let (StorageClass::GROUP, StorageClass::KIND) = (object.group(), object.kind()) {
        return storage_class(object);
    }
    let served = schemas.get(&(object.group().to_owned(), object.kind().to_owned()))?;
    let Some(schema) = served.get(object.api_version()) else {
        let versions: Vec<&str> = served.keys().map(String::as_str).collect();
        let detail = format!("not served; write it as {}", versions.join(" or "));
        return Some(Findings {
            errors: vec![validate::FieldError::invalid(
                "apiVersion",
                object.api_version(),
                detail,
            )],
            warnings: Vec::new(),
        });
    };
    let errors = checker.check(schema, &object.value);
    if !errors.is_empty() {
        // Rules speak of values, and make sense only once these have the right shape.
        return Some(Findings {
            errors,
            warnings: Vec::new(),
        });
    }
    let result = match (object.group(), object.kind()) {
        (openshift::Machine::GROUP, openshift::Machine::KIND) => machine(object),
        (openshift::Machine::GROUP, openshift::MachineSet::KIND) => machine_set(object),
        (_, azure::AzureMachinePool::KIND) => object.typed().map(|pool| validate::azure_pool::validate(&pool)),
        (_, azure::AzureCluster::KIND) => object
            .typed::<azure::AzureCluster>()
            .map(|cluster| validate::azure_cluster::validate(&cluster.spec)),
        (_, azure::AzureClusterIdentity::KIND) => object
            .typed::<azure::AzureClusterIdentity>()
            .map(|identity| validate::azure_identity::validate(&identity.spec)),
        (_, vsphere::VSphereMachine::KIND) => object
            .typed::<vsphere::VSphereMachine>()
            .map(|machine| rules::machine(&machine.spec)),
        (_, vsphere::VSphereMachineTemplate::KIND) => object
            .typed::<vsphere::VSphereMachineTemplate>()
            .map(|template| rules::machine_template(&template.spec)),
        (_, vsphere::VSphereVM::KIND) => object
            .typed::<vsphere::VSphereVM>()
            .map(|vm| rules::virtual_machine(object.name(), &vm.spec)),
        (_, vsphere::VSphereCluster::KIND) => object
            .typed::<vsphere::VSphereCluster>()
            .map(|cluster| rules::cluster(&cluster.spec)),
        (_, vsphere::VSphereDeploymentZone::KIND) => object
            .typed::<vsphere::VSphereDeploymentZone>()
            .map(|zone| rules::deployment_zone(&zone.spec)),
        (_, vsphere::VSphereFailureDomain::KIND) => object
            .typed::<vsphere::VSphereFailureDomain>()
            .map(|domain| rules::failure_domain(&domain.spec)),
        _ => Ok(Findings::default()),
    };
    Some(result.unwrap_or_else(|error| unreadable(&error)))
}

/// Returns the problems of a StorageClass; none for the classes of other drivers.
fn storage_class(object: &Object) -> Option<Findings> {
    let class: StorageClass = match object.typed() {
        Ok(class) => class,
        Err(error) => return Some(unreadable(&error)),
    };
    (class.provisioner == validate::storage_class::PROVISIONER).then(|| {
        let wrong = validate::storage_class::validate(&class.parameters.unwrap_or_default());
        Findings {
            errors: wrong.into_iter().collect(),
            warnings: Vec::new(),
        }
    })
}

/// The schemas of a kind by group and version, as in `apiVersion`.
type Served = BTreeMap<String, Value>;

type Schemas = BTreeMap<(String, String), Served>;

/// Returns the schemas that `capstan crds` installs, by group and kind.
fn schemas() -> anyhow::Result<Schemas> {
    let mut schemas = Schemas::new();
    for crd in capstan_api::crds() {
        let spec = crd.spec;
        let mut served = Served::new();
        for version in spec.versions.into_iter().filter(|version| version.served) {
            let schema = version.schema.and_then(|schema| schema.open_api_v3_schema);
            served.insert(
                format!("{}/{}", spec.group, version.name),
                serde_json::to_value(schema)?,
            );
        }
        schemas.insert((spec.group, spec.names.kind), served);
    }
    Ok(schemas)
}

/// Returns the problem of an object that cannot be parsed, at the place where parsing stopped.
fn unreadable(error: &anyhow::Error) -> Findings {
    Findings {
        errors: vec![validate::FieldError::forbidden(
            "spec",
            format!("cannot be read: {error:#}"),
        )],
        warnings: Vec::new(),
    }
}

fn machine(object: &Object) -> anyhow::Result<Findings> {
    let machine: openshift::Machine = object.typed()?;
    let value = machine.spec.provider_spec.value;
    let annotation = |key: &str| machine.metadata.annotations.as_ref()?.get(key);
    let wrong = validate::openshift::validate_annotations(annotation, value.as_ref().unwrap_or(&Value::Null));
    let user_data = user_data(&machine.metadata, value.as_ref());
    let mut findings = provider_spec(object.name(), &machine.metadata, value);
    findings.errors.extend(wrong.into_iter().chain(user_data));
    Ok(findings)
}

/// Judges the user data's namespace where the manifest names its own.
fn user_data(metadata: &ObjectMeta, value: Option<&Value>) -> Option<validate::FieldError> {
    validate::openshift::validate_user_data(metadata.namespace.as_deref()?, value?)
}

fn machine_set(object: &Object) -> anyhow::Result<Findings> {
    let set: openshift::MachineSet = object.typed()?;
    let longest = format!(
        "{}-{}",
        object.name(),
        "x".repeat(validate::openshift::GENERATED_SUFFIX - 1)
    );
    let selector = Selector::try_from(set.spec.selector.clone());
    let labels = &set.spec.template.metadata.labels;
    let selects = selector.is_ok_and(|selector| selector.matches(labels));
    let template = &set.spec.template;
    let value = template.spec.provider_spec.value.clone();
    let annotation = |key: &str| {
        let own = template.metadata.annotations.get(key);
        own.or_else(|| set.metadata.annotations.as_ref()?.get(key))
    };
    let wrong = validate::openshift::validate_annotations(annotation, value.as_ref().unwrap_or(&Value::Null));
    let user_data = user_data(&set.metadata, value.as_ref());
    let mut findings = provider_spec(&longest, &set.metadata, value);
    findings.errors.extend(wrong.into_iter().chain(user_data));
    if !selects {
        let (path, detail) = (
            "spec.template.metadata.labels",
            "`selector` does not match template `labels`",
        );
        let labels = serde_json::to_value(labels)?;
        findings
            .errors
            .push(validate::FieldError::invalid(path, labels, detail));
    }
    Ok(findings)
}

/// Returns the spec with the defaults that admission fills in.
fn filled_spec(metadata: &ObjectMeta, value: Option<Value>) -> anyhow::Result<openshift::AzureMachineProviderSpec> {
    let value = value.context("spec.providerSpec.value is missing")?;
    let spec = openshift::AzureMachineProviderSpec::from_raw(&value)?;
    let filled = validate::openshift::with_defaults(&value, &spec, cluster(metadata));
    Ok(openshift::AzureMachineProviderSpec::from_raw(&filled)?)
}

fn cluster(metadata: &ObjectMeta) -> &str {
    let labels = metadata.labels.as_ref();
    labels
        .and_then(|labels| labels.get(openshift::CLUSTER_ID_LABEL))
        .map_or("", String::as_str)
}

fn provider_spec(machine_name: &str, metadata: &ObjectMeta, value: Option<Value>) -> Findings {
    match value {
        Some(value) => validate::openshift::validate_raw(machine_name, &value, Some(cluster(metadata))),
        None => Findings {
            errors: vec![validate::FieldError::required(
                "providerSpec.value",
                "a value must be provided",
            )],
            warnings: Vec::new(),
        },
    }
}
