//! Encryption and integrity by a password, as PKCS#12 (RFC 7292, appendices B and C) and PKCS#5 (RFC 8018) define them.

use std::num::NonZeroU32;

use aws_lc_rs::cipher::{AES_128, AES_192, AES_256, DecryptionContext, PaddedBlockDecryptingKey, UnboundCipherKey};
use aws_lc_rs::iv::FixedLength;
use aws_lc_rs::{digest, hmac, pbkdf2};
use cbc::cipher::block_padding::Pkcs7;
use cbc::cipher::{BlockDecryptMut, InnerIvInit, KeyIvInit};
use zeroize::Zeroizing;

use super::Unreadable;
use super::der::{INTEGER, OCTETS, OID, Reader, SEQUENCE};

/// Iterations of one file in all. Tools use 2,048 for each of three steps; the most careful ones 600,000 for one.
pub const MOST_ITERATIONS: u32 = 1_000_000;

const SHA1: &[u8] = &[0x2b, 0x0e, 3, 2, 0x1a];
const SHA256: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1];
const SHA384: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 2];
const SHA512: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 3];
const SHA1_3DES: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 1, 3];
const SHA1_RC2_128: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 1, 5];
const SHA1_RC2_40: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 12, 1, 6];
const PBES2: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 5, 13];
const PBKDF2: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 5, 12];
const HMAC_SHA256: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 2, 9];
const HMAC_SHA384: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 2, 10];
const HMAC_SHA512: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 2, 11];
const HMAC_SHA1: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 2, 7];
const AES_128_CBC: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 1, 2];
const AES_192_CBC: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 1, 22];
const AES_256_CBC: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 1, 42];

/// The purpose of a derived key.
#[derive(Clone, Copy)]
enum Purpose {
    Key = 1,
    Iv = 2,
    Mac = 3,
}

/// The password in the forms that the algorithms take, and the iterations that are left.
pub struct Passwords {
    utf8: Zeroizing<Vec<u8>>,
    utf16: Zeroizing<Vec<u8>>,
    left: u32,
}

impl Passwords {
    pub fn new(password: &str) -> Self {
        let units = password.encode_utf16().chain([0]).flat_map(u16::to_be_bytes);
        Self {
            utf8: Zeroizing::new(password.as_bytes().to_vec()),
            utf16: Zeroizing::new(units.collect()),
            left: MOST_ITERATIONS,
        }
    }

    fn spend(&mut self, iterations: u32) -> Result<NonZeroU32, Unreadable> {
        self.left = self.left.checked_sub(iterations).ok_or(Unreadable::Iterations)?;
        NonZeroU32::new(iterations).ok_or(Unreadable::Damaged)
    }

    /// Whether the content is whole and the password right.
    pub fn verify(
        &mut self,
        algorithm: &[u8],
        content: &[u8],
        expected: &[u8],
        salt: &[u8],
        iterations: u32,
    ) -> Result<(), Unreadable> {
        let (hash, mac) = match algorithm {
            SHA1 => (&digest::SHA1_FOR_LEGACY_USE_ONLY, hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY),
            SHA256 => (&digest::SHA256, hmac::HMAC_SHA256),
            SHA384 => (&digest::SHA384, hmac::HMAC_SHA384),
            SHA512 => (&digest::SHA512, hmac::HMAC_SHA512),
            _ => return Err(Unreadable::Encryption),
        };
        let iterations = self.spend(iterations)?;
        let proves = |password: &[u8]| {
            let key = derive(hash, Purpose::Mac, password, salt, iterations, hash.output_len());
            hmac::verify(&hmac::Key::new(mac, &key), content, expected).is_ok()
        };
        if proves(&self.utf16) {
            return Ok(());
        }
        // Some tools write no password where others write an empty one.
        if self.utf8.is_empty() && proves(&[]) {
            self.utf16.clear();
            return Ok(());
        }
        Err(Unreadable::Password)
    }

    pub fn decrypt(&mut self, mut algorithm: Reader<'_>, data: &[u8]) -> Result<Zeroizing<Vec<u8>>, Unreadable> {
        let name = algorithm.value(OID)?;
        let mut parameters = algorithm.enter(SEQUENCE)?;
        if name == PBES2 {
            return self.pbes2(parameters, data);
        }
        let salt = parameters.value(OCTETS)?;
        let iterations = parameters.number()?;
        let iterations = self.spend(iterations)?;
        let hash = &digest::SHA1_FOR_LEGACY_USE_ONLY;
        let part = |purpose: Purpose, length: usize| derive(hash, purpose, &self.utf16, salt, iterations, length);
        let (iv, mut plain) = (part(Purpose::Iv, 8), Zeroizing::new(data.to_vec()));
        let length = match name {
            SHA1_3DES => {
                let cipher = cbc::Decryptor::<des::TdesEde3>::new_from_slices(&part(Purpose::Key, 24), &iv);
                unpad(cipher.map_err(|_| Unreadable::Damaged)?, &mut plain)?
            }
            SHA1_RC2_128 => unpad(rc2(&part(Purpose::Key, 16), &iv)?, &mut plain)?,
            SHA1_RC2_40 => unpad(rc2(&part(Purpose::Key, 5), &iv)?, &mut plain)?,
            _ => return Err(Unreadable::Encryption),
        };
        plain.truncate(length);
        Ok(plain)
    }

