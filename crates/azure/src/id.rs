//! Resource ids, parsed once at the edge. Azure compares them without regard to case, and so do we.
//!
//! Invariant: a parsed id holds valid names only, and no name adds a segment to a printed id.

use crate::Error;
use capstan_core::azure_names::AzureName;
use std::fmt;
use std::str::FromStr;

/// `/subscriptions/{s}/resourceGroups/{g}/providers/{namespace}/{type}/{name}[/{type}/{name}…]`
#[derive(Clone, Debug)]
pub struct ResourceId {
    pub subscription: String,
    pub group: String,
    /// `Microsoft.Compute`
    pub provider: String,
    /// Types and names from the outermost in: `[("virtualMachines", "m1")]`.
    pub segments: Vec<(String, String)>,
}

impl ResourceId {
    pub fn new(subscription: &str, group: &str, provider: &str, kind: &str, name: &str) -> Self {
        Self {
            subscription: subscription.to_owned(),
            group: group.to_owned(),
            provider: provider.to_owned(),
            segments: vec![(kind.to_owned(), name.to_owned())],
        }
    }

    pub fn compute(subscription: &str, group: &str, kind: &str, name: &str) -> Self {
        Self::new(subscription, group, "Microsoft.Compute", kind, name)
    }

    pub fn network(subscription: &str, group: &str, kind: &str, name: &str) -> Self {
        Self::new(subscription, group, "Microsoft.Network", kind, name)
    }

    /// The same id, one level deeper.
    pub fn child(mut self, kind: &str, name: &str) -> Self {
        self.segments.push((kind.to_owned(), name.to_owned()));
        self
    }

    /// The innermost name.
    pub fn name(&self) -> &str {
        self.segments.last().map_or("", |(_, name)| name)
    }

    /// The innermost type.
    pub fn kind(&self) -> &str {
        self.segments.last().map_or("", |(kind, _)| kind)
    }

    /// `Microsoft.Compute/virtualMachineScaleSets/virtualMachines`
    pub fn full_type(&self) -> String {
        let kinds = self.segments.iter().map(|(kind, _)| kind.as_str());
        std::iter::once(self.provider.as_str())
            .chain(kinds)
            .collect::<Vec<_>>()
            .join("/")
    }

    /// As Kubernetes nodes carry it: `azure://` and the id.
    pub fn provider_id(&self) -> String {
        format!("azure://{self}")
    }

    /// The spelling by which equal ids compare equal.
    pub fn key(&self) -> String {
        self.to_string().to_lowercase()
    }
}

impl PartialEq for ResourceId {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ResourceId {}

impl std::hash::Hash for ResourceId {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl fmt::Display for ResourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "/subscriptions/{}/resourceGroups/{}/providers/{}",
            Segment(&self.subscription),
            Segment(&self.group),
            Segment(&self.provider)
        )?;
        self.segments
            .iter()
            .try_for_each(|(kind, name)| write!(f, "/{}/{}", Segment(kind), Segment(name)))
    }
}

/// One segment of an id. Characters that no name has are escaped, so that Azure refuses the id instead of reading another.
struct Segment<'a>(&'a str);

impl fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if AzureName::Resource.check(self.0).is_ok() {
            return f.write_str(self.0);
        }
        self.0.bytes().try_for_each(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => write!(f, "{}", char::from(byte)),
            _ => write!(f, "%{byte:02X}"),
        })
    }
}

impl FromStr for ResourceId {
    type Err = Error;

    /// Reads an id, with or without the `azure://` of a provider id.
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::Invalid {
            field: "resource id",
            value: text.to_owned(),
            reason: "does not name a resource of azure".to_owned(),
        };
        let path = text.strip_prefix("azure://").unwrap_or(text);
        let parts: Vec<&str> = path.strip_prefix('/').ok_or_else(bad)?.split('/').collect();
        let [
            subscriptions,
            subscription,
            groups,
            group,
            providers,
            provider,
            rest @ ..,
        ] = parts.as_slice()
        else {
            return Err(bad());
        };
        let fixed = subscriptions.eq_ignore_ascii_case("subscriptions")
            && groups.eq_ignore_ascii_case("resourceGroups")
            && providers.eq_ignore_ascii_case("providers");
        if !fixed || rest.is_empty() || rest.len() % 2 != 0 {
            return Err(bad());
        }
        if parts.iter().any(|part| AzureName::Resource.check(part).is_err()) {
            return Err(bad());
        }
        Ok(Self {
            subscription: (*subscription).to_owned(),
            group: (*group).to_owned(),
            provider: (*provider).to_owned(),
            segments: rest
                .chunks(2)
                .map(|pair| (pair[0].to_owned(), pair[1].to_owned()))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_compare_without_case() {
        let text =
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/p/virtualMachines/3";
        let id: ResourceId = text.parse().unwrap();
        assert_eq!(id.to_string(), text);
        assert_eq!((id.kind(), id.name()), ("virtualMachines", "3"));
        assert_eq!(id, text.to_uppercase().parse().unwrap());
        assert_eq!(id, id.provider_id().parse().unwrap());
    }

    #[test]
    fn what_is_no_resource_is_refused() {
        for text in [
            "",
            "/subscriptions/s",
            "/subscriptions/s/resourceGroups/g/providers/P/vm",
            "vsphere://x",
            "/a/b/c/d/e/f/g/h",
            "/subscriptions/s/resourceGroups/g?x=/providers/P/vm/m",
            "/subscriptions/s/resourceGroups/../providers/P/vm/m",
            "/subscriptions/s/resourceGroups/g/providers/P/vm/m#",
            "/subscriptions/s/resourceGroups/g%2F/providers/P/vm/m",
            "/subscriptions/s/resourceGroups/g/providers/P/vm/m\n",
        ] {
            assert!(text.parse::<ResourceId>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_hostile_name_adds_no_segment_to_an_id() {
        for name in ["a/b", "..", "x?y=z", "a#b", "%2e%2e", "a\u{0}"] {
            let id = ResourceId::compute("s", name, "virtualMachines", name).to_string();
            assert_eq!(id.split('/').count(), 9, "{id}");
            assert!(!id.contains(['?', '#', '\0']) && !id.contains("/../"), "{id}");
            assert!(id.parse::<ResourceId>().is_err(), "{id}");
        }
    }
}
