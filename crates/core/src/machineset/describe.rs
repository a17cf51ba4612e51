//! The steps of a set in words, and what follows them.

use std::fmt;

use jiff::Timestamp;

use super::{Observed, Step, Subject, plan, present};
use crate::plan::{Describe, Forecast, Impact, Wave, counted};

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adopt(machines) => write!(f, "becomes the controller of {}", names(machines).join(", ")),
            Self::Create(count) => write!(f, "creates {}", counted(*count)),
            Self::Delete(machines) => write!(f, "deletes {}", names(machines).join(", ")),
            Self::Annotate(annotations) => {
                let keys: Vec<&str> = annotations.keys().map(String::as_str).collect();
                write!(f, "puts annotations on the set: {}", keys.join(", "))
            }
        }
    }
}

impl Describe for Step {
    fn impact(&self) -> Impact {
        match self {
            Self::Adopt(_) | Self::Create(_) | Self::Delete(_) | Self::Annotate(_) => Impact::Cluster,
        }
    }
}

fn names(machines: &[Subject]) -> Vec<&str> {
    machines.iter().map(|machine| machine.name.as_str()).collect()
}

/// Returns what the set adds and removes at once, and which machines stay.
pub fn forecast(observed: &Observed, now: Timestamp) -> Forecast {
    let mut wave = Wave::default();
    for step in plan(observed, now).steps {
        match step {
            Step::Create(count) => wave.adds += count,
            Step::Delete(machines) => wave.removes.extend(machines.into_iter().map(|machine| machine.name)),
            Step::Adopt(_) | Step::Annotate(_) => {}
        }
    }
    let stay = present(observed).into_iter().map(|member| member.name.clone());
    Forecast {
        stay: stay.filter(|name| !wave.removes.contains(name)).collect(),
        waves: Some(wave).filter(|wave| !wave.is_empty()).into_iter().collect(),
        ..Forecast::default()
    }
}
