//! All objects below a folder with their full paths, read in one call, and the rules by which a name picks one of them.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::properties::{Step, Want};
use crate::vcenter::Vcenter;
use crate::vm::unescape;
use capstan_core::vm::MoRef;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub reference: MoRef,
    pub name: String,
    pub path: String,
    /// The path through the switch of a port group, which lies beside its switch.
    pub switch_path: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Listing(Vec<Listed>);

/// Containers are always read, since paths are made of them.
const CONTAINERS: &[&str] = &[
    "Folder",
    "StoragePod",
    "ComputeResource",
    "ClusterComputeResource",
    "ResourcePool",
    "VirtualApp",
];

const PORTGROUP: &str = "DistributedVirtualPortgroup";
const SWITCH: &str = "config.distributedVirtualSwitch";

pub(crate) const STEPS: &[Step<'static>] = &[
    Step {
        name: "folder",
        kind: "Folder",
        path: "childEntity",
        next: &["folder", "compute", "pool"],
    },
    Step {
        name: "compute",
        kind: "ComputeResource",
        path: "resourcePool",
        next: &["pool"],
    },
    Step {
        name: "pool",
        kind: "ResourcePool",
        path: "resourcePool",
        next: &["pool"],
    },
];

impl Listing {
    pub async fn read(vcenter: &Vcenter, root: &MoRef, kinds: &[&str]) -> Result<Self> {
        let paths: &[&str] = &["name", "parent"];
        let mut wants: Vec<Want<'_>> = CONTAINERS.iter().map(|kind| Want { kind, paths }).collect();
        for kind in kinds.iter().filter(|kind| !CONTAINERS.contains(kind)) {
            let of_portgroup: &[&str] = &["name", "parent", SWITCH];
            let is_portgroup = *kind == PORTGROUP;
            wants.push(Want {
                kind,
                paths: if is_portgroup { of_portgroup } else { paths },
            });
            let switches = ["DistributedVirtualSwitch", "VmwareDistributedVirtualSwitch"];
            wants.extend(
                switches
                    .iter()
                    .filter(|_| is_portgroup)
                    .map(|kind| Want { kind, paths }),
            );
        }
        let objects = vcenter.retrieve(&wants, std::slice::from_ref(root), STEPS).await?;
        let known: HashMap<MoRef, (String, Option<MoRef>)> = objects
            .iter()
            .filter_map(|object| {
                let name = unescape(object.text("name").unwrap_or_default());
                Some((object.reference.clone()?, (name, object.moref("parent"))))
            })
            .collect();
        let switches: HashMap<MoRef, MoRef> = objects
            .iter()
            .filter_map(|object| Some((object.reference.clone()?, object.moref(SWITCH)?)))
            .collect();
        let listed = known
            .iter()
            .filter(|(reference, _)| *reference != root)
            .map(|(reference, (name, _))| {
                let switch = switches.get(reference).filter(|switch| known.contains_key(switch));
                Listed {
                    reference: reference.clone(),
                    name: name.clone(),
                    path: path_of(reference, root, &known),
                    switch_path: switch.map(|switch| format!("{}/{name}", path_of(switch, root, &known))),
                }
            })
            .collect();
        Ok(Self(listed))
    }

    /// Returns the listing with `base` before every path.
    pub fn below(mut self, base: &str) -> Self {
        for listed in &mut self.0 {
            listed.path = format!("{base}{}", listed.path);
            listed.switch_path = listed.switch_path.take().map(|path| format!("{base}{path}"));
        }
        self
    }

    pub fn by_reference(&self, reference: &MoRef) -> Option<&Listed> {
        self.0.iter().find(|listed| listed.reference == *reference)
    }

    /// Returns the object that a path, name or pattern means; an empty one means the only object.
    pub fn pick(&self, what: &'static str, kinds: &[&str], text: &str, base: &str) -> Result<&Listed> {
        let mut found: Vec<&Listed> = self
            .0
            .iter()
            .filter(|listed| kinds.contains(&listed.reference.kind()) && matches(listed, text, base))
            .collect();
        found.sort_by(|a, b| a.path.cmp(&b.path));
        match found.as_slice() {
            [one] => Ok(one),
            [] => Err(Error::NotFound {
                kind: what,
                path: text.to_owned(),
            }),
            many => Err(Error::Ambiguous {
                kind: what,
                path: text.to_owned(),
                // Not even paths are unique with NSX; the reference always is.
                found: many
                    .iter()
                    .map(|listed| format!("{} ({})", listed.path, listed.reference))
                    .collect(),
            }),
        }
    }
}

fn path_of(reference: &MoRef, root: &MoRef, known: &HashMap<MoRef, (String, Option<MoRef>)>) -> String {
    let mut names = Vec::new();
    let mut at = Some(reference);
    // No inventory is as deep as it has objects; a parent that leads back to its child ends here.
    for _ in 0..known.len() {
        let Some((name, parent)) = at.filter(|at| *at != root).and_then(|at| known.get(at)) else {
            break;
        };
        names.push(name.as_str());
        at = parent.as_ref();
    }
    names.reverse();
    names.iter().map(|name| format!("/{name}")).collect()
}

fn matches(listed: &Listed, text: &str, base: &str) -> bool {
    if text.is_empty() {
        return true;
    }
    let text = text.trim_start_matches("./");
    if !text.contains('/') {
        return glob(text, &listed.name);
    }
    let pattern = if text.starts_with('/') {
        text.to_owned()
    } else {
        format!("{base}/{text}")
    };
    let pattern: Vec<&str> = pattern.split('/').collect();
    let mut paths = std::iter::once(&listed.path).chain(&listed.switch_path);
    paths.any(|path| {
        let path: Vec<&str> = path.split('/').collect();
        pattern.len() == path.len() && pattern.iter().zip(path).all(|(pattern, name)| glob(pattern, name))
    })
}

