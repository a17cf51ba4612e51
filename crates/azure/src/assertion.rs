//! Certificate sign-in: a short-lived assertion, signed here, so that OpenSSL is not needed.

use crate::{Error, Identity, Secret};
use async_trait::async_trait;
use aws_lc_rs::signature::KeyPair as _;
use aws_lc_rs::{digest, rand, rsa::KeyPair, signature};
use azure_core::http::ClientMethodOptions;
use azure_identity::ClientAssertion;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use capstan_core::Clock;
use serde::Serialize;
use std::fmt;
use zeroize::Zeroizing;

/// Entra ID refuses assertions that live longer than this.
const LIFETIME_SECONDS: i64 = 600;

#[derive(Serialize)]
struct Header<'a> {
    alg: &'a str,
    typ: &'a str,
    #[serde(rename = "x5t#S256")]
    thumbprint: &'a str,
    x5c: &'a [String],
}

#[derive(Serialize)]
struct Claims<'a> {
    aud: &'a str,
    iss: &'a str,
    sub: &'a str,
    jti: String,
    nbf: i64,
    exp: i64,
}

/// A certificate with its key, ready to sign assertions for one application.
pub struct Certificate {
    key: KeyPair,
    thumbprint: String,
    chain: Vec<String>,
    client_id: String,
    audience: String,
    clock: Clock,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certificate({})", self.thumbprint)
    }
}

