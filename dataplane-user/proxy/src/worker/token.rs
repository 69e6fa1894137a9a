//! Tokens: the data that the worker attaches to a file descriptor in epoll, and gets back with each event.

use rustix::event::epoll::EventData;

use crate::{connection::Side, table::Key};

/// The subject of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The worker has commands.
    Wake,
    /// The timer has expired.
    Timer,
    /// Connections wait at the acceptor with this number.
    Acceptor(usize),
    /// A socket of a connection has something to report.
    Socket(Key, Side),
}

/// The highest bit, which no connection's token has.
const OTHER: u64 = 1 << 63;
const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

impl From<Token> for EventData {
    fn from(token: Token) -> Self {
        Self::new_u64(match token {
            Token::Wake => WAKE,
            Token::Timer => TIMER,
            Token::Acceptor(number) => OTHER | number as u64,
            Token::Socket(key, side) => {
                let side = u64::from(side == Side::Endpoint);
                let generation = u64::from(key.generation) << 32;
                generation | u64::from(key.number) << 1 | side
            }
        })
    }
}

impl From<EventData> for Token {
    #[expect(clippy::cast_possible_truncation, reason = "taken apart")]
    fn from(data: EventData) -> Self {
        match data.u64() {
            WAKE => Self::Wake,
            TIMER => Self::Timer,
            token if token & OTHER != 0 => Self::Acceptor((token & !OTHER) as usize),
            token => {
                let key = Key {
                    number: token as u32 >> 1,
                    generation: (token >> 32) as u32,
                };
                let side = if token & 1 == 0 {
                    Side::Client
                } else {
                    Side::Endpoint
                };
                Self::Socket(key, side)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_back_as_it_was_given() {
        let last = Key {
            number: u32::MAX >> 1,
            generation: u32::MAX >> 1,
        };
        let first = Key {
            number: 0,
            generation: 0,
        };
        for token in [
            Token::Wake,
            Token::Timer,
            Token::Acceptor(0),
            Token::Acceptor(1 << 20),
            Token::Socket(first, Side::Client),
            Token::Socket(first, Side::Endpoint),
            Token::Socket(last, Side::Client),
            Token::Socket(last, Side::Endpoint),
        ] {
            assert_eq!(Token::from(EventData::from(token)), token);
        }
    }
}
