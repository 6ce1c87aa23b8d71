//! Writes content to the frames of a chain.

use crate::chain::{Body, Frame, FrameQueue, OpenFile};
use crate::error::Error;
use crate::frame;
use crate::message::ToDestination;
use crate::source::frame_writer::FrameWriter;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Writes content to the frames of a chain.
pub struct ChainWriter<'q> {
    queue: &'q FrameQueue,
    /// The file that was opened last, by its entry and its descriptor.
    last_file: Option<((u64, i32), Arc<OpenFile>)>,
}

impl<'q> ChainWriter<'q> {
    /// A writer to these frames.
    pub fn new(queue: &'q FrameQueue) -> Self {
        Self { queue, last_file: None }
    }

    fn push(&self, head: Vec<u8>, body: Body) -> Result<(), Error> {
        let is_taken = self.queue.push(Frame { head, body });
        let ended = || Error::Connection(std::io::ErrorKind::BrokenPipe.into());
        if is_taken { Ok(()) } else { Err(ended()) }
    }
}

impl FrameWriter for ChainWriter<'_> {
    fn write_frame(&mut self, message: &ToDestination, data: &[u8]) -> Result<(), Error> {
        self.push(frame::head(message, data.len())?, Body::Memory(data.to_vec()))
    }

    fn write_compressed_frame(
        &mut self,
        message: &ToDestination,
        data: &[u8],
    ) -> Result<(), Error> {
        let mut frame = Vec::new();
        frame::write_compressed(&mut frame, message, data)?;
        let data = frame.split_off(frame.len() - data.len());
        self.push(frame, Body::Memory(data))
    }

    fn sends_files(&self) -> bool {
        true
    }

    fn write_file_frame(
        &mut self,
        message: &ToDestination,
        file: &File,
        range: Range<u64>,
    ) -> Result<(), Error> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let head = frame::head(message, length)?;
        let ToDestination::Chunk { id, .. } = message else {
            return Err(Error::Protocol("a file that is not a chunk"));
        };
        let key = (*id, file.as_raw_fd());
        if self.last_file.as_ref().is_none_or(|(last, _)| *last != key) {
            self.last_file = self.queue.open_file(file).map(|open| (key, open));
        }
        if let Some((_, open)) = &self.last_file {
            return self.push(head, Body::File(Arc::clone(open), range));
        }
        let mut data = vec![0; length];
        // If the file ends earlier, the checksum of the data is wrong.
        let _ = file.read_exact_at(&mut data, range.start);
        self.push(head, Body::Memory(data))
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
