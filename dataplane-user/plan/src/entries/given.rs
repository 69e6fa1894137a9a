//! Addresses of hosts, from this node or from a control plane, and former addresses that clients may still know.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use model::{Entry, EntryName, Host, is_allocated};

use super::{
    super::vips::{Age, HostName, KEPT, Number, Record},
    Entries, is_served,
};

/// An address that DNS gave out for a host, and that the host no longer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Former {
    host: Arc<str>,
    address: IpAddr,
    /// Time until which clients may know it, in seconds since the epoch.
    until: u64,
    /// Whether this node had assigned it.
    is_own: bool,
}

impl Entries {
    /// Assigns numbers to the hosts that want one. Returns the records to store.
    pub(super) fn number(&mut self, now: u64, dirty: &mut BTreeSet<EntryName>) -> Vec<Record> {
        self.vips.defer(self.defers && !self.assigned.is_empty());
        let mut records = Vec::new();
        let mut asked = BTreeSet::new();
        loop {
            // A number that this node assigns or takes back may lead to an address in the `status` of an entry.
            for name in dirty.difference(&asked).cloned().collect::<Vec<_>>() {
                self.ask(&name);
                asked.insert(name);
            }
            let more = self.vips.assign(now);
            for record in &more {
                dirty.extend(self.vips.entries(&record.host).cloned());
            }
            let numbers = more.iter().map(|record| record.number);
            for address in numbers
                .chain(self.vips.take_free())
                .flat_map(Number::addresses)
            {
                dirty.extend(self.naming.get(&address).into_iter().flatten().cloned());
            }
            records.extend(more);
            if dirty.len() == asked.len() {
                return records;
            }
        }
    }

    /// Requests numbers for the hosts of an entry in its present state.
    fn ask(&mut self, name: &EntryName) {
        let mut asking = Vec::new();
        if let Some(entry) = self.last.get(name) {
            let age = Age::of(entry.name.clone(), entry.created);
            let hosts = entry
                .hosts
                .iter()
                .filter(|host| may_have_number(entry, host));
            let hosts = hosts.filter(|host| self.assigned(entry, host).all(|is| is.is_err()));
            asking.extend(hosts.map(|host| (host_name(entry, host), age.clone())));
        }
        let before = self.asking.remove(name).unwrap_or_default();
        let (old, new) = (set(&before), set(&asking));
        for (host, age) in old.difference(&new) {
            self.vips.unwant(host, age);
        }
        for (host, age) in new.difference(&old) {
            self.vips.want(host, age.clone());
        }
        if !asking.is_empty() {
            self.asking.insert(name.clone(), asking);
        }
    }

