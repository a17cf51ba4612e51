//! Addresses from pools: claimed before the clone, kept for as long as the machine lives, released when it is gone.

use capstan_api::capi::CLUSTER_NAME_LABEL;
use capstan_api::vsphere::VSphereVM;
use capstan_core::vm::Observation;
use capstan_kube::objects::delete_exactly;
use capstan_kube::patch;
use capstan_kube::runtime::{Outcome, Scope};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use kube::api::PostParams;

use super::state::VmState;
use super::status::Progress;
use super::{Controller, Observed};
use crate::conditions as names;
use crate::error::Error;
use crate::ipam::{self, Caches, ClaimSpec, ClaimedAddress, Given, IPAddressClaim};
use crate::owner_cluster::cluster_name;

/// A claim without an address.
struct Waiting {
    /// Whether the claim has to be created.
    missing: bool,
    text: String,
}

impl Waiting {
    fn for_others(text: String) -> Self {
        Self { missing: false, text }
    }
}

impl Controller {
    /// Reads the addresses that pools have handed out. `None`: the VM has all that it needs.
    pub(super) async fn observe_claims(
        &self,
        scope: &Scope<VSphereVM>,
        state: &mut VmState,
    ) -> Result<Option<Observed>, Error> {
        let claims = ipam::desired(&scope.object);
        if claims.is_empty() || state.given.len() == claims.len() {
            return Ok(None);
        }
        let trigger = self.trigger.clone();
        let caches = self.ipam.caches(&self.context, move |vm| trigger.wake(vm)).await?;
        let (mut given, mut missing, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        for claim in &claims {
            match address(scope, claim, &caches)? {
                Ok(address) => given.push(address),
                Err(wait) => {
                    missing.extend(wait.missing.then(|| claim.name.clone()));
                    waiting.push(wait.text);
                }
            }
        }
        if waiting.is_empty() {
            state.given = given;
            return Ok(None);
        }
        let mut observed = Observed::idle(None);
        observed.plan = Observation::Unaddressed { missing };
        observed.claims = claims;
        observed.notes.progress = Some(Progress::Claims(waiting.join("; ")));
        Ok(Some(observed))
    }

    pub(super) async fn create_claim(
        &self,
        scope: &Scope<VSphereVM>,
        observed: &Observed,
        name: &str,
    ) -> Result<Outcome, Error> {
        for claimed in observed.claims.iter().filter(|claimed| claimed.name == name) {
            let api = scope.api_of::<IPAddressClaim>();
            match api.create(&PostParams::default(), &claim(scope, claimed)).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                result => drop(result?),
            }
        }
        Ok(Outcome::Done)
    }

    /// Deletes all claims; the machine must be gone by then.
    pub(super) async fn release_addresses(&self, scope: &Scope<VSphereVM>) -> Result<(), Error> {
        let api = scope.api_of::<IPAddressClaim>();
        for claimed in ipam::desired(&scope.object) {
            let claim = api.get_opt(&claimed.name).await?;
            let Some(claim) = claim.filter(|claim| claim.belongs_to(&scope.key.uid)) else {
                continue;
            };
            for finalizer in [names::CLAIM_FINALIZER, names::OLD_CLAIM_FINALIZER] {
                patch::remove_finalizer(&api, &claim, finalizer).await?;
            }
            delete_exactly(&api, &claim).await?;
        }
        Ok(())
    }
}

/// Returns the address for a claim, or what it waits for.
fn address(
    scope: &Scope<VSphereVM>,
    claimed: &ClaimedAddress,
    caches: &Caches,
) -> Result<Result<Given, Waiting>, Error> {
    let (namespace, name) = (scope.key.namespace.as_str(), &claimed.name);
    let waits = format!(
        "IPAddressClaim {name:?} waits for an address of {} {:?}",
        claimed.pool.kind, claimed.pool.name
    );
    let Some(claim) = caches.claims.get(Some(namespace), name) else {
        return Ok(Err(Waiting {
            missing: true,
            text: waits,
        }));
    };
    if !claim.belongs_to(&scope.key.uid) {
        let text = format!("IPAddressClaim {name:?} belongs to another object: waiting for it to go");
        return Ok(Err(Waiting::for_others(text)));
    }
    let Some(address) = claim.address() else {
        let complaint = claim.complaint().map(|text| format!(": {text}")).unwrap_or_default();
        return Ok(Err(Waiting::for_others(format!("{waits}{complaint}"))));
    };
    let Some(found) = caches.addresses.get(Some(namespace), address) else {
        let text = format!("IPAddress {address:?} of IPAddressClaim {name:?} does not exist yet");
        return Ok(Err(Waiting::for_others(text)));
    };
    ipam::given(claimed.device, address, &found.spec)
        .map(Ok)
        .map_err(Error::Invalid)
}

fn claim(scope: &Scope<VSphereVM>, claimed: &ClaimedAddress) -> IPAddressClaim {
    let cluster = cluster_name(scope.object.as_ref());
    let mut claim = IPAddressClaim::new(
        &claimed.name,
        ClaimSpec {
            pool_ref: claimed.pool.clone(),
            cluster_name: cluster.clone(),
        },
    );
    let meta = &mut claim.metadata;
    meta.namespace = scope.object.namespace();
    meta.labels = cluster.map(|name| [(CLUSTER_NAME_LABEL.to_owned(), name)].into());
    meta.finalizers = Some(vec![names::CLAIM_FINALIZER.to_owned()]);
    meta.owner_references = Some(vec![OwnerReference {
        api_version: VSphereVM::API_VERSION.to_owned(),
        kind: VSphereVM::KIND.to_owned(),
        name: scope.key.name.clone(),
        uid: scope.key.uid.clone(),
        ..OwnerReference::default()
    }]);
    claim
}
