//! The filters of flows on the command line.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use clap::{Args, ValueEnum};
use dataplane_common::Protocol;
use ipnet::IpNet;
use kernel::conntrack::{Flow, State};

/// Which flows: those that pass every filter that is given.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Filters")]
pub struct Filter {
    /// Flows of this service (needs a running agent, which knows the names)
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub service: Option<String>,

    /// Flows of this client: ADDRESS, ADDRESS/LENGTH or ADDRESS:PORT
    #[arg(long, value_name = "CLIENT")]
    client: Option<Place>,

    /// Flows to this address of a service: ADDRESS, ADDRESS/LENGTH or ADDRESS:PORT
    #[arg(long, value_name = "VIP")]
    vip: Option<Place>,

    /// Flows to this endpoint: ADDRESS, ADDRESS/LENGTH or ADDRESS:PORT
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Place>,

    /// Flows of this protocol
    #[arg(long, value_enum, value_name = "PROTOCOL")]
    protocol: Option<Transport>,

    /// Flows in this state; can be given several times
    #[arg(long, value_name = "STATE", value_parser = state)]
    state: Vec<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Tcp,
    Udp,
}

fn state(word: &str) -> Result<State, String> {
    State::from_word(word).ok_or_else(|| {
        let words = State::ALL.map(State::word).join(", ");
        format!("there is no state `{word}`; there are: {words}")
    })
}

/// An address, with or without a port, of one end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Socket(SocketAddr),
    Network(IpNet),
}

impl Place {
    fn has(self, socket: SocketAddr) -> bool {
        match self {
            Self::Socket(wanted) => wanted == socket,
            Self::Network(network) => network.contains(&socket.ip()),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(socket) = text.parse() {
            return Ok(Self::Socket(socket));
        }
        if let Ok(addr) = text.parse::<IpAddr>() {
            return Ok(Self::Network(addr.into()));
        }
        text.parse().map(Self::Network).map_err(|_| {
            format!(
                "`{text}` is not an address; expected ADDRESS, ADDRESS/LENGTH or ADDRESS:PORT (names are not resolved)"
            )
        })
    }
}

impl Filter {
    /// Whether no filter is given.
    pub fn is_empty(&self) -> bool {
        self.service.is_none()
            && self.client.is_none()
            && self.vip.is_none()
            && self.endpoint.is_none()
            && self.protocol.is_none()
            && self.state.is_empty()
    }

    /// Whether a flow passes. `service`: the service of its VIP.
    pub fn passes(&self, flow: &Flow, service: impl FnOnce() -> Option<String>) -> bool {
        let protocol = self.protocol.map(|transport| match transport {
            Transport::Tcp => Protocol::TCP,
            Transport::Udp => Protocol::UDP,
        });
        protocol.is_none_or(|protocol| flow.protocol() == protocol)
            && self.client.is_none_or(|place| place.has(flow.client()))
            && self.vip.is_none_or(|place| place.has(flow.vip()))
            && self.endpoint.is_none_or(|place| place.has(flow.endpoint()))
            && (self.state.is_empty() || self.state.contains(&flow.state()))
            // Checked last, because it may ask the agent.
            && (self.service.is_none() || self.service == service())
    }
}

#[cfg(test)]
mod tests {
    use dataplane_common::{
        Addr, Port,
        packet::{FlowKey, Translation},
        seen,
    };
    use kernel::conntrack::now;

    use super::*;

    fn flow() -> Flow {
        let (client, vip) = (
            Addr::from_v4([192, 0, 2, 7]),
            Addr::from_v4([10, 96, 0, 10]),
        );
        Flow {
            key: FlowKey::new(client, Port::new(4000), vip, Port::new(53), Protocol::UDP),
            to: Translation {
                endpoint: Addr::from_v4([10, 244, 1, 5]),
                endpoint_port: Port::new(5353),
                node_port: Port::ANY,
                used: now(),
                seen: seen::PACKET | seen::in_replies(seen::PACKET),
                node_addr: 0,
            },
        }
    }

    #[test]
    fn filters() {
        let place = |text: &str| Some(text.parse().unwrap());
        let passes = |filter: Filter| filter.passes(&flow(), || Some("kube-system/dns".to_owned()));
        let none = Filter::default;
        assert!(passes(none()) && none().is_empty());
        for (client, yes) in [
            ("192.0.2.7", true),
            ("192.0.2.0/24", true),
            ("192.0.2.7:4000", true),
            ("192.0.2.7:4001", false),
            ("192.0.2.8", false),
            ("::/0", false),
        ] {
            let client = place(client);
            assert_eq!(passes(Filter { client, ..none() }), yes, "{client:?}");
        }
        for (service, yes) in [("kube-system/dns", true), ("default/web", false)] {
            let service = Some(service.to_owned());
            assert_eq!(passes(Filter { service, ..none() }), yes);
        }
        for (state, yes) in [(State::Answered, true), (State::Established, false)] {
            let state = vec![state];
            assert_eq!(passes(Filter { state, ..none() }), yes);
        }
        assert!(passes(Filter {
            vip: place("10.96.0.10:53"),
            endpoint: place("10.244.1.5"),
            protocol: Some(Transport::Udp),
            ..none()
        }));
        assert!(!passes(Filter {
            protocol: Some(Transport::Tcp),
            ..none()
        }));
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        assert!("web".parse::<Place>().unwrap_err().contains("ADDRESS:PORT"));
        assert!(state("open").unwrap_err().contains("established"));
    }
}
