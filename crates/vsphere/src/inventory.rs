//! Finds objects in the inventory by managed object id, path, name or UUID, as govmomi's finder does.
//!
//! Rules: a managed object reference or id means that object. A path that starts with `/` is absolute; any other is relative
//! to the datacenter's folder for that kind of object (`vm`, `host`, `datastore`, `network`), with or without a leading `./`. The
//! path of a folder is relative to the datacenter first (`vm/golden`). A bare name means an object anywhere below that folder. No text at all means the only object. More than one match is an error
//! that names all of them. Answers are remembered for a short time, so that many machines of one template ask once.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::listing::Listing;
use crate::properties::{Object, Want};
use crate::soap::Call;
use crate::vcenter::Vcenter;
use crate::vm::{VmInfo, unescape};
use crate::xml::Writer;
use capstan_core::vm::MoRef;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datacenter {
    pub reference: MoRef,
    pub name: String,
    /// `/name`, or longer within folders.
    pub path: String,
    pub vm_folder: MoRef,
    pub host_folder: MoRef,
    pub datastore_folder: MoRef,
    pub network_folder: MoRef,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datastore {
    pub reference: MoRef,
    pub name: String,
    pub free_bytes: i64,
    pub accessible: bool,
    /// `normal` unless it is in or going into maintenance.
    pub maintenance: String,
}

/// What a name of a datastore means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDatastores {
    /// Whether it is the name of a datastore cluster.
    pub is_cluster: bool,
    /// The datastore, or the members of the datastore cluster.
    pub datastores: Vec<Datastore>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourcePool {
    pub reference: MoRef,
    /// The cluster or host that it belongs to.
    pub owner: Option<MoRef>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub reference: MoRef,
    pub name: String,
    pub backing: NetworkBacking,
}

/// How a network card is connected to a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkBacking {
    Standard { name: String, network: MoRef },
    Portgroup { switch_uuid: String, portgroup_key: String },
    Opaque { id: String, kind: String },
}

impl NetworkBacking {
    pub(crate) fn write(&self, w: &mut Writer) {
        match self {
            Self::Standard { name, network } => {
                w.nest_as("backing", "VirtualEthernetCardNetworkBackingInfo", |w| {
                    w.text("deviceName", name).moref("network", network);
                });
            }
            Self::Portgroup {
                switch_uuid,
                portgroup_key,
            } => {
                w.nest_as("backing", "VirtualEthernetCardDistributedVirtualPortBackingInfo", |w| {
                    w.nest("port", |w| {
                        w.text("switchUuid", switch_uuid).text("portgroupKey", portgroup_key);
                    });
                });
            }
            Self::Opaque { id, kind } => {
                w.nest_as("backing", "VirtualEthernetCardOpaqueNetworkBackingInfo", |w| {
                    w.text("opaqueNetworkId", id).text("opaqueNetworkType", kind);
                });
            }
        }
    }
}

/// A template that starts with this is an item of a content library: `library:name/item`.
const LIBRARY_PREFIX: &str = "library:";

const VM: &[&str] = &["VirtualMachine"];
const FOLDER: &[&str] = &["Folder", "StoragePod"];
const POOL: &[&str] = &[
    "ResourcePool",
    "VirtualApp",
    "ComputeResource",
    "ClusterComputeResource",
];
const CLUSTER: &[&str] = &["ClusterComputeResource", "ComputeResource"];
const DATASTORE: &[&str] = &["Datastore"];
const DATASTORES: &[&str] = &["Datastore", "StoragePod"];
const NETWORK: &[&str] = &["Network", "DistributedVirtualPortgroup", "OpaqueNetwork"];

/// A kind of object, and the folder that holds it.
struct Target<'a> {
    what: &'static str,
    kinds: &'static [&'static str],
    folder: &'a MoRef,
    /// The folder's fixed name below the datacenter.
    branch: &'static str,
}

