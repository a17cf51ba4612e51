use super::*;
use crate::model::VirtualMachine;
use crate::{Cloud, Secret};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::LazyLock;

const SUBSCRIPTION: &str = "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b";

fn client(subscription: &str) -> Client {
    let credential = Credential::Secret {
        tenant: "t".into(),
        client_id: "c".into(),
        secret: Secret::new("s"),
    };
    static CLIENTS: LazyLock<Clients> =
        LazyLock::new(|| Clients::new(Settings::new(Cloud::named("").unwrap())).unwrap());
    CLIENTS.client(&credential, subscription)
}

/// Every request that the client can build, with the depth of its path. A test below fails if one is missing.
fn requests(client: &Client, group: &str, name: &str, second: &str) -> Vec<(usize, Result<Call, Error>)> {
    let methods = [Method::GET, Method::PUT, Method::PATCH, Method::DELETE];
    let mut all = Vec::new();
    for method in methods {
        let put = || method.clone();
        all.extend([
            (8, client.vm(put(), group, name, Policy::VmPut)),
            (8, client.availability_set(put(), group, name)),
            (8, client.disk(put(), group, name, Policy::DiskWrite)),
            (8, client.nic(put(), group, name)),
            (8, client.public_ip(put(), group, name)),
            (8, client.scale_set(put(), group, name, Policy::ScaleSetUpdate)),
        ]);
    }
    for action in ["delete", "manualupgrade", "reimage"] {
        all.push((9, client.for_instances((group, name), action, &[second.to_owned()])));
    }
    all.extend([
        (7, client.flexible_vms(group, second)),
        (7, client.disks(group)),
        (7, client.availability_sets(group)),
        (7, client.nics(group)),
        (7, client.public_ips(group)),
        (7, client.region_usages(second)),
        (10, client.subnet(group, name, second)),
        (8, client.load_balancer(group, name)),
        (8, client.user_assigned_identity(group, name)),
        (9, client.scale_set_view(group, name)),
        (9, client.instances(group, name)),
        (5, client.skus(second)),
    ]);
    all
}

/// Pieces that have a meaning in an address, between ordinary letters.
fn hostile() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "a",
        "prod-rg",
        "..",
        ".",
        "/",
        "?",
        "#",
        "%2F",
        "%2e",
        "%",
        "&",
        "=",
        "api-version=2021-04-01",
        "\\",
        "\n",
        "\t",
        "\0",
        " ",
        "@",
        ":",
        ";",
        "//host/",
        "ä",
        "(",
        ")",
        "_",
        "-",
        "'",
    ]);
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

fn queries(url: &reqwest::Url) -> BTreeSet<String> {
    url.query_pairs().map(|(key, _)| key.into_owned()).collect()
}

proptest! {
    #[test]
    fn names_never_change_host_depth_or_query(
        group in hostile(), name in hostile(), second in hostile(), subscription in hostile(), own in any::<bool>(),
    ) {
        let subscription = if own { SUBSCRIPTION } else { &subscription };
        let client = client(subscription);
        let (group, name) = (group.as_str(), name.as_str());
        for ((depth, hostile), (_, plain)) in
            requests(&client, group, name, &second).into_iter().zip(requests(&self::client(SUBSCRIPTION), "g", "n1", "s1"))
        {
            let Ok(call) = hostile else { continue };
            let url = client.url(&call).unwrap();
            let expected = client.url(&plain.unwrap()).unwrap();
            prop_assert_eq!(url.origin(), expected.origin());
            prop_assert_eq!(url.username(), "");
            prop_assert_eq!(url.fragment(), None);
            prop_assert_eq!(url.path_segments().unwrap().count(), depth, "{}", url);
            prop_assert_eq!(queries(&url), queries(&expected));
            let versions: Vec<_> = url.query_pairs().filter(|(key, _)| key == "api-version").collect();
            prop_assert_eq!(versions.len(), 1);
            prop_assert_eq!(versions[0].1.as_ref(), call.version);
            let words = |url: &reqwest::Url| -> Vec<String> {
                url.path_segments().unwrap().step_by(2).map(str::to_owned).collect()
            };
            prop_assert_eq!(words(&url), words(&expected));
        }
    }
}

