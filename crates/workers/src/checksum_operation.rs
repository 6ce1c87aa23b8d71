//! The measured operations, one for each row.

use haul_checksum::{Implementation, PartialChecksum, Writes, bandwidth};
use haul_sys::pages::PageBuffer;
use std::hint::black_box;
use std::io;

/// The checksum implementation that [`haul::checksum`] selects on this CPU.
pub fn fastest_implementation() -> Implementation {
    haul_checksum::kernel()
}

/// The source and the destination of the operations.
pub struct Buffers {
    source: PageBuffer,
    destination: PageBuffer,
}

/// The destination starts half a page later within its page than the source. A load waits for an
/// earlier store to the same offset of another page (4K aliasing). Two buffers of a program have
/// equal offsets only by chance.
const DESTINATION_OFFSET: usize = 2048;

impl Buffers {
    /// Allocates two buffers of `bytes`, with all pages present.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let (mut source, mut destination) =
            (PageBuffer::new(bytes)?, PageBuffer::new(bytes + DESTINATION_OFFSET)?);
        fastrand::Rng::with_seed(1).fill(&mut source);
        destination.fill(1);
        Ok(Self { source, destination })
    }
}

/// A measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Reads every byte once and discards it: the measured read bandwidth.
    Read,
    /// 1: checksum.
    Checksum,
    /// 2: checksum and copy in one pass.
    Copy,
    /// 3: checksum and copy in one pass, with stores that bypass the caches. In the original
    /// question (see the experiment `checksum`) operation 3 copies from user space into the kernel,
    /// with fault handling. Here both buffers belong to one program, so that copy is not measured.
    CopyStreamed,
    /// 4: copy.
    Memcpy,
    /// 5: copy, then checksum of the copy.
    MemcpyThenSumTo,
    /// 6: copy, then checksum of the original.
    MemcpyThenSumFrom,
    /// 7: checksum of the original, then copy.
    SumFromThenMemcpy,
    /// [`haul::checksum::copy`].
    Auto,
    /// The checksum by an implementation that is not the fastest here.
    ChecksumBy(Implementation),
    /// The checksum by the public crate internet-checksum.
    InternetChecksum,
    /// CRC-32C, by the crate crc-fast.
    Crc32c,
    /// CRC-32C, then copy.
    Crc32cThenMemcpy,
    /// BLAKE3, by the crate blake3.
    Blake3,
    /// BLAKE3, then copy.
    Blake3ThenMemcpy,
}

impl Operation {
    /// The operations of all rows.
    pub fn all() -> Vec<Self> {
        let others = Implementation::available()
            .into_iter()
            .filter(|kernel| *kernel != fastest_implementation());
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

    /// The name in reports.
    pub fn name(self) -> &'static str {
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
            Self::ChecksumBy(Implementation::Portable) => "checksum portable",
            Self::ChecksumBy(Implementation::Avx2) => "checksum avx2",
            Self::ChecksumBy(Implementation::Avx512) => "checksum avx512",
            Self::InternetChecksum => "internet-checksum crate",
            Self::Crc32c => "crc32c",
            Self::Crc32cThenMemcpy => "crc32c, memcpy",
            Self::Blake3 => "blake3",
            Self::Blake3ThenMemcpy => "blake3, memcpy",
        }
    }

    /// The number among the seven operations of the original question.
    pub fn number(self) -> Option<u8> {
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

    /// Performs the operation `times` times on the first `bytes` bytes.
    pub fn run(self, buffers: &mut Buffers, bytes: usize, times: usize) {
        let from = &buffers.source[..bytes];
        let to = &mut buffers.destination[DESTINATION_OFFSET..DESTINATION_OFFSET + bytes];
        let kernel = fastest_implementation();
        match self {
            Self::Read => repeat(times, || bandwidth::read(black_box(from))),
            Self::Checksum => repeat(times, || PartialChecksum::of(black_box(from))),
            Self::Copy => {
                repeat(times, || kernel.copy(black_box(from), black_box(to), Writes::Cached));
            }
            Self::CopyStreamed => {
                repeat(times, || kernel.copy(black_box(from), black_box(to), Writes::Streamed));
            }
            Self::Auto => repeat(times, || haul_checksum::copy(black_box(from), black_box(to))),
            Self::Memcpy => repeat(times, || black_box(&mut *to).copy_from_slice(black_box(from))),
            Self::MemcpyThenSumTo => repeat(times, || {
                black_box(&mut *to).copy_from_slice(black_box(from));
                PartialChecksum::of(black_box(to))
            }),
            Self::MemcpyThenSumFrom => repeat(times, || {
                black_box(&mut *to).copy_from_slice(black_box(from));
                PartialChecksum::of(black_box(from))
            }),
            Self::SumFromThenMemcpy => repeat(times, || {
                black_box(PartialChecksum::of(black_box(from)));
                black_box(&mut *to).copy_from_slice(black_box(from));
            }),
            Self::ChecksumBy(kernel) => repeat(times, || kernel.sum(black_box(from))),
            Self::InternetChecksum => {
                repeat(times, || internet_checksum::checksum(black_box(from)));
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

/// Repeats an operation. The operation is selected outside the loop, so that small sizes do not pay
/// for the selection.
fn repeat<T>(times: usize, mut work: impl FnMut() -> T) {
    for _ in 0..times {
        black_box(work());
    }
}

fn crc32c(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes)
}
