//! Sizes, rates and times in the notation of command-line arguments and configuration files.

#![forbid(unsafe_code)]

use bytesize::ByteSize;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// Bytes in a MiB.
pub const MIB: f64 = (1u64 << 20) as f64;

/// A text is not a size, a rate or a time.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParseQuantityError {
    /// Not a size.
    #[error("{0:?} is not a size: write bytes with a unit, such as 64KiB, 1MiB or 350KB")]
    Size(String),
    /// Not a rate.
    #[error("{0:?} is not a rate: write bits per second with a unit, such as 4gbit or 500mbit")]
    Rate(String),
    /// Not a time within these limits.
    #[error(
        "{text:?} is not a time from {} to {}: write {}",
        short(*min),
        short(*max),
        examples(*min, *max)
    )]
    Time {
        /// The text.
        text: String,
        /// The shortest time.
        min: Duration,
        /// The longest time.
        max: Duration,
    },
}

/// A number of bytes: `64KiB` is 65,536, `350KB` is 350,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, ParseQuantityError> {
        let is_number_first = text.starts_with(|first: char| first.is_ascii_digit());
        match text.parse::<ByteSize>() {
            Ok(size) if is_number_first => Ok(Self(size.as_u64())),
            _ => Err(ParseQuantityError::Size(text.into())),
        }
    }
}

impl fmt::Display for Size {
    /// Formats with the largest unit that is exact, binary before decimal.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 6] = [
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
            (1_000_000_000, "GB"),
            (1_000_000, "MB"),
            (1000, "KB"),
        ];
        let exact =
            UNITS.into_iter().find(|(unit, _)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        match exact {
            Some((unit, name)) => formatter.pad(&format!("{}{name}", self.0 / unit)),
            None => formatter.pad(&format!("{}B", self.0)),
        }
    }
}

/// A number of bits per second: `4gbit` is 4,000,000,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate(pub u64);

impl FromStr for Rate {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, ParseQuantityError> {
        let invalid = || ParseQuantityError::Rate(text.into());
        let lower = text.to_ascii_lowercase();
        let lower = lower.strip_suffix("/s").unwrap_or(&lower);
        let (number, factor) = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)]
            .into_iter()
            .find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, factor)))
            .ok_or_else(invalid)?;
        match number.trim().parse::<f64>() {
            // From about one packet per second to a rate that no link reaches.
            Ok(number) if (1e4..1e13).contains(&(number * factor)) => {
                Ok(Self((number * factor).round() as u64))
            }
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.0 as f64;
        if bits >= 1e9 {
            formatter.pad(&format!("{}gbit", bits / 1e9))
        } else {
            formatter.pad(&format!("{}mbit", bits / 1e6))
        }
    }
}

/// Parses a time such as `30s`, `2m` or `1h 30m` within limits.
pub fn parse_time(
    text: &str,
    limits: RangeInclusive<Duration>,
) -> Result<Duration, ParseQuantityError> {
    let parsed = text.parse().ok().and_then(|time: jiff::SignedDuration| time.try_into().ok());
    parsed.filter(|time| limits.contains(time)).ok_or_else(|| ParseQuantityError::Time {
        text: text.into(),
        min: *limits.start(),
        max: *limits.end(),
    })
}

/// Times within these limits, as examples.
fn examples(min: Duration, max: Duration) -> String {
    let times = [("500ms", 500), ("30s", 30_000), ("2m", 120_000)];
    let is_valid = |ms: u64| (min..=max).contains(&Duration::from_millis(ms));
    let texts: Vec<_> =
        times.into_iter().filter(|&(_, ms)| is_valid(ms)).map(|one| one.0).collect();
    match texts.split_last() {
        None => short(max),
        Some((last, [])) => (*last).into(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
    }
}

/// A time in its largest exact unit.
fn short(time: Duration) -> String {
    match (time.as_secs(), time.subsec_millis()) {
        (hours, 0) if hours > 0 && hours.is_multiple_of(3600) => format!("{}h", hours / 3600),
        (seconds, 0) => format!("{seconds}s"),
        _ => format!("{}ms", time.as_millis()),
    }
}

/// A size with two or three digits, such as `5.0 MiB`.
pub fn size_text(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let exponent = (bytes.max(1).ilog2() / 10) as usize;
    let scaled = bytes as f64 / 1024_f64.powi(exponent as i32);
    let digits = usize::from(exponent > 0 && scaled < 99.95);
    format!("{scaled:.digits$} {}", units[exponent])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_and_format() {
        for (text, bytes) in [("64KiB", 65_536), ("350KB", 350_000), ("1MiB", 1 << 20), ("7B", 7)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
            assert_eq!(Size(bytes).to_string(), text);
        }
        for bad in ["", "KiB", "-1", "64 Kittens", "0x10"] {
            assert!(bad.parse::<Size>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn rates_parse_and_format() {
        assert_eq!("4gbit".parse(), Ok(Rate(4_000_000_000)));
        assert_eq!("1.5Gbit/s".parse(), Ok(Rate(1_500_000_000)));
        assert_eq!(Rate(500_000_000).to_string(), "500mbit");
        for bad in ["", "4", "gbit", "0gbit", "-1gbit", "nangbit", "1e99gbit"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_parse_within_their_limits() {
        let parse = |text| parse_time(text, Duration::from_secs(1)..=Duration::from_secs(3600));
        assert_eq!(parse("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse("1m 30s"), Ok(Duration::from_secs(90)));
        for bad in ["", "30", "-1s", "0s", "2h", "1y"] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.ends_with("is not a time from 1s to 1h: write 30s or 2m"), "{error}");
        }
        let short = parse_time("1", Duration::ZERO..=Duration::from_secs(60)).unwrap_err();
        assert!(short.to_string().ends_with("write 500ms or 30s"), "{short}");
        let long = parse_time("1", Duration::from_secs(600)..=Duration::from_secs(7200));
        assert!(long.unwrap_err().to_string().ends_with("from 600s to 2h: write 2h"));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,20}") {
            let _ = (text.parse::<Size>(), text.parse::<Rate>());
            let _ = parse_time(&text, Duration::ZERO..=Duration::MAX);
        }

        #[test]
        fn a_formatted_size_parses_to_the_same_size(bytes in 1u64..1 << 50) {
            prop_assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
        }
    }
}
