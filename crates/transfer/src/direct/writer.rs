//! A direct stream as the end that sends writes to it.

use crate::error::Error;
use crate::frame;
use haul::{SendAllError, Sender};
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// A stream of frames.
pub enum DirectWriter {
    /// This program encrypts.
    Encrypts(Box<dyn Write + Send>),
    /// The kernel encrypts, or nothing does, so that files need not pass through this program.
    SendsFiles(Box<Sender<TcpStream>>),
}

impl fmt::Debug for DirectWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Encrypts(_) => "Encrypts",
            Self::SendsFiles(_) => "SendsFiles",
        })
    }
}

impl DirectWriter {
    /// Writes a frame.
    pub fn write_frame(&mut self, message: &impl Serialize, data: &[u8]) -> Result<(), Error> {
        match self {
            Self::Encrypts(stream) => frame::write(stream, message, data),
            Self::SendsFiles(sender) => frame::write(&mut sender.socket(), message, data),
        }
    }

    /// Writes a frame whose data is compressed.
    pub fn write_compressed_frame(
        &mut self,
        message: &impl Serialize,
        data: &[u8],
    ) -> Result<(), Error> {
        match self {
            Self::Encrypts(stream) => frame::write_compressed(stream, message, data),
            Self::SendsFiles(sender) => {
                frame::write_compressed(&mut sender.socket(), message, data)
            }
        }
    }

    /// Whether a file need not pass through this program.
    pub fn sends_files(&self) -> bool {
        matches!(self, Self::SendsFiles(_))
    }

    /// Writes a frame whose data is a range of a file. If the file ends before the range does,
    /// zeros follow, and the checksum of the data is wrong.
    pub fn write_file_frame(
        &mut self,
        message: &impl Serialize,
        file: &File,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        self.write_head_and_file(&frame::head(message, length)?, file, range)
    }

    /// Writes a frame whose beginning is encoded.
    pub fn write_parts(&mut self, head: &[u8], data: &[u8]) -> Result<(), Error> {
        match self {
            Self::Encrypts(stream) => frame::write_parts(stream, head, data),
            Self::SendsFiles(sender) => frame::write_parts(&mut sender.socket(), head, data),
        }
    }

    /// Writes a frame whose beginning is encoded, and whose data is a range of a file. If this
    /// program encrypts, it reads the range. If the file ends before the range does, zeros follow,
    /// and the checksum of the data is wrong.
    pub fn write_head_and_file(
        &mut self,
        head: &[u8],
        file: &File,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let failed = |error: SendAllError| Error::Connection(error.into());
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let Self::SendsFiles(sender) = self else {
            let mut data = vec![0; length];
            read_range(file, &mut data, range.start).map_err(Error::Connection)?;
            return self.write_parts(head, &data);
        };
        sender.send_more_all(head).map_err(failed)?;
        match sender.send_file_all(file, range) {
            Err(SendAllError { error: haul::Error::Ended { .. }, sent_bytes, .. }) => {
                let zeros = vec![0; length - sent_bytes as usize];
                sender.send_all(&zeros).map_err(failed)
            }
            sent => sent.map_err(failed),
        }
    }

    /// Sends everything that waits in memory.
    pub fn flush(&mut self) -> Result<(), Error> {
        match self {
            Self::Encrypts(stream) => stream.flush().map_err(Error::Connection),
            Self::SendsFiles(_) => Ok(()),
        }
    }
}

/// Fills a buffer from a place in a file. Behind the end of the file, the buffer stays as it is.
fn read_range(file: &File, data: &mut [u8], mut at: u64) -> io::Result<()> {
    let mut left = data;
    while !left.is_empty() {
        match file.read_at(left, at) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                at += count as u64;
                left = &mut left[count..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
