//! The webhook's own certificates. Invariant: no CA key is ever kept: each renewal makes a new CA for one serving
//! certificate and throws the CA's key away; the bundle holds the new CA and the one before it, so that a copy of the
//! program that still serves the old certificate is trusted until it has read the new one.

use std::time::Duration;

use jiff::{Timestamp, civil::Date, tz::TimeZone};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

use super::Error;

/// How long a certificate is valid.
const VALID: Duration = Duration::from_secs(90 * 86_400);
/// Renewed after two thirds of its life: a month is left to notice that it cannot be.
const RENEW: Duration = Duration::from_secs(60 * 86_400);
/// Clocks of others may be behind ours.
const SKEW: Duration = Duration::from_secs(86_400);

/// A serving certificate, its key, and what to trust it by; all PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificate {
    pub certificate: String,
    pub key: String,
    pub bundle: String,
    pub renew_after: Timestamp,
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificate(renew after {})", self.renew_after)
    }
}

/// A certificate for `hosts`, trusted together with the CA that `previous` used last.
pub fn make(hosts: &[String], previous: Option<&str>, now: Timestamp) -> Result<Certificate, Error> {
    let failed = |error: rcgen::Error| Error::Certificate(error.to_string());
    let mut ca = params(Vec::new(), "capstan webhook CA", now).map_err(failed)?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let ca_key = KeyPair::generate().map_err(failed)?;
    let ca_pem = ca.self_signed(&ca_key).map_err(failed)?.pem();
    let issuer = Issuer::new(ca, ca_key);
    let mut leaf = params(hosts.to_vec(), "capstan webhook", now).map_err(failed)?;
    leaf.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = leaf.signed_by(&key, &issuer).map_err(failed)?.pem();
    let bundle = format!("{ca_pem}{}", previous.and_then(first_pem).unwrap_or_default());
    Ok(Certificate {
        certificate,
        key: key.serialize_pem(),
        bundle,
        renew_after: now + RENEW,
    })
}

fn params(hosts: Vec<String>, name: &str, now: Timestamp) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let day = |time: Timestamp| {
        let date: Date = time.to_zoned(TimeZone::UTC).date();
        rcgen::date_time_ymd(
            i32::from(date.year()),
            date.month().unsigned_abs(),
            date.day().unsigned_abs(),
        )
    };
    (params.not_before, params.not_after) = (day(now - SKEW), day(now + VALID));
    Ok(params)
}

/// The newest CA of a bundle.
fn first_pem(bundle: &str) -> Option<String> {
    const END: &str = "-----END CERTIFICATE-----\n";
    let normal = bundle.replace("\r\n", "\n");
    normal.find(END).map(|at| normal[..at + END.len()].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_holds_the_new_ca_and_the_one_before() {
        let (now, hosts) = (Timestamp::now(), vec!["localhost".to_owned()]);
        let count = |certificate: &Certificate| certificate.bundle.matches("BEGIN CERTIFICATE").count();
        let first = make(&hosts, None, now).unwrap();
        let second = make(&hosts, Some(&first.bundle), now).unwrap();
        let third = make(&hosts, Some(&second.bundle), now).unwrap();
        assert_eq!((count(&first), count(&second), count(&third)), (1, 2, 2));
        assert!(third.bundle.contains(&first_pem(&second.bundle).unwrap()));
        assert!(!third.bundle.contains(&first.bundle));
        assert!(first.renew_after > now && first.renew_after < now + VALID);
    }
}
