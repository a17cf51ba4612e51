//! Storage policies, from the policy service that stands beside vim25 and shares its session.

use crate::error::{Error, Result};
use crate::soap::{Call, envelope};
use crate::vcenter::Vcenter;
use crate::xml::{Element, Writer, escape};
use capstan_core::vm::{MoRef, Policies};

const NAMESPACE: &str = "urn:pbm";

impl Vcenter {
    /// The id of a storage policy, by name (or by its own id).
    pub async fn storage_policy(&self, name: &str) -> Result<String> {
        let found = self
            .0
            .cache
            .get(format!("policy:{name}"), self.find_policy(name))
            .await?;
        Ok(String::clone(&found))
    }

    async fn find_policy(&self, name: &str) -> Result<String> {
        let manager = self.profile_manager().await?;
        let mut body = Writer::new();
        body.nest("resourceType", |w| {
            w.text("resourceType", "STORAGE");
        });
        body.text("profileCategory", "REQUIREMENT");
        let answer = self
            .pbm(&Call::read("PbmQueryProfile", &manager, body.finish()))
            .await?;
        let ids: Vec<String> = answer
            .all("returnval")
            .filter_map(|id| id.string_at("uniqueId"))
            .collect();
        if ids.iter().any(|id| id == name) {
            return Ok(name.to_owned());
        }
        let mut body = Writer::new();
        for id in &ids {
            body.nest("profileIds", |w| {
                w.text("uniqueId", id);
            });
        }
        let answer = self
            .pbm(&Call::read("PbmRetrieveContent", &manager, body.finish()))
            .await?;
        answer
            .all("returnval")
            .find(|profile| profile.text_at("name") == Some(name))
            .and_then(|profile| profile.string_at("profileId.uniqueId"))
            .ok_or_else(|| Error::NotFound {
                kind: "storage policy",
                path: name.to_owned(),
            })
    }

    /// Returns the datastores of a list that satisfy a policy, in the order of the list. Remembered for a short time.
    pub async fn compatible_datastores(&self, policy: &str, datastores: &[MoRef]) -> Result<Vec<MoRef>> {
        let ids: Vec<&str> = datastores.iter().map(MoRef::value).collect();
        let key = format!("compatible:{policy}:{}", ids.join(","));
        let found = self
            .0
            .cache
            .get(key, self.check_compatibility(policy, datastores))
            .await?;
        Ok(Vec::clone(&found))
    }

    async fn check_compatibility(&self, policy: &str, datastores: &[MoRef]) -> Result<Vec<MoRef>> {
        let solver = self.pbm_reference("placementSolver").await?;
        let mut body = Writer::new();
        for datastore in datastores {
            body.nest("hubsToSearch", |w| {
                w.text("hubType", datastore.kind()).text("hubId", datastore.value());
            });
        }
        body.nest("profile", |w| {
            w.text("uniqueId", policy);
        });
        let answer = self
            .pbm(&Call::read("PbmCheckCompatibility", &solver, body.finish()))
            .await?;
        let fits = |result: &&Element| result.child("error").is_none();
        let fitting: Vec<&str> = answer
            .all("returnval")
            .filter(fits)
            .filter_map(|r| r.text_at("hub.hubId"))
            .collect();
        Ok(datastores
            .iter()
            .filter(|datastore| fitting.contains(&datastore.value()))
            .cloned()
            .collect())
    }

    /// Returns the storage policies of a VM and of its disks with these keys.
    pub async fn policies_of(&self, vm: &MoRef, disks: &[i32]) -> Result<Policies> {
        let manager = self.profile_manager().await?;
        let key_of = |disk: &i32| format!("{}:{disk}", vm.value());
        let mut body = Writer::new();
        body.nest("entities", |w| {
            w.text("objectType", "virtualMachine").text("key", vm.value());
        });
        for disk in disks {
            body.nest("entities", |w| {
                w.text("objectType", "virtualDiskId").text("key", key_of(disk));
            });
        }
        let call = Call::read("PbmQueryAssociatedProfiles", &manager, body.finish());
        let answer = self.pbm(&call).await?;
        let policy_of = |key: &str| {
            let mut results = answer.all("returnval");
            let found = results.find(|result| result.text_at("object.key") == Some(key))?;
            found.string_at("profileId.uniqueId")
        };
        Ok(Policies {
            home: policy_of(vm.value()),
            disks: disks
                .iter()
                .filter_map(|disk| Some((*disk, policy_of(&key_of(disk))?)))
                .collect(),
        })
    }

    async fn profile_manager(&self) -> Result<MoRef> {
        let manager = self
            .0
            .pbm
            .get_or_try_init(|| self.pbm_reference("profileManager"))
            .await?;
        Ok(manager.clone())
    }

    async fn pbm_reference(&self, name: &'static str) -> Result<MoRef> {
        let service = MoRef::new("PbmServiceInstance", "ServiceInstance");
        let answer = self
            .pbm(&Call::read("PbmRetrieveServiceContent", &service, String::new()))
            .await?;
        let missing = || Error::Incomplete {
            method: "PbmRetrieveServiceContent".to_owned(),
            what: name,
        };
        answer.moref_at(&format!("returnval.{name}")).ok_or_else(missing)
    }

    /// A call to the policy service; a session that vCenter has forgotten is renewed once.
    async fn pbm(&self, call: &Call<'_>) -> Result<Element> {
        let (generation, _) = self.session();
        match self.pbm_once(call).await {
            Err(error) if error.is_not_authenticated() => {
                self.renew(generation).await?;
                self.pbm_once(call).await
            }
            result => result,
        }
    }

    async fn pbm_once(&self, call: &Call<'_>) -> Result<Element> {
        let (_, cookie) = self.session();
        let key = cookie
            .as_deref()
            .and_then(|cookie| cookie.split_once('='))
            .map(|(_, key)| key.trim_matches('"'));
        let header = format!(
            "<soapenv:Header><vcSessionCookie>{}</vcSessionCookie></soapenv:Header>",
            escape(key.unwrap_or_default())
        );
        let request = self
            .0
            .http
            .post(format!("{}/pbm", self.0.base))
            .header("SOAPAction", "\"urn:pbm/2.0\"")
            .header("Content-Type", "text/xml; charset=utf-8")
            .timeout(call.timeout)
            .body(envelope(call, NAMESPACE, &header));
        self.through(
            call.method,
            &call.this.to_string(),
            call.write,
            self.soap(call, request),
        )
        .await
        .map(|(answer, _)| answer)
    }
}