    fn pbes2(&mut self, mut parameters: Reader<'_>, data: &[u8]) -> Result<Zeroizing<Vec<u8>>, Unreadable> {
        let (mut kdf, mut scheme) = (parameters.enter(SEQUENCE)?, parameters.enter(SEQUENCE)?);
        if kdf.value(OID)? != PBKDF2 {
            return Err(Unreadable::Encryption);
        }
        let mut kdf = kdf.enter(SEQUENCE)?;
        let (salt, iterations) = (kdf.value(OCTETS)?, kdf.number()?);
        if kdf.peek() == Some(INTEGER) {
            kdf.number()?;
        }
        let hash = match kdf.is_empty() {
            true => pbkdf2::PBKDF2_HMAC_SHA1,
            false => match kdf.enter(SEQUENCE)?.value(OID)? {
                HMAC_SHA1 => pbkdf2::PBKDF2_HMAC_SHA1,
                HMAC_SHA256 => pbkdf2::PBKDF2_HMAC_SHA256,
                HMAC_SHA384 => pbkdf2::PBKDF2_HMAC_SHA384,
                HMAC_SHA512 => pbkdf2::PBKDF2_HMAC_SHA512,
                _ => return Err(Unreadable::Encryption),
            },
        };
        let (cipher, length) = match scheme.value(OID)? {
            AES_128_CBC => (&AES_128, 16),
            AES_192_CBC => (&AES_192, 24),
            AES_256_CBC => (&AES_256, 32),
            _ => return Err(Unreadable::Encryption),
        };
        let iv: [u8; 16] = scheme.value(OCTETS)?.try_into().map_err(|_| Unreadable::Damaged)?;
        let mut key = Zeroizing::new(vec![0; length]);
        pbkdf2::derive(hash, self.spend(iterations)?, salt, &self.utf8, &mut key);
        let mut plain = Zeroizing::new(data.to_vec());
        let key = UnboundCipherKey::new(cipher, &key).map_err(|_| Unreadable::Damaged)?;
        let key = PaddedBlockDecryptingKey::cbc_pkcs7(key).map_err(|_| Unreadable::Damaged)?;
        let decrypted = key.decrypt(&mut plain, DecryptionContext::Iv128(FixedLength::from(iv)));
        let length = decrypted.map_err(|_| Unreadable::Password)?.len();
        plain.truncate(length);
        Ok(plain)
    }
}

/// RC2 whose key is as strong as it is long.
fn rc2(key: &[u8], iv: &[u8]) -> Result<cbc::Decryptor<rc2::Rc2>, Unreadable> {
    let cipher = rc2::Rc2::new_with_eff_key_len(key, 8 * key.len());
    cbc::Decryptor::inner_iv_slice_init(cipher, iv).map_err(|_| Unreadable::Damaged)
}

/// Decrypts in place. Returns the length without padding.
fn unpad(cipher: impl BlockDecryptMut, data: &mut [u8]) -> Result<usize, Unreadable> {
    let plain = cipher.decrypt_padded_mut::<Pkcs7>(data);
    plain.map(<[u8]>::len).map_err(|_| Unreadable::Password)
}

/// The key derivation of PKCS#12.
fn derive(
    hash: &'static digest::Algorithm,
    purpose: Purpose,
    password: &[u8],
    salt: &[u8],
    iterations: NonZeroU32,
    length: usize,
) -> Zeroizing<Vec<u8>> {
    let block = hash.block_len();
    let filled = |bytes: &[u8]| -> Vec<u8> {
        let wanted = bytes.len().div_ceil(block) * block;
        bytes.iter().copied().cycle().take(wanted).collect()
    };
    let mut input = Zeroizing::new([filled(salt), filled(password)].concat());
    let mut output = Zeroizing::new(Vec::with_capacity(length + hash.output_len()));
    loop {
        let mut round = digest::Context::new(hash);
        round.update(&vec![purpose as u8; block]);
        round.update(&input);
        let mut result = round.finish();
        for _ in 1..iterations.get() {
            result = digest::digest(hash, result.as_ref());
        }
        output.extend_from_slice(result.as_ref());
        if output.len() >= length {
            output.truncate(length);
            return output;
        }
        let addend: Vec<u8> = result.as_ref().iter().copied().cycle().take(block).collect();
        for part in input.chunks_mut(block) {
            // part = part + addend + 1, as numbers of big-endian bytes.
            let mut carry = 1;
            for (byte, other) in part.iter_mut().zip(&addend).rev() {
                let sum = u16::from(*byte) + u16::from(*other) + carry;
                *byte = (sum & 0xff) as u8;
                carry = sum >> 8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_asks_for_too_many_iterations_is_refused_before_any_is_done() {
        let mut passwords = Passwords::new("");
        let refused = passwords.verify(SHA256, b"", b"", b"salt", u32::MAX);
        assert_eq!(refused, Err(Unreadable::Iterations));
    }

    #[test]
    fn all_parts_of_a_file_share_the_iterations() {
        let mut passwords = Passwords::new("");
        assert!(passwords.spend(MOST_ITERATIONS - 1).is_ok());
        assert!(passwords.spend(1).is_ok());
        assert_eq!(passwords.spend(1), Err(Unreadable::Iterations));
    }

    #[test]
    fn a_key_is_derived_as_in_the_well_known_example() {
        // From the tests of Go's pkcs12 package: password "sesame", salt ff*8, 2048 iterations.
        let passwords = Passwords::new("sesame");
        let iterations = NonZeroU32::new(2048).unwrap();
        let hash = &digest::SHA1_FOR_LEGACY_USE_ONLY;
        let key = derive(hash, Purpose::Key, &passwords.utf16, &[0xff; 8], iterations, 24);
        assert_eq!(key[..4], [0x7c, 0xd9, 0xfd, 0x3e]);
    }
}
