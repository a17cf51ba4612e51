//! The program that goes into an image: built without feature `dev`.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Result, ensure};

/// Returns the names of all crates that the program links with these features.
fn crates(features: &[&str]) -> Result<BTreeSet<String>> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let out = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--manifest-path", manifest])
        .args(["--edges", "normal", "--prefix", "none", "--format", "{p}"])
        .args(features)
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
