//! Carries out the steps of a VSphereDeploymentZone.

use capstan_api::vsphere::VSphereDeploymentZone;
use capstan_core::cluster::zone::ZoneStep;
use capstan_kube::runtime::{Outcome, Scope};
use capstan_vsphere::Vcenter;

use super::Controller;
use crate::conditions as names;
use crate::error::Error;

impl Controller {
    pub(super) async fn apply_step(
        &self,
        step: ZoneStep,
        scope: &mut Scope<VSphereDeploymentZone>,
    ) -> Result<Outcome, Error> {
        match step {
            ZoneStep::AddFinalizer => {
                scope.add_finalizer(names::ZONE_FINALIZER).await?;
            }
            ZoneStep::Release => {
                scope.remove_finalizer(names::ZONE_FINALIZER).await?;
            }
            ZoneStep::AttachTag {
                category,
                name,
                objects,
            } => {
                let vcenter = self.session(&scope.object).await?;
                let tag = ensure_tag(&vcenter, &category, &name).await?;
                for object in &objects {
                    vcenter.attach_tags(object, std::slice::from_ref(&tag)).await?;
                }
            }
        }
        Ok(Outcome::Done)
    }
}

/// Returns the tag with this name. Creates it, and its category, where they do not exist.
async fn ensure_tag(vcenter: &Vcenter, category: &str, name: &str) -> Result<String, Error> {
    let category_id = match vcenter.tag_category(category).await? {
        Some(id) => id,
        None => match vcenter.create_tag_category(category).await {
            Ok(id) => id,
            // Another zone of the same region may have been quicker.
            Err(error) => vcenter.tag_category(category).await?.ok_or(error)?,
        },
    };
    Ok(match vcenter.tag_in_category(&category_id, name).await? {
        Some(tag) => tag,
        None => match vcenter.create_tag(&category_id, name).await {
            Ok(tag) => tag,
            Err(error) => vcenter.tag_in_category(&category_id, name).await?.ok_or(error)?,
        },
    })
}
