//! What a text means: the same paths through this crate and through govmomi's finder.

use anyhow::Result;
use capstan_core::vm::MoRef;
use capstan_testkit::vcsim::Options;
use capstan_vsphere::{Datacenter, Error, Vcenter};

use crate::vcsim::{clone, in_time, start};

/// Returns all objects that an answer names.
fn found(result: Result<MoRef, Error>) -> Result<Vec<String>> {
    match result {
        Ok(one) => Ok(vec![one.to_string()]),
        Err(Error::NotFound { .. }) => Ok(Vec::new()),
        Err(Error::Ambiguous { found, .. }) => {
            let named = found.iter().filter_map(|text| {
                let (_, id) = text.rsplit_once('(').unwrap_or(("", text.as_str()));
                id.strip_suffix(')').or(Some(id))
            });
            Ok(named.map(str::to_owned).collect())
        }
        Err(error) => Err(error.into()),
    }
}

async fn find(vcenter: &Vcenter, dc: &Datacenter, kind: &str, path: &str) -> Result<MoRef, Error> {
    Ok(match kind {
        "vm" => vcenter.find_vm(dc, path).await?,
        "folder" => vcenter.vm_folder(dc, Some(path)).await?,
        "datastore" => vcenter.datastore(dc, Some(path)).await?.reference.clone(),
        "network" => vcenter.network(dc, path).await?.reference.clone(),
        _ => vcenter.resource_pool(dc, Some(path)).await?.reference.clone(),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_inventory_is_searched_as_govmomis_finder_searches_it() -> Result<()> {
    in_time(async {
        let options = Options {
            opaque_networks: 1,
            ..Options::default()
        };
        let (sim, _sessions, vcenter) = start(options).await?;
        sim.admin.make_folders("two/one").await?;
        for segment in ["segment-1", "segment-2"] {
            sim.admin.make_portgroup("NSX-same", segment).await?;
        }
        let dc = vcenter.datacenter(None).await?;
        assert_eq!(vcenter.datacenter(Some(dc.reference.value())).await?.path, dc.path);
        // A machine of the same name in two folders.
        let twin = clone(&vcenter, "pvscsi", "twin", 0, true).await?;
        let template = vcenter.template(&dc, "pvscsi").await?;
        let folder = vcenter.vm_folder(&dc, Some("vm/two/one")).await?;
        crate::vcsim::clone_into(&vcenter, "pvscsi", "twin", &folder).await?;
        let template = &template.reference;
        let portgroup = vcenter.network(&dc, "DC0_DVPG0").await?.reference.clone();
        let store = vcenter.datastore(&dc, Some("LocalDS_1")).await?.reference.clone();
        let pool = vcenter.resource_pool(&dc, Some("DC0_C0_RP1")).await?.reference.clone();
        let table = [
            (
                "vm",
                "pvscsi /DC0/vm/pvscsi ./pvscsi pvscsi* none twin /DC0/vm/twin two/one/twin ./two/one/twin two/*/twin \
                 /DC0/vm/two/one/twin/ //DC0/vm//twin two/none /DC0/vm/two/one/* vm-4711",
            ),
            (
                "folder",
                "/DC0/vm /DC0/vm/none vm vm/two/one ./vm/two/one vm/two/ vm/t* /DC0/vm/two/one one none group-v4711",
            ),
            (
                "datastore",
                "LocalDS_0 /DC0/datastore/LocalDS_1 LocalDS_* ./LocalDS_0 none datastore-4711",
            ),
            (
                "network",
                "DC0_NSX0 none DC0_DVPG0 /DC0/network/DC0_DVPG0 /DC0/network/DVS0/DC0_DVPG0 /DC0/network/DVS0/none NSX-same \
                 /DC0/network/NSX-same /DC0/network/DVS0/NSX-same segment-1 segment-2 segment-3 NSX-*",
            ),
            (
                "pool",
                "DC0_C0_RP1 /DC0/host/DC0_C0/Resources/DC0_C0_RP1 DC0_C0/Resources */Resources */Resources/* none",
            ),
        ];
        let ids = [
            ("vm", template),
            ("vm", &twin),
            ("folder", &folder),
            ("folder", &dc.vm_folder),
            ("datastore", &store),
            ("network", &portgroup),
            ("pool", &pool),
        ];
        let spelled = ids
            .iter()
            .flat_map(|(kind, id)| [(*kind, id.value().to_owned()), (*kind, id.to_string())]);
        let spaced = ["VM Network", "/DC0/network/VM Network", "/DC0/host/DC0_C0/VM Network"].map(|name| ("network", name.to_owned()));
        let paths = table.iter().flat_map(|(kind, paths)| {
            let paths = paths.split_whitespace();
            paths.map(move |path| (*kind, path.to_owned()))
        });
        let mut wrong = Vec::new();
        for (kind, path) in paths.chain(spelled).chain(spaced) {
            let mut own = found(find(&vcenter, &dc, kind, &path).await)?;
            let mut govmomi = sim.admin.find(kind, &path).await?;
            own.sort();
            govmomi.sort();
            if own != govmomi {
                wrong.push(format!("{kind} {path:?}: {own:?}, govmomi {govmomi:?}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_relative_to_the_folder_of_machines_means_a_folder_too() -> Result<()> {
    in_time(async {
        let (sim, _sessions, vcenter) = start(Options::default()).await?;
        sim.admin.make_folders("two/one").await?;
        let dc = vcenter.datacenter(None).await?;
        // govmomi takes it as relative to the datacenter alone, and finds nothing.
        let folder = vcenter.vm_folder(&dc, Some("two/one")).await?;
        assert_eq!(folder, vcenter.vm_folder(&dc, Some("/DC0/vm/two/one")).await?);
        Ok(())
    })
    .await
}
