//! Builds parts, each once, into the per-user cache.
//!
//! A part's folder in the cache has a hash of all its inputs in its name (pins, sources, flags, platform). So a change
//! of a pin causes a new build, and an old clone still finds its own. The folder appears by one rename, under a lock.

use std::fs;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};

use crate::files::{self, Lock};
use crate::parts::{Part, Source, Version};
use crate::process::Lifeline;

pub fn provide(part: &Part) -> Result<PathBuf> {
    let cache = files::cache_dir();
    let place = cache.join("parts").join(format!("{}-{}", part.name, key(part)));
    let wanted = match part.source {
        Source::Program { .. } => place.join(part.name),
        Source::Files { .. } => place.clone(),
    };
    if wanted.exists() {
        return Ok(wanted);
    }
    if let Source::Program {
        version: Some(version), ..
    } = &part.source
        && let Some(found) = installed(&places(), part.name, version)
    {
        return Ok(found);
    }
    let go = go().with_context(|| {
        format!(
            "{} is needed and neither built yet nor found in KUBEBUILDER_ASSETS or PATH: install Go 1.26 or newer \
             (https://go.dev/dl) and run this again, the rest is built from it",
            part.name
        )
    })?;
    // One lock for all parts: Go builds use every core, two at once only get in each other's way.
    let _lock = Lock::take(&cache.join("parts/build.lock"), || {
        report(&format!("waiting for {}: another build has the lock", part.name))
    })?;
    if !wanted.exists() {
        build(&go, part, &cache, &place)?;
    }
    Ok(wanted)
}

fn key(part: &Part) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(std::env::consts::OS);
    add(std::env::consts::ARCH);
    for (path, text) in part.module.files {
        add(path);
        add(text);
    }
    match &part.source {
        Source::Program { package, ldflags, .. } => {
            add(package);
            add(ldflags);
        }
        Source::Files { of, paths } => {
            add(of);
            paths.iter().for_each(|path| add(path));
        }
    }
    hash.finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Returns the folders in which programs are searched, in that order.
fn places() -> Vec<PathBuf> {
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    assets.into_iter().chain(std::env::split_paths(&path)).collect()
}

/// Returns an installed program, if its version fits.
fn installed(places: &[PathBuf], name: &str, version: &Version) -> Option<PathBuf> {
    places
        .iter()
        .map(|dir| dir.join(name))
        .filter(|file| file.is_file())
        .find(|file| {
            let answer = Command::new(file).args(version.args).stdin(Stdio::null()).output();
            answer.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).contains(version.fits))
        })
}

fn go() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join("go"))
        .find(|file| file.is_file())
}

fn build(go: &Path, part: &Part, cache: &Path, place: &Path) -> Result<()> {
    let source = cache.join("parts").join(format!("src-{}", part.module.name));
    lay_out(&source, part.module.files)?;
    let fresh = place.with_extension("new");
    if fresh.exists() {
        fs::remove_dir_all(&fresh)?;
    }
    fs::create_dir_all(&fresh)?;
    match &part.source {
        Source::Program { package, ldflags, .. } => compile(go, part.name, &source, package, ldflags, &fresh)?,
        Source::Files { of, paths } => copy(go, part.name, &source, of, paths, &fresh)?,
    }
    fs::rename(&fresh, place).with_context(|| format!("cannot put {} in place", place.display()))
}

/// Exactly these files: what another revision of the module left there would be compiled with them.
fn lay_out(source: &Path, files: &[(&str, &str)]) -> Result<()> {
    if source.exists() {
        fs::remove_dir_all(source).with_context(|| format!("cannot empty {}", source.display()))?;
    }
    files
        .iter()
        .try_for_each(|(path, text)| files::write(&source.join(path), text))
}

fn command(go: &Path, dir: &Path) -> Command {
    let mut command = Command::new(go);
    // The pins decide: no workspace, no flags of the user's.
    command
        .current_dir(dir)
        .env("GOWORK", "off")
        .env("GOFLAGS", "-mod=readonly")
        .stdin(Stdio::null());
    command
}

