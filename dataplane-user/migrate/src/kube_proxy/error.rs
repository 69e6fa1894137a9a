//! The reasons why rules contain no services.

use std::fmt;

use super::{Text, facts::family};

/// The reason why a text contains no services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A line does not have this format.
    Line {
        /// The text's origin.
        origin: String,
        /// The line's number, from 1.
        line: usize,
        /// The fault.
        what: String,
    },
    /// The text has no rules of kube-proxy.
    NoRules(String),
    /// iptables wrote the rules, but `nft` printed them.
    OfIptables(String),
    /// The text has rules of kube-proxy, but no rule concerns a service.
    NoServices(String),
    /// Table `nat` jumps to kube-proxy's services, but table `filter` is missing or has no chain of kube-proxy.
    Half {
        /// The text's origin.
        origin: String,
        /// The family.
        family: &'static str,
    },
    /// Two texts have rules of kube-proxy for the same family.
    Twice {
        /// The first text's origin.
        first: String,
        /// The second text's origin.
        second: String,
        /// The family.
        family: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line { origin, line, what } => write!(f, "{origin}:{line}: {what}"),
            Self::NoRules(origin) => write!(
                f,
                "{}no rules of kube-proxy: neither a rule that leads to its chain KUBE-SERVICES in a table nat of iptables nor a \
                 table kube-proxy of nf_tables",
                place(origin)
            ),
            Self::OfIptables(origin) => write!(
                f,
                "{}kube-proxy's rules of mode iptables, of which nft does not show all: save them with iptables-save and \
                 ip6tables-save",
                place(origin)
            ),
            Self::NoServices(origin) => write!(
                f,
                "{}no rule of kube-proxy is about a service: kube-proxy has not written its rules yet, or they were removed in part",
                place(origin)
            ),
            Self::Half { origin, family } => write!(
                f,
                "{origin}: table nat of {family} leads to kube-proxy's services, and no table filter with kube-proxy's chains \
                 is there, so services without endpoints are missing; save all tables"
            ),
            Self::Twice {
                first,
                second,
                family,
            } if first == second => write!(
                f,
                "{first}: kube-proxy's rules for {family} are there twice; save them anew, and name each family once"
            ),
            Self::Twice {
                first,
                second,
                family,
            } => write!(
                f,
                "kube-proxy has rules for {family} in {first} and in {second}; one of them is out of date: restart kube-proxy, which removes those of its other mode"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Returns the prefix of a message: the text's origin. It may be empty if no program printed rules of the kernel.
fn place(origin: &str) -> String {
    match origin {
        "" => String::new(),
        origin => format!("{origin}: "),
    }
}

impl Error {
    /// Returns the error for a line of a text. The error names the first line if `at` is 0.
    pub(super) fn at(text: &Text, at: usize, what: String) -> Self {
        Self::Line {
            origin: text.origin.clone(),
            line: at.max(1),
            what,
        }
    }

    /// Returns the error for a chain that no rule jumps to.
    pub(super) fn unhooked(text: &Text, at: usize, v4: bool, chain: &str) -> Self {
        let family = family(v4);
        let what = format!(
            "no rule leads packets of {family} to kube-proxy's chain {chain}: its rules were removed in part"
        );
        Self::at(text, at, what)
    }
}
