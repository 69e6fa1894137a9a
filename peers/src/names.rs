//! Names of chains and sets. They contain a hash if a service's name may be too long.

use data_encoding::BASE32_NOPAD;
use sha2::{Digest as _, Sha256};

/// Returns the first `len` letters of the SHA-256 of `text` in base 32.
pub fn hash(text: &str, len: usize) -> String {
    let mut hash = BASE32_NOPAD.encode(&Sha256::digest(text));
    hash.truncate(len);
    hash
}

/// Returns the name of an iptables chain: `KUBE-SVC-` (for prefix `SVC`) and 16 letters of the hash
/// of `what`.
pub fn chain(prefix: &str, what: &str) -> String {
    format!("KUBE-{prefix}-{}", hash(what, 16))
}

/// Returns an nftables name: 8 letters of the hash of `what`, and `what` itself. kube-proxy cuts
/// `what` so that a prefix of up to 16 letters still fits the kernel's limit of 256.
pub fn readable(what: &str) -> String {
    const LONGEST: usize = 256 - 16;
    let mut name = format!("{}-{what}", hash(what, 8));
    if name.len() > LONGEST {
        name.truncate(LONGEST - 3);
        name.push_str("...");
    }
    name
}
