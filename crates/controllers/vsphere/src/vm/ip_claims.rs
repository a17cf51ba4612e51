//! Addresses from pools: claimed before the clone, kept for as long as the machine lives, given back when it is gone.

use std::sync::Arc;

use capstan_api::capi::CLUSTER_NAME_LABEL;
use capstan_api::vsphere::VSphereVM;
use capstan_kube::conditions::{self, Severity};
use capstan_kube::{Next, patch};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};

use super::state::VmState;
use super::{Vms, status};
use crate::conditions as names;
use crate::desired;
use crate::error::Error;
use crate::ipam::{self, Caches, ClaimSpec, Given, IPAddressClaim};
use crate::owner_cluster::cluster_name;
use capstan_core::vm::DesiredVm;

impl Vms {
    /// What the VM asks for, with the addresses that it was given.
    pub(super) fn desired(&self, vm: &VSphereVM, state: &VmState) -> DesiredVm {
        let mut desired = desired::desired(vm);
        ipam::put(&mut desired.networks, &state.given);
        desired
    }

    /// Claims what is not claimed yet; tells what is still waited for.
    pub(super) async fn claim_addresses(
        self: &Arc<Self>,
        vm: &VSphereVM,
        state: &mut VmState,
    ) -> Result<Option<Next>, Error> {
        let claims = ipam::desired(vm);
        if claims.is_empty() || state.given.len() == claims.len() {
            return Ok(None);
        }
        let trigger = self.trigger.get().cloned();
        let poke = move |vm| {
            if let Some(trigger) = &trigger {
                trigger.poke(vm);
            }
        };
        let caches = self.ipam.caches(&self.context, poke).await?;
        let (mut given, mut pending) = (Vec::new(), Vec::new());
        for claim in &claims {
            match self.address(vm, claim, &caches).await? {
                Ok(address) => given.push(address),
                Err(text) => pending.push(text),
            }
        }
        if pending.is_empty() {
            state.given = given;
            return Ok(None);
        }
        let text = pending.join("; ");
        self.write(vm, state, |status, now| {
            status::in_progress(status, names::WAITING_FOR_STATIC_IP, &text, now);
            let (type_, reason) = (names::IP_ADDRESS_CLAIMED, names::WAITING_FOR_IP_ADDRESS);
            conditions::mark_false(&mut status.conditions, type_, Severity::Info, reason, &text, now);
        })
        .await?;
        Ok(Some(Next::Wait))
    }

    /// The address for a claim, or what it waits for.
    async fn address(
        &self,
        vm: &VSphereVM,
        desired: &ipam::DesiredVm,
        caches: &Caches,
    ) -> Result<Result<Given, String>, Error> {
        let (namespace, name) = (vm.namespace().unwrap_or_default(), &desired.name);
        let waits = format!(
            "IPAddressClaim {name:?} waits for an address of {} {:?}",
            desired.pool.kind, desired.pool.name
        );
        let Some(claim) = caches.claims.get(Some(&namespace), name) else {
            let api: Api<IPAddressClaim> = self.context.api(&namespace);
            match api.create(&PostParams::default(), &claim(vm, desired)).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                result => drop(result?),
            }
            return Ok(Err(waits));
        };
        if !claim.belongs_to(vm) {
            return Ok(Err(format!(
                "IPAddressClaim {name:?} belongs to another object: waiting for it to go"
            )));
        }
        let Some(address) = claim.address() else {
            let complaint = claim.complaint().map(|text| format!(": {text}")).unwrap_or_default();
            return Ok(Err(format!("{waits}{complaint}")));
        };
        let Some(found) = caches.addresses.get(Some(&namespace), address) else {
            return Ok(Err(format!(
                "IPAddress {address:?} of IPAddressClaim {name:?} does not exist yet"
            )));
        };
        ipam::given(desired.device, address, &found.spec)
            .map(Ok)
            .map_err(Error::Invalid)
    }

    /// Gives back every address; the machine must be gone by then.
    pub(super) async fn release_addresses(&self, vm: &VSphereVM) -> Result<(), Error> {
        let api: Api<IPAddressClaim> = self.context.api(&vm.namespace().unwrap_or_default());
        for desired in ipam::desired(vm) {
            let claim = api.get_opt(&desired.name).await?;
            let Some(claim) = claim.filter(|claim| claim.belongs_to(vm)) else {
                continue;
            };
            for finalizer in [names::CLAIM_FINALIZER, names::OLD_CLAIM_FINALIZER] {
                patch::remove_finalizer(&api, &claim, finalizer).await?;
            }
            match api.delete(&desired.name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                result => drop(result?),
            }
        }
        Ok(())
    }
}

fn claim(vm: &VSphereVM, desired: &ipam::DesiredVm) -> IPAddressClaim {
    let cluster = cluster_name(vm);
    let mut claim = IPAddressClaim::new(
        &desired.name,
        ClaimSpec {
            pool_ref: desired.pool.clone(),
            cluster_name: cluster.clone(),
        },
    );
    let meta = &mut claim.metadata;
    meta.namespace = vm.namespace();
    meta.labels = cluster.map(|name| [(CLUSTER_NAME_LABEL.to_owned(), name)].into());
    meta.finalizers = Some(vec![names::CLAIM_FINALIZER.to_owned()]);
    meta.owner_references = Some(vec![OwnerReference {
        api_version: VSphereVM::API_VERSION.to_owned(),
        kind: VSphereVM::KIND.to_owned(),
        name: vm.name_any(),
        uid: vm.uid().unwrap_or_default(),
        ..OwnerReference::default()
    }]);
    claim
}
