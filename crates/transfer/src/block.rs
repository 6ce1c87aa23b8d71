//! Blocks of a large file: both ends compare the hashes of blocks, so that only blocks that differ
//! from an earlier version are sent.

use crate::options::Delta;
use crate::read_ahead::read_ahead;
use fastcdc::v2020::StreamCDC;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The bytes of a hash: the first half of a BLAKE3 hash with a key. The key is new for each
/// transfer, so content cannot be prepared such that two blocks have the same hash.
pub const HASH_BYTES: usize = 16;
/// The bytes of a block of [`Delta::Fixed`], but for the last block of a range. The hashes of
/// smaller blocks cost more than they save if 1 % of a file changed.
pub const BLOCK_BYTES: usize = 64 << 10;
/// The smallest block of [`Delta::Rolling`], but for the last block of a range.
const ROLLING_BYTES_MIN: usize = 16 << 10;
/// The most bytes of a block.
pub const BLOCK_BYTES_MAX: usize = 256 << 10;
/// The most blocks in a message.
pub const BLOCKS_MAX: usize = 1024;

/// The hash of a block.
pub type BlockHash = [u8; HASH_BYTES];

/// The key of all hashes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockKey([u8; 32]);

impl BlockKey {
    /// A random key.
    pub fn random() -> io::Result<Self> {
        let mut key = [0; 32];
        // Up to 256 bytes are always filled (getrandom(2)).
        getrandom(&mut key, GetRandomFlags::empty())?;
        Ok(Self(key))
    }

    /// The hash of a block.
    pub fn hash(&self, block: &[u8]) -> BlockHash {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&blake3::keyed_hash(&self.0, block).as_bytes()[..HASH_BYTES]);
        hash
    }
}

/// Reads a range of a file block by block, and stops at the end of the file. Calls `each` with
/// every block, until `each` fails.
///
/// [`Delta::Rolling`] cuts where the content has a mark (FastCDC), so that equal content has equal
/// blocks at any place. The other kinds cut every [`BLOCK_BYTES`].
///
/// Returns the bytes that were read, and why the others cannot be read.
pub fn for_each_block<E>(
    file: &File,
    range: Range<u64>,
    delta: Delta,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(u64, Option<Errno>), E> {
    let mut bytes = 0;
    let mut take = |block: &[u8]| {
        bytes += block.len() as u64;
        each(block)
    };
    read_ahead(file, range.clone());
    let mut reader = RangeReader { file, range };
    let failure = if delta == Delta::Rolling {
        let blocks = StreamCDC::new(reader, ROLLING_BYTES_MIN, BLOCK_BYTES, BLOCK_BYTES_MAX);
        let mut failure = None;
        for block in blocks {
            match block {
                Ok(block) => take(&block.data)?,
                Err(error) => {
                    failure = Some(io::Error::from(error));
                    break;
                }
            }
        }
        failure
    } else {
        let mut buffer = vec![0; 4 * BLOCK_BYTES];
        loop {
            // Blocks end at multiples of their size, which file systems can share.
            let room = buffer.len() - (reader.range.start % BLOCK_BYTES as u64) as usize;
            match reader.fill(&mut buffer[..room]) {
                Ok(0) => break None,
                Ok(filled) => {
                    let (first, others) = buffer[..filled].split_at(filled.min(room % BLOCK_BYTES));
                    if !first.is_empty() {
                        take(first)?;
                    }
                    others.chunks(BLOCK_BYTES).try_for_each(&mut take)?;
                }
                Err(error) => break Some(error),
            }
        }
    };
    Ok((bytes, failure.map(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))))
}

/// Reads a range of a file.
struct RangeReader<'f> {
    file: &'f File,
    range: Range<u64>,
}

impl RangeReader<'_> {
    /// Fills the buffer as far as the range and the file go.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read(&mut buffer[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        Ok(filled)
    }
}

impl Read for RangeReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.range.end.saturating_sub(self.range.start);
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        loop {
            match self.file.read_at(&mut buffer[..wanted], self.range.start) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read.inspect(|&count| self.range.start += count as u64),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::convert::Infallible;

    fn blocks(content: &[u8], range: Range<u64>, delta: Delta) -> Vec<Vec<u8>> {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, content).unwrap();
        let mut blocks = Vec::new();
        let Ok((bytes, failure)) = for_each_block(&file, range, delta, |block| {
            blocks.push(block.to_vec());
            Ok::<_, Infallible>(())
        });
        assert_eq!((bytes, failure), (blocks.iter().map(Vec::len).sum::<usize>() as u64, None));
        blocks
    }

    fn random(bytes: usize, seed: u64) -> Vec<u8> {
        let mut content = vec![0; bytes];
        fastrand::Rng::with_seed(seed).fill(&mut content);
        content
    }

    #[test]
    fn blocks_cut_by_content_are_found_at_another_place() {
        let content = random(8 << 20, 1);
        let moved = [random(64 << 10, 2), content.clone()].concat();
        let of = |content: &[u8]| blocks(content, 0..u64::MAX, Delta::Rolling);
        let before: std::collections::HashSet<_> = of(&content).into_iter().collect();
        let new = of(&moved).into_iter().filter(|block| !before.contains(block));
        let new_bytes: usize = new.map(|block| block.len()).sum();
        assert!((64 << 10..1 << 20).contains(&new_bytes), "{new_bytes}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// The blocks of a range are the whole range, in order, and each fits a message.
        #[test]
        fn blocks_are_the_range(
            bytes in 0_usize..3 << 20,
            range in (0_u64..3 << 20, 0_u64..3 << 20),
            is_rolling in any::<bool>(),
        ) {
            let content = random(bytes, 3);
            let delta = if is_rolling { Delta::Rolling } else { Delta::Fixed };
            let (start, end) = (range.0.min(range.1), range.0.max(range.1));
            let blocks = blocks(&content, start..end, delta);
            let is_allowed = |block: &Vec<u8>| (1..=BLOCK_BYTES_MAX).contains(&block.len());
            prop_assert!(blocks.iter().all(is_allowed));
            if !is_rolling && blocks.len() > 1 {
                prop_assert_eq!((start as usize + blocks[0].len()) % BLOCK_BYTES, 0);
            }
            let (start, end) = (bytes.min(start as usize), bytes.min(end as usize));
            prop_assert_eq!(blocks.concat(), &content[start..end]);
        }
    }
}
