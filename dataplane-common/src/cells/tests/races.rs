//! Several holders at a time: one flow is made once, and is whole.

use super::*;

/// Another flow with the same home.
fn rival(key: &FlowKey, mask: u32) -> FlowKey {
    (0..=u8::MAX)
        .flat_map(|n| (0..=u16::MAX).map(move |port| (n, port)))
        .map(|(n, port)| FlowKey {
            src: Addr::from_v4([198, 51, 100, n]),
            src_port: Port::new(port),
            ..*key
        })
        .find(|rival| (rival.place(SECRET) ^ key.place(SECRET)) & mask == 0)
        .unwrap()
}

/// The home of a flow becomes free while one CPU makes the flow elsewhere: no other CPU makes it in the home, too.
#[test]
fn a_flow_is_not_made_twice() {
    let shared = Shared::new(1024);
    let memory = &shared;
    let key = key(40_000);
    let rival = rival(&key, memory.mask());
    assert!(shared.make(&rival, &to(&rival, 0), at(0)));
    let elsewhere = hold(&memory, &key, at(0));
    assert_eq!(elsewhere, key.place(SECRET) & memory.mask() ^ 1);
    assert!(shared.unmake(&rival));
    assert_eq!(hold(&memory, &key, at(0)), BUSY, "held elsewhere");
    let line = memory.cell(elsewhere).unwrap();
    write(line, &key, &to(&key, 0));
    assert!(publish(line, &key, memory.holder(at(0))));
    assert_eq!(hold(&memory, &key, at(0)), BUSY, "there elsewhere");
    assert_eq!(shared.find(&key), Some(elsewhere));
    assert!(shared.unmake(&key));
    shared.is_empty();
}

/// A held cell that a flow might have may get this flow: no other cell is taken meanwhile.
#[test]
fn a_held_cell_beside_the_home_makes_wait() {
    let shared = Shared::new(64);
    let memory = &shared;
    let first = (0..2)
        .map(|step| key(40_000 + 2 * step))
        .find(|key| key.place(SECRET) % 2 == 0)
        .unwrap();
    let second = key(first.src_port.host() + 2);
    let held = hold(&memory, &first, at(0));
    assert_eq!(held, candidate(second.place(SECRET), 1) & memory.mask());
    let rival = rival(&second, memory.mask());
    assert!(shared.make(&rival, &to(&rival, 0), at(0)));
    assert_eq!(hold(&memory, &second, at(0)), BUSY);
    give_back(&memory, held, &first, at(0));
    assert_eq!(hold(&memory, &second, at(0)), held);
}

/// Memory that lets another CPU act when a cell is looked at once more than so many times.
struct Hooked<'a> {
    memory: &'a Shared,
    at: u32,
    before: Cell<u32>,
    hook: RefCell<Option<Box<dyn FnOnce() + 'a>>>,
}

impl<'a> Memory for Hooked<'a> {
    type Line = &'a [AtomicU64; 8];
    type Entry = AtomicSlot<'a>;
    type Sequences = &'a [AtomicU64; 2];

    fn mask(&self) -> u32 {
        self.memory.mask()
    }

    fn secret(&self) -> u64 {
        SECRET
    }

    fn holder(&self, now: Tick) -> Holder {
        Holder::new(1, now)
    }

    fn keep(&self, state: states::State) -> u32 {
        states::Timeouts::DEFAULT.of(state)
    }

    fn sequences(&self, index: u32) -> Option<Self::Sequences> {
        self.memory.sequences(index)
    }

    fn cell(&self, index: u32) -> Option<Self::Line> {
        if index == self.at {
            if let Some(before) = self.before.get().checked_sub(1) {
                self.before.set(before);
            } else if let Some(hook) = self.hook.take() {
                hook();
            }
        }
        self.memory.cell(index)
    }

    fn slot(&self, index: u32) -> Option<Self::Entry> {
        self.memory.slot(index)
    }
}

/// A flow that is over can be evicted. Between the look at it and its removal, another CPU has removed it and made
/// another flow there: the new flow stays.
#[test]
fn what_came_since_gives_no_way() {
    let shared = Shared::new(1);
    let (first, mut second, mut third) = (key(40_000), key(40_001), key(40_002));
    (second.dst_port, third.dst_port) = (Port::new(80), Port::new(81));
    let over = Translation {
        seen: seen::PACKET | seen::RST,
        ..to(&first, 0)
    };
    assert!(shared.make(&first, &over, at(0)));
    let late = Hooked {
        memory: &shared,
        at: 0,
        before: Cell::new(1),
        hook: RefCell::new(Some(Box::new(|| {
            assert!(shared.unmake(&first));
            let fresh = Translation {
                used: at(20),
                ..to(&second, 0)
            };
            assert!(shared.make(&second, &fresh, at(20)));
        }))),
    };
    assert_eq!(hold(&late, &third, at(20)), BUSY);
    assert_eq!(shared.find(&second), Some(0));
    assert_eq!(shared.is_sound(), 1);
}

