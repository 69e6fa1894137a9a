//! Objects from files, on their way to a snapshot.

use std::{
    collections::{BTreeMap, HashMap, btree_map},
    fmt::Write,
    path::PathBuf,
    sync::Arc,
};

use smallvec::SmallVec;

use super::{
    Errors, FAULTS_LISTED, Fault, Loaded,
    document::{Body, Entry},
    files,
    locate::{Position, locate},
    parse::{self, Format},
};
use crate::{
    model::{Node, Problem, Service, ServiceName, Snapshot},
    source::objects::{self, Outcome, Slice},
};

/// Where an object was read.
#[derive(Clone, Copy, Debug)]
struct Origin {
    /// Index of the file.
    file: u32,
    /// Index of the document in the file.
    document: u32,
    /// Index in the document's list.
    item: Option<u32>,
}

/// A fault whose line is not known yet.
struct Unplaced {
    origin: Origin,
    /// Within the document.
    path: String,
    object: Option<String>,
    text: String,
    /// The position within the document, where the parser gave it.
    position: Option<Position>,
    /// Where the other one of two objects is.
    other: Option<Origin>,
}

/// What was read so far.
pub struct Stage<'a> {
    node: &'a str,
    files: Vec<PathBuf>,
    /// Without their endpoints; `None` if left alone. Each has its final place in memory from the
    /// start: a table of a hundred thousand of them by value would be copied as it grows.
    services: BTreeMap<ServiceName, (Option<Arc<Service>>, Origin)>,
    slices: Vec<Slice>,
    slice_origins: HashMap<ServiceName, Origin>,
    ignored: BTreeMap<String, usize>,
    left_alone: usize,
    problems: Vec<Problem>,
    /// Faults of files as a whole.
    whole: Vec<Fault>,
    unplaced: Vec<Unplaced>,
    more: usize,
}

impl<'a> Stage<'a> {
    /// For the node of this name.
    pub fn new(node: &'a str) -> Self {
        Self {
            node,
            files: Vec::new(),
            services: BTreeMap::new(),
            slices: Vec::new(),
            slice_origins: HashMap::new(),
            ignored: BTreeMap::new(),
            left_alone: 0,
            problems: Vec::new(),
            whole: Vec::new(),
            unplaced: Vec::new(),
            more: 0,
        }
    }

    /// Notes a file or directory that cannot be read.
    pub fn unreadable(&mut self, file: PathBuf, text: String) {
        let fault = Fault {
            file,
            position: None,
            path: String::new(),
            object: None,
            text,
        };
        self.whole.push(fault);
    }

    /// Reads a file.
    pub fn file(&mut self, path: PathBuf) {
        let text = match files::read(&path) {
            Ok(text) => text,
            Err(wrong) => return self.unreadable(path, wrong),
        };
        let format = Format::of(&path);
        let documents = parse::documents(&text, format);
        if documents.is_empty() {
            return self.unreadable(path, "empty; expected at least one object".into());
        }
        let file = index(self.files.len());
        self.files.push(path);
        let mut entries = Vec::new();
        for (number, document) in documents.into_iter().enumerate() {
            let document_origin = Origin {
                file,
                document: index(number),
                item: None,
            };
            let result = parse::parse(document, format, self.node, &mut entries);
            for entry in entries.drain(..) {
                self.entry(entry, document_origin);
            }
            if let Err(stop) = result {
                self.fault(Unplaced {
                    origin: document_origin,
                    path: stop.path,
                    object: None,
                    text: stop.text,
                    position: stop.position,
                    other: None,
                });
            }
        }
    }

    fn entry(&mut self, entry: Entry, document: Origin) {
        let origin = Origin {
            item: entry.item.map(index),
            ..document
        };
        let object = entry.label();
        for (path, text) in entry.findings.faults {
            self.object_fault(origin, &path, object.clone(), text, None);
        }
        for (path, text) in entry.findings.notes {
            let file = self.files[origin.file as usize].display();
            let place = object
                .as_ref()
                .map_or_else(|| file.to_string(), |o| format!("{file}: {o}"));
            self.problems.push(Problem {
                place,
                text: format!("{path}: {text}"),
            });
        }
        let twice = |other| Some((other, "defined twice, first in"));
        match entry.body {
            Body::Service(outcome) => {
                let service = match outcome {
                    Outcome::Served(service) => Some(Arc::new(service)),
                    Outcome::LeftAlone => {
                        self.left_alone += 1;
                        None
                    }
                };
                match self.services.entry(entry.name) {
                    btree_map::Entry::Vacant(vacant) => _ = vacant.insert((service, origin)),
                    btree_map::Entry::Occupied(occupied) => {
                        let other = twice(occupied.get().1);
                        self.duplicate(origin, object, other);
                    }
                }
            }
            Body::Slice(outcome) => {
                if let Some(other) = self.slice_origins.insert(entry.name, origin) {
                    self.duplicate(origin, object, twice(other));
                }
                match outcome {
                    Outcome::LeftAlone => self.left_alone += 1,
                    Outcome::Served(slice) => self.slices.push(slice),
                }
            }
            Body::Ignored(kind) => *self.ignored.entry(kind).or_default() += 1,
            Body::Unknown => {}
        }
    }

    fn duplicate(&mut self, origin: Origin, object: Option<String>, other: Option<(Origin, &str)>) {
        if let (Some(object), Some((other, text))) = (object, other) {
            self.object_fault(
                origin,
                "metadata.name",
                Some(object),
                text.into(),
                Some(other),
            );
        }
    }

    fn object_fault(
        &mut self,
        origin: Origin,
        path: &str,
        object: Option<String>,
        text: String,
        other: Option<Origin>,
    ) {
        let path = match origin.item {
            Some(item) => format!("items[{item}].{path}"),
            None => path.to_owned(),
        };
        self.fault(Unplaced {
            origin,
            path,
            object,
            text,
            position: None,
            other,
        });
    }

