//! State in a file: resources, instances, operations and pending effects, with times relative to the moment of saving.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::clock::Chance;
use super::compute::fleet::Fleet;
use super::config::Config;
use super::operations::Operation;
use super::server::Shared;
use super::tls::Authority;
use super::world::{Doc, Effect, World};

/// The interval at which changes are saved.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Saving takes one part in so many of the time.
const SAVE_SHARE: u32 = 20;

#[derive(Serialize, Deserialize)]
pub struct Saved {
    pub authority: Authority,
    chance: Chance,
    docs: BTreeMap<String, Doc>,
    fleets: BTreeMap<String, Fleet>,
    operations: HashMap<String, Operation>,
    providers: BTreeMap<String, bool>,
    addresses: u32,
    /// Milliseconds from now, and what happens then.
    queue: Vec<(u64, Effect)>,
}

impl Saved {
    pub fn of(world: &World, authority: &Authority) -> Self {
        let now = world.now();
        let left = |at: tokio::time::Instant| at.saturating_duration_since(now).as_millis() as u64;
        Self {
            authority: authority.clone(),
            chance: world.chance.clone(),
            docs: world.docs.clone(),
            fleets: world.fleets.clone(),
            operations: world.operations.clone(),
            providers: world.providers.clone(),
            addresses: world.addresses,
            queue: world
                .queue
                .iter()
                .map(|((at, _), effect)| (left(*at), effect.clone()))
                .collect(),
        }
    }

    /// Reads a file; none is there before the first run.
    pub fn load(path: &Path) -> anyhow::Result<Option<Self>> {
        match std::fs::read(path) {
            Ok(bytes) => {
                let saved = serde_json::from_slice(&bytes);
                Ok(Some(saved.with_context(|| {
                    format!("{} does not hold a simulator's state", path.display())
                })?))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Writes beside the file first, so that a crash leaves the old state or the new one. Only the owner can read it: it
    /// holds the authority's private key.
    pub fn store(&self, path: &Path) -> anyhow::Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}.tmp", std::process::id()));
        let beside = PathBuf::from(beside);
        let write = || {
            let _ = std::fs::remove_file(&beside);
            let mut file = std::fs::File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&beside)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            std::fs::rename(&beside, path)?;
            anyhow::Ok(())
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    pub fn into_world(self, config: Config) -> World {
        let mut world = World::new(config);
        world.chance = self.chance;
        world.docs.extend(self.docs);
        world.fleets = self.fleets;
        world.operations = self.operations;
        world.providers.extend(self.providers);
        world.addresses = self.addresses;
        for (millis, effect) in self.queue {
            world.later(Duration::from_millis(millis.max(1)), effect);
        }
        world.touched = everything(&world);
        world
    }
}

/// Saves whenever something has changed, for as long as the simulator lives. A large state takes long to write, and is
/// written less often for it.
pub async fn keep(path: PathBuf, authority: Authority, shared: Arc<Shared>) {
    let mut seen = 0;
    let mut pause = SAVE_EVERY;
    loop {
        tokio::time::sleep(pause).await;
        let (changes, saved) = {
            let core = shared.lock();
            let changes = core.changes();
            (changes, (changes != seen).then(|| Saved::of(&core.world, &authority)))
        };
        seen = changes;
        let Some(saved) = saved else { continue };
        let began = Instant::now();
        let path = path.clone();
        let stored = tokio::task::spawn_blocking(move || saved.store(&path)).await;
        if let Ok(Err(error)) = stored {
            tracing::warn!(error = format!("{error:#}"), "cannot save the state");
        }
        pause = SAVE_EVERY.max(began.elapsed() * SAVE_SHARE);
    }
}

/// All VMs and instances, which the joiner looks at after a start.
fn everything(world: &World) -> BTreeSet<String> {
    let vms = world
        .docs
        .iter()
        .filter(|(_, doc)| doc.kind() == "Microsoft.Compute/virtualMachines")
        .map(|(key, _)| key.clone());
    let instances = world
        .fleets
        .values()
        .flat_map(|fleet| fleet.instances.keys().map(|id| fleet.key(*id)));
    vms.chain(instances).collect()
}
