//! VSphereMachineTemplates cannot be changed, but Cluster API may try a change of the template of a ClusterClass as a dry run.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use capstan_api::vsphere::TEMPLATE_FROZEN;
use capstan_api::{crds, manifest, template_policy};
use capstan_testkit::{ControlPlane, Options};

/// A policy takes effect a moment after it was made.
const PATIENCE: Duration = Duration::from_secs(120);

fn template(cpus: u32, annotation: &str) -> String {
    format!(
        "apiVersion: infrastructure.cluster.x-k8s.io/v1beta2\nkind: VSphereMachineTemplate\n\
         metadata: {{name: t, namespace: default, annotations: {{{annotation}}}}}\n\
         spec: {{template: {{spec: {{template: ubuntu, numCPUs: {cpus}, network: {{devices: []}}}}}}}}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn templates_stay_as_they_are_and_dry_runs_of_a_topology_pass() -> Result<()> {
    let plane = ControlPlane::start(Options {
        kwok: false,
        controller_manager: false,
        ..Options::default()
    })
    .await?;
    let file = plane.dir().join("manifest.yaml");
    let apply = async |manifest: &str, options: &[&str]| -> Result<String> {
        std::fs::write(&file, manifest)?;
        let mut args = vec![
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            file.to_str().unwrap(),
        ];
        args.extend(options);
        plane.kubectl(&args).await
    };
    let (policy, binding) = template_policy();
    let mut all: Vec<String> = crds().iter().map(|crd| manifest(crd).unwrap()).collect();
    all.extend([manifest(&policy)?, manifest(&binding)?]);
    apply(&all.join("\n---\n"), &[]).await?;
    let served = ["wait", "--for=condition=Established", "--all", "crds", "--timeout=120s"];
    plane.kubectl(&served).await?;
    apply(&template(2, ""), &[]).await?;

    let since = Instant::now();
    let refusal = loop {
        match apply(&template(4, ""), &["--dry-run=server"]).await {
            Err(refusal) => break refusal.to_string(),
            Ok(_) if since.elapsed() > PATIENCE => bail!("the change is not refused"),
            Ok(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    };
    assert!(refusal.contains(TEMPLATE_FROZEN), "{refusal}");
    let topology = "topology.cluster.x-k8s.io/dry-run: ''";
    apply(&template(4, topology), &["--dry-run=server"]).await?;
    let earnest = apply(&template(4, topology), &[]).await;
    assert!(earnest.is_err_and(|refusal| refusal.to_string().contains(TEMPLATE_FROZEN)));
    apply(&template(2, "harmless: change"), &[]).await?;
    Ok(())
}
