//! The documentation names tests that exist, and its links lead somewhere.

mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

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
    let table = SECURITY.split("\n## ").find(|section| section.starts_with("Promises"));
    let promises = table
        .context("no promises")?
        .lines()
        .filter(|line| line.starts_with("| "));
    let mut count = 0;
    for promise in promises.skip(1) {
        let tests = promise.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        for test in tests.split(", ").map(|name| name.trim_matches('`')) {
            let place = sources.find(&format!("fn {test}("));
            let place = place.with_context(|| format!("docs/security.md names {test}, which is not there"))?;
            let attributes = sources[..place].rsplit("\n\n").next().unwrap_or_default();
            ensure!(
                !attributes.contains("#[ignore"),
                "docs/security.md names {test}, which is not run"
            );
            count += 1;
        }
    }
    ensure!(count > 10, "docs/security.md has lost its table");
    Ok(())
}

fn root() -> Result<PathBuf> {
    Ok(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?)
}

/// Returns the Markdown files of a folder, and of those below it.
fn pages(dir: &Path, deep: bool) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && deep {
            found.extend(pages(&path, deep)?);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns the lines that are not in a block of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// Returns the anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let words = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = words
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Returns the targets of a page's links, without those to other sites.
fn links(text: &str) -> Vec<&str> {
    let targets = prose(text).flat_map(|line| line.split("](").skip(1));
    let targets = targets.filter_map(|rest| rest.split(')').next());
    targets
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
        .collect()
}

#[test]
fn the_book_has_every_page() -> Result<()> {
    let docs = root()?.join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md"))?;
    for page in pages(&docs, true)? {
        let path = page.strip_prefix(&docs)?.display().to_string();
        let there = path == "SUMMARY.md" || summary.contains(&format!("]({path})"));
        ensure!(there, "docs/SUMMARY.md has no {path}");
    }
    Ok(())
}

#[test]
fn every_link_in_the_documentation_leads_to_a_file_and_a_heading() -> Result<()> {
    let root = root()?;
    let mut files = pages(&root, false)?;
    files.extend(pages(&root.join("docs"), true)?);
    let texts = files
        .into_iter()
        .map(|file| Ok((file.clone(), std::fs::read_to_string(file)?)));
    let texts: BTreeMap<PathBuf, String> = texts.collect::<Result<_>>()?;
    let mut wrong = Vec::new();
    for (file, text) in &texts {
        let folder = file.parent().context("a page without a folder")?;
        for link in links(text) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() {
                file.clone()
            } else {
                folder.join(path)
            };
            let target = target.canonicalize().unwrap_or_default();
            let there = anchor.is_empty() || texts.get(&target).is_some_and(|text| anchors(text).contains(anchor));
            if !target.exists() || !there {
                wrong.push(format!("{} links to {link}", file.strip_prefix(&root)?.display()));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
