//! Writes of the scale set: its model, its capacity, its bootstrap data and its tags.

use std::collections::BTreeSet;

use capstan_azure::client::When;
use capstan_azure::model::{ScaleSet, ScaleSetOsProfile, ScaleSetProperties, Tags, VirtualMachineProfile};
use capstan_core::{Class, Classified};

use super::Cloud;
use crate::error::Error;
use crate::model::{self, CUSTOM_DATA_TAG, HASH_TAG, Model};
use crate::pool::state::{Ask, Kind, State};

impl Cloud<'_> {
    /// Creates the scale set with that capacity.
    pub(in crate::pool) async fn create(&mut self, model: &Model, capacity: usize) -> Result<(), Error> {
        let mut wanted = with_capacity(&model.set, capacity);
        model::set_admin_password(&mut wanted)?;
        self.put(model, wanted, When::Absent).await
    }

    /// Gives the scale set a new model, with that capacity. Azure keeps what a PUT does not name: what is not wanted any
    /// more is named, and of the tags only those that we `applied` before go.
    pub(in crate::pool) async fn replace(
        &mut self,
        model: &Model,
        capacity: usize,
        applied: &BTreeSet<String>,
    ) -> Result<(), Error> {
        let when = self.unchanged().await?;
        let mut wanted = with_capacity(&model.set, capacity);
        if let Some(set) = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref()) {
            let mut tags = set.tags.clone();
            tags.retain(|name, _| !applied.contains(name));
            tags.extend(wanted.tags.take().unwrap_or_default());
            wanted.tags = Some(tags);
            wanted = model::replacing(wanted, &set.whole);
        }
        // Also an answer that is lost may have brought it.
        self.state.replaced_model = Some((model.hash.clone(), self.clock.now().as_second()));
        self.put(model, wanted, when).await
    }

    /// Only if nobody has changed the scale set since it was last read, and it is still the pool's. What our own operations
    /// have changed is read first.
    async fn unchanged(&mut self) -> Result<When, Error> {
        if self.state.etag_stale {
            self.read_set().await?;
        }
        self.owned()?;
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        Ok(set
            .and_then(|set| set.etag.clone())
            .map_or(When::Always, When::Unchanged))
    }

    /// Reads the scale set again where our own operations have changed it since the last read. Whether its capacity is
    /// another one than the plan was made for: somebody else has set it.
    pub(in crate::pool) async fn capacity_changed(&mut self) -> Result<bool, Error> {
        let capacity = |state: &State| Some(state.snapshot.as_ref()?.set.as_ref()?.capacity);
        let planned = capacity(&*self.state);
        if self.state.etag_stale {
            self.read_set().await?;
        }
        Ok(capacity(&*self.state) != planned)
    }

    async fn put(&mut self, model: &Model, wanted: ScaleSet, when: When) -> Result<(), Error> {
        let ask = Ask::new(model, wanted.capacity(), true);
        self.state.check_refused(&ask, self.clock.instant())?;
        let put = self.client.put_scale_set(&self.group, &self.name, &wanted, when).await;
        self.changed(put, Some(ask))?;
        self.none_is_latest();
        Ok(())
    }

    /// Sets the capacity; new custom data goes along, so that new instances never start with stale bootstrap data.
    pub(in crate::pool) async fn scale(
        &mut self,
        model: &Model,
        capacity: usize,
        custom_data: bool,
    ) -> Result<(), Error> {
        let ask = Ask::new(model, i64::try_from(capacity).unwrap_or(i64::MAX), false);
        self.state.check_refused(&ask, self.clock.instant())?;
        // The size is the one that the scale set has: another model may be wanted, which Azure has refused.
        let present = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let present = present.map_or(&model.set, |set| set.whole.as_ref());
        let mut change = ScaleSet {
            sku: with_capacity(present, capacity).sku,
            ..ScaleSet::default()
        };
        if custom_data {
            change.properties = Some(custom_data_only(&model.set));
            change.tags = Some(self.data_tags(model));
        }
        let when = self.unchanged().await?;
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, Some(ask))?;
        if custom_data {
            self.none_is_latest();
        }
        Ok(())
    }

    /// Gives new instances newer custom data, and changes nothing else.
    pub(in crate::pool) async fn refresh_custom_data(&mut self, model: &Model) -> Result<(), Error> {
        let change = ScaleSet {
            properties: Some(custom_data_only(&model.set)),
            tags: Some(self.data_tags(model)),
            ..ScaleSet::default()
        };
        let when = self.unchanged().await?;
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, None)?;
        self.none_is_latest();
        Ok(())
    }

    /// Gives the scale set the tags that pool and cluster have, and removes those that we `applied` before. No instance is
    /// replaced for it.
    pub(in crate::pool) async fn apply_tags(&mut self, model: &Model, applied: &BTreeSet<String>) -> Result<(), Error> {
        let when = self.unchanged().await?;
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let mut tags = set.map(|set| set.tags.clone()).unwrap_or_default();
        tags.retain(|name, _| !applied.contains(name));
        let wanted = model.set.tags.clone().unwrap_or_default();
        // A change of tags brings no other model.
        tags.extend(
            wanted
                .into_iter()
                .filter(|(name, _)| !model::OWN_TAGS.contains(&name.as_str())),
        );
        let change = ScaleSet {
            tags: Some(tags),
            ..ScaleSet::default()
        };
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, None)
    }

    /// A new model makes every instance that exists one of an older model, as the next list will say.
    fn none_is_latest(&mut self) {
        let instances = self
            .state
            .snapshot
            .iter_mut()
            .flat_map(|snapshot| &mut snapshot.instances);
        instances.for_each(|instance| instance.latest = false);
    }

    /// Notes the model on a scale set that somebody else made and that fits: nothing else is touched.
    pub(in crate::pool) async fn adopt(&mut self, model: &Model) -> Result<(), Error> {
        let when = self.unchanged().await?;
        let mut tags = self.tags(model);
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let before = set.map(|set| &set.tags);
        // The custom data stays as it is. Where it is not known to be the newest, its tags stay, too: new instances would
        // start with an expired token.
        for name in [CUSTOM_DATA_TAG, model::PEER_DATA_TAG] {
            match before.and_then(|before| before.get(name)) {
                _ if before.is_some_and(|before| has_custom_data_of(before, model)) => {}
                Some(hash) => drop(tags.insert(name.to_owned(), hash.clone())),
                None => drop(tags.remove(name)),
            }
        }
        let change = ScaleSet {
            tags: Some(tags),
            ..ScaleSet::default()
        };
        let patched = self
            .client
            .patch_scale_set(&self.group, &self.name, &change, when)
            .await;
        self.changed(patched, None)
    }

    /// All tags that are there, whoever set them, and ours.
    fn tags(&self, model: &Model) -> Tags {
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let mut tags = set.map(|set| set.tags.clone()).unwrap_or_default();
        tags.extend(model.set.tags.clone().unwrap_or_default());
        tags.insert(HASH_TAG.to_owned(), model.hash.clone());
        tags.insert(CUSTOM_DATA_TAG.to_owned(), model.custom_data_hash.clone());
        tags
    }

    /// The same for newer custom data alone: the scale set keeps the mark of the model that it has, whatever is wanted.
    fn data_tags(&self, model: &Model) -> Tags {
        let mut tags = self.tags(model);
        let set = self.state.snapshot.as_ref().and_then(|snapshot| snapshot.set.as_ref());
        let present = set.and_then(|set| set.model.clone());
        tags.extend(present.map(|hash| (HASH_TAG.to_owned(), hash)));
        tags
    }

    fn changed(
        &mut self,
        put: Result<capstan_azure::Put<ScaleSet>, capstan_azure::Error>,
        ask: Option<Ask>,
    ) -> Result<(), Error> {
        let put = match put {
            Ok(put) => put,
            Err(error) => {
                if error.is_precondition_failed() {
                    self.state.set_stale = true;
                    return Err(error.into());
                }
                self.mark_ambiguous();
                if error.class() == Class::Terminal {
                    self.state.refused.retain(|(refused, ..)| Some(refused) != ask.as_ref());
                    let refused = ask.map(|ask| (ask, error.to_string(), self.clock.instant()));
                    self.state.refused.extend(refused);
                }
                return Err(error.into());
            }
        };
        // A capacity that Azure takes does not make it take a model that it refused.
        let whole = ask.is_some_and(|ask| ask.is_whole());
        self.state.refused.retain(|(refused, ..)| refused.is_whole() && !whole);
        self.remember(&put.value);
        self.state.operations.retain(|tracked| tracked.kind != Kind::Change);
        self.track(Kind::Change, BTreeSet::new(), put.operation);
        Ok(())
    }
}