fn compile(go: &Path, name: &str, dir: &Path, package: &str, ldflags: &str, into: &Path) -> Result<()> {
    let progress = Progress::new(format!("building {name} (once, into {})", files::cache_dir().display()));
    let mut build = command(go, dir);
    build
        .args([
            "build",
            "-v",
            "-trimpath",
            // Leaves service discovery out of promtool, and halves it; the other parts ignore the tag.
            "-tags=remove_all_sd",
            "-ldflags",
            &format!("-s -w {ldflags}"),
            "-o",
        ])
        .args([into.join(name).as_os_str(), package.as_ref()]);
    // A build of minutes ends with the process that started it.
    let lifeline = Lifeline::own()?;
    let mut child = lifeline
        .guard(&build, &into.join("pid"))?
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", go.display()))?;
    let mut said = Vec::new();
    let mut packages = 0;
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            // A line is either a download, a compiled package's path, or part of an error.
            if let Some(download) = line.strip_prefix("go: downloading ") {
                progress.step(&format!("downloading {download}"));
            } else {
                packages += 1;
                progress.step(&format!("{packages} packages"));
                said.push(line);
            }
        }
    }
    let status = child.wait().context("cannot wait for go build")?;
    if !status.success() {
        let last = said[said.len().saturating_sub(20)..].join("\n");
        bail!("go build {package} failed with {status}:\n{last}");
    }
    fs::remove_file(into.join("pid")).context("cannot tidy up after go build")?;
    progress.done();
    Ok(())
}

fn copy(go: &Path, name: &str, dir: &Path, of: &str, paths: &[&str], into: &Path) -> Result<()> {
    let progress = Progress::new(format!("fetching {name}"));
    let out = command(go, dir)
        .args(["mod", "download", "-json", of])
        .output()
        .with_context(|| format!("cannot run {}", go.display()))?;
    let answer: serde_json::Value = serde_json::from_slice(&out.stdout).with_context(|| {
        format!(
            "go mod download {of} failed: {}",
            String::from_utf8_lossy(&out.stderr).trim()
        )
    })?;
    let Some(root) = answer["Dir"].as_str() else {
        bail!(
            "go mod download {of} failed: {}",
            answer["Error"].as_str().unwrap_or("it gave no folder")
        );
    };
    for path in paths {
        let from = Path::new(root).join(path);
        let found = if path.ends_with('/') {
            yaml_files(&from)?
        } else {
            vec![from]
        };
        for file in found {
            let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let name = file
                .file_name()
                .with_context(|| format!("{} is not a file", file.display()))?;
            files::write(&into.join(name), text)?;
        }
    }
    progress.done();
    Ok(())
}

pub fn yaml_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ext| ext == "yaml"))
        .collect();
    found.sort();
    Ok(found)
}

/// Shows the progress: a spinner on a terminal, otherwise a line at the beginning and one at the end.
struct Progress {
    what: String,
    bar: Option<ProgressBar>,
    since: Instant,
}

impl Progress {
    /// The interval at which a spinner turns.
    const TICK: Duration = Duration::from_millis(120);

    fn new(what: String) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Self::TICK);
            bar.set_message(what.clone());
            bar
        });
        if bar.is_none() {
            report(&format!("{what} ..."));
        }
        Self {
            what,
            bar,
            since: Instant::now(),
        }
    }

    fn step(&self, detail: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {detail}, {} s", self.what, self.since.elapsed().as_secs()));
        }
    }

    fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        report(&format!("{}: done in {} s", self.what, self.since.elapsed().as_secs()));
    }
}

/// Written past the test harness, which would hide it until the test ends.
fn report(line: &str) {
    // Standard error may be closed; that is no reason to fail.
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::parts;

    #[test]
    fn what_another_revision_of_a_module_left_is_not_compiled() {
        let source = std::env::temp_dir().join(format!("capstan-source-{}", std::process::id()));
        lay_out(&source, &[("go.mod", "module a"), ("old/old.go", "package old")]).unwrap();
        lay_out(&source, &[("go.mod", "module b")]).unwrap();
        let left: Vec<_> = fs::read_dir(&source)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["go.mod"]);
        assert_eq!(fs::read_to_string(source.join("go.mod")).unwrap(), "module b");
        fs::remove_dir_all(source).unwrap();
    }

    #[test]
    fn a_program_that_is_there_already_is_used_when_its_version_fits() {
        let root = std::env::temp_dir().join(format!("capstan-installed-{}", std::process::id()));
        let place = |name: &str, says: &str| {
            let dir = root.join(name);
            let file = dir.join("etcd");
            files::write(&file, format!("#!/bin/sh\necho '{says}'\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            dir
        };
        let old = place("old", "etcd Version: 3.5.9");
        let broken = place("broken", "");
        let fits = place("fits", "etcd Version: 3.6.4");
        let Source::Program {
            version: Some(version), ..
        } = &parts::ETCD.source
        else {
            panic!("etcd prints no version")
        };
        let nowhere = root.join("nowhere");
        let found = installed(&[nowhere.clone(), old.clone(), broken, fits.clone()], "etcd", version);
        let none = installed(&[nowhere, old], "etcd", version);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, Some(fits.join("etcd")));
        assert_eq!(none, None);
    }
}
