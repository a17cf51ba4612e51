//! The files, and the identities of this process, that the operator allows credentials of tenants to use.
//!
//! Invariant: a file that a tenant names is opened only if it is a small regular file in one of the operator's folders.
//! A refusal reveals nothing about files elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tokio::io::AsyncReadExt as _;

/// Certificates, tokens and credential files are a few KiB.
const LARGEST_FILE: u64 = 1 << 20;

/// Namespaces that may use the identity of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Namespaces {
    #[default]
    None,
    All,
    Only(BTreeSet<String>),
}

impl Namespaces {
    pub fn contain(&self, namespace: &str) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Only(names) => names.contains(namespace),
        }
    }
}

/// The client ids that a namespace may name without a secret or a certificate of its own, because Capstan's token or machine is
/// enough to sign in as them. Without any, every namespace may name every client id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIds(BTreeMap<String, BTreeSet<String>>);

/// One client id and the namespace that may name it; `*` allows every namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIdOf {
    namespace: String,
    client_id: String,
}

impl FromStr for ClientIdOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('=')
            .map(|(namespace, id)| (namespace.trim(), id.trim()));
        match parts {
            Some((namespace, id)) if !namespace.is_empty() && !id.is_empty() && !id.contains('=') => Ok(Self {
                namespace: namespace.to_owned(),
                client_id: id.to_ascii_lowercase(),
            }),
            _ => Err(format!("{text:?} is not NAMESPACE=CLIENT-ID")),
        }
    }
}

impl FromIterator<ClientIdOf> for ClientIds {
    fn from_iter<I: IntoIterator<Item = ClientIdOf>>(all: I) -> Self {
        let mut ids = BTreeMap::<_, BTreeSet<_>>::new();
        for ClientIdOf { namespace, client_id } in all {
            ids.entry(namespace).or_default().insert(client_id);
        }
        Self(ids)
    }
}

impl ClientIds {
    /// Refuses a client id that the operator does not allow for the namespace.
    pub fn check(&self, namespace: &str, client_id: &str) -> Result<(), String> {
        let id = client_id.to_ascii_lowercase();
        let allowed = |name: &str| self.0.get(name).is_some_and(|ids| ids.contains(&id));
        if self.0.is_empty() || allowed(namespace) || allowed("*") {
            return Ok(());
        }
        Err(format!(
            "client id {client_id:?} is not allowed for namespace {namespace}: name another one, or start capstan with \
             --allow-client-ids={namespace}={client_id}"
        ))
    }
}

/// The permissions that the operator grants; read once, at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// The namespaces whose objects may use the identity of this process.
    pub environment_identity: Namespaces,
    /// The client ids that are used by the token or the machine of this process.
    pub client_ids: ClientIds,
    /// The folders from which a tenant may name a file.
    pub folders: Vec<PathBuf>,
}

impl Allowed {
    /// Reads a file that a tenant names in `field`. All refusals are alike.
    pub async fn read(&self, field: &str, path: &str) -> Result<Vec<u8>, String> {
        let read = async {
            let target = self.target(path).await?;
            let mut bytes = Vec::new();
            let file = tokio::fs::File::open(&target).await.ok()?;
            file.take(LARGEST_FILE).read_to_end(&mut bytes).await.ok()?;
            Some(bytes)
        };
        read.await.ok_or_else(|| self.refusal(field, path))
    }

    /// Checks a file that a tenant names in `field` and that another component reads. All refusals have the same text.
    pub async fn check(&self, field: &str, path: &str) -> Result<(), String> {
        let target = self.target(path).await;
        target.map(drop).ok_or_else(|| self.refusal(field, path))
    }

    /// Returns where the path leads, if that may be read. A mounted Secret is full of links: only their targets count.
    async fn target(&self, path: &str) -> Option<PathBuf> {
        let target = tokio::fs::canonicalize(path).await.ok()?;
        self.contain(&target).await.then_some(())?;
        let described = tokio::fs::metadata(&target).await.ok()?;
        (described.is_file() && described.len() <= LARGEST_FILE).then_some(target)
    }

