//! The time as responses and timeouts need it: told once for each turn of the event loop, and formatted once a second.

use std::time::{Duration, Instant, SystemTime};

/// The time of one event loop.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    now: SystemTime,
    elapsed: Duration,
    second: u64,
    date_field: Vec<u8>,
    log_date: String,
}

impl Clock {
    /// A clock that shows now.
    pub fn new() -> Self {
        let mut clock = Self {
            started: Instant::now(),
            now: SystemTime::now(),
            elapsed: Duration::ZERO,
            second: u64::MAX,
            date_field: Vec::new(),
            log_date: String::new(),
        };
        clock.tick();
        clock
    }

    /// Looks at the time again.
    pub fn tick(&mut self) {
        self.elapsed = self.started.elapsed();
        self.now = SystemTime::now();
        let second = self.now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if second != self.second {
            self.second = second;
            self.date_field = format!("Date: {}\r\n", httpdate::fmt_http_date(self.now)).into_bytes();
            let local = jiff::Timestamp::from_second(second as i64)
                .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
                .to_zoned(jiff::tz::TimeZone::system());
            self.log_date = local.strftime("%d/%b/%Y:%H:%M:%S %z").to_string();
        }
    }

    /// The time of day.
    pub fn now(&self) -> SystemTime {
        self.now
    }

    /// Whole seconds since the loop began.
    pub fn seconds(&self) -> u32 {
        self.elapsed.as_secs() as u32
    }

    /// The `Date` field, with its line end.
    pub fn date_field(&self) -> &[u8] {
        &self.date_field
    }

    /// The time as the common log format writes it.
    pub fn log_date(&self) -> &str {
        &self.log_date
    }
}
