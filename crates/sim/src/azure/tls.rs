//! The simulator's own certificate authority. Clients trust its certificate file and nothing is sent in the clear, because
//! Azure's SDKs refuse bearer tokens over plain HTTP.

use std::sync::Arc;

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};

/// Hosts that clients without an endpoint setting insist on; a hosts file may point them here.
const PUBLIC_HOSTS: [&str; 2] = ["management.azure.com", "login.microsoftonline.com"];

/// Certificate and key of the authority, kept with saved state so that a restart keeps the clients' trust.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Authority {
    pub certificate: String,
    key: String,
}

impl Authority {
    pub fn new() -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let certificate = Self::params()?.self_signed(&key)?;
        Ok(Self {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    fn params() -> anyhow::Result<CertificateParams> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "Capstan simulated Azure");
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        Ok(params)
    }

    /// A server configuration with a fresh certificate for these names and for Azure's public hosts.
    pub fn server(&self, names: &[String]) -> anyhow::Result<Arc<rustls::ServerConfig>> {
        let issuer = Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)?;
        let names: Vec<String> = names.iter().cloned().chain(PUBLIC_HOSTS.map(str::to_owned)).collect();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, "localhost");
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate: CertificateDer<'static> = params.signed_by(&key, &issuer)?.der().clone();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("no usable TLS version")?
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}
