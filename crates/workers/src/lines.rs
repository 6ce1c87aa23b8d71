//! JSON lines: the message format between processes of a run, on one machine or two.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Write};
use std::time::Instant;

/// The result of reading a line.
#[derive(Debug)]
pub enum Line<T> {
    /// A line that parses as the expected type.
    Value(T),
    /// A line that does not parse, as text.
    Invalid(String),
    /// The end of the stream.
    End,
}

/// Reads the next line, of at most `bytes_max` bytes. A line that is not complete at `deadline` is
/// an error. If the reader may block longer than that, it needs a separate timeout.
pub fn read_line<T: DeserializeOwned>(
    reader: &mut impl BufRead,
    bytes_max: usize,
    deadline: Option<Instant>,
) -> io::Result<Line<T>> {
    let mut line = Vec::new();
    loop {
        let available = reader.fill_buf()?;
        let end = available.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        let taken = end.unwrap_or(available.len()).min(bytes_max - line.len());
        line.extend_from_slice(&available[..taken]);
        reader.consume(taken);
        if taken == 0 || line.ends_with(b"\n") || line.len() == bytes_max {
            break;
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    if line.is_empty() {
        return Ok(Line::End);
    }
    let value = serde_json::from_slice(&line);
    Ok(value
        .map_or_else(|_| Line::Invalid(String::from_utf8_lossy(&line).trim().into()), Line::Value))
}

/// Writes a value as one JSON line.
pub fn write_line(mut writer: impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    writer.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::BufReader;

    proptest! {
        /// For any input and any buffer size, a line ends after a newline or at the length limit.
        #[test]
        fn lines_end_at_a_newline_or_at_the_length_limit(
            bytes in proptest::collection::vec(
                prop_oneof![Just(b'\n'), Just(b'1'), any::<u8>()],
                0..300,
            ),
            piece_bytes in 1usize..40,
        ) {
            let mut reader = BufReader::with_capacity(piece_bytes, bytes.as_slice());
            let mut read = 0;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let newline = rest.iter().position(|&byte| byte == b'\n');
                let end = newline.map_or(rest.len(), |at| at + 1).min(20);
                let (expected, after) = rest.split_at(end);
                match read_line::<u64>(&mut reader, 20, None).unwrap() {
                    Line::Value(number) => {
                        prop_assert_eq!(serde_json::from_slice::<u64>(expected).ok(), Some(number));
                    }
                    Line::Invalid(_) => {
                        prop_assert!(serde_json::from_slice::<u64>(expected).is_err());
                    }
                    Line::End => prop_assert!(false, "an end before the end"),
                }
                read += 1;
                rest = after;
            }
            let last = read_line::<u64>(&mut reader, 20, None).unwrap();
            prop_assert!(matches!(last, Line::End), "after {read}");
        }
    }

    #[test]
    fn a_written_value_is_read_back() {
        let mut bytes = Vec::new();
        write_line(&mut bytes, &(1, "two")).unwrap();
        let line = read_line::<(u8, String)>(&mut bytes.as_slice(), 100, None).unwrap();
        assert!(matches!(line, Line::Value((1, text)) if text == "two"));
    }

    /// A reader that returns one byte at a time and never a newline.
    struct SlowReader;

    impl io::Read for SlowReader {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            buffer[0] = b'1';
            Ok(1)
        }
    }

    #[test]
    fn a_slow_line_times_out() {
        let mut reader = BufReader::with_capacity(1, SlowReader);
        let error = read_line::<u64>(&mut reader, usize::MAX, Some(Instant::now())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
