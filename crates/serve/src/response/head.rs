//! Writes the head of a response into a buffer that is reused.

use crate::clock::ResponseClock;
use haul_http::status::Status;

/// A response head that is being written.
#[derive(Debug)]
pub struct Head<'b> {
    buffer: &'b mut Vec<u8>,
}

impl<'b> Head<'b> {
    /// Begins a head in `buffer`, which is cleared.
    pub fn new(buffer: &'b mut Vec<u8>, status: Status, clock: &ResponseClock) -> Self {
        buffer.clear();
        buffer.extend_from_slice(b"HTTP/1.1 ");
        let mut head = Self { buffer };
        head.write_number(u64::from(status.code));
        head.buffer.push(b' ');
        head.buffer.extend_from_slice(status.phrase.as_bytes());
        head.buffer.extend_from_slice(b"\r\nServer: haul\r\n");
        head.buffer.extend_from_slice(clock.date_field());
        head
    }

    /// Continues the head in `buffer`.
    pub fn resume(buffer: &'b mut Vec<u8>) -> Self {
        Self { buffer }
    }

    /// Writes a field.
    pub fn field(&mut self, name: &str, value: impl AsRef<[u8]>) -> &mut Self {
        self.buffer.extend_from_slice(name.as_bytes());
        self.buffer.extend_from_slice(b": ");
        self.buffer.extend_from_slice(value.as_ref());
        self.end_line()
    }

    /// Writes complete lines.
    pub fn lines(&mut self, lines: &[u8]) -> &mut Self {
        self.buffer.extend_from_slice(lines);
        self
    }

    /// Writes `Content-Length`, the length of the body in bytes.
    pub fn content_length(&mut self, bytes: u64) -> &mut Self {
        self.buffer.extend_from_slice(b"Content-Length: ");
        self.write_number(bytes);
        self.end_line()
    }

    /// Writes `Content-Range` for a range of a file of `len` bytes (RFC 9110 section 14.4).
    pub fn content_range(&mut self, range: &std::ops::Range<u64>, len: u64) -> &mut Self {
        self.buffer.extend_from_slice(b"Content-Range: bytes ");
        self.write_number(range.start);
        self.buffer.push(b'-');
        self.write_number(range.end - 1);
        self.buffer.push(b'/');
        self.write_number(len);
        self.end_line()
    }

    /// Ends the head. Writes `Connection` if the connection closes, or if it persists against the
    /// default of HTTP/1.0.
    pub fn end(&mut self, keeps_alive: bool, minor_version: u8) {
        match (keeps_alive, minor_version) {
            (false, _) => self.lines(b"Connection: close\r\n"),
            (true, 0) => self.lines(b"Connection: keep-alive\r\n"),
            (true, _) => self,
        };
        self.end_line();
    }

    fn write_number(&mut self, number: u64) {
        self.buffer.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    fn end_line(&mut self) -> &mut Self {
        self.buffer.extend_from_slice(b"\r\n");
        self
    }
}
