//! What two machines that measure together say to each other: a JSON line each.
//!
//! The one that asks sends [`Request`]s, one after the other; a worker runs from [`Request::Start`] to [`Reply::Ended`]. Neither
//! side believes the other: lines are limited, and what is asked for is checked before it is done.

use crate::host::HostFacts;
use crate::worker::{Message, Task};
use haul_soak::{Baseline, Interval};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read, Write};
use std::net::SocketAddr;

/// The protocol and its version.
pub(super) const SCHEMA: &str = "haul.pair/1";
/// The port of the conversation, unless another is given: HAUL on a telephone. Bytes go to the one after it.
pub const PORT: u16 = 4285;
/// The longest line: what is said of a thousand CPUs.
pub(super) const LINE_BYTES_MAX: u64 = 1 << 20;

/// What the machine that asks says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first word.
    Hello { schema: String, haul: String },
    /// Learn what a quiet machine looks like, for so long. Answered by [`Reply::Baseline`].
    Calibrate { length_ms: u64 },
    /// Start a worker. Its words come as [`Reply::Said`], its end as [`Reply::Ended`].
    Start { task: Box<Task>, peer: Option<SocketAddr> },
    /// Measure a window that begins so much later. Answered by [`Reply::Measured`].
    Window { start_in_ns: u64, length_ns: u64 },
    /// Everybody has looked: the worker may end.
    End,
    /// End the worker at once, if there is one.
    Stop,
}

/// What the machine that listens says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The answer to the first word.
    Hello { schema: String, host: HostFacts, congestion: Vec<String> },
    /// What the quiet machine looked like.
    Baseline(Baseline),
    /// A worker said this.
    Said(Message),
    /// What happened on this machine in the window.
    Measured(Interval),
    /// The worker is gone.
    Ended,
    /// What was asked for is not done.
    Refused(String),
}

/// What came.
#[derive(Debug)]
pub(super) enum Line<T> {
    /// A word of the protocol.
    Said(T),
    /// Something else.
    Strange(String),
    /// The end of the stream.
    End,
}

/// Reads the next line, of at most `max` bytes.
pub(super) fn read_line<T: DeserializeOwned>(reader: &mut impl BufRead, max: u64) -> io::Result<Line<T>> {
    let mut bytes = Vec::new();
    reader.by_ref().take(max).read_until(b'\n', &mut bytes)?;
    if bytes.is_empty() {
        return Ok(Line::End);
    }
    let word = serde_json::from_slice(&bytes);
    Ok(word.map_or_else(|_| Line::Strange(String::from_utf8_lossy(&bytes).trim().into()), Line::Said))
}

pub(super) fn write_line(mut writer: impl Write, word: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(word)?;
    line.push(b'\n');
    writer.write_all(&line)
}

/// How many of the lines are requests, and how many replies: both sides' ears, for a fuzzer.
#[doc(hidden)]
pub fn words_in(bytes: &[u8]) -> (usize, usize) {
    fn said<T: DeserializeOwned>(mut bytes: &[u8]) -> usize {
        let mut said = 0;
        while let Ok(line) = read_line::<T>(&mut bytes, LINE_BYTES_MAX) {
            match line {
                Line::Said(_) => said += 1,
                Line::Strange(_) => {}
                Line::End => break,
            }
        }
        said
    }
    (said::<Request>(bytes), said::<Reply>(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever comes is a word, something strange, or the end; and no more is read than may be.
        #[test]
        fn any_bytes_are_read_in_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut rest = bytes.as_slice();
            let line = read_line::<Request>(&mut rest, 100).unwrap();
            prop_assert!(bytes.len() - rest.len() <= 100);
            prop_assert_eq!(matches!(line, Line::End), bytes.is_empty());
        }
    }

    #[test]
    fn a_word_that_was_written_is_read() {
        let mut bytes = Vec::new();
        write_line(&mut bytes, &Request::Window { start_in_ns: 1, length_ns: 2 }).unwrap();
        let line = read_line(&mut bytes.as_slice(), LINE_BYTES_MAX).unwrap();
        assert!(matches!(line, Line::Said(Request::Window { start_in_ns: 1, length_ns: 2 })));
    }
}
