//! Tests of joins, and of what they cost.

use std::time::Duration;

use model::Node;
use serde_json::{Value, json};
use threads::computed;

use super::*;
use crate::objects::{self, Findings};

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// Returns a ServiceEntry that selects WorkloadEntries with all of these labels.
fn entry(number: usize, labels: &Value) -> ServiceEntry {
    let object = json!({
        "metadata": { "name": format!("e{number}"), "namespace": "tenant" },
        "spec": {
            "hosts": [format!("e{number}.example.com")], "resolution": "STATIC",
            "ports": [{ "number": 80, "name": "p", "protocol": "TCP" }],
            "workloadSelector": { "labels": labels },
        },
    });
    let mut findings = Findings::default();
    let entry = objects::service_entry(read(object), &Node::default(), &mut findings);
    assert!(findings.faults.is_empty(), "{findings:?}");
    entry
}

fn workload(number: usize, labels: &Value) -> Candidate {
    let address = std::net::Ipv4Addr::from_bits(0x0a01_0000 + u32::try_from(number).unwrap());
    let object = json!({
        "metadata": { "name": format!("w{number}"), "namespace": "tenant" },
        "spec": { "address": address, "labels": labels },
    });
    let mut findings = Findings::default();
    let workload = objects::workload_entry(&read(object), &Node::default(), &mut findings);
    assert!(findings.faults.is_empty(), "{findings:?}");
    workload
}

fn endpoints(entries: &mut Entries, number: usize) -> usize {
    let name = EntryName::new("tenant", &format!("e{number}"));
    entries.view()[&name].backends.len()
}

#[test]
fn an_entry_has_the_endpoints_with_all_of_its_labels() {
    let mut entries = Entries::default();
    entries.put(entry(1, &json!({ "app": "a", "tier": "1" })));
    entries.put(entry(2, &json!({ "app": "a" })));
    entries.put_candidate(workload(
        1,
        &json!({ "app": "a", "tier": "1", "more": "x" }),
    ));
    entries.put_candidate(workload(2, &json!({ "app": "a", "tier": "2" })));
    entries.put_candidate(workload(3, &json!({ "tier": "1" })));
    assert_eq!([1, 2].map(|n| endpoints(&mut entries, n)), [1, 2]);
    entries.put_candidate(workload(2, &json!({ "app": "a", "tier": "1" })));
    assert_eq!([1, 2].map(|n| endpoints(&mut entries, n)), [2, 2]);
    // The label at which an entry is found may be another one after a change.
    entries.put(entry(1, &json!({ "tier": "1" })));
    assert_eq!([1, 2].map(|n| endpoints(&mut entries, n)), [3, 2]);
    entries.remove_candidate(&(false, ServiceName::new("tenant", "w3")));
    assert_eq!([1, 2].map(|n| endpoints(&mut entries, n)), [2, 2]);
    entries.remove(&EntryName::new("tenant", "e1"));
    entries.put_candidate(workload(4, &json!({ "app": "a", "tier": "1" })));
    assert_eq!(endpoints(&mut entries, 2), 3);
}

#[test]
fn a_service_that_takes_its_part_again_makes_no_room() {
    let mut entries = Entries::default();
    for number in 0..101 {
        entries.put_candidate(workload(number, &json!({ "app": "a" })));
    }
    let [one, two] = ["one", "two"].map(|name| ServiceName::new("tenant", name));
    let put = |entries: &mut Entries, name: &ServiceName, first: &str| {
        let names = (1..=600).map(|port| match port {
            1 => json!({ "name": first, "port": port }),
            _ => json!({ "name": port.to_string(), "port": port }),
        });
        let spec = json!({ "selector": { "app": "a" }, "ports": names.collect::<Vec<_>>() });
        let metadata = json!({ "name": name.name(), "namespace": "tenant" });
        let service = read(json!({ "metadata": metadata, "spec": spec }));
        let by_istio = objects::by_istio(&service, &mut Findings::default());
        entries.put_service(name, by_istio.selection);
    };
    for name in [&one, &two] {
        put(&mut entries, name, "first");
    }
    for _ in 0..2 {
        assert_eq!(entries.slices(&one).len(), 101);
        assert!(entries.take_dirty_services().is_empty());
        assert!(entries.slices(&two).is_empty());
        // Nor does one that changes.
        put(&mut entries, &one, "renamed");
    }
    entries.remove_service(&one);
    assert_eq!(entries.take_dirty_services(), [two.clone()].into());
    assert_eq!(entries.slices(&two).len(), 101);
    assert_eq!(entries.problems().count(), 0);
}

#[test]
fn objects_with_one_label_in_common_do_not_all_meet() {
    let time = |number: usize| -> Duration {
        let labels = |n: usize| json!({ "app": "common", "number": n.to_string() });
        let selecting: Vec<_> = (0..number).map(|n| entry(n, &labels(n))).collect();
        let workloads: Vec<_> = (0..number).map(|n| workload(n, &labels(n))).collect();
        let start = computed();
        let mut entries = Entries::default();
        for entry in selecting {
            entries.put(entry);
        }
        for workload in workloads {
            entries.put_candidate(workload);
        }
        assert!(
            entries
                .view()
                .values()
                .all(|entry| entry.backends.len() == 1)
        );
        computed().saturating_sub(start)
    };
    let shortest = |number| (0..3).map(|_| time(number)).min().unwrap_or_default();
    let (few, many) = (shortest(250), shortest(2000));
    assert!(many < few * 24, "{few:?} for 250, {many:?} for 2000");
}
