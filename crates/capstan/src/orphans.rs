//! `capstan orphans`: lists the resources of a cluster in Azure whose machine is gone, and deletes them if asked to.
//!
//! Invariant: only what was listed is deleted, and only if a second read shows the same tags and nothing that uses it.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use capstan_api::openshift::{Infrastructure, Machine, MachineSet};
use capstan_azure::model::{AvailabilitySet, Disk, NetworkInterface, PublicIpAddress, Tags};
use capstan_azure::{Client, Operation, Owned, Progress};
use capstan_core::Clock;
use capstan_core::machine::orphans::{Kind, Known, Resource, Wanted, cluster_name, orphans};
use capstan_kube::error::code;
use clap::{Args, ValueEnum};
use kube::api::{Api, ListParams};
use kube::{ResourceExt as _, core::NamespaceResourceScope};
use serde::Serialize;

use crate::check::catalogue;
use crate::plain::plain;

/// Label with the name of a machine's set.
const SET_LABEL: &str = "machine.openshift.io/cluster-api-machineset";

/// List the resources of OpenShift machines in Azure whose Machine is gone
///
/// Lists interfaces, public addresses, disks and availability sets that have the cluster's tag, that no other resource uses, and
/// whose Machine does not exist in the cluster. With --delete, deletes the listed resources, after it has read the tags of each
/// resource again. A disk may be kept on purpose (deletionPolicy Detach): the command deletes OS disks, and data disks with the
/// tag Delete, with --disks only, and every other data disk only if --kept-disk names it.
#[derive(Args)]
#[command(after_help = "Examples:
  capstan orphans --resource-group ocp-x7-rg
  capstan orphans --resource-group ocp-x7-rg -o json
  capstan orphans --resource-group ocp-x7-rg --delete

Signs in to Azure as its SDKs do: AZURE_SUBSCRIPTION_ID, AZURE_TENANT_ID, AZURE_CLIENT_ID, and AZURE_CLIENT_SECRET,
AZURE_CLIENT_CERTIFICATE_PATH, AZURE_FEDERATED_TOKEN_FILE or the managed identity of the machine.")]
pub struct Orphans {
    /// Search these resource groups
    #[arg(long = "resource-group", short = 'g', required = true, value_name = "GROUP", num_args = 1..)]
    groups: Vec<String>,
    /// The cluster's name in its tag, where no Infrastructure object names it; refused if it is not the kubeconfig's cluster
    /// [default: infrastructureName of Infrastructure cluster]
    #[arg(long)]
    cluster: Option<String>,
    /// Delete the listed resources, except disks
    #[arg(long)]
    delete: bool,
    /// Delete OS disks, too, and data disks with the tag Delete, with all their data
    #[arg(long, requires = "delete")]
    disks: bool,
    /// Delete this data disk, too, whatever its tag, with all its data; repeat it for several
    #[arg(long, requires = "delete", value_name = "NAME")]
    kept_disk: Vec<String>,
    /// Print in this format
    #[arg(long, short = 'o', value_enum, default_value = "table")]
    output: Output,
    /// Use this kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Use this context of the kubeconfig [default: the current one]
    #[arg(long)]
    context: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

/// One line of the output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    kind: &'static str,
    resource_group: String,
    name: String,
    id: String,
    reason: String,
    /// The deletion policy of a disk, where its tags have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_policy: Option<String>,
    /// `listed`, `deleted`, `kept`, or the reason for which it could not be deleted.
    result: String,
}

/// Returns whether everything that was to be deleted is deleted.
pub async fn run(args: &Orphans) -> Result<bool> {
    let azure = catalogue::client("capstan orphans")?;
    let config = crate::run::cluster(args.kubeconfig.as_deref(), args.context.clone()).await?;
    let kube = kube::Client::try_from(config)?;
    let found = infrastructure_name(&kube).await?;
    let cluster = cluster_name(args.cluster.as_deref(), found.as_deref()).map_err(anyhow::Error::msg)?;
    let wanted = Wanted {
        others: args.delete,
        disks: args.disks,
        kept_disks: args.kept_disk.iter().cloned().collect(),
    };
    let mut resources = Vec::new();
    for group in &args.groups {
        resources.extend(resources_of(&azure, group).await?);
    }
    // After the resources: whatever was made meanwhile has its machine in this list.
    let known = known(&kube, cluster).await?;
    let (mut rows, mut failed) = (Vec::new(), false);
    for (resource, reason) in orphans(&resources, &known) {
        let result = match args.delete {
            false => "listed".to_owned(),
            true if !wanted.includes(&resource) => "kept".to_owned(),
            true => match delete(&azure, &known, &resource).await {
                Ok(()) => "deleted".to_owned(),
                Err(error) => {
                    failed = true;
                    format!("not deleted: {error:#}")
                }
            },
        };
        rows.push(Row {
            deletion_policy: resource.deletion_policy().map(str::to_owned),
            kind: resource.kind.noun(),
            resource_group: resource.group,
            name: resource.name,
            id: resource.id,
            reason,
            result,
        });
    }
    print(args.output, &rows)?;
    Ok(!failed)
}

