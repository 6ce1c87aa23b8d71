//! The head of a response, written into memory that is used again.

use crate::clock::ResponseClock;
use haul_http::status::Status;

/// A head being written.
#[derive(Debug)]
pub struct Head<'o> {
    out: &'o mut Vec<u8>,
}

impl<'o> Head<'o> {
    /// Begins a head in `out`.
    pub fn new(out: &'o mut Vec<u8>, status: Status, clock: &ResponseClock) -> Self {
        out.clear();
        out.extend_from_slice(b"HTTP/1.1 ");
        let mut head = Self { out };
        head.number(u64::from(status.code));
        head.out.push(b' ');
        head.out.extend_from_slice(status.phrase.as_bytes());
        head.out.extend_from_slice(b"\r\nServer: haul\r\n");
        head.out.extend_from_slice(clock.date_field());
        head
    }

    /// Goes on with what was begun in `out`.
    pub fn resume(out: &'o mut Vec<u8>) -> Self {
        Self { out }
    }

    /// Adds a field.
    pub fn field(&mut self, name: &str, value: impl AsRef<[u8]>) -> &mut Self {
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(b": ");
        self.out.extend_from_slice(value.as_ref());
        self.line_end()
    }

    /// Adds whole lines.
    pub fn lines(&mut self, lines: &[u8]) -> &mut Self {
        self.out.extend_from_slice(lines);
        self
    }

    /// Says how long the body is, in bytes.
    pub fn content_length(&mut self, bytes: u64) -> &mut Self {
        self.out.extend_from_slice(b"Content-Length: ");
        self.number(bytes);
        self.line_end()
    }

    /// Says which bytes of a file of `len` the body is (RFC 9110 section 14.4).
    pub fn content_range(&mut self, range: &std::ops::Range<u64>, len: u64) -> &mut Self {
        self.out.extend_from_slice(b"Content-Range: bytes ");
        self.number(range.start);
        self.out.push(b'-');
        self.number(range.end - 1);
        self.out.push(b'/');
        self.number(len);
        self.line_end()
    }

    /// Ends the head; says so where the connection does not go on as the version would have it.
    pub fn end(&mut self, keeps_alive: bool, minor_version: u8) {
        match (keeps_alive, minor_version) {
            (false, _) => self.lines(b"Connection: close\r\n"),
            (true, 0) => self.lines(b"Connection: keep-alive\r\n"),
            (true, _) => self,
        };
        self.line_end();
    }

    fn number(&mut self, number: u64) {
        self.out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    fn line_end(&mut self) -> &mut Self {
        self.out.extend_from_slice(b"\r\n");
        self
    }
}
