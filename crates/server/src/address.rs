//! Listen addresses: TCP, Unix socket, or the sockets that systemd passes on.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// A listen address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket: a path, or `@name` ([`crate::unix_address`]).
    Unix(PathBuf),
    /// The sockets that systemd passes on (socket activation).
    Systemd,
}

impl Address {
    /// Whether other machines may reach it.
    pub fn is_public(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }
}

impl Default for Address {
    /// Port 8080 on every IPv6 and IPv4 address.
    fn default() -> Self {
        Self::Tcp(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 8080))
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if ["", "@"].contains(&path) {
                Err(format!(
                    "unix:{path} lacks the socket's name: write unix:/run/haul.sock, or unix:@haul \
                     for an abstract socket"
                ))
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        if text == "systemd" {
            return Ok(Self::Systemd);
        }
        let any_address =
            |port| Self::Tcp(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port));
        if let Ok(port) = text.strip_prefix(':').unwrap_or(text).parse() {
            return Ok(any_address(port));
        }
        if let Some(Ok(port)) = text.strip_prefix("*:").map(str::parse) {
            return Ok(any_address(port));
        }
        let text = text
            .strip_prefix("localhost:")
            .map_or(text.to_owned(), |port| format!("127.0.0.1:{port}"));
        text.parse().map(Self::Tcp).map_err(|_| {
            format!(
                "{text:?} is no place to listen at: write 8080, 127.0.0.1:8080, [::1]:8080, \
                 unix:/run/haul.sock or systemd"
            )
        })
    }
}

impl Address {
    /// Whether no two sockets can listen at both. A port that the kernel chooses is free.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Tcp(one), Self::Tcp(other)) => {
                // The unspecified address of IPv6 includes all addresses of IPv4.
                let is_every = |ip: IpAddr| ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
                let (one_ip, other_ip) = (one.ip(), other.ip());
                let scope = |address: &SocketAddr| match address {
                    SocketAddr::V6(address) => address.scope_id(),
                    SocketAddr::V4(_) => 0,
                };
                let is_same_host = one_ip == other_ip && scope(one) == scope(other)
                    || is_every(one_ip)
                    || is_every(other_ip)
                    || one_ip.is_ipv4() == other_ip.is_ipv4()
                        && (one_ip.is_unspecified() || other_ip.is_unspecified());
                one.port() != 0 && one.port() == other.port() && is_same_host
            }
            (Self::Unix(one), Self::Unix(other)) => one == other,
            // One address takes all sockets that systemd passes.
            (Self::Systemd, Self::Systemd) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Systemd => formatter.write_str("systemd"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_overlap_if_one_socket_would_get_the_connections_of_the_other() {
        let overlaps = |one: &str, other: &str| {
            let (one, other): (Address, Address) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(one.overlaps(&other), other.overlaps(&one));
            one.overlaps(&other)
        };
        for (one, other) in [
            ("8080", "8080"),
            ("8080", "127.0.0.1:8080"),
            ("8080", "[::1]:8080"),
            ("0.0.0.0:8080", "127.0.0.1:8080"),
            ("127.0.0.1:8080", "localhost:8080"),
            ("unix:/a", "unix:/a"),
            ("systemd", "systemd"),
        ] {
            assert!(overlaps(one, other), "{one} {other}");
        }
        for (one, other) in [
            ("8080", "8081"),
            ("0", "0"),
            ("0.0.0.0:8080", "[::1]:8080"),
            ("127.0.0.1:8080", "127.0.0.2:8080"),
            ("[fe80::1%2]:8080", "[fe80::1%3]:8080"),
            ("unix:/a", "unix:/b"),
        ] {
            assert!(!overlaps(one, other), "{one} {other}");
        }
    }

    #[test]
    fn every_common_notation_parses() {
        for (text, shown) in [
            ("8080", "[::]:8080"),
            (":80", "[::]:80"),
            ("*:80", "[::]:80"),
            ("localhost:80", "127.0.0.1:80"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("[::1]:443", "[::1]:443"),
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("unix:@a", "unix:@a"),
            ("systemd", "systemd"),
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), shown);
        }
        for text in ["", "host:80", "127.0.0.1", "70000", "unix:", "unix:@"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
