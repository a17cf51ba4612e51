//! The image, written by `deploy/image.sh`, unpacked, and run as a pod of the Deployment runs it.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use capstan_testkit::{ControlPlane, Options, parts};
use serde_json::{Value, json};

use crate::deploy::{build, named};
use crate::program::{self, LIMIT, Started, kubectl, kubectl_until, scratch, signal, wait};

const ACCOUNT_FILES: &str = "var/run/secrets/kubernetes.io/serviceaccount";

fn succeed(command: &mut Command) -> Result<()> {
    let out = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{command:?}: {text}");
    Ok(())
}

/// Names the program of a release, built without `dev`, to put into the image instead of the one of the tests.
const BINARY: &str = "CAPSTAN_IMAGE_BINARY";
/// The most that an image with the program of a release may have compressed, in bytes: 13 MiB at the time of writing.
const LARGEST: u64 = 20 << 20;
/// Names the bill of materials of that program.
const SBOM: &str = "CAPSTAN_IMAGE_SBOM";
/// Where the image has it.
const SBOM_FILE: &str = "usr/share/doc/capstan/sbom.cdx.json";

/// Returns the paths of the files below a folder.
fn files(root: &Path, dir: &Path, found: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.symlink_metadata()?.is_dir() {
            files(root, &path, found)?;
        } else {
            found.push(path.strip_prefix(root)?.display().to_string());
        }
    }
    Ok(())
}

/// Whether a file is one of those that an image has: the program, the C library, certificates and their like.
fn belongs(path: &str) -> bool {
    let own = [
        "capstan",
        "etc/group",
        "etc/passwd",
        "etc/ssl/certs/ca-certificates.crt",
        SBOM_FILE,
    ];
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let libraries = ["ld-linux-", "libc.so.", "libgcc_s.so.", "libm.so."];
    let is_library = folder.contains("lib") && libraries.iter().any(|library| name.starts_with(library));
    own.contains(&path) || is_library
}

/// Returns the bill of materials for the image: that of the release, or a stand-in.
fn sbom(dir: &Path, release: bool) -> Result<std::path::PathBuf> {
    let Some(file) = std::env::var_os(SBOM).filter(|_| release) else {
        let file = dir.join("sbom.json");
        std::fs::write(&file, r#"{"bomFormat": "CycloneDX"}"#)?;
        return Ok(file);
    };
    let text = std::fs::read_to_string(&file)?;
    let bill: Value = serde_json::from_str(&text)?;
    let components = bill["components"].as_array().map_or(0, Vec::len);
    ensure!(
        components > 100 && text.contains("aws-lc-rs"),
        "{SBOM} has {components} components"
    );
    ensure!(
        !text.contains("capstan-sim"),
        "{SBOM} is not of the program without `dev`"
    );
    Ok(file.into())
}

/// Returns how many bytes the files of a folder have.
fn size(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        bytes += match entry.file_type()?.is_dir() {
            true => size(&entry.path())?,
            false => entry.metadata()?.len(),
        };
    }
    Ok(bytes)
}

