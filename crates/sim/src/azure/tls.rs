//! The simulator's own certificate authority. Clients trust its certificate file, and no client sends plain HTTP,
//! because Azure's SDKs refuse bearer tokens over plain HTTP.
//!
//! Invariant: the authority can vouch for the simulator's own names only (X.509 name constraints). Azure's public hosts
//! are among them only with `--public-hosts`.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};

/// Hosts that clients without an endpoint setting insist on; a hosts file may point them here.
pub const PUBLIC_HOSTS: [&str; 2] = ["management.azure.com", "login.microsoftonline.com"];

/// Certificate and key of the authority, kept with saved state so that a restart keeps the clients' trust.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Authority {
    pub certificate: String,
    key: String,
    /// The only hosts and addresses that it can vouch for.
    #[serde(default)]
    names: Vec<String>,
}

impl Authority {
    pub fn new(names: &[String]) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let certificate = Self::params(names)?.self_signed(&key)?;
        Ok(Self {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            names: names.to_vec(),
        })
    }

    /// Whether it can vouch for all of these names.
    pub fn covers(&self, names: &[String]) -> bool {
        names.iter().all(|name| self.names.contains(name))
    }

    fn params(names: &[String]) -> anyhow::Result<CertificateParams> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: names.iter().map(|name| subtree(name)).collect(),
            excluded_subtrees: Vec::new(),
        });
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

    /// A server configuration with a fresh certificate for these names.
    pub fn server(&self, names: &[String]) -> anyhow::Result<Arc<rustls::ServerConfig>> {
        let issuer = Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)?;
        let mut params = CertificateParams::new(names.to_vec())?;
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

fn subtree(name: &str) -> GeneralSubtree {
    match name.parse::<IpAddr>() {
        Ok(address) => {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, bits))
        }
        Err(_) => GeneralSubtree::DnsName(name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::ServerName;
    use rustls::pki_types::pem::PemObject as _;

    async fn connects(authority: &Authority, name: &'static str) -> bool {
        let server = authority.server(&[name.to_owned()]).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(authority.certificate.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (near, far) = tokio::io::duplex(1 << 16);
        let accepting = tokio::spawn(async move { tokio_rustls::TlsAcceptor::from(server).accept(far).await.is_ok() });
        let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
        let connected = connector.connect(ServerName::try_from(name).unwrap(), near).await;
        let _ = accepting.await;
        connected.is_ok()
    }

    #[tokio::test]
    async fn the_authority_vouches_for_its_own_names_only() {
        let own = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let authority = Authority::new(&own).unwrap();
        assert!(connects(&authority, "localhost").await);
        assert!(connects(&authority, "127.0.0.1").await);
        for other in [
            "management.azure.com",
            "login.microsoftonline.com",
            "127.0.0.2",
            "example.com",
        ] {
            assert!(!connects(&authority, other).await, "{other}");
        }
        assert!(authority.covers(&own) && !authority.covers(&["example.com".to_owned()]));
    }
}
