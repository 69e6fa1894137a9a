//! Requests of the CNI plug-in, and the pods that it registered: their network namespaces and addresses, before the source has the addresses.
//!
//! The registrations are trusted as CNI's records are: they come over the agent's socket, which is root's. They only say
//! where a pod is. Whether the pod is captured, and by which rules, its source decides.
//!
//! They are kept in a file beside the agent's socket, for the next agent. The file goes with a reboot, as the pods do.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use admin::cni::{Answer, Ask, Attachment, Request};
use dataplane_common::capture::Enrolled;
use kernel::capture::CaptureTables;
use model::{Place, Snapshot, Uid, Workload, WorkloadName};
use plan::enrol::Member;
use tokio::sync::mpsc::UnboundedSender;
use tracing::warn;

use super::{Mesh, problems::Problems};
use crate::remembered;

/// The name of the file, beside the socket.
const FILE: &str = "pods.json";

/// The registered pods, and the requests that wait for an answer.
#[derive(Debug)]
pub struct CniRequests {
    /// The oldest first.
    pods: Vec<Attachment>,
    file: PathBuf,
    /// Why the file of an earlier agent could not be read. Until this agent writes the file, a pod that is not found may be
    /// one of that file's.
    unread: Option<String>,
    /// Whether the file lacks changes of `pods`.
    is_changed: bool,
    /// Requests that are carried out when the file has these changes.
    done: Vec<UnboundedSender<Answer>>,
    /// Requests whose pods are not captured yet.
    asks: Vec<(Attachment, UnboundedSender<Answer>)>,
}

impl CniRequests {
    /// Reads the registrations that an earlier agent kept in `directory`.
    pub fn read(directory: &Path) -> Self {
        let file = directory.join(FILE);
        let read = || -> io::Result<Vec<Attachment>> {
            match fs::read(&file) {
                Ok(text) => Ok(serde_json::from_slice(&text)?),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                Err(error) => Err(error),
            }
        };
        let (pods, unread) = match read() {
            Ok(pods) => (pods, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Self {
            pods,
            unread: unread.map(|error| {
                format!(
                    "cannot read the pods that the CNI plug-in registered, {}: {error}; remove the file",
                    file.display()
                )
            }),
            file,
            is_changed: false,
            done: Vec::new(),
            asks: Vec::new(),
        }
    }

    /// Why registrations of an earlier agent are not known.
    pub fn unread(&self) -> Option<&str> {
        self.unread.as_deref()
    }

    /// Whether requests wait for an answer.
    pub fn is_awaited(&self) -> bool {
        !self.asks.is_empty()
    }

    /// Takes a request. [`CniRequests::keep`] answers those that need no look at the network namespaces.
    pub fn take(&mut self, ask: Ask) {
        let Ask { request, answers } = ask;
        let before = self.pods.len();
        match request {
            Request::Check(pod) => return self.asks.push((pod, answers)),
            Request::Add(pod) => {
                if !self.pods.contains(&pod) {
                    self.pods.retain(|known| known.key != pod.key);
                    self.pods.push(pod.clone());
                    self.is_changed = true;
                }
                return self.asks.push((pod, answers));
            }
            Request::Del(key) => self.pods.retain(|known| known.key != key),
            Request::Gc(valid) => self.pods.retain(|known| valid.contains(&known.key)),
        }
        self.is_changed |= self.pods.len() != before;
        self.done.push(answers);
    }

    /// Writes the file if the pods have changed, and answers the requests that only change the pods. Many requests become one file.
    pub fn keep(&mut self) {
        if std::mem::take(&mut self.is_changed) {
            self.save();
        }
        for answers in self.done.drain(..) {
            // Fails only if the plug-in waits no longer.
            let _ = answers.send(Answer::Done);
        }
    }

    /// Forgets the pods whose network namespaces no longer exist.
    pub fn retain(&mut self, exists: impl Fn(u64) -> bool) {
        let before = self.pods.len();
        self.pods.retain(|pod| exists(pod.cookie));
        self.is_changed |= self.pods.len() != before;
    }

    /// Returns the cookie of the network namespace that was registered last for a workload.
    pub fn cookie(&self, workload: &Workload) -> Option<u64> {
        let mut its = self.pods.iter().rev();
        its.find(|pod| is_of(pod, workload)).map(|pod| pod.cookie)
    }

    /// Returns the snapshot in which pods that have no address yet have the registered ones.
    pub fn complete(&self, snapshot: &Snapshot) -> Snapshot {
        let mut snapshot = snapshot.clone();
        for pod in &self.pods {
            let Some(workload) = workload_of(pod, &snapshot) else {
                continue;
            };
            // The source's addresses count as soon as it has some.
            let source = workload.place == Place::Address && workload.addresses.is_empty();
            if source && !pod.addresses.is_empty() {
                let mut addressed = (**workload).clone();
                addressed.addresses = pod.addresses.iter().copied().collect();
                let name = addressed.name.clone();
                snapshot.workloads.insert(name, Arc::new(addressed));
            }
        }
        snapshot
    }

    fn save(&mut self) {
        let text = serde_json::to_string(&self.pods).map_err(io::Error::from);
        // Only root reads it: it has all tenants' names.
        match text.and_then(|text| remembered::replace(&self.file, &text)) {
            Ok(()) => self.unread = None,
            Err(error) => warn!(
                "cannot write {}: {error}; an agent that starts now does not know the pods that have just started",
                self.file.display()
            ),
        }
    }
}

/// Sends an answer. Returns whether the request waits for another.
fn is_open(answers: &UnboundedSender<Answer>, answer: Answer) -> bool {
    let is_waiting = matches!(answer, Answer::Waiting(_));
    // Fails if the plug-in waits no longer: it asks again.
    answers.send(answer).is_ok() && is_waiting
}

/// Whether a registration is a workload's. A runtime gives the UID of a Pod, except for static pods: theirs differs from
/// that of the API, and is no UUID.
fn is_of(pod: &Attachment, workload: &Workload) -> bool {
    let uid = pod.uid.as_deref().and_then(Uid::parse);
    let is_other = uid
        .zip(workload.uid)
        .is_some_and(|(given, its)| given != its);
    pod.namespace == workload.name.namespace() && pod.name == workload.name.name() && !is_other
}

/// Returns the workload of a registration, if the source has it.
fn workload_of<'a>(pod: &Attachment, snapshot: &'a Snapshot) -> Option<&'a Arc<Workload>> {
    let name = WorkloadName::new(&pod.namespace, &pod.name);
    let workload = snapshot.workloads.get(&name)?;
    is_of(pod, workload).then_some(workload)
}

