//! The pods that the configuration captures, also against their labels.

use std::collections::BTreeSet;

use super::{Mesh, MeshNamespace};

/// The configuration's rules for the capture of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enrols {
    /// Whether the pod is captured, also against its labels; `None` if labels decide.
    pub enforced: Option<bool>,
    /// Whether the pod is captured if no label decides.
    pub without_label: Option<bool>,
}

/// Namespaces whose pods are never captured, also against their labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeverCaptured {
    /// These namespaces.
    pub namespaces: BTreeSet<String>,
    /// All namespaces except these, too; `None`: only [`NeverCaptured::namespaces`].
    pub all_except: Option<BTreeSet<String>>,
}

impl Mesh {
    /// Returns the configuration's rules for the capture of a pod with a network namespace of its own.
    pub fn enrols(&self, namespace: &str, pod: &str) -> Enrols {
        let is_excluded = self.excluded_namespaces().iter().any(|of| of == namespace);
        let its = self.rules_of(namespace);
        let mut named = self.workloads.iter();
        let named = named.find(|of| of.name.split_once('/') == Some((namespace, pod)));
        // A workload that the configuration names is captured.
        let named = named.map(|of| of.rules.captured.unwrap_or(true));
        let enforced = named.or_else(|| self.enforced_in(namespace));
        Enrols {
            enforced: if is_excluded { Some(false) } else { enforced },
            without_label: its.and_then(|of| of.rules.captured).or(self.rules.captured),
        }
    }

    /// Returns the namespaces whose pods the configuration never captures: those of [`Mesh::excluded_namespaces`], and those in which
    /// `enforced` says so, if no entry of `workloads` names a pod there.
    pub fn never_captured(&self) -> NeverCaptured {
        let workloads = self.workloads.iter();
        let workloads = workloads.filter_map(|of| of.name.split_once('/'));
        let workloads: BTreeSet<&str> = workloads.map(|(namespace, _)| namespace).collect();
        let named = self.namespaces.iter().map(|of| &*of.name);
        let (mut never, others): (BTreeSet<String>, BTreeSet<String>) = named
            .chain(workloads.iter().copied())
            .map(str::to_owned)
            .partition(|namespace| {
                !workloads.contains(&**namespace) && self.enforced_in(namespace) == Some(false)
            });
        never.extend(self.excluded_namespaces());
        NeverCaptured {
            namespaces: never,
            all_except: (self.enforced.captured == Some(false)).then_some(others),
        }
    }

    /// Whether the pods of a namespace are captured, also against their labels.
    fn enforced_in(&self, namespace: &str) -> Option<bool> {
        let its = self.rules_of(namespace);
        its.and_then(|of| of.enforced.captured)
            .or(self.enforced.captured)
    }

    /// Of two entries with one name, the first counts.
    fn rules_of(&self, namespace: &str) -> Option<&MeshNamespace> {
        self.namespaces.iter().find(|of| of.name == namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(text: &str) -> Mesh {
        serde_saphyr::from_str(text).unwrap()
    }

    /// Each line has a configuration, the namespaces whose pods are never captured, and the exceptions if all others are such, too.
    #[test]
    fn only_what_labels_cannot_change_is_never_captured() {
        for (text, never, except) in [
            ("{}", &["kube-system"][..], None),
            ("excludeNamespaces: [a, b]", &["a", "b"], None),
            (
                "{excludeNamespaces: [], rules: {captured: false}}",
                &[],
                None,
            ),
            (
                "{excludeNamespaces: [], namespaces: [{name: a, rules: {captured: false}}]}",
                &[],
                None,
            ),
            (
                "{excludeNamespaces: [], namespaces: [{name: a, enforced: {captured: false}}, {name: b, enforced: {captured: true}}]}",
                &["a"],
                None,
            ),
            // The first entry of a name counts.
            (
                "{excludeNamespaces: [], namespaces: [{name: a}, {name: a, enforced: {captured: false}}]}",
                &[],
                None,
            ),
            // The configuration captures a pod there.
            (
                "{namespaces: [{name: a, enforced: {captured: false}}], workloads: [{name: a/web}]}",
                &["kube-system"],
                None,
            ),
            (
                "{enforced: {captured: false}, namespaces: [{name: a, enforced: {captured: true}}, {name: b}], workloads: [{name: c/web}]}",
                &["b", "kube-system"],
                Some(&["a", "c"][..]),
            ),
            ("enforced: {captured: true}", &["kube-system"], None),
        ] {
            let found = mesh(text).never_captured();
            assert!(found.namespaces.iter().eq(never), "{text}: {found:?}");
            let set = |all: &[&str]| all.iter().map(|&of| of.to_owned()).collect();
            assert_eq!(found.all_except, except.map(set), "{text}");
        }
    }

    #[test]
    fn the_most_specific_rule_enrols_a_pod() {
        let mesh = mesh(
            "{rules: {captured: true}, enforced: {captured: true}, namespaces: [{name: a, rules: {captured: false}, \
             enforced: {captured: false}}], workloads: [{name: a/web}, {name: a/db, rules: {captured: false}}, {name: kube-system/dns}]}",
        );
        for (pod, enforced, without_label) in [
            ("a/web", true, false),
            ("a/db", false, false),
            ("a/other", false, false),
            ("b/web", true, true),
            ("kube-system/dns", false, true),
        ] {
            let (namespace, name) = pod.split_once('/').unwrap();
            let wanted = Enrols {
                enforced: Some(enforced),
                without_label: Some(without_label),
            };
            assert_eq!(mesh.enrols(namespace, name), wanted, "{pod}");
        }
        assert_eq!(Mesh::default().enrols("a", "web"), Enrols::default());
    }
}
