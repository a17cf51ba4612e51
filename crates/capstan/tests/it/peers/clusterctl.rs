//! The real clusterctl with the providers of deploy/clusterctl: install, templates, upgrade, and the move of running machines to
//! another cluster.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use capstan_testkit::{ControlPlane, Options, parts};
use serde_json::{Value, json};

use crate::program::{LIMIT, Started, Up, build_parts, capstan, kubectl, kubectl_until, scratch, signal, wait};

const PROVIDERS: [(&str, &str); 2] = [("capstan-azure-pools", "azure-pools"), ("capstan-vsphere", "vsphere")];
/// clusterctl asks for cert-manager before it installs anything, and finds it by the kinds that it can create objects of.
const CERT_MANAGER: &str = "
{kind: CustomResourceDefinition, apiVersion: apiextensions.k8s.io/v1, metadata: {name: issuers.cert-manager.io}, spec: {
  group: cert-manager.io, scope: Namespaced, names: {kind: Issuer, plural: issuers}, versions: [{name: v1, served: true, storage: true,
  schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}
---
{kind: CustomResourceDefinition, apiVersion: apiextensions.k8s.io/v1, metadata: {name: certificates.cert-manager.io}, spec: {
  group: cert-manager.io, scope: Namespaced, names: {kind: Certificate, plural: certificates}, versions: [{name: v1, served: true, storage: true,
  schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}
";
/// Cluster API core as far as clusterctl needs it: its namespace and its kinds, without a manager.
const CORE: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: capi-system}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: capi-controller-manager, namespace: capi-system}
spec:
  replicas: 0
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec: {containers: [{name: manager, image: localhost/none:v1}]}
";
const CORE_METADATA: &str = "
apiVersion: clusterctl.cluster.x-k8s.io/v1alpha3
kind: Metadata
releaseSeries: [{major: 1, minor: 14, contract: v1beta2}]
";

/// A folder that clusterctl installs providers from, and the program itself.
struct Repository {
    dir: PathBuf,
    program: PathBuf,
}

impl Repository {
    /// Writes the repository with two versions of Capstan.
    async fn write(dir: PathBuf) -> Result<Self> {
        build_parts().await?;
        tokio::task::spawn_blocking(move || {
            let kubectl = parts::KUBECTL.path()?;
            for version in ["v0.1.1", "v0.1.0"] {
                let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/clusterctl/release.sh");
                let out = Command::new(script)
                    .env("KUBECTL", &kubectl)
                    .arg(&dir)
                    .arg(version)
                    .output()?;
                ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            }
            let core = dir.join("cluster-api/v1.14.2");
            std::fs::create_dir_all(&core)?;
            let mut components = CORE.to_owned();
            for folder in [parts::CLUSTER_API_CRDS.path()?, parts::KUBEADM_CRDS.path()?] {
                let files = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
                for file in files.iter().map(std::fs::DirEntry::path) {
                    components.push_str("---\n");
                    components.push_str(&std::fs::read_to_string(file)?);
                }
            }
            std::fs::write(core.join("core-components.yaml"), components)?;
            std::fs::write(core.join("metadata.yaml"), CORE_METADATA)?;
            let config = dir.join("clusterctl.yaml");
            let mut text = std::fs::read_to_string(&config)?;
            let url = core.join("core-components.yaml");
            text.push_str(&format!(
                "- {{name: cluster-api, type: CoreProvider, url: {}}}\n",
                url.display()
            ));
            std::fs::write(config, text)?;
            Ok(Self {
                dir,
                program: parts::CLUSTERCTL.path()?,
            })
        })
        .await?
    }

    /// Runs clusterctl; returns everything that it wrote.
    async fn run(&self, kubeconfig: &Path, args: &[&str]) -> Result<String> {
        let mut command = tokio::process::Command::new(&self.program);
        command
            .args(args)
            .arg("--config")
            .arg(self.dir.join("clusterctl.yaml"))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .env("CLUSTERCTL_DISABLE_VERSIONCHECK", "true")
            .env("XDG_CONFIG_HOME", self.dir.join("xdg"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        for name in VARIABLES {
            command.env(name.0, name.1);
        }
        let out = command.output().await.context("cannot run clusterctl")?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "clusterctl {}: {text}", args.join(" "));
        println!("$ clusterctl {}\n{text}", args.join(" "));
        Ok(text)
    }

    /// Installs core and the providers.
    async fn init(&self, kubeconfig: &Path) -> Result<()> {
        apply(&self.dir, kubeconfig, CERT_MANAGER).await?;
        for kind in ["issuers", "certificates"] {
            let definition = format!("crd/{kind}.cert-manager.io");
            kubectl(
                kubeconfig,
                &["wait", "--for=condition=Established", "--timeout=300s", &definition],
            )
            .await?;
        }
        let providers = PROVIDERS.map(|(name, _)| format!("{name}:v0.1.0")).join(",");
        let args = [
            "init",
            "--core=cluster-api:v1.14.2",
            "--bootstrap=-",
            "--control-plane=-",
            "--infrastructure",
            &providers,
        ];
        let text = self.run(kubeconfig, &args).await?;
        ensure!(text.contains("initialized successfully"), "{text}");
        Ok(())
    }
}

/// What the templates need.
const VARIABLES: [(&str, &str); 16] = [
    ("AZURE_CLIENT_ID", "00000000-0000-0000-0000-000000000003"),
    ("AZURE_LOCATION", "eastus"),
    ("AZURE_SUBSCRIPTION_ID", "00000000-0000-0000-0000-000000000001"),
    ("AZURE_TENANT_ID", "00000000-0000-0000-0000-000000000002"),
    ("CONTROL_PLANE_ENDPOINT_HOST", "10.0.0.1"),
    ("CONTROL_PLANE_ENDPOINT_IP", "10.0.0.1"),
    ("VSPHERE_DATACENTER", "DC0"),
    ("VSPHERE_DATASTORE", "LocalDS_0"),
    ("VSPHERE_FOLDER", "/DC0/vm"),
    ("VSPHERE_NETWORK", "DC0_DVPG0"),
    ("VSPHERE_PASSWORD", "secret"),
    ("VSPHERE_RESOURCE_POOL", "/DC0/host/DC0_C0/Resources"),
    ("VSPHERE_SERVER", "vcenter.example.com"),
    ("VSPHERE_SSH_AUTHORIZED_KEY", "ssh-ed25519 AAAA"),
    ("VSPHERE_TEMPLATE", "ubuntu"),
    ("VSPHERE_USERNAME", "administrator@vsphere.local"),
];

async fn apply(dir: &Path, kubeconfig: &Path, text: &str) -> Result<()> {
    let file = dir.join("applied.yaml");
    std::fs::write(&file, text)?;
    let file = file.display().to_string();
    kubectl(kubeconfig, &["apply", "--server-side", "-f", &file]).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds and runs clusterctl: just peers"]
async fn clusterctl_installs_the_providers_fills_their_templates_and_upgrades_them() -> Result<()> {
    let repository = Repository::write(scratch("clusterctl")).await?;
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let kubeconfig = plane.kubeconfig();
    repository.init(kubeconfig).await?;
    for (provider, controller) in PROVIDERS {
        let (namespace, args) = (
            format!("{provider}-system"),
            "jsonpath={..containers[?(@.name==\"manager\")].args}",
        );
        let args = kubectl(
            kubeconfig,
            &["get", "deployment", "capstan", "-n", &namespace, "-o", args],
        )
        .await?;
        ensure!(args.contains(&format!("--controllers={controller}")), "{args}");
    }
    let labelled = [
        "get",
        "crd",
        "-l",
        "clusterctl.cluster.x-k8s.io,cluster.x-k8s.io/provider",
        "-o",
        "name",
    ];
    let labelled = kubectl(kubeconfig, &labelled).await?;
    for crd in capstan_api::crds()
        .iter()
        .filter(|crd| crd.spec.group.ends_with("cluster.x-k8s.io"))
    {
        let name = format!("{}.{}", crd.spec.names.plural, crd.spec.group);
        ensure!(labelled.contains(&name), "clusterctl does not know {name}");
    }

    kubectl(kubeconfig, &["create", "namespace", "team-a"]).await?;
    let templates: [(&str, &[&str], &[&str]); 3] = [
        (
            "capstan-azure-pools",
            &[],
            &["AzureMachinePool", "KubeadmConfig", "AzureClusterIdentity"],
        ),
        (
            "capstan-vsphere",
            &[],
            &["VSphereMachineTemplate", "KubeadmControlPlane", "MachineDeployment"],
        ),
        (
            "capstan-vsphere",
            &["--flavor", "topology"],
            &["ClusterClass", "VSphereClusterTemplate", "KubeadmControlPlaneTemplate"],
        ),
    ];
    for (provider, flavor, kinds) in templates {
        let provider = format!("{provider}:v0.1.0");
        let mut args = vec![
            "generate",
            "cluster",
            "one",
            "--infrastructure",
            &provider,
            "--target-namespace",
            "team-a",
        ];
        args.extend(["--kubernetes-version", "v1.36.3"]);
        args.extend(["--control-plane-machine-count", "3", "--worker-machine-count", "2"]);
        args.extend(flavor);
        let text = repository.run(kubeconfig, &args).await?;
        for kind in kinds {
            ensure!(
                text.contains(&format!("kind: {kind}\n")),
                "no {kind} in {provider} {flavor:?}:\n{text}"
            );
        }
        let file = repository.dir.join("generated.yaml");
        std::fs::write(&file, &text)?;
        let file = file.display().to_string();
        // Fields that no schema knows are errors.
        let strict = [
            "apply",
            "--server-side",
            "--validate=strict",
            "--dry-run=server",
            "-f",
            &file,
        ];
        kubectl(kubeconfig, &strict)
            .await
            .with_context(|| format!("{provider} {flavor:?}"))?;
    }

    let plan = repository.run(kubeconfig, &["upgrade", "plan"]).await?;
    for (provider, _) in PROVIDERS {
        let line = plan.lines().find(|line| line.contains(provider));
        ensure!(line.is_some_and(|line| line.contains("v0.1.1")), "{plan}");
    }
    let newer = PROVIDERS.map(|(name, _)| format!("{name}:v0.1.1")).join(",");
    repository
        .run(kubeconfig, &["upgrade", "apply", "--infrastructure", &newer])
        .await?;
    for (provider, _) in PROVIDERS {
        let namespace = format!("{provider}-system");
        let image = [
            "get",
            "deployment",
            "capstan",
            "-n",
            &namespace,
            "-o",
            "jsonpath={..image}",
        ];
        ensure!(kubectl(kubeconfig, &image).await? == "localhost/capstan:0.1.1");
    }
    std::fs::remove_dir_all(&repository.dir)?;
    Ok(())
}

/// The objects of the kinds that clusterctl moves, by kind, namespace and name: their spec's provider id, if they have one.
async fn moved_objects(kubeconfig: &Path, namespaces: &[&str]) -> Result<BTreeMap<String, String>> {
    let crds = [
        "get",
        "crd",
        "-l",
        "clusterctl.cluster.x-k8s.io",
        "-o",
        "jsonpath={.items[*].metadata.name}",
    ];
    let crds = kubectl(kubeconfig, &crds).await?;
    let mut kinds: Vec<&str> = crds
        .split_whitespace()
        .filter(|name| !name.starts_with("providers."))
        .collect();
    kinds.push("secrets");
    let kinds = kinds.join(",");
    let mut found = BTreeMap::new();
    for namespace in namespaces {
        let list: Value =
            serde_json::from_str(&kubectl(kubeconfig, &["get", &kinds, "-n", namespace, "-o", "json"]).await?)?;
        for object in list["items"].as_array().context("no list")? {
            let meta = &object["metadata"];
            // Cluster-wide objects stay at the source, too.
            if meta["namespace"].is_null() {
                continue;
            }
            let name = format!("{} {namespace}/{}", text(&object["kind"]), text(&meta["name"]));
            found.insert(name, text(&object["spec"]["providerID"]).to_owned());
        }
    }
    Ok(found)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Does for the examples what Cluster API core does before `clusterctl move` accepts a cluster: machines belong to their
/// Cluster and have Nodes, and control planes are up.
async fn play_core(kubeconfig: &Path) -> Result<()> {
    for (namespace, cluster, machines) in [
        ("default", "azure-demo", &["machinepool/workers"][..]),
        (
            "vsphere",
            "shipyard",
            &[
                "machines.cluster.x-k8s.io/dock-plain",
                "machines.cluster.x-k8s.io/dock-with-disks",
            ],
        ),
    ] {
        let uid = [
            "get",
            "cluster",
            cluster,
            "-n",
            namespace,
            "-o",
            "jsonpath={.metadata.uid}",
        ];
        let uid = kubectl(kubeconfig, &uid).await?;
        let owner = json!({"apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "Cluster", "name": cluster, "uid": uid});
        let owned =
            json!({"metadata": {"ownerReferences": [owner], "labels": {"cluster.x-k8s.io/cluster-name": cluster}}})
                .to_string();
        for machine in machines {
            kubectl(
                kubeconfig,
                &["patch", machine, "-n", namespace, "--type=merge", "-p", &owned],
            )
            .await?;
            let joined = json!({"status": {"nodeRef": {"name": "a-node"}}}).to_string();
            if machine.starts_with("machines") {
                let patch = [
                    "patch",
                    machine,
                    "-n",
                    namespace,
                    "--subresource=status",
                    "--type=merge",
                    "-p",
                    &joined,
                ];
                kubectl(kubeconfig, &patch).await?;
            }
        }
        let condition = json!({"type": "ControlPlaneInitialized", "status": "True", "reason": "Initialized", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"status": {"conditions": [condition]}}).to_string();
        let patch = [
            "patch",
            "cluster",
            cluster,
            "-n",
            namespace,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ];
        kubectl(kubeconfig, &patch).await?;
    }
    Ok(())
}

/// Returns a kubeconfig of the account that clusterctl has installed for a provider.
async fn account(plane: &ControlPlane, dir: &Path, provider: &str) -> Result<PathBuf> {
    let namespace = format!("{provider}-system");
    let token = plane
        .kubectl(&["create", "token", "capstan", "-n", &namespace, "--duration=1h"])
        .await?;
    let mut config: Value = serde_saphyr::from_str(&std::fs::read_to_string(plane.kubeconfig())?)?;
    config["users"][0]["user"] = json!({"token": token.trim()});
    config["contexts"][0]["context"]["namespace"] = json!(namespace);
    let file = dir.join(format!("{provider}.kubeconfig"));
    std::fs::write(&file, config.to_string())?;
    Ok(file)
}

/// Starts Capstan as a provider's Deployment does, with the rights that the provider's components give it.
async fn start_provider(
    plane: &ControlPlane,
    dir: &Path,
    clouds: &BTreeMap<String, String>,
    (provider, controller): (&str, &str),
) -> Result<(Started, PathBuf)> {
    let log = dir.join(format!("{provider}.log"));
    let mut command = capstan();
    command
        .args(["run", "--log-format=json", "--controllers", controller])
        .args(["--health=0", "--metrics=0", "--webhook=0"])
        .arg("--kubeconfig")
        .arg(account(plane, dir, provider).await?)
        .args(["--azure-ca-file", &clouds["AZURE_CA_FILE"]])
        .args(["--vcenter-servers", &clouds["VSPHERE_SERVER"]])
        .env("POD_NAMESPACE", format!("{provider}-system"))
        .env(
            "AZURE_RESOURCE_MANAGER_ENDPOINT",
            &clouds["AZURE_RESOURCE_MANAGER_ENDPOINT"],
        )
        .env("AZURE_AUTHORITY_HOST", &clouds["AZURE_AUTHORITY_HOST"])
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?);
    Ok((Started(command.spawn()?), log))
}

/// What the clouds were asked to change: requests to Azure that are no reads, and calls of vCenter that make or remove VMs.
async fn changes(clouds: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let client = azure(clouds)?;
    let url = format!("{}/sim/requests", clouds["AZURE_RESOURCE_MANAGER_ENDPOINT"]);
    let requests: Value = client.get(url).send().await?.error_for_status()?.json().await?;
    let requests = requests["value"].as_array().context("no requests")?;
    let writes = requests.iter().filter(|request| {
        let is_read = matches!(text(&request["method"]), "GET" | "HEAD");
        !is_read && text(&request["policy"]) != "SignIn"
    });
    let mut changes: Vec<String> = writes
        .map(|request| format!("{} {}", text(&request["method"]), text(&request["path"])))
        .collect();
    let counters = client
        .get(format!("{}/counters", clouds["VSPHERE_ADMIN"]))
        .send()
        .await?;
    let counters: BTreeMap<String, u64> = counters.error_for_status()?.json().await?;
    for method in [
        "CloneVM_Task",
        "Destroy_Task",
        "PowerOffVM_Task",
        "UnregisterVM",
        "ReconfigVM_Task",
    ] {
        changes.push(format!(
            "{method} {}",
            counters.get(method).copied().unwrap_or_default()
        ));
    }
    Ok(changes)
}

/// Takes all rights in Azure away but those of deploy/azure/role-pools.json.
async fn allow_role_only(clouds: &BTreeMap<String, String>) -> Result<()> {
    let role: Value = serde_json::from_str(include_str!("../../../../../deploy/azure/role-pools.json"))?;
    let url = format!("{}/sim/settings", clouds["AZURE_RESOURCE_MANAGER_ENDPOINT"]);
    let settings = json!({"allowedActions": role["Actions"]});
    azure(clouds)?
        .patch(url)
        .json(&settings)
        .send()
        .await?
        .error_for_status()?;
    Ok(())
}

/// A client that trusts the simulated Azure.
fn azure(clouds: &BTreeMap<String, String>) -> Result<reqwest::Client> {
    let ca = reqwest::Certificate::from_pem(&std::fs::read(&clouds["AZURE_CA_FILE"])?)?;
    Ok(reqwest::Client::builder().add_root_certificate(ca).no_proxy().build()?)
}

/// Returns the version in which the API server stores a kind: nobody converts here, as nothing routes to the Service of the webhook.
fn stored_version(plural: &str) -> Result<String> {
    let crds = capstan_api::crds();
    let crd = crds
        .iter()
        .find(|crd| crd.spec.names.plural == plural)
        .context("no such kind")?;
    let version = crd
        .spec
        .versions
        .iter()
        .find(|version| version.storage)
        .context("nothing stored")?;
    Ok(version.name.clone())
}

const IDENTITY: &str = "
apiVersion: v1
kind: Secret
metadata: {name: shared, namespace: capstan-vsphere-system}
stringData: {username: 'USERNAME', password: 'PASSWORD'}
---
apiVersion: infrastructure.cluster.x-k8s.io/VERSION
kind: VSphereClusterIdentity
metadata: {name: shared}
spec: {secretName: shared, allowedNamespaces: {selector: {}}}
";

/// Waits until every machine of the examples is ready.
async fn until_ready(kubeconfig: &Path) -> Result<()> {
    for (kind, namespace, count) in [
        ("azuremachinepools", "default", 1),
        ("azuremachinepoolmachines", "default", 5),
        ("vspheremachines", "vsphere", 2),
        ("vspherevms", "vsphere", 2),
    ] {
        let ready = "jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}";
        let all = ["True"].repeat(count).join(" ");
        kubectl_until(kubeconfig, &["get", kind, "-n", namespace, "-o", ready], |answer| {
            answer == all
        })
        .await?;
    }
    Ok(())
}

/// `capstan up` has pointed the definitions at its own address. clusterctl adds that of a Service, and the API server refuses both.
async fn forget_converter(kubeconfig: &Path) -> Result<()> {
    let none = r#"{"spec":{"conversion":{"strategy":"None","webhook":null}}}"#;
    let crds = capstan_api::crds();
    for crd in crds.iter().filter(|crd| crd.spec.conversion.is_some()) {
        let name = format!("crd/{}.{}", crd.spec.names.plural, crd.spec.group);
        kubectl(kubeconfig, &["patch", &name, "--type=merge", "-p", none]).await?;
    }
    Ok(())
}

const BLOCK_MOVE: &str = "clusterctl.cluster.x-k8s.io/block-move";

/// Lets a move go on that the annotation of a pool holds back. clusterctl pauses the cluster first, and then it waits.
async fn release(from: &Path, to: &Path) -> Result<()> {
    let paused = ["get", "cluster/azure-demo", "-o", "jsonpath={.spec.paused}"];
    kubectl_until(from, &paused, |paused| paused == "true").await?;
    let pools = kubectl(to, &["get", "azuremachinepools", "-A", "-o", "name"]).await?;
    ensure!(pools.is_empty(), "moved in spite of {BLOCK_MOVE}: {pools}");
    kubectl(
        from,
        &["annotate", "azuremachinepool/workers", &format!("{BLOCK_MOVE}-")],
    )
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "builds and runs clusterctl: just peers"]
async fn clusterctl_moves_running_machines_of_all_kinds_and_no_cloud_notices() -> Result<()> {
    let repository = Repository::write(scratch("move")).await?;
    let variables = [("POD_NAMESPACE", "capstan-vsphere-system")];
    let dir = repository.dir.join("source");
    let source = Up::start_with(&dir, &["--controllers", "azure-pools,vsphere"], &variables).await?;
    let from = source.kubeconfig();
    let target = ControlPlane::start(Options {
        kwok: false,
        ..Options::default()
    })
    .await?;
    let to = target.kubeconfig().to_owned();
    forget_converter(&from).await?;
    for kubeconfig in [&from, &to] {
        repository.init(kubeconfig).await?;
    }
    // clusterctl has bound the roles to its own installation; `capstan up` keeps them, too.
    for (_, controller) in PROVIDERS {
        for role in [format!("capstan-{controller}"), format!("capstan-{controller}-cluster")] {
            let (binding, role) = (format!("up-{role}"), format!("--clusterrole={role}"));
            let account = "--serviceaccount=capstan-system:capstan";
            kubectl(&from, &["create", "clusterrolebinding", &binding, &role, account]).await?;
        }
    }
    let clouds = std::fs::read_to_string(source.dir.join("clouds.env"))?;
    let clouds: BTreeMap<String, String> = clouds
        .lines()
        .filter_map(|line| line.trim_start_matches("export ").split_once('='))
        .map(|(name, value)| (name.to_owned(), value.trim_matches(['\'', '"']).to_owned()))
        .collect();
    let mut providers = Vec::new();
    for provider in PROVIDERS {
        providers.push(start_provider(&target, &repository.dir, &clouds, provider).await?);
    }

    until_ready(&from).await?;
    let identity = IDENTITY
        .replace("VERSION", &stored_version("vsphereclusteridentities")?)
        .replace("USERNAME", &clouds["VSPHERE_USERNAME"])
        .replace("PASSWORD", &clouds["VSPHERE_PASSWORD"]);
    apply(&repository.dir, &from, &identity).await?;
    // The identity owns its Secret, which moves with it.
    let owner = [
        "get",
        "secret",
        "shared",
        "-n",
        "capstan-vsphere-system",
        "-o",
        "jsonpath={..ownerReferences[*].kind}",
    ];
    kubectl_until(&from, &owner, |kind| kind == "VSphereClusterIdentity").await?;
    // Users label the Secrets that nothing in the cluster owns.
    for (namespace, secret) in [
        ("default", "azure-demo"),
        ("default", "azure-demo-bootstrap"),
        ("vsphere", "dock-bootstrap"),
    ] {
        let label = "clusterctl.cluster.x-k8s.io/move=true";
        kubectl(&from, &["label", "secret", secret, "-n", namespace, label]).await?;
    }
    play_core(&from).await?;
    let namespaces = ["default", "vsphere"];
    let before = moved_objects(&from, &namespaces).await?;
    let asked = changes(&clouds).await?;

    kubectl(
        &from,
        &["annotate", "azuremachinepool/workers", &format!("{BLOCK_MOVE}=")],
    )
    .await?;
    for namespace in namespaces {
        let path = to.display().to_string();
        let args = ["move", "--to-kubeconfig", &path, "--namespace", namespace];
        let moving = repository.run(&from, &args);
        let released = async {
            match namespace {
                "default" => release(&from, &to).await,
                _ => Ok(()),
            }
        };
        tokio::try_join!(moving, released)?;
    }
    let left = moved_objects(&from, &namespaces).await?;
    // The stand-in of the source for Cluster API core writes kubeconfigs again.
    let left: Vec<_> = left.keys().filter(|name| !name.ends_with("-kubeconfig")).collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    // Identities serve whole management clusters, and stay.
    kubectl(&from, &["get", "secret", "shared", "-n", "capstan-vsphere-system"]).await?;
    kubectl(&to, &["get", "secret", "shared", "-n", "capstan-vsphere-system"]).await?;
    kubectl(&to, &["get", "vsphereclusteridentity", "shared"]).await?;
    for (namespace, cluster) in [("default", "azure-demo"), ("vsphere", "shipyard")] {
        let initialization = json!({"infrastructureProvisioned": true, "controlPlaneInitialized": true});
        let status = json!({"status": {"initialization": initialization}}).to_string();
        let patch = [
            "patch",
            "cluster",
            cluster,
            "-n",
            namespace,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ];
        kubectl(&to, &patch).await?;
    }
    until_ready(&to).await?;
    let after = moved_objects(&to, &namespaces).await?;
    assert_eq!(before, after);
    assert_eq!(asked, changes(&clouds).await?, "a cloud was asked to change something");
    // The target has taken over: it makes a machine more, with no right in Azure but those of the documented role.
    allow_role_only(&clouds).await?;
    kubectl(&to, &["scale", "machinepool/workers", "--replicas=6"]).await?;
    let args = [
        "get",
        "azuremachinepoolmachines",
        "-o",
        "jsonpath={.items[*].status.ready}",
    ];
    kubectl_until(&to, &args, |ready| ready == "true true true true true true").await?;
    let tree = repository.run(&to, &["describe", "cluster", "azure-demo"]).await?;
    ensure!(
        tree.contains("AzureCluster default/azure-demo") && tree.contains("workers"),
        "{tree}"
    );
    let tree = repository
        .run(
            &to,
            &[
                "describe",
                "cluster",
                "shipyard",
                "-n",
                "vsphere",
                "--show-conditions=all",
            ],
        )
        .await?;
    ensure!(
        tree.contains("VSphereCluster vsphere/shipyard") && tree.contains("Machine vsphere/dock-plain"),
        "{tree}"
    );

    for (mut provider, log) in providers {
        signal(&provider.0, "-TERM")?;
        let status = wait(&mut provider.0, LIMIT)?;
        let log = std::fs::read_to_string(log)?;
        ensure!(status.success(), "{status}:\n{log}");
        let forbidden = log.lines().find(|line| line.contains("is forbidden"));
        ensure!(forbidden.is_none(), "the components lack a right: {forbidden:?}");
    }
    source.end("-TERM").await?;
    std::fs::remove_dir_all(&repository.dir)?;
    Ok(())
}
