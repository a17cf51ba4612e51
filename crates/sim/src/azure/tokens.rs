//! Sign-in: the token endpoint, its discovery documents, and the metadata of the cloud.

use std::collections::HashMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::wire::{Answer, Call, Fail, Reply};
use super::world::World;

/// Tokens that are out.
#[derive(Default)]
pub struct Tokens {
    issued: HashMap<String, Instant>,
    pub sign_ins: u64,
}

impl Tokens {
    /// Whether the call carries a token that is still good.
    pub fn check(&self, call: &Call, now: Instant) -> Result<(), Fail> {
        let Some(token) = call
            .header("authorization")
            .and_then(|value| value.strip_prefix("Bearer "))
        else {
            return Err(Fail::new(
                401,
                "AuthenticationFailed",
                "Authentication failed. The 'Authorization' header is missing.",
            ));
        };
        match self.issued.get(token) {
            Some(until) if *until > now => Ok(()),
            Some(_) => Err(Fail::new(
                401,
                "ExpiredAuthenticationToken",
                "The access token expiry UTC time is earlier than current UTC time.",
            )),
            None => Err(Fail::new(
                401,
                "InvalidAuthenticationToken",
                "The access token is invalid.",
            )),
        }
    }

    /// Every token that is out stops working, as after a revocation.
    pub fn revoke(&mut self) {
        self.issued.clear();
    }

    fn issue(&mut self, world: &mut World, client: &str, audience: &str) -> Value {
        let now = world.clock.wall().as_second();
        let life = world.config.token_lifetime;
        let until = now + life.as_secs() as i64;
        let tenant = &world.config.tenant;
        let claims = json!({ "aud": audience, "iss": format!("https://sts.windows.net/{tenant}/"), "iat": now, "nbf": now, "exp": until,
            "appid": client, "oid": client, "sub": client, "tid": tenant, "idtyp": "app", "ver": "1.0", "uti": world.chance.hex(22) });
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let token = format!(
            "{}.{}.{}",
            part(&json!({ "typ": "JWT", "alg": "none" })),
            part(&claims),
            URL_SAFE_NO_PAD.encode("simulated")
        );
        let end = world.now() + life;
        self.issued.insert(token.clone(), end);
        self.sign_ins += 1;
        json!({ "token_type": "Bearer", "expires_in": life.as_secs(), "ext_expires_in": life.as_secs(), "expires_on": until.to_string(),
            "not_before": now.to_string(), "resource": audience, "access_token": token })
    }

    /// `POST /{tenant}/oauth2/[v2.0/]token`.
    pub fn token(&mut self, world: &mut World, call: &Call) -> Reply {
        let form = call.form();
        let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
        let refuse = |error: &str, code: u64, text: &str| {
            let body =
                json!({ "error": error, "error_description": format!("AADSTS{code}: {text}"), "error_codes": [code] });
            Ok(Answer::new(
                if error == "invalid_request" {
                    StatusCode::BAD_REQUEST
                } else {
                    StatusCode::UNAUTHORIZED
                },
                body,
            ))
        };
        if !call.segment(0).eq_ignore_ascii_case(&world.config.tenant) {
            return refuse(
                "invalid_request",
                90002,
                &format!("Tenant '{}' not found.", call.segment(0)),
            );
        }
        match field("grant_type") {
            "client_credentials" if !field("client_assertion").is_empty() => {}
            "client_credentials" if field("client_id") != world.config.client_id => {
                return refuse(
                    "unauthorized_client",
                    700016,
                    &format!(
                        "Application with identifier '{}' was not found in the directory.",
                        field("client_id")
                    ),
                );
            }
            "client_credentials" if field("client_secret") != world.config.client_secret => {
                return refuse("invalid_client", 7000215, "Invalid client secret provided.");
            }
            "client_credentials" | "refresh_token" => {}
            other => {
                return refuse(
                    "unsupported_grant_type",
                    70003,
                    &format!("The app requested an unsupported grant type '{other}'."),
                );
            }
        }
        let audience = field("scope")
            .split(' ')
            .next()
            .unwrap_or_default()
            .trim_end_matches("/.default");
        let audience = if audience.is_empty() {
            field("resource")
        } else {
            audience
        };
        Ok(Answer::ok(self.issue(world, field("client_id"), audience)))
    }

