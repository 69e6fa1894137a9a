//! The program at the socket lookup of workloads' network namespaces. Each namespace has its own instance, which has
//! the namespace's cookie as a constant, because `sk_lookup` programs have no helper that returns their network
//! namespace. Without the cookie, a process could assign another workload's address to one of its own interfaces, and
//! its connections would be handed to that workload's socket. The agent writes the constant before it attaches the
//! instance, so instances of pods that have ended serve others.

use std::{
    collections::{BTreeMap, HashMap, HashSet, btree_map::Entry},
    fs, io,
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    time::Instant,
};

use aya_obj::{
    Map, Object,
    generated::{
        BPF_PSEUDO_MAP_FD, BPF_PSEUDO_MAP_VALUE, bpf_attach_type::BPF_SK_LOOKUP, bpf_insn,
        bpf_map_type::BPF_MAP_TYPE_ARRAY, bpf_prog_type::BPF_PROG_TYPE_SK_LOOKUP,
    },
};
use zerocopy::IntoBytes as _;

use super::{
    Namespace,
    instances::{Instance, Instances, MOST},
};
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
    /// The instances that this agent has attached, by the namespaces' cookies.
    attached: BTreeMap<u64, Ids>,
    spare: Instances,
}

/// The ids of an instance: a file of each would be two for each pod.
#[derive(Clone, Copy, Debug)]
struct Ids {
    program: u32,
    constants: u32,
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
            spare: Instances::default(),
        })
    }

    /// Attaches the program to namespaces, for incoming connections, or replaces the attached program in place. Returns the
    /// failures, by the namespaces' cookies.
    pub fn attach_all(&mut self, pins: &Pins, namespaces: &[&Namespace]) -> BTreeMap<u64, Error> {
        let mut failed = BTreeMap::new();
        for namespaces in namespaces.chunks(MOST) {
            let cookies = namespaces.iter().map(|namespace| namespace.cookie);
            let missing = cookies.filter(|cookie| !self.attached.contains_key(cookie));
            let missing = missing.count();
            self.spare.have(missing, || self.load());
            for namespace in namespaces {
                if let Err(error) = self.attach(pins, namespace) {
                    failed.insert(namespace.cookie, error);
                }
            }
        }
        failed
    }

    fn attach(&mut self, pins: &Pins, namespace: &Namespace) -> Result<(), Error> {
        let cookie = namespace.cookie;
        let path = pin(pins, cookie);
        let doing = || format!("cannot attach program {INBOUND} to a network namespace");
        if let Ok(link) = sys::obj_get(&path) {
            let there = sys::link_info(link.as_fd()).doing(doing)?;
            if there.is_attached() {
                if self.attached.get(&cookie).map(|ids| ids.program) != Some(there.program) {
                    let instance = self.instance(cookie).doing(doing)?;
                    sys::link_update(link.as_fd(), instance.program.as_fd()).doing(doing)?;
                    self.remember(cookie, &instance).doing(doing)?;
                }
                return Ok(());
            }
            fs::remove_file(&path).doing(|| format!("cannot remove {}", path.display()))?;
        }
        let instance = self.instance(cookie).doing(doing)?;
        let link = sys::link_create_netns(instance.program.as_fd(), namespace.file.as_fd());
        let link = link.doing(doing)?;
        sys::obj_pin(link.as_fd(), &path).doing(|| format!("cannot pin {}", path.display()))?;
        self.remember(cookie, &instance).doing(doing)
    }

    /// Opens the instance that this agent has attached to a namespace; `None` if there is none, or the kernel refuses.
    pub fn instance_of(&self, cookie: u64) -> Option<Instance> {
        let ids = self.attached.get(&cookie)?;
        Some(Instance {
            program: sys::prog_by_id(ids.program).ok()?,
            constants: sys::map_by_id(ids.constants).ok()?,
        })
    }

    /// Forgets namespaces but those that are wanted. `retired`: their instances, which are detached; they serve others.
    pub fn keep(&mut self, wanted: impl Fn(u64) -> bool, retired: Vec<Instance>) {
        self.attached.retain(|cookie, _| wanted(*cookie));
        self.spare.retire(retired, sys::wait_for_programs);
        self.spare.tidy(Instant::now());
    }

    fn remember(&mut self, cookie: u64, instance: &Instance) -> io::Result<()> {
        let ids = Ids {
            program: sys::prog_info(instance.program.as_fd())?.id,
            constants: sys::map_info(instance.constants.as_fd())?.id,
        };
        self.attached.insert(cookie, ids);
        Ok(())
    }

    /// Returns an instance for a namespace, which is attached nowhere.
    fn instance(&self, cookie: u64) -> io::Result<Instance> {
        let instance = self.spare.take().map_or_else(|| self.load(), Ok)?;
        let mut constants = self.constants.clone();
        constants[self.cookie..][..size_of::<u64>()].copy_from_slice(cookie.as_bytes());
        sys::map_update(instance.constants.as_fd(), 0u32.as_bytes(), &constants, 0)?;
        Ok(instance)
    }

    /// Loads an instance without a namespace.
    fn load(&self) -> io::Result<Instance> {
        let shape = Shape {
            kind: BPF_MAP_TYPE_ARRAY,
            key_size: 4,
            value_size: u32::try_from(self.constants.len()).map_err(io::Error::other)?,
            flags: READ_ONLY,
        };
        let constants = sys::map_create(".rodata", &shape, 1)?;
        let mut instructions = self.instructions.clone();
        for at in &self.naming {
            instructions[*at].imm = constants.as_raw_fd();
        }
        let kind = BPF_PROG_TYPE_SK_LOOKUP;
        let program = sys::prog_load_named(INBOUND, kind, BPF_SK_LOOKUP, &instructions)?;
        Ok(Instance { program, constants })
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
