//! Rate-limits a repeated log message.

/// The interval between two copies of one message, in seconds.
const LOG_INTERVAL_SECONDS: u32 = 60;

/// Rate-limits one log message to one copy a minute.
#[derive(Debug, Default)]
pub struct LogLimiter {
    logged_at: Option<u32>,
}

impl LogLimiter {
    /// A message that was not logged yet.
    pub const fn new() -> Self {
        Self { logged_at: None }
    }

    /// Whether the message may be logged at `now_seconds`; if so, that counts as logged.
    pub fn allow(&mut self, now_seconds: u32) -> bool {
        let is_due = self
            .logged_at
            .is_none_or(|logged_at| now_seconds.saturating_sub(logged_at) >= LOG_INTERVAL_SECONDS);
        if is_due {
            self.logged_at = Some(now_seconds);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_allowed_once_a_minute() {
        let mut limiter = LogLimiter::default();
        let allowed = [0, 1, 59, 60, 61, 119, 120].map(|now| limiter.allow(now));
        assert_eq!(allowed, [true, false, false, true, false, false, true]);
    }
}
