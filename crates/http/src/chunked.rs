//! Decodes bodies with the chunked transfer coding (RFC 9112 section 7.1).
//!
//! The decoder accepts only what the grammar allows: if two servers disagree about the end of a
//! body, an attacker can smuggle requests. Chunk extensions and trailers are discarded, within a
//! limit.

use std::ops::Range;

/// The largest number of consecutive bytes that are not data: the line of a chunk size with its
/// extensions, and after the last chunk all trailers.
const LINES_BYTES_MAX: usize = 4096;

/// An incremental decoder of a chunked body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunked {
    state: State,
    /// The number of bytes since the last data.
    line_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In the digits of a chunk size; `digits` is the number of digits read.
    Size {
        bytes: u64,
        digits: u32,
    },
    /// After a chunk size, in an extension.
    Extension {
        bytes: u64,
    },
    /// After the carriage return of a chunk size's line.
    SizeEnd {
        bytes: u64,
    },
    /// In the data of a chunk.
    Data {
        remaining: u64,
    },
    /// After the data of a chunk, before its carriage return.
    DataEnd,
    /// After the data of a chunk, before its line feed.
    DataLineFeed,
    /// At the start of a trailer's line, or of the empty line that ends the body.
    Trailer,
    /// In the name of a trailer.
    TrailerName,
    /// After the colon of a trailer.
    TrailerValue,
    TrailerLineFeed,
    LastLineFeed,
    Complete,
}

/// The next part of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// A range of the input that is data of the body.
    Data(Range<usize>),
    /// All of the input is decoded, and the body is not complete.
    More,
    /// The body ends before this position of the input.
    End(usize),
    /// The input is not a chunked body.
    Malformed,
}

impl Default for Chunked {
    /// A decoder at the start of a body.
    fn default() -> Self {
        Self { state: State::Size { bytes: 0, digits: 0 }, line_bytes: 0 }
    }
}

impl Chunked {
    /// Decodes `input` from position `at` up to the next data, the end of the body or the end of
    /// the input.
    pub fn next(&mut self, input: &[u8], mut at: usize) -> Piece {
        while at < input.len() {
            if let State::Data { remaining } = self.state {
                let count = usize::try_from(remaining).unwrap_or(usize::MAX).min(input.len() - at);
                self.line_bytes = 0;
                self.state = match remaining - count as u64 {
                    0 => State::DataEnd,
                    remaining => State::Data { remaining },
                };
                return Piece::Data(at..at + count);
            }
            self.line_bytes += 1;
            let Some(state) = self.state.advance(input[at]) else { return Piece::Malformed };
            if self.line_bytes > LINES_BYTES_MAX {
                return Piece::Malformed;
            }
            self.state = state;
            at += 1;
            if state == State::Complete {
                return Piece::End(at);
            }
        }
        Piece::More
    }

    /// The bytes of data that are still to come, by the size of the chunk that has begun.
    pub fn announced_bytes(&self) -> u64 {
        match self.state {
            State::SizeEnd { bytes } | State::Data { remaining: bytes } => bytes,
            _ => 0,
        }
    }
}

/// Whether a byte may be part of a field's name (RFC 9110 section 5.6.2).
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

