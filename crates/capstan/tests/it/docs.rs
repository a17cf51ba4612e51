//! The documentation names tests that exist.

use std::path::Path;

use anyhow::{Result, ensure};

const SECURITY: &str = include_str!("../../../../docs/security.md");

/// Returns the text of all Rust files under a folder.
fn sources(dir: &Path) -> Result<String> {
    let mut text = String::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            text.push_str(&sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(path)?);
        }
    }
    Ok(text)
}

#[test]
fn every_promise_about_security_names_a_test_that_exists() -> Result<()> {
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))?;
    let promises = SECURITY
        .lines()
        .filter(|line| line.starts_with("| ") && line.ends_with("` |"));
    let mut count = 0;
    for promise in promises {
        let tests = promise.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        for test in tests.split(", ").map(|name| name.trim_matches('`')) {
            ensure!(
                sources.contains(&format!("fn {test}(")),
                "docs/security.md names {test}, which is not there"
            );
            count += 1;
        }
    }
    ensure!(count > 10, "docs/security.md has lost its table");
    Ok(())
}
