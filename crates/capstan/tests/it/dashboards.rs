//! The Grafana dashboards of `deploy/prometheus/dashboards`, one for Capstan itself, one for each controller and one for Azure. They
//! are made from the table below; `just dashboards` writes them.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// A title, a unit of Grafana, and queries with their legends.
type Panel = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

/// The file without its ending, the title, and the panels.
const DASHBOARDS: &[(&str, &str, &[Panel])] = &[
    (
        "capstan",
        "Capstan",
        &[
            (
                "Leaders by lease",
                "short",
                &[("sum by (namespace, lease) (capstan_leading)", "{{namespace}}/{{lease}}")],
            ),
            (
                "Reconciles by result",
                "ops",
                &[(
                    "sum by (controller, result) (rate(capstan_reconciles_total[5m]))",
                    "{{controller}} {{result}}",
                )],
            ),
            (
                "Duration of reconciles, 99th percentile",
                "s",
                &[(
                    "histogram_quantile(0.99, sum by (controller, le) (rate(capstan_reconcile_duration_seconds_bucket[5m])))",
                    "{{controller}}",
                )],
            ),
            (
                "Requests to API servers",
                "reqps",
                &[(
                    "sum by (verb, code) (rate(capstan_kube_requests_total[5m]))",
                    "{{verb}} {{code}}",
                )],
            ),
            (
                "Evictions",
                "ops",
                &[(
                    "sum by (result) (rate(capstan_drain_evictions_total[5m]))",
                    "{{result}}",
                )],
            ),
            (
                "Pods in the way of a drain",
                "short",
                &[(
                    "count by (node, reason) (capstan_drain_pod_in_the_way)",
                    "{{node}} {{reason}}",
                )],
            ),
            (
                "Time until the webhooks get a new certificate",
                "s",
                &[(
                    "min(capstan_webhook_certificate_renew_timestamp_seconds) - time()",
                    "certificate",
                )],
            ),
        ],
    ),
    (
        "capstan-azure",
        "Capstan: Azure",
        &[
            (
                "Calls by answer",
                "reqps",
                &[(
                    "sum by (method, code) (rate(capstan_azure_requests_total[5m]))",
                    "{{method}} {{code}}",
                )],
            ),
            (
                "Answers 429",
                "reqps",
                &[(
                    "sum by (subscription, policy) (rate(capstan_azure_throttled_total[5m]))",
                    "{{subscription}} {{policy}}",
                )],
            ),
            (
                "Calls not sent because of throttling",
                "reqps",
                &[(
                    "sum by (subscription, policy) (rate(capstan_azure_held_total[5m]))",
                    "{{subscription}} {{policy}}",
                )],
            ),
            (
                "Calls that a bucket allows now",
                "short",
                &[(
                    "capstan_azure_budget_tokens",
                    "{{subscription}} {{location}} {{policy}}",
                )],
            ),
            (
                "Calls that wait for their turn",
                "short",
                &[("sum(capstan_azure_budget_waiting)", "waiting")],
            ),
            (
                "Sign-ins",
                "ops",
                &[("sum(rate(capstan_azure_sign_ins_total[5m]))", "sign-ins")],
            ),
        ],
    ),
    (
        "capstan-openshift",
        "Capstan: OpenShift machines",
        &[
            (
                "Machines by phase",
                "short",
                &[("count by (phase) (mapi_machine_created_timestamp_seconds)", "{{phase}}")],
            ),
            (
                "Machines and MachineSets",
                "short",
                &[
                    ("sum(mapi_machine_items)", "Machines"),
                    ("sum(mapi_machineset_items)", "MachineSets"),
                ],
            ),
            (
                "Replicas of MachineSets",
                "short",
                &[
                    ("sum(mapi_machine_set_status_replicas)", "replicas"),
                    ("sum(mapi_machine_set_status_replicas_ready)", "ready"),
                    ("sum(mapi_machine_set_status_replicas_available)", "available"),
                ],
            ),
            (
                "Failures",
                "short",
                &[
                    ("sum by (reason) (mapi_instance_create_failed)", "create {{reason}}"),
                    ("sum by (reason) (mapi_instance_update_failed)", "update {{reason}}"),
                    ("sum by (reason) (mapi_instance_delete_failed)", "delete {{reason}}"),
                ],
            ),
            (
                "Time until a phase, 90th percentile",
                "s",
                &[(
                    "histogram_quantile(0.9, sum by (phase, le) (rate(mapi_machine_phase_transition_seconds_bucket[1h])))",
                    "{{phase}}",
                )],
            ),
        ],
    ),
    (
        "capstan-pools",
        "Capstan: Azure machine pools",
        &[
            (
                "Desired and ready machines",
                "short",
                &[
                    ("sum(capstan_pool_replicas_desired)", "desired"),
                    ("sum(capstan_pool_replicas_ready)", "ready"),
                ],
            ),
            (
                "Machines that a pool lacks, or has too many",
                "short",
                &[(
                    "capstan_pool_replicas_desired - capstan_pool_replicas_ready != 0",
                    "{{pool_namespace}}/{{pool}}",
                )],
            ),
            (
                "Reconciles by result",
                "ops",
                &[(
                    "sum by (controller, result) (rate(capstan_reconciles_total{controller=~\"azure.*\"}[5m]))",
                    "{{controller}} {{result}}",
                )],
            ),
            (
                "Duration of reconciles, 99th percentile",
                "s",
                &[(
                    "histogram_quantile(0.99, sum by (controller, le) (rate(capstan_reconcile_duration_seconds_bucket{controller=~\"azure.*\"}[5m])))",
                    "{{controller}}",
                )],
            ),
            (
                "Calls to Azure by kind and answer",
                "reqps",
                &[(
                    "sum by (policy, code) (rate(capstan_azure_requests_total[5m]))",
                    "{{policy}} {{code}}",
                )],
            ),
        ],
    ),
    (
        "capstan-vsphere",
        "Capstan: vSphere machines",
        &[
            (
                "Calls to vCenters by outcome",
                "reqps",
                &[(
                    "sum by (method, outcome) (rate(capstan_vsphere_requests_total[5m]))",
                    "{{method}} {{outcome}}",
                )],
            ),
            (
                "Time until a vCenter answered, 99th percentile",
                "s",
                &[(
                    "histogram_quantile(0.99, sum by (method, le) (rate(capstan_vsphere_request_duration_seconds_bucket[5m])))",
                    "{{method}}",
                )],
            ),
            (
                "Logins by outcome",
                "ops",
                &[(
                    "sum by (outcome) (rate(capstan_vsphere_logins_total[5m]))",
                    "{{outcome}}",
                )],
            ),
            (
                "Sessions, tasks and long polls",
                "short",
                &[
                    ("sum(capstan_vsphere_sessions)", "sessions"),
                    ("sum(capstan_vsphere_tasks)", "tasks"),
                    ("sum(capstan_vsphere_polls)", "long polls"),
                ],
            ),
            (
                "Duration of tasks, 90th percentile",
                "s",
                &[(
                    "histogram_quantile(0.9, sum by (task, le) (rate(capstan_vsphere_task_duration_seconds_bucket[30m])))",
                    "{{task}}",
                )],
            ),
            (
                "Long polls that failed",
                "ops",
                &[("sum(rate(capstan_vsphere_poll_failures_total[5m]))", "failures")],
            ),
            (
                "Reconciles by result",
                "ops",
                &[(
                    "sum by (controller, result) (rate(capstan_reconciles_total{controller=~\"vsphere.*\"}[5m]))",
                    "{{controller}} {{result}}",
                )],
            ),
        ],
    ),
];

