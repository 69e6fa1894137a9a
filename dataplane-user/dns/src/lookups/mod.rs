//! Lookups of the DNS names of ServiceEntries' endpoints.
//!
//! Each name has a task. The task asks the node's resolvers, reports the addresses, waits for the records' TTL, and asks
//! again. The last addresses count until resolvers give others. So an entry keeps its endpoints if no resolver answers, or
//! if the name has no address any more.

mod answers;
mod asker;

use std::{
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use model::{EndpointName, Resolved};
use threads::Deaths;
use tokio::{
    runtime::Builder,
    sync::{
        Semaphore,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    task::AbortHandle,
    time::sleep,
};

use self::asker::Asker;
use super::{client::ResolvConf, name::LowerName, upstream::Upstream};

/// Maximum number of names of a namespace.
const NAMES: usize = 1000;
/// Maximum number of lookups at the same time, of all namespaces and of one: slow names of a namespace do not delay those of
/// others.
const AT_ONCE: usize = 64;
const AT_ONCE_OF_EACH: usize = 8;
/// Minimum time between two batches of new addresses.
const PAUSE: Duration = Duration::from_millis(500);

/// Times between lookups of a name.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The shortest and the longest time after an answer, for any TTL.
    least: Duration,
    most: Duration,
    /// The time after a failed lookup. It doubles with each failure, up to `retry_most`.
    retry: Duration,
    retry_most: Duration,
}

const PACE: Pace = Pace {
    least: Duration::from_secs(5),
    most: Duration::from_mins(5),
    retry: Duration::from_secs(2),
    retry_most: Duration::from_mins(1),
};

/// Looks up names until it is dropped.
pub struct Lookups {
    found: Arc<Found>,
    jobs: UnboundedSender<Job>,
    wanted: HashSet<EndpointName>,
    /// Names beyond a limit, whose problem has been reported.
    refused: HashSet<EndpointName>,
    /// The time of the last batch.
    taken: Option<Instant>,
    /// The number of names of each namespace.
    counts: HashMap<Arc<str>, usize>,
    domain: LowerName,
}

/// An order to the thread.
enum Job {
    /// Look up a name, with these last known addresses.
    Begin(EndpointName, Arc<[IpAddr]>),
    /// Stop looking up a name.
    End(EndpointName),
}

/// Results that the agent has not taken yet.
struct Found {
    news: Mutex<News>,
    notify: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct News {
    found: HashMap<EndpointName, Resolved>,
    /// The time of the first result.
    since: Option<Instant>,
}

impl Found {
    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, name: EndpointName, resolved: Resolved) {
        let mut news = self.news();
        news.found.insert(name, resolved);
        news.since.get_or_insert_with(Instant::now);
    }

    /// Notifies the reader of results, until the reader takes them.
    async fn notify(&self) {
        loop {
            sleep(PAUSE).await;
            if self.news().since.is_some() {
                (self.notify)();
            }
        }
    }
}

impl Lookups {
    /// Starts the thread, without names. `resolv_conf`: the file with the node's resolvers, which each lookup reads again.
    /// `domain`: the cluster's domain, whose names are not looked up. `notify` is called when there are results to
    /// [take](Lookups::take).
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn start(
        resolv_conf: PathBuf,
        domain: LowerName,
        notify: impl Fn() + Send + Sync + 'static,
        deaths: Deaths,
    ) -> io::Result<Self> {
        let ask = move || Ok(ResolvConf::parse(&read(&resolv_conf)?).resolvers);
        Self::start_with(ask, PACE, domain, notify, deaths)
    }

    fn start_with(
        resolvers: impl Fn() -> Result<Vec<SocketAddr>, String> + Send + Sync + 'static,
        pace: Pace,
        domain: LowerName,
        notify: impl Fn() + Send + Sync + 'static,
        deaths: Deaths,
    ) -> io::Result<Self> {
        let found = Arc::new(Found {
            news: Mutex::default(),
            notify: Box::new(notify),
        });
        let (jobs, todo) = unbounded_channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let asker = Arc::new(Asker {
            upstream: Upstream::new(Arc::default()),
            resolvers: Box::new(resolvers),
            pace,
            all: Semaphore::new(AT_ONCE),
            found: Arc::clone(&found),
        });
        threads::start("lookups".to_owned(), deaths, move || {
            let found = Arc::clone(&asker.found);
            runtime.block_on(async {
                tokio::select! {
                    () = follow(asker, todo) => {}
                    () = found.notify() => {}
                }
            });
        })?;
        Ok(Self {
            found,
            jobs,
            wanted: HashSet::new(),
            refused: HashSet::new(),
            taken: None,
            counts: HashMap::new(),
            domain,
        })
    }

    /// Looks up these names from now on, and no others. `last` returns a name's last known addresses.
    pub fn want(
        &mut self,
        names: Vec<EndpointName>,
        last: impl Fn(&EndpointName) -> Arc<[IpAddr]>,
    ) {
        let wanted: HashSet<&EndpointName> = names.iter().collect();
        let (found, jobs, counts) = (&self.found, &self.jobs, &mut self.counts);
        self.wanted.retain(|name| {
            if wanted.contains(name) {
                return true;
            }
            if let Some(count) = counts.get_mut(&name.namespace) {
                *count -= 1;
            }
            found.news().found.remove(name);
            // Fails only if the thread has died, which it has reported.
            jobs.send(Job::End(name.clone())).unwrap_or_default();
            false
        });
        self.refused.retain(|name| wanted.contains(name));
        counts.retain(|_, count| *count > 0);
        let is_new = |name: &EndpointName| !self.wanted.contains(name);
        let mut new: Vec<EndpointName> = names.into_iter().filter(is_new).collect();
        // Names with known addresses first, so that a restart at the limit takes no endpoints away.
        new.sort_by_cached_key(|name| (last(name).is_empty(), name.clone()));
        for name in new {
            let refusal = self.refusal(&name);
            if let Some(problem) = refusal {
                if self.refused.insert(name.clone()) {
                    let resolved = Resolved {
                        addresses: last(&name),
                        problem: Some(problem.into()),
                    };
                    self.found.tell(name, resolved);
                }
                continue;
            }
            self.refused.remove(&name);
            *self.counts.entry(Arc::clone(&name.namespace)).or_default() += 1;
            self.wanted.insert(name.clone());
            let addresses = last(&name);
            self.jobs
                .send(Job::Begin(name, addresses))
                .unwrap_or_default();
        }
    }

    /// Returns the reason why a name is not looked up.
    fn refusal(&self, name: &EndpointName) -> Option<String> {
        let is_of_cluster =
            LowerName::parse(&name.name).is_ok_and(|asked| asked.before(&self.domain).is_some());
        if is_of_cluster {
            return Some(format!(
                "is a name of the cluster, which the agent does not look up; expected a name outside of {}",
                self.domain
            ));
        }
        let count = self.counts.get(&name.namespace);
        (count >= Some(&NAMES)).then(|| {
            format!(
                "is not looked up: namespace {} has more than {NAMES} names of endpoints; name fewer",
                name.namespace
            )
        })
    }

    /// Takes the results since the last batch, and the time of the first of them. Returns nothing if the last batch is less
    /// than half a second ago. So names whose addresses change all the time do not keep the reader busy.
    pub fn take(&mut self) -> (HashMap<EndpointName, Resolved>, Option<Instant>) {
        if self.taken.is_some_and(|taken| taken.elapsed() < PAUSE) {
            return (HashMap::new(), None);
        }
        let News { found, since } = std::mem::take(&mut *self.found.news());
        if since.is_some() {
            self.taken = Some(Instant::now());
        }
        (found, since)
    }
}

/// Reads a `resolv.conf`.
fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| {
        let path = path.display();
        format!(
            "cannot read {path}, the node's resolvers: {error}; name the file in dns.resolvConf"
        )
    })
}