/// Writes an image with this program into `dir` and unpacks it; returns the configuration that a runtime would use.
fn unpack(dir: &Path) -> Result<Value> {
    let release = std::env::var_os(BINARY);
    let umoci = parts::UMOCI.path()?;
    let binary = dir.join("capstan");
    // Most of a program with debug information is that.
    succeed(
        Command::new("strip")
            .arg("-o")
            .arg(&binary)
            .arg(release.as_deref().unwrap_or(env!("CARGO_BIN_EXE_capstan").as_ref())),
    )?;
    if release.is_some() {
        let up = Command::new(&binary).args(["up", "--help"]).output()?;
        ensure!(
            !up.status.success(),
            "the program of {BINARY} has the commands for development"
        );
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/image.sh");
    let layout = dir.join("layout");
    succeed(
        Command::new(script)
            .env("UMOCI", &umoci)
            .env("SBOM", sbom(dir, release.is_some())?)
            .arg(&binary)
            .arg(&layout)
            .arg("test"),
    )?;
    if release.is_some() {
        let bytes = size(&layout.join("blobs"))?;
        ensure!(bytes <= LARGEST, "the image has {bytes} bytes");
    }
    let image = format!("{}:test", layout.display());
    let unpacked = Command::new(&umoci)
        .args(["unpack", "--rootless", "--image", &image])
        .arg(dir.join("bundle"))
        .status()?;
    ensure!(unpacked.success(), "umoci cannot unpack the image");
    let config = std::fs::read_to_string(dir.join("bundle/config.json"))?;
    Ok(serde_json::from_str(&config)?)
}

/// Applies objects as one list.
async fn apply(plane: &ControlPlane, dir: &Path, objects: &[Value]) -> Result<()> {
    let file = dir.join("objects.json");
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    std::fs::write(&file, list.to_string())?;
    let file = file.display().to_string();
    plane.kubectl(&["apply", "--server-side", "-f", &file]).await?;
    Ok(())
}

/// Puts a service account's files where a kubelet mounts them.
async fn mount_account(plane: &ControlPlane, root: &Path) -> Result<()> {
    let text = std::fs::read_to_string(plane.kubeconfig())?;
    let kubeconfig: Value = serde_saphyr::from_str(&text)?;
    let ca = &kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"];
    let ca = base64::engine::general_purpose::STANDARD.decode(ca.as_str().context("no CA")?)?;
    let token = plane
        .kubectl(&["create", "token", "capstan", "-n", "capstan-system"])
        .await?;
    let dir = root.join(ACCOUNT_FILES);
    std::fs::write(dir.join("ca.crt"), ca)?;
    std::fs::write(dir.join("token"), token.trim())?;
    std::fs::write(dir.join("namespace"), "capstan-system")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_image_runs_in_a_pod_with_the_files_and_the_rights_that_the_installation_gives_it() -> Result<()> {
    let plane = ControlPlane::start(Options::default()).await?;
    plane.install_crds().await?;
    let dir = scratch("image");
    std::fs::create_dir_all(&dir)?;
    let made = dir.clone();
    let config = tokio::task::spawn_blocking(move || unpack(&made)).await??;
    let process = &config["process"];
    ensure!(process["user"]["uid"] == 65532, "{process}");
    for (label, value) in [
        ("title", "capstan"),
        ("description", "Runs the machines under Kubernetes clusters"),
        ("licenses", "Apache-2.0"),
        ("version", "test"),
    ] {
        let found = &config["annotations"][format!("org.opencontainers.image.{label}")];
        ensure!(found == value, "label {label}: {found}");
    }
    let root = dir.join("bundle/rootfs");
    let mut found = Vec::new();
    files(&root, &root, &mut found)?;
    found.retain(|path| !belongs(path));
    ensure!(found.is_empty(), "the image has more than it needs: {found:?}");
    let bill: Value = serde_json::from_str(&std::fs::read_to_string(root.join(SBOM_FILE))?)?;
    ensure!(bill["bomFormat"] == "CycloneDX", "{bill}");

    let objects = build("").await?;
    let namespaces: Vec<Value> = objects
        .iter()
        .filter(|object| object["kind"] == "Namespace")
        .cloned()
        .collect();
    apply(&plane, &dir, &namespaces).await?;
    apply(&plane, &dir, &objects).await?;
    mount_account(&plane, &root).await?;
    let url = plane.config().await?.cluster_url;
    let deployment = named(&objects, "Deployment", "capstan").context("no Deployment")?;
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    let entrypoint = process["args"][0].as_str().context("no entrypoint")?;
    let args = container["args"].as_array().context("no args")?;
    let log = dir.join("log");
    // A user namespace stands in for the container: the program is user 65532, and sees nothing but the image.
    let mut command = Command::new("unshare");
    command
        .args([
            "--user",
            "--map-user=65532",
            "--map-group=65532",
            "--keep-caps",
            "chroot",
        ])
        .arg(&root)
        .arg(entrypoint)
        .args(args.iter().filter_map(Value::as_str))
        // Ports that are free on this machine, where the pod has an address of its own.
        .args(["--health", "127.0.0.1:0", "--metrics", ":0", "--webhook", "127.0.0.1:0"])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("POD_NAMESPACE", "capstan-system")
        .env("KUBERNETES_SERVICE_HOST", url.host().context("no host")?)
        .env(
            "KUBERNETES_SERVICE_PORT",
            url.port_u16().context("no port")?.to_string(),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log)?);
    for variable in process["env"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        if let Some((name, value)) = variable.split_once('=').filter(|(name, _)| *name != "PATH") {
            command.env(name, value);
        }
    }
    let mut child = Started(command.spawn().context("cannot run unshare")?);
    let text = || std::fs::read_to_string(&log).unwrap_or_default();
    let lease = [
        "get",
        "lease/capstan",
        "-n",
        "capstan-system",
        "-o",
        "jsonpath={.spec.holderIdentity}",
    ];
    program::until(|| text().contains("\"message\":\"starting\"")).with_context(text)?;
    kubectl_until(plane.kubeconfig(), &lease, |holder| !holder.is_empty())
        .await
        .with_context(text)?;

    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "prometheus", "namespace": "capstan-system"}});
    apply(&plane, &dir, &[account]).await?;
    kubectl(
        plane.kubeconfig(),
        &[
            "create",
            "clusterrolebinding",
            "prometheus-capstan",
            "--clusterrole=capstan-metrics-reader",
            "--serviceaccount=capstan-system:prometheus",
        ],
    )
    .await?;
    let token = ["create", "token", "prometheus", "-n", "capstan-system"];
    let token = kubectl(plane.kubeconfig(), &token).await?;
    let client = reqwest::Client::builder()
        .tls_danger_accept_invalid_certs(true)
        .no_proxy()
        .build()?;
    let port = program::port(&text(), "metrics").with_context(text)?;
    let scrape = client.get(format!("https://127.0.0.1:{port}/metrics"));
    let metrics = scrape.bearer_auth(token.trim()).send().await?.error_for_status()?;
    ensure!(
        metrics.text().await?.contains("capstan_leading{lease=\"capstan\"} 1"),
        "{}",
        text()
    );

    signal(&child.0, "-TERM")?;
    ensure!(wait(&mut child.0, LIMIT)?.success(), "{}", text());
    let holder = kubectl(plane.kubeconfig(), &lease).await?;
    ensure!(holder.is_empty(), "{holder} keeps the lease: {}", text());
    std::fs::remove_dir_all(dir)?;
    Ok(())
}

