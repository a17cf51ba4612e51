//! Scale sets of a simulated Azure: what a change names, what a lost answer means, and what is asked once only.

#![allow(clippy::unwrap_used, clippy::panic)] // A test may.

use std::time::Duration;

use capstan_api::azure::{AzureCluster, AzureMachinePool};
use capstan_api::capi::MachinePool;
use capstan_azure::{Clients, Credential, Secret, Settings};
use capstan_core::drain::{Assessment, Drained, NodeState, Request, assess};
use capstan_sim::azure::{Action, Azure, Config, Fault, Handle, Network};
use serde_json::{Value, json};

use super::*;
use crate::model::{self, HASH_TAG, Model};

const GROUP: &str = "capstan";
const RESYNC: Duration = Duration::from_secs(600);

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter()
                .for_each(|(key, value)| merge(into.entry(key.clone()).or_insert(Value::Null), value));
        }
        (into, from) => *into = from.clone(),
    }
}

/// The proof for an instance that has no node.
fn drained(id: &str) -> Drained {
    match assess(&Request::new(id, NodeState::Missing), jiff::Timestamp::UNIX_EPOCH) {
        Assessment::Drained(proof) => proof,
        other => panic!("{other:?}"),
    }
}

struct World {
    sim: Handle,
    state: State,
}

impl World {
    async fn start() -> Self {
        let sim = Azure::start(Config {
            networks: vec![Network::default()],
            ..Config::instant()
        })
        .await
        .unwrap();
        let state = State::default();
        Self { sim, state }
    }

