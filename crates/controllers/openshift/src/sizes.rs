//! Compares specs with VM sizes: one set of rules for the controller, admission and `capstan check --azure`.
//!
//! Invariant: Azure judges what the catalogue does not mention. Admission refuses nothing by the catalogue, which may be
//! older than a size, and waits no longer than [`WAIT`] for it.

use std::sync::Arc;
use std::time::Duration;

use capstan_api::openshift::AzureMachineProviderSpec;
use capstan_azure::{Ability, Client, Clients, Size};
use capstan_core::disks::azure::{ultra_enabled, ultra_unsupported};
use capstan_core::validate::openshift::{has_premium_v2, too_many_disks};
use capstan_core::{Class, Classified, Clock, Memo};

use crate::account::{self, Accounts};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::{Api, PostParams};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

/// Users wait for admission: a catalogue that takes longer than this to read is there for the next request.
const WAIT: Duration = Duration::from_secs(2);

/// The abilities of a size, and the reasons why it does not fit the spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// `None` where the catalogue is empty: Azure itself will judge.
    pub size: Option<Size>,
    pub refusals: Vec<String>,
}

/// Azure takes `West Europe` for `westeurope`.
pub fn region(location: &str) -> String {
    location.replace(' ', "").to_lowercase()
}

/// Whether the account may not read the catalogue. It may still create machines: Azure checks the size itself.
pub fn is_unreadable(error: &capstan_azure::Error) -> bool {
    error.class() == Class::Terminal || error.arm().is_some_and(|arm| arm.status == 403)
}

/// Compares a spec with the catalogue of its machine's region.
pub async fn look_up(
    client: &Client,
    spec: &AzureMachineProviderSpec,
    location: &str,
) -> Result<Verdict, capstan_azure::Error> {
    let region = region(location);
    if client.catalogue(&region).await?.is_empty() {
        return Ok(Verdict::default());
    }
    let size = client
        .size(&region, spec.vm_size.as_deref().unwrap_or_default())
        .await?;
    let refusals = refusals(spec, location, size.as_ref());
    Ok(Verdict { size, refusals })
}

/// Returns why the size does not fit the spec in the machine's region. `None`: Azure does not have the size there.
pub fn refusals(spec: &AzureMachineProviderSpec, location: &str, size: Option<&Size>) -> Vec<String> {
    let wanted = spec.vm_size.as_deref().unwrap_or_default();
    let zone = spec.zone.as_deref().filter(|zone| !zone.is_empty());
    let Some(size) = size else {
        return vec![format!(
            "vm size {wanted} is not available in location {location}. select a different vm size"
        )];
    };
    if let Some(reason) = size.restrictions.first() {
        return vec![format!(
            "vm size {wanted} cannot be used in location {location}: {reason}"
        )];
    }
    let mut refusals = Vec::new();
    if let Some(zone) = zone {
        let missing = !size.zones.is_empty() && !size.zones.contains(zone);
        if missing || size.restricted_zones.contains(zone) {
            refusals.push(format!(
                "vm size {wanted} is not available in zone {zone} of location {location}. select a different vm size or zone"
            ));
        }
    }
    if ultra_enabled(spec) == Some(true) && !size.supports_ultra(zone) {
        refusals.push(ultra_unsupported(wanted, location));
    }
    if zone.is_none() && !size.zones.is_empty() && has_premium_v2(spec) {
        refusals.push(format!(
            "vm size {wanted} takes PremiumV2_LRS disks in location {location} only in a zone. set providerSpec.zone or select \
             another storageAccountType"
        ));
    }
    let most = size.max_data_disks.and_then(|most| usize::try_from(most).ok());
    refusals.extend(most.and_then(|most| too_many_disks(wanted, most, spec.data_disks.len())));
    let placement = spec
        .os_disk
        .disk_settings
        .placement
        .as_ref()
        .map(|place| place.as_str());
    let places = &size.ephemeral_placements;
    if let Some(placement) =
        placement.filter(|place| !place.is_empty() && !places.is_empty() && !places.contains(*place))
    {
        let known: Vec<&str> = places.iter().map(String::as_str).collect();
        refusals.push(format!(
            "vm size {wanted} cannot keep an ephemeral os disk on {placement} in location {location}. select a different vm \
             size or one of {} (osDisk.diskSettings.placement)",
            known.join(", ")
        ));
    }
    for (ability, what, instead) in wishes(spec) {
        if size.lacks.contains(&ability) {
            refusals.push(format!(
                "vm size {wanted} does not support {what} in location {location}. select a different vm size or {instead}"
            ));
        }
    }
    refusals
}

