//! Compares hashes of blocks with the version of a file that is here, and copies the blocks that
//! are equal.

use crate::block::{BLOCK_BYTES_MAX, BLOCKS_MAX, BlockHash, BlockKey, HASH_BYTES};
use crate::destination::Shared;
use crate::destination::basis::Basis;
use crate::destination::committer::start_write_back;
use crate::destination::content::FILE_BYTES_MAX;
use crate::destination::partial_file::PartialFile;
use crate::destination::requested_file::RequestedFile;
use crate::error::Error;
use crate::message::{BlocksPlace, ToSource};
use crate::options::{Delta, Durable, Options};
use crate::source::split;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The bytes of equal blocks that are written by one call.
const RUN_BYTES_MAX: usize = 1 << 20;

/// Blocks of the new version, by their places, lengths and hashes.
struct Blocks<'m> {
    offset: u64,
    lengths: &'m [u32],
    hashes: &'m [BlockHash],
}

impl<'m> Blocks<'m> {
    /// The blocks of a message. Refuses blocks that no file has.
    fn new(offset: u64, lengths: &'m [u32], hashes: &'m [u8]) -> Result<Self, Error> {
        let (hashes, rest) = hashes.as_chunks::<HASH_BYTES>();
        let is_length = |&length: &u32| (1..=BLOCK_BYTES_MAX as u32).contains(&length);
        let is_allowed = rest.is_empty()
            && hashes.len() == lengths.len()
            && lengths.len() <= BLOCKS_MAX
            && lengths.iter().all(is_length);
        let blocks = Self { offset, lengths, hashes };
        let has_end = offset.checked_add(blocks.bytes()).is_some_and(|end| end <= FILE_BYTES_MAX);
        if is_allowed && has_end { Ok(blocks) } else { Err(Error::Protocol("blocks of no file")) }
    }

    fn bytes(&self) -> u64 {
        self.lengths.iter().copied().map(u64::from).sum()
    }
}

impl<W: Write> Shared<'_, W> {
    /// Takes the hashes of blocks, and answers which blocks differ from those that are here.
    pub fn take_blocks(
        &self,
        place: BlocksPlace,
        lengths: &[u32],
        hashes: &[u8],
    ) -> Result<(), Error> {
        let blocks = Blocks::new(place.offset, lengths, hashes)?;
        let file = self.tree().requested(place.id)?;
        if !file.is_comparable {
            return Err(Error::Protocol("blocks of a file that is sent whole"));
        }
        let ranges = self.copy_equal(&file, place.attempt, &blocks)?;
        if let Some(ranges) = &ranges {
            let differing: u64 = ranges.iter().map(|(start, end)| end - start).sum();
            let equal_bytes = blocks.bytes() - differing;
            self.progress.add_bytes(equal_bytes);
            self.tree().summary.bytes_equal += equal_bytes;
        }
        // The source sends nothing of a file that failed.
        let ranges = ranges.unwrap_or_default();
        self.answer(&ToSource::Differing { place, ranges })
    }

    /// Copies the blocks that are here, and returns the ranges of the others; `None` if content of
    /// the file is ignored.
    fn copy_equal(
        &self,
        file: &Arc<RequestedFile>,
        attempt: u32,
        blocks: &Blocks<'_>,
    ) -> Result<Option<Vec<(u64, u64)>>, Error> {
        let folder = self.tree().folders.get(file.place.folder)?;
        let basis = file.basis(|| self.open_basis(file, folder.ok()?.as_ref()));
        let key = self.block_key.get().ok_or(Error::Protocol("blocks without a key"))?;
        let copied = match self.partial(file, attempt)? {
            Some(Ok(partial)) => match &basis {
                Some(basis) => BlockCopier {
                    file,
                    partial: &partial,
                    basis,
                    key,
                    options: &self.options,
                    run: Run::default(),
                    buffer: vec![0; RUN_BYTES_MAX],
                    differing: Vec::new(),
                }
                .copy(blocks),
                None => Ok(vec![(blocks.offset, blocks.offset + blocks.bytes())]),
            },
            Some(Err(errno)) => Err(errno),
            None => return Ok(None),
        };
        match copied {
            Ok(ranges) => Ok(Some(ranges)),
            Err(errno) => self.fail_content(file, errno).map(|()| None),
        }
    }

    /// Opens what has the name of a file now, or the file of an earlier copy.
    fn open_basis(&self, file: &RequestedFile, folder: &OwnedFd) -> Option<Basis> {
        let name = &file.place.name;
        let delta = self.options.delta;
        if let Ok(basis) = Basis::open(folder, name, folder, delta) {
            return Some(basis);
        }
        let (copies, path) = {
            let tree = self.tree();
            let path = tree.folders.path_of(file.place.folder, name);
            (Arc::clone(&tree.earlier_copies), path)
        };
        let (earlier, _) = copies.find_version(&path)?;
        Basis::open(&earlier, split(&path).1, folder, delta).ok()
    }
}

