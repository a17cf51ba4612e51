//! Durations as Go writes them (`1h30m`, `-1.5s`). Invariant: no text causes a panic or makes an object unreadable. Where
//! the API server accepts any text, one bad object must not stop the watch of all.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{borrow::Cow, fmt, str::FromStr, time};

/// A duration, signed as in Go. A value that Go cannot hold becomes the largest that it can.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Duration {
    nanos: i64,
}

/// The text is not a duration.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Unreadable(String);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no duration: write it as 90s, 5m or 1h30m", self.0)
    }
}

impl std::error::Error for Unreadable {}

const NANOS: i128 = 1_000_000_000;
/// More digits than this after the point are below a nanosecond, whatever the unit.
const FRACTION_DIGITS: usize = 18;

impl Duration {
    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }
}

impl From<time::Duration> for Duration {
    fn from(duration: time::Duration) -> Self {
        Self {
            nanos: i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX),
        }
    }
}

/// Drops the sign of the duration.
impl From<Duration> for time::Duration {
    fn from(duration: Duration) -> Self {
        Self::from_nanos(duration.nanos.unsigned_abs())
    }
}

impl FromStr for Duration {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || Unreadable(text.chars().take(64).collect());
        let (negative, mut rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        if rest.is_empty() {
            return Err(refuse());
        }
        let mut total = 0i128;
        while !rest.is_empty() && rest != "0" {
            let (nanos, after) = term(rest).ok_or_else(refuse)?;
            total = total.saturating_add(nanos);
            rest = after;
        }
        let signed = if negative { -total } else { total };
        let nanos = signed.clamp(i128::from(i64::MIN), i128::from(i64::MAX));
        Ok(Self { nanos: nanos as i64 })
    }
}

/// Reads one number with its unit, such as `1.5h`. Returns its nanoseconds and the rest of the text.
fn term(text: &str) -> Option<(i128, &str)> {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let whole = digits(text);
    let (number, mut rest) = text.split_at(whole);
    let mut fraction = "";
    if let Some(after) = rest.strip_prefix('.') {
        (fraction, rest) = after.split_at(digits(after));
    }
    if number.is_empty() && fraction.is_empty() {
        return None;
    }
    let end = rest
        .find(|c: char| c == '.' || c.is_ascii_digit())
        .unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(end);
    let unit: i128 = match unit {
        "ns" => 1,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => NANOS,
        "m" => 60 * NANOS,
        "h" => 3_600 * NANOS,
        _ => return None,
    };
    // A number that does not fit exceeds the maximum, too.
    let whole: i128 = if number.is_empty() {
        0
    } else {
        number.parse().unwrap_or(i128::MAX)
    };
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS)];
    let part: i128 = fraction.parse().unwrap_or(0);
    let scale = 10i128.pow(fraction.len() as u32);
    Some((whole.saturating_mul(unit).saturating_add(part * unit / scale), rest))
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is_negative() { "-" } else { "" };
        let nanos = self.nanos.unsigned_abs();
        let (seconds, fraction) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        if fraction == 0 {
            return write!(f, "{sign}{seconds}s");
        }
        let fraction = format!("{fraction:09}");
        write!(f, "{sign}{seconds}.{}s", fraction.trim_end_matches('0'))
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Reads a field. A value that is no duration counts as unset: Capstan's own definitions reject it, other definitions
/// may not.
pub fn lenient<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let value = Option::<serde_json::Value>::deserialize(deserializer)?;
    Ok(value.as_ref().and_then(|value| value.as_str()?.parse().ok()))
}

impl JsonSchema for Duration {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_go_reads_them() {
        let seconds = |text: &str| text.parse::<Duration>().map(|duration| duration.to_string());
        for (text, expected) in [
            ("0", "0s"),
            ("90s", "90s"),
            ("1h30m", "5400s"),
            ("-1.5s", "-1.5s"),
            ("+.5s", "0.5s"),
            ("1.s", "1s"),
            ("250ms", "0.25s"),
            ("3\u{b5}s", "0.000003s"),
            ("1h0", "3600s"),
            ("99999999999999999999999999999999999999999h", "9223372036.854775807s"),
            ("-99999999999999999999999999999999999999999h", "-9223372036.854775808s"),
        ] {
            assert_eq!(seconds(text).as_deref(), Ok(expected), "{text}");
        }
        for text in ["", "-", "5", "s", "5x", "1h-5m", "1e9h", "--5s", "5 s", ".s", "\u{b5}"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        assert_eq!(
            "5x".parse::<Duration>().map_err(|error| error.to_string()),
            Err("\"5x\" is no duration: write it as 90s, 5m or 1h30m".to_owned())
        );
    }
}
