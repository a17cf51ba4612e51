//! Azure's rules for names. Every name that becomes part of a Resource Manager address is checked here first.
//!
//! Invariant: a name that passes holds no character that could change an address (`/`, `?`, `#`, `%`, `\`, control
//! characters) and is neither `.` nor `..`.
//!
//! Rules: learn.microsoft.com, "Naming rules and restrictions for Azure resources". Azure is more lenient than that page
//! with virtual machines, scale sets and disks: it takes dots and underscores, and 80 characters. So are we.

use std::fmt;

/// Kinds of names, each with its rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AzureName {
    Subscription,
    /// The directory of a sign-in: its GUID or one of its domains.
    Tenant,
    ResourceGroup,
    VirtualMachine,
    ScaleSet,
    /// An instance of a Uniform scale set.
    Instance,
    Disk,
    AvailabilitySet,
    NetworkInterface,
    PublicIpAddress,
    VirtualNetwork,
    Subnet,
    LoadBalancer,
    SecurityGroup,
    /// Any other resource.
    Resource,
}

/// A name that Azure would not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidName {
    pub kind: AzureName,
    pub value: String,
}

/// Longer values are cut in messages.
const SHOWN: usize = 120;

impl InvalidName {
    /// What is wrong and what to write instead, without the value.
    pub fn reason(&self) -> String {
        format!("not a valid name, use {}", self.kind.rule())
    }

    /// The value, cut where it is long.
    pub fn shown(&self) -> String {
        self.value.chars().take(SHOWN).collect()
    }
}

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.kind.noun(), self.shown(), self.reason())
    }
}

impl std::error::Error for InvalidName {}

/// What a name is made of. Many kinds share a rule.
#[derive(Clone, Copy)]
enum Rule {
    Guid,
    Tenant,
    Group,
    /// The names of most resources, with this many characters at most.
    Ordinary80,
    Ordinary64,
    Segment,
}

impl AzureName {
    const fn syntax(self) -> Rule {
        match self {
            Self::Subscription => Rule::Guid,
            Self::Tenant => Rule::Tenant,
            Self::ResourceGroup => Rule::Group,
            Self::VirtualNetwork => Rule::Ordinary64,
            Self::VirtualMachine
            | Self::ScaleSet
            | Self::Instance
            | Self::Disk
            | Self::AvailabilitySet
            | Self::NetworkInterface
            | Self::PublicIpAddress
            | Self::Subnet
            | Self::LoadBalancer
            | Self::SecurityGroup => Rule::Ordinary80,
            Self::Resource => Rule::Segment,
        }
    }

    /// Refuses a name that breaks Azure's rule for this kind.
    pub fn check(self, name: &str) -> Result<(), InvalidName> {
        let fits = match self.syntax() {
            Rule::Guid => is_guid(name),
            Rule::Tenant => is_tenant(name),
            Rule::Group => is_group(name),
            Rule::Ordinary80 => is_ordinary(name, 80),
            Rule::Ordinary64 => is_ordinary(name, 64),
            Rule::Segment => is_segment(name),
        };
        if fits {
            return Ok(());
        }
        Err(InvalidName {
            kind: self,
            value: name.to_owned(),
        })
    }

    /// The rule as a regular expression for a CRD schema (RE2, anchored).
    pub const fn pattern(self) -> &'static str {
        match self.syntax() {
            Rule::Guid => r"^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
            Rule::Tenant => r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?$",
            Rule::Group => r"^[-\p{L}\p{M}\p{N}_.()]{0,89}[-\p{L}\p{M}\p{N}_()]$",
            Rule::Ordinary80 => r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,78}[A-Za-z0-9_])?$",
            Rule::Ordinary64 => r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?$",
            Rule::Segment => r"^[-\p{L}\p{M}\p{N}_.()]*[-\p{L}\p{M}\p{N}_()]$",
        }
    }

    /// What the name names, without an article.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Subscription => "subscription",
            Self::Tenant => "tenant",
            Self::ResourceGroup => "resource group",
            Self::VirtualMachine => "virtual machine",
            Self::ScaleSet => "scale set",
            Self::Instance => "scale set's instance",
            Self::Disk => "disk",
            Self::AvailabilitySet => "availability set",
            Self::NetworkInterface => "network interface",
            Self::PublicIpAddress => "public address",
            Self::VirtualNetwork => "virtual network",
            Self::Subnet => "subnet",
            Self::LoadBalancer => "load balancer",
            Self::SecurityGroup => "security group",
            Self::Resource => "azure resource",
        }
    }

    /// The rule in words.
    pub const fn rule(self) -> &'static str {
        match self.syntax() {
            Rule::Guid => "its id, such as 00000000-0000-0000-0000-000000000000",
            Rule::Tenant => "its id or its domain",
            Rule::Group => "1 to 90 letters, digits, '-', '_', '.', '(' or ')', not ending with '.'",
            Rule::Ordinary80 => {
                "1 to 80 letters, digits, '-', '_' or '.', starting with a letter or digit, not ending with '-' or '.'"
            }
            Rule::Ordinary64 => {
                "1 to 64 letters, digits, '-', '_' or '.', starting with a letter or digit, not ending with '-' or '.'"
            }
            Rule::Segment => "1 to 260 letters, digits, '-', '_', '.', '(' or ')', not ending with '.'",
        }
    }
}

