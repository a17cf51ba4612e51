//! VSphereDeploymentZone: whether machines can be put where it says.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain};
use capstan_core::validate::vsphere::{deployment_zone, failure_domain};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::patch::{self, Lock};
use capstan_kube::{Cache, Context, Next, Reconciler};
use capstan_vsphere::Vcenter;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource, ResourceExt};

use super::same_vcenter;
use super::topology::{self, Fault};
use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::Clusters;

/// What a zone names is looked for again this often.
const RESYNC: Duration = Duration::from_secs(10 * 60);
/// A folder or network that is missing may be made any time: it is looked for again after as long as it is known to be
/// missing, within these bounds.
const RECHECK: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// Runs the deployment zones.
pub struct Zones {
    context: Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
}

impl Zones {
    pub fn new(
        context: &Context,
        clusters: Clusters,
        credentials: Arc<Credentials>,
        domains: Cache<VSphereFailureDomain>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            clusters,
            credentials,
            domains,
        })
    }

    /// The controller, until shutdown.
    pub async fn run(self: Arc<Self>, own: Cache<VSphereDeploymentZone>) -> Result<(), Error> {
        self.domains.ready().await?;
        let (of_domain, of_cluster) = (own.clone(), own.clone());
        let references = |found: Vec<Arc<VSphereDeploymentZone>>| -> Vec<ObjectRef<VSphereDeploymentZone>> {
            found.iter().map(|zone| ObjectRef::from_obj(zone.as_ref())).collect()
        };
        let reconciler = Reconciler::new("vspheredeploymentzone", &self.context, own)
            .watches(&self.domains, move |domain| {
                let name = domain.name_any();
                references(of_domain.select(None, |zone| zone.spec.failure_domain.as_ref() == Some(&name)))
            })
            .watches(&self.clusters.infrastructure, move |cluster| {
                let waits = |zone: &VSphereDeploymentZone| zone.status.as_ref().and_then(|s| s.ready) != Some(true);
                references(of_cluster.select(None, |zone| waits(zone) && same_vcenter(zone, cluster)))
            });
        reconciler.run(move |zone| self.clone().pass(zone)).await;
        Ok(())
    }

    async fn pass(self: Arc<Self>, own: Arc<VSphereDeploymentZone>) -> Result<Next, Error> {
        let api: Api<VSphereDeploymentZone> = Api::all(self.context.client.clone());
        if own.meta().deletion_timestamp.is_some() {
            // Nothing of ours hangs on it; a predecessor may have left this.
            patch::remove_finalizer(&api, own.as_ref(), names::OLD_ZONE_FINALIZER).await?;
            return Ok(Next::Wait);
        }
        if self.is_anothers(&own) {
            return Ok(Next::Wait);
        }
        let fault = match self.check(&own).await {
            Ok(fault) => fault,
            Err(error) if error.is_told() => Some(Fault {
                condition: names::VCENTER_AVAILABLE,
                reason: names::VCENTER_UNREACHABLE,
                text: error.to_string(),
                severity: Severity::Error,
            }),
            Err(error) => return Err(error),
        };
        let now = Timestamp::now();
        let mut after = VSphereDeploymentZone::clone(&own);
        let status = after.status.get_or_insert_default();
        let all = [
            names::VCENTER_AVAILABLE,
            names::PLACEMENT_CONSTRAINT_MET,
            names::FAILURE_DOMAIN_VALIDATED,
        ];
        for type_ in all {
            match fault.as_ref().filter(|fault| fault.condition == type_) {
                Some(fault) => {
                    let (list, severity) = (&mut status.conditions, fault.severity);
                    conditions::mark_false(list, type_, severity, fault.reason, &fault.text, now);
                    break;
                }
                None => conditions::mark_true(&mut status.conditions, type_, now),
            };
        }
        // What is only warned of keeps nobody out.
        status.ready = Some(fault.as_ref().is_none_or(|fault| fault.severity != Severity::Error));
        conditions::summarize(&mut status.conditions, &all, now);
        let since = fault.and_then(|fault| conditions::since(&status.conditions, fault.condition));
        patch::status(&api, own.as_ref(), &after, Lock::Open).await?;
        Ok(Next::After(since.map_or(RESYNC, |since| recheck(since, now))))
    }

    async fn check(&self, own: &VSphereDeploymentZone) -> Result<Option<Fault>, Error> {
        let name = own.spec.failure_domain.clone().unwrap_or_default();
        let Some(domain) = self.domains.get(None, &name) else {
            let text = format!("VSphereFailureDomain {name:?} does not exist");
            return Ok(Some(Fault::of_domain("FailureDomainNotFound", text)));
        };
        let findings = deployment_zone(&own.spec);
        if !findings.is_ok() {
            return Err(Error::Invalid(findings.message()));
        }
        let findings = failure_domain(&domain.spec);
        if !findings.is_ok() {
            return Ok(Some(Fault::of_domain("FailureDomainInvalid", findings.message())));
        }
        let vcenter = self.session(own).await?;
        topology::check(&vcenter, &own.spec.placement_constraint, &domain.spec).await
    }

    /// Zones belong to no namespace. Whoever works in one alone leaves those to others that none of its clusters can use.
    fn is_anothers(&self, own: &VSphereDeploymentZone) -> bool {
        self.context.namespace.is_some() && self.on_same_server(own).is_empty()
    }

    fn on_same_server(&self, own: &VSphereDeploymentZone) -> Vec<Arc<VSphereCluster>> {
        let all = &self.clusters.infrastructure;
        let mut same = all.select(None, |cluster| same_vcenter(own, cluster));
        // A cluster that names an identity comes before one that uses the manager's own account.
        same.sort_by_key(|cluster| {
            (
                cluster.spec.identity_ref.is_none(),
                cluster.namespace(),
                cluster.name_any(),
            )
        });
        same
    }

    /// Returns a session by the identity of a cluster on the same server, or by the manager's own account. A cluster that
    /// cannot sign in does not keep the zone from the next one.
    async fn session(&self, own: &VSphereDeploymentZone) -> Result<Vcenter, Error> {
        let mut first = None;
        for cluster in self.on_same_server(own) {
            match self.credentials.session(&cluster).await {
                Err(error) if cannot_sign_in(&error) => {
                    first.get_or_insert(error);
                }
                session => return session,
            }
        }
        match first {
            Some(error) => Err(error),
            None => {
                let server = own.spec.server.as_deref().unwrap_or_default();
                self.credentials.session_of_manager(server).await
            }
        }
    }
}

/// Whether another identity may succeed where one failed. A server that does not answer answers nobody.
fn cannot_sign_in(error: &Error) -> bool {
    use capstan_vsphere::Error::{Certificate, Invalid, Login, Thumbprint};
    match error.vsphere() {
        Some(source) => matches!(
            source,
            Login { .. } | Thumbprint { .. } | Certificate { .. } | Invalid { .. }
        ),
        None => error.is_told(),
    }
}

/// When to look again at what has been wrong since then.
fn recheck(since: Timestamp, now: Timestamp) -> Duration {
    let known = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    known.clamp(RECHECK.0, RECHECK.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_looked_for_less_and_less_often() {
        let now = Timestamp::constant(1_000_000, 0);
        let after = |seconds: i64| recheck(now - jiff::SignedDuration::from_secs(seconds), now).as_secs();
        assert_eq!([-3, 0, 5, 10, 40, 90].map(after), [5, 5, 5, 10, 40, 60]);
    }
}
