//! Sends the content of files through one stream.

mod blocks;

use crate::block::BlockKey;
use crate::checksum::Checksum;
use crate::error::Error;
use crate::frame::DATA_BYTES_MAX;
use crate::message::{Packed, ToDestination};
use crate::options::{Delta, Options, Verify};
use crate::progress::Progress;
use crate::read_ahead::read_ahead;
use crate::setup::OnFile;
use crate::source::compressor::Compressor;
use crate::source::found::FoundFile;
use crate::source::frame_writer::FrameWriter;
use crate::source::jobs::{Jobs, StreamKind, Work};
use crate::source::large_file::{Completion, Extent, LargeFile, Step, changed};
use crate::source::pace::Pace;
use crate::source::reading::{
    Content, READS_MAX, SMALL_FILE_BYTES, is_small, open, read_at, read_small,
};
use crate::source::walk::failure;
use crate::times::{Activity, Stopwatch};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The bytes of a chunk: they stay in the second cache of a CPU between the read, the checksum and
/// the send.
const CHUNK_BYTES: usize = 256 << 10;

/// What all streams share.
pub struct ContentSettings {
    pub verify: Verify,
    pub compress: bool,
    pub pace: Pace,
    /// Called with the path of each file that is sent.
    pub on_file: OnFile,
    pub progress: Progress,
    /// The key of all hashes of blocks.
    pub block_key: BlockKey,
}

impl ContentSettings {
    /// The settings of a transfer. Fails if the kernel refuses random bytes.
    pub fn new(
        options: &Options,
        pace: Pace,
        on_file: OnFile,
        progress: Progress,
    ) -> Result<Self, Error> {
        let Options { verify, compress, .. } = *options;
        let block_key = BlockKey::random().map_err(Error::Random)?;
        Ok(Self { verify, compress, pace, on_file, progress, block_key })
    }
}

/// Sends content through one stream.
pub struct ContentSender<'s, W> {
    jobs: &'s Jobs,
    kind: StreamKind,
    settings: &'s ContentSettings,
    to: W,
    /// The bytes of content that all streams of this kind sent.
    sent: &'s AtomicU64,
    /// What this stream may send before it ends.
    bytes_left: u64,
    /// The data of the next frame, [`DATA_BYTES_MAX`] at most.
    buffer: Vec<u8>,
    filled: usize,
    /// The files in the buffer.
    pack: Vec<Packed>,
    /// `None` if nothing is compressed.
    compressor: Option<Compressor>,
    watch: Stopwatch<'s>,
    /// Called before the first work.
    on_first: Option<Box<dyn FnOnce() + 's>>,
}

impl<'s, W: FrameWriter> ContentSender<'s, W> {
    /// A sender that ends after about `bytes_max` bytes.
    pub fn new(
        jobs: &'s Jobs,
        kind: StreamKind,
        settings: &'s ContentSettings,
        to: W,
        sent: &'s AtomicU64,
        bytes_max: u64,
    ) -> Self {
        let (buffer, pack) = (vec![0; DATA_BYTES_MAX], Vec::new());
        // Without memory for a compressor, content is sent as it is.
        let compressor = settings.compress.then(|| Compressor::new(DATA_BYTES_MAX).ok()).flatten();
        Self {
            jobs,
            kind,
            settings,
            to,
            sent,
            bytes_left: bytes_max,
            buffer,
            filled: 0,
            pack,
            compressor,
            watch: Stopwatch::new(settings.progress.clocks()),
            on_first: None,
        }
    }

    /// Sets what is called before the first work.
    pub fn with_first(mut self, on_first: impl FnOnce() + 's) -> Self {
        self.on_first = Some(Box::new(on_first));
        self
    }

    /// Sends until everything was sent, until this stream sent what it may, or until a failure,
    /// which becomes the failure of the session.
    pub fn run(mut self) {
        while self.bytes_left > 0 {
            let clocks = self.settings.progress.clocks();
            let Some(work) = self.jobs.next(self.kind, clocks) else { return };
            self.watch.skip();
            if let Some(on_first) = self.on_first.take() {
                on_first();
            }
            let sent = match work {
                Work::Small(files) => self.send_small(files),
                Work::Large(file, Step::Send(extent)) => self.send_extent(&file, &extent),
                Work::Large(file, Step::Complete) => self.complete(file),
                Work::Large(_, Step::Nothing) => Ok(()),
            };
            self.watch.lap(Activity::Stream);
            self.jobs.end_work(self.kind);
            if let Err(error) = sent {
                return self.jobs.fail(error);
            }
        }
        let _ = self.write(&ToDestination::StreamDone);
    }

    /// Writes a message with the data of the buffer.
    fn write(&mut self, message: &ToDestination) -> Result<(), Error> {
        let bytes = std::mem::take(&mut self.filled);
        let data = &self.buffer[..bytes];
        self.watch.lap(Activity::Storage);
        let written = if let Some(compressor) = &mut self.compressor {
            compressor.write(&mut self.to, message, data)?
        } else {
            self.to.write_frame(message, data)?;
            bytes
        };
        self.count(bytes, written);
        Ok(())
    }