/// A packet marks only its own flow, and not a flow that has the cell by then. Marks of one flow that happen at once
/// all count.
#[test]
fn a_packet_marks_its_own_flow() {
    let shared = Shared::new(1);
    let (first, mut second) = (key(40_000), key(40_001));
    second.dst_port = Port::new(80);
    let line = (&&shared).cell(0).unwrap();
    let state = || State(line.load(STATE));
    assert!(shared.make(&first, &to(&first, 0), at(0)));
    let found = read(line).unwrap();
    let (fin, answered) = (seen::FIN, seen::in_replies(seen::PACKET));
    assert!(mark(line, found.head(), found.state(), fin, 0, at(20)));
    assert!(mark(line, found.head(), found.state(), answered, 0, at(20)));
    assert_eq!(state().seen(), seen::PACKET | fin | answered);
    assert_eq!(state().used(), at(20));
    let (head, before) = (found.head(), state());
    let anew = seen::EARLIER;
    assert!(mark(line, head, before, answered, anew, at(30)));
    assert_eq!(state().seen(), seen::PACKET | answered, "anew");
    let (fin, reset) = (fin | seen::RST, seen::RST);
    assert!(mark(line, head, state(), fin, 0, at(30)));
    assert!(mark(line, head, state(), seen::PACKET, reset, at(30)));
    let closed = seen::PACKET | answered | seen::FIN;
    assert_eq!(state().seen(), closed, "it was no RST of its own");

    assert!(shared.unmake(&first));
    let fresh = Translation {
        used: at(40),
        ..to(&second, 0)
    };
    assert!(shared.make(&second, &fresh, at(40)));
    let made = state();
    for before in [found.state(), before] {
        assert!(!mark(line, head, before, seen::RST, 0, at(40)));
        assert_eq!(state(), made);
    }
}

/// The home becomes free, and another CPU makes the flow there, between the look at the home and at the next cell.
#[test]
fn a_flow_is_not_made_twice_beside_its_home() {
    for published in [false, true] {
        let shared = Shared::new(1024);
        let memory = &shared;
        let key = key(40_000);
        let rival = rival(&key, memory.mask());
        assert!(shared.make(&rival, &to(&rival, 0), at(0)));
        let home = key.place(SECRET) & memory.mask();
        let late = Hooked {
            memory,
            at: home ^ 1,
            before: Cell::new(0),
            hook: RefCell::new(Some(Box::new(|| {
                assert!(shared.unmake(&rival));
                if published {
                    assert!(shared.make(&key, &to(&key, 0), at(0)));
                } else {
                    assert_eq!(hold(&memory, &key, at(0)), home);
                }
            }))),
        };
        assert_eq!(hold(&late, &key, at(0)), BUSY);
        if !published {
            give_back(&memory, home, &key, at(0));
        }
        assert_eq!(shared.unmake(&key), published);
        shared.is_empty();
    }
}

/// Threads make and remove the same flows in few cells: no flow is ever there twice or half, and nothing is left
/// behind.
#[test]
fn many_at_once_leave_whole_flows() {
    for round in 0..20_u64 {
        let shared = Shared::new(128);
        thread::scope(|scope| {
            for number in 0..4_u64 {
                let shared = &shared;
                scope.spawn(move || {
                    // Marsaglia's xorshift.
                    let mut random = 1 + number + round * 7919;
                    for _ in 0..20_000 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        let key = key(40_000 + (random >> 20) as u16 % 96);
                        let node_addr = key.src_port.host() as u8 & 1;
                        if random >> 40 & 1 == 0 {
                            shared.unmake(&key);
                        } else if shared.find(&key).is_none() {
                            shared.make(&key, &to(&key, node_addr), Tick::default());
                        }
                    }
                });
            }
        });
        assert!(shared.is_sound() > 16);
        for (key, _) in shared.flows() {
            assert!(shared.unmake(&key));
        }
        shared.is_empty();
    }
}

/// Several CPUs have the first packets of one flow at once: one makes the flow, and all use it.
#[test]
fn whoever_comes_second_finds_the_first_ones_flow() {
    const CPUS: u16 = 3;
    let shared = Shared::new(1024);
    let memory = &shared;
    let start = std::sync::Barrier::new(CPUS.into());
    let chosen: Vec<Vec<_>> = thread::scope(|scope| {
        let cpus: Vec<_> = (0..CPUS)
            .map(|cpu| {
                let start = &start;
                scope.spawn(move || {
                    let flow = |client| {
                        let key = key(client);
                        start.wait();
                        // Each would make it lead to another port.
                        let value = Translation {
                            endpoint_port: Port::new(cpu),
                            ..to(&key, 0)
                        };
                        // A thread that holds the cell may be preempted, unlike a program.
                        let index = loop {
                            match hold_or_find(&memory, &key, at(0)) {
                                BUSY => thread::yield_now(),
                                index => break index,
                            }
                        };
                        assert!(index < BUSY, "{client}");
                        if index & MADE == 0 {
                            assert!(memory.make_in(index, &key, &value, at(0)));
                        }
                        let (_, found) = find(&memory, &key).unwrap();
                        found.value().endpoint_port.host()
                    };
                    (0..300).map(|client| flow(2 * client)).collect()
                })
            })
            .collect();
        cpus.into_iter().map(|cpu| cpu.join().unwrap()).collect()
    });
    for others in &chosen[1..] {
        assert_eq!(chosen[0], *others);
    }
    assert_eq!(shared.is_sound(), 300);
}
