//! The time as responses and timeouts need it: told once for each turn of the event loop, and formatted once a second.

use std::time::{Instant, SystemTime};

/// The time of one event loop.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    ticked: Instant,
    now: SystemTime,
    second: u64,
    date_field: Vec<u8>,
    log_date: String,
}

impl Clock {
    /// A clock that shows now.
    pub fn new() -> Self {
        let started = Instant::now();
        let mut clock = Self {
            started,
            ticked: started,
            now: SystemTime::now(),
            second: u64::MAX,
            date_field: Vec::new(),
            log_date: String::new(),
        };
        clock.tick();
        clock
    }

    /// Looks at the time again.
    pub fn tick(&mut self) {
        self.ticked = Instant::now();
        self.now = SystemTime::now();
        let second =
            self.now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if second != self.second {
            self.second = second;
            self.date_field =
                format!("Date: {}\r\n", httpdate::fmt_http_date(self.now)).into_bytes();
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

    /// When the turn began.
    pub fn ticked(&self) -> Instant {
        self.ticked
    }

    /// Whole seconds from the beginning of the loop to that of the turn.
    pub fn seconds(&self) -> u32 {
        (self.ticked - self.started).as_secs() as u32
    }

    /// Nanoseconds from the beginning of the loop until now.
    pub fn ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
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
