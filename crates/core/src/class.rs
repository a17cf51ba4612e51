//! How a failure is to be answered. Every error enum of the workspace answers `class()` with one of these.

use std::time::Duration;

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It may go away by itself: retry with back-off.
    Transient,
    /// The other side asked us to come back later: retry no earlier than this.
    Throttled(Duration),
    /// It stays until somebody changes the object: report it, do not retry in a loop.
    Terminal,
}
