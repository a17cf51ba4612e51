//! The client against the simulated Resource Manager: every resource, operation, page, precondition and refusal.

use anyhow::{Context as _, Result};
use aws_lc_rs::encoding::AsDer as _;
use aws_lc_rs::rsa::{KeyPair, KeySize};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_azure::client::When;
use capstan_azure::model::*;
use capstan_azure::{Client, Clients, Cloud, Credential, Error, Operation, Owned, Request, Resource, Secret, Settings};
use capstan_core::{Class, Classified};
use capstan_sim::azure::{Action, Azure, Config, Fault, Handle};
use serde_json::json;
use std::time::{Duration, Instant};

const GROUP: &str = "capstan";

fn settings(sim: &Handle) -> Result<Settings> {
    let cloud = Cloud::custom("sim", &sim.url, &sim.url)?;
    Ok(Settings {
        ca_file: Some(sim.ca_file.clone()),
        ..Settings::new(cloud)
    })
}

fn credential(sim: &Handle) -> Credential {
    Credential::Secret {
        tenant: sim.tenant.clone(),
        client_id: sim.client_id.clone(),
        secret: Secret::new(sim.client_secret.clone()),
    }
}

fn client(sim: &Handle) -> Result<Client> {
    Ok(Clients::new(settings(sim)?)?
        .client(&credential(sim), &sim.subscription)
        .at("eastus"))
}

fn of<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> Result<T> {
    Ok(serde_json::from_value(value)?)
}

fn owned<T: Resource>(resource: &T) -> Result<Owned<T>> {
    Ok(Owned::by_tags(resource, |_| true)?)
}

fn subnet(sim: &Handle) -> String {
    format!(
        "/subscriptions/{}/resourceGroups/{GROUP}/providers/Microsoft.Network/virtualNetworks/capstan-vnet/subnets/default",
        sim.subscription
    )
}

async fn nic(client: &Client, sim: &Handle, name: &str) -> Result<NetworkInterface> {
    let body = of(json!({"location": "eastus", "properties": {"ipConfigurations": [
        {"name": "a", "properties": {"primary": true, "subnet": {"id": subnet(sim)}}}]}}))?;
    let put = client.put_nic(GROUP, name, &body, When::Always).await?;
    Ok(client.settled(put).await?)
}

