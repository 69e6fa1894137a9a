//! Filters of clsact qdiscs, for kernels without TCX: by netlink, like `tc filter`.
//!
//! A filter is ours if its name says so: the name contains the directory of our pins and the program. A qdisc has no
//! such name. A directory, `qdiscs/IFINDEX`, beside the directories of our layouts, records that we made a qdisc. A
//! filter and a qdisc do not depend on the layout of the program in the filter.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use model::Order;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{
        TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage,
        TcOption,
    },
};

use super::{
    super::{
        error::{Doing, Error},
        rtnetlink::Netlink,
    },
    Direction, name,
};

/// The qdisc's kind, and its number on every interface that has one.
const CLSACT: &str = "clsact";
const HANDLE: TcHandle = TcHandle {
    major: 0xffff,
    minor: 0,
};
/// `ETH_P_ALL` in network order: the lower half of a filter's `info`; the upper is its preference.
const EVERY_PROTOCOL: u32 = 3u16.to_be() as u32;

/// A filter that runs one of our programs.
#[derive(Clone, Debug)]
pub struct Filter {
    /// Its interface.
    pub ifindex: u32,
    /// The direction.
    pub direction: Direction,
    /// The kernel's number of its program.
    pub program: u32,
    header: TcHeader,
}

impl Filter {
    fn preference(&self) -> u32 {
        self.header.info >> 16
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "clsact {} filter (pref {}) of program {}",
            self.direction.word(),
            self.preference(),
            self.direction.program()
        )
    }
}

/// The clsact qdiscs of this network namespace, on behalf of one agent.
pub struct Clsact {
    netlink: Netlink,
    root: PathBuf,
}

impl Clsact {
    /// For the agent that has its pins below `root`.
    pub fn open(root: &Path) -> Result<Self, Error> {
        Ok(Self {
            netlink: Netlink::open().doing(|| "cannot open a netlink socket".to_owned())?,
            root: root.into(),
        })
    }

    /// The name of our filters.
    fn filter_name(&self, direction: Direction) -> String {
        format!("{}:{}", self.root.display(), direction.program())
    }

    fn marker(&self, ifindex: u32) -> PathBuf {
        self.root.join("qdiscs").join(ifindex.to_string())
    }

    /// The kind of the ingress qdisc (clsact is one) of every interface that has one.
    fn qdiscs(&mut self) -> Result<BTreeMap<u32, String>, Error> {
        self.qdiscs_at(TcHandle::CLSACT)
    }

    /// Returns the kind of every interface's root qdisc, which queues outgoing packets.
    pub fn roots(&mut self) -> Result<BTreeMap<u32, String>, Error> {
        self.qdiscs_at(TcHandle::ROOT)
    }

    /// The interfaces that have a clsact qdisc.
    pub fn with_clsact(&mut self) -> Result<Vec<u32>, Error> {
        let mut qdiscs = self.qdiscs()?;
        qdiscs.retain(|_, kind| kind == CLSACT);
        Ok(qdiscs.into_keys().collect())
    }

    fn qdiscs_at(&mut self, parent: TcHandle) -> Result<BTreeMap<u32, String>, Error> {
        let question = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
        let answers = self
            .netlink
            .list(&question)
            .doing(|| "cannot ask for the queueing disciplines".to_owned())?;
        let mut found = BTreeMap::new();
        for answer in answers {
            if let RouteNetlinkMessage::NewQueueDiscipline(message) = answer
                && message.header.parent == parent
            {
                let kind = message.attributes.into_iter().find_map(|a| match a {
                    TcAttribute::Kind(kind) => Some(kind),
                    _ => None,
                });
                found.insert(
                    message.header.index.cast_unsigned(),
                    kind.unwrap_or_default(),
                );
            }
        }
        Ok(found)
    }

    /// Every filter of one interface and direction.
    fn filters(&mut self, ifindex: u32, direction: Direction) -> Result<Vec<TcMessage>, Error> {
        let question = RouteNetlinkMessage::GetTrafficFilter(message(header(ifindex, direction)));
        let answers = match self.netlink.list(&question) {
            Ok(answers) => answers,
            // It went meanwhile.
            Err(error) if is_gone(&error) => Vec::new(),
            Err(error) => {
                return Err(error)
                    .doing(|| format!("cannot ask for the filters of {}", name(ifindex)));
            }
        };
        Ok(answers
            .into_iter()
            .filter_map(|answer| match answer {
                RouteNetlinkMessage::NewTrafficFilter(message) => Some(message),
                _ => None,
            })
            .collect())
    }