/// Whether tags say that the scale set has the custom data of this model. CAPZ changes its own tag only, so that it says the
/// last word.
fn has_custom_data_of(tags: &Tags, model: &Model) -> bool {
    let wanted = model.set.tags.as_ref().and_then(|tags| tags.get(model::PEER_DATA_TAG));
    match tags.get(model::PEER_DATA_TAG) {
        Some(hash) => Some(hash) == wanted,
        None => tags.get(CUSTOM_DATA_TAG) == Some(&model.custom_data_hash),
    }
}

/// The same scale set, with that capacity.
fn with_capacity(set: &ScaleSet, capacity: usize) -> ScaleSet {
    let size = set.sku.as_ref().and_then(|sku| sku.name.clone()).unwrap_or_default();
    ScaleSet {
        sku: Some(model::sku(&size, Some(capacity))),
        ..set.clone()
    }
}

fn custom_data_only(set: &ScaleSet) -> ScaleSetProperties {
    let profile = set
        .properties
        .as_ref()
        .and_then(|properties| properties.virtual_machine_profile.as_ref());
    let custom_data = profile
        .and_then(|profile| profile.os_profile.as_ref())
        .and_then(|os| os.custom_data.clone());
    ScaleSetProperties {
        virtual_machine_profile: Some(VirtualMachineProfile {
            os_profile: Some(ScaleSetOsProfile {
                custom_data,
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}
