//! [`Response`]: bytes, a range of a file, and bytes again, sent as one message.

use crate::error::Error;
use crate::sender::Sender;
use crate::source::Source;
use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::AsFd;

/// A message of three parts, as a protocol has them: a head, a range of a file or of
/// [`crate::Memory`], and a tail. Each may be empty.
///
/// [`Sender::send_response`] sends it, and continues where it stopped.
#[derive(Clone)]
pub struct Response<'a> {
    head: &'a [u8],
    source: Source<'a>,
    range: Range<u64>,
    tail: &'a [u8],
}

impl<'a> Response<'a> {
    /// Creates a response without a tail.
    pub fn new(head: &'a [u8], source: impl Into<Source<'a>>, range: Range<u64>) -> Self {
        Self { head, source: source.into(), range, tail: &[] }
    }

    /// Sets the bytes that follow the range.
    #[must_use]
    pub fn with_tail(mut self, tail: &'a [u8]) -> Self {
        self.tail = tail;
        self
    }

    /// The length of all parts together, in bytes.
    pub fn total_bytes(&self) -> u64 {
        let range_bytes = self.range.end.saturating_sub(self.range.start);
        range_bytes.saturating_add((self.head.len() + self.tail.len()) as u64)
    }

    /// The part that holds the byte `position`, from that byte on.
    fn part_at(&self, position: u64) -> Part<'a> {
        let head_bytes = self.head.len() as u64;
        let range_bytes = self.range.end.saturating_sub(self.range.start);
        if position < head_bytes {
            let has_more = range_bytes > 0 || !self.tail.is_empty();
            return Part::Bytes { bytes: &self.head[position as usize..], has_more };
        }
        let position = position - head_bytes;
        if position < range_bytes {
            return Part::File(self.range.start + position..self.range.end);
        }
        let sent = usize::try_from(position - range_bytes).unwrap_or(usize::MAX);
        Part::Bytes { bytes: self.tail.get(sent..).unwrap_or_default(), has_more: false }
    }
}

impl fmt::Debug for Response<'_> {
    /// Prints the lengths, never the content.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, tail) = (self.head.len(), self.tail.len());
        write!(formatter, "Response({head} bytes, range {:?}, {tail} bytes)", self.range)
    }
}

/// What is to be sent next.
enum Part<'a> {
    Bytes { bytes: &'a [u8], has_more: bool },
    File(Range<u64>),
}

impl<S: AsFd> Sender<S> {
    /// Sends a response from its byte `position` on, and advances the position by what was sent,
    /// also if it fails. The head shares a packet with what follows it (`MSG_MORE`), and the range
    /// is sent as by [`Sender::send_file`]. With a tail, `TCP_CORK` is set until the tail is sent,
    /// so that the tail shares a packet with the end of the range.
    ///
    /// To continue after [`Error::WouldBlock`], call again with the same position. Creating the
    /// response again costs nothing, so a connection stores only its parts. A position behind the
    /// end sends nothing. After [`Error::Ended`] the peer still expects the length that the head
    /// promised: close the connection.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let socket = std::net::TcpStream::connect("192.0.2.1:80")?;
    /// let file = std::fs::File::open("video.mp4")?;
    /// let len = haul::file_len(&file)?;
    /// let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n");
    /// let mut sender = haul::Sender::new(socket)?;
    /// sender.send_response(&haul::Response::new(head.as_bytes(), &file, 0..len), &mut 0)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn send_response(
        &mut self,
        response: &Response<'_>,
        position: &mut u64,
    ) -> Result<(), Error> {
        self.send_response_until(response, position, u64::MAX)
    }

    /// Like [`Sender::send_response`], but stops once the position reaches `end`. The last call may
    /// send bytes after `end`. An event loop uses `end` to give each connection its turn, or to
    /// check with [`Source::is_resident`] that the next part of a file is in memory.
    pub fn send_response_until(
        &mut self,
        response: &Response<'_>,
        position: &mut u64,
        end: u64,
    ) -> Result<(), Error> {
        // Before the head, which on a datagram socket would be a separate message.
        self.must_be_stream()?;
        if response.range.start > response.range.end {
            return Err(Error::InvalidInput("the range ends before it begins"));
        }
        let result = self.send_parts(response, position, end.min(response.total_bytes()));
        if result.as_ref().is_err_and(|error| !matches!(error, Error::WouldBlock)) {
            // What was sent does not wait for the rest, which will not come.
            self.set_cork(false);
        }
        result
    }

    fn send_parts(
        &mut self,
        response: &Response<'_>,
        position: &mut u64,
        end: u64,
    ) -> Result<(), Error> {
        while *position < end {
            *position += match response.part_at(*position) {
                Part::Bytes { bytes, has_more: true } => {
                    self.send_more(&[IoSlice::new(bytes)])? as u64
                }
                Part::Bytes { bytes, has_more: false } => self.send_tail(response, bytes)?,
                Part::File(range) => {
                    if !response.tail.is_empty() {
                        self.set_cork(true);
                    }
                    self.send_file(response.source, range)?
                }
            };
        }
        Ok(())
    }

    /// Sends the last bytes, with the end of the file before them.
    fn send_tail(&mut self, response: &Response<'_>, bytes: &[u8]) -> Result<u64, Error> {
        let sent = self.send(bytes)?;
        if !response.range.is_empty() && sent == bytes.len() {
            self.set_cork(false);
        }
        Ok(sent as u64)
    }

    /// Sets `TCP_CORK`: the end of a file is not a separate packet, behind which Nagle's algorithm
    /// would hold the tail back until it is acknowledged. A socket of another kind does not have
    /// packets.
    fn set_cork(&self, is_corked: bool) {
        let _ = rustix::net::sockopt::set_tcp_cork(self.socket(), is_corked);
    }
}
