//! Compares the rules that a mesh's wrapper writes with the rules in the kernel, and corrects the kernel's rules. Pure
//! functions determine the expected rules ([`expected`]), the required order (`commute`) and the changes ([`plan`]).
//! The programs and the kernel then make the changes ([`run`]).

mod commute;
pub mod expected;
pub mod plan;
pub mod run;
