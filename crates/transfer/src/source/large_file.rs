//! A large file, whose ranges are sent by all streams at the same time.

use crate::attributes;
use crate::error::Error;
use crate::message::{BlocksPlace, ToDestination};
use crate::options::Delta;
use crate::source::found::FoundFile;
use crate::source::reading::{READS_MAX, is_same, next_data, version};
use crate::summary::FileError;
use rustix::fs::Stat;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The largest range of a file whose blocks are cut by content. Each range begins with a block that
/// the destination rarely has.
const ROLLING_RANGE_BYTES: u64 = 64 << 20;

/// A large file that is being sent.
#[derive(Debug)]
pub struct LargeFile {
    /// The entry.
    pub id: u64,
    /// The path, for messages.
    pub path: Vec<u8>,
    pub file: File,
    /// How the file is compared with the version at the destination; [`Delta::No`] for a file that
    /// is sent whole.
    pub delta: Delta,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    attempt: u32,
    /// The file when the attempt began.
    stat: Stat,
    /// The data that was found and not taken. The search for the next hole may read the whole
    /// index of the file, so each range of data is searched once.
    data: Range<u64>,
    /// The size, unless a read found an earlier end: files of /sys and of some file systems are
    /// shorter than their size.
    size: u64,
    /// The ranges that the destination has, in order.
    held: Vec<Range<u64>>,
    /// The blocks whose hashes were sent and that the destination did not answer: start to end.
    unanswered: HashMap<u64, u64>,
    /// The ranges that differ at the destination, and that were not taken.
    differing: VecDeque<Range<u64>>,
    /// The ranges that are being sent.
    ranges: usize,
    /// The bytes that were sent, of all attempts.
    bytes: u64,
    /// Why the file cannot be read.
    failure: Option<Errno>,
    /// Whether no range is left to be taken.
    is_taken: bool,
    /// Whether a stream completes the attempt.
    is_completed: bool,
}

impl Progress {
    fn new(attempt: u32, stat: Stat) -> Self {
        Self {
            attempt,
            stat,
            data: 0..0,
            size: stat.st_size as u64,
            held: Vec::new(),
            unanswered: HashMap::new(),
            differing: VecDeque::new(),
            ranges: 0,
            bytes: 0,
            failure: None,
            is_taken: false,
            is_completed: false,
        }
    }

    /// Removes the ranges that the destination has from the beginning of the data.
    fn skip_held(&mut self) -> &Range<u64> {
        for held in &self.held {
            if held.contains(&self.data.start) {
                self.data.start = held.end.min(self.data.end);
            }
        }
        &self.data
    }

    /// The beginning of the next range that the destination has.
    fn next_held(&self, at: u64) -> u64 {
        let next = self.held.iter().map(|held| held.start).find(|&start| start > at);
        next.unwrap_or(u64::MAX)
    }

    /// Takes the next range that differs at the destination.
    fn take_differing(&mut self, bytes_max: u64) -> Option<Range<u64>> {
        let first = self.differing.front_mut()?;
        let end = first.end.min(first.start.saturating_add(bytes_max));
        let range = first.start..end;
        first.start = end;
        if first.is_empty() {
            self.differing.pop_front();
        }
        Some(range)
    }

    /// Takes the completion of the attempt, once all ranges were sent.
    fn take_completion(&mut self) -> bool {
        let is_sent = self.is_taken
            && self.ranges == 0
            && self.unanswered.is_empty()
            && self.differing.is_empty();
        is_sent && !std::mem::replace(&mut self.is_completed, true)
    }
}

/// A range of a large file.
#[derive(Debug)]
pub struct Extent {
    pub attempt: u32,
    pub range: Range<u64>,
    /// Whether hashes of blocks are sent, and not the content.
    pub sends_hashes: bool,
}

/// What a stream does next for a large file.
#[derive(Debug)]
pub enum Step {
    Send(Extent),
    /// All ranges were sent.
    Complete,
    /// Other streams send the last ranges, or the destination compares blocks.
    Nothing,
}

/// What follows after all ranges were sent.
pub enum Completion {
    /// The file changed, so all ranges are sent again.
    Again,
    /// The messages that end the file.
    Messages(Vec<ToDestination>),
}

