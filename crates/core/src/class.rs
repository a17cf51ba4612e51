//! How a controller reacts to an error. Every error enum of the workspace implements [`Classified`].

use std::time::Duration;

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It may go away by itself: retry with backoff.
    Transient,
    /// The other side asked for a pause: retry no earlier than this.
    Throttled(Duration),
    /// It stays until a user changes the object: report it, do not retry in a loop.
    Terminal,
}

/// An error that says how to react to it.
pub trait Classified {
    fn class(&self) -> Class;
}
