//! Names of vCenter servers: `host` or `host:port`, reached by HTTPS.
//!
//! Invariant: a server in a manifest is a host and a port, and nothing else of a request: no scheme but
//! HTTPS, no path, no query, no user.

use std::net::Ipv6Addr;

/// The longest name that DNS allows.
const LONGEST_HOST: usize = 253;
/// The default port of HTTPS, which a name may leave out.
const DEFAULT_PORT: u16 = 443;

/// A vCenter server. Two spellings of the same server are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Server {
    host: String,
    port: u16,
}

impl Server {
    /// Reads `host`, `host:port`, `https://host[:port]` or `https://host[:port]/sdk`, which is the path of vCenter's own API.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let bare = match text.split_once("://") {
            Some(("https", rest)) => rest,
            Some((scheme, _)) => return Err(format!("scheme {scheme:?} is not allowed: write host or host:port")),
            None => text,
        };
        let bare = bare.strip_suffix('/').unwrap_or(bare);
        let bare = bare.strip_suffix("/sdk").unwrap_or(bare);
        if let Some(found) = bare.chars().find(|c| matches!(c, '/' | '?' | '#' | '@' | '\\' | '%')) {
            return Err(format!("{found:?} is not allowed: write host or host:port"));
        }
        let (host, port) = split(bare)?;
        Ok(Self {
            host: host.to_ascii_lowercase(),
            port,
        })
    }

    /// Returns `host` or, for another port than 443, `host:port`.
    pub fn authority(&self) -> String {
        match self.port {
            DEFAULT_PORT => self.host.clone(),
            port => format!("{}:{port}", self.host),
        }
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.authority())
    }
}

fn split(text: &str) -> Result<(&str, u16), String> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (inside, after) = rest.split_once(']').ok_or("an IPv6 address needs a closing bracket")?;
            inside
                .parse::<Ipv6Addr>()
                .map_err(|_| format!("{inside:?} is not an IPv6 address"))?;
            let host = text.get(..inside.len() + 2).unwrap_or(text);
            (host, after.strip_prefix(':').or((!after.is_empty()).then_some(after)))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        Some(port) => port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| format!("{port:?} is not a port"))?,
        None => DEFAULT_PORT,
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name = host.starts_with('[') || host.chars().all(allowed);
    if host.is_empty() || host.len() > LONGEST_HOST || !name {
        return Err("want the name or address of a host, such as vcenter.example.com or 10.0.0.1:8443".into());
    }
    Ok((host, port))
}

/// Whether two texts name the same server. Texts that name none are equal to nothing.
pub fn same_server(one: &str, other: &str) -> bool {
    matches!((Server::parse(one), Server::parse(other)), (Ok(one), Ok(other)) if one == other)
}

/// Whether a list of servers has this one; `*` stands for every server.
pub fn contains_server<T: AsRef<str>>(list: &[T], server: &str) -> bool {
    list.iter()
        .map(|entry| entry.as_ref().trim())
        .any(|entry| entry == "*" || same_server(entry, server))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("vc.example.com", "vc.example.com")]
    #[case(" VC.example.com:443 ", "vc.example.com")]
    #[case("vc.example.com:8443", "vc.example.com:8443")]
    #[case("https://10.0.0.1/sdk", "10.0.0.1")]
    #[case("https://10.0.0.1:8989/sdk/", "10.0.0.1:8989")]
    #[case("https://10.0.0.1/", "10.0.0.1")]
    #[case("[fd00::1]:443", "[fd00::1]")]
    #[case("[fd00::1]", "[fd00::1]")]
    fn a_server_is_a_host_and_a_port(#[case] text: &str, #[case] authority: &str) {
        assert_eq!(Server::parse(text).unwrap().authority(), authority);
    }

    #[rstest]
    #[case("")]
    #[case("https://")]
    #[case("http://10.0.0.5:2379")]
    #[case("ftp://vc")]
    #[case("10.0.0.5:2379/v3/kv?x=")]
    #[case("vc/path")]
    #[case("vc/sdk/../x")]
    #[case("vc?query")]
    #[case("vc#fragment")]
    #[case("user:password@vc")]
    #[case("user@vc")]
    #[case("vc:0")]
    #[case("vc:port")]
    #[case("vc:1:2")]
    #[case("v c")]
    #[case("vc\\x")]
    #[case("vc%2fx")]
    #[case("[fd00::1]x")]
    #[case("[vc]")]
    fn anything_else_is_refused(#[case] text: &str) {
        assert!(Server::parse(text).is_err(), "{:?}", Server::parse(text));
    }

    #[test]
    fn servers_are_compared_by_host_and_port() {
        assert!(same_server("VC.example.com", "https://vc.example.com:443/sdk"));
        assert!(!same_server("vc:8443", "vc"));
        assert!(!same_server("", ""));
        assert!(contains_server(&["a", "b:8443"], "B:8443"));
        assert!(contains_server(&["*"], "any"));
        assert!(!contains_server::<&str>(&[], "any"));
    }
}
