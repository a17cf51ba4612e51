//! Secrets in memory. Invariant: a secret is never printed, and its memory is erased when the last copy is dropped.

use std::fmt;
use std::hash::{Hash, Hasher};

use zeroize::Zeroizing;

/// A password, a client secret or a private key. Each copy is erased when it is dropped.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(Zeroizing::new(value.into()))
    }

    /// Returns the value, for the client that sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self::new(value)
    }
}

impl From<&str> for Secret {
    fn from(value: &str) -> Self {
        Self::new(value)
    }
}

impl Hash for Secret {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.as_str().hash(state);
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom};

    /// Reads the memory of this process.
    fn memory(address: usize, length: usize) -> Vec<u8> {
        let mut memory = std::fs::File::open("/proc/self/mem").unwrap();
        memory.seek(SeekFrom::Start(address as u64)).unwrap();
        let mut bytes = vec![0; length];
        memory.read_exact(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_secret_is_erased_when_it_is_dropped() {
        // The allocator writes its own data into the first bytes of freed memory, so the test reads the last ones.
        let text = format!("{}-{}", "x".repeat(64), "hunter2-hunter2-hunter2");
        let secret = Secret::new(text.clone());
        let (address, length) = (secret.reveal().as_ptr() as usize, text.len());
        assert_eq!(memory(address, length), text.as_bytes());
        drop(secret);
        let left = memory(address, length);
        assert!(!left.ends_with(b"hunter2"), "{left:?}");
    }

    #[test]
    fn a_secret_is_not_printed() {
        assert_eq!(format!("{:?}", Secret::new("hunter2")), "Secret(…)");
    }
}
