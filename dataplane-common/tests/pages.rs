//! The page of reasons is compared with the code.

use dataplane_common::Reason;

#[test]
fn every_reason_is_in_its_page() {
    let page = include_str!("../../docs/cli/monitor.md");
    for reason in Reason::ALL {
        let word = format!("`{}`", reason.word());
        let row = page
            .lines()
            .find(|row| row.starts_with("| `") && row.contains(&word));
        assert!(row.is_some(), "docs/cli/monitor.md lacks a row for {word}");
    }
}
