//! Options that every service takes on the command line and from a TOML file.

use crate::output::Failure;
use haul_serve::Address;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use std::fmt::Display;
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// Maximum size of a configuration file, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A time from one second to 24 hours.
#[derive(Debug, Clone, Copy)]
pub struct Timeout(pub Duration);

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        haul_units::parse_time(text, Duration::from_secs(1)..=DAY)
            .map(Self)
            .map_err(|error| error.to_string())
    }
}

/// The address at which metrics are served.
#[derive(Debug, Clone, Copy)]
pub struct MetricsAddress(pub SocketAddr);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.parse::<u16>().is_ok() {
            return Err(format!(
                "{text:?} lacks the address, which decides who may read the metrics: write \
                 127.0.0.1:{text}, or *:{text} for every address"
            ));
        }
        match text.parse() {
            Ok(Address::Tcp(address)) => Ok(Self(address)),
            _ => Err(format!(
                "{text:?} is no place to serve metrics at: write 127.0.0.1:9090 or [::1]:9090"
            )),
        }
    }
}

/// Reads the options of a configuration file.
pub fn read_file<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let invalid = |problem: String| Failure::bad_input(format!("{}: {problem}", path.display()));
    let file = std::fs::File::open(path).map_err(|error| invalid(error.to_string()))?;
    let mut text = String::new();
    file.take(CONFIG_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(|error| invalid(error.to_string()))?;
    parse(&text).map_err(invalid)
}

/// Parses the text of a configuration file.
fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line =
            error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let message = error.message().replace('\n', ": ");
        let Some(line) = line else { return message };
        let key = text.lines().nth(line - 1).and_then(|text| text.split_once('='));
        match key.map(|(key, _)| key.trim()) {
            Some(key) if !key.is_empty() && !message.contains(key) => {
                format!("line {line}, {key}: {message}")
            }
            _ => format!("line {line}: {message}"),
        }
    })
}

/// The first list, or the other if it is empty.
pub fn non_empty_or<T>(list: Vec<T>, other: Vec<T>) -> Vec<T> {
    if list.is_empty() { other } else { list }
}

/// Refuses a number of 0.
pub fn check_not_zero(name: &str, number: Option<usize>) -> Result<(), Failure> {
    if number == Some(0) {
        Err(Failure::bad_input(format!("{name} is 0: it must be at least 1")))
    } else {
        Ok(())
    }
}

/// Deserializes a value from the same text as on the command line.
pub fn deserialize_from_text<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    String::deserialize(deserializer)?.parse().map(Some).map_err(D::Error::custom)
}

/// Deserializes a list of values from the same texts as on the command line.
pub fn deserialize_each_from_text<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
}
