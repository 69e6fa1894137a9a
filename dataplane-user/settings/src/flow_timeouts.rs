//! How long the packet path keeps flows.

use dataplane_common::states::{State, Timeouts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Timeout;

/// How long the packet path keeps a flow after its last packet, by the flow's state. The times are exact to 4.3 s.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FlowTimeouts {
    /// TCP: the endpoint has not answered [default: 2m]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_syn_sent: Option<Timeout>,
    /// TCP: the client has not acknowledged the answer [default: 1m]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_syn_received: Option<Timeout>,
    /// TCP: established [default: 24h]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_established: Option<Timeout>,
    /// TCP: one side has closed, and no segment has followed [default: 2m]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_fin_wait: Option<Timeout>,
    /// TCP: one side has closed [default: 1h]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_close_wait: Option<Timeout>,
    /// TCP: both sides have closed, and no segment has followed [default: 30s]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_last_ack: Option<Timeout>,
    /// TCP: both sides have closed [default: 2m]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_time_wait: Option<Timeout>,
    /// TCP: one side has reset the connection [default: 10s]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_close: Option<Timeout>,
    /// UDP: not answered, or answered within two seconds and quiet since [default: 30s]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp: Option<Timeout>,
    /// UDP: answered, and in use for more than two seconds [default: 2m]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp_stream: Option<Timeout>,
}

impl FlowTimeouts {
    /// Returns each key with its value and the states that the key sets.
    fn each(&self) -> [(&'static str, Option<Timeout>, &'static [State]); 10] {
        [
            ("tcpSynSent", self.tcp_syn_sent, &[State::SynSent]),
            (
                "tcpSynReceived",
                self.tcp_syn_received,
                &[State::SynReceived],
            ),
            (
                "tcpEstablished",
                self.tcp_established,
                &[State::Established],
            ),
            ("tcpFinWait", self.tcp_fin_wait, &[State::FinWait]),
            ("tcpCloseWait", self.tcp_close_wait, &[State::CloseWait]),
            ("tcpLastAck", self.tcp_last_ack, &[State::LastAck]),
            ("tcpTimeWait", self.tcp_time_wait, &[State::TimeWait]),
            ("tcpClose", self.tcp_close, &[State::Close]),
            ("udp", self.udp, &[State::Unanswered, State::Answered]),
            ("udpStream", self.udp_stream, &[State::Stream]),
        ]
    }

    /// Returns the timeouts for the programs: the defaults where nothing is configured.
    pub fn timeouts(&self) -> Timeouts {
        let mut timeouts = Timeouts::DEFAULT;
        for (_, timeout, states) in self.each() {
            for state in states {
                if let Some(timeout) = timeout {
                    timeouts.set(*state, timeout.seconds());
                }
            }
        }
        timeouts
    }

    /// Returns keys with their faults.
    pub fn faults(&self) -> impl Iterator<Item = (String, String)> {
        self.each().into_iter().filter_map(|(key, timeout, _)| {
            let timeout = timeout.filter(|timeout| timeout.seconds() > Timeouts::LONGEST)?;
            Some((
                format!("packets.timeouts.{key}"),
                format!("{timeout}; expected at most 72h"),
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_configured_is_the_default() {
        let timeouts = |text: &str| serde_json::from_str::<FlowTimeouts>(text).unwrap();
        assert_eq!(timeouts("{}").timeouts(), Timeouts::DEFAULT);
        let mut some = Timeouts::DEFAULT;
        some.set(State::CloseWait, 60);
        some.set(State::Unanswered, 5);
        some.set(State::Answered, 5);
        let given = timeouts(r#"{"tcpCloseWait": "1m", "udp": "5s"}"#);
        assert_eq!(given.timeouts(), some);
        let long = timeouts(r#"{"tcpEstablished": "72h", "tcpClose": "120h"}"#);
        let faults: Vec<_> = long.faults().collect();
        assert_eq!(faults.len(), 1, "{faults:?}");
        assert_eq!(faults[0].0, "packets.timeouts.tcpClose");
    }
}
