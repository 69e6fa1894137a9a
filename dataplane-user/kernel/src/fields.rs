//! Finds the offsets of fields in the kernel's own structures, from the kernel's BTF. The tracepoint programs read
//! these fields.

use std::{fs, io::ErrorKind};

use aya::{Btf, Endianness};
use aya_obj::btf::BtfKind;
use btfparse::{Offset, Readable, TypeInformation};
use dataplane_common::capture::Field;

use super::error::{Doing, Error};

/// The kernel's description of its types (`Documentation/bpf/btf.rst`).
const PATH: &str = "/sys/kernel/btf/vmlinux";

/// The kernel's types, as far as programs for its tracepoints need them.
#[derive(Debug)]
pub struct Types {
    /// For loading them.
    pub btf: Btf,
    /// The offset of each [`Field`], in bytes.
    pub fields: [u32; Field::ALL.len()],
}

impl Types {
    /// Asks this kernel, which has some megabytes to say.
    ///
    /// # Errors
    /// If it has no BTF (`CONFIG_DEBUG_INFO_BTF`), or no such field.
    pub fn read() -> Result<Self, Error> {
        let what = || {
            format!(
                "a mesh needs a kernel with CONFIG_DEBUG_INFO_BTF: cannot use its types in {PATH}"
            )
        };
        let bytes = fs::read(PATH).doing(what)?;
        let btf = Btf::parse(&bytes, Endianness::default())
            .map_err(std::io::Error::other)
            .doing(what)?;
        let fields = find(bytes).map_err(std::io::Error::other).doing(what)?;
        Ok(Self { btf, fields })
    }

    /// The type of the tracepoint with this name, which programs for it are loaded with.
    ///
    /// # Errors
    /// If there is no such tracepoint.
    pub fn tracepoint(&self, name: &str) -> Result<u32, String> {
        let name = format!("btf_trace_{name}");
        let found = self.btf.id_by_type_name_kind(&name, BtfKind::Typedef);
        found.map_err(|error| error.to_string())
    }
}

/// Finds the offsets of all fields.
fn find(btf: Vec<u8>) -> Result<[u32; Field::ALL.len()], String> {
    let types = TypeInformation::new(&Bytes(btf)).map_err(|error| error.message().to_owned())?;
    let mut found = [0; Field::ALL.len()];
    for (at, field) in found.iter_mut().zip(Field::ALL) {
        let (of, name) = place(field);
        let id = types.id_of(of).ok_or_else(|| format!("no struct {of}"))?;
        let offset = types.offset_of(id, name);
        *at = match offset {
            Ok((_, Offset::ByteOffset(offset))) => offset,
            Ok(_) => return Err(format!("{name} of struct {of} is not at a byte")),
            Err(error) => {
                return Err(format!("no {name} in struct {of}: {}", error.message()));
            }
        };
    }
    Ok(found)
}

/// The structure, and the way to the field in it, as in C.
const fn place(field: Field) -> (&'static str, &'static str) {
    match field {
        Field::Cookie => ("sock", "__sk_common.skc_cookie"),
        Field::Family => ("sock", "__sk_common.skc_family"),
        Field::Port => ("sock", "__sk_common.skc_num"),
        Field::RemotePort => ("sock", "__sk_common.skc_dport"),
        Field::V4 => ("sock", "__sk_common.skc_rcv_saddr"),
        Field::RemoteV4 => ("sock", "__sk_common.skc_daddr"),
        Field::V6 => ("sock", "__sk_common.skc_v6_rcv_saddr"),
        Field::RemoteV6 => ("sock", "__sk_common.skc_v6_daddr"),
        Field::Mark => ("sock", "sk_mark"),
        Field::Net => ("sock", "__sk_common.skc_net.net"),
        Field::NetCookie => ("net", "net_cookie"),
        Field::Acked => ("tcp_sock", "bytes_acked"),
        Field::Received => ("tcp_sock", "bytes_received"),
    }
}

/// A file that was read.
struct Bytes(Vec<u8>);

impl Readable for Bytes {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> btfparse::Result<()> {
        let from = usize::try_from(offset).ok();
        let part = from.and_then(|from| self.0.get(from..)?.get(..buffer.len()));
        let part = part.ok_or(std::io::Error::from(ErrorKind::UnexpectedEof))?;
        buffer.copy_from_slice(part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_none_says_so() {
        for bytes in [vec![], vec![0; 24], b"\x9f\xeb\x01\0\x18\0\0\0".to_vec()] {
            assert!(find(bytes).is_err());
        }
    }
}
