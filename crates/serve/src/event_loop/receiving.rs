//! The body of a request on its way into a file.
//!
//! Where the client has said how long it is and nothing is encrypted, it goes by [`haul::Receiver::receive_into_file`] and not
//! through the program's memory; else it is read and written.

use crate::event_loop::stream::Stream;
use haul::Receiver;
use haul_fs::AtomicFile;
use haul_http::chunked::{Chunked, Piece};
use haul_http::request::BodyLength;
use haul_http::status::Status;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// What one connection is taken of a body before others have their turn, in bytes.
const TURN_BYTES: u64 = 1 << 20;
/// Read at a time, where it is read.
const BUFFER_BYTES: usize = 64 << 10;

/// A body that is being received.
#[derive(Debug)]
pub struct Receiving {
    upload: AtomicFile,
    way: Way,
    /// Bytes that are in the file.
    received: u64,
    bytes_max: u64,
}

/// How it comes, and how its end is known.
#[derive(Debug)]
enum Way {
    /// Straight into the file, until there are so many bytes.
    Spliced { receiver: Box<Receiver<OwnedFd>>, len: u64 },
    /// Read, until there are so many bytes.
    Read { len: u64 },
    /// Read, until it says that it ends.
    Chunked(Chunked),
}

/// How far it has come.
#[derive(Debug)]
pub enum Progress {
    /// All of it is in the file.
    Done,
    /// More is to come.
    Blocked,
    /// It has had its turn.
    Turn,
    /// It is not taken, for this reason.
    Refused(Status),
    /// The client has gone.
    Broken,
}

impl Receiving {
    /// A body of this length, at most so long.
    pub fn new(
        upload: AtomicFile,
        stream: &Stream,
        body: BodyLength,
        bytes_max: u64,
    ) -> io::Result<Self> {
        let way = match body {
            BodyLength::Chunked => Way::Chunked(Chunked::default()),
            BodyLength::Bytes(len) if stream.is_tls() => Way::Read { len },
            BodyLength::Bytes(len) => {
                // Its own descriptor of the same socket: what it holds back is this body's and no other's.
                let receiver = Receiver::new(stream.as_fd().try_clone_to_owned()?)?;
                Way::Spliced { receiver: Box::new(receiver), len }
            }
        };
        Ok(Self { upload, way, received: 0, bytes_max })
    }

    /// What was received.
    pub fn into_upload(self) -> AtomicFile {
        self.upload
    }

    /// Goes as far as it can. `input` is what has been read of the connection; what is not this body's stays there.
    pub fn go_on(&mut self, stream: &mut Stream, input: &mut Vec<u8>) -> Progress {
        let turn_ends = self.received + TURN_BYTES;
        loop {
            match self.take(input) {
                Ok(true) => return Progress::Done,
                Ok(false) => {}
                Err(status) => return Progress::Refused(status),
            }
            if self.received >= turn_ends {
                return Progress::Turn;
            }
            if let Way::Spliced { receiver, len } = &mut self.way {
                match receiver.receive_into_file(self.upload.file(), self.received..*len) {
                    Ok(0) => return Progress::Broken,
                    Ok(count) => self.received += count,
                    Err(haul::Error::WouldBlock) => return Progress::Blocked,
                    Err(error) => match io::Error::from(error).kind() {
                        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                            return Progress::Broken;
                        }
                        _ => return Progress::Refused(Status::INSUFFICIENT_STORAGE),
                    },
                }
            } else {
                input.reserve(BUFFER_BYTES);
                match stream.receive(input) {
                    Ok(0) => return Progress::Broken,
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Progress::Blocked;
                    }
                    Err(_) => return Progress::Broken,
                }
            }
        }
    }

    /// Takes what has been read; true where the body is whole.
    fn take(&mut self, input: &mut Vec<u8>) -> Result<bool, Status> {
        match &mut self.way {
            Way::Spliced { len, .. } | Way::Read { len } => {
                let left = usize::try_from(*len - self.received).unwrap_or(usize::MAX);
                let count = left.min(input.len());
                write(self.upload.file(), &input[..count], &mut self.received)?;
                input.drain(..count);
                Ok(self.received == *len)
            }
            Way::Chunked(chunked) => {
                let mut at = 0;
                loop {
                    match chunked.next(input, at) {
                        Piece::Data(range) => {
                            if self.received + range.len() as u64 > self.bytes_max {
                                return Err(Status::CONTENT_TOO_LARGE);
                            }
                            at = range.end;
                            write(self.upload.file(), &input[range], &mut self.received)?;
                        }
                        Piece::More => {
                            input.clear();
                            return Ok(false);
                        }
                        Piece::End(end) => {
                            input.drain(..end);
                            return Ok(true);
                        }
                        Piece::Malformed => return Err(Status::BAD_REQUEST),
                    }
                }
            }
        }
    }
}

fn write(file: &File, bytes: &[u8], at: &mut u64) -> Result<(), Status> {
    file.write_all_at(bytes, *at).map_err(|_| Status::INSUFFICIENT_STORAGE)?;
    *at += bytes.len() as u64;
    Ok(())
}
