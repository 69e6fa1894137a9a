//! Tests of the plan crate's interface: a simulated kernel executes plans, and a naive implementation of Kubernetes'
//! rules checks the answer of each key.

mod budgets;
mod live;
mod oracle;
mod properties;
mod semantics;
mod sim;
mod splits;
mod tenants;
