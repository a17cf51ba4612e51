use super::*;
use futures::FutureExt;
use k8s_openapi::ByteString;
use rstest::rstest;

/// What a hostile field would read or send, if it were used.
const KNOWN: &str = "content-that-must-not-leave";

fn kubeconfig(server: &str, cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\npreferences: {{}}\n\
         contexts:\n- name: c\n  context: {{cluster: c, user: u, namespace: default}}\n\
         clusters:\n- name: c\n  cluster: {{server: \"{server}\"{cluster}}}\n\
         users:\n- name: u\n  user: {{{user}}}\n"
    )
}

#[rstest]
#[case::exec(
    "",
    "exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [MARKER]}",
    "users[].user.exec"
)]
#[case::exec_beside_a_token("", "token: t, exec: {command: touch, args: [MARKER]}", "users[].user.exec")]
#[case::auth_provider(
    "",
    "auth-provider: {name: gcp, config: {cmd-path: touch, cmd-args: MARKER}}",
    "users[].user.auth-provider"
)]
#[case::token_file("", "tokenFile: FILE", "users[].user.tokenFile")]
#[case::token_file_beside_a_token("", "token: t, tokenFile: FILE", "users[].user.tokenFile")]
#[case::client_certificate(
    "",
    "client-certificate: FILE, client-key-data: a2V5",
    "users[].user.client-certificate"
)]
#[case::client_key("", "client-certificate-data: Y2VydA==, client-key: FILE", "users[].user.client-key")]
#[case::user_and_password("", "username: admin, password: secret", "users[].user.password")]
#[case::impersonated_user("", "token: t, as: system:admin", "users[].user.as")]
#[case::impersonated_uid("", "token: t, as-uid: '1'", "users[].user.as-uid")]
#[case::impersonated_groups("", "token: t, as-groups: ['system:masters']", "users[].user.as-groups")]
#[case::impersonated_extra("", "token: t, as-user-extra: {a: [b]}", "users[].user.as-user-extra")]
#[case::unknown_user_field("", "token: t, cloud-token: x", "users[].user.cloud-token")]
#[case::certificate_authority(
    ", certificate-authority: FILE",
    "token: t",
    "clusters[].cluster.certificate-authority"
)]
#[case::no_verification(
    ", insecure-skip-tls-verify: true",
    "token: t",
    "clusters[].cluster.insecure-skip-tls-verify"
)]
#[case::proxy(", proxy-url: 'http://SERVER'", "token: t", "clusters[].cluster.proxy-url")]
#[case::unknown_cluster_field(", load-from: FILE", "token: t", "clusters[].cluster.load-from")]
#[tokio::test]
async fn a_field_that_is_more_than_data_is_refused_by_its_name(
    #[case] cluster: &str,
    #[case] user: &str,
    #[case] field: &str,
) {
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap().to_string();
    let place = std::env::temp_dir().join(format!("capstan-kubeconfig-{}", address.replace(':', "-")));
    std::fs::create_dir_all(&place).unwrap();
    let (marker, file) = (place.join("marker"), place.join("file"));
    std::fs::write(&file, KNOWN).unwrap();
    let fill = |text: &str| {
        text.replace("MARKER", &marker.display().to_string())
            .replace("FILE", &file.display().to_string())
            .replace("SERVER", &address)
    };
    let text = kubeconfig(&format!("https://{address}"), &fill(cluster), &fill(user));
    let reason = config(&text).await.unwrap_err();
    assert!(reason.contains(&format!("field {field} is not allowed")), "{reason}");
    assert!(!reason.contains(KNOWN) && !reason.contains("MARKER"), "{reason}");
    assert!(!marker.exists(), "a process was started");
    assert!(server.accept().now_or_never().is_none(), "the server was called");
    std::fs::remove_dir_all(&place).unwrap();
}

#[rstest]
#[case::plain_text("http://127.0.0.1:1")]
#[case::no_scheme("127.0.0.1:6443")]
#[case::path_only("/run/api.sock")]
#[case::user_in_the_address("https://a:b@127.0.0.1:1")]
#[case::query("https://127.0.0.1:1/?x=")]
#[case::another_scheme("unix:///run/api.sock")]
#[tokio::test]
async fn a_server_is_reached_over_tls_only(#[case] server: &str) {
    let reason = config(&kubeconfig(server, "", "token: t")).await.unwrap_err();
    assert!(reason.contains("clusters[].cluster.server must be https"), "{reason}");
}

