//! Certificates with their private keys, in the forms that users have: PEM, or PKCS#12 (.pfx, .p12), as such or in
//! base64.
//!
//! Invariant: the cost of reading is bounded for any input. Tenants give certificates, and a file may ask for any
//! number of iterations.

mod der;
mod pbe;
mod pkcs12;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use capstan_core::Secret;
use zeroize::Zeroizing;

/// The reason for which a certificate cannot be read. The text never repeats a part of the certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error("the certificate is neither PEM nor PKCS#12 (.pfx, .p12)")]
    Format,
    #[error("the PKCS#12 file is damaged")]
    Damaged,
    #[error("the password of the PKCS#12 file is wrong or missing")]
    Password,
    #[error(
        "the PKCS#12 file uses an encryption that Capstan does not read: write it again with \
         `openssl pkcs12 -export -keypbe AES-256-CBC -certpbe AES-256-CBC`"
    )]
    Encryption,
    #[error(
        "the PKCS#12 file asks for more than {} iterations: write it again with fewer",
        pbe::MOST_ITERATIONS
    )]
    Iterations,
    #[error("the PKCS#12 file has no private key")]
    NoKey,
    #[error("the PKCS#12 file has no certificate")]
    NoCertificate,
}

/// Returns certificates and private key as one PEM text. PKCS#12 without a password has an empty one.
pub fn to_pem(bytes: &[u8], password: &Secret) -> Result<Secret, Unreadable> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        if text.contains("-----BEGIN ") {
            return Ok(Secret::new(text.trim_end_matches('\n')));
        }
        let compact: Zeroizing<String> = Zeroizing::new(text.split_whitespace().collect());
        let decoded = STANDARD.decode(compact.as_bytes()).map_err(|_| Unreadable::Format)?;
        return from_pkcs12(&Zeroizing::new(decoded), password);
    }
    from_pkcs12(bytes, password)
}

fn from_pkcs12(bytes: &[u8], password: &Secret) -> Result<Secret, Unreadable> {
    let contents = pkcs12::read(bytes, password.reveal())?;
    let mut text = Zeroizing::new(String::with_capacity(4 * bytes.len()));
    for certificate in &contents.certificates {
        push(&mut text, "CERTIFICATE", certificate);
    }
    push(&mut text, "PRIVATE KEY", &contents.key);
    Ok(Secret::new(text.as_str()))
}

fn push(text: &mut String, label: &str, der: &[u8]) {
    let body = Zeroizing::new(STANDARD.encode(der));
    for part in ["-----BEGIN ", label, "-----\n", &body, "\n-----END ", label, "-----\n"] {
        text.push_str(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Identity;
    use crate::assertion::Certificate;
    use capstan_core::Clock;
    use rstest::rstest;

    // One throwaway key and certificate, packed by OpenSSL 3 with `openssl pkcs12 -export -inkey k.pem -in c.pem` and
    // `-certfile` for a second certificate: AES-256 with PBKDF2; `-legacy`: RC2-40 and 3DES, as OpenSSL 1 and Windows do;
    // `-keypbe PBE-SHA1-3DES -certpbe PBE-SHA1-3DES -macalg sha1`.
    const MODERN: &str = include_str!("fixtures/modern.pfx.txt");
    const LEGACY: &str = include_str!("fixtures/legacy.pfx.txt");
    const TRIPLE_DES: &str = include_str!("fixtures/des.pfx.txt");

    fn raw(text: &str) -> Vec<u8> {
        STANDARD.decode(text.split_whitespace().collect::<String>()).unwrap()
    }

    #[rstest]
    #[case::of_today(MODERN, "pässword", 2)]
    #[case::of_old_tools_without_a_password(LEGACY, "", 1)]
    #[case::of_windows_without_a_password(TRIPLE_DES, "", 1)]
    fn a_pkcs12_certificate_signs_in(#[case] file: &str, #[case] password: &str, #[case] certificates: usize) {
        let password = Secret::new(password);
        let (whole, text) = (
            to_pem(&raw(file), &password).unwrap(),
            to_pem(file.as_bytes(), &password).unwrap(),
        );
        assert_eq!(whole.reveal(), text.reveal(), "base64 is read like the file itself");
        assert_eq!(whole.reveal().matches("BEGIN CERTIFICATE").count(), certificates);
        let identity = Identity {
            tenant: "t".into(),
            client_id: "app".into(),
        };
        let certificate = Certificate::new(&identity, &whole, "https://a".into(), Clock::system()).unwrap();
        certificate.assertion(1000, "id".into()).unwrap();
    }

    #[test]
    fn all_packings_of_one_key_are_the_same_key() {
        let key = |file: &str, password: &str| {
            let pem = to_pem(file.as_bytes(), &Secret::new(password)).unwrap();
            pem.reveal().split("-----BEGIN PRIVATE KEY").nth(1).unwrap().to_owned()
        };
        assert_eq!(key(MODERN, "pässword"), key(LEGACY, ""));
        assert_eq!(key(MODERN, "pässword"), key(TRIPLE_DES, ""));
    }

    #[rstest]
    #[case::a_wrong_password(raw(MODERN), "other", Unreadable::Password)]
    #[case::a_password_that_is_missing(raw(MODERN), "", Unreadable::Password)]
    #[case::a_wrong_password_of_an_old_file(raw(LEGACY), "other", Unreadable::Password)]
    #[case::a_text(b"hello".to_vec(), "", Unreadable::Format)]
    #[case::nothing(Vec::new(), "", Unreadable::Damaged)]
    #[case::a_part(raw(MODERN)[..1000].to_vec(), "pässword", Unreadable::Damaged)]
    #[case::other_bytes(vec![0xff; 64], "", Unreadable::Damaged)]
    fn anything_else_is_refused(#[case] bytes: Vec<u8>, #[case] password: &str, #[case] why: Unreadable) {
        assert_eq!(to_pem(&bytes, &Secret::new(password)).unwrap_err(), why);
    }

    #[test]
    fn pem_stays_as_it_is() {
        let pem = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
        assert_eq!(
            to_pem(pem.as_bytes(), &Secret::default()).unwrap().reveal(),
            pem.trim_end()
        );
    }

    #[test]
    fn a_damaged_file_never_panics() {
        let whole = raw(LEGACY);
        for n in (0..whole.len()).step_by(7) {
            let mut damaged = whole.clone();
            damaged[n] ^= 0x5a;
            let _ = to_pem(&damaged, &Secret::default());
            let _ = to_pem(&whole[..n], &Secret::default());
        }
    }
}