/// Returns the workload of a registration, if the source has all that decides whether it is captured; otherwise what is
/// missing.
fn read<'a>(pod: &Attachment, snapshot: &'a Snapshot) -> Result<&'a Arc<Workload>, String> {
    let (namespace, name) = (&pod.namespace, &pod.name);
    let lacks = |what: String| format!("the agent's source does not have {what} yet");
    let workload = workload_of(pod, snapshot).ok_or_else(|| {
        let uid = pod.uid.as_ref();
        let with = uid.map_or(String::new(), |uid| format!(" with UID {uid}"));
        lacks(format!("the Pod {namespace}/{name}{with}"))
    })?;
    // Without the Namespace, its labels are not known.
    let namespaces = snapshot.namespaces.as_ref();
    if namespaces.is_some_and(|all| !all.contains(namespace.as_str())) {
        return Err(lacks(format!("the Namespace {namespace}")));
    }
    Ok(workload)
}

impl Mesh {
    /// Takes a request of the CNI plug-in.
    pub fn take(&mut self, ask: Ask) {
        if self.said.without_mesh {
            // Only queries are captured: a pod that sends them to its resolvers is not freer than its rules.
            let _ = ask.answers.send(Answer::NotCaptured);
        } else {
            self.cni.take(ask);
        }
    }

    /// Whether a pod's start waits for an answer.
    pub fn is_awaited(&self) -> bool {
        self.cni.is_awaited()
    }

    /// As [`CniRequests::keep`].
    pub fn keep_pods(&mut self) {
        self.cni.keep();
    }

    /// Tells the plug-in why nothing was decided.
    pub fn delay(&mut self, why: &str) {
        let asks = &mut self.cni.asks;
        asks.retain(|(_, answers)| is_open(answers, Answer::Waiting(why.to_owned())));
    }