/// Returns the name by the cluster itself. An object that cannot be read is not an object that is missing.
async fn infrastructure_name(kube: &kube::Client) -> Result<Option<String>> {
    let api: Api<Infrastructure> = Api::all(kube.clone());
    let found = match api.get("cluster").await {
        Ok(found) => found,
        // A group that is not served has an answer of its own kind.
        Err(error) if code(&error) == Some(404) => return Ok(None),
        Err(error) => return Err(error).context("cannot read Infrastructure cluster, which names the cluster"),
    };
    let name = found.status.map(|status| status.infrastructure_name);
    Ok(name.filter(|name| !name.is_empty()))
}

/// Returns what exists in the whole cluster: a machine in another namespace owns its resources just as well.
async fn known(kube: &kube::Client, cluster: String) -> Result<Known> {
    let machines: Vec<Machine> = all(kube).await.context("cannot list all Machines")?;
    let sets: Vec<MachineSet> = all(kube).await.context("cannot list all MachineSets")?;
    let namespaced = |machine: &Machine| Some(format!("{}/{}", machine.namespace()?, machine.name_any()));
    let labelled = machines
        .iter()
        .filter_map(|machine| machine.labels().get(SET_LABEL).cloned());
    Ok(Known {
        cluster,
        uids: machines
            .iter()
            .filter_map(|machine| machine.metadata.uid.clone())
            .collect(),
        machines: machines.iter().filter_map(namespaced).collect(),
        sets: sets.iter().map(|set| set.name_any()).chain(labelled).collect(),
    })
}

async fn all<K>(kube: &kube::Client) -> Result<Vec<K>, kube::Error>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + std::fmt::Debug,
    K: serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::all(kube.clone());
    Ok(api.list(&ListParams::default()).await?.items)
}

async fn resources_of(azure: &Client, group: &str) -> Result<Vec<Resource>> {
    let mut found = Vec::new();
    found.extend(azure.list_nics(group).await?.iter().filter_map(|nic| of(group, nic)));
    found.extend(
        azure
            .list_public_ips(group)
            .await?
            .iter()
            .filter_map(|address| of(group, address)),
    );
    found.extend(azure.list_disks(group).await?.iter().filter_map(|disk| of(group, disk)));
    found.extend(
        azure
            .list_availability_sets(group)
            .await?
            .iter()
            .filter_map(|set| of(group, set)),
    );
    Ok(found)
}

/// A resource that can be an orphan.
trait Candidate: capstan_azure::Resource {
    const KIND: Kind;
    fn used_by(&self) -> Option<String>;
}

impl Candidate for NetworkInterface {
    const KIND: Kind = Kind::Interface;
    fn used_by(&self) -> Option<String> {
        let properties = self.properties.as_ref()?;
        let endpoint = properties.rest.get("privateEndpoint").map(ToString::to_string);
        properties
            .virtual_machine
            .as_ref()
            .and_then(|vm| vm.id.clone())
            .or(endpoint)
    }
}

impl Candidate for PublicIpAddress {
    const KIND: Kind = Kind::Address;
    fn used_by(&self) -> Option<String> {
        let user = self.properties.as_ref()?.rest.get("ipConfiguration")?.get("id")?;
        user.as_str().map(ToOwned::to_owned)
    }
}

impl Candidate for Disk {
    const KIND: Kind = Kind::Disk;
    fn used_by(&self) -> Option<String> {
        self.managed_by.clone().filter(|holder| !holder.is_empty())
    }
}

impl Candidate for AvailabilitySet {
    const KIND: Kind = Kind::AvailabilitySet;
    fn used_by(&self) -> Option<String> {
        let members = self.properties.as_ref()?.virtual_machines.as_ref()?;
        members.first().map(|member| member.id.clone().unwrap_or_default())
    }
}

