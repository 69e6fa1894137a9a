//! The plan room from outside: a simulated kernel executes its plans, and what each key resolves
//! to is compared with a naive reading of Kubernetes' rules.

mod budgets;
mod live;
mod oracle;
mod properties;
mod semantics;
mod sim;
mod splits;
mod tenants;
