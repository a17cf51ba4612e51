//! The Azure cloud, by the variables that Azure's own SDKs read.

use crate::client::MAX_ANSWER;
use crate::{Allowed, Error, InProcess, Metrics};
use capstan_core::Clock;
use capstan_core::interceptor::Interceptors;
use reqwest::Url;
use std::path::PathBuf;

/// The endpoints of one Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cloud {
    pub name: String,
    /// The authority that issues tokens, e.g. `https://login.microsoftonline.com`.
    pub authority: Url,
    /// The Resource Manager, e.g. `https://management.azure.com`.
    pub resource_manager: Url,
    /// The audience of the tokens.
    pub audience: String,
}

impl Cloud {
    /// A cloud by its name, in Azure's older or newer spelling.
    pub fn named(name: &str) -> Result<Self, Error> {
        let (name, authority, resource_manager) = match name.to_ascii_lowercase().as_str() {
            "" | "azurepubliccloud" | "azurecloud" | "azurepublic" | "public" => (
                "AzurePublicCloud",
                "https://login.microsoftonline.com",
                "https://management.azure.com",
            ),
            "azureusgovernmentcloud" | "azureusgovernment" | "azuregovernment" | "usgovernment" => (
                "AzureUSGovernmentCloud",
                "https://login.microsoftonline.us",
                "https://management.usgovcloudapi.net",
            ),
            "azurechinacloud" | "azurechina" | "china" => (
                "AzureChinaCloud",
                "https://login.chinacloudapi.cn",
                "https://management.chinacloudapi.cn",
            ),
            _ => {
                return Err(Error::Invalid {
                    field: "AZURE_ENVIRONMENT",
                    value: name.to_owned(),
                    reason: "no cloud of this name; use AzurePublicCloud, AzureUSGovernmentCloud or AzureChinaCloud"
                        .to_owned(),
                });
            }
        };
        Self::custom(name, authority, resource_manager)
    }

    /// A cloud by its two addresses.
    pub fn custom(name: &str, authority: &str, resource_manager: &str) -> Result<Self, Error> {
        let authority = https("AZURE_AUTHORITY_HOST", authority)?;
        let resource_manager = https("AZURE_RESOURCE_MANAGER_ENDPOINT", resource_manager)?;
        let audience = resource_manager.as_str().trim_end_matches('/').to_owned();
        Ok(Self {
            name: name.to_owned(),
            authority,
            resource_manager,
            audience,
        })
    }

    pub(crate) fn scope(&self) -> String {
        format!("{}/.default", self.audience.trim_end_matches('/'))
    }
}

fn https(name: &'static str, value: &str) -> Result<Url, Error> {
    let refuse = |reason: String| Error::Invalid {
        field: name,
        value: value.to_owned(),
        reason,
    };
    let text = if value.contains("://") {
        value.to_owned()
    } else {
        format!("https://{value}")
    };
    let url = Url::parse(&text).map_err(|error| refuse(error.to_string()))?;
    if url.scheme() != "https" {
        return Err(refuse(
            "must be an https address, for tokens are never sent in the clear".to_owned(),
        ));
    }
    Ok(url)
}

/// Everything that [`crate::Clients`] needs. Proxies are read by the HTTP client from `HTTPS_PROXY` and `NO_PROXY`.
#[derive(Clone, Debug)]
pub struct Settings {
    pub cloud: Cloud,
    /// Roots to trust besides the system's (`SSL_CERT_FILE`).
    pub ca_file: Option<PathBuf>,
    /// Bytes of one answer that are read at most.
    pub max_answer: usize,
    pub clock: Clock,
    /// The files and identities that credentials of tenants may use.
    pub allowed: Allowed,
    pub interceptors: Interceptors,
    pub metrics: Metrics,
    /// Answers requests in the place of Azure, if there is to be no network.
    pub in_process: Option<InProcess>,
}

impl Settings {
    pub fn new(cloud: Cloud) -> Self {
        Self {
            cloud,
            ca_file: None,
            max_answer: MAX_ANSWER,
            clock: Clock::system(),
            allowed: Allowed::default(),
            interceptors: Interceptors::default(),
            metrics: Metrics::default(),
            in_process: None,
        }
    }

    pub fn from_env() -> Result<Self, Error> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`Settings::from_env`], with the variables given.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let set = |name: &str| var(name).filter(|value| !value.is_empty());
        let mut cloud = Cloud::named(&set("AZURE_ENVIRONMENT").unwrap_or_default())?;
        if let Some(authority) = set("AZURE_AUTHORITY_HOST") {
            cloud.authority = https("AZURE_AUTHORITY_HOST", &authority)?;
        }
        if let Some(endpoint) = set("AZURE_RESOURCE_MANAGER_ENDPOINT") {
            cloud = Cloud::custom(&cloud.name, cloud.authority.as_str(), &endpoint)?;
        }
        if let Some(audience) = set("AZURE_RESOURCE_MANAGER_AUDIENCE") {
            cloud.audience = audience;
        }
        Ok(Self {
            ca_file: set("SSL_CERT_FILE").map(PathBuf::from),
            ..Self::new(cloud)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn settings(vars: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::from_vars(|name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[rstest]
    #[case::default("", "https://login.microsoftonline.com/", "https://management.azure.com/.default")]
    #[case::government(
        "AzureUSGovernment",
        "https://login.microsoftonline.us/",
        "https://management.usgovcloudapi.net/.default"
    )]
    #[case::china(
        "AzureChinaCloud",
        "https://login.chinacloudapi.cn/",
        "https://management.chinacloudapi.cn/.default"
    )]
    fn clouds_are_known_by_name(#[case] name: &str, #[case] authority: &str, #[case] scope: &str) {
        let cloud = settings(&[("AZURE_ENVIRONMENT", name)]).unwrap().cloud;
        assert_eq!((cloud.authority.as_str(), cloud.scope().as_str()), (authority, scope));
    }

    #[test]
    fn a_custom_cloud_comes_from_the_sdks_own_variables() {
        let settings = settings(&[
            ("AZURE_AUTHORITY_HOST", "https://localhost:1"),
            ("AZURE_RESOURCE_MANAGER_ENDPOINT", "https://localhost:2/"),
            ("SSL_CERT_FILE", "/tmp/ca.pem"),
        ])
        .unwrap();
        assert_eq!(settings.cloud.authority.port(), Some(1));
        assert_eq!(settings.cloud.scope(), "https://localhost:2/.default");
        assert_eq!(settings.ca_file.unwrap().to_str(), Some("/tmp/ca.pem"));
    }

    #[rstest]
    #[case::name("AZURE_ENVIRONMENT", "Mars")]
    #[case::http("AZURE_AUTHORITY_HOST", "http://localhost")]
    #[case::http_endpoint("AZURE_RESOURCE_MANAGER_ENDPOINT", "http://localhost")]
    fn a_bad_setting_is_named_with_its_value(#[case] name: &str, #[case] value: &str) {
        let error = settings(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}
