//! The program at the socket lookup of workloads' network namespaces. Each namespace has its own instance, which has
//! the namespace's cookie as a constant, because `sk_lookup` programs have no helper that returns their network
//! namespace. Without the cookie, a process could assign another workload's address to one of its own interfaces, and
//! its connections would be handed to that workload's socket.

use std::{
    collections::{BTreeMap, HashMap, HashSet, btree_map::Entry},
    fs, io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::{
    Map, Object,
    generated::{
        BPF_PSEUDO_MAP_FD, BPF_PSEUDO_MAP_VALUE, bpf_attach_type::BPF_SK_LOOKUP, bpf_insn,
        bpf_map_type::BPF_MAP_TYPE_ARRAY, bpf_prog_type::BPF_PROG_TYPE_SK_LOOKUP,
    },
};
use zerocopy::IntoBytes as _;

use super::Namespace;
use crate::{
    error::{Doing, Error},
    object,
    pins::{self, MAPS, Pins},
    programs::INBOUND,
    sys::{self, Shape},
};

/// The program's constant with the namespace's cookie.
const COOKIE: &str = "NETNS";
/// `BPF_F_RDONLY_PROG`: programs only read it.
const READ_ONLY: u32 = 1 << 7;

/// The program, ready to be loaded for a namespace.
#[derive(Debug)]
pub struct Inbound {
    instructions: Vec<bpf_insn>,
    /// Tables that the instructions name.
    _tables: Vec<OwnedFd>,
    /// The object's constants; then the cookie's offset among them.
    constants: Vec<u8>,
    cookie: usize,
    /// Indices of the instructions that refer to the constants.
    naming: Vec<usize>,
    /// The ids of the instances that this agent has attached, by the namespaces' cookies.
    attached: BTreeMap<u64, u32>,
}

impl Inbound {
    /// Prepares the program. Its tables are pinned.
    pub fn prepare(pins: &Pins) -> Result<Self, Error> {
        let doing = || format!("cannot prepare program {INBOUND}");
        let mut object = Object::parse(object::programs()?)
            .map_err(io::Error::other)
            .doing(doing)?;
        let (name, cookie) = find_cookie(&mut object).doing(doing)?;
        // Sorted: an instruction names a table by its position.
        let maps: BTreeMap<String, Map> = std::mem::take(&mut object.maps).into_iter().collect();
        let names: Vec<&String> = maps.keys().collect();
        let mut instructions = relocated(&mut object, &maps).doing(doing)?;
        let mut tables: BTreeMap<usize, OwnedFd> = BTreeMap::new();
        let mut naming = Vec::new();
        for (at, instruction) in instructions.iter_mut().enumerate() {
            if !names_a_table(*instruction) {
                continue;
            }
            let number = usize::try_from(instruction.imm).unwrap_or(usize::MAX);
            let table = names.get(number).map_or("", |name| name.as_str());
            if table == name {
                naming.push(at);
                continue;
            }
            let opened = match tables.entry(number) {
                Entry::Occupied(opened) => opened.into_mut(),
                Entry::Vacant(place) => {
                    let spec = MAPS.iter().find(|spec| spec.name == table);
                    let opened = spec.map(|spec| pins.open_map(spec)).transpose()?.flatten();
                    let missing = || io::Error::other(format!("table {table} is not pinned"));
                    let (opened, _) = opened.ok_or_else(missing).doing(doing)?;
                    place.insert(opened)
                }
            };
            instruction.imm = opened.as_raw_fd();
        }
        Ok(Self {
            instructions,
            _tables: tables.into_values().collect(),
            constants: maps[&name].data().to_vec(),
            cookie,
            naming,
            attached: BTreeMap::new(),
        })
    }

    /// Attaches the program to a namespace, for incoming connections, or replaces the attached program in place.
    pub fn attach(&mut self, pins: &Pins, namespace: &Namespace) -> Result<(), Error> {
        let cookie = namespace.cookie;
        let path = pin(pins, cookie);
        let doing = || format!("cannot attach program {INBOUND} to a network namespace");
        if let Ok(link) = sys::obj_get(&path) {
            let there = sys::link_info(link.as_fd()).doing(doing)?;
            if there.is_attached() {
                if self.attached.get(&cookie) != Some(&there.program) {
                    let program = self.load(cookie).doing(doing)?;
                    sys::link_update(link.as_fd(), program.as_fd()).doing(doing)?;
                    self.remember(cookie, &program).doing(doing)?;
                }
                return Ok(());
            }
            fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
        }
        let program = self.load(cookie).doing(doing)?;
        let link = sys::link_create_netns(program.as_fd(), namespace.file.as_fd()).doing(doing)?;
        sys::obj_pin(link.as_fd(), &path).doing(|| format!("cannot pin {}", path.display()))?;
        self.remember(cookie, &program).doing(doing)
    }

    /// Forgets namespaces but those that are wanted.
    pub fn keep(&mut self, wanted: impl Fn(u64) -> bool) {
        self.attached.retain(|cookie, _| wanted(*cookie));
    }

    fn remember(&mut self, cookie: u64, program: &OwnedFd) -> io::Result<()> {
        let id = sys::prog_info(program.as_fd())?.id;
        self.attached.insert(cookie, id);
        Ok(())
    }

    /// Loads the instance for a namespace.
    fn load(&self, cookie: u64) -> io::Result<OwnedFd> {
        let mut constants = self.constants.clone();
        constants[self.cookie..][..size_of::<u64>()].copy_from_slice(cookie.as_bytes());
        let shape = Shape {
            kind: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: u32::try_from(constants.len()).map_err(io::Error::other)?,
            flags: READ_ONLY,
        };
        let table = sys::map_create(".rodata", &shape, 1)?;
        sys::map_update(table.as_fd(), 0u32.as_bytes(), &constants, 0)?;
        let mut instructions = self.instructions.clone();
        for at in &self.naming {
            instructions[*at].imm = table.as_raw_fd();
        }
        let kind = BPF_PROG_TYPE_SK_LOOKUP;
        sys::prog_load_named(INBOUND, kind, BPF_SK_LOOKUP, &instructions)
    }
}

/// Returns the path of the pin of the program's link for a namespace.
pub fn pin(pins: &Pins, cookie: u64) -> PathBuf {
    pins.link(&format!("{INBOUND}-{cookie}"))
}

/// The pinned links of a program that is attached to several objects: the paths, and the objects' cookies or numbers.
pub fn links(pins: &Pins, program: &str) -> Vec<(PathBuf, u64)> {
    let Ok(entries) = fs::read_dir(pins.layout().join("links")) else {
        return Vec::new();
    };
    let numbered = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        let number = name
            .strip_prefix(program)?
            .strip_prefix('-')?
            .parse()
            .ok()?;
        Some((path, number))
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter_map(numbered).collect()
}

/// Detaches the program of a pinned link, and removes the pin.
pub fn detach(path: &Path) -> Result<(), Error> {
    let link = sys::obj_get(path).doing(|| format!("cannot open {}", path.display()))?;
    pins::remove_link(&link, path)
}

/// Finds the table of constants that holds the cookie, and the cookie's offset in the table.
fn find_cookie(object: &mut Object) -> io::Result<(String, usize)> {
    let before: BTreeMap<String, Vec<u8>> = object
        .maps
        .iter()
        .map(|(name, map)| (name.clone(), map.data().to_vec()))
        .collect();
    let mark = [0xff_u8; size_of::<u64>()];
    object
        .patch_map_data(HashMap::from([(COOKIE, (&mark[..], true))]))
        .map_err(io::Error::other)?;
    let found = object.maps.iter().find_map(|(name, map)| {
        let mut bytes = map.data().iter().zip(&before[name]);
        let at = bytes.position(|(now, before)| now != before)?;
        Some((name.clone(), at))
    });
    found.ok_or_else(|| io::Error::other(format!("the object has no constant {COOKIE}")))
}

/// The program's instructions, in which each table is named by its position among these.
fn relocated(object: &mut Object, maps: &BTreeMap<String, Map>) -> io::Result<Vec<bpf_insn>> {
    let sections: HashSet<usize> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    let numbered = (0..).zip(maps);
    let numbered = numbered.map(|(number, (name, map))| (name.as_str(), number, map));
    object
        .relocate_maps(numbered, &sections)
        .map_err(io::Error::other)?;
    object.relocate_calls(&sections).map_err(io::Error::other)?;
    let program = object.programs.get(INBOUND);
    let function = program.and_then(|program| object.functions.get(&program.function_key()));
    let function = function.ok_or_else(|| io::Error::other("the object has no such program"))?;
    Ok(function.instructions.clone())
}

/// Whether an instruction has the descriptor of a table: the first half of a load of 64 bits.
fn names_a_table(instruction: bpf_insn) -> bool {
    const LOAD: u8 = 0x18; // BPF_LD | BPF_IMM | BPF_DW
    let kind = u32::from(instruction.src_reg());
    instruction.code == LOAD && (kind == BPF_PSEUDO_MAP_FD || kind == BPF_PSEUDO_MAP_VALUE)
}