/// `*`, `?` and `[…]` as in file names; everything else stands for itself.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, t));
            p += 1;
        } else if let Some(next) = after_one(&pattern, p, text[t]) {
            p = next;
            t += 1;
        } else if let Some((at, from)) = star {
            (p, t) = (at + 1, from + 1);
            star = Some((at, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Returns where the pattern goes on after one character, if its part at `p` stands for that character.
fn after_one(pattern: &[char], p: usize, character: char) -> Option<usize> {
    match pattern.get(p)? {
        '?' => Some(p + 1),
        '[' => match class(&pattern[p + 1..], character) {
            Some((is_in, length)) => is_in.then_some(p + 1 + length),
            // Not a class: the bracket is part of a name.
            None => (character == '[').then_some(p + 1),
        },
        other => (*other == character).then_some(p + 1),
    }
}

/// Returns whether a class such as `a-c]` or `^x]` has the character, and how long the class is.
fn class(text: &[char], character: char) -> Option<(bool, usize)> {
    let is_negated = text.first() == Some(&'^');
    let start = usize::from(is_negated);
    // A class has at least one character.
    let end = start + 1 + text.get(start + 1..)?.iter().position(|c| *c == ']')?;
    let (mut rest, mut is_in) = (&text[start..end], false);
    while let [first, tail @ ..] = rest {
        rest = match tail {
            ['-', last, after @ ..] => {
                is_in |= (first..=last).contains(&&character);
                after
            }
            after => {
                is_in |= *first == character;
                after
            }
        };
    }
    Some((is_in != is_negated, end + 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn listing() -> Listing {
        let listed = |kind: &str, path: &str| Listed {
            reference: MoRef::new(kind, path),
            name: path.rsplit('/').next().unwrap().to_owned(),
            path: path.to_owned(),
            switch_path: None,
        };
        Listing(vec![
            listed("ResourcePool", "/DC0/host/C0/Resources"),
            listed("ResourcePool", "/DC0/host/C0/Resources/small"),
            listed("ResourcePool", "/DC0/host/C1/Resources/large"),
            listed("ClusterComputeResource", "/DC0/host/C0"),
        ])
    }

    #[rstest]
    #[case("small", Ok("/DC0/host/C0/Resources/small"))]
    #[case("./small", Ok("/DC0/host/C0/Resources/small"))]
    #[case("C0/Resources/small", Ok("/DC0/host/C0/Resources/small"))]
    #[case("/DC0/host/C0/Resources/small", Ok("/DC0/host/C0/Resources/small"))]
    #[case("*/Resources", Ok("/DC0/host/C0/Resources"))]
    #[case("l?rge", Ok("/DC0/host/C1/Resources/large"))]
    #[case("nothing", Err(0))]
    #[case("", Err(3))]
    #[case("*/Resources/*", Err(2))]
    fn a_name_picks_one_or_says_what_it_could_mean(#[case] text: &str, #[case] expected: Result<&str, usize>) {
        let listing = listing();
        match (
            listing.pick("resource pool", &["ResourcePool"], text, "/DC0/host"),
            expected,
        ) {
            (Ok(found), Ok(path)) => assert_eq!(found.path, path),
            (Err(Error::NotFound { .. }), Err(0)) => {}
            (Err(Error::Ambiguous { found, .. }), Err(number)) => assert_eq!(found.len(), number),
            (result, expected) => panic!("{text}: {result:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_port_group_is_found_beside_its_switch_and_below_it_and_namesakes_are_told_apart() {
        let portgroup = |id: &str| Listed {
            reference: MoRef::new(PORTGROUP, id),
            name: "pg".into(),
            path: "/DC0/network/pg".into(),
            switch_path: Some(format!("/DC0/network/{id}/pg")),
        };
        let listing = Listing(vec![portgroup("dvs-1"), portgroup("dvs-2")]);
        let pick = |text: &str| listing.pick("network", &[PORTGROUP], text, "/DC0/network");
        assert_eq!(pick("/DC0/network/dvs-2/pg").unwrap().reference.value(), "dvs-2");
        assert_eq!(pick("dvs-1/pg").unwrap().reference.value(), "dvs-1");
        for text in ["pg", "/DC0/network/pg"] {
            let error = pick(text).unwrap_err().to_string();
            assert!(error.contains("dvs-1") && error.contains("dvs-2"), "{error}");
        }
    }

    #[rstest]
    #[case("*", "", true)]
    #[case("a*c", "abbc", true)]
    #[case("a*c", "abbd", false)]
    #[case("a**", "a", true)]
    #[case("?", "", false)]
    #[case("*.vm.*", "x.vm.y", true)]
    #[case("m[ab]", "mb", true)]
    #[case("m[ab]", "mc", false)]
    #[case("m[0-9]*", "m7x", true)]
    #[case("m[^0-9]", "m7", false)]
    #[case("m[^0-9]", "mx", true)]
    #[case("*[ab]", "xab", true)]
    #[case("name [old", "name [old", true)]
    #[case("[a", "a", false)]
    fn patterns_are_those_of_file_names(#[case] pattern: &str, #[case] text: &str, #[case] fits: bool) {
        assert_eq!(glob(pattern, text), fits);
    }
}
