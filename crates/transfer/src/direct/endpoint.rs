//! What both ends tell each other through ssh about direct streams.

use super::StreamCount;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// What the user's end asks the other end for.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectRequest {
    /// The secret by which both ends recognize each other.
    pub(super) secret: [u8; 32],
    /// Whether streams are added while they help.
    pub(super) is_auto: bool,
    /// The most streams.
    pub(super) streams_max: u16,
    /// Whether content is not encrypted.
    pub(super) is_plain: bool,
    /// The first and the last port for the other end to listen at.
    pub(super) ports: (u16, u16),
    /// Where the user's end listens; `None` if the other end shall listen.
    pub(super) listening: Option<Listening>,
}

impl DirectRequest {
    /// Whether the other end shall open connections.
    pub fn makes_other_connect(&self) -> bool {
        self.listening.is_some()
    }

    /// How many streams carry content at a time.
    pub(super) fn count(&self) -> StreamCount {
        if self.is_auto { StreamCount::Auto } else { StreamCount::Exactly(self.streams_max) }
    }
}

/// The secret stays out of messages.
impl fmt::Debug for DirectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectRequest").field("listening", &self.listening).finish_non_exhaustive()
    }
}

/// Where an end listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// The address, if the end knows one that the other end reaches.
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
    /// The public key for TLS (a `SubjectPublicKeyInfo`); `None` without encryption.
    pub(super) key: Option<Vec<u8>>,
}

/// A host of a chain, as the host before connects to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Successor {
    /// The host as the user named it, without the user of ssh.
    pub host: String,
    /// Where the host listens.
    pub listening: Listening,
}

/// What the other end does for direct streams.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DirectAnswer {
    /// It listens, and the user's end connects.
    Listens(Listening),
    /// It connects to the user's end.
    Connects,
    /// It does neither, for this reason.
    Refuses(String),
}

/// The two addresses of the ssh connection, as the host of the ssh server sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SshConnection {
    /// The host that started ssh.
    pub client: IpAddr,
    /// The host of the ssh server.
    pub server: IpAddr,
}

impl SshConnection {
    /// Parses the value of `SSH_CONNECTION`, which the ssh server sets: the address and port of the
    /// client, and the address and port of the server. `None` if the value has another format.
    pub fn parse(variable: &str) -> Option<Self> {
        let mut words = variable.split_ascii_whitespace();
        let mut address = || {
            let address = words.next()?.parse::<IpAddr>().ok()?;
            words.next()?.parse::<u16>().ok()?;
            Some(address.to_canonical())
        };
        Some(Self { client: address()?, server: address()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_of_ssh_is_read() {
        let parse = SshConnection::parse;
        let connection = parse("192.0.2.1 50322 192.0.2.2 22").unwrap();
        assert_eq!(connection.client, IpAddr::from([192, 0, 2, 1]));
        assert_eq!(connection.server, IpAddr::from([192, 0, 2, 2]));
        assert_eq!(
            parse("2001:db8::1 1 2001:db8::2 22").unwrap().server.to_string(),
            "2001:db8::2"
        );
        for wrong in ["", "192.0.2.1", "192.0.2.1 1 192.0.2.2", "a 1 b 2", "fe80::1%eth0 1 ::1 2"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
