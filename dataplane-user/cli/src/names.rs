//! Names for numbers in the kernel's tables. A running agent knows them.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    time::{Duration, Instant},
};

use admin::{
    api::{Page, Pool},
    client::Client,
    report::Report,
};

/// Time for which a name is cached, because a pool may move to another service. An agent that did not answer is asked
/// again after this time.
const FRESH: Duration = Duration::from_secs(5);

/// Looks up names, and caches them for a short time.
#[derive(Debug)]
pub struct Names {
    client: Client,
    known: RefCell<HashMap<u32, (Instant, Option<Pool>)>>,
    /// Time of the last request without an answer, so that an agent that hangs does not delay every line.
    silent: Cell<Option<Instant>>,
}

impl Names {
    /// Returns names from this agent.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            known: RefCell::default(),
            silent: Cell::new(None),
        }
    }

    /// Returns the service of a pool, as `namespace/name`. `None` if the pool has no service, or if no agent answers.
    pub fn of_pool(&self, pool: u32) -> Option<String> {
        let pool = self.pool(pool)?;
        Some(format!("{}/{}", pool.namespace, pool.name))
    }

    /// Returns the route that splits the connections to a pool. `None` if there is no route, or if no agent answers.
    pub fn route_of_pool(&self, pool: u32) -> Option<String> {
        self.pool(pool)?.route
    }

    /// Returns the agent's explanation for a destination of a service that it does not serve.
    pub fn left_out(&self, destination: &str) -> Vec<String> {
        let report = self.client.get::<Report>("/status");
        let Some(agent) = report.ok().and_then(|report| report.agent) else {
            return Vec::new();
        };
        let problems = agent.problems.iter();
        let named = problems.filter(|problem| {
            let mut words = problem.text.split([' ', ',']);
            words.any(|word| word == destination)
        });
        let texts = named.map(|problem| format!("{}: {}", problem.place, problem.text));
        texts.collect()
    }

    fn pool(&self, pool: u32) -> Option<Pool> {
        // Pool 0 is never used.
        if pool == 0 || self.silent.get().is_some_and(|at| at.elapsed() < FRESH) {
            return None;
        }
        let mut known = self.known.borrow_mut();
        if let Some((asked, owner)) = known.get(&pool)
            && asked.elapsed() < FRESH
        {
            return owner.clone();
        }
        let Ok(page) = self
            .client
            .get::<Page<Pool>>(&format!("/pools?pool={pool}"))
        else {
            self.silent.set(Some(Instant::now()));
            return None;
        };
        let owner = page.items.into_iter().next();
        known.insert(pool, (Instant::now(), owner.clone()));
        owner
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
        thread,
    };

    use super::*;

    #[test]
    fn asks_once_and_remembers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).unwrap();
            stream
                .write_all(
                    b"HTTP/1.0 200 OK\r\n\r\n{\"items\":[{\"pool\":3,\"namespace\":\"shop\",\
                      \"name\":\"web\",\"port\":80,\"protocol\":\"tcp\"}]}",
                )
                .unwrap();
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let names = Names::new(Client::new(&socket));
        assert_eq!(names.of_pool(3).as_deref(), Some("shop/web"));
        assert!(agent.join().unwrap().starts_with("GET /pools?pool=3 "));
        // The server is closed now.
        assert_eq!(names.of_pool(3).as_deref(), Some("shop/web"));
        assert_eq!(names.of_pool(4), None);
        assert_eq!(names.of_pool(0), None);
    }
}