/// Returns the abilities that a spec asks of its size, with their names and with what to do without them.
fn wishes(spec: &AzureMachineProviderSpec) -> Vec<(Ability, &'static str, &'static str)> {
    let data = spec
        .data_disks
        .iter()
        .map(|disk| &disk.managed_disk.storage_account_type);
    let mut kinds = data.chain([&spec.os_disk.managed_disk.storage_account_type]).flatten();
    let premium = kinds.any(|kind| kind.as_str().starts_with("Premium"));
    let local = spec.os_disk.disk_settings.ephemeral_storage_location.as_ref();
    let at_host = spec
        .security_profile
        .as_ref()
        .and_then(|profile| profile.encryption_at_host);
    let wishes = [
        (
            premium,
            Ability::PremiumDisks,
            "premium disks",
            "standard disks (storageAccountType)",
        ),
        (
            local.is_some_and(|place| !place.as_str().is_empty()),
            Ability::EphemeralOsDisk,
            "ephemeral os disks",
            "leave out osDisk.diskSettings",
        ),
        (
            spec.accelerated_networking,
            Ability::AcceleratedNetworking,
            "accelerated networking",
            "leave out acceleratedNetworking",
        ),
        (
            at_host == Some(true),
            Ability::EncryptionAtHost,
            "encryption at host",
            "leave out securityProfile.encryptionAtHost",
        ),
    ];
    let wished = wishes.into_iter().filter(|(wished, ..)| *wished);
    wished
        .map(|(_, ability, what, instead)| (ability, what, instead))
        .collect()
}

/// How long admission believes an answer about what a user may read. A set makes many machines within that time.
const ACCESS_KNOWN: Duration = Duration::from_secs(60);

/// Bytes of what a review says about its user at most. A user has a name and some dozens of groups.
const USER_BYTES: usize = 16 << 10;

/// Look-ups at a time; more requests get no answer. They outlive their requests, and anybody may send some.
const LOOK_UPS: usize = 16;

/// The catalogue as admission asks it, with the accounts that machines name. Clones share what is known.
///
/// Invariant: no secret is used for a request of somebody who may not read it, and requests cost bounded memory.
#[derive(Clone)]
pub struct Sizes(Arc<Shared>);

struct Shared {
    kube: kube::Client,
    accounts: Accounts,
    /// Whether a user may read a secret, by the digest of both: their texts may be long.
    access: Memo<[u8; 32], bool>,
    look_ups: Arc<Semaphore>,
}

impl Sizes {
    pub fn new(kube: kube::Client, clients: Clients, clock: Clock) -> Self {
        Self(Arc::new(Shared {
            accounts: Accounts::new(kube.clone(), clients, clock),
            access: Memo::new(clock, 1000),
            look_ups: Arc::new(Semaphore::new(LOOK_UPS)),
            kube,
        }))
    }

    /// Returns what the controller would refuse a machine of this spec in `namespace` for. Nothing where that cannot be
    /// known in time.
    pub async fn warnings(&self, user: &UserInfo, namespace: &str, spec: &AzureMachineProviderSpec) -> Vec<String> {
        let who = serde_json::to_string(user).unwrap_or_default();
        if who.len() > USER_BYTES {
            return Vec::new();
        }
        let (shared, user, namespace, spec) = (self.0.clone(), user.clone(), namespace.to_owned(), spec.clone());
        let Ok(place) = shared.look_ups.clone().try_acquire_owned() else {
            return Vec::new();
        };
        // Its own task, so that a reading that comes too late for this user is there for the next.
        let asked = tokio::spawn(async move {
            let warnings = shared.warnings((&user, &who), &namespace, &spec).await;
            drop(place);
            warnings
        });
        match tokio::time::timeout(WAIT, asked).await {
            Ok(Ok(warnings)) => warnings,
            _ => Vec::new(),
        }
    }
}

impl Shared {
    async fn warnings(&self, user: (&UserInfo, &str), namespace: &str, spec: &AzureMachineProviderSpec) -> Vec<String> {
        let key = account::Key::of(spec.credentials_secret.as_ref(), namespace);
        if !self.may_read(user, &key).await {
            return vec![format!(
                "providerSpec.vmSize: not checked against Azure's sizes, because you may not read secret {}/{}",
                key.namespace, key.name
            )];
        }
        let Ok(account) = self.accounts.get(spec.credentials_secret.as_ref(), namespace).await else {
            return Vec::new();
        };
        let location = spec.location.clone().filter(|location| !location.is_empty());
        let location = location.unwrap_or_else(|| account.place.location.clone());
        let verdict = look_up(&account.client.at(&location), spec, &location).await;
        verdict.map(|verdict| verdict.refusals).unwrap_or_default()
    }