    fn fault(&mut self, fault: Unplaced) {
        if self.unplaced.len() < FAULTS_LISTED {
            self.unplaced.push(fault);
        } else {
            self.more += 1;
        }
    }

    /// Joins services and slices, or tells what is wrong with them.
    pub fn finish(mut self, previous: &Snapshot, node: &Node) -> Result<Loaded, Errors> {
        self.slices
            .sort_unstable_by(|a, b| (&a.service, &a.name).cmp(&(&b.service, &b.name)));
        // An object that could not be read may be the one that is missing.
        if self.unplaced.is_empty() && self.whole.is_empty() {
            self.orphans();
        }
        if !self.unplaced.is_empty() || !self.whole.is_empty() {
            return Err(self.errors());
        }
        let mut services = previous.services.clone();
        let gone: Vec<_> = services
            .keys()
            .filter(|name| !self.is_served(name))
            .cloned()
            .collect();
        for name in gone {
            services.remove(&name);
        }
        let mut slices = self.slices.into_iter().peekable();
        for (name, (service, _)) in self.services {
            let own: SmallVec<[Slice; 2]> =
                std::iter::from_fn(|| slices.next_if(|slice| slice.service == name)).collect();
            let Some(mut service) = service else {
                continue;
            };
            objects::join(Arc::make_mut(&mut service), &own);
            if services.get(&name).is_none_or(|known| *known != service) {
                services.insert(name, service);
            }
        }
        self.problems.sort();
        let unchanged = *previous.problems == *self.problems;
        let snapshot = Snapshot {
            services,
            node: if *previous.node == *node {
                previous.node.clone()
            } else {
                Arc::new(node.clone())
            },
            problems: if unchanged {
                previous.problems.clone()
            } else {
                self.problems.into()
            },
        };
        Ok(Loaded {
            snapshot,
            ignored: self.ignored,
            left_alone: self.left_alone,
            files: self.files.len(),
        })
    }

    fn is_served(&self, name: &ServiceName) -> bool {
        matches!(self.services.get(name), Some((Some(_), _)))
    }

    /// Finds slices without a service.
    fn orphans(&mut self) {
        let orphans: Vec<(ServiceName, ServiceName)> = self
            .slices
            .iter()
            .filter(|slice| !self.services.contains_key(&slice.service))
            .map(|slice| (slice.name.clone(), slice.service.clone()))
            .collect();
        for (slice, service) in orphans {
            if let Some(&origin) = self.slice_origins.get(&slice) {
                self.object_fault(
                    origin,
                    "metadata.labels[\"kubernetes.io/service-name\"]",
                    Some(format!("EndpointSlice {slice}")),
                    format!("there is no Service {service} in these manifests"),
                    None,
                );
            }
        }
    }

    fn errors(self) -> Errors {
        let placed = self.place();
        let mut faults = self.whole;
        for (fault, (position, other)) in self.unplaced.into_iter().zip(placed) {
            let mut text = fault.text;
            if let Some(origin) = fault.other {
                let file = self.files[origin.file as usize].display();
                _ = write!(text, " {file}");
                if let Some(Position { line, column }) = other {
                    _ = write!(text, ":{line}:{column}");
                }
            }
            faults.push(Fault {
                file: self.files[fault.origin.file as usize].clone(),
                position,
                path: fault.path,
                object: fault.object,
                text,
            });
        }
        faults.sort_by(|a, b| (&a.file, a.position).cmp(&(&b.file, b.position)));
        let more = self.more + faults.len().saturating_sub(FAULTS_LISTED);
        faults.truncate(FAULTS_LISTED);
        Errors { faults, more }
    }
}

impl Stage<'_> {
    /// The positions of the faults, and of the other object where two are involved.
    ///
    /// The files are read once more: a run without faults, which is the rule, keeps no text.
    fn place(&self) -> Vec<(Option<Position>, Option<Position>)> {
        // What is asked of each document: a path, and for which fault.
        let mut asked: BTreeMap<(u32, u32), Vec<(usize, String)>> = BTreeMap::new();
        let faults = self.unplaced.len();
        for (number, fault) in self.unplaced.iter().enumerate() {
            let Origin { file, document, .. } = fault.origin;
            asked
                .entry((file, document))
                .or_default()
                .push((number, fault.path.clone()));
            if let Some(Origin {
                file,
                document,
                item,
            }) = fault.other
            {
                let object = item.map_or_else(String::new, |item| format!("items[{item}]."));
                let path = object + "metadata.name";
                asked
                    .entry((file, document))
                    .or_default()
                    .push((faults + number, path));
            }
        }
        let mut positions = vec![None; 2 * faults];
        for ((file, document), questions) in asked {
            let path = &self.files[file as usize];
            let Ok(text) = files::read(path) else {
                continue;
            };
            let documents = parse::documents(&text, Format::of(path));
            let Some(document) = documents.get(document as usize) else {
                continue;
            };
            let before = &text[..document.as_ptr() as usize - text.as_ptr() as usize];
            let paths: Vec<&str> = questions.iter().map(|(_, path)| path.as_str()).collect();
            for ((number, _), found) in questions.iter().zip(locate(document, &paths)) {
                // The parser knows better where it stopped.
                let known = self.unplaced.get(*number).and_then(|fault| fault.position);
                positions[*number] = known.or(found).map(|position| position.after(before));
            }
        }
        let others = positions.split_off(faults);
        positions.into_iter().zip(others).collect()
    }
}

fn index(number: usize) -> u32 {
    u32::try_from(number).expect("a file of limited size has fewer objects")
}