    /// `GET /metadata/identity/oauth2/token`: a managed identity's token, as the instance metadata service gives it to
    /// clients that send `Metadata: true`, and App Service's endpoint to clients that send the secret of the
    /// environment.
    pub fn managed(&mut self, world: &mut World, call: &Call) -> Reply {
        if call.header("metadata") != Some("true") && call.header("x-identity-header").is_none() {
            return Err(Fail::bad("invalid_request", "Required metadata header not specified"));
        }
        let audience = call.query.get("resource").cloned().unwrap_or_default();
        let client = call
            .query
            .get("client_id")
            .cloned()
            .unwrap_or_else(|| world.config.client_id.clone());
        Ok(Answer::ok(self.issue(world, &client, &audience)))
    }
}

/// `GET /{tenant}/[v2.0/].well-known/openid-configuration`.
pub fn openid(call: &Call) -> Reply {
    let base = format!("{}/{}", call.base, call.segment(0));
    Ok(Answer::ok(json!({
        "token_endpoint": format!("{base}/oauth2/v2.0/token"), "authorization_endpoint": format!("{base}/oauth2/v2.0/authorize"),
        "device_authorization_endpoint": format!("{base}/oauth2/v2.0/devicecode"), "jwks_uri": format!("{base}/discovery/v2.0/keys"),
        "issuer": format!("{base}/v2.0"), "tenant_region_scope": "NA", "cloud_instance_name": "simulated",
        "token_endpoint_auth_methods_supported": ["client_secret_post", "private_key_jwt", "client_secret_basic"],
        "response_types_supported": ["code", "id_token", "token"], "subject_types_supported": ["pairwise"],
        "id_token_signing_alg_values_supported": ["RS256"],
    })))
}

/// `GET /common/discovery/instance`: yes, this authority is known.
pub fn instance_discovery(call: &Call) -> Reply {
    let host = call.base.trim_start_matches("https://");
    Ok(Answer::ok(
        json!({ "tenant_discovery_endpoint": format!("{}/common/v2.0/.well-known/openid-configuration", call.base),
        "api-version": "1.1", "metadata": [{ "preferred_network": host, "preferred_cache": host, "aliases": [host] }] }),
    ))
}

/// `GET /metadata/endpoints`: one object for new versions, as `az cloud register` expects.
pub fn endpoints(call: &Call) -> Reply {
    let base = &call.base;
    Ok(Answer::ok(json!({
        "portal": base, "gallery": base, "graph": base, "graphAudience": base, "name": "simulated",
        "authentication": { "loginEndpoint": base, "audiences": [format!("{base}/"), "https://management.core.windows.net/", "https://management.azure.com/"],
            "tenant": "common", "identityProvider": "AAD" },
        "media": base, "batch": base, "resourceManager": format!("{base}/"), "vmImageAliasDoc": format!("{base}/aliases"),
        "activeDirectoryDataLake": base, "sqlManagement": base, "microsoftGraphResourceId": base, "appInsightsResourceId": base,
        "appInsightsTelemetryChannelResourceId": base, "attestationResourceId": base, "synapseAnalyticsResourceId": base,
        "logAnalyticsResourceId": base, "ossrDbmsResourceId": base,
        "suffixes": { "keyVaultDns": "vault.azure.net", "storage": "core.windows.net", "acrLoginServer": "azurecr.io",
            "mhsmDns": "managedhsm.azure.net", "sqlServerHostname": "database.windows.net", "azureFrontDoorEndpointSuffix": "azurefd.net",
            "mysqlServerEndpoint": "mysql.database.azure.com", "mariadbServerEndpoint": "mariadb.database.azure.com",
            "postgresqlServerEndpoint": "postgres.database.azure.com", "synapseAnalytics": "dev.azuresynapse.net",
            "attestationEndpoint": "attest.azure.net" },
    })))
}
