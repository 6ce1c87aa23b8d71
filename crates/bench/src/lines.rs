//! JSON lines: how the processes of a run speak to each other, on one machine and between two.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Write};
use std::time::Instant;

/// What came.
#[derive(Debug)]
pub(crate) enum Line<T> {
    /// A word that is understood.
    Said(T),
    /// Something else.
    Strange(String),
    /// The end of the stream.
    End,
}

/// Reads the next line, of at most `bytes_max` bytes, which must be whole at `deadline`; a reader that blocks longer than that
/// needs a timeout of its own.
pub(crate) fn read_line<T: DeserializeOwned>(
    reader: &mut impl BufRead,
    bytes_max: usize,
    deadline: Option<Instant>,
) -> io::Result<Line<T>> {
    let mut line = Vec::new();
    loop {
        let come = reader.fill_buf()?;
        let end = come.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        let taken = end.unwrap_or(come.len()).min(bytes_max - line.len());
        line.extend_from_slice(&come[..taken]);
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
    let word = serde_json::from_slice(&line);
    Ok(word
        .map_or_else(|_| Line::Strange(String::from_utf8_lossy(&line).trim().into()), Line::Said))
}

/// Writes a word and the end of its line.
pub(crate) fn write_line(mut writer: impl Write, word: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(word)?;
    line.push(b'\n');
    writer.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::BufReader;

    proptest! {
        /// Whatever comes, in pieces of whatever size: lines are what lies between line ends, cut where they are too long.
        #[test]
        fn lines_are_cut_as_they_came(
            bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'1'), any::<u8>()], 0..300),
            piece_bytes in 1usize..40,
        ) {
            let mut reader = BufReader::with_capacity(piece_bytes, bytes.as_slice());
            let mut read = 0;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let end = rest.iter().position(|&byte| byte == b'\n').map_or(rest.len(), |at| at + 1).min(20);
                let (expected, after) = rest.split_at(end);
                match read_line::<u64>(&mut reader, 20, None).unwrap() {
                    Line::Said(number) => prop_assert_eq!(serde_json::from_slice::<u64>(expected).ok(), Some(number)),
                    Line::Strange(_) => prop_assert!(serde_json::from_slice::<u64>(expected).is_err()),
                    Line::End => prop_assert!(false, "an end before the end"),
                }
                read += 1;
                rest = after;
            }
            prop_assert!(matches!(read_line::<u64>(&mut reader, 20, None).unwrap(), Line::End), "after {read}");
        }
    }

    #[test]
    fn a_word_that_was_written_is_read() {
        let mut bytes = Vec::new();
        write_line(&mut bytes, &(1, "two")).unwrap();
        let line = read_line::<(u8, String)>(&mut bytes.as_slice(), 100, None).unwrap();
        assert!(matches!(line, Line::Said((1, text)) if text == "two"));
    }

    /// Somebody who sends a byte now and then.
    struct Trickle;

    impl io::Read for Trickle {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            buffer[0] = b'1';
            Ok(1)
        }
    }

    #[test]
    fn whoever_trickles_is_given_up() {
        let mut reader = BufReader::with_capacity(1, Trickle);
        let error = read_line::<u64>(&mut reader, usize::MAX, Some(Instant::now())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
