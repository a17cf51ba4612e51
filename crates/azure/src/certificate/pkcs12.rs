//! PKCS#12 (RFC 7292): a private key and its certificates under a password.

use zeroize::Zeroizing;

use super::Unreadable;
use super::der::{EXPLICIT_0, IMPLICIT_0, OCTETS, OID, Reader, SEQUENCE};
use super::pbe::Passwords;

const DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 1];
const ENCRYPTED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 6];
const KEY_BAG: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 10, 1, 1];
const SHROUDED_KEY_BAG: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 10, 1, 2];
const CERTIFICATE_BAG: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 10, 1, 3];

/// A key in PKCS#8 with its certificates, in the order of the file.
pub struct Contents {
    pub key: Zeroizing<Vec<u8>>,
    pub certificates: Vec<Vec<u8>>,
}

#[derive(Default)]
struct Found {
    key: Option<Zeroizing<Vec<u8>>>,
    certificates: Vec<Vec<u8>>,
}

pub fn read(bytes: &[u8], password: &str) -> Result<Contents, Unreadable> {
    let mut file = Reader::new(bytes).enter(SEQUENCE)?;
    file.number()?;
    let mut safe = file.enter(SEQUENCE)?;
    if safe.value(OID)? != DATA {
        // Signed by a public key: no common program writes such files.
        return Err(Unreadable::Encryption);
    }
    let safe = safe.enter(EXPLICIT_0)?.value(OCTETS)?;
    let mut passwords = Passwords::new(password);
    if !file.is_empty() {
        let mut mac = file.enter(SEQUENCE)?;
        let mut digest = mac.enter(SEQUENCE)?;
        let algorithm = digest.enter(SEQUENCE)?.value(OID)?;
        let (expected, salt) = (digest.value(OCTETS)?, mac.value(OCTETS)?);
        let iterations = if mac.is_empty() { 1 } else { mac.number()? };
        passwords.verify(algorithm, safe, expected, salt, iterations)?;
    }
    let mut found = Found::default();
    let mut parts = Reader::new(safe).enter(SEQUENCE)?;
    while !parts.is_empty() {
        let mut part = parts.enter(SEQUENCE)?;
        let (kind, mut content) = (part.value(OID)?, part.enter(EXPLICIT_0)?);
        if kind == DATA {
            found.bags(content.value(OCTETS)?, &mut passwords)?;
        } else if kind == ENCRYPTED_DATA {
            let mut encrypted = content.enter(SEQUENCE)?;
            encrypted.number()?;
            let mut encrypted = encrypted.enter(SEQUENCE)?;
            encrypted.value(OID)?;
            let algorithm = encrypted.enter(SEQUENCE)?;
            let plain = passwords.decrypt(algorithm, encrypted.value(IMPLICIT_0)?)?;
            found.bags(&plain, &mut passwords)?;
        } else {
            return Err(Unreadable::Encryption);
        }
    }
    let key = found.key.ok_or(Unreadable::NoKey)?;
    if found.certificates.is_empty() {
        return Err(Unreadable::NoCertificate);
    }
    Ok(Contents {
        key,
        certificates: found.certificates,
    })
}

impl Found {
    fn bags(&mut self, bytes: &[u8], passwords: &mut Passwords) -> Result<(), Unreadable> {
        let mut bags = Reader::new(bytes).enter(SEQUENCE)?;
        while !bags.is_empty() {
            let mut bag = bags.enter(SEQUENCE)?;
            let (kind, mut value) = (bag.value(OID)?, bag.enter(EXPLICIT_0)?);
            if kind == KEY_BAG {
                self.key.get_or_insert(pkcs8(value.value(SEQUENCE)?));
            } else if kind == SHROUDED_KEY_BAG {
                let mut shrouded = value.enter(SEQUENCE)?;
                let algorithm = shrouded.enter(SEQUENCE)?;
                let key = passwords.decrypt(algorithm, shrouded.value(OCTETS)?)?;
                self.key.get_or_insert(key);
            } else if kind == CERTIFICATE_BAG {
                let mut certificate = value.enter(SEQUENCE)?;
                certificate.value(OID)?;
                let der = certificate.enter(EXPLICIT_0)?.value(OCTETS)?;
                self.certificates.push(der.to_vec());
            }
        }
        Ok(())
    }
}

/// Returns the whole SEQUENCE of this content.
fn pkcs8(content: &[u8]) -> Zeroizing<Vec<u8>> {
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes();
    let mut whole = Zeroizing::new(Vec::with_capacity(content.len() + 6));
    whole.extend([SEQUENCE, 0x84]);
    whole.extend(length);
    whole.extend_from_slice(content);
    whole
}