fn vm(nic: &NetworkInterface, over: serde_json::Value) -> Result<VirtualMachine> {
    let mut body = json!({"location": "eastus", "zones": ["1"], "properties": {
        "hardwareProfile": {"vmSize": "Standard_D4s_v3"},
        "storageProfile": {
            "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
            "osDisk": {"name": "m_OSDisk", "createOption": "FromImage", "deleteOption": "Delete"}},
        "osProfile": {"computerName": "m", "adminUsername": "a", "adminPassword": "Passw0rd!xyz"},
        "networkProfile": {"networkInterfaces": [{"id": nic.id}]}}});
    for (key, value) in over.as_object().into_iter().flatten() {
        body["properties"][key] = value.clone();
    }
    of(body)
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_interfaces_and_disks_come_and_go() -> Result<()> {
    let sim = Azure::start(Config::quick()).await?;
    let client = client(&sim)?;
    let nic = nic(&client, &sim, "n").await?;
    assert_eq!(nic.private_addresses().len(), 1);

    let put = client.put_vm(GROUP, "m", &vm(&nic, json!({}))?, When::Absent).await?;
    let operation = put.operation.context("making a machine takes a while")?;
    let stored = serde_json::to_string(&operation)?;
    let resumed: Operation = serde_json::from_str(&stored)?;
    client.wait(resumed).await?;
    let made = client.get_vm_with_instance_view(GROUP, "m").await?.context("made")?;
    assert_eq!(
        (made.provisioning_state(), made.power_state()),
        (ProvisioningState::Succeeded, Some(PowerState::Running))
    );
    let again = client
        .put_vm(GROUP, "m", &vm(&nic, json!({}))?, When::Absent)
        .await
        .unwrap_err();
    assert!(again.is_precondition_failed(), "{again}");

    let disk: Disk = of(
        json!({"location": "eastus", "zones": ["1"], "sku": {"name": "UltraSSD_LRS"}, "properties": {
        "creationData": {"createOption": "Empty"}, "diskSizeGB": 8, "diskIOPSReadWrite": 500}}),
    )?;
    let put = client.put_disk(GROUP, "d", &disk).await?;
    let disk = client.settled(put).await?;
    assert_eq!(disk.properties.as_ref().and_then(|p| p.disk_iops_read_write), Some(500));
    assert_eq!(disk.managed_by, None);
    assert_eq!(client.list_disks(GROUP).await?.len(), 2);

    let made = owned(&made)?;
    let operation = client.delete_vm(&made).await?.context("deleting takes a while")?;
    client.wait(operation).await?;
    assert!(client.get_vm(GROUP, "m").await?.is_none());
    assert!(
        client.delete_vm(&made).await?.is_none(),
        "deleting what is not there succeeds"
    );
    for operation in [
        client.delete_disk(GROUP, "d").await?,
        client.delete_nic(&owned(&nic)?).await?,
    ]
    .into_iter()
    .flatten()
    {
        client.wait(operation).await?;
    }
    assert!(client.get_disk(GROUP, "d").await?.is_none() && client.get_nic(GROUP, "n").await?.is_none());
    assert_eq!(sim.sign_ins(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_sent_once_and_never_waits_for_azures_work() -> Result<()> {
    let sim = Azure::start(Config {
        network_retry_after: 600,
        ..Config::quick()
    })
    .await?;
    let client = client(&sim)?;
    sim.fault(Fault::new(Action::Stall).method("PUT").path("networkInterfaces/n"))?;
    let body: NetworkInterface = of(json!({"location": "eastus", "properties": {"ipConfigurations": [
        {"name": "a", "properties": {"primary": true, "subnet": {"id": subnet(&sim)}}}]}}))?;
    let mut request = Request::<NetworkInterface>::default();
    for _ in 0..3 {
        let send = client.put_nic(GROUP, "n", &body, When::Absent);
        let after = request.advance(&client, send).await?.context("it takes a while")?;
        assert!(after > Duration::from_secs(500), "{after:?}");
    }
    assert_eq!(sim.arm_requests().len(), 1, "one request, and no poll before its time");
    assert!(request.value().is_none());

    // The same with an operation that may be asked about: it is over when Azure says so.
    sim.release();
    if let Request::Running(operation) = &mut request {
        operation.not_before = jiff::Timestamp::now();
    }
    let send = client.put_nic(GROUP, "n", &body, When::Absent);
    assert_eq!(request.advance(&client, send).await?, None);
    let made = request.value().context("made")?;
    assert_eq!(made.private_addresses().len(), 1, "what came of it was read");

    // An operation that failed can be begun again.
    let mut request = Request::<()>::default();
    let gone = Operation {
        method: "DELETE".into(),
        resource: format!("{}?api-version=2024-05-01", made.id.as_deref().unwrap_or_default()),
        follow: capstan_azure::operation::Follow::Resource,
        not_before: jiff::Timestamp::now(),
    };
    let failed = request.finish(&client, async { Ok(Some(gone)) }).await.unwrap_err();
    assert!(failed.ended_operation(), "{failed}");
    assert_eq!(request, Request::NotSent);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn scale_sets_are_changed_upgraded_and_shrunk_in_batches() -> Result<()> {
    let sim = Azure::start(Config {
        page_size: 2,
        ..Config::quick()
    })
    .await?;
    let client = client(&sim)?;
    let set: ScaleSet = of(json!({
        "location": "eastus", "zones": ["1"], "sku": {"name": "Standard_D4s_v3", "capacity": 3},
        "properties": {"orchestrationMode": "Uniform", "overprovision": false, "upgradePolicy": {"mode": "Manual"},
            "virtualMachineProfile": {
                "osProfile": {"computerNamePrefix": "p", "adminUsername": "a", "adminPassword": "Passw0rd!xyz"},
                "storageProfile": {"imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "1"},
                                   "osDisk": {"createOption": "FromImage"}},
                "networkProfile": {"networkInterfaceConfigurations": [{"name": "n", "properties": {"primary": true,
                    "ipConfigurations": [{"name": "i", "properties": {"subnet": {"id": subnet(&sim)}}}]}}]}}},
    }))?;
    let made = client
        .settled(client.put_scale_set(GROUP, "p", &set, When::Absent).await?)
        .await?;
    assert_eq!((made.capacity(), made.is_flexible()), (3, false));
    let instances = client.list_instances(GROUP, "p").await?;
    assert_eq!(instances.len(), 3, "all pages of two are read");
    assert!(
        instances
            .iter()
            .all(|instance| instance.latest_model_applied() && instance.power_state() == Some(PowerState::Running))
    );

    let change: ScaleSet = of(json!({"properties": {"virtualMachineProfile": {"storageProfile": {
        "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "2"}}}}}))?;
    client
        .settled(client.patch_scale_set(GROUP, "p", &change, When::Always).await?)
        .await?;
    let stale: Vec<String> = client
        .list_instances(GROUP, "p")
        .await?
        .iter()
        .filter(|instance| !instance.latest_model_applied())
        .filter_map(|i| i.instance_id.clone())
        .collect();
    assert_eq!(stale.len(), 3);
    if let Some(operation) = client.upgrade_instances(GROUP, "p", &stale[..1]).await? {
        client.wait(operation).await?;
    }
    let instances = client.list_instances(GROUP, "p").await?;
    let upgraded = instances.iter().find(|i| i.instance_id.as_ref() == Some(&stale[0]));
    assert!(upgraded.context("there")?.latest_model_applied());
    let set = owned(&made)?;
    for operation in [
        client.reimage_instances(&set, &stale[..1]).await?,
        client.delete_instances(&set, &stale[1..]).await?,
    ]
    .into_iter()
    .flatten()
    {
        client.wait(operation).await?;
    }
    assert_eq!(client.list_instances(GROUP, "p").await?.len(), 1);
    assert!(client.get_scale_set_view(GROUP, "p").await?.is_some());
    if let Some(operation) = client.delete_scale_set(&set).await? {
        client.wait(operation).await?;
    }
    assert!(client.get_scale_set(GROUP, "p").await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn addresses_sets_and_sizes_are_read_and_written() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let client = client(&sim)?;
    let address: PublicIpAddress = of(
        json!({"location": "eastus", "sku": {"name": "Standard"}, "tags": {"owner": "me"},
        "properties": {"publicIPAllocationMethod": "Static"}}),
    )?;
    client
        .settled(client.put_public_ip(GROUP, "a", &address, When::Always).await?)
        .await?;
    let address = client.get_public_ip(GROUP, "a").await?.context("there")?;
    let others = Owned::by_tags(&address, |tags| tags.get("owner").is_some_and(|owner| owner == "you"));
    assert!(matches!(others, Err(Error::NotOwned { .. })), "{others:?}");
    if let Some(operation) = client.delete_public_ip(&owned(&address)?).await? {
        client.wait(operation).await?;
    }
    assert!(client.get_public_ip(GROUP, "a").await?.is_none());

    let set: AvailabilitySet = of(json!({"location": "eastus", "sku": {"name": "Aligned"}}))?;
    client.put_availability_set(GROUP, "s", &set).await?;
    let set = client.get_availability_set(GROUP, "s").await?.context("there")?;
    client.delete_availability_set(&owned(&set)?).await?;
    assert!(client.get_subnet(GROUP, "capstan-vnet", "default").await?.is_some());

    let size = client.size("eastus", "standard_d4s_v3").await?.context("known")?;
    assert!(size.supports_ultra(Some("1")) && !size.supports_ultra(None) && size.max_data_disks == Some(8));
    assert!(client.size("eastus", "Standard_Nope").await?.is_none());
    assert_eq!(
        sim.arm_requests()
            .iter()
            .filter(|request| request.policy == "GetSkus")
            .count(),
        1
    );
    Ok(())
}

/// Names that would turn the address of a machine into that of its group, or of another subscription.
const HOSTILE: [&str; 8] = [
    "prod-rg?api-version=2021-04-01&x=",
    "prod-rg#",
    "..",
    "../../resourceGroups/prod-rg?api-version=2021-04-01&x=",
    "prod-rg/../prod-rg",
    "prod-rg%3Fapi-version=2021-04-01",
    "prod-rg\n",
    "",
];

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_delete_nothing_and_are_not_even_sent() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let client = client(&sim)?;
    let nic = nic(&client, &sim, "n").await?;
    let machine = vm(&nic, json!({}))?;
    client
        .settled(client.put_vm(GROUP, "m", &machine, When::Absent).await?)
        .await?;
    let before = sim.arm_requests().len();
    let group = format!("{GROUP}?api-version=2021-04-01&x=");
    for name in HOSTILE.into_iter().chain([group.as_str()]) {
        // What deleting a machine of this group, or of this name, would send.
        for (group, machine) in [(name, "m"), (GROUP, name)] {
            let outcomes = [
                client.get_vm(group, machine).await.map(drop),
                client.get_nic(group, machine).await.map(drop),
                client.get_public_ip(group, machine).await.map(drop),
                client.get_scale_set(group, machine).await.map(drop),
                client.delete_disk(group, machine).await.map(drop),
            ];
            for outcome in outcomes {
                assert!(matches!(outcome, Err(Error::Invalid { .. })), "{name:?}: {outcome:?}");
            }
        }
        let id = format!(
            "azure:///subscriptions/{}/resourceGroups/{name}/providers/Microsoft.Compute/virtualMachines/m",
            sim.subscription
        );
        assert!(id.parse::<capstan_azure::ResourceId>().is_err(), "{id:?}");
    }
    assert_eq!(sim.arm_requests().len(), before, "nothing was sent");
    assert!(client.get_vm(GROUP, "m").await?.is_some() && client.get_nic(GROUP, "n").await?.is_some());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn azures_refusals_keep_their_words() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let client = client(&sim)?;
    let nic = nic(&client, &sim, "n").await?;
    let ultra = json!({"storageProfile": {
        "imageReference": {"publisher": "p", "offer": "o", "sku": "s", "version": "latest"},
        "osDisk": {"createOption": "FromImage"},
        "dataDisks": [{"lun": 0, "name": "u", "createOption": "Empty", "diskSizeGB": 4,
                       "managedDisk": {"storageAccountType": "UltraSSD_LRS"}}]}});
    let error = client
        .put_vm(GROUP, "m", &vm(&nic, ultra)?, When::Absent)
        .await
        .unwrap_err();
    let arm = error.arm().context("azure spoke")?;
    assert_eq!(
        (arm.status, arm.code.as_str(), arm.target.as_deref()),
        (400, "InvalidParameter", Some("managedDisk.storageAccountType"))
    );
    assert_eq!(error.class(), Class::Terminal);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_429_is_obeyed_by_everybody_who_shares_the_budget() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let clients = Clients::new(settings(&sim)?)?;
    let client = clients.client(&credential(&sim), &sim.subscription).at("eastus");
    sim.fault(Fault::throttle(5).policy("GetVM").times(1))?;
    let error = client.get_vm(GROUP, "m").await.unwrap_err();
    assert_eq!(error.class(), Class::Throttled(Duration::from_secs(5)));
    let before = sim.arm_requests().len();
    let other = clients.client(&credential(&sim), &sim.subscription).at("eastus");
    for _ in 0..50 {
        assert!(matches!(other.get_vm(GROUP, "x").await, Err(Error::Throttled { .. })));
    }
    assert_eq!(sim.arm_requests().len(), before, "nothing was sent meanwhile");
    tokio::time::sleep(Duration::from_millis(5050)).await;
    assert!(other.get_vm(GROUP, "x").await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_callers_sign_in_once_and_a_wrong_secret_does_not_storm() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let clients = Clients::new(settings(&sim)?)?;
    let client = clients.client(&credential(&sim), &sim.subscription);
    let calls = (0..100).map(|n| {
        let client = client.clone();
        async move { client.get_vm(GROUP, &format!("m{n}")).await }
    });
    futures::future::try_join_all(calls).await?;
    assert_eq!(sim.sign_ins(), 1);

    let Credential::Secret { tenant, client_id, .. } = credential(&sim) else {
        unreachable!()
    };
    let wrong = Credential::Secret {
        tenant,
        client_id,
        secret: Secret::new("wrong"),
    };
    let before = sim.requests().len();
    let started = Instant::now();
    for _ in 0..20 {
        let error = clients
            .client(&wrong, &sim.subscription)
            .get_vm(GROUP, "m")
            .await
            .unwrap_err();
        assert_eq!(error.class(), Class::Transient, "{error}");
        assert!(!error.to_string().contains("wrong\""), "{error}");
    }
    assert!(sim.requests().len() - before <= 1 || started.elapsed() > Duration::from_secs(10));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_secret_of_the_same_application_costs_the_right_one_no_sign_in() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let clients = Clients::new(settings(&sim)?)?;
    let right = credential(&sim);
    let wrong = Credential::Secret {
        tenant: sim.tenant.clone(),
        client_id: sim.client_id.clone(),
        secret: Secret::new("wrong"),
    };
    for _ in 0..10 {
        let refused = clients.client(&wrong, &sim.subscription).get_vm(GROUP, "m").await;
        assert!(matches!(refused, Err(Error::SignIn { .. })), "{refused:?}");
        clients.client(&right, &sim.subscription).get_vm(GROUP, "m").await?;
    }
    assert_eq!(sim.sign_ins(), 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_end_is_cut_off() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let settings = Settings {
        max_answer: 1000,
        ..settings(&sim)?
    };
    let client = Clients::new(settings)?.client(&credential(&sim), &sim.subscription);
    let error = client.catalogue("eastus").await.unwrap_err();
    assert!(matches!(error, Error::Oversized { limit: 1000, .. }), "{error}");
    assert!(error.to_string().contains("larger than the limit of 1000"), "{error}");
    assert!(client.get_vm(GROUP, "m").await?.is_none());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_never_came_is_told_as_passing() -> Result<()> {
    let sim = Azure::start(Config::instant()).await?;
    let client = client(&sim)?;
    sim.fault(Fault::new(Action::Drop).policy("GetVM").times(1))?;
    let error = client.get_vm(GROUP, "m").await.unwrap_err();
    assert_eq!(error.class(), Class::Transient);
    assert!(client.get_vm(GROUP, "m").await?.is_none());
    Ok(())
}

fn pem(label: &str, der: &[u8]) -> String {
    format!(
        "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
        STANDARD.encode(der)
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_and_a_federated_token_sign_in_once_each() -> Result<()> {
    let sim = Azure::start(Config::quick()).await?;
    let (tenant, client_id) = (sim.tenant.clone(), sim.client_id.clone());
    let key = KeyPair::generate(KeySize::Rsa2048)?;
    let text = pem("CERTIFICATE", b"der") + &pem("PRIVATE KEY", key.as_der()?.as_ref());
    let certificate = Credential::Certificate {
        tenant: tenant.clone(),
        client_id: client_id.clone(),
        pem: Secret::new(text),
        authority: None,
    };
    let token_file = std::env::temp_dir().join(format!("capstan-federated-{}", std::process::id()));
    std::fs::write(&token_file, "a.service.account.token")?;
    let federated = Credential::WorkloadIdentity {
        tenant,
        client_id,
        token_file: token_file.clone(),
    };
    let clients = Clients::new(settings(&sim)?)?;
    for (credential, sign_ins) in [(certificate, 1), (federated, 2)] {
        for _ in 0..3 {
            let client = clients.client(&credential, &sim.subscription).at("eastus");
            client
                .list_disks(GROUP)
                .await
                .with_context(|| format!("{credential:?}"))?;
        }
        assert_eq!(sim.sign_ins(), sign_ins);
    }
    std::fs::remove_file(token_file)?;
    Ok(())
}

/// What the Azure disk driver does for a persistent volume: the disk exists, and the running machine is patched.
#[tokio::test(flavor = "multi_thread")]
async fn an_ultra_volume_attaches_to_a_running_machine_that_has_the_capability_and_to_no_other() -> Result<()> {
    for (name, capable) in [("capable", true), ("plain", false)] {
        let sim = Azure::start(Config::quick()).await?;
        let client = client(&sim)?;
        let nic = nic(&client, &sim, &format!("{name}-nic")).await?;
        let mut body = vm(
            &nic,
            json!({ "additionalCapabilities": { "ultraSSDEnabled": capable } }),
        )?;
        body.name = Some(name.to_owned());
        let put = client.put_vm(GROUP, name, &body, When::Always).await?;
        client.settled(put).await?;
        let volume = of(
            json!({ "location": "eastus", "zones": ["1"], "sku": { "name": "UltraSSD_LRS" },
            "properties": { "creationData": { "createOption": "Empty" }, "diskSizeGB": 8 } }),
        )?;
        let put = client.put_disk(GROUP, &format!("pvc-{name}"), &volume).await?;
        let volume = client.settled(put).await?;
        let attach = of(json!({ "properties": { "storageProfile": { "dataDisks": [
            { "lun": 0, "createOption": "Attach", "caching": "None", "managedDisk": { "id": volume.id } }] } } }))?;
        let attached = match client.patch_vm(GROUP, name, &attach, When::Always).await {
            Ok(put) => client.settled(put).await.map(drop),
            Err(error) => Err(error),
        };
        let held = client
            .get_disk(GROUP, &format!("pvc-{name}"))
            .await?
            .and_then(|disk| disk.managed_by);
        if capable {
            attached?;
            assert!(held.is_some_and(|holder| holder.ends_with("/capable")));
        } else {
            let error = attached.err().context("azure refuses")?;
            let arm = error.arm().context("azure says why")?;
            assert_eq!((arm.status, arm.code.as_str()), (400, "InvalidParameter"));
            assert_eq!(
                arm.message,
                "StorageAccountType UltraSSD_LRS can be used only when additionalCapabilities.ultraSSDEnabled is set."
            );
            assert_eq!(arm.target.as_deref(), Some("managedDisk.storageAccountType"));
            assert_eq!(held, None);
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalogue_that_is_refused_is_not_asked_for_at_every_turn() -> Result<()> {
    let sim = Azure::start(Config::quick()).await?;
    let client = client(&sim)?;
    sim.fault(Fault::answer(403).path("/skus").times(1))?;
    for _ in 0..3 {
        let refused = client.size("eastus", "Standard_D4s_v3").await;
        assert_eq!(refused.unwrap_err().arm().map(|error| error.status), Some(403));
    }
    let asked = sim
        .arm_requests()
        .into_iter()
        .filter(|call| call.path.contains("/skus"));
    assert_eq!(asked.count(), 1);
    // Elsewhere is another catalogue.
    client.size("westus", "Standard_D4s_v3").await?;
    Ok(())
}