impl Vcenter {
    /// A datacenter by path or name, or the only one.
    pub async fn datacenter(&self, path: Option<&str>) -> Result<Arc<Datacenter>> {
        let path = path.unwrap_or_default().trim();
        let key = format!("datacenter:{path}");
        self.0.cache.get(key, self.find_datacenter(path)).await
    }

    async fn find_datacenter(&self, path: &str) -> Result<Datacenter> {
        let root = self.content()?.root_folder.clone();
        let listing = self.list(&root, &["Datacenter"]).await?;
        let found = match MoRef::from_id(path).and_then(|reference| listing.by_reference(&reference)) {
            Some(found) => found,
            None => listing.pick("datacenter", &["Datacenter"], path, "")?,
        };
        let folders = ["vmFolder", "hostFolder", "datastoreFolder", "networkFolder"];
        let object = self.retrieve_one(&found.reference, &folders).await?;
        let need = |name: &'static str| {
            object.moref(name).ok_or(Error::Incomplete {
                method: "RetrievePropertiesEx".to_owned(),
                what: name,
            })
        };
        Ok(Datacenter {
            name: found.name.clone(),
            path: found.path.clone(),
            vm_folder: need("vmFolder")?,
            host_folder: need("hostFolder")?,
            datastore_folder: need("datastoreFolder")?,
            network_folder: need("networkFolder")?,
            reference: found.reference.clone(),
        })
    }

    /// A virtual machine or template by path or name.
    pub async fn find_vm(&self, datacenter: &Datacenter, path: &str) -> Result<MoRef> {
        let target = Target {
            what: "virtual machine",
            kinds: VM,
            folder: &datacenter.vm_folder,
            branch: "vm",
        };
        self.find(datacenter, &target, path).await
    }

    /// A template by UUID (instance UUID, then BIOS UUID), path, name or library item, read as a whole.
    pub async fn template(&self, datacenter: &Datacenter, template: &str) -> Result<Arc<VmInfo>> {
        let key = format!("template:{}:{template}", datacenter.reference);
        let look_up = async {
            let in_library = template.strip_prefix(LIBRARY_PREFIX);
            let reference = match (in_library, self.template_by_uuid(datacenter, template).await?) {
                (Some(path), _) => self.library_template(path).await?,
                (None, Some(reference)) => reference,
                (None, None) => self
                    .find_vm(datacenter, template)
                    .await
                    .map_err(|error| as_template(error, template))?,
            };
            self.vm(&reference).await
        };
        self.0.cache.get(key, look_up).await
    }

    async fn template_by_uuid(&self, datacenter: &Datacenter, text: &str) -> Result<Option<MoRef>> {
        if !is_uuid(text) {
            return Ok(None);
        }
        for instance in [true, false] {
            if let Some(found) = self.find_by_uuid(Some(datacenter), text, instance).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// A folder for machines by path or name; nothing means the datacenter's own.
    pub async fn vm_folder(&self, datacenter: &Datacenter, path: Option<&str>) -> Result<MoRef> {
        match path.map(str::trim).filter(|path| !path.is_empty()) {
            None => Ok(datacenter.vm_folder.clone()),
            Some(path) => {
                let target = Target {
                    what: "folder",
                    kinds: FOLDER,
                    folder: &datacenter.vm_folder,
                    branch: "vm",
                };
                self.find(datacenter, &target, path).await
            }
        }
    }

    /// A resource pool by path or name; a cluster or host stands for its root pool; nothing means the only root pool.
    pub async fn resource_pool(&self, datacenter: &Datacenter, path: Option<&str>) -> Result<Arc<ResourcePool>> {
        let path = path.unwrap_or_default().trim();
        let path = if path.is_empty() { "*/Resources" } else { path };
        let key = format!("pool:{}:{path}", datacenter.reference);
        let look_up = async {
            let target = Target {
                what: "resource pool",
                kinds: POOL,
                folder: &datacenter.host_folder,
                branch: "host",
            };
            let mut reference = self.find(datacenter, &target, path).await?;
            if reference.kind().ends_with("ComputeResource") {
                let object = self.retrieve_one(&reference, &["resourcePool"]).await?;
                let missing = || Error::NotFound {
                    kind: "resource pool",
                    path: path.to_owned(),
                };
                reference = object.moref("resourcePool").ok_or_else(missing)?;
            }
            let owner = self.retrieve_one(&reference, &["owner"]).await?.moref("owner");
            Ok(ResourcePool { reference, owner })
        };
        self.0.cache.get(key, look_up).await
    }

    /// A cluster (or standalone host) by path or name; nothing means the only one.
    pub async fn cluster(&self, datacenter: &Datacenter, path: Option<&str>) -> Result<MoRef> {
        let target = Target {
            what: "cluster",
            kinds: CLUSTER,
            folder: &datacenter.host_folder,
            branch: "host",
        };
        self.find(datacenter, &target, path.unwrap_or_default().trim()).await
    }

    /// A datastore by path or name; nothing means the only one.
    pub async fn datastore(&self, datacenter: &Datacenter, path: Option<&str>) -> Result<Arc<Datastore>> {
        let path = path.unwrap_or_default().trim();
        let key = format!("datastore:{}:{path}", datacenter.reference);
        let look_up = async {
            let folder = &datacenter.datastore_folder;
            let target = Target {
                what: "datastore",
                kinds: DATASTORE,
                folder,
                branch: "datastore",
            };
            let reference = self.find(datacenter, &target, path).await?;
            let mut found = self.read_datastores(std::slice::from_ref(&reference)).await?;
            found.pop().ok_or_else(|| Error::NotFound {
                kind: "datastore",
                path: path.to_owned(),
            })
        };
        self.0.cache.get(key, look_up).await
    }

    /// The datastore by path or name, or the members of the datastore cluster of that path or name.
    pub async fn datastores(&self, datacenter: &Datacenter, path: &str) -> Result<Arc<NamedDatastores>> {
        let key = format!("datastores:{}:{path}", datacenter.reference);
        let look_up = async {
            let target = Target {
                what: "datastore",
                kinds: DATASTORES,
                folder: &datacenter.datastore_folder,
                branch: "datastore",
            };
            let reference = self.find(datacenter, &target, path.trim()).await?;
            let is_cluster = reference.kind() == "StoragePod";
            let members = if is_cluster {
                let pod = self.retrieve_one(&reference, &["childEntity"]).await?;
                pod.morefs("childEntity")
            } else {
                vec![reference]
            };
            Ok(NamedDatastores {
                is_cluster,
                datastores: self.read_datastores(&members).await?,
            })
        };
        self.0.cache.get(key, look_up).await
    }

    /// The datastores that a cluster's hosts (or one host) can reach, by name.
    pub async fn datastores_of(&self, owner: &MoRef) -> Result<Arc<Vec<Datastore>>> {
        let look_up = async {
            let references = self.retrieve_one(owner, &["datastore"]).await?.morefs("datastore");
            let mut found = self.read_datastores(&references).await?;
            found.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(found)
        };
        self.0.cache.get(format!("datastores-of:{owner}"), look_up).await
    }

    async fn read_datastores(&self, references: &[MoRef]) -> Result<Vec<Datastore>> {
        if references.is_empty() {
            return Ok(Vec::new());
        }
        let paths = &[
            "name",
            "summary.freeSpace",
            "summary.accessible",
            "summary.maintenanceMode",
        ];
        let wants = [Want {
            kind: "Datastore",
            paths,
        }];
        let objects = self.retrieve(&wants, references, &[]).await?;
        let read = |object: Object| {
            Some(Datastore {
                name: unescape(object.text("name")?),
                free_bytes: object
                    .text("summary.freeSpace")
                    .and_then(|text| text.parse().ok())
                    .unwrap_or_default(),
                accessible: object.text("summary.accessible") != Some("false"),
                maintenance: object
                    .string("summary.maintenanceMode")
                    .unwrap_or_else(|| "normal".to_owned()),
                reference: object.reference?,
            })
        };
        Ok(objects.into_iter().filter_map(read).collect())
    }

    /// A network by path or name: standard, distributed port group or opaque (NSX).
    pub async fn network(&self, datacenter: &Datacenter, path: &str) -> Result<Arc<Network>> {
        let key = format!("network:{}:{path}", datacenter.reference);
        let look_up = async {
            let folder = &datacenter.network_folder;
            let target = Target {
                what: "network",
                kinds: NETWORK,
                folder,
                branch: "network",
            };
            let reference = self.find(datacenter, &target, path.trim()).await?;
            self.read_network(reference).await
        };
        self.0.cache.get(key, look_up).await
    }

    async fn read_network(&self, reference: MoRef) -> Result<Network> {
        let incomplete = |what| Error::Incomplete {
            method: "RetrievePropertiesEx".to_owned(),
            what,
        };
        match reference.kind() {
            "DistributedVirtualPortgroup" => {
                let paths = ["name", "key", "config.distributedVirtualSwitch"];
                let object = self.retrieve_one(&reference, &paths).await?;
                let switch = object
                    .moref("config.distributedVirtualSwitch")
                    .ok_or_else(|| incomplete("switch"))?;
                let uuid = self
                    .retrieve_one(&switch, &["uuid"])
                    .await?
                    .string("uuid")
                    .unwrap_or_default();
                let key = object.string("key").unwrap_or_else(|| reference.value().to_owned());
                Ok(Network {
                    name: unescape(object.text("name").unwrap_or_default()),
                    backing: NetworkBacking::Portgroup {
                        switch_uuid: uuid,
                        portgroup_key: key,
                    },
                    reference,
                })
            }
            "OpaqueNetwork" => {
                let object = self.retrieve_one(&reference, &["name", "summary"]).await?;
                let summary = object.get("summary").ok_or_else(|| incomplete("summary"))?;
                let (id, kind) = (
                    summary.string_at("opaqueNetworkId"),
                    summary.string_at("opaqueNetworkType"),
                );
                Ok(Network {
                    name: unescape(object.text("name").unwrap_or_default()),
                    backing: NetworkBacking::Opaque {
                        id: id.ok_or_else(|| incomplete("opaqueNetworkId"))?,
                        kind: kind.unwrap_or_default(),
                    },
                    reference,
                })
            }
            _ => {
                let name = unescape(
                    self.retrieve_one(&reference, &["name"])
                        .await?
                        .text("name")
                        .unwrap_or_default(),
                );
                let backing = NetworkBacking::Standard {
                    name: name.clone(),
                    network: reference.clone(),
                };
                Ok(Network {
                    name,
                    backing,
                    reference,
                })
            }
        }
    }

    /// A machine by the UUID that we gave it at the clone.
    pub async fn find_vm_by_instance_uuid(&self, datacenter: Option<&Datacenter>, uuid: &str) -> Result<Option<MoRef>> {
        self.find_by_uuid(datacenter, uuid, true).await
    }

    /// A machine by its BIOS UUID, the one in a provider id.
    pub async fn find_vm_by_bios_uuid(&self, datacenter: Option<&Datacenter>, uuid: &str) -> Result<Option<MoRef>> {
        self.find_by_uuid(datacenter, uuid, false).await
    }

    async fn find_by_uuid(&self, datacenter: Option<&Datacenter>, uuid: &str, instance: bool) -> Result<Option<MoRef>> {
        let index = self.search_index()?;
        let mut body = Writer::new();
        body.opt_moref("datacenter", datacenter.map(|datacenter| &datacenter.reference))
            .text("uuid", uuid)
            .value("vmSearch", true)
            .value("instanceUuid", instance);
        Ok(self
            .call(Call::read("FindByUuid", &index, body.finish()))
            .await?
            .moref_at("returnval"))
    }

    /// A direct child of a folder, by name; such as the machine that already has a name.
    pub async fn find_child(&self, folder: &MoRef, name: &str) -> Result<Option<MoRef>> {
        let index = self.search_index()?;
        let mut body = Writer::new();
        body.moref("entity", folder).text("name", name);
        Ok(self
            .call(Call::read("FindChild", &index, body.finish()))
            .await?
            .moref_at("returnval"))
    }

    fn search_index(&self) -> Result<MoRef> {
        let missing = || Error::Incomplete {
            method: "RetrieveServiceContent".to_owned(),
            what: "searchIndex",
        };
        self.content()?.search_index.clone().ok_or_else(missing)
    }

    async fn find(&self, datacenter: &Datacenter, target: &Target<'_>, path: &str) -> Result<MoRef> {
        let key = format!("find {}:{}:{path}", target.kinds.join("+"), datacenter.reference);
        let look_up = Box::pin(self.look_for(datacenter, target, path));
        let found = self.0.cache.get(key, look_up).await?;
        Ok(MoRef::clone(&found))
    }

    /// Costs one call for an id or a path, and one that lists all objects below the folder for a name or a pattern. Paths of
    /// networks are listed, too, because they are not unique.
    async fn look_for(&self, datacenter: &Datacenter, target: &Target<'_>, path: &str) -> Result<MoRef> {
        let fits = |found: &MoRef| target.kinds.contains(&found.kind());
        let path = &clean(path);
        let bare = path.as_str();
        if let Some(reference) = MoRef::from_id(bare).filter(fits) {
            match self.retrieve_one(&reference, &["name"]).await {
                Ok(_) => return Ok(reference),
                // The text is a name that looks like an id.
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(error),
            }
        }
        if target.kinds == FOLDER && bare == target.branch {
            return Ok(target.folder.clone());
        }
        let base = format!("{}/{}", datacenter.path, target.branch);
        let mut absolute = match bare.starts_with('/') {
            true => vec![bare.to_owned()],
            false => vec![format!("{base}/{bare}"), format!("/{bare}")],
        };
        if target.kinds == FOLDER && !bare.starts_with('/') {
            absolute.insert(0, format!("{}/{bare}", datacenter.path));
        }
        let pattern = bare.contains(['*', '?', '[']);
        if bare.contains('/') && !pattern && target.branch != "network" {
            return self.find_by_path(target, path, absolute).await;
        }
        let listing = self.list(target.folder, target.kinds).await?.below(&base);
        let pick = |text: &str| listing.pick(target.what, target.kinds, text, &base);
        let mut tries = match bare.contains('/') {
            true => absolute,
            false => vec![bare.to_owned()],
        }
        .into_iter();
        let mut picked = pick(&tries.next().unwrap_or_default());
        for text in tries {
            if matches!(picked, Err(Error::NotFound { .. })) {
                picked = pick(&text);
            }
        }
        match picked.map(|picked| picked.reference.clone()) {
            Err(Error::NotFound { .. }) if target.branch == "network" => {
                match self.network_of_cluster(target, bare).await? {
                    Some(found) => Ok(found),
                    None => self.network_by_segment(target, bare).await,
                }
            }
            picked => picked,
        }
    }

    /// Finds a network by the path of a compute cluster or host that has it.
    async fn network_of_cluster(&self, target: &Target<'_>, path: &str) -> Result<Option<MoRef>> {
        let Some((parent, name)) = path.rsplit_once('/').filter(|(parent, _)| parent.starts_with('/')) else {
            return Ok(None);
        };
        let owner = self.find_by_inventory_path(parent).await?;
        let Some(owner) = owner.filter(|owner| owner.kind().ends_with("ComputeResource")) else {
            return Ok(None);
        };
        let networks = self.retrieve_one(&owner, &["network"]).await?.morefs("network");
        if networks.is_empty() {
            return Ok(None);
        }
        let paths: &[&str] = &["name"];
        let wants: Vec<Want<'_>> = target.kinds.iter().map(|kind| Want { kind, paths }).collect();
        let all = self.retrieve(&wants, &networks, &[]).await?;
        let is_it = |object: &Object| object.text("name").is_some_and(|text| unescape(text) == name);
        let found: Vec<MoRef> = all
            .into_iter()
            .filter(is_it)
            .filter_map(|object| object.reference)
            .collect();
        match found.as_slice() {
            [] => Ok(None),
            [one] => Ok(Some(one.clone())),
            many => Err(Error::Ambiguous {
                kind: target.what,
                path: path.to_owned(),
                found: many.iter().map(ToString::to_string).collect(),
            }),
        }
    }

    async fn find_by_path(&self, target: &Target<'_>, path: &str, tries: Vec<String>) -> Result<MoRef> {
        for path in tries {
            let found = self.find_by_inventory_path(&path).await?;
            if let Some(found) = found.filter(|found| target.kinds.contains(&found.kind())) {
                return Ok(found);
            }
        }
        Err(Error::NotFound {
            kind: target.what,
            path: path.to_owned(),
        })
    }

    /// Finds a port group by the id of its NSX segment or logical switch.
    async fn network_by_segment(&self, target: &Target<'_>, id: &str) -> Result<MoRef> {
        let paths = &["name", "config.segmentId", "config.logicalSwitchUuid"];
        let wants = [Want {
            kind: "DistributedVirtualPortgroup",
            paths,
        }];
        let root = std::slice::from_ref(target.folder);
        let all = self.retrieve(&wants, root, crate::listing::STEPS).await?;
        let is_it = |object: &Object| {
            let ids = ["config.segmentId", "config.logicalSwitchUuid"];
            !id.is_empty() && ids.iter().any(|path| object.text(path) == Some(id))
        };
        let found: Vec<MoRef> = all
            .into_iter()
            .filter(is_it)
            .filter_map(|object| object.reference)
            .collect();
        match found.as_slice() {
            [one] => Ok(one.clone()),
            [] => Err(Error::NotFound {
                kind: target.what,
                path: id.to_owned(),
            }),
            many => Err(Error::Ambiguous {
                kind: target.what,
                path: id.to_owned(),
                found: many.iter().map(ToString::to_string).collect(),
            }),
        }
    }

    async fn find_by_inventory_path(&self, path: &str) -> Result<Option<MoRef>> {
        let index = self.search_index()?;
        let mut body = Writer::new();
        body.text("inventoryPath", path.trim_start_matches('/'));
        Ok(self
            .call(Call::read("FindByInventoryPath", &index, body.finish()))
            .await?
            .moref_at("returnval"))
    }

    async fn list(&self, root: &MoRef, kinds: &[&str]) -> Result<Listing> {
        Listing::read(self, root, kinds).await
    }

    /// The name of any object, such as the host that a machine runs on.
    pub async fn name_of(&self, object: &MoRef) -> Result<String> {
        let look_up = async {
            Ok(unescape(
                self.retrieve_one(object, &["name"])
                    .await?
                    .text("name")
                    .unwrap_or_default(),
            ))
        };
        let name = self.0.cache.get(format!("name:{object}"), look_up).await?;
        Ok(String::clone(&name))
    }
}

/// Removes what makes no difference in a path: a `./` before it, a `/` after it, and each `/` that follows another.
fn clean(path: &str) -> String {
    let bare = path.trim_start_matches("./");
    let names: Vec<&str> = bare.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    let root = if bare.starts_with('/') { "/" } else { "" };
    format!("{root}{}", names.join("/"))
}

fn as_template(error: Error, template: &str) -> Error {
    match error {
        Error::NotFound { .. } => Error::NotFound {
            kind: "template",
            path: template.to_owned(),
        },
        Error::Ambiguous { path, found, .. } => Error::Ambiguous {
            kind: "template",
            path,
            found,
        },
        error => error,
    }
}

fn is_uuid(text: &str) -> bool {
    let digits = text.chars().filter(|c| *c != '-').count();
    digits == 32 && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
}
