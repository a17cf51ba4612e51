//! The program that goes into an image, built without feature `dev`, and figures that may not grow unnoticed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

/// The plans are compiled and tested often: what they need stays small.
const CRATES_OF_CORE: usize = 90;
/// Each test program is linked by itself, which takes most of the time of a build.
const TEST_PROGRAMS: usize = 12;

/// Returns the names of all crates that the program links with these features.
fn crates(features: &[&str]) -> Result<BTreeSet<String>> {
    tree(&[&["--edges", "normal"], features].concat())
}

/// Returns the names of all crates in a tree of dependencies.
fn tree(options: &[&str]) -> Result<BTreeSet<String>> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let out = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--manifest-path", manifest])
        .args(["--prefix", "none", "--format", "{p}"])
        .args(options)
        .output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout);
    let names = text.lines().filter_map(|line| line.split(' ').next());
    Ok(names.map(str::to_owned).collect())
}

#[test]
fn the_program_without_dev_links_no_simulator_no_test_kit_and_one_crypto_library() -> Result<()> {
    let everything = crates(&[])?;
    let product = crates(&["--no-default-features"])?;
    for name in ["capstan-sim", "capstan-testkit", "ratatui", "crossterm", "indicatif"] {
        ensure!(
            everything.contains(name),
            "{name} is not part of dev any more: adapt this test"
        );
        ensure!(!product.contains(name), "the production program links {name}");
    }
    for name in ["ring", "openssl-sys", "native-tls"] {
        ensure!(!everything.contains(name), "{name} is linked beside aws-lc-rs");
    }
    ensure!(product.contains("aws-lc-rs") && product.contains("capstan-openshift"));
    Ok(())
}

#[test]
fn the_plans_need_few_crates() -> Result<()> {
    let needed = tree(&["--package", "capstan-core", "--edges", "normal,build"])?;
    ensure!(needed.contains("capstan-api"), "{needed:?}");
    let count = needed.len();
    ensure!(count <= CRATES_OF_CORE, "capstan-core needs {count} crates: {needed:?}");
    Ok(())
}

/// Adds the test programs of the crate in this folder, and of those below it.
fn test_programs(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.join("Cargo.toml").is_file() {
            let tests = path.join("tests");
            let programs = tests.is_dir().then(|| std::fs::read_dir(&tests)).transpose()?;
            for program in programs.into_iter().flatten() {
                let program = program?.path();
                let alone = program.extension().is_some_and(|extension| extension == "rs");
                found.extend((alone || program.join("main.rs").is_file()).then_some(program));
            }
        } else if path.is_dir() {
            test_programs(&path, found)?;
        }
    }
    Ok(())
}

#[test]
fn each_crate_has_one_test_program_at_most() -> Result<()> {
    let mut found = Vec::new();
    test_programs(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut found)?;
    let crates: BTreeSet<_> = found.iter().filter_map(|program| program.parent()).collect();
    ensure!(crates.len() == found.len() && crates.len() > 8, "{found:?}");
    ensure!(found.len() <= TEST_PROGRAMS, "{found:?}");
    Ok(())
}
