use super::*;
use crate::bounds::Unbounded;
use crate::context::Options;
use crate::{cache, stub};
use capstan_core::Memory;
use http::{Request, Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use tower::BoxError;

fn nowhere() -> Context {
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    Context::new(nowhere, Options::default()).unwrap()
}

async fn until(what: impl Fn() -> bool) {
    let waiting = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), waiting).await.unwrap();
}

#[tokio::test]
async fn the_connection_of_a_cluster_whose_object_is_gone_is_closed() {
    // Any kind will do for the Cluster objects: one of the two is deleted, and then nothing more happens.
    let (client, _) = stub::client(|request| match request {
        0 => Some((200, stub::config_maps(&["gone", "kept"]))),
        1 => Some((
            200,
            json!({"type": "DELETED", "object": {"kind": "ConfigMap", "apiVersion": "v1",
                "metadata": {"name": "gone", "namespace": "default", "resourceVersion": "2"}}}),
        )),
        _ => None,
    });
    let context = nowhere();
    let workloads = Workloads::new(&context);
    for name in ["gone", "kept"] {
        workloads.cluster("default", name);
    }
    let shutdown = context.shutdown.clone();
    let objects = Cache::<ConfigMap>::start(Api::all(client), watcher::Config::default(), cache::trim, shutdown);
    workloads.forget_with(&objects);
    let known = || {
        let clusters = workloads.0.clusters.lock();
        clusters.keys().map(|key| key.name.clone()).collect::<Vec<_>>()
    };
    until(|| known() == ["kept"]).await;
    context.shutdown.cancel();
}

/// An API server with `total` Nodes, which it lists in pages; and how many lists it was asked for.
fn many_nodes(total: usize) -> (kube::Client, Arc<AtomicUsize>) {
    nodes_of(
        total,
        usize::MAX,
        |n| json!({"metadata": {"name": format!("n{n}")}, "spec": {"providerID": format!("azure:///n{n}")}}),
    )
}

/// As [`many_nodes`], with these Nodes; a page of more than `largest` is beyond the bounds.
fn nodes_of(
    total: usize,
    largest: usize,
    node: impl Fn(usize) -> Value + Copy + Send + Sync + 'static,
) -> (kube::Client, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let number = |name: &str| {
            let part = query.split('&').find_map(|part| part.strip_prefix(name));
            part.and_then(|value| value.parse::<usize>().ok())
        };
        let (from, watch) = (number("continue=").unwrap_or(0), query.contains("watch=true"));
        counted.fetch_add(usize::from(!watch), Ordering::SeqCst);
        let to = (from + number("limit=").unwrap_or(total)).min(total);
        async move {
            if watch {
                return std::future::pending().await;
            }
            if to - from > largest {
                return Err(Unbounded::TooLarge.into());
            }
            let next = if to < total { to.to_string() } else { String::new() };
            let list = json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1", "continue": next},
                "items": (from..to).map(node).collect::<Vec<_>>()});
            Ok::<_, BoxError>(Response::new(Body::from(list.to_string().into_bytes())))
        }
    });
    (kube::Client::new(service, "default"), count)
}

fn cluster_of(context: &Context, client: &kube::Client) -> (Cluster, Arc<Connection>) {
    cluster_in("ns", context, client)
}

fn cluster_in(namespace: &str, context: &Context, client: &kube::Client) -> (Cluster, Arc<Connection>) {
    let key = ClusterKey {
        namespace: namespace.to_owned(),
        name: "c".to_owned(),
    };
    let clients = (client.clone(), client.clone());
    let connection = Connection::with_clients(context, &key, clients, &Events::default());
    let (_, state) = watch::channel(State::Up(connection.clone()));
    (Cluster { key, state }, connection)
}

#[tokio::test]
async fn a_cluster_with_100_000_nodes_is_refused_and_costs_no_more_than_the_limit() {
    let (client, requests) = many_nodes(100_000);
    let context = nowhere();
    let (cluster, connection) = cluster_of(&context, &client);
    until(|| connection.nodes.is_overfull()).await;
    let pages = MAX_NODES / connection::PAGE as usize + 1;
    assert!(
        requests.load(Ordering::SeqCst) <= pages,
        "the list is not read to its end"
    );
    assert_eq!(connection.nodes.store().len(), 0);
    let Lookup::Unreachable(reason) = cluster.by_provider_id("azure:///n1").await else {
        panic!("it must be refused")
    };
    assert!(reason.contains("more than 10000 Nodes"), "{reason}");
    assert!(cluster.live_provider_ids().await.is_err());
    assert!(requests.load(Ordering::SeqCst) <= pages, "a lookup costs no request");
    context.shutdown.cancel();
}

#[tokio::test]
async fn a_large_cluster_within_the_limit_is_listed_in_pages() {
    let (client, requests) = many_nodes(1_234);
    let context = nowhere();
    let (cluster, connection) = cluster_of(&context, &client);
    assert!(matches!(
        cluster.by_provider_id("AZURE:///N1233").await,
        Lookup::Found(_)
    ));
    assert!(matches!(
        cluster.by_provider_id("azure:///n1234").await,
        Lookup::Missing
    ));
    assert_eq!(connection.nodes.store().len(), 1_234);
    let before = requests.load(Ordering::SeqCst);
    assert_eq!(cluster.live_provider_ids().await.unwrap().len(), 1_234);
    let pages = 1_234_usize.div_ceil(connection::PAGE as usize);
    assert_eq!(requests.load(Ordering::SeqCst) - before, pages);
    context.shutdown.cancel();
}