/// Runs a task for each name, until the channel closes.
async fn follow(asker: Arc<Asker>, mut todo: UnboundedReceiver<Job>) {
    let mut tasks: HashMap<EndpointName, AbortHandle> = HashMap::new();
    let mut of_each: HashMap<Arc<str>, Arc<Semaphore>> = HashMap::new();
    while let Some(job) = todo.recv().await {
        match job {
            Job::Begin(name, last) => {
                let own = of_each.entry(Arc::clone(&name.namespace));
                let own = own.or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE_OF_EACH)));
                let task = Arc::clone(&asker).look_up(name.clone(), last, Arc::clone(own));
                tasks.insert(name, tokio::spawn(task).abort_handle());
            }
            Job::End(name) => {
                if let Some(task) = tasks.remove(&name) {
                    task.abort();
                }
                // A semaphore without a task is in this map only.
                of_each.retain(|_, own| Arc::strong_count(own) > 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::UdpSocket,
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
    };

    use hickory_proto::{
        op::Message,
        rr::{RData, Record, rdata},
    };

    use super::*;

    fn ips(texts: &[&str]) -> Arc<[IpAddr]> {
        let parsed = texts.iter().map(|text| text.parse().unwrap());
        parsed.collect()
    }

    /// A resolver on loopback that answers queries for A with these addresses, one after the other, and none for names that
    /// begin with `slow`; and how many queries it got.
    fn resolver(answers: mpsc::Receiver<Vec<u8>>) -> (SocketAddr, Arc<AtomicUsize>) {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        let asked = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&asked);
        thread::spawn(move || {
            let mut buffer = [0; 1500];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).unwrap();
                counted.fetch_add(1, Ordering::Relaxed);
                let query = Message::from_vec(&buffer[..length]).unwrap();
                let mut message = Message::response(query.metadata.id, query.metadata.op_code);
                let question = query.queries[0].clone();
                if question
                    .name()
                    .to_lowercase()
                    .to_string()
                    .starts_with("slow")
                {
                    continue;
                }
                if question.query_type() == hickory_proto::rr::RecordType::A {
                    let Ok(addresses) = answers.recv() else {
                        return;
                    };
                    for last in addresses {
                        let data = RData::A(rdata::A::new(192, 0, 2, last));
                        message.add_answer(Record::from_rdata(question.name().clone(), 0, data));
                    }
                }
                message.add_query(question);
                socket.send_to(&message.to_vec().unwrap(), from).unwrap();
            }
        });
        (at, asked)
    }

    fn name(text: &str) -> EndpointName {
        EndpointName {
            namespace: "shop".into(),
            name: text.into(),
        }
    }

    fn start(resolver: SocketAddr, pace: Pace) -> Lookups {
        let domain = LowerName::parse("cluster.local").unwrap();
        let deaths: Deaths = Arc::new(|thread, why| panic!("{thread}: {why}"));
        Lookups::start_with(move || Ok(vec![resolver]), pace, domain, || {}, deaths).unwrap()
    }

    /// Waits for the next result of a name.
    fn next_of(lookups: &mut Lookups, name: &EndpointName) -> Resolved {
        let start = Instant::now();
        loop {
            if let Some(resolved) = lookups.take().0.remove(name) {
                return resolved;
            }
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "nothing is found"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    const OFTEN: Pace = Pace {
        least: Duration::from_millis(10),
        retry: Duration::from_millis(10),
        retry_most: Duration::from_millis(10),
        ..PACE
    };

    #[test]
    fn names_are_looked_up_again_until_nobody_wants_them() {
        let (say, said) = mpsc::channel();
        let (at, asked) = resolver(said);
        let mut lookups = start(at, OFTEN);
        let (db, own) = (name("db.example.com"), name("web.shop.svc.cluster.local"));
        lookups.want(vec![db.clone(), own.clone()], |_| ips(&["192.0.2.9"]));
        let refused = next_of(&mut lookups, &own);
        let of_cluster = refused.problem.as_deref().unwrap();
        assert!(of_cluster.contains("a name of the cluster"), "{of_cluster}");
        assert_eq!(refused.addresses, ips(&["192.0.2.9"]));
        for (answers, addresses) in [
            (vec![1, 2], ips(&["192.0.2.1", "192.0.2.2"])),
            (vec![3], ips(&["192.0.2.3"])),
            // The name goes: its last address stays.
            (vec![], ips(&["192.0.2.3"])),
            (vec![5], ips(&["192.0.2.5"])),
        ] {
            let is_problem = answers.is_empty();
            say.send(answers).unwrap();
            let resolved = next_of(&mut lookups, &db);
            assert_eq!(resolved.addresses, addresses);
            assert_eq!(resolved.problem.is_some(), is_problem, "{resolved:?}");
        }
        // More questions than any client may ask.
        for _ in 0..1000 {
            say.send(vec![4]).unwrap();
        }
        lookups.want(Vec::new(), |_| ips(&[]));
        assert!(lookups.wanted.is_empty() && lookups.counts.is_empty());
        // The lookups in flight end; after that nothing asks the resolver any more.
        thread::sleep(Duration::from_millis(300));
        let before = asked.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(300));
        assert_eq!(asked.load(Ordering::Relaxed), before);
    }

    /// The resolver does not answer for them, and each takes as long as that takes.
    #[test]
    fn slow_names_of_one_namespace_do_not_delay_those_of_another() {
        let (say, said) = mpsc::channel();
        let (at, _) = resolver(said);
        let mut lookups = start(at, PACE);
        let slow = (0..2 * AT_ONCE).map(|number| name(&format!("slow{number:03}.example.com")));
        let slow: Vec<_> = slow.collect();
        lookups.want(slow.clone(), |_| ips(&[]));
        // They are all under way, or wait.
        thread::sleep(Duration::from_millis(100));
        let other = EndpointName {
            namespace: "other".into(),
            name: "db.example.com".into(),
        };
        say.send(vec![1]).unwrap();
        let all = slow.iter().chain([&other]).cloned().collect();
        lookups.want(all, |_| ips(&[]));
        let start = Instant::now();
        loop {
            let found = lookups.take().0;
            assert!(
                !found.keys().any(|name| name.name.starts_with("slow")),
                "a slow name has come to its end first"
            );
            if found.contains_key(&other) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(30));
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_namespace_has_a_bound_on_names() {
        let (_say, said) = mpsc::channel();
        let mut lookups = start(resolver(said).0, PACE);
        let mut names: Vec<_> = (0..=NAMES)
            .map(|n| name(&format!("slow{n:04}.example.com")))
            .collect();
        let other = EndpointName {
            namespace: "other".into(),
            name: "slow.example.com".into(),
        };
        names.push(other.clone());
        // The last one has an address already, and keeps its place.
        let last = |of: &EndpointName| match &*of.name {
            "slow1000.example.com" => ips(&["192.0.2.1"]),
            _ => ips(&[]),
        };
        lookups.want(names.clone(), last);
        assert_eq!(lookups.wanted.len(), NAMES + 1);
        assert!(lookups.wanted.contains(&other) && lookups.wanted.contains(&names[NAMES]));
        let refused = names[NAMES - 1].clone();
        let told = next_of(&mut lookups, &refused).problem.unwrap();
        assert!(told.contains("name fewer"), "{told}");
        // The next batch is not for half a second.
        lookups.found.tell(refused.clone(), Resolved::default());
        assert!(lookups.take().0.is_empty());
        thread::sleep(PAUSE);
        assert!(lookups.take().0.contains_key(&refused));
        // `want` reports the refusal once, until the name has a place.
        thread::sleep(PAUSE);
        lookups.want(names.clone(), last);
        assert!(lookups.take().0.is_empty() && !lookups.wanted.contains(&refused));
        names.remove(0);
        lookups.want(names, last);
        assert!(lookups.wanted.contains(&refused) && lookups.refused.is_empty());
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        assert!(read(Path::new("/proc/self/comm")).is_ok_and(|text| text.ends_with('\n')));
        let error = read(Path::new("/nowhere")).unwrap_err();
        assert!(error.starts_with("cannot read /nowhere, "), "{error}");
    }
}