impl State {
    /// The state after a byte that is not data; `None` if the grammar does not allow the byte.
    fn advance(self, byte: u8) -> Option<Self> {
        Some(match (self, byte) {
            (Self::Size { bytes, digits }, _) if byte.is_ascii_hexdigit() => {
                let digit = char::from(byte).to_digit(16)?;
                let bytes = bytes.checked_mul(16)?.checked_add(u64::from(digit))?;
                Self::Size { bytes, digits: digits + 1 }
            }
            (Self::Size { bytes, digits: 1.. } | Self::Extension { bytes }, b'\r') => {
                Self::SizeEnd { bytes }
            }
            (Self::Size { bytes, digits: 1.. }, b';' | b' ' | b'\t') => Self::Extension { bytes },
            (Self::Extension { bytes }, byte) if byte == b'\t' || (b' '..0x7f).contains(&byte) => {
                Self::Extension { bytes }
            }
            (Self::SizeEnd { bytes: 0 } | Self::TrailerLineFeed, b'\n') => Self::Trailer,
            (Self::SizeEnd { bytes }, b'\n') => Self::Data { remaining: bytes },
            (Self::DataEnd, b'\r') => Self::DataLineFeed,
            (Self::DataLineFeed, b'\n') => Self::Size { bytes: 0, digits: 0 },
            (Self::Trailer, b'\r') => Self::LastLineFeed,
            (Self::TrailerName, b':') => Self::TrailerValue,
            // No fold of the line before: that is obsolete (RFC 9112 section 5.2).
            (Self::Trailer | Self::TrailerName, byte) if is_token_byte(byte) => Self::TrailerName,
            (Self::TrailerValue, b'\r') => Self::TrailerLineFeed,
            (Self::TrailerValue, byte) if byte == b'\t' || (byte >= b' ' && byte != 0x7f) => {
                Self::TrailerValue
            }
            (Self::LastLineFeed, b'\n') => Self::Complete,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decodes the body in `input`, received in pieces of `step` bytes. Returns the body and the
    /// bytes after it; `None` if there is no complete body.
    fn decode(input: &[u8], step: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let mut chunked = Chunked::default();
        let mut body = Vec::new();
        let mut done = 0;
        while done < input.len() {
            let piece = &input[done..input.len().min(done + step)];
            let mut at = 0;
            loop {
                match chunked.next(piece, at) {
                    Piece::Data(range) => {
                        body.extend_from_slice(&piece[range.clone()]);
                        at = range.end;
                    }
                    Piece::More => break,
                    Piece::End(end) => return Some((body, input[done + end..].to_vec())),
                    Piece::Malformed => return None,
                }
            }
            done += piece.len();
        }
        None
    }

    #[test]
    fn only_well_formed_bodies_are_decoded() {
        for (input, expected) in [
            ("0\r\n\r\nrest", Some(("", "rest"))),
            ("5\r\nhello\r\n0\r\n\r\n", Some(("hello", ""))),
            (
                "05;name=value\r\nhello\r\nA \r\n0123456789\r\n000\r\nTrailer: x\r\n\r\nGET /",
                Some(("hello0123456789", "GET /")),
            ),
            ("\r\n", None),
            ("5\nhello\r\n0\r\n\r\n", None),
            ("5\r\nhello0\r\n\r\n", None),
            ("5\r\nhello\n0\r\n\r\n", None),
            ("-1\r\n", None),
            ("+1\r\na\r\n0\r\n\r\n", None),
            ("0x1\r\na\r\n0\r\n\r\n", None),
            ("10000000000000000\r\n", None),
            ("g\r\n", None),
            (" 1\r\na\r\n0\r\n\r\n", None),
            ("1;\n\r\na\r\n0\r\n\r\n", None),
            ("0\r\nA: b\r\n", None),
            ("0\r\nno colon\r\n\r\n", None),
            ("0\r\n: no name\r\n\r\n", None),
            ("0\r\nA : b\r\n\r\n", None),
            ("0\r\nA: b\r\n folded\r\n\r\n", None),
        ] {
            let expected =
                expected.map(|(body, rest)| (body.as_bytes().to_vec(), rest.as_bytes().to_vec()));
            assert_eq!(decode(input.as_bytes(), 1000), expected, "{input:?}");
        }
        let long = format!("1;{}\r\na\r\n0\r\n\r\n", "x".repeat(LINES_BYTES_MAX));
        assert_eq!(decode(long.as_bytes(), 100), None);
        let trailers = format!("0\r\n{}\r\n", "A: b\r\n".repeat(LINES_BYTES_MAX / 6));
        assert_eq!(decode(trailers.as_bytes(), 100), None);
    }

    proptest! {
        #[test]
        fn a_body_is_decoded_however_the_input_is_split(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..6),
            step in 1usize..20,
        ) {
            let mut input = Vec::new();
            for chunk in &chunks {
                input.extend_from_slice(format!("{:X}\r\n", chunk.len()).as_bytes());
                input.extend_from_slice(chunk);
                input.extend_from_slice(b"\r\n");
            }
            input.extend_from_slice(b"0\r\n\r\nnext");
            prop_assert_eq!(decode(&input, step), Some((chunks.concat(), b"next".to_vec())));
        }

        #[test]
        fn arbitrary_bytes_decode_to_the_same_however_they_are_split(
            input in "[0-9a-f;\r\n x]{0,60}",
            step in 1usize..20,
        ) {
            prop_assert_eq!(decode(input.as_bytes(), step), decode(input.as_bytes(), 1000));
        }
    }
}