    /// Counts bytes of content, which had so many bytes in the stream.
    fn count(&mut self, bytes: usize, written: usize) {
        self.settings.progress.add_bytes(bytes as u64);
        self.count_sent(bytes as u64, written as u64);
    }

    /// Counts bytes that were sent, which had so many bytes in the stream.
    fn count_sent(&mut self, bytes: u64, written: u64) {
        self.watch.lap(Activity::Stream);
        let time = self.settings.pace.take(written);
        if time > Duration::ZERO {
            self.jobs.wait_for_end(time);
            self.watch.lap(Activity::Limit);
        }
        self.sent.fetch_add(bytes, Relaxed);
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
    }

    fn send_small(&mut self, files: Vec<FoundFile>) -> Result<(), Error> {
        for file in files {
            self.pack(file)?;
        }
        self.send_pack()?;
        self.to.flush()?;
        self.jobs.complete();
        Ok(())
    }

    /// Adds a file to the pack.
    fn pack(&mut self, found: FoundFile) -> Result<(), Error> {
        if self.filled + SMALL_FILE_BYTES > DATA_BYTES_MAX {
            self.send_pack()?;
        }
        let path = |found: &FoundFile| found.folder.path_of(&found.name);
        (self.settings.on_file)(&found.relative_path());
        let room = &mut self.buffer[self.filled..];
        let read = open(&found).and_then(|(file, stat)| {
            let content = is_small(&stat).then(|| read_small(&file, stat, room)).transpose()?;
            Ok((file, stat, content))
        });
        match read {
            Ok((_, _, Some(Content { bytes, mtime, has_changed }))) => {
                let content = &self.buffer[self.filled..self.filled + bytes];
                let checksum = Checksum::of(content, self.settings.verify);
                self.filled += bytes;
                self.pack.push(Packed { id: found.id, bytes: bytes as u32, checksum, mtime });
                if has_changed {
                    // Before the content, after which the destination may be complete.
                    let failed = ToDestination::Failed(changed(&path(&found)));
                    self.to.write_frame(&failed, &[])?;
                }
                Ok(())
            }
            // The file grew since the walk.
            Ok((file, stat, None)) => {
                let path = path(&found);
                self.jobs.add_large(LargeFile::new(found, path, file, stat, Delta::No));
                Ok(())
            }
            Err(errno) => {
                self.send_pack()?;
                let error = failure(&path(&found), errno);
                self.write(&ToDestination::Unreadable { id: found.id, bytes: 0, error })
            }
        }
    }

    fn send_pack(&mut self) -> Result<(), Error> {
        if self.pack.is_empty() {
            return Ok(());
        }
        let items = std::mem::take(&mut self.pack);
        self.settings.progress.add_files(items.len() as u64);
        self.write(&ToDestination::Pack(items))
    }

    fn send_extent(&mut self, file: &Arc<LargeFile>, extent: &Extent) -> Result<(), Error> {
        let (sent, failure) = if extent.sends_hashes {
            self.send_hashes(file, extent)?
        } else {
            self.send_chunks(file, extent)?
        };
        self.to.flush()?;
        if file.record(extent, sent, failure) { self.complete(Arc::clone(file)) } else { Ok(()) }
    }

    /// Sends a range of a file, and returns how many bytes there were, and why the others cannot be
    /// read.
    fn send_chunks(
        &mut self,
        file: &LargeFile,
        extent: &Extent,
    ) -> Result<(u64, Option<Errno>), Error> {
        let Extent { attempt, range, .. } = extent;
        // If the file changes between the checksum and the send, the destination discards the
        // attempt. The last attempt sends what the checksum is of.
        let sends_file = self.to.sends_files() && *attempt < READS_MAX && self.compressor.is_none();
        let mut at = range.start;
        read_ahead(&file.file, range.clone());
        while at < range.end {
            let wanted = usize::try_from(range.end - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let count = match read_at(&file.file, &mut self.buffer[..wanted], at) {
                Ok(count) => count,
                Err(errno) => return Ok((at - range.start, Some(errno))),
            };
            let checksum = Checksum::of(&self.buffer[..count], self.settings.verify);
            if count > 0 {
                let (id, attempt) = (file.id, *attempt);
                let chunk = ToDestination::Chunk { id, attempt, offset: at, checksum };
                if sends_file {
                    let range = at..at + count as u64;
                    self.watch.lap(Activity::Storage);
                    self.to.write_file_frame(&chunk, &file.file, range)?;
                    self.count(count, count);
                } else {
                    self.filled = count;
                    self.write(&chunk)?;
                }
            }
            at += count as u64;
            if count < wanted {
                break;
            }
        }
        Ok((at - range.start, None))
    }

    fn complete(&mut self, file: Arc<LargeFile>) -> Result<(), Error> {
        let id = file.id;
        match file.complete() {
            Completion::Again => self.jobs.repeat(file),
            Completion::Messages(messages) => {
                for message in messages {
                    self.write(&message)?;
                }
                self.to.flush()?;
                self.settings.progress.add_files(1);
                self.jobs.complete_large(id);
            }
        }
        Ok(())
    }
}
