//! Routing rules that ask for a packet's mark, whoever made them.

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    rule::{RuleAttribute, RuleMessage},
};

use super::{
    error::{Doing, Error},
    rtnetlink::Netlink,
};

/// A routing rule that asks for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkRule {
    /// Whether it is for IPv4.
    pub v4: bool,
    /// Its place among the rules: the smallest is asked first.
    pub priority: u32,
    /// The mark.
    pub mark: u32,
    /// The bits of the mark that are compared.
    pub bits: u32,
    /// The table that it leads to.
    pub table: u32,
}

/// The rules of the network namespace that this thread is in, in their order.
///
/// # Errors
/// If the kernel does not tell.
pub fn mark_rules() -> Result<Vec<MarkRule>, Error> {
    let read = || {
        let mut netlink = Netlink::open()?;
        let mut all = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut question = RuleMessage::default();
            question.header.family = family;
            for answer in netlink.list(&RouteNetlinkMessage::GetRule(question))? {
                if let RouteNetlinkMessage::NewRule(rule) = answer
                    && rule.header.family == family
                {
                    all.extend(mark_rule(&rule));
                }
            }
        }
        Ok(all)
    };
    let read: std::io::Result<_> = read();
    read.doing(|| "cannot list the routing rules".to_owned())
}

fn mark_rule(rule: &RuleMessage) -> Option<MarkRule> {
    let mut found = MarkRule {
        v4: rule.header.family == AddressFamily::Inet,
        priority: 0,
        mark: 0,
        bits: 0,
        table: rule.header.table.into(),
    };
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => found.priority = *priority,
            RuleAttribute::FwMark(mark) => found.mark = *mark,
            RuleAttribute::FwMask(bits) => found.bits = *bits,
            RuleAttribute::Table(table) => found.table = *table,
            _ => {}
        }
    }
    (found.bits != 0).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_without_a_mark_are_none() {
        let mut rule = RuleMessage::default();
        rule.header.family = AddressFamily::Inet6;
        rule.header.table = 252;
        rule.attributes = vec![RuleAttribute::Priority(7)];
        assert_eq!(mark_rule(&rule), None);
        rule.attributes.extend([
            RuleAttribute::FwMark(0x111),
            RuleAttribute::FwMask(0xfff),
            RuleAttribute::Table(15_000),
        ]);
        let wanted = MarkRule {
            v4: false,
            priority: 7,
            mark: 0x111,
            bits: 0xfff,
            table: 15_000,
        };
        assert_eq!(mark_rule(&rule), Some(wanted));
    }
}
