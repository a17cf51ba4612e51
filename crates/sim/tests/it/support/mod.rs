//! A plain HTTP client of the simulator, for tests.
use std::time::Duration;

use capstan_sim::azure::{Azure, Config, Handle};
use reqwest::{Method, Response};
use serde_json::{Value, json};

pub struct Client {
    pub http: reqwest::Client,
    pub sim: Handle,
    token: String,
}

pub const GROUP: &str = "capstan";

impl Client {
    pub async fn start(config: Config) -> Self {
        let sim = Azure::start(config).await.unwrap();
        let certificate = reqwest::Certificate::from_pem(sim.ca_pem.as_bytes()).unwrap();
        let http = reqwest::Client::builder()
            .tls_certs_only([certificate])
            .no_proxy()
            .build()
            .unwrap();
        let form = format!(
            "grant_type=client_credentials&client_id={}&client_secret={}&scope=https%3A%2F%2Fmanagement.azure.com%2F.default",
            sim.client_id, sim.client_secret
        );
        let answer = http
            .post(format!("{}/{}/oauth2/v2.0/token", sim.url, sim.tenant))
            .header("content-type", "application/x-www-form-urlencoded")
            .body(form)
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), 200);
        let token = answer.json::<Value>().await.unwrap()["access_token"]
            .as_str()
            .unwrap()
            .to_owned();
        Self { http, sim, token }
    }

    pub fn id(&self, kind: &str, name: &str) -> String {
        format!(
            "/subscriptions/{}/resourceGroups/{GROUP}/providers/{kind}/{name}",
            self.sim.subscription
        )
    }

    pub fn subnet(&self) -> String {
        self.id("Microsoft.Network/virtualNetworks", "capstan-vnet") + "/subnets/default"
    }

    pub async fn send(&self, method: Method, path: &str, body: Value, headers: &[(&'static str, &str)]) -> Response {
        let url = if path.starts_with("https://") {
            path.to_owned()
        } else {
            let join = if path.contains('?') { '&' } else { '?' };
            format!("{}{path}{join}api-version=2024-07-01", self.sim.url)
        };
        let mut request = self.http.request(method, url).bearer_auth(&self.token);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if !body.is_null() {
            request = request.json(&body);
        }
        request.send().await.unwrap()
    }

    pub async fn get(&self, path: &str) -> Value {
        let answer = self.send(Method::GET, path, Value::Null, &[]).await;
        let status = answer.status();
        let body: Value = answer.json().await.unwrap();
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Sends a call and follows its operation to the end; gives the first status and the last status body.
    pub async fn run(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let answer = self.send(method, path, body, &[]).await;
        let status = answer.status().as_u16();
        let Some(url) = answer
            .headers()
            .get("azure-asyncoperation")
            .map(|url| url.to_str().unwrap().to_owned())
        else {
            let text = answer.text().await.unwrap();
            return (status, serde_json::from_str(&text).unwrap_or(Value::Null));
        };
        loop {
            let state = self.get(&url).await;
            if state["status"] != "InProgress" {
                return (status, state);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub async fn make_nic(&self, name: &str) -> String {
        let id = self.id("Microsoft.Network/networkInterfaces", name);
        let body = json!({ "location": "eastus", "properties": { "ipConfigurations": [
            { "name": "main", "properties": { "subnet": { "id": self.subnet() } } }] } });
        let (status, _) = self.run(Method::PUT, &id, body).await;
        assert_eq!(status, 201);
        id
    }

    pub fn vm_body(&self, nic: &str, more: Value) -> Value {
        let mut body = json!({ "location": "eastus", "zones": ["1"], "properties": {
            "hardwareProfile": { "vmSize": "Standard_D4s_v3" },
            "osProfile": { "computerName": "vm", "adminUsername": "core", "customData": "c2VjcmV0" },
            "storageProfile": { "osDisk": { "name": "vm_OSDisk", "createOption": "FromImage", "deleteOption": "Delete",
                "managedDisk": { "storageAccountType": "Premium_LRS" } } },
            "networkProfile": { "networkInterfaces": [{ "id": nic }] } } });
        capstan_sim::azure::wire::merge(&mut body, &more);
        body
    }

    pub fn set_body(&self, capacity: u64, more: Value) -> Value {
        let mut body = json!({ "location": "eastus", "zones": ["1", "2", "3"],
            "sku": { "name": "Standard_D2s_v3", "capacity": capacity },
            "properties": { "overprovision": false, "upgradePolicy": { "mode": "Manual" }, "virtualMachineProfile": {
                "osProfile": { "computerNamePrefix": "pool", "adminUsername": "core", "customData": "c2VjcmV0" },
                "storageProfile": { "imageReference": { "id": "/images/1" }, "osDisk": { "createOption": "FromImage" } },
                "networkProfile": { "networkInterfaceConfigurations": [{ "name": "nic", "properties": { "primary": true,
                    "ipConfigurations": [{ "name": "ip", "properties": { "subnet": { "id": self.subnet() } } }] } }] } } } });
        capstan_sim::azure::wire::merge(&mut body, &more);
        body
    }
}
