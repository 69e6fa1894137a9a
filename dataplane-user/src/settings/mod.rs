//! What an operator can ask of the agent: the values that the configuration file and the flags of
//! `dataplane run` have in common.

mod nf_conntrack;

pub use nf_conntrack::{NfConntrack, Timeout};
