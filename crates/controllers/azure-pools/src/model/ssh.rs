//! SSH keys: the pool's own, or one that nobody can log in with.

use aws_lc_rs::rsa::{KeyPair, KeySize};
use aws_lc_rs::signature::KeyPair as _;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

const KIND: &str = "ssh-rsa";

/// The public key as the spec has it: base64 around the line of `id_rsa.pub`.
pub fn decode(key: &str) -> Option<String> {
    let bytes = BASE64.decode(key.trim()).ok().filter(|bytes| !bytes.is_empty())?;
    Some(String::from_utf8(bytes).ok()?.trim_end().to_owned())
}

/// A public key whose private half is dropped at once. Azure wants a key of every Linux machine, and a pool without one
/// of its own is not meant to be logged in to.
pub fn generate() -> Option<String> {
    let pair = KeyPair::generate(KeySize::Rsa2048).ok()?;
    let public = pair.public_key();
    let (exponent, modulus) = (public.exponent(), public.modulus());
    let mut blob = Vec::new();
    put(&mut blob, KIND.as_bytes());
    put(&mut blob, &positive(exponent.big_endian_without_leading_zero()));
    put(&mut blob, &positive(modulus.big_endian_without_leading_zero()));
    Some(BASE64.encode(format!("{KIND} {} capstan\n", BASE64.encode(blob))))
}

fn put(blob: &mut Vec<u8>, bytes: &[u8]) {
    blob.extend((bytes.len() as u32).to_be_bytes());
    blob.extend(bytes);
}

/// A number whose first bit is set needs a zero in front, or it would be read as negative.
fn positive(number: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(number.len() + 1);
    if number.first().is_some_and(|first| *first >= 0x80) {
        bytes.push(0);
    }
    bytes.extend(number);
    bytes
}
