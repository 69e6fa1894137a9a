//! The legacy tables of iptables and ip6tables, as `iptables-save` reads them (`include/uapi/linux/netfilter_ipv4/ip_tables.h`,
//! `.../netfilter_ipv6/ip6_tables.h`, `.../netfilter/x_tables.h`).

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use socket2::{Domain, Type};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::{BYPASSED, Base, Chain, Kind, Listed, Rule, Table, Verdict};
use crate::opener;

/// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`; `..._GET_ENTRIES`.
const GET_INFO: i32 = 64;
const GET_ENTRIES: i32 = 65;
/// The tables whose rules see packets that are forwarded, except `nat`.
const TABLES: [&str; 4] = ["raw", "mangle", "filter", "security"];

/// The chains that are built in, by the number of their hook.
const HOOKS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];
/// `NF_INET_LOCAL_OUT`.
const OUTPUT: usize = 3;

/// A family's numbers.
struct Family {
    word: &'static str,
    level: i32,
    /// The list of the tables in use. A request for any other table would create it.
    names: opener::Table,
    tool: &'static str,
    /// Offset in an entry of its target's offset, which the next entry's offset follows; then the length of an entry
    /// without matches.
    target_offset: usize,
    entry: usize,
}

const FAMILIES: [Family; 2] = [
    Family {
        word: "ip",
        level: libc::SOL_IP,
        names: opener::Table::IptablesNames,
        tool: "iptables-legacy",
        target_offset: 88,
        entry: 112,
    },
    Family {
        word: "ip6",
        level: libc::SOL_IPV6,
        names: opener::Table::Ip6tablesNames,
        tool: "ip6tables-legacy",
        target_offset: 140,
        entry: 168,
    },
];

/// `struct ipt_getinfo` and `struct ip6t_getinfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Info {
    name: [u8; 32],
    valid_hooks: u32,
    /// Offset of each hook's chain; then the offset of the rule with its policy.
    hooks: [u32; 5],
    underflows: [u32; 5],
    entries: u32,
    size: u32,
}

/// Length of `struct ipt_get_entries` before its entries.
const BEFORE: usize = 40;

/// `struct xt_entry_target`: its name, and where its own begins. A standard one has a verdict there.
const TARGET_NAME: std::ops::Range<usize> = 2..31;
const TARGET_DATA: usize = 32;
/// The target name of the entry that precedes a user-defined chain.
const ERROR: &[u8] = b"ERROR";

/// Every chain of these tables that are in use.
pub fn chains() -> io::Result<Vec<Chain>> {
    let mut all = Vec::new();
    for family in &FAMILIES {
        let names = in_use(family)?;
        for table in TABLES {
            if names.lines().any(|name| name == table) {
                let chains = read(family, table)?.into_iter();
                all.extend(chains.map(|mut chain| {
                    chain.base = chain.base.filter(|base| BYPASSED.contains(&base.hook));
                    chain
                }));
            }
        }
    }
    Ok(all)
}