#[test]
fn the_containerfile_and_image_sh_agree() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |file: &str| std::fs::read_to_string(root.join(file)).with_context(|| file.to_owned());
    let (containerfile, script) = (read("Containerfile")?, read("deploy/image.sh")?);
    let both = [
        ("USER 65532:65532", "--config.user 65532:65532"),
        ("ENV MALLOC_ARENA_MAX=1", "--config.env MALLOC_ARENA_MAX=1"),
        ("ENTRYPOINT [\"/capstan\"]", "--config.entrypoint /capstan"),
        (
            "CMD [\"run\", \"--log-format=json\"]",
            "--config.cmd run --config.cmd --log-format=json",
        ),
        ("image.licenses=\"Apache-2.0\"", "image.licenses=Apache-2.0"),
        (
            "image.description=\"Runs the machines under Kubernetes clusters\"",
            "image.description=Runs the machines under Kubernetes clusters",
        ),
    ];
    for (line, flag) in both {
        ensure!(containerfile.contains(line), "no {line} in the Containerfile");
        ensure!(script.contains(flag), "no {flag} in deploy/image.sh");
    }
    let toolchain = read("rust-toolchain.toml")?;
    let channel = toolchain.split('"').nth(1).context("no channel")?;
    let version = channel.rsplit_once('.').map_or(channel, |(version, _)| version);
    ensure!(
        containerfile.contains(&format!("/rust:{version}-")),
        "the Containerfile does not build with Rust {version}"
    );
    Ok(())
}
