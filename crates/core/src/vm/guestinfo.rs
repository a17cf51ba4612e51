//! What the guest reads through guestinfo.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::types::{DesiredVm, UserData};

/// The key of the cloud-init metadata; `.encoding` beside it says base64.
pub const METADATA: &str = "guestinfo.metadata";
/// The keys of bootstrap data and metadata, which every VM of ours is started with.
pub(super) const BOOTSTRAP: [&str; 3] = [METADATA, CLOUD_INIT, IGNITION];
const CLOUD_INIT: &str = "guestinfo.userdata";
const IGNITION: &str = "guestinfo.ignition.config.data";

/// The keys that the clone is made with: user data, then the keys of the spec, which win.
pub fn at_clone(desired: &DesiredVm, user: Option<&UserData>) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    match user {
        Some(UserData::CloudInit(data)) => put(&mut keys, CLOUD_INIT, data),
        Some(UserData::Ignition(data)) => put(&mut keys, IGNITION, data),
        None => {}
    }
    keys.extend(desired.vmx.clone());
    keys
}

/// Puts a document under a key, encoded once whatever it came as.
pub fn put(keys: &mut BTreeMap<String, String>, key: &str, data: &[u8]) {
    keys.insert(key.to_owned(), encode(data));
    keys.insert(format!("{key}.encoding"), "base64".into());
}

fn encode(data: &[u8]) -> String {
    let mut plain = data.to_vec();
    while let Ok(decoded) = STANDARD.decode(&plain) {
        if decoded.is_empty() {
            break;
        }
        plain = decoded;
    }
    if plain.is_empty() {
        String::new()
    } else {
        STANDARD.encode(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_encoded_once_whatever_it_came_as() {
        let once = STANDARD.encode("#cloud-config\n");
        let twice = STANDARD.encode(&once);
        for input in ["#cloud-config\n".to_owned(), once.clone(), twice] {
            assert_eq!(encode(input.as_bytes()), once);
        }
        assert_eq!(encode(b""), "");
    }

    #[test]
    fn keys_of_the_spec_win() {
        let desired = DesiredVm {
            vmx: BTreeMap::from([("guestinfo.userdata".into(), "mine".into())]),
            ..DesiredVm::default()
        };
        let keys = at_clone(&desired, Some(&UserData::Ignition(b"{}x".to_vec())));
        assert_eq!(keys["guestinfo.userdata"], "mine");
        assert_eq!(keys["guestinfo.ignition.config.data.encoding"], "base64");
        assert_eq!(keys["guestinfo.ignition.config.data"], STANDARD.encode("{}x"));
    }
}