    /// Our filters on all interfaces.
    pub fn ours(&mut self) -> Result<BTreeMap<(u32, Direction), Filter>, Error> {
        let mut found = BTreeMap::new();
        for ifindex in self.with_clsact()? {
            for direction in Direction::EVERY {
                for message in self.filters(ifindex, direction)? {
                    let Some((name, program)) = program(&message) else {
                        continue;
                    };
                    if name == self.filter_name(direction) {
                        let filter = Filter {
                            ifindex,
                            direction,
                            program,
                            header: message.header,
                        };
                        found.insert((ifindex, direction), filter);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Adds a filter, and the qdisc if there is none.
    pub fn add(
        &mut self,
        ifindex: u32,
        direction: Direction,
        program: BorrowedFd<'_>,
        order: Order,
    ) -> Result<(), Error> {
        match self.qdiscs()?.remove(&ifindex) {
            Some(kind) if kind == CLSACT => {}
            Some(kind) => {
                return Err(Error::Io {
                    what: format!(
                        "cannot attach program {} to {}: it has a queueing discipline of kind \
                         `{kind}`, which somebody else made, in the place of clsact's",
                        direction.program(),
                        name(ifindex)
                    ),
                    source: io::ErrorKind::AlreadyExists.into(),
                });
            }
            None => self.make_qdisc(ifindex)?,
        }
        let taken: Vec<u32> = self
            .filters(ifindex, direction)?
            .iter()
            .map(|message| message.header.info >> 16)
            .collect();
        // One preference, one filter: those that share one must be of one kind.
        let preferences: Box<dyn Iterator<Item = u32>> = match order {
            Order::First | Order::Before(_) => Box::new(1..=0xffff),
            Order::Last | Order::After(_) => Box::new((1..=0xffff).rev()),
        };
        let mut free = preferences.filter(|p| !taken.contains(p));
        let preference = match (direction, order) {
            // Room is left for capture's, which has to be before it.
            (Direction::Ingress, Order::First) => free.nth(1),
            _ => free.next(),
        };
        let preference = preference.unwrap_or(1);
        let mut header = header(ifindex, direction);
        header.info = preference << 16 | EVERY_PROTOCOL;
        header.handle = TcHandle::from(1);
        self.put(header, direction, program, NLM_F_CREATE | NLM_F_EXCL)
            .doing(|| {
                format!(
                    "cannot attach program {} to {}",
                    direction.program(),
                    name(ifindex)
                )
            })
    }

    /// Swaps a filter's program, in one step.
    pub fn replace(&mut self, filter: &Filter, program: BorrowedFd<'_>) -> Result<(), Error> {
        let header = filter.header.clone();
        self.put(header, filter.direction, program, NLM_F_CREATE)
            .doing(|| {
                format!(
                    "cannot swap program {} on {}",
                    filter.direction.program(),
                    name(filter.ifindex)
                )
            })
    }

    fn put(
        &mut self,
        header: TcHeader,
        direction: Direction,
        program: BorrowedFd<'_>,
        flags: u16,
    ) -> io::Result<()> {
        let mut message = message(header);
        let options = [
            TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned()),
            TcFilterBpfOption::ProgName(self.filter_name(direction)),
            TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
        ];
        message.attributes = vec![
            TcAttribute::Kind(TcFilterBpf::KIND.into()),
            TcAttribute::Options(options.map(TcOption::Bpf).into()),
        ];
        let request = RouteNetlinkMessage::NewTrafficFilter(message);
        self.netlink.request(&request, flags)
    }

    /// Removes a filter. A filter that no longer exists is not an error.
    pub fn remove(&mut self, filter: &Filter) -> Result<(), Error> {
        let mut message = message(filter.header.clone());
        message.attributes = vec![TcAttribute::Kind(TcFilterBpf::KIND.into())];
        let request = RouteNetlinkMessage::DelTrafficFilter(message);
        match self.netlink.request(&request, 0) {
            Err(error) if !is_gone(&error) => {
                Err(error).doing(|| format!("cannot remove {filter} from {}", name(filter.ifindex)))
            }
            _ => Ok(()),
        }
    }

    fn make_qdisc(&mut self, ifindex: u32) -> Result<(), Error> {
        // Noted before: should the agent die in between, the note is of a qdisc that is not there.
        let marker = self.marker(ifindex);
        fs::create_dir_all(&marker).doing(|| format!("cannot create {}", marker.display()))?;
        let request = RouteNetlinkMessage::NewQueueDiscipline(qdisc(ifindex));
        match self.netlink.request(&request, NLM_F_CREATE | NLM_F_EXCL) {
            Ok(()) => Ok(()),
            // Another process was faster, and owns it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_dir(&marker).doing(|| format!("cannot remove {}", marker.display()))
            }
            Err(error) => {
                Err(error).doing(|| format!("cannot make a clsact qdisc on {}", name(ifindex)))
            }
        }
    }

    /// Whether another owner has a filter on an interface.
    fn is_shared(&mut self, ifindex: u32) -> Result<bool, Error> {
        Ok(self.has_others(ifindex, Direction::Egress)?
            || self.has_others(ifindex, Direction::Ingress)?)
    }

    /// Whether another owner has a filter on an interface for packets of this direction.
    pub fn has_others(&mut self, ifindex: u32, direction: Direction) -> Result<bool, Error> {
        let (ours, others) = self.preferences(ifindex, direction)?;
        // A list has each preference once more, without a program.
        Ok(others.iter().any(|other| !ours.contains(other)))
    }

    /// Returns the interfaces on which another owner has a filter that comes after our program on the way in: of an ingress
    /// qdisc, too, as the CNI plug-in `bandwidth` has them.
    pub fn with_others_after_ours(&mut self) -> Result<Vec<u32>, Error> {
        let mut found = Vec::new();
        for ifindex in self.qdiscs()?.into_keys() {
            let (ours, others) = self.preferences(ifindex, Direction::Ingress)?;
            // Programs at TCX come before all filters.
            let own = ours.into_iter().max().unwrap_or(0);
            if others.iter().any(|other| *other > own) {
                found.push(ifindex);
            }
        }
        Ok(found)
    }

    /// Returns the preferences of our filters, and those of others, on an interface for packets of this direction.
    fn preferences(
        &mut self,
        ifindex: u32,
        direction: Direction,
    ) -> Result<(Vec<u32>, Vec<u32>), Error> {
        let filters = self.filters(ifindex, direction)?;
        let is_ours = |f: &TcMessage| {
            let named = |name: &str| {
                Direction::EVERY
                    .iter()
                    .any(|of| name == self.filter_name(*of))
            };
            program(f).is_some_and(|(name, _)| named(name))
        };
        let (ours, others): (Vec<_>, Vec<_>) = filters.iter().partition(|f| is_ours(f));
        let preferences = |filters: Vec<&TcMessage>| {
            let all = filters.into_iter().map(|f| f.header.info >> 16);
            all.collect()
        };
        Ok((preferences(ours), preferences(others)))
    }

    /// Returns the existing qdiscs that we made. `true`: the qdisc is removed with our filters. `false`: it stays,
    /// because another owner has filters there.
    pub fn made(&mut self) -> Result<Vec<(u32, bool)>, Error> {
        let there = self.qdiscs()?;
        let mut found = Vec::new();
        for ifindex in self.markers() {
            if there.get(&ifindex).is_some_and(|kind| kind == CLSACT) {
                found.push((ifindex, !self.is_shared(ifindex)?));
            }
        }
        Ok(found)
    }

    /// The interfaces on which we noted that we made a qdisc.
    fn markers(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.root.join("qdiscs"));
        let names = entries.into_iter().flatten().filter_map(Result::ok);
        let mut found: Vec<u32> = names
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        found.sort_unstable();
        found
    }

    /// Removes the qdiscs that we made, on the interfaces that are `given_up`; a qdisc in which another owner has a
    /// filter now stays.
    pub fn remove_qdiscs(&mut self, given_up: impl Fn(u32) -> bool) -> Result<(), Error> {
        let mut made = self.markers();
        made.retain(|ifindex| given_up(*ifindex));
        if made.is_empty() {
            return Ok(());
        }
        let there = self.qdiscs()?;
        for ifindex in made {
            if there.get(&ifindex).is_some_and(|kind| kind == CLSACT) && !self.is_shared(ifindex)? {
                let request = RouteNetlinkMessage::DelQueueDiscipline(qdisc(ifindex));
                match self.netlink.request(&request, 0) {
                    Err(error) if !is_gone(&error) => {
                        return Err(error).doing(|| {
                            format!("cannot remove the clsact qdisc of {}", name(ifindex))
                        });
                    }
                    _ => {}
                }
            }
            // From here on, a qdisc that others use belongs to them.
            let marker = self.marker(ifindex);
            fs::remove_dir(&marker).doing(|| format!("cannot remove {}", marker.display()))?;
        }
        // Fails while there are others.
        let _ = fs::remove_dir(self.root.join("qdiscs"));
        Ok(())
    }
}

fn message(header: TcHeader) -> TcMessage {
    TcMessage::from_parts(header, Vec::new())
}

fn header(ifindex: u32, direction: Direction) -> TcHeader {
    TcHeader {
        index: ifindex.cast_signed(),
        parent: TcHandle {
            major: 0xffff,
            minor: match direction {
                Direction::Ingress | Direction::Capture => TcHandle::MIN_INGRESS,
                Direction::Egress => TcHandle::MIN_EGRESS,
            },
        },
        ..TcHeader::default()
    }
}

fn qdisc(ifindex: u32) -> TcMessage {
    let header = TcHeader {
        index: ifindex.cast_signed(),
        handle: HANDLE,
        parent: TcHandle::CLSACT,
        ..TcHeader::default()
    };
    TcMessage::from_parts(header, vec![TcAttribute::Kind(CLSACT.into())])
}

/// Whether a request failed because its object is gone: an interface, a qdisc or a filter.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENODEV | libc::ENOENT | libc::EINVAL)
    )
}

/// The name and the program of a filter that runs one.
fn program(message: &TcMessage) -> Option<(&str, u32)> {
    let options = message.attributes.iter().find_map(|a| match a {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    let mut found = (None, None);
    for option in options {
        match option {
            TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => found.0 = Some(name.as_str()),
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => found.1 = Some(*id),
            _ => {}
        }
    }
    found.0.zip(found.1)
}
