//! Rules for the sources that the compiler does not check.

use std::path::{Path, PathBuf};

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

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Adds all sources below a folder, without tests.
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

/// Returns the lines of product code that `is_wrong`, in all files but the allowed ones.
fn wrong_lines(allowed: &[&str], is_wrong: impl Fn(&str) -> bool) -> String {
    let mut files = Vec::new();
    for product in PRODUCT {
        sources(&crates().join(product).join("src"), &mut files);
    }
    assert!(files.len() > 100, "{} sources", files.len());
    files.retain(|file| !allowed.iter().any(|allowed| file.ends_with(allowed)));
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        // The tests of a module are at its end.
        let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        let lines = product.lines().filter(|line| !line.trim_start().starts_with("//"));
        let joined = lines.collect::<Vec<_>>().join("\n");
        // A chain of calls is one line.
        let joined = joined
            .split("\n")
            .fold(String::new(), |text, line| match line.trim_start() {
                call if call.starts_with('.') => text + call,
                _ => text + "\n" + line,
            });
        let lines = joined.lines();
        let found = lines.filter(|line| is_wrong(line));
        wrong.extend(found.map(|line| format!("{}: {}", file.display(), line.trim())));
    }
    wrong.join("\n")
}

/// A test under paused time would else meet the time of the machine.
#[test]
fn only_the_clock_asks_for_the_time() {
    let past_the_clock = [
        "Instant::now(",
        "SystemTime::now(",
        "Timestamp::now(",
        "Zoned::now(",
        "thread::sleep(",
        "tokio::time::",
    ];
    // The clock itself, and what draws on a terminal.
    let allowed = [
        "core/src/clock.rs",
        "capstan/src/up/output.rs",
        "capstan/src/up/once.rs",
    ];
    let wrong = wrong_lines(&allowed, |line| past_the_clock.iter().any(|call| line.contains(call)));
    assert!(wrong.is_empty(), "use the clock of the context instead:\n{wrong}");
}

/// Two objects without a UID would be the same object, and an empty namespace means all namespaces.
#[test]
fn an_object_without_a_uid_or_a_namespace_is_not_given_an_empty_one() {
    // Parses both, and refuses an object without a UID.
    let allowed = ["kube/src/runtime/scope.rs"];
    let defaults: Vec<String> = ["uid()", "namespace()", "meta.uid.clone()", "meta.namespace.clone()"]
        .into_iter()
        .chain([
            "meta().uid.clone()",
            "meta().namespace.clone()",
            "metadata.uid.clone()",
            "metadata.namespace.clone()",
        ])
        .map(|field| format!("{field}.unwrap_or_default()"))
        .collect();
    let wrong = wrong_lines(&allowed, |line| defaults.iter().any(|default| line.contains(default)));
    assert!(wrong.is_empty(), "use ObjectKey, or keep the Option:\n{wrong}");
}

/// Another object may have the name by now.
#[test]
fn objects_are_deleted_with_their_uid() {
    // The commands of a user, who names the object; and many objects by a label that holds what their UID would tell.
    let allowed = [
        "capstan/src/up/standin.rs",
        "capstan/src/adopt/execute.rs",
        "azure-pools/src/pool/machines.rs",
    ];
    let is_wrong = |line: &str| {
        let delete = line.contains(".delete(") || line.contains(".delete_collection(");
        delete && (line.contains("DeleteParams::default()") || line.contains("&Default::default()"))
    };
    let wrong = wrong_lines(&allowed, is_wrong);
    assert!(wrong.is_empty(), "delete with objects::delete_exactly:\n{wrong}");
}

/// Returns the cells of a row of a table in Markdown.
fn cells(row: &str) -> Vec<&str> {
    row.trim().trim_matches('|').split('|').map(str::trim).collect()
}

/// Returns the texts between backticks.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn every_controller_has_the_files_that_the_table_of_roles_names() {
    let text = std::fs::read_to_string(crates().join("../ARCHITECTURE.md")).unwrap();
    let table = text.split("## Roles and files").nth(1).unwrap();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| "))
        .take_while(|line| !line.starts_with("| crate |"))
        .map(cells)
        .collect();
    let row = |role: &str| rows.iter().find(|row| row[0].starts_with(role)).unwrap();
    let folders: Vec<&str> = row("folder")[1..].iter().flat_map(|cell| quoted(cell)).collect();
    assert_eq!(folders.len(), rows[0].len() - 1, "a folder for every controller");
    let mut missing = Vec::new();
    for row in rows
        .iter()
        .filter(|row| row[0] != "role" && !row[0].starts_with("folder"))
    {
        for (cell, folder) in row[1..].iter().zip(&folders) {
            let folder = match row[0].starts_with("plan") {
                true => crates().join("core/src"),
                false => crates().join("controllers").join(folder),
            };
            let files = quoted(cell).map(|file| folder.join(file));
            missing.extend(
                files
                    .filter(|file| !file.is_file())
                    .map(|file| file.display().to_string()),
            );
        }
    }
    assert!(
        missing.is_empty(),
        "files of the table that do not exist:\n{}",
        missing.join("\n")
    );
    for (role, file) in [
        ("wiring", "mod.rs"),
        ("observe", "observe.rs"),
        ("apply", "apply.rs"),
        ("status", "status.rs"),
    ] {
        let others: Vec<&str> = row(role)[1..]
            .iter()
            .flat_map(|cell| quoted(cell))
            .filter(|name| *name != file)
            .collect();
        assert!(others.is_empty(), "{role} is in {file} everywhere, not in {others:?}");
    }
}
