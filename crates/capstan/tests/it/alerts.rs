//! The alerting rules of `deploy/prometheus`, tried by Prometheus's own tool.

use std::path::Path;
use std::process::Command;

#[test]
fn the_alerts_fire_and_rest_as_their_tests_say() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus");
    let read = |name: &str| std::fs::read_to_string(deploy.join(name)).unwrap();
    let rule: serde_json::Value = serde_saphyr::from_str(&read("rules.yaml")).unwrap();
    let dir = std::env::temp_dir().join(format!("capstan-alerts-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("rules.json"), rule["spec"].to_string()).unwrap();
    std::fs::write(dir.join("rules_test.yaml"), read("rules_test.yaml")).unwrap();
    let promtool = capstan_testkit::parts::PROMTOOL.path().unwrap();
    let tried: Vec<_> = [["check", "rules", "rules.json"], ["test", "rules", "rules_test.yaml"]]
        .iter()
        .map(|args| Command::new(&promtool).args(args).current_dir(&dir).output().unwrap())
        .collect();
    std::fs::remove_dir_all(&dir).unwrap();
    for out in tried {
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("SUCCESS"), "{said}");
    }
}