fn dashboard(uid: &str, title: &str, panels: &[Panel]) -> Value {
    let panels: Vec<Value> = (0..)
        .zip(panels)
        .map(|(number, panel)| panel_of(number, panel))
        .collect();
    json!({
        "uid": uid,
        "title": title,
        "tags": ["capstan"],
        "schemaVersion": 41,
        "editable": true,
        "refresh": "30s",
        "time": { "from": "now-6h", "to": "now" },
        "templating": {
            "list": [{ "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source" }]
        },
        "panels": panels,
    })
}

/// Two panels in a row.
fn panel_of(number: usize, (title, unit, queries): &Panel) -> Value {
    let targets = ('A'..)
        .zip(*queries)
        .map(|(id, (query, legend))| json!({ "refId": id, "expr": query, "legendFormat": legend }));
    json!({
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": { "type": "prometheus", "uid": "${datasource}" },
        "gridPos": { "h": 8, "w": 12, "x": number % 2 * 12, "y": number / 2 * 8 },
        "fieldConfig": { "defaults": { "unit": unit }, "overrides": [] },
        "targets": targets.collect::<Vec<_>>(),
    })
}

#[test]
fn the_dashboards_are_those_of_the_table() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus/dashboards");
    for (uid, title, panels) in DASHBOARDS {
        let (file, made) = (folder.join(format!("{uid}.json")), dashboard(uid, title, panels));
        if std::env::var_os("UPDATE_DASHBOARDS").is_some() {
            std::fs::write(&file, serde_json::to_string_pretty(&made)? + "\n")?;
        }
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let written: Value = serde_json::from_str(&text)?;
        ensure!(
            written == made,
            "{uid}.json is out of date; `just dashboards` writes it"
        );
    }
    let files = std::fs::read_dir(folder)?.count();
    ensure!(
        files == DASHBOARDS.len(),
        "{files} files, {} dashboards",
        DASHBOARDS.len()
    );
    // A dashboard for each controller.
    for name in ["openshift", "pools", "vsphere"] {
        ensure!(
            DASHBOARDS.iter().any(|(uid, ..)| uid.ends_with(name)),
            "none for {name}"
        );
    }
    Ok(())
}
