//! How the certificate of a vCenter is verified.
//!
//! Invariant: a certificate is verified unless the operator of the manager turns that off; no manifest can.

use std::sync::Arc;

use aws_lc_rs::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme};

use crate::error::{Error, Result};

/// How the server's certificate is verified.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Trust {
    /// The server shows exactly the certificate with this SHA-1 or SHA-256 thumbprint (hex, with or without colons).
    Thumbprint(String),
    /// The chain ends at one of these PEM certificates.
    Ca(String),
    /// The chain ends at one of the system's CAs.
    System,
    /// Every certificate is accepted.
    Insecure,
}

impl Trust {
    /// Returns the strictest way: a thumbprint, else a CA, else the system's CAs. `insecure` replaces the system's CAs only.
    pub fn new(thumbprint: Option<&str>, ca: Option<&str>, insecure: bool) -> Self {
        let given = |text: Option<&str>| text.map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned);
        match (given(thumbprint), given(ca)) {
            (Some(thumbprint), _) => Self::Thumbprint(thumbprint),
            (None, Some(ca)) => Self::Ca(ca),
            (None, None) if insecure => Self::Insecure,
            (None, None) => Self::System,
        }
    }
}

/// The prefix of the error with which the thumbprint verifier rejects a certificate; it survives the layers between.
const MISMATCH: &str = "thumbprint mismatch: ";

pub(crate) fn client(trust: &Trust, user_agent: &str) -> Result<reqwest::Client> {
    let builder = reqwest::Client::builder()
        .user_agent(user_agent)
        .connect_timeout(CONNECT)
        .redirect(reqwest::redirect::Policy::none())
        .http1_only();
    let builder = match trust {
        Trust::System => builder,
        Trust::Insecure => builder.tls_danger_accept_invalid_certs(true),
        Trust::Ca(pem) => {
            let certificates = reqwest::Certificate::from_pem_bundle(pem.as_bytes())
                .map_err(|cause| invalid("ca.crt", String::new(), cause.to_string()))?;
            if certificates.is_empty() {
                return Err(invalid(
                    "ca.crt",
                    String::new(),
                    "no certificate in PEM form".to_owned(),
                ));
            }
            builder.tls_certs_only(certificates)
        }
        Trust::Thumbprint(text) => builder.tls_backend_preconfigured(pinned(text)?),
    };
    builder
        .build()
        .map_err(|cause| invalid("tls", String::new(), cause.to_string()))
}

/// A vCenter that does not accept a connection within this time is unreachable.
const CONNECT: std::time::Duration = std::time::Duration::from_secs(10);

fn invalid(field: &'static str, value: String, reason: String) -> Error {
    Error::Invalid { field, value, reason }
}

fn pinned(text: &str) -> Result<ClientConfig> {
    let expected = parse(text)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = Arc::new(Pin {
        expected,
        provider: provider.clone(),
    });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|cause| invalid("tls", String::new(), cause.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Ok(config)
}

/// Hex of 20 (SHA-1) or 32 (SHA-256) bytes; colons, dashes and spaces do not matter.
fn parse(text: &str) -> Result<Vec<u8>> {
    let hex: Vec<char> = text.chars().filter(|c| !matches!(c, ':' | '-' | ' ')).collect();
    let bytes: Option<Vec<u8>> = hex
        .chunks(2)
        .map(|pair| {
            u8::from_str_radix(&pair.iter().collect::<String>(), 16)
                .ok()
                .filter(|_| pair.len() == 2)
        })
        .collect();
    match bytes {
        Some(bytes) if bytes.len() == 20 || bytes.len() == 32 => Ok(bytes),
        _ => Err(invalid(
            "thumbprint",
            text.to_owned(),
            "want 20 (SHA-1) or 32 (SHA-256) bytes in hexadecimal, such as AA:BB:…".to_owned(),
        )),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{byte:02X}"))
        .collect::<Vec<_>>()
        .join(":")
}

/// Whether a chain of transport errors says that the certificate was rejected.
pub(crate) fn is_rejected(message: &str) -> bool {
    message.contains("invalid peer certificate")
}

/// Returns the thumbprints of a mismatch from a chain of transport errors: the one shown and the one expected.
pub(crate) fn mismatch(message: &str) -> Option<(String, String)> {
    let (_, rest) = message.split_once(MISMATCH)?;
    let mut words = rest.split_whitespace();
    let seen = words.next()?.to_owned();
    let expected = words.next()?.trim_matches(|c: char| !c.is_ascii_hexdigit()).to_owned();
    Some((seen, expected))
}

#[derive(Debug)]
struct Pin {
    expected: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let algorithm = if self.expected.len() == 20 {
            &digest::SHA1_FOR_LEGACY_USE_ONLY
        } else {
            &digest::SHA256
        };
        let seen = digest::digest(algorithm, leaf.as_ref());
        if seen.as_ref() == self.expected {
            return Ok(ServerCertVerified::assertion());
        }
        let text = format!("{MISMATCH}{} {}", hex(seen.as_ref()), hex(&self.expected));
        Err(rustls::Error::InvalidCertificate(CertificateError::Other(
            rustls::OtherError(Arc::new(WrongThumbprint(text))),
        )))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct WrongThumbprint(String);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&"AA:".repeat(20), 20)]
    #[case(&"ab".repeat(20), 20)]
    #[case(&"AB-".repeat(32), 32)]
    fn a_thumbprint_is_read_in_every_usual_form(#[case] text: &str, #[case] length: usize) {
        assert_eq!(parse(text).unwrap().len(), length);
    }

    #[rstest]
    #[case("")]
    #[case("AA:BB")]
    #[case("zz")]
    #[case("ABC")]
    fn anything_else_is_refused_with_what_to_give(#[case] text: &str) {
        let told = parse(text).unwrap_err().to_string();
        assert!(told.contains("thumbprint") && told.contains("SHA-256"), "{told}");
    }

    #[test]
    fn certificates_are_verified_unless_the_operator_says_otherwise() {
        assert_eq!(Trust::new(None, None, false), Trust::System);
        assert_eq!(Trust::new(Some(" "), Some(""), false), Trust::System);
        assert_eq!(
            Trust::new(Some("AA"), Some("PEM"), true),
            Trust::Thumbprint("AA".into())
        );
        assert_eq!(Trust::new(None, Some("PEM"), true), Trust::Ca("PEM".into()));
        assert_eq!(Trust::new(None, None, true), Trust::Insecure);
    }

    #[test]
    fn a_ca_without_a_certificate_is_refused() {
        let refused = client(&Trust::Ca("not a certificate".into()), "test");
        assert!(matches!(refused, Err(Error::Invalid { field: "ca.crt", .. })));
    }
}
