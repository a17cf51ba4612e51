//! Building the real parts, with a compiler that stands in for Go.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use capstan_testkit::parts;

/// Notes that it was run, takes its time, and writes the program that it was asked for.
const GO: &str = r#"#!/bin/sh
echo run >>"$BUILDS"
while [ "$1" != -o ]; do shift; done
sleep 1
echo program >"$2"
"#;

const BROKEN_GO: &str = "#!/bin/sh\necho 'main.go:1: no such luck' >&2\nexit 1\n";

/// Run as a child by the tests below.
#[test]
#[ignore = "run as a child of other tests"]
fn provide_a_part() {
    println!("part={}", parts::IGNITION_VALIDATE.path().unwrap().display());
}

struct Machine(PathBuf);

impl Machine {
    fn new(name: &str, go: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("capstan-parts-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("bin")).unwrap();
        let machine = Self(dir);
        machine.install(go);
        machine
    }

    fn install(&self, go: &str) {
        let file = self.0.join("bin/go");
        fs::write(&file, go).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Somebody who needs the part.
    fn ask(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "parts::provide_a_part", "--ignored", "--nocapture"])
            .env("PATH", format!("{}:/usr/bin:/bin", self.0.join("bin").display()))
            .env("CAPSTAN_CACHE", self.0.join("cache"))
            .env("BUILDS", self.0.join("builds"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn builds(&self) -> usize {
        let text = fs::read_to_string(self.0.join("builds")).unwrap_or_default();
        text.lines().count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn said(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    )
}

fn path(out: &Output) -> PathBuf {
    let said = said(out);
    assert!(out.status.success(), "{said}");
    let line = said
        .lines()
        .find_map(|line| line.split_once("part="))
        .map(|(_, path)| path);
    line.map(Path::new).unwrap().to_owned()
}

#[test]
fn a_part_is_built_once_however_many_ask_for_it_and_found_by_those_who_ask_later() {
    let machine = Machine::new("once", GO);
    let asking: Vec<Child> = (0..3).map(|_| machine.ask()).collect();
    let answers: Vec<Output> = asking
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect();
    let places: Vec<PathBuf> = answers.iter().map(path).collect();
    assert!(
        places.iter().all(|place| *place == places[0] && place.is_file()),
        "{places:?}"
    );
    assert_eq!(machine.builds(), 1);
    let told = |words: &str| answers.iter().filter(|out| said(out).contains(words)).count();
    assert_eq!(told("building ignition-validate (once, into "), 1);

    // The next one does not even need a compiler.
    fs::remove_file(machine.0.join("bin/go")).unwrap();
    assert_eq!(path(&machine.ask().wait_with_output().unwrap()), places[0]);
}

#[test]
fn a_build_that_fails_says_why_and_the_next_one_begins_anew() {
    let machine = Machine::new("broken", BROKEN_GO);
    let out = machine.ask().wait_with_output().unwrap();
    assert!(
        !out.status.success() && said(&out).contains("no such luck"),
        "{}",
        said(&out)
    );
    machine.install(GO);
    assert!(path(&machine.ask().wait_with_output().unwrap()).is_file());
}
