//! The simulator beside recordings of real sessions with Azure.
//!
//! Each file in `recorded/` has facts about calls of such sessions: method, path, status, headers, and the fields of the answer
//! with their types. Each call names the repository, path and commit of its recording. The calls are played in order on a
//! strict simulator. Whatever differs stands in [`ALLOWED`] with a reason, and an entry that is not needed fails the test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use capstan_sim::azure::{Azure, Config, Handle, Network, Span, Strict, Times};
use http::Request;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Session {
    /// Calls that bring the simulator to where the recorded session was; only their success is checked.
    #[serde(default)]
    prepare: Vec<Prepare>,
    calls: Vec<Recorded>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Prepare {
    method: String,
    path: String,
    #[serde(default)]
    body: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    name: String,
    source: Source,
    /// How the call stands for the recorded one, where it is not the same.
    #[serde(default, rename = "standsFor")]
    _stands_for: String,
    /// Seconds that pass before the call: enough for operations to end, unless the call asks for one that is under way.
    #[serde(default = "enough")]
    wait: u64,
    method: String,
    /// `{operation}` and `{result}` are the addresses in the headers of the last answer that had them.
    path: String,
    #[serde(default)]
    body: Value,
    status: u16,
    /// Those of [`HEADERS`] that the answer has; `*` is any value. Not given: not known.
    headers: Option<BTreeMap<String, String>>,
    /// The answer's fields; [`fits`] knows the words for values, `?` ends the name of a field that not every item has.
    /// Null: no body.
    #[serde(default)]
    answer: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    repository: String,
    path: String,
    commit: String,
}

fn enough() -> u64 {
    600
}

/// Headers that clients act upon.
const HEADERS: [&str; 8] = [
    "azure-asyncnotification",
    "azure-asyncoperation",
    "content-type",
    "etag",
    "location",
    "retry-after",
    "x-ms-failure-cause",
    "x-ms-ratelimit-remaining-resource",
];

/// Repositories whose recorders leave out `Retry-After`.
const IMPATIENT: [&str; 2] = ["Azure/azure-cli", "Azure/azure-sdk-for-python"];

/// Where the simulator may differ: call (`*`: any), difference, reason.
const ALLOWED: &[(&str, &[&str], &str)] = &[
    (
        "*",
        &[
            "+etag",
            "+header etag",
            "+header azure-asyncnotification",
            "+properties.orchestrationMode",
            "+properties.platformFaultDomainCount",
            "+properties.timeCreated",
            "+properties.hardwareProfile.vmSize",
            "+properties.virtualMachineProfile.timeCreated",
            "+properties.virtualMachineProfile.storageProfile.osDisk.osType",
            "+properties.virtualMachineProfile.networkProfile.networkInterfaceConfigurations[].properties.disableTcpStateTracking",
            "+properties.networkProfileConfiguration.networkInterfaceConfigurations[].properties.disableTcpStateTracking",
            "+value[].properties.disableTcpStateTracking",
        ],
        "Azure has added it since; the recordings of 2024 have it",
    ),
    (
        "*",
        &[
            "-properties.virtualMachineProfile.networkProfile.networkInterfaceConfigurations[].properties.enableAcceleratedNetworking",
            "-properties.networkProfileConfiguration.networkInterfaceConfigurations[].properties.enableAcceleratedNetworking",
            "-properties.osProfile.windowsConfiguration.patchSettings",
        ],
        "Azure has dropped it since; the recordings of 2024 do not have it",
    ),
    (
        "*",
        &[
            "+properties.publicNetworkAccess",
            "+properties.output.properties.publicNetworkAccess",
        ],
        "api-version 2021-04-01 has added it",
    ),
    (
        "*",
        &[
            "-extensions",
            "-vmAgent.extensionHandlers",
            "-properties.instanceView.extensions",
            "-properties.instanceView.vmAgent.extensionHandlers",
            "-resources",
        ],
        "extensions are not imitated",
    ),
    (
        "*",
        &[
            "-placementGroupId",
            "-platformFaultDomain",
            "-platformUpdateDomain",
            "-properties.instanceView.placementGroupId",
            "-properties.instanceView.platformFaultDomain",
            "-properties.instanceView.platformUpdateDomain",
        ],
        "placement groups and fault domains are not imitated",
    ),
    (
        "*",
        &["-disks", "-properties.instanceView.disks"],
        "views do not tell of disks",
    ),
    (
        "*",
        &[
            "-properties.virtualMachineProfile.storageProfile.diskControllerType",
            "-value[].properties.virtualMachineProfile.storageProfile.diskControllerType",
            "-value[].properties.storageProfile.diskControllerType",
        ],
        "it follows from the image, which the simulator does not know",
    ),
    (
        "list of instances",
        &["-value[].tags"],
        "a scale set's tags do not reach its instances",
    ),
    (
        "list of instances",
        &[
            "~value[].id",
            "~value[].properties.networkProfile.networkInterfaces[].id",
            "~value[].properties.storageProfile.osDisk.managedDisk.id",
        ],
        "Azure has answered with the group in upper case, too (Azure/azure-cli#7262); clients must bear both",
    ),
    (
        "*",
        &["-header x-ms-ratelimit-remaining-resource"],
        "Azure publishes no limits of calls about disks and availability sets",
    ),
];

#[tokio::test(start_paused = true)]
async fn the_simulator_answers_as_azure_did() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/recorded");
    let mut used = BTreeSet::new();
    let mut unexpected = Vec::new();
    let mut calls = 0;
    for session in sessions(&folder) {
        let sim = start().await;
        let mut links = BTreeMap::new();
        for prepare in &session.prepare {
            let (status, _, body) = send(&sim, &links, &prepare.method, &prepare.path, &prepare.body).await;
            assert!(
                (200..300).contains(&status),
                "{} {}: {body}",
                prepare.method,
                prepare.path
            );
        }
        for call in &session.calls {
            calls += 1;
            tokio::time::sleep(Duration::from_secs(call.wait)).await;
            for (difference, detail) in play(&sim, &mut links, call).await {
                let fits = |(name, list, _): &(&str, &[&str], &str)| {
                    (*name == "*" || *name == call.name) && list.contains(&difference.as_str())
                };
                match ALLOWED.iter().position(fits) {
                    Some(entry) => {
                        used.insert((entry, difference));
                    }
                    None => unexpected.push(format!("{}: {difference} {detail}", call.name)),
                }
            }
        }
    }
    let entries = ALLOWED.iter().enumerate();
    let unused: Vec<String> = entries
        .flat_map(|(entry, (name, list, _))| list.iter().map(move |one| (entry, *name, *one)))
        .filter(|(entry, _, one)| !used.contains(&(*entry, (*one).to_owned())))
        .map(|(_, name, one)| format!("{name}: {one}"))
        .collect();
    assert!(calls >= 40, "{calls} calls were played");
    assert!(
        unexpected.is_empty() && unused.is_empty(),
        "not as recorded (- only Azure, + only the simulator, ~ another value):\n{}\nallowed, but not needed:\n{}",
        unexpected.join("\n"),
        unused.join("\n")
    );
}

