//! The states that Azure reports as text.

use std::fmt;

/// The provisioning state of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProvisioningState {
    Creating,
    Updating,
    Deleting,
    Succeeded,
    Failed,
    Canceled,
    /// A state that this program does not know; Azure is still at work.
    Other(String),
}

impl ProvisioningState {
    /// Whether Azure has ended its work.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Canceled)
    }

    pub fn as_str(&self) -> &str {
        match self {
            Self::Creating => "Creating",
            Self::Updating => "Updating",
            Self::Deleting => "Deleting",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Canceled => "Canceled",
            Self::Other(other) => other,
        }
    }

    /// A resource that reports no state is complete.
    pub(crate) fn of(reported: Option<&str>) -> Self {
        reported
            .filter(|state| !state.is_empty())
            .map_or(Self::Succeeded, Self::from)
    }
}

impl From<&str> for ProvisioningState {
    fn from(text: &str) -> Self {
        let known = [
            Self::Creating,
            Self::Updating,
            Self::Deleting,
            Self::Succeeded,
            Self::Failed,
            Self::Canceled,
        ];
        known
            .into_iter()
            .find(|state| state.as_str().eq_ignore_ascii_case(text))
            .unwrap_or_else(|| Self::Other(text.to_owned()))
    }
}

impl fmt::Display for ProvisioningState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a machine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerState {
    Starting,
    Running,
    Stopping,
    Stopped,
    Deallocating,
    Deallocated,
    Other(String),
}

impl PowerState {
    /// As Azure spells it, without `PowerState/`.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Deallocating => "deallocating",
            Self::Deallocated => "deallocated",
            Self::Other(other) => other,
        }
    }
}

impl From<&str> for PowerState {
    fn from(text: &str) -> Self {
        let known = [
            Self::Starting,
            Self::Running,
            Self::Stopping,
            Self::Stopped,
            Self::Deallocating,
            Self::Deallocated,
        ];
        known
            .into_iter()
            .find(|state| state.as_str().eq_ignore_ascii_case(text))
            .unwrap_or_else(|| Self::Other(text.to_owned()))
    }
}

impl fmt::Display for PowerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_without_regard_to_case_and_unknown_ones_are_kept() {
        assert_eq!(ProvisioningState::from("succeeded"), ProvisioningState::Succeeded);
        let migrating = ProvisioningState::from("Migrating");
        assert!(!migrating.is_final() && migrating.as_str() == "Migrating");
        assert_eq!(ProvisioningState::of(None), ProvisioningState::Succeeded);
        assert_eq!(PowerState::from("Running"), PowerState::Running);
        assert_eq!(PowerState::from("hibernated").to_string(), "hibernated");
    }
}
