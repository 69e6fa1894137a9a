//! The header and the attributes of nf_tables' messages.

/// `struct nfgenmsg`: a family, a version, and a number.
pub const HEADER: usize = 4;

/// Reads a number: in network order, as nf_tables has them all.
pub fn number(content: &[u8]) -> Option<u32> {
    content
        .first_chunk()
        .map(|bytes| u32::from_be_bytes(*bytes))
}

/// Reads a name, up to its zero byte.
pub fn text(content: &[u8]) -> String {
    let end = content.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&content[..end.unwrap_or(content.len())]).into_owned()
}