#[test]
fn the_documentation_cites_every_recorded_call() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("../../docs/sim-azure.md")).unwrap();
    for call in sessions(&root.join("tests/it/recorded"))
        .iter()
        .flat_map(|session| &session.calls)
    {
        let file = call.source.path.rsplit('/').next().unwrap();
        let row = page
            .lines()
            .find(|line| line.contains(file) && line.contains(&call.source.commit[..8]));
        let row = row.unwrap_or_else(|| panic!("docs/sim-azure.md does not cite {file} at {}", call.source.commit));
        assert!(row.contains(&call.source.repository), "{row}");
        assert!(
            row.contains(&call.name),
            "the row of {file} does not name '{}'",
            call.name
        );
    }
}

fn sessions(folder: &Path) -> Vec<Session> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let read = |file: &std::path::PathBuf| {
        let text = std::fs::read_to_string(file).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    };
    files.iter().map(read).collect()
}

async fn start() -> Handle {
    let network = Network {
        group: "rgName".into(),
        location: "eastus".into(),
        vnet: "network".into(),
        subnets: vec!["subnet".into()],
    };
    let times = Times {
        network: Span::secs(2),
        ..Times::default()
    };
    Azure::in_process(Config {
        strict: Strict::ALL,
        throttle: true,
        networks: vec![network],
        times,
        ..Config::default()
    })
    .await
    .unwrap()
}

/// Plays a call and tells what differs from the recording.
async fn play(sim: &Handle, links: &mut BTreeMap<&'static str, String>, call: &Recorded) -> Differences {
    let (status, headers, body) = send(sim, links, &call.method, &call.path, &call.body).await;
    for (link, header) in [("{operation}", "azure-asyncoperation"), ("{result}", "location")] {
        if let Some(url) = headers.get(header) {
            links.insert(link, url.clone());
        }
    }
    let mut differences = Differences::new();
    if status != call.status {
        differences.insert("~status".into(), format!("{status}, not {}: {body}", call.status));
    }
    if let Some(recorded) = &call.headers {
        for name in HEADERS {
            let hidden = name == "retry-after" && IMPATIENT.contains(&call.source.repository.as_str());
            let _ = match (recorded.get(name), headers.get(name)) {
                (Some(_), None) => differences.insert(format!("-header {name}"), String::new()),
                (None, Some(own)) if !hidden => differences.insert(format!("+header {name}"), own.clone()),
                (Some(azure), Some(own)) if azure != "*" && *azure != shape(sim, own) => {
                    differences.insert(format!("~header {name}"), shape(sim, own))
                }
                _ => None,
            };
        }
        let unknown = recorded.keys().find(|name| !HEADERS.contains(&name.as_str()));
        assert_eq!(unknown, None, "{}", call.name);
    }
    compare("", &call.answer, &body, &mut differences);
    differences
}

/// What differs (`-` only Azure has it, `+` only the simulator, `~` another value), and how.
type Differences = BTreeMap<String, String>;

type Answer = (u16, BTreeMap<String, String>, Value);