#[tokio::test]
async fn a_cluster_whose_nodes_have_too_much_text_is_refused() {
    // Within all limits of one Node.
    let (client, requests) = nodes_of(10_000, usize::MAX, |n| {
        let taints = vec![json!({"key": "x".repeat(1_000), "effect": "NoSchedule"}); 7];
        json!({"metadata": {"name": format!("n{n}"), "uid": "u".repeat(100)}, "spec": {"taints": taints}})
    });
    let context = nowhere();
    let (cluster, connection) = cluster_of(&context, &client);
    until(|| connection.nodes.is_overfull()).await;
    assert_eq!(connection.nodes.store().len(), 0);
    let most = connection::NODES_BYTES / 7_000 / connection::PAGE as usize + 1;
    assert!(
        requests.load(Ordering::SeqCst) <= most,
        "the list is not read to its end"
    );
    assert!(matches!(cluster.by_name("n1").await, Lookup::Unreachable(_)));
    context.shutdown.cancel();
}

/// A context with memory for about so many Nodes.
fn with_memory_for(nodes: usize) -> Context {
    let memory = Arc::new(Memory::new(nodes * (size_of::<Node>() + 800)));
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let options = Options {
        memory,
        ..Options::default()
    };
    Context::new(nowhere, options).unwrap()
}

#[tokio::test]
async fn a_tenant_with_too_many_nodes_gives_its_memory_to_another_one_that_does_not_notice() {
    let context = with_memory_for(4_000);
    let (large, _) = many_nodes(3_500);
    let (hog, hogs) = cluster_in("hog", &context, &large);
    hogs.nodes.ready().await.unwrap();
    assert_eq!(hogs.nodes.store().len(), 3_500);
    assert!(matches!(hog.by_provider_id("azure:///n1").await, Lookup::Found(_)));
    let (small, _) = many_nodes(1_500);
    let (good, goods) = cluster_in("good", &context, &small);
    goods.nodes.ready().await.unwrap();
    assert!(matches!(good.by_provider_id("azure:///n1499").await, Lookup::Found(_)));
    assert_eq!(good.live_provider_ids().await.unwrap().len(), 1_500);
    until(|| hogs.nodes.is_overfull()).await;
    until(|| hogs.nodes.store().is_empty()).await;
    // A node that is not in the cache any more is not missing.
    let Lookup::Unreachable(reason) = hog.by_provider_id("azure:///n1").await else {
        panic!("nobody knows whether it is there")
    };
    assert!(
        reason.contains("--foreign-memory") && reason.contains("hog"),
        "{reason}"
    );
    assert!(hog.live_provider_ids().await.is_err());
    assert!(!goods.nodes.is_overfull() && goods.nodes.trouble().is_none());
    drop((good, goods));
    context.shutdown.cancel();
}

#[tokio::test]
async fn the_clusters_of_one_tenant_have_one_memory_together() {
    let context = with_memory_for(2_000);
    let (client, _) = many_nodes(1_500);
    let (_one, first) = cluster_in("ns", &context, &client);
    first.nodes.ready().await.unwrap();
    let (two, second) = cluster_in("ns", &context, &client);
    until(|| second.nodes.is_overfull()).await;
    assert_eq!((first.nodes.store().len(), second.nodes.store().len()), (1_500, 0));
    assert!(matches!(two.by_name("n1").await, Lookup::Unreachable(_)));
    assert!(context.memory.held() <= context.memory.limit() * 3 / 4 + (16 << 10));
    context.shutdown.cancel();
}

#[tokio::test]
async fn a_node_whose_name_kubernetes_does_not_allow_is_left_out() {
    let (client, _) = nodes_of(3, usize::MAX, |n| {
        let long = |is: bool| if is { "x".repeat(70_000) } else { format!("n{n}") };
        json!({"metadata": {"name": long(n == 1), "uid": long(n == 2)}})
    });
    let context = nowhere();
    let (_, connection) = cluster_of(&context, &client);
    connection.nodes.ready().await.unwrap();
    let names: Vec<_> = connection
        .nodes
        .store()
        .state()
        .iter()
        .map(|node| node.name_any())
        .collect();
    assert_eq!(names, ["n0"]);
    context.shutdown.cancel();
}

#[tokio::test]
async fn a_page_that_is_too_large_is_asked_for_again_with_fewer_nodes() {
    let largest = 7;
    let (client, requests) = nodes_of(
        100,
        largest,
        |n| json!({"metadata": {"name": format!("n{n}")}, "spec": {"providerID": format!("azure:///n{n}")}}),
    );
    let context = nowhere();
    let (cluster, connection) = cluster_of(&context, &client);
    connection.nodes.ready().await.unwrap();
    assert_eq!(connection.nodes.store().len(), 100);
    // 50, 25 and 12 are too many, 6 are not.
    let expected = 3 + 100_usize.div_ceil(6);
    assert_eq!(requests.load(Ordering::SeqCst), expected);
    assert_eq!(cluster.live_provider_ids().await.unwrap().len(), 100);
    assert_eq!(requests.load(Ordering::SeqCst), 2 * expected);
    context.shutdown.cancel();
}