fn of<T: Candidate>(group: &str, resource: &T) -> Option<Resource> {
    let id = resource.id()?;
    Some(Resource {
        kind: T::KIND,
        group: group.to_owned(),
        name: id.rsplit('/').next()?.to_owned(),
        id: id.to_owned(),
        tags: resource.tags().cloned(),
        used_by: resource.used_by(),
    })
}

/// Deletes a resource that is still the orphan that was listed.
async fn delete(azure: &Client, known: &Known, orphan: &Resource) -> Result<()> {
    let Resource { kind, group, name, .. } = orphan;
    let operation = match kind {
        Kind::Interface => match azure.get_nic(group, name).await? {
            Some(nic) => azure.delete_nic(&proof(known, orphan, &nic)?).await?,
            None => None,
        },
        Kind::Address => match azure.get_public_ip(group, name).await? {
            Some(address) => azure.delete_public_ip(&proof(known, orphan, &address)?).await?,
            None => None,
        },
        Kind::Disk => match azure.get_disk(group, name).await? {
            Some(disk) => {
                proof(known, orphan, &disk)?;
                azure.delete_disk(group, name).await?
            }
            None => None,
        },
        Kind::AvailabilitySet => {
            if let Some(set) = azure.get_availability_set(group, name).await? {
                azure.delete_availability_set(&proof(known, orphan, &set)?).await?;
            }
            None
        }
    };
    finished(azure, operation).await
}

/// Proves by a second read that a resource is the orphan that was listed.
fn proof<T: Candidate>(known: &Known, orphan: &Resource, resource: &T) -> Result<Owned<T>> {
    if let Some(user) = resource.used_by() {
        bail!("{user} uses it now");
    }
    let same =
        |tags: &Tags| orphan.tags.as_ref() == Some(tags) && known.reason(T::KIND, &orphan.name, Some(tags)).is_some();
    Ok(Owned::by_tags(resource, same)?)
}

async fn finished(azure: &Client, operation: Option<Operation>) -> Result<()> {
    let Some(mut operation) = operation else {
        return Ok(());
    };
    let clock = Clock::system();
    while let Progress::Running(after) = azure.poll(&mut operation).await? {
        clock.sleep(after).await;
    }
    Ok(())
}

fn print(output: Output, rows: &[Row]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if output == Output::Json {
        writeln!(out, "{}", serde_json::to_string_pretty(rows)?)?;
        return Ok(());
    }
    let heads = ["KIND", "GROUP", "NAME", "RESULT", "REASON"].map(ToOwned::to_owned);
    let lines = rows.iter().map(|row| {
        [
            row.kind.to_owned(),
            row.resource_group.clone(),
            row.name.clone(),
            row.result.clone(),
            match &row.deletion_policy {
                Some(policy) => format!("{}, deletionPolicy {policy}", row.reason),
                None => row.reason.clone(),
            },
        ]
    });
    let lines: Vec<[String; 5]> = std::iter::once(heads).chain(lines).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
    let widths = [width(0), width(1), width(2), width(3)];
    for [kind, group, name, result, reason] in &lines {
        let [a, b, c, d] = widths;
        let line = format!("{kind:a$}  {group:b$}  {name:c$}  {result:d$}  {reason}");
        writeln!(out, "{}", plain(&line))?;
    }
    writeln!(out, "{} orphans", rows.len())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns the name by a cluster whose API server answers so.
    async fn name(status: u16, body: Value) -> Result<Option<String>> {
        let serve = move |_: http::Request<kube::client::Body>| {
            let answer = http::Response::builder().status(status);
            let answer = answer.body(kube::client::Body::from(body.to_string().into_bytes()));
            async move { answer.map_err(|error| error.to_string()) }
        };
        infrastructure_name(&kube::Client::new(tower::service_fn(serve), "default")).await
    }

    #[tokio::test]
    async fn a_name_that_cannot_be_read_is_not_a_name_that_is_missing() {
        let object = json!({"metadata": {"name": "cluster"}, "spec": {}, "status": {"infrastructureName": "ocp-x7"}});
        assert_eq!(name(200, object).await.unwrap().as_deref(), Some("ocp-x7"));
        assert_eq!(name(404, json!("404 page not found")).await.unwrap(), None);
        for status in [403, 500] {
            let refused = json!({"kind": "Status", "status": "Failure", "message": "no", "code": status});
            let error = name(status, refused).await.unwrap_err().to_string();
            assert!(error.contains("cannot read Infrastructure cluster"), "{error}");
        }
    }
}