    /// Answers the plug-in's requests after the tables are written. `waits`: whether another layout's programs still serve.
    pub(super) fn answer_cni(
        &mut self,
        tables: &CaptureTables,
        snapshot: &Snapshot,
        members: &[Member],
        problems: &Problems,
        waits: bool,
    ) {
        // An agent that starts after an answer knows the pod.
        self.cni.keep();
        // Taken out meanwhile, because the answers depend on the rest.
        let asks = std::mem::take(&mut self.cni.asks);
        let decide = |pod: &Attachment| {
            let workload = match read(pod, snapshot) {
                Ok(workload) => workload,
                Err(why) => return Answer::Waiting(why),
            };
            let mut members = members.iter();
            let Some(member) = members.find(|member| member.workload.name == workload.name) else {
                return Answer::NotCaptured;
            };
            if waits {
                return Answer::Waiting("programs of another version still serve".to_owned());
            }
            match self.lacks(tables, member, pod.cookie, problems) {
                None if matches!(member.workload.place, Place::Exempt(_)) => Answer::NotCaptured,
                None => Answer::Done,
                Some(why) => Answer::Waiting(why),
            }
        };
        let asks = asks
            .into_iter()
            .filter(|(pod, answers)| is_open(answers, decide(pod)));
        self.cni.asks = asks.collect();
    }

