//! Options of services, on the command line and in a TOML file whose keys are the flags' names.

use crate::output::Failure;
use clap::builder::ArgAction;
use clap::{ArgMatches, Args, FromArgMatches};
use haul_serve::Address;
use haul_units::Size;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::any::TypeId;
use std::fmt::Display;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

/// The options of a service on the command line, which take precedence over the options of a file.
///
/// The fields of `O` that are `Option<bool>` are toggles: `--flag` and `--flag=true` set the flag,
/// and `--flag=false` unsets a flag of the file.
#[derive(Debug, Clone)]
pub struct Flags<O> {
    /// The options of the command line alone.
    pub options: O,
    matches: ArgMatches,
}

impl<O: FromArgMatches> Flags<O> {
    /// Replaces the options of a file by the options that the command line has.
    pub fn replace_in(&self, file: &mut O) -> Result<(), Failure> {
        file.update_from_arg_matches(&self.matches).map_err(Failure::bad_input)
    }
}

impl<O: FromArgMatches> FromArgMatches for Flags<O> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { options: O::from_arg_matches(matches)?, matches: matches.clone() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<O: Args> Args for Flags<O> {
    fn augment_args(command: clap::Command) -> clap::Command {
        O::augment_args(command).mut_args(with_optional_value)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        O::augment_args_for_update(command).mut_args(with_optional_value)
    }
}

/// Makes the value of a toggle optional.
fn with_optional_value(argument: clap::Arg) -> clap::Arg {
    let is_toggle = matches!(argument.get_action(), ArgAction::Set)
        && argument.get_value_parser().type_id() == TypeId::of::<bool>();
    if !is_toggle {
        return argument;
    }
    argument
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .value_name("true|false")
        .hide_possible_values(true)
}

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

/// A number that is at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count(pub NonZeroUsize);

impl Count {
    /// The number.
    pub fn get(self) -> usize {
        self.0.get()
    }
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| format!("{text} is no whole number of at least 1"))
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = usize::deserialize(deserializer)?;
        NonZeroUsize::new(number).map(Self).ok_or_else(|| D::Error::custom("it must be at least 1"))
    }
}

/// A rate in bytes per second, at least 1, with a unit: a plain number is often meant as megabits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteRate(pub u64);

impl FromStr for ByteRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(Size(0)) => Err("it must be at least 1".into()),
            Ok(Size(_)) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Err(format!("{text} has no unit: write bytes per second, such as 10MB or 500KiB"))
            }
            Ok(Size(bytes)) => Ok(Self(bytes)),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The mode of a Unix socket's file, in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(mode @ 1..=0o777) => Ok(Self(mode)),
            _ => Err(format!("{text:?} is no mode of a file: write it in octal, such as 660")),
        }
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