/// Checks a whole resource id, or the provider id made of one: every segment is a valid name.
pub fn check_id(id: &str) -> Result<(), InvalidName> {
    let path = id.strip_prefix("azure://").unwrap_or(id);
    let mut segments = path.strip_prefix('/').unwrap_or(path).split('/');
    segments.try_for_each(|segment| AzureName::Resource.check(segment))
}

fn is_guid(name: &str) -> bool {
    let lengths = [8, 4, 4, 4, 12];
    let parts: Vec<&str> = name.split('-').collect();
    parts.len() == lengths.len()
        && parts
            .iter()
            .zip(lengths)
            .all(|(part, length)| part.len() == length && part.chars().all(|c| c.is_ascii_hexdigit()))
}

fn is_tenant(name: &str) -> bool {
    (1..=254).contains(&name.len())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
}

/// Azure takes letters and digits of all alphabets here.
fn is_group(name: &str) -> bool {
    is_liberal(name, 90)
}

fn is_segment(name: &str) -> bool {
    is_liberal(name, 260)
}

fn is_liberal(name: &str, longest: usize) -> bool {
    (1..=longest).contains(&name.chars().count())
        && name
            .chars()
            .all(|c| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '(' | ')'))
        && !name.ends_with('.')
}

fn is_ordinary(name: &str, longest: usize) -> bool {
    (1..=longest).contains(&name.len())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && !name.ends_with(['-', '.'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    const ALL: [AzureName; 15] = [
        AzureName::Subscription,
        AzureName::Tenant,
        AzureName::ResourceGroup,
        AzureName::VirtualMachine,
        AzureName::ScaleSet,
        AzureName::Instance,
        AzureName::Disk,
        AzureName::AvailabilitySet,
        AzureName::NetworkInterface,
        AzureName::PublicIpAddress,
        AzureName::VirtualNetwork,
        AzureName::Subnet,
        AzureName::LoadBalancer,
        AzureName::SecurityGroup,
        AzureName::Resource,
    ];

    #[rstest::rstest]
    #[case::group(AzureName::ResourceGroup, "My-RG_(1).x")]
    #[case::group_of_another_alphabet(AzureName::ResourceGroup, "größe")]
    #[case::machine(AzureName::VirtualMachine, "cluster-worker-eastus1-abcde")]
    #[case::machine_with_dots(AzureName::VirtualMachine, "m.1")]
    #[case::member_of_a_flexible_set(AzureName::VirtualMachine, "pool_1a2b3c4d")]
    #[case::disk(AzureName::Disk, "m1_OSDisk")]
    #[case::instance(AzureName::Instance, "0")]
    #[case::subscription(AzureName::Subscription, "5b3f1c0e-7f0a-4d6b-9a51-0c2d3e4f5a6b")]
    #[case::tenant(AzureName::Tenant, "contoso.onmicrosoft.com")]
    fn names_that_azure_takes_pass(#[case] kind: AzureName, #[case] name: &str) {
        assert_eq!(kind.check(name), Ok(()));
    }

    #[test]
    fn names_that_could_change_an_address_are_refused_for_every_kind() {
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "prod-rg?api-version=2021-04-01&x=",
            "a#b",
            "a%2Fb",
            "a\\b",
            "a\nb",
            "a\0",
            "a b",
            "x/../y",
            "a;b",
            "@host",
        ] {
            for kind in ALL {
                assert!(kind.check(name).is_err(), "{kind:?} {name:?}");
            }
        }
    }

    #[test]
    fn a_refusal_names_the_value_and_the_rule() {
        let error = AzureName::ResourceGroup.check("prod?x").unwrap_err();
        assert_eq!(
            error.to_string(),
            "resource group \"prod?x\": not a valid name, \
             use 1 to 90 letters, digits, '-', '_', '.', '(' or ')', not ending with '.'"
        );
    }

    #[test]
    fn ids_are_checked_by_segment() {
        let good = "azure:///subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/m";
        assert_eq!(check_id(good), Ok(()));
        assert!(check_id(&good.replace("/g/", "/g?x=/")).is_err());
        assert!(check_id(&good.replace("/g/", "/../")).is_err());
    }

    /// Compiled once: patterns with all alphabets are large.
    static PATTERNS: LazyLock<Vec<(AzureName, regex::Regex)>> = LazyLock::new(|| {
        let compiled = |kind: AzureName| regex::RegexBuilder::new(kind.pattern()).size_limit(1 << 28).build();
        ALL.map(|kind| (kind, compiled(kind).unwrap())).to_vec()
    });

    #[rstest::rstest]
    #[case::longest_group(AzureName::ResourceGroup, 90)]
    #[case::longest_machine(AzureName::VirtualMachine, 80)]
    #[case::longest_network(AzureName::VirtualNetwork, 64)]
    fn the_longest_name_passes_and_one_more_letter_does_not(#[case] kind: AzureName, #[case] longest: usize) {
        let pattern = &PATTERNS.iter().find(|(other, _)| *other == kind).unwrap().1;
        for (length, fits) in [(longest, true), (longest + 1, false)] {
            let name = "a".repeat(length);
            assert_eq!(
                (kind.check(&name).is_ok(), pattern.is_match(&name)),
                (fits, fits),
                "{length}"
            );
        }
    }

    proptest! {
        #[test]
        fn the_pattern_and_the_check_agree(name in "[-a-zA-Z0-9_.()?/% äß]{0,30}") {
            for (kind, pattern) in PATTERNS.iter() {
                prop_assert_eq!(pattern.is_match(&name), kind.check(&name).is_ok(), "{:?} {:?}", kind, name);
            }
        }
    }
}
