//! VSphereDeploymentZone: reports whether machines can be placed where it says.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::vsphere::{VSphereCluster, VSphereDeploymentZone, VSphereFailureDomain};
use capstan_core::plan::{Describe, Impact};
use capstan_core::validate::vsphere::{deployment_zone, failure_domain};
use capstan_kube::conditions::{self, Severity};
use capstan_kube::runtime::{Outcome, Plan, Reconcile, Reconciler, Report, Scope};
use capstan_kube::{Cache, Context};
use capstan_vsphere::Vcenter;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use super::same_vcenter;
use super::topology::{self, Fault};
use crate::conditions as names;
use crate::credentials::Credentials;
use crate::error::Error;
use crate::owner_cluster::Clusters;

/// A folder or network that is missing may be made at any time. The next check comes after as long as it is known to be
/// missing, within these bounds.
const RECHECK: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// The conditions of a zone, in the order in which they are checked.
const CHECKED: [&str; 3] = [
    names::VCENTER_AVAILABLE,
    names::PLACEMENT_CONSTRAINT_MET,
    names::FAILURE_DOMAIN_VALIDATED,
];
/// The name of this controller.
pub const NAME: &str = Controller::NAME;

struct Controller {
    context: Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
}

enum Observed {
    Deleting,
    Present {
        /// What the last check found; `None` before it ran.
        checked: Option<Option<Fault>>,
    },
}

#[derive(Debug)]
enum Step {
    /// Remove the finalizer that a predecessor left; Capstan puts none on zones.
    Release,
    /// Compare vCenter with the failure domain, and attach tags where the failure domain asks for that.
    Check,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Release => "takes the finalizer of a predecessor off the VSphereDeploymentZone",
            Self::Check => "compares vCenter with the failure domain and attaches tags that it lacks",
        })
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::Release | Self::Check => Impact::Ensures,
        }
    }
}

/// Runs until the context's shutdown.
pub async fn run(
    context: &Context,
    clusters: Clusters,
    credentials: Arc<Credentials>,
    domains: Cache<VSphereFailureDomain>,
    own: Cache<VSphereDeploymentZone>,
) -> Result<(), Error> {
    domains.ready().await?;
    let (of_domain, of_cluster) = (own.clone(), own.clone());
    let references = |found: Vec<Arc<VSphereDeploymentZone>>| -> Vec<ObjectRef<VSphereDeploymentZone>> {
        found.iter().map(|zone| ObjectRef::from_obj(zone.as_ref())).collect()
    };
    let reconciler = Reconciler::cluster_wide(context, own)
        .watches(&domains, move |domain: &VSphereFailureDomain| {
            let name = domain.name_any();
            references(of_domain.select(None, |zone| zone.spec.failure_domain.as_ref() == Some(&name)))
        })
        .watches(&clusters.infrastructure, move |cluster: &VSphereCluster| {
            let waits = |zone: &VSphereDeploymentZone| zone.status.as_ref().and_then(|s| s.ready) != Some(true);
            references(of_cluster.select(None, |zone| waits(zone) && same_vcenter(zone, cluster)))
        });
    let controller = Controller {
        context: context.clone(),
        clusters,
        credentials,
        domains,
    };
    reconciler.run(Arc::new(controller)).await;
    Ok(())
}

impl Reconcile for Controller {
    type Object = VSphereDeploymentZone;
    type State = ();
    type Observed = Observed;
    type Step = Step;
    type Error = Error;

    const NAME: &'static str = "vspheredeploymentzone";
    const COMPONENT: &'static str = "vspheredeploymentzone-controller";

    async fn observe(&self, scope: &mut Scope<VSphereDeploymentZone>, _: &mut ()) -> Result<Option<Observed>, Error> {
        if scope.is_deleting() {
            return Ok(Some(Observed::Deleting));
        }
        let present = Observed::Present { checked: None };
        Ok((!self.is_foreign(&scope.object)).then_some(present))
    }

