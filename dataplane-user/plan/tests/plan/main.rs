//! Tests of the plan crate's interface: a simulated kernel executes plans, and a naive implementation of Kubernetes'
//! rules checks the answer of each key.

#![expect(
    clippy::too_many_lines,
    reason = "a table of cases, or the steps of one scenario in their order"
)]

mod budgets;
mod clusters;
mod entries;
mod live;
mod oracle;
mod properties;
mod semantics;
mod sim;
mod splits;
mod tenants;