    fn cloud(&mut self) -> Cloud<'_> {
        let sim = &self.sim;
        let settings = Settings {
            ca_file: Some(sim.ca_file.clone()),
            ..Settings::new(capstan_azure::Cloud::custom("sim", &sim.url, &sim.url).unwrap())
        };
        let credential = Credential::Secret {
            tenant: sim.tenant.clone(),
            client_id: sim.client_id.clone(),
            secret: Secret::new(sim.client_secret.clone()),
        };
        let clients = Clients::new(settings).unwrap();
        Cloud {
            client: clients.client(&credential, &sim.subscription).at("eastus"),
            clock: Clock::system(),
            group: GROUP.to_owned(),
            name: "np".to_owned(),
            claim: Claim {
                cluster: Some("c".to_owned()),
                pool: "default/np".to_owned(),
            },
            state: &mut self.state,
        }
    }

    fn model(&self, change: Value) -> Model {
        let mut spec = json!({
            "location": "eastus",
            "template": {
                "vmSize": "Standard_D4s_v3",
                "osDisk": { "osType": "Linux", "diskSizeGB": 30 },
                "sshPublicKey": "c3NoLXJzYSBBQUFB"
            }
        });
        merge(&mut spec, &change);
        let read = |value: Value| serde_json::from_value::<AzureMachinePool>(value).unwrap();
        let pool = read(json!({ "metadata": { "name": "np", "namespace": "default" }, "spec": spec }));
        let machine_pool: MachinePool = serde_json::from_value(json!({
            "spec": { "clusterName": "c", "template": { "spec": { "clusterName": "c", "version": "v1.35.0" } } }
        }))
        .unwrap();
        let azure_cluster: AzureCluster = serde_json::from_value(json!({
            "metadata": { "name": "c" },
            "spec": {
                "location": "eastus", "resourceGroup": GROUP,
                "networkSpec": {
                    "vnet": { "name": "capstan-vnet" }, "subnets": [{ "name": "node-subnet", "role": "node" }]
                }
            }
        }))
        .unwrap();
        model::build(&model::Input {
            pool: &pool,
            machine_pool: &machine_pool,
            cluster_name: "c",
            azure_cluster: &azure_cluster,
            subscription: &self.sim.subscription,
            bootstrap: b"#cloud-config",
            accelerated_networking: false,
        })
        .unwrap()
    }

    fn id(&self) -> String {
        let subscription = &self.sim.subscription;
        let group = format!("/subscriptions/{subscription}/resourceGroups/{GROUP}");
        format!("{group}/providers/Microsoft.Compute/virtualMachineScaleSets/np")
    }

    fn set(&self) -> Value {
        self.sim.get(&self.id()).unwrap()
    }

    fn capacity(&self) -> Option<usize> {
        Some(self.state.snapshot.as_ref()?.set.as_ref()?.capacity)
    }

    /// Looks until nothing is under way.
    async fn settle(&mut self) {
        for _ in 0..200 {
            self.cloud().refresh(RESYNC).await.unwrap();
            if self.state.operations.is_empty() && !self.state.instances_stale && !self.state.set_stale {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("still {:?}", self.state.operations);
    }
}

fn plain() -> Value {
    json!({ "template": { "image": { "id": "/image/1" } } })
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_taken_out_of_the_template_is_taken_out_of_the_scale_set() {
    let mut world = World::start().await;
    let id = |name: &str| {
        format!("/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/{name}")
    };
    let rich = world.model(json!({
        "identity": "UserAssigned",
        "userAssignedIdentities": [{ "providerID": id("a") }, { "providerID": id("b") }],
        "template": {
            "image": { "id": "/image/1" },
            "osDisk": { "cachingType": "ReadOnly" },
            "dataDisks": [{ "nameSuffix": "a", "diskSizeGB": 64, "lun": 0 }],
            "vmExtensions": [{ "name": "e", "publisher": "p", "version": "1.0" }],
            "spotVMOptions": { "maxPrice": "0.25", "evictionPolicy": "Delete" },
            "terminateNotificationTimeout": 7,
            "securityProfile": { "encryptionAtHost": true },
            "additionalCapabilities": { "ultraSSDEnabled": false },
            "diagnostics": { "boot": { "storageAccountType": "Managed" } }
        }
    }));
    world.cloud().create(&rich, 1).await.unwrap();
    world.settle().await;

    // One of two identities less, first.
    let fewer = world.model(json!({
        "identity": "UserAssigned", "userAssignedIdentities": [{ "providerID": id("b") }],
        "template": { "image": { "id": "/image/1" }, "spotVMOptions": {} }
    }));
    world.cloud().replace(&fewer, 1, &BTreeSet::new()).await.unwrap();
    world.settle().await;
    let ids = world.set()["identity"]["userAssignedIdentities"].clone();
    let left: Vec<&String> = ids.as_object().unwrap().keys().collect();
    assert_eq!(left, [&id("b")]);

    let market = json!({ "publisher": "p", "offer": "o", "sku": "s", "version": "1", "thirdPartyImage": false });
    let bare = world.model(json!({ "template": { "image": { "marketplace": market } } }));
    world.cloud().replace(&bare, 1, &BTreeSet::new()).await.unwrap();
    world.settle().await;
    let set = world.set();
    let profile = &set["properties"]["virtualMachineProfile"];
    let storage = &profile["storageProfile"];
    assert_eq!(storage["imageReference"]["id"], Value::Null, "{storage}");
    assert_eq!(storage["imageReference"]["offer"], "o");
    assert_eq!(storage["dataDisks"].as_array().map_or(0, Vec::len), 0, "{storage}");
    assert_ne!(storage["osDisk"]["caching"], "ReadOnly");
    assert_eq!(
        profile["extensionProfile"]["extensions"].as_array().map_or(0, Vec::len),
        0
    );
    assert_ne!(profile["securityProfile"]["encryptionAtHost"], true);
    assert_eq!(
        profile["diagnosticsProfile"]["bootDiagnostics"]["enabled"], true,
        "the default"
    );
    let notification = &profile["scheduledEventsProfile"]["terminateNotificationProfile"];
    assert_ne!(notification["enable"], true);
    assert_ne!(profile["priority"], "Spot");
    assert_eq!(
        (&profile["evictionPolicy"], &profile["billingProfile"]),
        (&Value::Null, &Value::Null)
    );
    assert!(
        set["identity"].is_null() || set["identity"]["type"] == "None",
        "{}",
        set["identity"]
    );

    // And back to an image of another kind.
    let back = world.model(plain());
    world.cloud().replace(&back, 1, &BTreeSet::new()).await.unwrap();
    let image = world.set()["properties"]["virtualMachineProfile"]["storageProfile"]["imageReference"].clone();
    assert_eq!((&image["id"], &image["offer"]), (&json!("/image/1"), &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_model_leaves_the_tags_of_others_and_takes_ours_away() {
    let mut world = World::start().await;
    let tagged = |tags: Value| {
        let mut spec = plain();
        merge(&mut spec, &json!({ "additionalTags": tags }));
        spec
    };
    let model = world.model(tagged(json!({ "team": "a", "cost": "1" })));
    world.cloud().create(&model, 0).await.unwrap();
    let mut tags = world.set()["tags"].clone();
    tags["policy"] = json!("theirs");
    let body = json!({ "tags": tags });
    assert!(
        world
            .sim
            .direct(http::Method::PATCH, &world.id(), body)
            .status
            .is_success()
    );
    world.state.set_stale = true;
    world.settle().await;

    let model = world.model(tagged(json!({ "team": "b" })));
    let applied = BTreeSet::from(["team".to_owned(), "cost".to_owned()]);
    world.cloud().replace(&model, 0, &applied).await.unwrap();
    let tags = world.set()["tags"].clone();
    assert_eq!((&tags["team"], &tags["policy"]), (&json!("b"), &json!("theirs")));
    assert_eq!(tags["cost"], Value::Null);
    assert_eq!(tags[HASH_TAG], json!(model.hash));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_of_ours_is_not_somebody_elses_doing() {
    let mut world = World::start().await;
    let model = world.model(plain());
    world.cloud().create(&model, 2).await.unwrap();
    world.settle().await;
    world.state.external = Some(2);

    let lost = |method: &str| Fault::new(Action::Drop).method(method).times(1);
    world.sim.fault(lost("PATCH")).unwrap();
    world.cloud().scale(&model, 3, false).await.unwrap_err();
    world.settle().await;
    assert_eq!(
        (world.state.external, world.capacity()),
        (Some(2), Some(3)),
        "a surge of ours"
    );

    world.sim.fault(lost("POST").path("/delete")).unwrap();
    let one = world.state.snapshot.as_ref().unwrap().instances[0].id.clone();
    world.cloud().delete(vec![drained(&one)]).await.unwrap_err();
    world.settle().await;
    assert_eq!(
        (world.state.external, world.capacity()),
        (Some(2), Some(2)),
        "a delete of ours"
    );

    // What somebody else does afterwards is still seen.
    let body = json!({ "sku": { "capacity": 5 } });
    assert!(
        world
            .sim
            .direct(http::Method::PATCH, &world.id(), body)
            .status
            .is_success()
    );
    world.state.set_stale = true;
    world.settle().await;
    assert_eq!(world.state.external, Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_azure_refuses_for_good_is_not_asked_for_again_until_it_differs() {
    let mut world = World::start().await;
    world.sim.fault(Fault::answer(400).method("PUT").times(1)).unwrap();
    let model = world.model(plain());
    for _ in 0..3 {
        let refused = world.cloud().create(&model, 1).await.unwrap_err();
        assert!(refused.to_string().contains("400"), "{refused}");
        assert_eq!(refused.class(), Class::Terminal);
    }
    let puts = |sim: &Handle| sim.arm_requests().iter().filter(|call| call.method == "PUT").count();
    assert_eq!(puts(&world.sim), 1);
    let other = world.model(json!({ "template": { "image": { "id": "/image/2" } } }));
    world.cloud().create(&other, 1).await.unwrap();
    assert_eq!(puts(&world.sim), 2);
    assert!(world.state.refused.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_teardown_deletes_the_scale_set_whatever_is_under_way() {
    let mut world = World::start().await;
    let model = world.model(plain());
    world.cloud().create(&model, 1).await.unwrap();
    for _ in 0..200 {
        world.cloud().refresh_set().await.unwrap();
        if world.state.snapshot.as_ref().unwrap().set.is_none() {
            assert_eq!(world.sim.get(&world.id()), None);
            return;
        }
        world.cloud().remove().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the scale set is still there");
}
