//! What the source writes frames to.

use crate::direct::DirectWriter;
use crate::error::Error;
use crate::message::ToDestination;
use std::fs::File;
use std::ops::Range;

/// A stream of frames.
pub trait FrameWriter {
    /// Writes a frame as a whole.
    fn write_frame(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error>;

    /// Writes a frame whose data is compressed.
    fn write_compressed_frame(&mut self, message: &ToDestination, data: &[u8])
    -> Result<(), Error>;

    /// Whether a file need not pass through this program.
    fn sends_files(&self) -> bool {
        false
    }

    /// Writes a frame whose data is a range of a file.
    fn write_file_frame(
        &mut self,
        _message: &ToDestination,
        _file: &File,
        _range: Range<u64>,
    ) -> Result<(), Error> {
        Err(Error::Connection(std::io::ErrorKind::Unsupported.into()))
    }

    /// Sends everything that waits in memory.
    fn flush(&mut self) -> Result<(), Error>;
}

impl FrameWriter for DirectWriter {
    fn write_frame(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error> {
        self.write_frame(message, data)
    }

    fn write_compressed_frame(
        &mut self,
        message: &ToDestination,
        data: &[u8],
    ) -> Result<(), Error> {
        self.write_compressed_frame(message, data)
    }

    fn sends_files(&self) -> bool {
        self.sends_files()
    }

    fn write_file_frame(
        &mut self,
        message: &ToDestination,
        file: &File,
        range: Range<u64>,
    ) -> Result<(), Error> {
        self.write_file_frame(message, file, range)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.flush()
    }
}
