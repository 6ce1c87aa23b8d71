//! Receives a request body into a file.
//!
//! A plain body of known length goes by [`haul::Receiver::receive_into_file`], without passing
//! through this program's memory; any other is read and written.

use crate::upload_file::UploadFile;
use haul::Receiver;
use haul_http::chunked::{Chunked, Piece};
use haul_http::request::BodyLength;
use haul_http::status::Status;
use haul_server::stream::Stream;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Body bytes that one connection receives before others have their turn.
const TURN_BYTES: u64 = 1 << 20;
/// The size of a read, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// A request body on its way into a file.
#[derive(Debug)]
pub struct BodyReceiver {
    file: UploadFile,
    method: Method,
    /// Bytes in the file.
    received: u64,
    bytes_max: u64,
}

/// How the body is received and how its end is known.
#[derive(Debug)]
enum Method {
    /// Into the file without a copy here, until `len` bytes.
    Direct { receiver: Box<Receiver<Arc<OwnedFd>>>, len: u64 },
    /// Read and written, until `len` bytes.
    Read { len: u64 },
    /// Read and written, until the last chunk.
    Chunked(Chunked),
}

/// Why [`BodyReceiver::receive`] returned before the body was complete.
#[derive(Debug)]
pub enum Stop {
    /// The socket is empty.
    Blocked,
    /// The connection has had its turn.
    Yield,
    /// The body is refused with this status.
    Refused(Status),
    /// The file cannot be written.
    Unwritable(io::Error),
    /// The connection failed or ended.
    Broken,
}

impl BodyReceiver {
    /// A body of this length, of at most `bytes_max`.
    pub fn new(
        file: UploadFile,
        stream: &Stream,
        body: BodyLength,
        bytes_max: u64,
    ) -> io::Result<Self> {
        let method = match body {
            BodyLength::Chunked => Method::Chunked(Chunked::default()),
            BodyLength::Bytes(len) if stream.is_tls() => Method::Read { len },
            BodyLength::Bytes(len) => {
                // What the receiver holds back belongs to this body.
                let receiver = Receiver::new(Arc::clone(stream.socket()))?;
                Method::Direct { receiver: Box::new(receiver), len }
            }
        };
        Ok(Self { file, method, received: 0, bytes_max })
    }

    /// The bytes received so far.
    pub fn received_bytes(&self) -> u64 {
        self.received
    }

    /// The file with what was received.
    pub fn into_file(self) -> UploadFile {
        self.file
    }

    /// Receives until the body is complete. `input` holds bytes of the connection that were read
    /// already; those after the body stay there.
    pub fn receive(&mut self, stream: &mut Stream, input: &mut Vec<u8>) -> Result<(), Stop> {
        let turn_ends = self.received + TURN_BYTES;
        loop {
            if self.write_buffered(input)? {
                return Ok(());
            }
            if self.received >= turn_ends {
                return Err(Stop::Yield);
            }
            if let Method::Direct { receiver, len } = &mut self.method {
                let file = self.file.file().map_err(Stop::Unwritable)?;
                match receiver.receive_into_file(file, self.received..*len) {
                    Ok(0) => return Err(Stop::Broken),
                    Ok(count) => self.received += count,
                    Err(haul::Error::WouldBlock) => return Err(Stop::Blocked),
                    Err(error) => {
                        let error = io::Error::from(error);
                        return Err(match error.kind() {
                            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                                Stop::Broken
                            }
                            _ => Stop::Unwritable(error),
                        });
                    }
                }
            } else {
                input.reserve(BUFFER_BYTES);
                match stream.receive(input) {
                    Ok(0) => return Err(Stop::Broken),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Err(Stop::Blocked);
                    }
                    Err(_) => return Err(Stop::Broken),
                }
            }
        }
    }

    /// Writes what was read already; true once the body is complete.
    fn write_buffered(&mut self, input: &mut Vec<u8>) -> Result<bool, Stop> {
        match &mut self.method {
            Method::Direct { len, .. } | Method::Read { len } => {
                let left = usize::try_from(*len - self.received).unwrap_or(usize::MAX);
                let count = left.min(input.len());
                write(&self.file, &input[..count], &mut self.received)?;
                input.drain(..count);
                Ok(self.received == *len)
            }
            Method::Chunked(chunked) => {
                let mut at = 0;
                loop {
                    match chunked.next(input, at) {
                        Piece::Data(range) => {
                            if self.received + range.len() as u64 > self.bytes_max {
                                return Err(Stop::Refused(Status::CONTENT_TOO_LARGE));
                            }
                            at = range.end;
                            write(&self.file, &input[range], &mut self.received)?;
                        }
                        Piece::More => {
                            input.clear();
                            let left = self.bytes_max - self.received;
                            if chunked.announced_bytes() > left {
                                return Err(Stop::Refused(Status::CONTENT_TOO_LARGE));
                            }
                            return Ok(false);
                        }
                        Piece::End(end) => {
                            input.drain(..end);
                            return Ok(true);
                        }
                        Piece::Malformed => return Err(Stop::Refused(Status::BAD_REQUEST)),
                    }
                }
            }
        }
    }
}

fn write(file: &UploadFile, bytes: &[u8], at: &mut u64) -> Result<(), Stop> {
    file.file().and_then(|file| file.write_all_at(bytes, *at)).map_err(Stop::Unwritable)?;
    *at += bytes.len() as u64;
    Ok(())
}