    /// Whether the API server would let the user read the secret. Without its answer: no.
    async fn may_read(&self, (user, who): (&UserInfo, &str), key: &account::Key) -> bool {
        let ask = async {
            let review = SubjectAccessReview {
                spec: SubjectAccessReviewSpec {
                    user: user.username.clone(),
                    uid: user.uid.clone(),
                    groups: user.groups.clone(),
                    extra: user.extra.clone(),
                    resource_attributes: Some(ResourceAttributes {
                        verb: Some("get".into()),
                        version: Some("v1".into()),
                        resource: Some("secrets".into()),
                        namespace: Some(key.namespace.clone()),
                        name: Some(key.name.clone()),
                        ..ResourceAttributes::default()
                    }),
                    ..SubjectAccessReviewSpec::default()
                },
                ..SubjectAccessReview::default()
            };
            let api: Api<SubjectAccessReview> = Api::all(self.kube.clone());
            let answer = api.create(&PostParams::default(), &review).await?;
            Ok::<_, kube::Error>(answer.status.is_some_and(|status| status.allowed))
        };
        let parts = [who, &key.namespace, &key.name];
        let lengths = parts.map(|part| part.len().to_string()).join(" ");
        let digest = Sha256::digest(lengths + &parts.concat()).into();
        let answer = self.access.get(&digest, ACCESS_KNOWN, ask).await;
        answer.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot review the user's access to secrets; sizes are not checked");
            false
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{good, ultra};
    use rstest::rstest;
    use serde_json::json;

    fn d4s() -> Size {
        Size {
            name: "Standard_D4s_v3".into(),
            zones: ["1".to_owned(), "2".to_owned()].into(),
            ultra_zones: ["1".to_owned()].into(),
            max_data_disks: Some(2),
            ..Size::default()
        }
    }

    #[rstest]
    #[case::fits(Some("1"), 2, None)]
    #[case::zone_without_ultra(
        Some("2"),
        1,
        Some("does not support ultra disks in location eastus. select a different vm size or disable ultra disks")
    )]
    #[case::no_zone(None, 1, Some("does not support ultra disks in location eastus"))]
    #[case::no_ultra_needed(None, 0, None)]
    #[case::zone_without_size(Some("3"), 0, Some("is not available in zone 3"))]
    #[case::too_many(Some("1"), 3, Some("takes 2 data disks, the spec has 3"))]
    fn the_size_must_carry_what_the_spec_asks(
        #[case] zone: Option<&str>,
        #[case] disks: i32,
        #[case] refusal: Option<&str>,
    ) {
        let mut wanted = good();
        wanted.zone = zone.map(ToOwned::to_owned);
        wanted.data_disks = (0..disks).map(ultra).collect();
        let found = refusals(&wanted, "eastus", Some(&d4s()));
        match refusal {
            None => assert_eq!(found, Vec::<String>::new()),
            Some(text) => assert!(found[0].contains(text), "{found:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_anybody_cost_a_bounded_number_of_look_ups() {
        let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = asked.clone();
        let silent = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
        });
        let cloud = capstan_azure::Cloud::custom("sim", "https://localhost:1", "https://localhost:1").unwrap();
        let clients = Clients::new(capstan_azure::Settings::new(cloud)).unwrap();
        let sizes = Sizes::new(kube::Client::new(silent, "default"), clients, Clock::system());
        let users = (0..10 * LOOK_UPS).map(|n| UserInfo {
            username: Some(format!("user-{n}")),
            ..UserInfo::default()
        });
        let many = UserInfo {
            groups: Some(vec!["x".repeat(USER_BYTES)]),
            ..UserInfo::default()
        };
        assert!(sizes.warnings(&many, "ns", &good()).await.is_empty());
        assert_eq!(
            asked.load(std::sync::atomic::Ordering::SeqCst),
            0,
            "nobody has so many groups"
        );
        for user in users {
            let warnings = sizes.warnings(&user, "ns", &good()).await;
            assert_eq!(warnings, Vec::<String>::new());
        }
        assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), LOOK_UPS);
    }

    #[test]
    fn regions_are_known_by_either_of_their_names() {
        assert_eq!(
            (region("West Europe"), region("WestEurope")),
            (region("westeurope"), region("westeurope"))
        );
    }

    #[test]
    fn what_the_catalogue_denies_is_refused_and_what_it_leaves_open_is_not() {
        let mut wanted = good();
        wanted.accelerated_networking = true;
        wanted.os_disk.disk_settings = serde_json::from_value(json!({"ephemeralStorageLocation": "Local"})).unwrap();
        wanted.security_profile = serde_json::from_value(json!({"encryptionAtHost": true})).unwrap();
        assert!(refusals(&wanted, "eastus", Some(&d4s())).is_empty());
        let poor = Size {
            lacks: [
                Ability::PremiumDisks,
                Ability::EphemeralOsDisk,
                Ability::AcceleratedNetworking,
                Ability::EncryptionAtHost,
            ]
            .into(),
            ..d4s()
        };
        let found = refusals(&wanted, "eastus", Some(&poor));
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(
            found[2],
            "vm size Standard_D4s_v3 does not support accelerated networking in location eastus. select a different vm \
             size or leave out acceleratedNetworking"
        );
        let plain = AzureMachineProviderSpec {
            vm_size: Some("Standard_D4s_v3".into()),
            ..AzureMachineProviderSpec::default()
        };
        assert!(refusals(&plain, "eastus", Some(&poor)).is_empty());
    }

    #[test]
    fn a_size_that_azure_does_not_have_is_refused() {
        let found = refusals(&good(), "eastus", None);
        assert!(found[0].contains("Standard_D4s_v3 is not available in location eastus"));
    }
}
