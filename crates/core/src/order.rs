//! The order of machines where a policy says `Random`.

/// Returns a number that depends on the UID alone: machines sorted by it are in no order that anybody can see, yet every
/// reconcile, process and version of Capstan chooses the same one. (FNV-1a; std's hasher promises no such thing.)
pub fn random(uid: &str) -> u64 {
    uid.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