    fn plan(observed: &Observed, _: Timestamp) -> Plan<Step> {
        Plan::step(match observed {
            Observed::Deleting => Step::Release,
            Observed::Present { .. } => Step::Check,
        })
    }

    async fn apply(
        &self,
        step: Step,
        observed: &mut Observed,
        scope: &mut Scope<VSphereDeploymentZone>,
        _: &mut (),
    ) -> Result<Outcome, Error> {
        match step {
            Step::Release => {
                scope.remove_finalizer(names::OLD_ZONE_FINALIZER).await?;
                Ok(Outcome::Done)
            }
            Step::Check => {
                let fault = self.check(&scope.object).await?;
                let wait = match &fault {
                    None => self.context.resync,
                    Some(fault) => recheck(failing_since(&scope.object, fault.condition, scope.now()), scope.now()),
                };
                *observed = Observed::Present { checked: Some(fault) };
                Ok(Outcome::Wait(Some(wait)))
            }
        }
    }

    fn status(
        zone: &VSphereDeploymentZone,
        observed: Option<&Observed>,
        _: Result<(), &Error>,
        now: Timestamp,
    ) -> Report<VSphereDeploymentZone> {
        let Some(Observed::Present { checked: Some(fault) }) = observed else {
            return Report::nothing();
        };
        let mut after = zone.clone();
        let status = after.status.get_or_insert_default();
        for type_ in CHECKED {
            match fault.as_ref().filter(|fault| fault.condition == type_) {
                Some(fault) => {
                    let list = &mut status.conditions;
                    conditions::mark_false(list, type_, fault.severity, fault.reason, &fault.text, now);
                    break;
                }
                None => conditions::mark_true(&mut status.conditions, type_, now),
            };
        }
        // A zone with a warning can be used.
        status.ready = Some(fault.as_ref().is_none_or(|fault| fault.severity != Severity::Error));
        conditions::summarize(&mut status.conditions, &CHECKED, now);
        status.v1beta2 = names::v1beta2(&status.conditions);
        Report::of(after)
    }
}

impl Controller {
    /// Returns the first thing that is wrong with a zone.
    async fn check(&self, own: &VSphereDeploymentZone) -> Result<Option<Fault>, Error> {
        match self.compare(own).await {
            Err(error) if error.is_reported() => Ok(Some(Fault {
                condition: names::VCENTER_AVAILABLE,
                reason: names::VCENTER_UNREACHABLE,
                text: error.to_string(),
                severity: Severity::Error,
            })),
            result => result,
        }
    }

    async fn compare(&self, own: &VSphereDeploymentZone) -> Result<Option<Fault>, Error> {
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

    /// Whether a zone is left to another instance. Zones belong to no namespace; an instance that works in one namespace only
    /// leaves zones that none of its clusters can use to others.
    fn is_foreign(&self, own: &VSphereDeploymentZone) -> bool {
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
        None => error.is_reported(),
    }
}

/// Returns since when a condition of a zone is False.
fn failing_since(zone: &VSphereDeploymentZone, type_: &str, now: Timestamp) -> Timestamp {
    let conditions = zone.status.as_ref().map(|status| status.conditions.as_slice());
    let conditions = conditions.filter(|conditions| conditions::is_false(conditions, type_));
    conditions
        .and_then(|conditions| conditions::since(conditions, type_))
        .unwrap_or(now)
}

/// Returns when to check again what has been wrong since then.
fn recheck(since: Timestamp, now: Timestamp) -> Duration {
    let known = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    known.clamp(RECHECK.0, RECHECK.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_object_is_looked_for_less_and_less_often() {
        let now = Timestamp::constant(1_000_000, 0);
        let after = |seconds: i64| recheck(now - jiff::SignedDuration::from_secs(seconds), now).as_secs();
        assert_eq!([-3, 0, 5, 10, 40, 90].map(after), [5, 5, 5, 10, 40, 60]);
    }
}