    /// Why a workload in a network namespace is not captured as its rules ask; `None` if it is, as the kernel says.
    fn lacks(
        &self,
        tables: &CaptureTables,
        member: &Member,
        cookie: u64,
        problems: &Problems,
    ) -> Option<String> {
        let is_without = matches!(member.workload.place, Place::Exempt(_) | Place::Cgroup(_));
        if is_without || member.policy.only_queries {
            return None;
        }
        let name = &member.workload.name;
        let problem = problems.of(name);
        let why = |text: &str| {
            Some(problem.map_or_else(|| text.to_owned(), |problem| problem.text.clone()))
        };
        // If another proxy's socket cannot take packets, this is the workload's problem.
        let by_another = member.is_by_packets() && self.options.foreign;
        if let Some(problem) = problem.filter(|problem| problem.of_node || by_another) {
            return Some(problem.text.clone());
        }
        let number = self.enroller.numbers().find(|(of, _)| *of == name);
        let number = number.map(|(_, number)| number);
        if member.is_by_packets() {
            return self
                .lacks_packets(tables, member, number)
                .and_then(|text| why(&text));
        }
        let entry = match tables.enrolled(cookie) {
            Ok(entry) => entry.filter(|entry| Some(entry.workload) == number),
            Err(error) => return Some(error.to_string()),
        };
        let Some(entry) = entry else {
            return why(
                "the agent does not see the pod's network namespace: it looks in /run/netns and at processes",
            );
        };
        let is_proxied = entry.flags & Enrolled::PROXY != 0 && self.proxy.is_some();
        let attached = self.attached.get(&cookie);
        if is_proxied && attached.is_none_or(|attached| attached.name != *name) {
            return why("the agent's proxy does not listen in the pod's network namespace");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use admin::cni::Key;
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    const UID: &str = "8e3b0c9a-6b0f-4f61-9d1c-2f5d3c8a7b60";

    fn pod(name: &str, container: &str, uid: Option<&str>) -> Attachment {
        Attachment {
            key: Key {
                container: container.to_owned(),
                interface: "eth0".to_owned(),
            },
            namespace: "shop".to_owned(),
            name: name.to_owned(),
            uid: uid.map(str::to_owned),
            cookie: 7,
            addresses: vec!["10.0.0.5".parse().unwrap()],
        }
    }

    fn take(requests: &mut CniRequests, request: Request) -> Option<Answer> {
        let (answers, mut answered) = unbounded_channel();
        requests.take(Ask { request, answers });
        assert!(answered.try_recv().is_err(), "the file comes first");
        requests.keep();
        answered.try_recv().ok()
    }

    fn known(directory: &Path) -> Vec<String> {
        let pods = CniRequests::read(directory).pods.into_iter();
        pods.map(|pod| pod.key.container).collect()
    }

    #[test]
    fn registrations_outlive_the_agent_and_end_with_their_pods() {
        let directory = tempfile::tempdir().unwrap();
        let mut requests = CniRequests::read(directory.path());
        for container in ["a", "b", "c", "d"] {
            let added = Request::Add(pod("web", container, None));
            assert_eq!(take(&mut requests, added), None, "it is decided later");
        }
        assert_eq!(known(directory.path()), ["a", "b", "c", "d"]);
        // Asked again, and with the same key.
        take(&mut requests, Request::Add(pod("web", "a", Some(UID))));
        assert_eq!(known(directory.path()), ["b", "c", "d", "a"]);
        let key = |container: &str| pod("", container, None).key;
        let done = Some(Answer::Done);
        assert_eq!(take(&mut requests, Request::Del(key("b"))), done);
        assert_eq!(take(&mut requests, Request::Del(key("b"))), done);
        assert_eq!(known(directory.path()), ["c", "d", "a"]);
        let valid = vec![key("d"), key("a"), key("x")];
        assert_eq!(take(&mut requests, Request::Gc(valid)), done);
        assert_eq!(known(directory.path()), ["d", "a"]);
        requests.pods[0].cookie = 8;
        requests.retain(|cookie| cookie == 8);
        requests.keep();
        assert_eq!(known(directory.path()), ["d"]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_empty() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(CniRequests::read(directory.path()).unread(), None);
        fs::write(directory.path().join(FILE), "[{").unwrap();
        let mut requests = CniRequests::read(directory.path());
        assert!(requests.unread().unwrap().contains(FILE));
        take(&mut requests, Request::Add(pod("web", "a", None)));
        assert_eq!(requests.unread(), None, "it is written anew");
    }

    #[test]
    fn nothing_is_decided_before_the_source_has_the_pod_and_its_namespace() {
        let registered = pod("web", "a", Some(UID));
        let mut snapshot = Snapshot::default();
        let why = read(&registered, &snapshot).unwrap_err();
        assert!(why.contains("the Pod shop/web with UID"), "{why}");
        let name = WorkloadName::new("shop", "web");
        let workload = Workload::new(name.clone(), Place::Address);
        snapshot.workloads.insert(name, Arc::new(workload));
        // Manifests have no Namespaces that are missing.
        assert!(read(&registered, &snapshot).is_ok());
        snapshot.namespaces = Some([Arc::<str>::from("other")].into_iter().collect());
        let why = read(&registered, &snapshot).unwrap_err();
        assert!(why.contains("the Namespace shop"), "{why}");
        snapshot.namespaces = Some([Arc::<str>::from("shop")].into_iter().collect());
        assert!(read(&registered, &snapshot).is_ok());
    }

    #[test]
    fn a_pod_without_an_address_has_the_registered_one_and_another_of_its_name_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let mut requests = CniRequests::read(directory.path());
        take(&mut requests, Request::Add(pod("web", "a", Some(UID))));
        let other = UID.replace('8', "9");
        for (uid, addresses, wanted) in [
            (Some(UID), &[][..], Some("10.0.0.5")),
            (None, &[], Some("10.0.0.5")),
            (Some(&*other), &[], None),
            (Some(UID), &["10.0.0.6"], Some("10.0.0.6")),
        ] {
            let name = WorkloadName::new("shop", "web");
            let workload = Workload {
                uid: uid.map(|uid| Uid::parse(uid).unwrap()),
                addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
                ..Workload::new(name.clone(), Place::Address)
            };
            let is_its = requests.cookie(&workload).is_some();
            assert_eq!(is_its, uid != Some(&*other), "{uid:?}");
            let mut snapshot = Snapshot::default();
            snapshot.workloads.insert(name.clone(), Arc::new(workload));
            let completed = requests.complete(&snapshot);
            let found = completed.workloads[&name].addresses.first().copied();
            assert_eq!(found, wanted.map(|addr| addr.parse().unwrap()), "{uid:?}");
        }
    }

    #[test]
    fn a_request_is_open_until_it_is_decided_or_nobody_waits() {
        let (answers, mut answered) = unbounded_channel();
        let waiting = Answer::Waiting("x".to_owned());
        assert!(is_open(&answers, waiting.clone()));
        assert_eq!(answered.try_recv(), Ok(waiting.clone()));
        assert!(!is_open(&answers, Answer::Done));
        assert_eq!(answered.try_recv(), Ok(Answer::Done));
        drop(answered);
        assert!(!is_open(&answers, waiting));
    }
}
