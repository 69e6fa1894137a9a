//! Sockets that pass for the proxy's while they connect, and for anybody's after that.

use std::{io, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use socket2::Type;

use crate::client::Target;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    target: Target,
    /// The mark (`SO_MARK`) while the socket connects
    #[arg(long)]
    mark: u32,
    /// How many connections
    #[arg(long, default_value_t = 1)]
    count: usize,
}

/// Prints how many of them were made, and keeps them until stdin is closed.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut made = Vec::new();
    for to in arguments.target.addresses().take(arguments.count) {
        let socket = arguments.target.socket(to, Type::STREAM)?;
        socket.set_mark(arguments.mark).context("set the mark")?;
        if socket.connect(&to.into()).is_ok() {
            socket.set_mark(0).context("take the mark off")?;
            socket.set_linger(Some(Duration::ZERO))?;
            made.push(socket);
        }
    }
    println!("{}", made.len());
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}
