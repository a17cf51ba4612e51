//! Durations on the command line, as Go programs write them: `90s`, `10m`, `1h30m`, `500ms`.

use std::time::Duration;

pub fn parse(text: &str) -> Result<Duration, String> {
    let refuse = || format!("{text:?} is no duration; write it as 90s, 10m or 1h30m");
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let seconds = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            // Go writes a bare zero without a unit.
            "" if text == "0" => 0.0,
            _ => return Err(refuse()),
        };
        let number: f64 = number.parse().map_err(|_| refuse())?;
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| refuse())?;
        total = total.checked_add(part).ok_or_else(refuse)?;
        rest = tail;
    }
    if text.is_empty() { Err(refuse()) } else { Ok(total) }
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
        for text in [
            "",
            "10",
            "ten",
            "5d",
            "s",
            "5e15h",
            "5000000000000000h5000000000000000h",
        ] {
            assert!(parse(text).is_err(), "{text:?} was read");
        }
    }
}
