//! The addresses of upstreams as they are configured.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

/// The largest weight.
pub const WEIGHT_MAX: u32 = 1000;

/// An upstream as it is configured. As text: its address, and behind it, each after a space,
/// `weight=N`, `max-connections=N` and `backup`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpstreamConfig {
    /// The address.
    pub address: UpstreamAddress,
    /// The upstream's share of the connections, in relation to the other weights; 1 to 1000.
    pub weight: u32,
    /// The most connections of the upstream at a time; further clients wait. `None` for no limit.
    pub connections_max: Option<NonZeroUsize>,
    /// Whether the upstream gets connections only while the other upstreams of its group are not
    /// usable.
    pub is_backup: bool,
}

impl From<UpstreamAddress> for UpstreamConfig {
    fn from(address: UpstreamAddress) -> Self {
        Self { address, weight: 1, connections_max: None, is_backup: false }
    }
}

impl FromStr for UpstreamConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut rest, mut weight, mut connections_max) = (text.trim(), None, None);
        let mut is_backup = false;
        let again = |word: &str| format!("{text:?} has {word} more than once");
        // A socket's path may have spaces, so that only the known words are taken from the end.
        while let Some((before, word)) = rest.rsplit_once(' ') {
            if word == "backup" {
                if std::mem::replace(&mut is_backup, true) {
                    return Err(again(word));
                }
            } else if let Some(number) = word.strip_prefix("weight=") {
                let valid = number.parse().ok().filter(|number| (1..=WEIGHT_MAX).contains(number));
                let valid = valid.ok_or_else(|| {
                    format!("{text:?}: the weight {number} is not between 1 and {WEIGHT_MAX}")
                })?;
                if weight.replace(valid).is_some() {
                    return Err(again("weight"));
                }
            } else if let Some(number) = word.strip_prefix("max-connections=") {
                let valid = number.parse().map_err(|_| {
                    format!("{text:?}: max-connections must be a number from 1, not {number}")
                })?;
                if connections_max.replace(valid).is_some() {
                    return Err(again("max-connections"));
                }
            } else {
                break;
            }
            rest = before.trim_end();
        }
        let weight = weight.unwrap_or(1);
        let address = rest.parse().map_err(|error| match rest.rsplit_once(' ') {
            Some((_, word)) => format!(
                "{text:?}: {word:?} is unknown: behind the address, weight=N, max-connections=N \
                 and backup are possible"
            ),
            None => error,
        })?;
        Ok(Self { address, weight, connections_max, is_backup })
    }
}

impl fmt::Display for UpstreamConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(formatter)?;
        if self.weight != 1 {
            write!(formatter, " weight={}", self.weight)?;
        }
        if let Some(number) = self.connections_max {
            write!(formatter, " max-connections={number}")?;
        }
        if self.is_backup { formatter.write_str(" backup") } else { Ok(()) }
    }
}

/// The address of an upstream as it is configured.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UpstreamAddress {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A host name and a port.
    Name {
        /// The host name.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket: a path, or `@name` for an abstract socket.
    Unix(PathBuf),
}

impl UpstreamAddress {
    /// The TCP port; `None` for a Unix socket.
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(address) => Some(address.port()),
            Self::Name { port, .. } => Some(*port),
            Self::Unix(_) => None,
        }
    }
}

impl FromStr for UpstreamAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            format!(
                "{text:?} is no upstream: write 10.0.0.5:80, [2001:db8::5]:80, \
                 db.example.com:5432, unix:/run/app.sock or unix:@app"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            return if ["", "@"].contains(&path) {
                Err(invalid())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        if let Ok(address) = text.parse::<SocketAddr>()
            && address.port() > 0
        {
            return Ok(Self::Tcp(address));
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        // A name of numbers only would be resolved as an IPv4 address (10.1 as 10.0.0.1), or never.
        let is_hexadecimal = |text: &str| {
            let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
            digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        let is_named =
            |host: &str| !host.split('.').all(|label| is_number(label) || is_hexadecimal(label));
        match port.parse::<u16>() {
            Ok(0) | Err(_) if !port.is_empty() && is_number(port) => {
                let port_max = u16::MAX;
                Err(format!("{text:?} is no upstream: write a port from 1 to {port_max}"))
            }
            Ok(port) if is_named(host) && host.bytes().all(is_name) => {
                Ok(Self::Name { host: host.into(), port })
            }
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Name { host, port } => write!(formatter, "{host}:{port}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_parse_back_and_others_are_refused() {
        for text in [
            "10.0.0.5:80",
            "[2001:db8::5]:80",
            "db-1.example.com.:5432",
            "web.1:80",
            "unix:/run/a b",
            "unix:@app",
        ] {
            assert_eq!(text.parse::<UpstreamAddress>().unwrap().to_string(), text);
        }
        let ports = ["host", "host:", "host:0", "10.0.0.5:0", "h:65536"];
        let hosts = [
            "",
            "80",
            ":80",
            "a b:80",
            "unix:",
            "unix:@",
            "10.0.0.256:80",
            "10.1.:80",
            "0X7f.0x1:80",
        ];
        for text in ports.into_iter().chain(hosts) {
            let error = text.parse::<UpstreamAddress>().unwrap_err();
            assert!(error.contains(text) && error.contains("write"), "{error}");
        }
    }

    #[test]
    fn weights_limits_and_backups_parse_back_and_others_are_refused() {
        let unix = "unix:/run/a b weight=2 max-connections=9 backup";
        for text in ["10.0.0.5:80 weight=3", "h:1 backup", "h:1", unix] {
            assert_eq!(text.parse::<UpstreamConfig>().unwrap().to_string(), text);
        }
        let parsed: UpstreamConfig = unix.parse().unwrap();
        assert_eq!(parsed.address.to_string(), "unix:/run/a b");
        let limits = ["h:1 max-connections=0", "h:1 max-connections=-1", "h:1 max-connections="];
        let repeated = ["h:1 weight=2 weight=3", "h:1 backup backup weight=1"];
        for text in repeated {
            let error = text.parse::<UpstreamConfig>().unwrap_err();
            assert!(error.ends_with("more than once"), "{error}");
        }
        let others = ["h:1 weight=0", "h:1 weight=1001", "h:1 weight=x", "h:1 spare", "backup"];
        for text in limits.into_iter().chain(others) {
            let error = text.parse::<UpstreamConfig>().unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
