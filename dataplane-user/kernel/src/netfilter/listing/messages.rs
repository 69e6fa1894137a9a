//! The attributes of a message.

use crate::netlink::attributes;

/// The content of the first attribute of a kind.
pub fn content(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes)
        .find(|(k, _)| *k == kind)
        .map(|(_, content)| content)
}

/// In network order, as nf_tables has them all.
pub fn number(content: &[u8]) -> Option<u32> {
    content
        .first_chunk()
        .map(|bytes| u32::from_be_bytes(*bytes))
}

/// Up to the first zero.
pub fn text(content: &[u8]) -> String {
    let end = content.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&content[..end.unwrap_or(content.len())]).into_owned()
}