    /// Returns the addresses that a control plane assigned to a host, each with the reason if the host may not have it.
    pub(super) fn assigned<'a>(
        &'a self,
        entry: &'a Entry,
        host: &'a Host,
    ) -> impl Iterator<Item = Result<IpAddr, (IpAddr, String)>> + 'a {
        let own = host_name(entry, host);
        host.assigned.iter().map(move |address| {
            let of_another = self.holder(*address).filter(|holder| **holder != own);
            let why = match of_another {
                Some(holder) => Err(format!(
                    "host {} of namespace {} has it",
                    holder.host, holder.namespace
                )),
                None => self.allowed(*address).map_err(str::to_owned),
            };
            why.map(|()| *address).map_err(|why| (*address, why))
        })
    }

    /// Returns the host that has an address, or had it a moment ago: the host to which this node assigned it, else the
    /// oldest host to which a control plane assigned it.
    fn holder(&self, address: IpAddr) -> Option<Cow<'_, HostName>> {
        let given = self.vips.holder(address).map(Cow::Borrowed);
        let former = || {
            let mut former = self.former.iter().flat_map(|(entry, all)| {
                let all = all.iter().filter(|former| former.address == address);
                all.map(move |former| (entry, former))
            });
            let (entry, former) = former.next()?;
            Some(Cow::Owned(HostName {
                namespace: entry.namespace().into(),
                host: (&*former.host).into(),
            }))
        };
        let assigned = || {
            let first = self.assigned.get(&address)?.first();
            first.map(|(_, host)| Cow::Borrowed(host))
        };
        given.or_else(former).or_else(assigned)
    }

    /// Records the addresses that DNS gave out and that an entry's hosts no longer have. `before`: the hosts in their
    /// former state.
    pub(super) fn note_former(&mut self, entry: &mut Entry, now: u64) {
        let all = self.former.remove(&entry.name).unwrap_or_default();
        let mut known: HashSet<IpAddr> = all.iter().map(|former| former.address).collect();
        let mut by_host: BTreeMap<Arc<str>, Vec<Former>> = BTreeMap::new();
        for former in all {
            by_host
                .entry(Arc::clone(&former.host))
                .or_default()
                .push(former);
        }
        let before = self.served.get(&entry.name).map(Arc::clone);
        let before = before.iter().flat_map(|entry| &entry.hosts);
        let before: HashMap<&str, &Host> = before.map(|host| (&*host.name, host)).collect();
        let mut all = Vec::new();
        let wants = entry.wants_vips;
        for host in &mut entry.hosts {
            let mut own = by_host.remove(&host.name).unwrap_or_default();
            // The store remembers the addresses of this node, also those of the agent before this one.
            let number = self.vips.former(&host_name_of(&entry.name, &host.name));
            if let Some((number, until)) = number {
                // The number may be that of another entry of the host, which gets it again.
                let before = before.get(&*host.name);
                let had = |of: &IpAddr| before.is_some_and(|before| before.given.contains(of));
                let new = number.addresses().into_iter();
                let new = new.filter(|of| wants || had(of));
                own.extend(new.filter(|of| known.insert(*of)).map(|address| Former {
                    host: Arc::clone(&host.name),
                    address,
                    until,
                    is_own: true,
                }));
            }
            let vips = before.get(&*host.name).into_iter().flat_map(|before| {
                let vips = before.vips.iter();
                vips.filter(|vip| before.assigned.contains(vip))
            });
            for address in vips {
                if !host.vips.contains(address) && is_allocated(*address) && known.insert(*address)
                {
                    self.vips.foreign(*address, true);
                    own.push(Former {
                        host: Arc::clone(&host.name),
                        address: *address,
                        until: now + KEPT,
                        is_own: false,
                    });
                }
            }
            for former in own.extract_if(.., |former| host.vips.contains(&former.address)) {
                known.remove(&former.address);
                if !former.is_own {
                    self.vips.foreign(former.address, false);
                }
            }
            for former in &own {
                if former.is_own {
                    host.given.push(former.address);
                } else {
                    host.former.push(former.address);
                }
            }
            all.extend(own);
        }
        all.extend(by_host.into_values().flatten());
        if !all.is_empty() {
            self.former.insert(entry.name.clone(), all);
        }
    }

    /// Forgets former addresses that clients no longer know.
    pub(super) fn forget_former(&mut self, now: u64, dirty: &mut BTreeSet<EntryName>) {
        for (entry, all) in &mut self.former {
            let entry_is_gone = !self.last.contains_key(entry);
            for former in all.extract_if(.., |former| former.until <= now || entry_is_gone) {
                dirty.insert(entry.clone());
                if !former.is_own {
                    self.vips.foreign(former.address, false);
                }
                let naming = self.naming.get(&former.address);
                dirty.extend(naming.into_iter().flatten().cloned());
            }
        }
        self.former.retain(|_, all| !all.is_empty());
    }
}

fn set(asking: &[(HostName, Age)]) -> BTreeSet<&(HostName, Age)> {
    asking.iter().collect()
}

/// Returns whether this node may assign a number to a host to which no control plane has assigned an address.
pub(super) fn may_have_number(entry: &Entry, host: &Host) -> bool {
    entry.wants_vips && is_served(entry) && host.wildcard().is_none()
}

pub(super) fn host_name(entry: &Entry, host: &Host) -> HostName {
    host_name_of(&entry.name, &host.name)
}

fn host_name_of(entry: &EntryName, host: &str) -> HostName {
    HostName {
        namespace: entry.namespace().into(),
        host: host.into(),
    }
}
