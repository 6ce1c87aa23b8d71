//! The time of an event loop, also as responses and log lines write it.

use haul_server::clock::Clock;
use std::ops::Deref;

/// A [`Clock`] with the `Date` field and the log's date, which are formatted once a second.
#[derive(Debug)]
pub struct ResponseClock {
    clock: Clock,
    second: u64,
    date_field: Vec<u8>,
    log_date: String,
}

impl ResponseClock {
    /// A clock that starts now, until the event loop sets it.
    pub fn new() -> Self {
        let clock = Clock::new();
        let mut response_clock =
            Self { clock, second: u64::MAX, date_field: Vec::new(), log_date: String::new() };
        response_clock.set(&clock);
        response_clock
    }

    /// Takes the time of the event loop's clock at the start of a turn.
    pub fn set(&mut self, clock: &Clock) {
        self.clock = *clock;
        let now = self.clock.now();
        let second = now.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if second != self.second {
            self.second = second;
            self.date_field = format!("Date: {}\r\n", httpdate::fmt_http_date(now)).into_bytes();
            let local = jiff::Timestamp::from_second(second as i64)
                .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
                .to_zoned(jiff::tz::TimeZone::system());
            self.log_date = local.strftime("%d/%b/%Y:%H:%M:%S %z").to_string();
        }
    }

    /// The `Date` field, with its line end.
    pub fn date_field(&self) -> &[u8] {
        &self.date_field
    }

    /// The date in the common log format.
    pub fn log_date(&self) -> &str {
        &self.log_date
    }
}

impl Deref for ResponseClock {
    type Target = Clock;

    fn deref(&self) -> &Clock {
        &self.clock
    }
}
