//! The opener: a process that opens files, sockets and tables that need CAP_SYS_ADMIN, and does nothing else.
//!
//! Sockets in other network namespaces need CAP_SYS_ADMIN, and so do tables and programs by their ids. The capability
//! is almost equal to root. The agent reads data from outside: objects, requests, files. So it starts the opener, drops
//! the capability before it reads any of this data, and asks the opener. The opener reads the agent's requests, which
//! have a fixed size (`wire.rs`), and answers with descriptors.
//!
//! A socket belongs to the network namespace in which it was created. The agent does all its work in another namespace
//! through sockets from there, and none of its threads is ever in that namespace. [`inside`] sets the namespace in
//! which the calling thread opens sockets. In processes that have no opener, such as `dataplane status`, the thread
//! enters the namespace.

mod client;
mod serve;
mod wire;

pub use self::{
    client::{
        COMMAND, Opened, SOCKETS, Sockets, enter, inside, is_there, map, mark_settings, mount,
        program, separate, socket, table, tcp_sockets, this_namespace, watch,
    },
    serve::serve,
    wire::Table,
};