/// The functions of this crate that make a `Call` of a path, each by its name and its text up to the call.
fn builders() -> Vec<(String, String)> {
    let mut folders = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut texts = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("tests.rs") {
                texts.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut found = Vec::new();
    for text in &texts {
        for (at, _) in text
            .match_indices("Call::new(")
            .chain(text.match_indices("network_call("))
        {
            let before = &text[..at];
            let start = before.rfind("fn ").map_or(0, |start| start + 3);
            let name = before[start..].split('(').next().unwrap_or_default();
            found.push((name.to_owned(), before[start..].to_owned()));
        }
    }
    found
}

#[test]
fn no_builder_of_a_request_is_missing_from_the_property() {
    let all = include_str!("tests.rs");
    let builders = builders();
    assert!(builders.len() > 15, "the sources are read");
    for (name, text) in builders {
        // The one function that others call, and its own name where it is declared.
        if name.is_empty() || name == "network_call" {
            continue;
        }
        assert!(
            text.contains("-> Result<Call, Error>"),
            "{name} hides its request from this test"
        );
        assert!(
            all.contains(&format!("client.{name}(")),
            "{name} is not in the property"
        );
    }
}

#[test]
fn every_hostile_name_is_refused_with_the_field_and_the_value() {
    let client = client(SUBSCRIPTION);
    for name in [
        "prod-rg?api-version=2021-04-01&x=",
        "..",
        "a/b",
        "a#b",
        "a%2Fb",
        "a\nb",
        "",
    ] {
        let error = client.vm(Method::DELETE, name, "m", Policy::VmPut).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("resource group {name:?}: ")), "{text}");
        let error = client.vm(Method::DELETE, "g", name, Policy::VmPut).unwrap_err();
        assert!(error.to_string().starts_with("virtual machine "), "{error}");
        let other = self::client(name).vm(Method::GET, "g", "m", Policy::VmPut);
        assert!(matches!(
            other,
            Err(Error::Invalid {
                field: "subscription",
                ..
            })
        ));
    }
}

#[test]
fn an_address_that_azure_gave_leads_to_our_resource_manager_only() {
    let client = client(SUBSCRIPTION);
    let call = Call::follow(
        "https://elsewhere.example/subscriptions/s/op?t=1&sig=x",
        Policy::Operation,
    );
    let url = client.url(&call).unwrap();
    assert_eq!(
        url.as_str(),
        "https://management.azure.com/subscriptions/s/op?t=1&sig=x"
    );
    assert_eq!(call.method, Method::GET);
}

#[test]
fn an_answer_of_another_type_is_refused() {
    let of = |kind: &str| {
        let vm: VirtualMachine = serde_json::from_value(serde_json::json!({ "type": kind })).unwrap();
        of_type("GET".to_owned(), vm)
    };
    assert!(of("microsoft.compute/VirtualMachines").is_ok());
    let error = of("Microsoft.Resources/resourceGroups").unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
}

#[tokio::test]
async fn a_caller_that_cannot_sign_in_spends_nothing_of_the_principal_that_it_names() {
    // Nothing listens there, so nobody signs in.
    let cloud = Cloud::custom("none", "https://127.0.0.1:1", "https://127.0.0.1:1").unwrap();
    let credential = Credential::Secret {
        tenant: "t".into(),
        client_id: "somebody-elses".into(),
        secret: Secret::new("guessed"),
    };
    let client = Clients::new(Settings::new(cloud))
        .unwrap()
        .client(&credential, SUBSCRIPTION);
    for _ in 0..3 {
        let error = client.get_vm("group", "vm").await.unwrap_err();
        assert!(
            error.to_string().contains("sign-in of t/somebody-elses failed"),
            "{error}"
        );
    }
    assert_eq!(client.shared.budget.buckets(), 0);
}