#[rstest]
#[case::not_yaml("token: [very-secret", "not valid")]
#[case::no_context("users: [{name: u, user: {token: very-secret}}]", "current-context")]
#[case::no_user(
    "current-context: c\ncontexts: [{name: c, context: {cluster: c, user: v}}]\nclusters: [{name: c, cluster: {server: 'https://a'}}]\n\
     users: [{name: u, user: {token: very-secret}}]",
    "context.user names no user"
)]
#[case::no_credentials(&kubeconfig("https://a", "", ""), "neither client-certificate-data nor token")]
#[case::no_key(&kubeconfig("https://a", "", "client-certificate-data: very-secret"), "need each other")]
#[case::bad_authority(&kubeconfig("https://a", ", certificate-authority-data: very-secret", "token: t"), "certificate-authority-data")]
#[tokio::test]
async fn a_kubeconfig_that_cannot_be_used_is_explained_without_its_values(#[case] text: &str, #[case] expected: &str) {
    let reason = config(text).await.unwrap_err();
    assert!(reason.contains(expected) && !reason.contains("very-secret"), "{reason}");
}

#[tokio::test]
async fn only_the_allowed_fields_reach_the_client() {
    let empty = ", insecure-skip-tls-verify: false, proxy-url: '', extensions: [{name: x, extension: {}}], tls-server-name: api";
    let user = "token: 12345, tokenFile: '', as-groups: [], client-certificate-data: Y2VydA==, client-key-data: a2V5";
    let config = config(&kubeconfig("https://10.0.0.1:6443/k8s", empty, user))
        .await
        .unwrap();
    assert_eq!(config.cluster_url, "https://10.0.0.1:6443/k8s");
    assert_eq!(config.tls_server_name.as_deref(), Some("api"));
    assert!(!config.accept_invalid_certs && config.root_cert_file.is_none());
    let user = serde_json::to_value(&config.auth_info).unwrap();
    let set: Vec<&String> = user
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, value)| is_set(value))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(set, ["token", "client-certificate-data", "client-key-data"]);
}

fn secret(type_: Option<&str>, label: Option<&str>, key: &str) -> Secret {
    let mut secret = Secret {
        type_: type_.map(str::to_owned),
        data: Some([(key.to_owned(), ByteString(b"text".to_vec()))].into()),
        ..Secret::default()
    };
    secret.metadata.labels = label.map(|name| [(CLUSTER_LABEL.to_owned(), name.to_owned())].into());
    secret
}

#[rstest]
#[case::as_cluster_api_makes_it(secret(Some(SECRET_TYPE), Some("c"), "value"), Ok("text"))]
#[case::opaque(
    secret(Some("Opaque"), Some("c"), "value"),
    Err("its type must be cluster.x-k8s.io/secret")
)]
#[case::no_type(secret(None, Some("c"), "value"), Err("its type must be cluster.x-k8s.io/secret"))]
#[case::no_label(
    secret(Some(SECRET_TYPE), None, "value"),
    Err("its label cluster.x-k8s.io/cluster-name must be c")
)]
#[case::of_another_cluster(secret(Some(SECRET_TYPE), Some("d"), "value"), Err("cluster-name must be c"))]
#[case::another_key(secret(Some(SECRET_TYPE), Some("c"), "kubeconfig"), Err("has no key value"))]
fn a_secret_must_be_one_of_cluster_api(#[case] secret: Secret, #[case] expected: Result<&str, &str>) {
    let key = ClusterKey {
        namespace: "ns".to_owned(),
        name: "c".to_owned(),
    };
    match (of_secret(&secret, &key), expected) {
        (Ok(text), Ok(expected)) => assert_eq!(text, expected),
        (Err(reason), Err(expected)) => {
            assert!(
                reason.starts_with("Secret ns/c-kubeconfig ") && reason.contains(expected),
                "{reason}"
            );
        }
        (other, _) => panic!("{other:?}"),
    }
}

#[test]
fn a_secret_is_kept_in_a_bounded_number_of_bytes_and_a_large_kubeconfig_is_refused() {
    let key = ClusterKey {
        namespace: "ns".to_owned(),
        name: "c".to_owned(),
    };
    for (bytes, is_used) in [(LARGEST, true), (LARGEST + 1, false), (1 << 20, false)] {
        let mut large = secret(Some(SECRET_TYPE), Some("c"), SECRET_KEY);
        let data = large.data.get_or_insert_default();
        data.insert(SECRET_KEY.to_owned(), ByteString(vec![b'x'; bytes]));
        data.insert("other".to_owned(), ByteString(vec![b'x'; 1 << 20]));
        trim(&mut large);
        let kept: usize = large.data.iter().flatten().map(|(_, value)| value.0.len()).sum();
        assert!(kept <= LARGEST + 1, "{kept} bytes");
        let used = of_secret(&large, &key);
        assert_eq!(used.is_ok(), is_used);
        assert!(is_used || used.is_err_and(|reason| reason.contains("more than 65536 bytes")));
    }
}
