//! The simplest relay: tokio's `copy_bidirectional` with its defaults.

use std::net::SocketAddr;

use clap::Args;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    runtime::Builder,
};

/// Relays from one address to another.
#[derive(Debug, Args)]
pub struct Plain {
    /// Address to accept connections at
    #[arg(long)]
    listen: SocketAddr,
    /// Address to connect to
    #[arg(long)]
    to: SocketAddr,
}

impl Plain {
    /// Relays until the process is killed.
    ///
    /// # Errors
    /// Fails if it cannot listen.
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let listener = TcpListener::bind(self.listen).await?;
            println!("ready");
            loop {
                let (mut client, _) = listener.accept().await?;
                let to = self.to;
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(to).await else {
                        return;
                    };
                    // Connections that end by a reset, as all of the benchmark's do, are errors.
                    let _ = client.set_nodelay(true);
                    let _ = server.set_nodelay(true);
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        })
    }
}
