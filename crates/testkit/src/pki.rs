//! Certificates of one control plane: a CA of its own, a serving certificate, and client certificates that carry user
//! and group, so that RBAC decides as in a real cluster.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use crate::files;

/// A client's certificate and key, PEM.
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

pub struct Pki {
    dir: PathBuf,
    ca: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// Opens the one in `dir`, or creates it: a control plane that is started again in the same folder keeps its
    /// kubeconfigs and service account tokens valid.
    pub fn open(dir: &Path) -> Result<Self> {
        let (ca_file, key_file) = (dir.join("ca.crt"), dir.join("ca.key"));
        if let (Ok(ca), Ok(key)) = (fs::read_to_string(&ca_file), fs::read_to_string(&key_file)) {
            let key = KeyPair::from_pem(&key).context("cannot read ca.key")?;
            let issuer = Issuer::from_ca_cert_pem(&ca, key).context("cannot read ca.crt")?;
            return Ok(Self {
                dir: dir.to_owned(),
                ca,
                issuer,
            });
        }
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "capstan-local-ca");
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let ca = params.self_signed(&key)?.pem();
        files::write(&ca_file, &ca)?;
        files::write_private(&key_file, key.serialize_pem())?;
        let service_accounts = KeyPair::generate()?;
        files::write_private(&dir.join("sa.key"), service_accounts.serialize_pem())?;
        files::write(&dir.join("sa.pub"), service_accounts.public_key_pem())?;
        let pki = Self {
            dir: dir.to_owned(),
            ca,
            issuer: Issuer::new(params, key),
        };
        pki.serving("apiserver")?;
        Ok(pki)
    }

    pub fn ca(&self) -> &str {
        &self.ca
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Creates `NAME.crt` and `NAME.key` for a server on loopback.
    pub fn serving(&self, name: &str) -> Result<()> {
        self.serving_for(name, &[])
    }

    /// As [`Pki::serving`], for a server that has these names, too.
    pub fn serving_for(&self, name: &str, more: &[String]) -> Result<()> {
        let names = [
            "127.0.0.1",
            "::1",
            "localhost",
            "10.0.0.1",
            "kubernetes",
            "kubernetes.default.svc",
        ];
        let names = names.iter().map(ToString::to_string).chain(more.iter().cloned());
        let mut params = CertificateParams::new(names.collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        files::write(&self.file(&format!("{name}.crt")), certificate.pem())?;
        files::write_private(&self.file(&format!("{name}.key")), key.serialize_pem())
    }

    /// A client certificate for `user` in `group`.
    pub fn client(&self, user: &str, group: &str) -> Result<Identity> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}
