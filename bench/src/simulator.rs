//! The simulated Azure itself, over TLS: requests per second, and memory with many instances.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::measure::usage;

/// A scale set holds at most so many.
const PER_SET: usize = 1000;

#[derive(clap::Args)]
pub struct Args {
    /// How many instances to hold
    #[arg(long, default_value_t = 10_000)]
    instances: usize,
    /// Clients at a time
    #[arg(long, default_value_t = 8)]
    clients: usize,
    /// Seconds for each kind of request
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// The program that is measured [default: the capstan beside this one]
    #[arg(long, env = "CAPSTAN")]
    capstan: Option<std::path::PathBuf>,
}

struct Azure {
    http: reqwest::Client,
    ready: Value,
    token: String,
}

impl Azure {
    fn text(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap_or_default()
    }

    fn url(&self, kind: &str, name: &str) -> String {
        let (url, subscription) = (self.text("url"), self.text("subscription"));
        format!("{url}/subscriptions/{subscription}/resourceGroups/capstan/providers/{kind}/{name}")
    }

    async fn get(&self, url: &str) -> Result<usize> {
        let answer = self
            .http
            .get(url)
            .query(&[("api-version", "2024-07-01")])
            .bearer_auth(&self.token)
            .send()
            .await?;
        ensure!(answer.status().is_success(), "{}", answer.text().await?);
        Ok(answer.bytes().await?.len())
    }

    async fn put(&self, url: &str, body: &Value) -> Result<usize> {
        let request = self
            .http
            .put(url)
            .query(&[("api-version", "2024-07-01")])
            .bearer_auth(&self.token)
            .json(body);
        let answer = request.send().await?;
        ensure!(answer.status().is_success(), "{}", answer.text().await?);
        Ok(answer.bytes().await?.len())
    }

    fn subnet(&self) -> String {
        let path = self.url("Microsoft.Network/virtualNetworks", "capstan-vnet/subnets/default");
        path.trim_start_matches(self.text("url")).to_owned()
    }
}

pub async fn run(args: &Args) -> Result<()> {
    let beside = std::env::current_exe()?.with_file_name("capstan");
    let program = args.capstan.clone().unwrap_or(beside);
    let mut child = tokio::process::Command::new(&program)
        .args([
            "sim",
            "azure",
            "--instance-create",
            "0s",
            "--instance-delete",
            "0s",
            "--network-time",
            "0s",
        ])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| {
            format!(
                "cannot run {}; build it with `cargo build -p capstan`",
                program.display()
            )
        })?;
    let pid = child.id().context("the simulator did not start")?;
    let mut lines = BufReader::new(child.stdout.take().context("no standard output")?).lines();
    let ready: Value = serde_json::from_str(&lines.next_line().await?.context("the simulator ended")?)?;
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    let azure = sign_in(ready).await?;

    let before = usage(pid)?;
    let began = Instant::now();
    for n in 0..args.instances.div_ceil(PER_SET) {
        let capacity = PER_SET.min(args.instances - n * PER_SET);
        azure
            .put(
                &azure.url("Microsoft.Compute/virtualMachineScaleSets", &format!("pool{n}")),
                &set(&azure.subnet(), capacity),
            )
            .await?;
    }
    let filled = usage(pid)?;
    println!(
        "{} instances made in {:.1} s",
        args.instances,
        began.elapsed().as_secs_f64()
    );
    println!(
        "memory                {:.0} MiB (empty: {:.0})",
        filled.peak_mib, before.peak_mib
    );
    let one = azure.url("Microsoft.Compute/virtualMachineScaleSets", "pool0");
    rate(args, "GET a scale set", async || azure.get(&one).await).await?;
    let list = format!("{one}/virtualMachines?$expand=instanceView");
    rate(args, "LIST 200 instances", async || azure.get(&list).await).await?;
    let nic = azure.url("Microsoft.Network/networkInterfaces", "nic");
    let body = json!({ "location": "eastus", "properties": { "ipConfigurations": [
        { "name": "main", "properties": { "subnet": { "id": azure.subnet() } } }] } });
    rate(args, "PUT an interface", async || azure.put(&nic, &body).await).await?;
    let after = usage(pid)?;
    println!("memory afterwards     {:.0} MiB", after.peak_mib);
    child.kill().await?;
    Ok(())
}

/// Repeats a request by some clients at a time, and prints how many were answered in a second.
async fn rate(args: &Args, what: &str, request: impl AsyncFn() -> Result<usize>) -> Result<()> {
    let (began, lasts) = (Instant::now(), Duration::from_secs(args.seconds));
    let worker = async || {
        let (mut answered, mut bytes) = (0_u64, 0);
        while began.elapsed() < lasts {
            bytes += request().await?;
            answered += 1;
        }
        anyhow::Ok((answered, bytes))
    };
    let done = futures::future::try_join_all((0..args.clients).map(|_| worker())).await?;
    let seconds = began.elapsed().as_secs_f64();
    let (answered, bytes) = done
        .iter()
        .fold((0, 0), |(a, b), (answered, bytes)| (a + answered, b + bytes));
    let kib = bytes as f64 / 1024.0 / answered.max(1) as f64;
    println!(
        "{what:<21} {:.0} requests/s, {kib:.1} KiB each",
        answered as f64 / seconds
    );
    Ok(())
}

async fn sign_in(ready: Value) -> Result<Azure> {
    let pem = std::fs::read(ready["ca"].as_str().unwrap_or_default())?;
    let http = reqwest::Client::builder()
        .tls_certs_only([reqwest::Certificate::from_pem(&pem)?])
        .no_proxy()
        .build()?;
    let mut azure = Azure {
        http,
        ready,
        token: String::new(),
    };
    let form = format!(
        "grant_type=client_credentials&client_id={}&client_secret={}&scope=x/.default",
        azure.text("clientId"),
        azure.text("clientSecret")
    );
    let url = format!("{}/{}/oauth2/v2.0/token", azure.text("authority"), azure.text("tenant"));
    let request = azure
        .http
        .post(url)
        .header("content-type", "application/x-www-form-urlencoded")
        .body(form);
    let token: Value = request.send().await?.json().await?;
    azure.token = token["access_token"].as_str().context("no token")?.to_owned();
    Ok(azure)
}

fn set(subnet: &str, capacity: usize) -> Value {
    json!({ "location": "eastus", "zones": ["1", "2", "3"], "sku": { "name": "Standard_D2s_v3", "capacity": capacity },
        "properties": { "overprovision": false, "singlePlacementGroup": false, "upgradePolicy": { "mode": "Manual" },
            "virtualMachineProfile": {
                "osProfile": { "computerNamePrefix": "pool", "adminUsername": "core" },
                "storageProfile": { "imageReference": { "id": "/images/1" }, "osDisk": { "createOption": "FromImage" },
                    "dataDisks": [{ "lun": 0, "createOption": "Empty", "diskSizeGB": 8 }] },
                "networkProfile": { "networkInterfaceConfigurations": [{ "name": "nic", "properties": { "primary": true,
                    "ipConfigurations": [{ "name": "ip", "properties": { "subnet": { "id": subnet } } }] } }] } } } })
}