    async fn contain(&self, target: &Path) -> bool {
        for folder in &self.folders {
            if let Ok(folder) = tokio::fs::canonicalize(folder).await
                && target.starts_with(folder)
            {
                return true;
            }
        }
        false
    }

    fn refusal(&self, field: &str, path: &str) -> String {
        let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
        let folders = match folders.is_empty() {
            true => "a folder that --azure-credential-folder names".to_owned(),
            false => folders.join(" or "),
        };
        format!("{field} {path:?} is not a readable file of at most 1 MiB in {folders}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_names_the_client_ids_that_the_operator_allows() {
        let read =
            |texts: &[&str]| -> ClientIds { texts.iter().map(|text| text.parse::<ClientIdOf>().unwrap()).collect() };
        assert_eq!(ClientIds::default().check("team-a", "any"), Ok(()));
        let ids = read(&["team-a=AB-1", "team-a=ab-2", "team-b = ab-3", "*=ab-4"]);
        for (namespace, id, expected) in [
            ("team-a", "ab-1", true),
            ("team-a", "AB-2", true),
            ("team-a", "ab-3", false),
            ("team-b", "ab-3", true),
            ("team-b", "ab-1", false),
            ("team-c", "ab-4", true),
            ("team-c", "", false),
            ("*", "ab-1", false),
        ] {
            assert_eq!(ids.check(namespace, id).is_ok(), expected, "{namespace} {id}");
        }
        let refusal = ids.check("team-b", "ab-1").unwrap_err();
        assert!(refusal.ends_with("--allow-client-ids=team-b=ab-1"), "{refusal}");
        for text in ["team-a", "=x", "team-a=", "team-a=x=y", ""] {
            assert!(text.parse::<ClientIdOf>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_tenant_names_small_regular_files_of_the_operators_folders_only() {
        let home = std::env::temp_dir().join(format!("capstan-allowed-{}", std::process::id()));
        let (inside, outside) = (home.join("inside"), home.join("outside"));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(inside.join("cert"), "pem").unwrap();
        std::fs::write(inside.join("large"), vec![0; 1 + LARGEST_FILE as usize]).unwrap();
        std::fs::write(outside.join("cert"), "pem").unwrap();
        std::os::unix::fs::symlink(inside.join("cert"), inside.join("link")).unwrap();
        std::os::unix::fs::symlink(outside.join("cert"), inside.join("way-out")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", inside.join("endless")).unwrap();
        // A socket is no regular file, like a FIFO, and the standard library can create one.
        let _socket = std::os::unix::net::UnixListener::bind(inside.join("socket")).unwrap();
        let allowed = Allowed {
            folders: vec![home.join("missing"), inside.clone()],
            ..Allowed::default()
        };
        for readable in ["cert", "link", "../inside/cert"].map(|name| inside.join(name)) {
            let path = readable.to_str().unwrap();
            assert_eq!(allowed.read("certPath", path).await.unwrap(), b"pem");
            assert_eq!(allowed.check("certPath", path).await, Ok(()));
        }
        let refused = [
            "large",
            "way-out",
            "endless",
            "socket",
            "missing",
            ".",
            "../outside/cert",
            "../missing",
            "/dev/zero",
        ];
        for refused in refused.map(|name| inside.join(name)) {
            let path = refused.to_str().unwrap();
            let refusal = allowed.read("certPath", path).await.unwrap_err();
            let same = format!("certPath {refused:?} is not a readable file of at most 1 MiB in ");
            assert!(refusal.starts_with(&same), "{refusal}");
            assert_eq!(allowed.check("certPath", path).await, Err(refusal));
        }
        std::fs::remove_dir_all(home).unwrap();
    }
}
