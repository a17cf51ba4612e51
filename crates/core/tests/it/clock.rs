//! Only the clock asks for the time: a test under paused time would else meet the time of the machine.

use std::path::{Path, PathBuf};

/// Ways to ask for the time, or to sleep, past the clock.
const FORBIDDEN: [&str; 5] = [
    "Instant::now(",
    "SystemTime::now(",
    "Timestamp::now(",
    "Zoned::now(",
    "thread::sleep(",
];
/// Files that may: the clock itself, and what draws on a terminal.
const ALLOWED: [&str; 3] = [
    "core/src/clock.rs",
    "capstan/src/up/output.rs",
    "capstan/src/up/once.rs",
];
const PRODUCT: [&str; 9] = [
    "api",
    "core",
    "kube",
    "azure",
    "vsphere",
    "controllers/openshift",
    "controllers/azure-pools",
    "controllers/vsphere",
    "capstan",
];

/// All sources below a folder, tests left out.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if name == "tests" || name == "fixtures" {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn only_the_clock_asks_for_the_time() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for product in PRODUCT {
        sources(&crates.join(product).join("src"), &mut files);
    }
    assert!(files.len() > 100, "{} sources", files.len());
    let mut wrong = Vec::new();
    for file in files
        .iter()
        .filter(|file| !ALLOWED.iter().any(|allowed| file.ends_with(allowed)))
    {
        let text = std::fs::read_to_string(file).unwrap();
        // The tests of a module are at its end.
        let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let asks = product
            .lines()
            .filter(|line| !line.trim_start().starts_with("//") && FORBIDDEN.iter().any(|call| line.contains(call)));
        wrong.extend(asks.map(|line| format!("{}: {}", file.display(), line.trim())));
    }
    assert!(
        wrong.is_empty(),
        "use the clock of the context instead:\n{}",
        wrong.join("\n")
    );
}
