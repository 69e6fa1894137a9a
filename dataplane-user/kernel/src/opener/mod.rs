//! The opener: a process that opens what takes CAP_SYS_ADMIN, and does nothing else.
//!
//! Sockets in other network namespaces take CAP_SYS_ADMIN, and so do tables and programs by their ids. The capability is
//! nearly all that root is. The agent reads what others write: objects, requests, files. So it starts the opener, gives
//! the capability up before it reads anything, and asks the opener. The opener reads the agent's requests, which have a
//! fixed size (`wire.rs`), and answers with descriptors.
//!
//! A socket belongs to the network namespace in which it was made. So whatever the agent does in a namespace, it does
//! through sockets from there, and no thread of it is ever in that namespace. [`within`] says in which namespace the
//! calling thread opens sockets. In processes that have no opener, such as `dataplane status`, the thread enters the
//! namespace.

mod client;
mod serve;
mod wire;

pub use self::{
    client::{
        COMMAND, SOCKETS, is_there, map, mark_settings, mount, program, separate, socket, table,
        tcp_sockets, this_namespace, watch, within,
    },
    serve::serve,
    wire::Table,
};
