//! How a transfer writes times and texts of the other host.

/// A time in its two largest units, such as `3 h 12 min`.
pub fn time_text(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {:02} s", seconds % 60),
        (0, _, _) => format!("{hours} h {:02} min", minutes % 60),
        _ => format!("{days} d {:02} h", hours % 24),
    }
}

/// A text of the other host, whose control characters must not reach the terminal.
pub fn printable(text: &str) -> String {
    let escape = |letter: char| {
        // Marks and overrides of the direction of text.
        let is_direction = matches!(
            letter,
            '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        if letter.is_control() || is_direction {
            letter.escape_default().to_string()
        } else {
            letter.to_string()
        }
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_two_units() {
        assert_eq!(time_text(59), "59 s");
        assert_eq!(time_text(61), "1 min 01 s");
        assert_eq!(time_text(3 * 3600 + 12 * 60 + 5), "3 h 12 min");
        assert_eq!(time_text(49 * 3600), "2 d 01 h");
    }
}
