//! Admission on a real API server, asked with kubectl.

mod operator;

use crate::support;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use capstan_api::openshift::Machine;
use capstan_kube::webhook as server;
use capstan_kube::{Context, Options};
use capstan_openshift::webhook;
use capstan_testkit::ControlPlane;
use k8s_openapi::api::admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration};
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

struct World {
    plane: ControlPlane,
    namespace: String,
    name: String,
    client: kube::Client,
    context: Context,
    dir: std::path::PathBuf,
    azure: Option<capstan_azure::Clients>,
}

impl World {
    async fn new() -> Result<Self> {
        let world = Self::unserved().await?;
        world.serve(&world.context);
        world.registered().await?;
        Ok(world)
    }

    async fn unserved() -> Result<Self> {
        let plane = ControlPlane::shared().await?;
        plane.install_crds().await?;
        let namespace = plane.namespace("webhook").await?;
        Self::within(plane, namespace).await
    }

    async fn within(plane: ControlPlane, namespace: String) -> Result<Self> {
        let client = plane.client().await?;
        let options = Options {
            namespace: Some(namespace.clone()),
            ..Options::default()
        };
        let context = Context::new(plane.config().await?, options)?;
        let name = format!("capstan-machine-api-{namespace}");
        let dir = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&dir)?;
        Ok(Self {
            plane,
            namespace,
            name,
            client,
            context,
            dir,
            azure: None,
        })
    }

    fn serve(&self, context: &Context) {
        tokio::spawn(webhook::run(context.clone(), self.server(), self.options()));
    }

    fn server(&self) -> server::Options {
        server::Options {
            secret_namespace: Some(self.namespace.clone()),
            ..server::Options::default()
        }
    }

    fn options(&self) -> webhook::Options {
        webhook::Options {
            cluster_id: "demo".into(),
            azure: self.azure.clone(),
            ..webhook::Options::default()
        }
    }

    /// A client of its own, as another copy of the program has.
    async fn another(&self) -> Result<Context> {
        let options = Options {
            namespace: Some(self.namespace.clone()),
            ..Options::default()
        };
        Ok(Context::new(self.plane.config().await?, options)?)
    }

    /// The API server takes a moment to notice a new configuration: a bad machine is refused once it has.
    async fn registered(&self) -> Result<()> {
        let began = std::time::Instant::now();
        while !self.refuses_a_bad_machine().await? {
            if began.elapsed() > support::PATIENCE {
                bail!("the webhook was never asked");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn refuses_a_bad_machine(&self) -> Result<bool> {
        let probe: Machine = serde_json::from_value(machine("probe", json!({"vmSize": 1})))?;
        match self.machines().create(&Default::default(), &probe).await {
            Err(error) if error.to_string().contains("denied the request") => Ok(true),
            Err(error) => Err(error.into()),
            Ok(_) => {
                // It may be born with a finalizer, and nobody is here to take that off.
                let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
                self.machines().patch("probe", &PatchParams::default(), &free).await?;
                self.machines().delete("probe", &DeleteParams::default()).await?;
                Ok(false)
            }
        }
    }

    /// The API server keeps connections for a moment: the object is accepted once they are gone.
    async fn accepted(&self, object: &Value) -> Result<()> {
        for _ in 0..1200 {
            if self.apply(object).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        bail!("refused although nobody serves the webhook")
    }

    async fn apply(&self, object: &Value) -> Result<String> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let file = self.dir.join(format!("{name}.json"));
        std::fs::write(&file, object.to_string())?;
        self.plane
            .kubectl(&["-n", &self.namespace, "apply", "-f", &file.display().to_string()])
            .await
    }

    /// Makes Machines with too many disks until one is warned about; returns its name and the warning. Admission waits
    /// only a moment for Azure, and on a busy machine the catalogue is there for a later request only.
    async fn warned_as(&self, user: &str, name: &str) -> Result<(String, String)> {
        let began = std::time::Instant::now();
        for number in 0.. {
            let name = format!("{name}-{number}");
            let file = self.dir.join(format!("{name}.json"));
            std::fs::write(&file, crowded(&name, &self.namespace).to_string())?;
            let file = file.display().to_string();
            let mut args = vec!["-n", &self.namespace, "create", "--warnings-as-errors", "-f", &file];
            if user != "admin" {
                args.extend(["--as", user]);
            }
            if let Err(warned) = self.plane.kubectl(&args).await {
                return Ok((name, warned.to_string()));
            }
            if began.elapsed() > support::PATIENCE {
                break;
            }
        }
        bail!("{user} gets no warning about {name}")
    }

    fn machines(&self) -> Api<Machine> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn end(self) -> Result<()> {
        self.context.shutdown.cancel();
        let params = DeleteParams::default();
        Api::<MutatingWebhookConfiguration>::all(self.client.clone())
            .delete(&self.name, &params)
            .await?;
        Api::<ValidatingWebhookConfiguration>::all(self.client.clone())
            .delete(&self.name, &params)
            .await?;
        std::fs::remove_dir_all(&self.dir)?;
        Ok(())
    }
}

fn machine(name: &str, value: Value) -> Value {
    json!({
        "apiVersion": "machine.openshift.io/v1beta1", "kind": "Machine", "metadata": {"name": name},
        "spec": {"providerSpec": {"value": value}},
    })
}

fn good() -> Value {
    json!({
        "kind": "AzureMachineProviderSpec", "location": "westeurope", "managedIdentity": "id",
        "image": {"resourceID": "/images/rhcos"},
        "osDisk": {"osType": "Linux", "diskSizeGB": 128, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        "dataDisks": [{"nameSuffix": "etcd", "diskSizeGB": 8, "lun": 0, "deletionPolicy": "Delete",
            "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_is_told_all_errors_at_once_and_good_machines_get_their_defaults() -> Result<()> {
    let world = World::new().await?;
    let mut value = good();
    value["dataDisks"][0]["diskSizeGB"] = json!(1);
    value["dataDisks"][0]["lun"] = json!(64);
    value["dataDisks"][0]["cachingType"] = json!("ReadOnly");
    let refused = world
        .apply(&machine("bad", value))
        .await
        .err()
        .context("a bad machine was accepted")?
        .to_string();
    for part in [
        "admission webhook \"validation.machine.machine.openshift.io\" denied the request",
        "providerSpec.dataDisks[0].diskSizeGB: Invalid value: 1: diskSizeGB must be provided and at least 4GB in size",
        "providerSpec.dataDisks[0].lun: Invalid value: 64: must be greater than or equal to 0 and less than 64",
        "must be \"None\" or omitted when storageAccountType is \"UltraSSD_LRS\"",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    world.apply(&machine("good", good())).await?;
    let made = world.machines().get("good").await?;
    let value = made.spec.provider_spec.value.clone().unwrap_or_default();
    assert_eq!(made.labels()["machine.openshift.io/cluster-api-cluster"], "demo");
    assert_eq!(
        (&value["vmSize"], &value["vnet"]),
        (&json!("Standard_D4s_V3"), &json!("demo-vnet"))
    );
    assert_eq!(value["credentialsSecret"]["namespace"], "openshift-machine-api");
    let again = world.apply(&machine("good", good())).await?;
    assert!(again.contains("unchanged") || again.contains("configured"), "{again}");
    world.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_checked_by_the_names_its_machines_will_have() -> Result<()> {
    let world = World::new().await?;
    let set = |suffix: String| {
        let mut value = good();
        value["dataDisks"][0]["nameSuffix"] = json!(suffix);
        json!({
            "apiVersion": "machine.openshift.io/v1beta1", "kind": "MachineSet", "metadata": {"name": "workers"},
            "spec": {
                "replicas": 0, "selector": {"matchLabels": {"a": "b"}},
                "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"providerSpec": {"value": value}}},
            },
        })
    };
    let refused = world
        .apply(&set("x".repeat(67)))
        .await
        .err()
        .context("too long a name was accepted")?
        .to_string();
    assert!(
        refused.contains("too long, the overall disk name must not exceed 80 chars"),
        "{refused}"
    );
    world.apply(&set("x".repeat(66))).await?;
    world.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_webhook_away_the_api_server_goes_on_and_a_new_copy_uses_the_same_certificate() -> Result<()> {
    let world = World::new().await?;
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), &world.namespace);
    let before = secrets.get("capstan-webhook").await?;
    world.context.shutdown.cancel();
    let bad = machine("bad", json!({"vmSize": 1}));
    world.accepted(&bad).await?;
    let context = world.another().await?;
    world.serve(&context);
    world.registered().await?;
    assert_eq!(secrets.get("capstan-webhook").await?.data, before.data);
    // A bad machine made meanwhile can still be annotated and deleted.
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    world.machines().patch("bad", &PatchParams::default(), &patch).await?;
    world.machines().delete("bad", &DeleteParams::default()).await?;
    context.shutdown.cancel();
    world.end().await
}

/// A size with room for eight disks, asked for nine.
fn crowded(name: &str, namespace: &str) -> Value {
    let disks: Vec<Value> = (0..9)
        .map(|lun| json!({"nameSuffix": format!("d{lun}"), "diskSizeGB": 4, "lun": lun, "deletionPolicy": "Delete"}))
        .collect();
    let mut value = good();
    value["vmSize"] = json!("Standard_D4s_v3");
    value["location"] = json!("");
    value["zone"] = json!("1");
    value["dataDisks"] = json!(disks);
    value["credentialsSecret"] = json!({"name": "azure-cloud-credentials", "namespace": namespace});
    machine(name, value)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_apply_is_warned_by_azures_catalogue_and_the_controller_refuses_by_the_same_words() -> Result<()> {
    let cloud = support::World::new("doubts", capstan_sim::azure::Config::quick()).await?;
    let mut world = World::within(ControlPlane::shared().await?, cloud.namespace.clone()).await?;
    world.azure = Some(capstan_azure::Clients::new(cloud.settings(Default::default())?)?);
    world.serve(&world.context);
    world.registered().await?;
    let (crowded, warned) = world.warned_as("admin", "crowded").await?;
    let said = "providerSpec.dataDisks: vm size Standard_D4s_v3 takes 8 data disks, the spec has 9";
    assert!(warned.contains(said), "{warned}");

    let mut bad = good();
    bad["dataDisks"][0]["lun"] = json!(64);
    let refused = world
        .apply(&machine("bad", bad.clone()))
        .await
        .err()
        .context("accepted")?
        .to_string();
    let refused = refused
        .split("denied the request: ")
        .nth(1)
        .context("no reason")?
        .trim()
        .to_owned();
    world.context.shutdown.cancel();
    world.accepted(&machine("bad", bad)).await?;
    let _controller = cloud.start().await?;
    for (name, said) in [("bad", refused.as_str()), (crowded.as_str(), said)] {
        let failed = cloud.until_phase(name, "Failed").await?;
        let text = failed
            .status
            .and_then(|status| status.error_message)
            .unwrap_or_default();
        assert!(text.contains(said), "{text}\n{said}");
    }
    assert!(cloud.azure("networkInterfaces").is_empty());
    world.end().await
}

/// Lets a user make Machines in a namespace, and read one Secret.
async fn let_make_machines(world: &World, user: &str, secret: &str) -> Result<()> {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": user},
        "rules": [
            {"apiGroups": ["machine.openshift.io"], "resources": ["machines"], "verbs": ["get", "create"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get"]},
        ],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": format!("{user}-binding")},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    });
    world.apply(&role).await?;
    world.apply(&binding).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_not_used_for_a_request_of_somebody_who_cannot_read_it() -> Result<()> {
    let cloud = support::World::new("readers", capstan_sim::azure::Config::quick()).await?;
    let mut world = World::within(ControlPlane::shared().await?, cloud.namespace.clone()).await?;
    world.azure = Some(capstan_azure::Clients::new(cloud.settings(Default::default())?)?);
    world.serve(&world.context);
    world.registered().await?;
    let before = cloud.sim.sign_ins();
    let_make_machines(&world, "tenant", "another").await?;
    let_make_machines(&world, "operator", "azure-cloud-credentials").await?;
    let refused = format!(
        "not checked against Azure's sizes, because you may not read secret {}/azure-cloud-credentials",
        world.namespace
    );
    let (_, warned) = world.warned_as("tenant", "of-tenant").await?;
    assert!(warned.contains(&refused), "{warned}");
    assert_eq!(cloud.sim.sign_ins(), before, "the Secret was used for a stranger");
    let (_, warned) = world.warned_as("operator", "of-operator").await?;
    assert!(warned.contains("takes 8 data disks, the spec has 9"), "{warned}");
    assert!(cloud.sim.sign_ins() > before);
    world.end().await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_copies_behind_a_service_renew_their_certificate_once_and_no_machine_slips_through() -> Result<()> {
    let world = World::unserved().await?;
    let service = |port: u16| server::Options {
        address: Some(server::Address::Service {
            namespace: world.namespace.clone(),
            name: "capstan-webhook".into(),
            port,
        }),
        check_interval: Duration::from_millis(300),
        ..world.server()
    };
    let port = loop {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let leader = server::Options {
            listen: ([127, 0, 0, 1], port).into(),
            ..service(port)
        };
        let mut serving = tokio::spawn(webhook::run(world.context.clone(), leader, world.options()));
        // It ends only if somebody else has taken the port meanwhile.
        if tokio::time::timeout(Duration::from_secs(2), &mut serving)
            .await
            .is_err()
        {
            break port;
        }
    };
    // The API server calls the Service by its name and port; this one leads to this machine.
    let leads: k8s_openapi::api::core::v1::Service = serde_json::from_value(json!({
        "metadata": {"name": "capstan-webhook"},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }))?;
    let services = Api::namespaced(world.client.clone(), &world.namespace);
    services.create(&Default::default(), &leads).await?;
    let standby = world.another().await?;
    tokio::spawn(webhook::run(standby.clone(), service(port), world.options()));
    world.registered().await?;

    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), &world.namespace);
    let before = secrets.get("capstan-webhook").await?.data.context("no data")?;
    let old = Patch::Merge(json!({"metadata": {"annotations": {"capstan.dev/renew-after": "2022-01-28T00:00:00Z"}}}));
    secrets.patch("capstan-webhook", &PatchParams::default(), &old).await?;
    // Long enough for the new certificate to be served, by a copy that waits until it is trusted.
    let began = std::time::Instant::now();
    let mut renewed = None;
    while began.elapsed() < Duration::from_secs(10) || renewed.is_none() {
        assert!(began.elapsed() < support::PATIENCE, "never renewed");
        // An API server that gets no answer for seconds on a busy machine lets objects pass: that is no slip.
        let asked = std::time::Instant::now();
        let refused = world.refuses_a_bad_machine().await?;
        assert!(
            refused || asked.elapsed() > Duration::from_secs(4),
            "a bad machine slipped through while the certificate was renewed"
        );
        let now = secrets.get("capstan-webhook").await?.data.context("no data")?;
        if now != before {
            assert_eq!(*renewed.get_or_insert_with(|| now.clone()), now, "renewed twice");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let renewed = renewed.context("never renewed")?;
    let bundle = String::from_utf8(renewed["ca.crt"].0.clone())?;
    let old = String::from_utf8(before["ca.crt"].0.clone())?;
    assert!(
        bundle.contains(old.trim()) && bundle.matches("BEGIN").count() == 2,
        "the old one is trusted too"
    );
    let trusted = Api::<ValidatingWebhookConfiguration>::all(world.client.clone())
        .get(&world.name)
        .await?;
    let trusted = trusted.webhooks.unwrap_or_default();
    for webhook in &trusted {
        assert_eq!(webhook.client_config.ca_bundle.as_ref(), Some(&renewed["ca.crt"]));
        assert!(webhook.client_config.service.is_some());
    }
    standby.shutdown.cancel();
    world.end().await
}
