//! Seeded chance: the same seed gives the same names, times and choices.

use std::ops::RangeInclusive;
use std::time::Duration;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

/// The letters of generated names: Kubernetes leaves out vowels, so that generated names contain no words.
const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

impl Rng {
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

    /// Returns a number from 0 up to, and without, `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.number() % (bound.max(1) as u64)) as usize
    }

    /// Whether something happens that happens `percent` times in a hundred.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len()))
    }

    pub fn between(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let width = range.end().saturating_sub(*range.start()).as_millis() as usize;
        if width == 0 {
            return *range.start();
        }
        *range.start() + Duration::from_millis(self.below(width + 1) as u64)
    }

    pub fn uid(&mut self) -> String {
        let (a, b) = (self.number(), self.number());
        format!(
            "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
            a >> 32,
            (a >> 16) & 0xffff,
            a & 0xfff,
            b >> 52,
            b & 0xffff_ffff_ffff
        )
    }

    /// The end of a generated name.
    pub fn suffix(&mut self) -> String {
        (0..5).map(|_| LETTERS[self.below(LETTERS.len())] as char).collect()
    }
}
