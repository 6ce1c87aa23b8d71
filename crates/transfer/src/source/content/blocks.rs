//! Sends hashes of the blocks of a large file, in the place of the content. The destination answers
//! which blocks differ from its version of the file.

use super::ContentSender;
use crate::block::{BLOCKS_MAX, HASH_BYTES, for_each_block};
use crate::error::Error;
use crate::message::{BlocksPlace, ToDestination};
use crate::source::frame_writer::FrameWriter;
use crate::source::large_file::{Extent, LargeFile};
use crate::times::Activity;
use rustix::io::Errno;
use std::sync::atomic::Ordering::Relaxed;

/// A message is full with blocks of this many bytes. The destination compares all blocks of a
/// message before it answers.
const BATCH_BYTES: u64 = 4 << 20;

/// The blocks of the next message.
struct Batch {
    place: BlocksPlace,
    bytes: u64,
    lengths: Vec<u32>,
    hashes: Vec<u8>,
}

impl Batch {
    fn new(place: BlocksPlace) -> Self {
        let hashes = Vec::with_capacity(BLOCKS_MAX * HASH_BYTES);
        Self { place, bytes: 0, lengths: Vec::new(), hashes }
    }

    fn is_full(&self) -> bool {
        self.bytes >= BATCH_BYTES || self.lengths.len() == BLOCKS_MAX
    }
}

impl<W: FrameWriter> ContentSender<'_, W> {
    /// Sends the hashes of a range of a file, and returns how many bytes there were, and why the
    /// others cannot be read.
    pub(super) fn send_hashes(
        &mut self,
        file: &LargeFile,
        extent: &Extent,
    ) -> Result<(u64, Option<Errno>), Error> {
        let (key, offset) = (self.settings.block_key, extent.range.start);
        let place = BlocksPlace { id: file.id, attempt: extent.attempt, offset };
        let mut batch = Batch::new(place);
        let (opened, range) = (&file.file, extent.range.clone());
        let read = for_each_block(opened, range, file.delta, |block| -> Result<(), Error> {
            batch.bytes += block.len() as u64;
            batch.lengths.push(block.len() as u32);
            batch.hashes.extend_from_slice(&key.hash(block));
            if batch.is_full() {
                self.send_batch(file, &mut batch)?;
            }
            Ok(())
        })?;
        self.send_batch(file, &mut batch)?;
        Ok(read)
    }

    /// Sends the hashes of a batch. The next batch begins at the end of this batch.
    fn send_batch(&mut self, file: &LargeFile, batch: &mut Batch) -> Result<(), Error> {
        if batch.lengths.is_empty() {
            return Ok(());
        }
        let place = batch.place;
        let offset = place.offset + batch.bytes;
        let next = Batch::new(BlocksPlace { offset, ..place });
        let Batch { bytes, lengths, hashes, .. } = std::mem::replace(batch, next);
        // Before the destination can answer.
        file.begin_comparison(place.offset..offset);
        self.watch.lap(Activity::Storage);
        self.to.write_frame(&ToDestination::Blocks { place, lengths }, &hashes)?;
        self.jobs.compared_bytes().fetch_add(bytes, Relaxed);
        self.count_sent(hashes.len() as u64, hashes.len() as u64);
        Ok(())
    }
}
