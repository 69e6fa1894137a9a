//! Combines feeds: for example services from one feed and workloads from another.

use std::sync::Arc;

use super::{Feed, Health, View};

/// A feed, and the kinds of objects that are used from its views.
#[derive(Debug)]
pub struct Part {
    /// The feed.
    pub feed: Box<dyn Feed>,
    /// Whether its services are used.
    pub services: bool,
    /// Whether its workloads are used.
    pub workloads: bool,
}

/// Feeds that yield views together. If two of them have a service or workload of one name, the first part's object is
/// used. The facts about this node come from the first part that has some.
///
/// There is no view until each part has yielded one, so that objects that a part has not read yet do not count as
/// removed.
#[derive(Debug)]
pub struct Combined {
    parts: Vec<(Part, Option<View>)>,
}

impl Combined {
    /// Combines these parts.
    pub fn new(parts: impl IntoIterator<Item = Part>) -> Self {
        Self {
            parts: parts.into_iter().map(|part| (part, None)).collect(),
        }
    }
}

impl Feed for Combined {
    fn take(&mut self) -> Option<View> {
        let mut since = Vec::new();
        for (part, last) in &mut self.parts {
            if let Some(view) = part.feed.take() {
                since.push(view.since);
                *last = Some(view);
            }
        }
        if since.is_empty() {
            return None;
        }
        let views: Option<Vec<_>> = self
            .parts
            .iter()
            .map(|(part, view)| Some((part, view.as_ref()?)))
            .collect();
        let mut whole = View {
            // The age of the view is known only if it is known of each new view.
            since: since.into_iter().min().flatten(),
            ..View::default()
        };
        let mut problems = Vec::new();
        for (part, view) in views? {
            // In a union, the entries of the left map win.
            if part.services {
                whole.services = whole.services.union(view.services.clone());
                whole.whole = view.whole;
                whole.unread.clone_from(&view.unread);
                whole.namespaces.clone_from(&view.namespaces);
                whole.entries = whole.entries.union(view.entries.clone());
                whole.routes = whole.routes.union(view.routes.clone());
                whole.grants = whole.grants.union(view.grants.clone());
            }
            if part.workloads {
                whole.workloads = whole.workloads.union(view.workloads.clone());
            }
            // Pods' addresses are used from every part, because they only take addresses from entries.
            whole.pods.counts = whole.pods.counts.union(view.pods.counts.clone());
            if part.workloads {
                whole.pods.everywhere |= view.pods.everywhere;
            }
            whole.node = whole.node.or_else(|| view.node.clone());
            problems.extend(view.problems.iter().cloned());
        }
        whole.problems = Arc::from(problems);
        Some(whole)
    }

    fn refresh(&mut self) {
        for (part, _) in &mut self.parts {
            part.feed.refresh();
        }
    }

    fn health(&self) -> Health {
        Health::Combined(
            self.parts
                .iter()
                .map(|(part, _)| part.feed.health())
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use model::Node;
    use tempfile::TempDir;

    use super::*;
    use crate::Source;

    /// Returns a feed of a file with a service of this name and cluster IP.
    fn services(directory: &Path, name: &str, cluster_ip: &str) -> Box<dyn Feed> {
        let path = directory.join(format!("{cluster_ip}.yaml"));
        let text = format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: {name}, namespace: shop}}, \
             spec: {{clusterIP: {cluster_ip}, ports: [{{port: 80}}]}}}}"
        );
        fs::write(&path, text).unwrap();
        let node = Arc::new(Node::default());
        Source::Manifests(vec![path]).open(&node, |_| {}).unwrap()
    }

    fn part(feed: Box<dyn Feed>, services: bool) -> Part {
        Part {
            feed,
            services,
            workloads: false,
        }
    }

    /// A feed that has not read anything yet.
    struct Silent(Health);

    impl Feed for Silent {
        fn take(&mut self) -> Option<View> {
            None
        }

        fn health(&self) -> Health {
            self.0.clone()
        }
    }

    #[test]
    fn each_part_gives_its_share_and_the_first_one_counts() {
        let directory = TempDir::new().unwrap();
        let feed = |name, ip| services(directory.path(), name, ip);
        let mut combined = Combined::new([
            part(feed("web", "10.96.0.1"), true),
            part(feed("web", "10.96.0.2"), true),
            part(feed("db", "10.96.0.3"), true),
            part(feed("left-out", "10.96.0.4"), false),
        ]);
        let view = combined.take().unwrap();
        let names: Vec<_> = view.services.keys().map(ToString::to_string).collect();
        assert_eq!(names, ["shop/db", "shop/web"]);
        let web = view.services.values().nth(1).unwrap();
        assert_eq!(web.cluster_ips[0].to_string(), "10.96.0.1");
        assert!(combined.take().is_none(), "nothing has changed since");
        combined.refresh();
        assert_eq!(combined.take().unwrap().services.len(), 2);
        assert_eq!(combined.health().places().len(), 4);
    }

    #[test]
    fn a_part_that_was_not_read_yet_is_not_taken_for_empty() {
        let directory = TempDir::new().unwrap();
        let feed = services(directory.path(), "web", "10.96.0.1");
        let silent = Silent(feed.health());
        let mut combined = Combined::new([part(feed, true), part(Box::new(silent), true)]);
        assert!(combined.take().is_none());
        combined.refresh();
        assert!(combined.take().is_none());
    }
}