/// Copies blocks that are equal to blocks of the basis, and collects the ranges of the others.
struct BlockCopier<'c> {
    file: &'c RequestedFile,
    partial: &'c PartialFile,
    basis: &'c Basis,
    key: &'c BlockKey,
    options: &'c Options,
    run: Run,
    /// The content of the run, and room for the next block.
    buffer: Vec<u8>,
    differing: Vec<(u64, u64)>,
}

/// Equal blocks that follow each other, and that were not written.
#[derive(Default)]
struct Run {
    /// The place of the blocks in the basis.
    from: u64,
    /// The place of the blocks in the new version.
    at: u64,
    bytes: usize,
}

impl BlockCopier<'_> {
    /// Copies the blocks, and returns the ranges that differ.
    fn copy(mut self, blocks: &Blocks<'_>) -> rustix::io::Result<Vec<(u64, u64)>> {
        let mut at = blocks.offset;
        if self.options.delta == Delta::Fixed {
            self.basis.read_ahead(at, blocks.bytes());
        }
        for (&length, hash) in blocks.lengths.iter().zip(blocks.hashes) {
            self.take(at, length as usize, hash)?;
            at += u64::from(length);
        }
        self.write_run()?;
        if self.options.delta == Delta::Fixed {
            self.basis.forget(blocks.offset, blocks.bytes());
        }
        Ok(self.differing)
    }

    fn take(&mut self, at: u64, length: usize, hash: &BlockHash) -> rustix::io::Result<()> {
        let (basis, key) = (self.basis, self.key);
        let from = basis.find(key, hash, at, self.options.delta);
        let run_end = self.run.from + self.run.bytes as u64;
        let joins = self.run.bytes + length <= RUN_BYTES_MAX
            && from.is_some_and(|from| basis.may_join(run_end, from));
        if !joins {
            self.write_run()?;
        }
        let filled = self.run.bytes;
        let block = &mut self.buffer[filled..][..length];
        let equal = from.filter(|&from| basis.read(block, from) && key.hash(block) == *hash);
        let Some(from) = equal else {
            self.write_run()?;
            let end = at + length as u64;
            match self.differing.last_mut() {
                Some(last) if last.1 == at => last.1 = end,
                _ => self.differing.push((at, end)),
            }
            return Ok(());
        };
        if filled == 0 {
            self.run = Run { from, at, bytes: 0 };
        }
        self.run.bytes += length;
        Ok(())
    }

    /// Writes the run, and begins an empty run.
    fn write_run(&mut self) -> rustix::io::Result<()> {
        let Run { from, at, bytes } = std::mem::take(&mut self.run);
        if bytes == 0 {
            return Ok(());
        }
        if !self.basis.share_with(self.partial.file(), from, at, bytes) {
            let (basis, to) = (self.basis, self.partial.file());
            self.file.write_with(|| basis.write_to(to, &self.buffer[..bytes], at))?;
        }
        self.partial.record(at..at + bytes as u64);
        // Copies of blocks need no sync: after a restart of the host, they are compared again.
        let starts = self.file.progress().count_copied(bytes as u64);
        if starts && self.options.durable != Durable::No {
            start_write_back(self.partial);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_no_file_has_are_refused() {
        let hashes = [0; 2 * HASH_BYTES];
        assert_eq!(Blocks::new(5, &[1, 2], &hashes).map(|blocks| blocks.bytes()).unwrap(), 3);
        let large = BLOCK_BYTES_MAX as u32 + 1;
        for (offset, lengths, bytes) in [
            (0, &[1, 2, 3][..], 32),
            (0, &[1, 2], 31),
            (0, &[1], 32),
            (0, &[0, 2], 32),
            (0, &[1, large], 32),
            (FILE_BYTES_MAX, &[1, 1], 32),
            (u64::MAX, &[1, 1], 32),
        ] {
            let blocks = Blocks::new(offset, lengths, &hashes[..bytes]);
            assert!(blocks.is_err(), "{offset} {lengths:?} {bytes}");
        }
        let (lengths, hashes) = (vec![1; BLOCKS_MAX + 1], vec![0; (BLOCKS_MAX + 1) * HASH_BYTES]);
        assert!(Blocks::new(0, &lengths, &hashes).is_err());
    }
}
