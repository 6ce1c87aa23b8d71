//! What is done to the bytes, a row each.

use super::fastest;
use haul_checksum::{Kernel, Sum, Writes, bandwidth};
use haul_sys::pages::Pages;
use std::hint::black_box;
use std::io;

/// Where it is done.
pub(super) struct Memory {
    from: Pages,
    to: Pages,
}

/// The copy begins half a page after where the original does in its: a load that follows a store to the same place of
/// another page waits for it, which no two buffers of a program share but by chance.
const TO_OFFSET: usize = 2048;

impl Memory {
    /// Two stretches of `bytes`, all pages present.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        let (mut from, mut to) = (Pages::new(bytes)?, Pages::new(bytes + TO_OFFSET)?);
        fastrand::Rng::with_seed(1).fill(&mut from);
        to.fill(1);
        Ok(Self { from, to })
    }
}

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Every byte read once, and nothing done with it: the measured bandwidth.
    Read,
    /// 1: checksum.
    Checksum,
    /// 2: checksum and copy in one pass.
    Copy,
    /// 3: the same, written past the caches. (The original's third way copied from a program's memory into the kernel,
    /// with care for faults; a program's own memory has no such way.)
    CopyStreamed,
    /// 4: copy.
    Memcpy,
    /// 5: copy, then checksum the copy.
    MemcpyThenSumTo,
    /// 6: copy, then checksum the original.
    MemcpyThenSumFrom,
    /// 7: checksum the original, then copy.
    SumFromThenMemcpy,
    /// What [`haul::checksum::copy`] does.
    Auto,
    /// The checksum of a kernel that is not the fastest here.
    ChecksumBy(Kernel),
    /// The public crate internet-checksum.
    InternetChecksum,
    /// CRC-32C, by the crate crc-fast.
    Crc32c,
    /// CRC-32C, then copy.
    Crc32cThenMemcpy,
    /// BLAKE3, by its crate.
    Blake3,
    /// BLAKE3, then copy.
    Blake3ThenMemcpy,
}

impl Work {
    /// Every row.
    pub(super) fn all() -> Vec<Self> {
        let others = Kernel::available().into_iter().filter(|kernel| *kernel != fastest());
        let seven = [
            Self::Checksum,
            Self::Copy,
            Self::CopyStreamed,
            Self::Memcpy,
            Self::MemcpyThenSumTo,
            Self::MemcpyThenSumFrom,
            Self::SumFromThenMemcpy,
        ];
        let rest = [
            Self::Auto,
            Self::InternetChecksum,
            Self::Crc32c,
            Self::Crc32cThenMemcpy,
            Self::Blake3,
            Self::Blake3ThenMemcpy,
        ];
        [Self::Read]
            .into_iter()
            .chain(seven)
            .chain(others.map(Self::ChecksumBy))
            .chain(rest)
            .collect()
    }

    /// Its name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Checksum => "checksum",
            Self::Copy => "checksum-copy",
            Self::CopyStreamed => "checksum-copy streamed",
            Self::Memcpy => "memcpy",
            Self::MemcpyThenSumTo => "memcpy, checksum of the copy",
            Self::MemcpyThenSumFrom => "memcpy, checksum of the original",
            Self::SumFromThenMemcpy => "checksum, memcpy",
            Self::Auto => "checksum-copy auto",
            Self::ChecksumBy(Kernel::Portable) => "checksum portable",
            Self::ChecksumBy(Kernel::Avx2) => "checksum avx2",
            Self::ChecksumBy(Kernel::Avx512) => "checksum avx512",
            Self::InternetChecksum => "internet-checksum crate",
            Self::Crc32c => "crc32c",
            Self::Crc32cThenMemcpy => "crc32c, memcpy",
            Self::Blake3 => "blake3",
            Self::Blake3ThenMemcpy => "blake3, memcpy",
        }
    }

    /// The number of the seven ways that it stands for.
    pub(super) fn number(self) -> Option<u8> {
        match self {
            Self::Checksum => Some(1),
            Self::Copy => Some(2),
            Self::CopyStreamed => Some(3),
            Self::Memcpy => Some(4),
            Self::MemcpyThenSumTo => Some(5),
            Self::MemcpyThenSumFrom => Some(6),
            Self::SumFromThenMemcpy => Some(7),
            _ => None,
        }
    }

    /// Does it so many times to the first `bytes`.
    pub(super) fn run(self, memory: &mut Memory, bytes: usize, times: usize) {
        let (from, to) = (&memory.from[..bytes], &mut memory.to[TO_OFFSET..TO_OFFSET + bytes]);
        let kernel = fastest();
        match self {
            Self::Read => repeat(times, || bandwidth::read(black_box(from))),
            Self::Checksum => repeat(times, || Sum::of(black_box(from))),
            Self::Copy => {
                repeat(times, || kernel.copy(black_box(from), black_box(to), Writes::Cached))
            }
            Self::CopyStreamed => {
                repeat(times, || kernel.copy(black_box(from), black_box(to), Writes::Streamed));
            }
            Self::Auto => repeat(times, || haul_checksum::copy(black_box(from), black_box(to))),
            Self::Memcpy => repeat(times, || black_box(&mut *to).copy_from_slice(black_box(from))),
            Self::MemcpyThenSumTo => repeat(times, || {
                black_box(&mut *to).copy_from_slice(black_box(from));
                Sum::of(black_box(to))
            }),
            Self::MemcpyThenSumFrom => repeat(times, || {
                black_box(&mut *to).copy_from_slice(black_box(from));
                Sum::of(black_box(from))
            }),
            Self::SumFromThenMemcpy => repeat(times, || {
                black_box(Sum::of(black_box(from)));
                black_box(&mut *to).copy_from_slice(black_box(from));
            }),
            Self::ChecksumBy(kernel) => repeat(times, || kernel.sum(black_box(from))),
            Self::InternetChecksum => {
                repeat(times, || internet_checksum::checksum(black_box(from)))
            }
            Self::Crc32c => repeat(times, || crc32c(black_box(from))),
            Self::Crc32cThenMemcpy => repeat(times, || {
                black_box(crc32c(black_box(from)));
                black_box(&mut *to).copy_from_slice(black_box(from));
            }),
            Self::Blake3 => repeat(times, || blake3::hash(black_box(from))),
            Self::Blake3ThenMemcpy => repeat(times, || {
                black_box(blake3::hash(black_box(from)));
                black_box(&mut *to).copy_from_slice(black_box(from));
            }),
        }
    }
}

/// The choice of what to do is made outside of this, so that small sizes do not pay for it.
fn repeat<T>(times: usize, mut work: impl FnMut() -> T) {
    for _ in 0..times {
        black_box(work());
    }
}

fn crc32c(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes)
}
