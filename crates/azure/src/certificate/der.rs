//! As much of DER as PKCS#12 needs.

use super::Unreadable;

pub const INTEGER: u8 = 0x02;
pub const OCTETS: u8 = 0x04;
pub const OID: u8 = 0x06;
pub const SEQUENCE: u8 = 0x30;
/// `[0]` around another value, and `[0]` in the place of OCTET STRING.
pub const EXPLICIT_0: u8 = 0xa0;
pub const IMPLICIT_0: u8 = 0x80;

/// Reads values one after the other.
#[derive(Clone, Copy)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the tag of the next value.
    pub fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    /// Returns the tag and the content of the next value, of any type.
    fn any(&mut self) -> Result<(u8, &'a [u8]), Unreadable> {
        let damaged = Unreadable::Damaged;
        let (tag, rest) = self.0.split_first().ok_or(damaged)?;
        let (first, mut rest) = rest.split_first().ok_or(damaged)?;
        let mut length = usize::from(*first);
        if *first >= 0x80 {
            let count = usize::from(first & 0x7f);
            // A length of indefinite form, or of more than 4 GiB.
            if count == 0 || count > 4 {
                return Err(damaged);
            }
            let (bytes, after) = rest.split_at_checked(count).ok_or(damaged)?;
            length = bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
            rest = after;
        }
        let (content, rest) = rest.split_at_checked(length).ok_or(damaged)?;
        self.0 = rest;
        Ok((*tag, content))
    }

    /// Returns the content of the next value, which has this tag.
    pub fn value(&mut self, tag: u8) -> Result<&'a [u8], Unreadable> {
        match self.any()? {
            (found, content) if found == tag => Ok(content),
            _ => Err(Unreadable::Damaged),
        }
    }

    /// Returns a reader of the next value's content.
    pub fn enter(&mut self, tag: u8) -> Result<Reader<'a>, Unreadable> {
        self.value(tag).map(Reader)
    }

    pub fn number(&mut self) -> Result<u32, Unreadable> {
        let bytes = self.value(INTEGER)?;
        let digits = bytes.strip_prefix(&[0]).unwrap_or(bytes);
        match bytes.first() {
            Some(first) if *first < 0x80 && digits.len() <= 4 => {
                Ok(digits.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
            }
            _ => Err(Unreadable::Damaged),
        }
    }
}