impl LargeFile {
    /// A file that was found and opened. The ranges that the destination has are left out, if they
    /// are of the present version.
    pub fn new(found: FoundFile, path: Vec<u8>, file: File, stat: Stat, delta: Delta) -> Self {
        let is_listed_version = version(&stat) == found.version;
        let (attempt, held) = if is_listed_version { (1, found.held) } else { (2, Vec::new()) };
        let progress = Progress { held, ..Progress::new(attempt, stat) };
        let delta = if found.is_comparable { delta } else { Delta::No };
        Self { id: found.id, path, file, delta, progress: Mutex::new(progress) }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next range, of at most so many bytes. Holes are left out.
    pub fn step(&self, bytes_max: u64) -> Step {
        let mut progress = self.progress();
        if let Some(range) = progress.take_differing(bytes_max) {
            progress.ranges += 1;
            let attempt = progress.attempt;
            return Step::Send(Extent { attempt, range, sends_hashes: false });
        }
        while !progress.is_taken && progress.skip_held().is_empty() {
            match next_data(&self.file, progress.data.end, progress.size) {
                Ok(Some(data)) => progress.data = data,
                Ok(None) => progress.is_taken = true,
                Err(errno) => {
                    progress.failure = Some(errno);
                    progress.is_taken = true;
                }
            }
        }
        if !progress.is_taken {
            let bytes_max = match self.delta {
                Delta::Rolling => ROLLING_RANGE_BYTES,
                Delta::No | Delta::Fixed => bytes_max,
            };
            let Range { start, end } = progress.data;
            // File systems share aligned blocks.
            let bytes_max = bytes_max - start % bytes_max;
            let end = end.min(start + bytes_max).min(progress.next_held(start));
            progress.data.start = end;
            progress.ranges += 1;
            return Step::Send(Extent {
                attempt: progress.attempt,
                range: start..end,
                sends_hashes: self.delta != Delta::No,
            });
        }
        if progress.take_completion() { Step::Complete } else { Step::Nothing }
    }

    /// Records that the hashes of these blocks are sent next.
    pub fn begin_comparison(&self, range: Range<u64>) {
        self.progress().unanswered.insert(range.start, range.end);
    }

    /// The end of these blocks, if the destination compares them now.
    pub fn comparison_end(&self, place: BlocksPlace) -> Option<u64> {
        let progress = self.progress();
        let end = progress.unanswered.get(&place.offset).copied();
        end.filter(|_| place.attempt == progress.attempt)
    }

    /// Takes which of these blocks differ at the destination. Returns the bytes of the others, and
    /// whether a stream has work now.
    pub fn end_comparison(
        &self,
        place: BlocksPlace,
        ranges: Vec<(u64, u64)>,
    ) -> Result<(u64, bool), Error> {
        let mut progress = self.progress();
        let end = progress.unanswered.remove(&place.offset);
        let end = end.filter(|_| place.attempt == progress.attempt);
        let end = end.ok_or(Error::Protocol("an answer to nothing"))?;
        let (mut at, mut equal_bytes) = (place.offset, end - place.offset);
        for (start, stop) in ranges {
            if start < at || stop <= start || stop > end {
                return Err(Error::Protocol("blocks that are not in order"));
            }
            at = stop;
            equal_bytes -= stop - start;
            progress.differing.push_back(start..stop);
        }
        let has_work = !progress.differing.is_empty() || progress.unanswered.is_empty();
        Ok((equal_bytes, has_work))
    }

    /// Records that so many bytes of a range were sent or compared, and why the others cannot be
    /// read. Returns whether this stream completes the file.
    pub fn record(&self, extent: &Extent, bytes: u64, failure: Option<Errno>) -> bool {
        let mut progress = self.progress();
        progress.ranges -= 1;
        if !extent.sends_hashes {
            progress.bytes += bytes;
        }
        let end = extent.range.start + bytes;
        if failure.is_some() {
            progress.failure = failure;
            progress.is_taken = true;
        } else if end < extent.range.end {
            // The file ends there.
            progress.size = progress.size.min(end);
            progress.is_taken = true;
        }
        progress.take_completion()
    }

    /// Ends the file, or begins the next attempt.
    pub fn complete(&self) -> Completion {
        let mut progress = self.progress();
        let now = progress.failure.map_or_else(|| rustix::fs::fstat(&self.file), Err);
        let now = match now {
            Ok(now) => now,
            Err(errno) => {
                let error = crate::source::walk::failure(&self.path, errno);
                let (id, bytes) = (self.id, progress.bytes);
                return Completion::Messages(vec![ToDestination::Unreadable { id, bytes, error }]);
            }
        };
        let is_unchanged = is_same(&now, &progress.stat);
        if !is_unchanged && progress.attempt < READS_MAX {
            let bytes = progress.bytes;
            *progress = Progress { bytes, ..Progress::new(progress.attempt + 1, now) };
            return Completion::Again;
        }
        let done = ToDestination::FileDone {
            id: self.id,
            attempt: progress.attempt,
            bytes: progress.bytes,
            size: progress.size,
            mtime: attributes::mtime(&progress.stat),
        };
        let changed = (!is_unchanged).then(|| ToDestination::Failed(changed(&self.path)));
        Completion::Messages(changed.into_iter().chain([done]).collect())
    }
}

/// The error of a file that changed during each attempt to read it.
pub fn changed(path: &[u8]) -> FileError {
    FileError::new(path, &"it changed each time it was read: the copy may mix two versions")
}