async fn send(sim: &Handle, links: &BTreeMap<&'static str, String>, method: &str, path: &str, body: &Value) -> Answer {
    let fill = |text: String| {
        let mut text = text.replace("{group}", "/subscriptions/{subscription}/resourceGroups/rgName");
        text = text.replace("{subscription}", &sim.subscription);
        text = text.replace("{subnet}", &format!(
            "/subscriptions/{}/resourceGroups/rgName/providers/Microsoft.Network/virtualNetworks/network/subnets/subnet",
            sim.subscription
        ));
        for (link, url) in links {
            text = text.replace(link, url);
        }
        let set = format!(
            "/subscriptions/{}/resourceGroups/rgName/providers/Microsoft.Compute/virtualMachineScaleSets/set",
            sim.subscription
        );
        for (i, instance) in sim.instances(&set).iter().enumerate() {
            text = text.replace(&format!("{{instance{i}}}"), instance["instanceId"].as_str().unwrap());
        }
        text
    };
    let mut url = fill(path.to_owned());
    if !url.contains("api-version") {
        url += if url.contains('?') { "&" } else { "?" };
        url += "api-version=2024-11-01";
    }
    let raw = if body.is_null() {
        Bytes::new()
    } else {
        Bytes::from(fill(body.to_string()))
    };
    let request = Request::builder().method(method).uri(url).body(raw).unwrap();
    let response = sim.answer(request).await.unwrap();
    let headers = response.headers().iter();
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    let (status, headers) = (response.status().as_u16(), headers.collect());
    (
        status,
        headers,
        serde_json::from_slice(response.body()).unwrap_or_default(),
    )
}

/// The path of an operation's address, and whether it asks for the outcome.
fn shape(sim: &Handle, url: &str) -> String {
    let Some((_, path)) = url.split_once("/subscriptions/") else {
        return url.to_owned();
    };
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let path = format!("/subscriptions/{path}").replace(&sim.subscription, "{subscription}");
    let (folder, name) = path.rsplit_once('/').unwrap();
    let name = if fits("guid", &name.into()) { "{guid}" } else { name };
    let monitor = if query.contains("monitor=true") {
        "?monitor=true"
    } else {
        ""
    };
    format!("{folder}/{name}{monitor}")
}

/// Collects what differs between the fields that Azure answered with and the simulator's.
fn compare(path: &str, azure: &Value, own: &Value, differences: &mut Differences) {
    let here = if path.is_empty() { "body" } else { path };
    match (azure, own) {
        (Value::Null, Value::Null) => {}
        (Value::Null, _) => note_difference(differences, '+', here, own),
        (_, Value::Null) => note_difference(differences, '-', here, azure),
        (Value::Object(azure), Value::Object(own)) => {
            let below = |name: &str| format!("{path}{}{name}", if path.is_empty() { "" } else { "." });
            for name in own.keys().filter(|name| !azure.contains_key(*name)) {
                if !azure.contains_key(&format!("{name}?")) {
                    note_difference(differences, '+', &below(name), &own[name]);
                }
            }
            for (name, azure) in azure {
                let sure = name.trim_end_matches('?');
                match own.get(sure) {
                    Some(own) => compare(&below(sure), azure, own, differences),
                    None if sure == name => note_difference(differences, '-', &below(name), azure),
                    None => {}
                }
            }
        }
        (Value::Array(azure), Value::Array(own)) => match azure.first() {
            _ if azure.is_empty() != own.is_empty() => note_difference(differences, '~', here, &own.len().into()),
            Some(azure) => own
                .iter()
                .for_each(|own| compare(&format!("{path}[]"), azure, own, differences)),
            None => {}
        },
        (Value::String(kind), own) if fits(kind, own) => {}
        _ => note_difference(differences, '~', here, own),
    }
}

fn note_difference(differences: &mut Differences, sign: char, name: &str, detail: &Value) {
    differences.insert(format!("{sign}{name}"), detail.to_string());
}

/// Whether a value is what a fixture's word says: a type, or `=` and the value itself.
fn fits(kind: &str, own: &Value) -> bool {
    let matches = |pattern: &str| {
        own.as_str()
            .is_some_and(|own| regex::Regex::new(pattern).unwrap().is_match(own))
    };
    match kind {
        "string" => own.is_string(),
        "number" => own.is_u64(),
        "bool" => own.is_boolean(),
        "time" => own.as_str().is_some_and(|own| own.parse::<jiff::Timestamp>().is_ok()),
        "guid" => matches("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"),
        "number etag" => matches("^\"[0-9]+\"$"),
        "weak etag" => matches("^W/\"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\"$"),
        // Ids with the resource group as it was created, in upper case, and where the recorder hides which.
        "id" => matches("^/subscriptions/[^/]+/resourceGroups/rgName/providers/"),
        "ID" => matches("^/subscriptions/[^/]+/resourceGroups/RGNAME/providers/"),
        "id?" => matches("(?i)^/subscriptions/[^/]+/resourceGroups/rgname/providers/"),
        kind => kind.strip_prefix('=').is_some_and(|value| own.as_str() == Some(value)),
    }
}
