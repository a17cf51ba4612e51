//! Durations on the command line, as Go programs write them: `90s`, `10m`, `1h30m`, `500ms`.

use std::time::Duration;

use capstan_api::duration::Unreadable;

/// Refuses what is no duration, and one below zero.
pub fn parse(text: &str) -> Result<Duration, String> {
    let duration: capstan_api::Duration = text.parse().map_err(|error: Unreadable| error.to_string())?;
    if duration.is_negative() {
        return Err(format!("{text:?} is below zero"));
    }
    Ok(duration.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, milliseconds) in [
            ("90s", 90_000),
            ("10m0s", 600_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "10", "ten", "5d", "s", "5e15h", "-1s"] {
            assert!(parse(text).is_err(), "{text:?} was read");
        }
    }
}
