//! Collects objects from files for the store: all of them, or the faults.

use std::{
    collections::{BTreeMap, HashMap, hash_map},
    path::PathBuf,
    sync::Arc,
};

use model::{Node, PodAddresses, ServiceName, Snapshot};
use tokio::time::Instant;

use super::{
    Errors, Loaded,
    document::Found,
    faults::{Faults, Origin},
    files,
    parse::{self, Format},
    whereabouts::Whereabouts,
};
use crate::{
    View,
    ingest::{Body, Kind, Message, Object, Store},
    objects::NodeFacts,
};

/// The objects that were read.
pub struct Stage<'a> {
    /// This node. Objects are converted as it sees them.
    node: &'a Node,
    files: Vec<PathBuf>,
    objects: Vec<Object>,
    origins: HashMap<(Kind, ServiceName), Origin>,
    whereabouts: Whereabouts,
    /// Facts of this node's own object.
    facts: Option<NodeFacts>,
    ignored: BTreeMap<String, usize>,
    faults: Faults,
}

impl<'a> Stage<'a> {
    /// Reads all files, as this node sees them.
    pub fn read(paths: &[PathBuf], node: &'a Node) -> Self {
        let mut stage = Self {
            node,
            files: Vec::new(),
            objects: Vec::new(),
            origins: HashMap::new(),
            whereabouts: Whereabouts::default(),
            facts: None,
            ignored: BTreeMap::new(),
            faults: Faults::default(),
        };
        let (files, missing) = files::find(paths);
        for (path, text) in missing {
            stage.faults.whole(path, text);
        }
        for file in files {
            stage.file(file);
        }
        stage
    }

    fn file(&mut self, path: PathBuf) {
        let text = match files::read(&path) {
            Ok(text) => text,
            Err(wrong) => return self.faults.whole(path, wrong),
        };
        let format = Format::of(&path);
        let file = index(self.files.len());
        let shown: Arc<str> = path.display().to_string().into();
        let origin = |document, item: Option<usize>| Origin {
            file,
            document: index(document),
            item: item.map(index),
        };
        let (documents, stops) = parse::parse(&text, format, &mut |document, item, found| {
            self.found(origin(document, item), found, &shown);
        });
        for (document, stop) in stops {
            self.faults.stop(origin(document, None), stop);
        }
        if documents == 0 {
            let text = "empty; expected at least one object".to_owned();
            self.faults.whole(path.clone(), text);
        }
        self.files.push(path);
    }

    fn found(&mut self, origin: Origin, found: Found<'_>, file: &Arc<str>) {
        match found {
            Found::Ignored(kind) => *self.ignored.entry(kind).or_default() += 1,
            Found::Fault(of, field, text) => {
                let object = of.and_then(|(kind, text)| label(kind, &kind.name(&text.metadata())));
                self.faults.field(origin, field, object, text);
            }
            Found::Object(kind, text) => {
                self.object(origin, kind.read(text, self.node, Some(file)));
            }
        }
    }

    fn object(&mut self, origin: Origin, mut object: Object) {
        let kind = object.kind;
        // A fault of a custom resource is a problem of this object alone. The store reports it. A policy without a name
        // would be missing, and limit nothing.
        if !kind.is_custom() || kind.is_policy() {
            for (field, text) in std::mem::take(&mut object.findings.faults) {
                let object = label(kind, &object.name);
                self.faults.field(origin, &field, object, text);
            }
        }
        match &object.body {
            // Facts of other nodes do not matter to this node.
            Some(Body::Node(facts)) if facts.name != self.node.name => {
                return self.whereabouts.node(&facts.name);
            }
            Some(Body::Node(facts)) => self.facts = Some(facts.clone()),
            Some(Body::Slice(slice, elsewhere)) => {
                self.whereabouts.slice(slice, elsewhere.as_deref());
            }
            Some(Body::Pod(pod)) => {
                let host_ports = pod.host_ports.as_ref();
                self.whereabouts.here |= host_ports.is_some_and(|all| !all.is_empty());
            }
            _ => {}
        }
        // A missing name is already reported. Two objects without a name are not the same object.
        if !object.name.name().is_empty() {
            match self.origins.entry((kind, object.name.clone())) {
                hash_map::Entry::Vacant(vacant) => _ = vacant.insert(origin),
                hash_map::Entry::Occupied(first) => {
                    let label = kind.label(&object.name);
                    self.faults.twice(origin, label, *first.get());
                }
            }
        }
        if kind != Kind::Node {
            self.objects.push(object);
        }
    }

    /// Returns `node` with the facts of its own object, if there is one.
    pub fn told(&self, node: &Node) -> Node {
        match &self.facts {
            Some(facts) => facts.applied_to(node),
            None => node.clone(),
        }
    }

    /// Returns whether there is a fault.
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Replaces the objects in the store, unless there are faults. `node`: this node with the facts of its object.
    pub fn finish(self, store: &mut Store, node: &Arc<Node>) -> Result<Loaded, Errors> {
        if !self.faults.is_empty() {
            return Err(self.faults.place(&self.files));
        }
        // The files are complete if they lack this node's own object, too.
        let kinds = Kind::ALL.into_iter().filter(|kind| *kind != Kind::Node);
        let now = Instant::now();
        let begin = kinds.clone().map(Message::Begin);
        let objects = self.objects.into_iter();
        let objects = objects.map(|object| Message::Put(object, now));
        let end = kinds.map(|kind| Message::End(kind, true));
        let last = [Message::End(Kind::Node, true), Message::Back];
        for message in begin.chain(objects).chain(end).chain(last) {
            store.take(message);
        }
        let unknown = self.whereabouts.problem(self.node);
        store.note_node(unknown.filter(|_| self.facts.is_none()));
        // Services may get endpoints for which there was no room in the view before.
        let view = std::iter::from_fn(|| store.view()).last();
        let view = view.expect("every kind is listed");
        // The files may lack nodes, Pods and Namespaces of the cluster.
        let view = View {
            node: self.facts,
            pods: PodAddresses::default(),
            namespaces: None,
            ..view
        };
        Ok(Loaded {
            snapshot: Snapshot {
                services: view.services.clone(),
                entries: view.entries.clone(),
                routes: view.routes.clone(),
                grants: view.grants.clone(),
                workloads: view.workloads.clone(),
                whole: view.whole,
                unread: view.unread.clone(),
                node: Arc::clone(node),
                problems: Arc::clone(&view.problems),
                ..Snapshot::default()
            },
            view,
            ignored: self.ignored,
            files: self.files.len(),
        })
    }
}

/// Returns an object's name for people, if it has a name.
fn label(kind: Kind, name: &ServiceName) -> Option<String> {
    (!name.name().is_empty()).then(|| kind.label(name))
}

fn index(number: usize) -> u32 {
    u32::try_from(number).expect("a file of limited size has fewer objects")
}