impl Certificate {
    /// Reads certificate(s) and an RSA key (PKCS#8 or PKCS#1) from one PEM text.
    pub fn new(identity: &Identity, pem: &Secret, audience: String, clock: Clock) -> Result<Self, Error> {
        let refuse = |reason: &str| Error::Credential {
            identity: identity.to_string(),
            reason: reason.to_owned(),
        };
        let blocks = pem_blocks(pem.reveal()).ok_or_else(|| refuse("the certificate is not readable PEM"))?;
        let key = blocks
            .iter()
            .find_map(|(label, der)| match label.as_str() {
                "PRIVATE KEY" => Some(KeyPair::from_pkcs8(der)),
                "RSA PRIVATE KEY" => Some(KeyPair::from_der(der)),
                _ => None,
            })
            .ok_or_else(|| refuse("no PRIVATE KEY block in the PEM (encrypted keys are not supported)"))?
            .map_err(|_| refuse("the private key is not a usable RSA key, the only kind that Entra ID takes"))?;
        let mut certificates: Vec<_> = blocks.iter().filter(|(label, _)| label == "CERTIFICATE").collect();
        // Files hold the certificates of authorities, too, in any order: the key's own comes first.
        let modulus = key.public_key().modulus().big_endian_without_leading_zero().to_vec();
        certificates.sort_by_key(|(_, der)| !der.windows(modulus.len()).any(|part| part == modulus));
        let (_, first) = certificates
            .first()
            .ok_or_else(|| refuse("no CERTIFICATE block in the PEM"))?;
        Ok(Self {
            key,
            thumbprint: URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, first)),
            chain: certificates
                .iter()
                .map(|(_, der)| STANDARD.encode(der.as_slice()))
                .collect(),
            client_id: identity.client_id.clone(),
            audience,
            clock,
        })
    }

    /// The signed assertion, valid from `now` (seconds since the epoch).
    pub fn assertion(&self, now: i64, id: String) -> Result<String, Error> {
        let refuse = |reason: String| Error::Credential {
            identity: self.client_id.clone(),
            reason,
        };
        let header = Header {
            alg: "PS256",
            typ: "JWT",
            thumbprint: &self.thumbprint,
            x5c: &self.chain,
        };
        let claims = Claims {
            aud: &self.audience,
            iss: &self.client_id,
            sub: &self.client_id,
            jti: id,
            nbf: now,
            exp: now + LIFETIME_SECONDS,
        };
        let encode = |json: Result<Vec<u8>, serde_json::Error>| {
            json.map(|bytes| URL_SAFE_NO_PAD.encode(bytes))
                .map_err(|error| refuse(error.to_string()))
        };
        let signed = format!(
            "{}.{}",
            encode(serde_json::to_vec(&header))?,
            encode(serde_json::to_vec(&claims))?
        );
        let mut signature = vec![0; self.key.public_modulus_len()];
        self.key
            .sign(
                &signature::RSA_PSS_SHA256,
                &rand::SystemRandom::new(),
                signed.as_bytes(),
                &mut signature,
            )
            .map_err(|_| refuse("the private key could not sign".to_owned()))?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

#[async_trait]
impl ClientAssertion for Certificate {
    async fn secret(&self, _options: Option<ClientMethodOptions<'_>>) -> azure_core::Result<String> {
        self.assertion(self.clock.now().as_second(), uuid::Uuid::new_v4().to_string())
            .map_err(|error| {
                azure_core::Error::with_message(azure_core::error::ErrorKind::Credential, error.to_string())
            })
    }
}

/// The blocks of a PEM text: label and content.
fn pem_blocks(text: &str) -> Option<Vec<(String, Zeroizing<Vec<u8>>)>> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, Zeroizing<String>)> = None;
    for line in text.lines().map(str::trim) {
        if let Some(label) = line
            .strip_prefix("-----BEGIN ")
            .and_then(|rest| rest.strip_suffix("-----"))
        {
            // Room for all of it: a text that grows leaves copies behind.
            open = Some((label.to_owned(), Zeroizing::new(String::with_capacity(text.len()))));
        } else if line.starts_with("-----END ") {
            let (label, body) = open.take()?;
            blocks.push((label, Zeroizing::new(STANDARD.decode(body.as_bytes()).ok()?)));
        } else if let Some((_, body)) = &mut open {
            body.push_str(line);
        }
    }
    open.is_none().then_some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_lc_rs::encoding::AsDer as _;
    use aws_lc_rs::rsa::KeySize;
    use aws_lc_rs::signature::UnparsedPublicKey;

    fn pem(label: &str, der: &[u8]) -> String {
        format!(
            "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
            STANDARD.encode(der)
        )
    }

    fn identity() -> Identity {
        Identity {
            tenant: "t".into(),
            client_id: "app".into(),
        }
    }

    #[test]
    fn an_assertion_is_signed_by_the_key_and_names_the_certificate() {
        let key = KeyPair::generate(KeySize::Rsa2048).unwrap();
        let text = pem("CERTIFICATE", b"der") + &pem("PRIVATE KEY", key.as_der().unwrap().as_ref());
        let certificate = Certificate::new(
            &identity(),
            &Secret::new(text),
            "https://a/t/oauth2/v2.0/token".into(),
            Clock::system(),
        )
        .unwrap();
        let assertion = certificate.assertion(1000, "id".into()).unwrap();

        let (signed, signature) = assertion.rsplit_once('.').unwrap();
        UnparsedPublicKey::new(&signature::RSA_PSS_2048_8192_SHA256, key.public_key().as_ref())
            .verify(signed.as_bytes(), &URL_SAFE_NO_PAD.decode(signature).unwrap())
            .unwrap();
        let (header, claims) = signed.split_once('.').unwrap();
        let json = |part: &str| -> serde_json::Value {
            serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).unwrap()).unwrap()
        };
        assert_eq!(
            json(header)["x5t#S256"],
            URL_SAFE_NO_PAD.encode(digest::digest(&digest::SHA256, b"der"))
        );
        assert_eq!(json(claims)["exp"], 1600);
        assert_eq!(json(claims)["iss"], "app");
    }

    #[test]
    fn a_pem_without_key_is_refused_without_showing_it() {
        let error = Certificate::new(
            &identity(),
            &Secret::new(pem("CERTIFICATE", b"der")),
            String::new(),
            Clock::system(),
        )
        .unwrap_err();
        assert!(error.to_string().contains("no PRIVATE KEY"), "{error}");
        assert!(
            Certificate::new(
                &identity(),
                &Secret::new("-----BEGIN X-----"),
                String::new(),
                Clock::system()
            )
            .is_err()
        );
    }
}
