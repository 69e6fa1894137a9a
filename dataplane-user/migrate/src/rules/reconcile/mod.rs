//! The rules that a mesh's wrapper writes, against what is there: in pure functions, what is expected ([`expected`]), in which
//! order rules have to be (`commute`), and what has to change ([`plan`]); then, by the programs and the kernel ([`run`]).

mod commute;
pub mod expected;
pub mod plan;
pub mod run;
