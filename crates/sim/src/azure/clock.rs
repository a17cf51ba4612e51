//! Time as the simulated cloud sees it: tokio's clock (paused or not) plus what an administrator added, and seeded chance.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::time::Instant;

#[derive(Clone, Debug)]
pub struct Clock {
    start: Instant,
    wall: Timestamp,
    added: Duration,
}

impl Clock {
    /// Starts at this time of day, or at the present.
    pub fn start(wall: Option<Timestamp>) -> Self {
        Self {
            start: Instant::now(),
            wall: wall.unwrap_or_else(Timestamp::now),
            added: Duration::ZERO,
        }
    }

    pub fn now(&self) -> Instant {
        Instant::now() + self.added
    }

    /// Returns the time of tokio's clock at `at` of this clock.
    pub fn real(&self, at: Instant) -> Instant {
        at.checked_sub(self.added).unwrap_or(self.start)
    }

    pub fn wall(&self) -> Timestamp {
        self.at(self.now())
    }

    fn at(&self, at: Instant) -> Timestamp {
        let passed = SignedDuration::try_from(at.saturating_duration_since(self.start)).unwrap_or_default();
        self.wall.checked_add(passed).unwrap_or(self.wall)
    }

    /// Seven digits, as Azure prints times.
    pub fn stamp(&self) -> String {
        stamp(self.wall())
    }

    /// The same for a time that has passed.
    pub fn stamp_ago(&self, ago: Duration) -> String {
        let ago = SignedDuration::try_from(ago).unwrap_or_default();
        stamp(self.wall().checked_sub(ago).unwrap_or(self.wall))
    }

    pub fn advance(&mut self, by: Duration) {
        self.added += by;
    }
}

pub fn stamp(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S.%6f").to_string() + "0+00:00"
}

/// SplitMix64: small, seeded, good enough for provisioning times and names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound.max(1)
    }

    pub fn uuid(&mut self) -> String {
        let bytes = (u128::from(self.number()) << 64 | u128::from(self.number())).to_be_bytes();
        uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
    }

    pub fn hex(&mut self, len: usize) -> String {
        self.letters(len, b"0123456789abcdef")
    }

    pub fn base36(&mut self, len: usize) -> String {
        self.letters(len, b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    }

    fn letters(&mut self, len: usize, of: &[u8]) -> String {
        (0..len)
            .map(|_| of[self.below(of.len() as u64) as usize] as char)
            .collect()
    }
}

/// The duration of an operation: fixed, or spread evenly over a range. Written `20s`, `1500ms` or `15s..40s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub min: Duration,
    pub max: Duration,
}

impl Span {
    pub const ZERO: Span = Span {
        min: Duration::ZERO,
        max: Duration::ZERO,
    };

    pub const fn secs(seconds: u64) -> Self {
        Self::fixed(Duration::from_secs(seconds))
    }

    pub const fn millis(millis: u64) -> Self {
        Self::fixed(Duration::from_millis(millis))
    }

    pub const fn fixed(time: Duration) -> Self {
        Self { min: time, max: time }
    }

    pub const fn between(min: Duration, max: Duration) -> Self {
        Self { min, max }
    }

    pub fn draw(&self, chance: &mut Chance) -> Duration {
        let width = self.max.saturating_sub(self.min).as_micros() as u64;
        self.min + Duration::from_micros(chance.below(width + 1))
    }
}

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once("..").unwrap_or((text, text));
        let (min, max) = (duration(min)?, duration(max)?);
        if min > max {
            return Err(format!("{text:?}: the range's end lies before its start"));
        }
        Ok(Self { min, max })
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}ms", self.min.as_millis())?;
        if self.max == self.min {
            Ok(())
        } else {
            write!(f, "..{}ms", self.max.as_millis())
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// `250ms`, `20s`, `1.5s`, `2m`, `1h`, or plain seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.trim() {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{text:?}: write a time as 250ms, 20s, 2m or 1h")),
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?}: write a time as 250ms, 20s, 2m or 1h"))?;
    Duration::try_from_secs_f64(number * scale).map_err(|e| format!("{text:?}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("20s", 20_000, 20_000)]
    #[case("250ms..1.5s", 250, 1500)]
    #[case("2m", 120_000, 120_000)]
    fn times_are_read_and_drawn_within_their_range(#[case] text: &str, #[case] min: u64, #[case] max: u64) {
        let span: Span = text.parse().unwrap();
        let mut chance = Chance::new(7);
        for _ in 0..100 {
            let drawn = span.draw(&mut chance).as_millis() as u64;
            assert!((min..=max).contains(&drawn), "{drawn}");
        }
        assert_eq!(span.to_string().parse::<Span>().unwrap(), span);
    }

    #[test]
    fn the_same_seed_gives_the_same_names() {
        assert_eq!(Chance::new(3).uuid(), Chance::new(3).uuid());
        assert_ne!(Chance::new(3).uuid(), Chance::new(4).uuid());
    }
}