/// Whether one of these tables is in use.
pub fn has_tables() -> io::Result<bool> {
    for family in &FAMILIES {
        if in_use(family)?.lines().any(|name| TABLES.contains(&name)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The tables that are in use.
pub fn tables() -> io::Result<Vec<Table>> {
    let mut all = Vec::new();
    for family in &FAMILIES {
        for name in in_use(family)?.lines() {
            let chains = read(family, name)?.into_iter().map(|chain| Listed {
                hook: chain.base.and_then(|_| hook_of(&chain.name)),
                drops: chain.base.is_some_and(|base| base.drops),
                rules: chain.rules.len(),
                name: chain.name,
            });
            all.push(Table {
                kind: Kind::Legacy,
                family: family.word,
                name: name.to_owned(),
                chains: chains.collect(),
                sets: Vec::new(),
            });
        }
    }
    Ok(all)
}

/// Whether a table `nat` that is in use has a rule in its chain of the output hook. The rules are not read: a pod may have
/// millions.
pub fn has_nat_at_output() -> io::Result<bool> {
    for family in &FAMILIES {
        if in_use(family)?.lines().any(|name| name == "nat") {
            let info = info(family, socket(family)?.as_fd(), "nat")?;
            // A chain without rules begins with its policy.
            if info.hooks[OUTPUT] != info.underflows[OUTPUT] {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// The hook of a chain that is built in.
fn hook_of(chain: &str) -> Option<&'static str> {
    HOOKS
        .iter()
        .position(|name| *name == chain)
        .map(|number| super::HOOKS[number])
}

/// The names of a family's tables that are in use, one a line.
fn in_use(family: &Family) -> io::Result<String> {
    match opener::table(family.names).and_then(io::read_to_string) {
        // A kernel without them, or no module.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        names => names,
    }
}

fn socket(family: &Family) -> io::Result<OwnedFd> {
    let domain = if family.level == libc::SOL_IP {
        Domain::IPV4
    } else {
        Domain::IPV6
    };
    opener::socket(domain, Type::DGRAM, None)
}

/// Returns the size of a table, and where its chains begin.
fn info(family: &Family, socket: BorrowedFd<'_>, table: &str) -> io::Result<Info> {
    let mut info = Info::new_zeroed();
    let name = info
        .name
        .get_mut(..table.len())
        .ok_or(io::ErrorKind::InvalidData)?;
    name.copy_from_slice(table.as_bytes());
    get(socket, family.level, GET_INFO, info.as_mut_bytes())?;
    Ok(info)
}

fn read(family: &Family, table: &str) -> io::Result<Vec<Chain>> {
    let socket = socket(family)?;
    // A table that is changed in between has another size.
    for _ in 0..8 {
        let info = info(family, socket.as_fd(), table)?;
        let mut answer = vec![0; BEFORE + info.size as usize];
        answer[..32].copy_from_slice(&info.name);
        answer[32..36].copy_from_slice(&info.size.to_ne_bytes());
        match get(socket.as_fd(), family.level, GET_ENTRIES, &mut answer) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            Err(error) => return Err(error),
            Ok(()) => {
                let name = format!("{} {table}", family.tool);
                return parse(family, &info, &answer[BEFORE..], &name)
                    .ok_or_else(|| io::Error::other(format!("{name} cannot be understood")));
            }
        }
    }
    Err(io::Error::other(format!(
        "{} {table} changes faster than it can be read",
        family.tool
    )))
}

/// getsockopt(2) of as many bytes as there are.
fn get(socket: BorrowedFd<'_>, level: i32, option: i32, bytes: &mut [u8]) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(bytes.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads and writes at most `length` bytes there.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            bytes.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Parses the chains of a table's entries. Returns `None` if the entries are invalid.
fn parse(family: &Family, info: &Info, bytes: &[u8], table: &str) -> Option<Vec<Chain>> {
    let mut entries = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let entry = Entry::read(family, &bytes[at..])?;
        entries.push((at, entry));
        at += entries.last()?.1.length;
    }
    // The destinations of jumps: the offset of each chain's first rule.
    let mut names: BTreeMap<usize, (String, Option<usize>)> = BTreeMap::new();
    for (hook, name) in (0..).zip(HOOKS) {
        if info.valid_hooks & 1 << hook != 0 {
            let first = info.hooks[hook] as usize;
            names.insert(first, (name.to_owned(), Some(hook)));
        }
    }
    for (at, entry) in &entries {
        if let Some(name) = entry.chain() {
            names.entry(at + entry.length).or_insert((name, None));
        }
    }
    let mut chains: Vec<Chain> = Vec::new();
    // Offset of the rule with the present chain's policy.
    let mut policy_at = None;
    for (at, entry) in &entries {
        if let Some((name, hook)) = names.get(at) {
            policy_at = hook.map(|hook| info.underflows[hook] as usize);
            chains.push(Chain {
                table: table.to_owned(),
                name: name.clone(),
                base: hook.map(|hook| Base {
                    hook: super::HOOKS[hook],
                    drops: false,
                }),
                rules: Vec::new(),
            });
        }
        if entry.chain().is_some() {
            continue;
        }
        let chain = chains.last_mut()?;
        let verdict = entry.verdict(*at, |to| names.get(&to).map(|(name, _)| name.clone()));
        if let Some(base) = &mut chain.base
            && policy_at == Some(*at)
        {
            base.drops = verdict == Some(Verdict::Refuse);
        } else {
            let does = verdict.into_iter().collect();
            chain.rules.push(Rule { does });
        }
    }
    Some(chains)
}

/// An entry: a rule, or the entry that precedes a user-defined chain.
struct Entry<'a> {
    length: usize,
    /// The target's name, and then its data.
    target: &'a [u8],
    data: &'a [u8],
}

impl<'a> Entry<'a> {
    fn read(family: &Family, bytes: &'a [u8]) -> Option<Self> {
        let [target, next] = [0, 2].map(|more| {
            let at = family.target_offset + more;
            let bytes = bytes.get(at..at + 2)?;
            Some(usize::from(u16::from_ne_bytes([bytes[0], bytes[1]])))
        });
        let (target, length) = (target?, next?);
        if target < family.entry {
            return None;
        }
        let all = bytes.get(target..length)?;
        let name = all.get(TARGET_NAME)?;
        let end = name.iter().position(|byte| *byte == 0)?;
        Some(Self {
            length,
            target: &name[..end],
            data: all.get(TARGET_DATA..)?,
        })
    }

    /// The chain that begins behind it.
    fn chain(&self) -> Option<String> {
        let end = self.data.iter().position(|byte| *byte == 0)?;
        (self.target == ERROR).then(|| String::from_utf8_lossy(&self.data[..end]).into_owned())
    }

    /// Returns the entry's verdict on a packet. `at`: the entry's offset.
    fn verdict(&self, at: usize, chain: impl Fn(usize) -> Option<String>) -> Option<Verdict> {
        if !self.target.is_empty() {
            let refuses = matches!(
                self.target,
                b"REJECT" | b"NFQUEUE" | b"TARPIT" | b"SYNPROXY"
            );
            return Some(if refuses {
                Verdict::Refuse
            } else {
                Verdict::Act
            });
        }
        let code = i32::from_ne_bytes(*self.data.first_chunk()?);
        match usize::try_from(code) {
            // A rule without a target leads to the next.
            Ok(to) if to == at + self.length => Some(Verdict::Count),
            Ok(to) => chain(to).map(Verdict::Jump),
            // Negative and less one: `NF_ACCEPT`, and `XT_RETURN`, which is `NF_REPEAT`.
            Err(_) => (![-2, -5].contains(&code)).then_some(Verdict::Refuse),
        }
    }
}
