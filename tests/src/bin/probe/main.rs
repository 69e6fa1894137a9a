//! `probe`: the program that runs on the hosts of a lab. It enters a host, serves, and connects, and
//! reports its observations as JSON on stdout (see `dataplane_tests::report`).

mod client;
mod connect;
mod dns;
mod enter;
mod escape;
mod feign;
mod flows;
mod hold;
mod keep;
mod links;
mod load;
mod marked;
mod pods;
mod serve;
mod storm;
mod talk;
mod udp;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    version,
    about = "Enters the hosts of a lab, serves on them, connects from them"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Join a cgroup and a network namespace, then become another program
    Enter(enter::Arguments),
    /// Answer HTTP, TCP and UDP with this endpoint's name and the client's address
    ///
    /// Prints one line when it listens, and serves until it is killed.
    Serve(serve::Arguments),
    /// Connect over TCP, read the endpoint's greeting, report
    Connect(connect::Arguments),
    /// Connect in ways that try to bypass capture, print the other side's bytes
    Escape(escape::Arguments),
    /// Send to oneself from an address that the host does not have, and answer that address
    Feign(feign::Arguments),
    /// Look up a name at a steady rate, report
    ///
    /// Prints a line when it begins.
    Dns(dns::Arguments),
    /// Keep one TCP connection busy until stdin is closed or it fails, report
    ///
    /// Prints a line when it is connected.
    Hold(hold::Arguments),
    /// Send HTTP requests, one connection each, report
    Http(connect::HttpArguments),
    /// Send datagrams, wait for the answer to each, report
    Udp(udp::Arguments),
    /// Carry out the flows that stdin describes (JSON), many at a time, report on each
    Flows(flows::Arguments),
    /// Make connections and keep them; a line on stdin asks each for a sign of life
    Keep(keep::Arguments),
    /// Talk as applications do, with a server that sends the bytes back, and report
    Talk(talk::Arguments),
    /// Connect with a mark that is taken off before the socket is closed
    Marked(marked::Arguments),
    /// Start pods as a container runtime does, with the CNI plug-in, connect from each at once, and report on each
    ///
    /// Prints a line when it is ready.
    Pods(pods::Arguments),
    /// Connect all the time, from several threads, and report what happened
    Load(load::Arguments),
    /// Ask as fast as possible until stdin is closed, without waiting for answers, and report who answered
    Storm(storm::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Enter(arguments) => enter::run(&arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Connect(arguments) => connect::run(&arguments),
        Command::Escape(arguments) => escape::run(&arguments),
        Command::Feign(arguments) => feign::run(&arguments),
        Command::Dns(arguments) => dns::run(&arguments),
        Command::Hold(arguments) => hold::run(&arguments),
        Command::Http(arguments) => connect::run_http(&arguments),
        Command::Udp(arguments) => udp::run(&arguments),
        Command::Flows(arguments) => flows::run(&arguments),
        Command::Keep(arguments) => keep::run(&arguments),
        Command::Talk(arguments) => talk::run(&arguments),
        Command::Marked(arguments) => marked::run(&arguments),
        Command::Pods(arguments) => pods::run(&arguments),
        Command::Load(arguments) => load::run(&arguments),
        Command::Storm(arguments) => storm::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            anstream::eprintln!("probe: {error:#}");
            ExitCode::FAILURE
        }
    }
}
