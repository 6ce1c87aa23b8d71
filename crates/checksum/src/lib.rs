//! The Internet checksum (RFC 1071), and a copy that also computes it.
//!
//! The sum adds the bytes as 16-bit words in ones' complement. The [`PartialChecksum`]s of
//! consecutive pieces combine to the [`PartialChecksum`] of the whole
//! ([`PartialChecksum::followed_by`]), whatever their lengths. So a message can be summed in the
//! pieces in which it arrives.
//!
//! ```
//! let mut to = [0; 20];
//! let header = [
//!     0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7,
//! ];
//! assert_eq!(haul_checksum::checksum(&header), 0xb861);
//! assert_eq!(haul_checksum::copy(&header, &mut to).finish(), 0xb861);
//! assert_eq!(to, header);
//! ```
//!
//! The words are summed by AVX-512 (VNNI), AVX2 or portable code, chosen once at the first call by
//! the CPU's features.
//!
//! Limitation: a change that keeps the sum, such as two swapped words, is not detected. The
//! checksum is for headers and protocols that require it, not for detecting damage on a disk.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(target_arch = "x86_64")]
mod store;

pub mod bandwidth;

/// A partial Internet checksum: the sum of a sequence of bytes before the final complement. That of
/// no bytes is [`PartialChecksum::default`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartialChecksum {
    /// The folded sum, in native byte order; 0 only if every byte is 0.
    folded: u16,
    /// Whether the number of bytes is odd; then the next piece begins in the middle of a word.
    is_odd: bool,
}

impl PartialChecksum {
    /// Sums `bytes`.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.len() <= SHORT_BYTES_MAX {
            return Self::new(portable::sum_of_short(bytes), bytes.len());
        }
        kernel().sum(bytes)
    }

    /// Combines this sum with the sum of the bytes that follow.
    #[must_use]
    pub fn followed_by(self, next: Self) -> Self {
        let added = if self.is_odd { next.folded.swap_bytes() } else { next.folded };
        Self {
            folded: fold(u64::from(self.folded) + u64::from(added)),
            is_odd: self.is_odd != next.is_odd,
        }
    }

    /// Returns the value of a header's checksum field: the complement, as a number.
    pub fn finish(self) -> u16 {
        !u16::from_be(self.folded)
    }

    /// Whether bytes that include their own checksum are intact.
    pub fn is_valid(self) -> bool {
        self.folded == u16::MAX
    }

    /// Folds a sum of words in native byte order over `len` bytes.
    #[inline]
    fn new(total: u64, len: usize) -> Self {
        Self { folded: fold(total), is_odd: len % 2 == 1 }
    }
}

/// Computes the checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u16 {
    PartialChecksum::of(bytes).finish()
}

/// Copies `from` to `to` and sums the bytes.
///
/// Data that fits the caches is copied piece by piece, and each piece is summed while it is cached.
/// That costs less there than one combined pass. Copies of 8 MiB and more are done in one pass with
/// streaming stores, which bypass the caches. The next reader then gets the copy from memory
/// (figures: docs/measurements/checksum.md).
///
/// # Panics
///
/// If the lengths differ, as [`slice::copy_from_slice`] does.
pub fn copy(from: &[u8], to: &mut [u8]) -> PartialChecksum {
    assert_eq!(from.len(), to.len(), "the lengths of a copy differ");
    if from.len() >= STREAMED_BYTES_MIN {
        return kernel().copy(from, to, Writes::Streamed);
    }
    from.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)).fold(
        PartialChecksum::default(),
        |sum, (from, to)| {
            to.copy_from_slice(from);
            sum.followed_by(PartialChecksum::of(from))
        },
    )
}

/// Implementations of the sum; all give the same result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Implementation {
    /// Portable code without vector instructions.
    Portable,
    /// 32 bytes at a time.
    Avx2,
    /// 64 bytes at a time, with `vpdpwssd` (AVX-512 BW and VNNI).
    Avx512,
}

/// Kind of stores that a copy uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// Ordinary stores into the caches, for data that is read again soon.
    Cached,
    /// Streaming stores, which bypass the caches.
    Streamed,
}

/// Copies of at least this size use streaming stores.
///
/// Cached stores would evict everything else. They also read each line that is overwritten into the
/// cache first, which costs a third of the memory's bandwidth.
const STREAMED_BYTES_MIN: usize = 8 << 20;
/// Longest input that is summed inline, because summing a header takes less time than the call of
/// an implementation.
const SHORT_BYTES_MAX: usize = 128;
/// Bytes that are copied and then summed while they are in the first-level cache.
const PIECE_BYTES: usize = 16 << 10;

impl Implementation {
    /// Lists the implementations that this CPU supports, the fastest last.
    pub fn available() -> Vec<Self> {
        [Self::Portable, Self::Avx2, Self::Avx512]
            .into_iter()
            .filter(|kernel| kernel.is_available())
            .collect()
    }

    /// Whether this CPU has the instructions of the implementation. The standard library detects
    /// the instructions once and caches the result.
    #[inline]
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Sums `bytes` as [`PartialChecksum::of`] does, with this kernel, or with portable code if the
    /// CPU lacks it.
    pub fn sum(self, bytes: &[u8]) -> PartialChecksum {
        let total = match self.or_portable() {
            // SAFETY: `or_portable` has just checked that the CPU has these instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::sum(bytes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::sum(bytes) },
            _ => portable::sum(bytes),
        };
        PartialChecksum::new(total, bytes.len())
    }

    /// Copies and sums in one pass, with this kernel and the given stores.
    ///
    /// Uses portable code if the CPU lacks the kernel. Portable code supports cached stores only.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn copy(self, from: &[u8], to: &mut [u8], writes: Writes) -> PartialChecksum {
        assert_eq!(from.len(), to.len(), "the lengths of a copy differ");
        let is_streamed = writes == Writes::Streamed;
        // The portable copy has no such stores.
        #[cfg(not(target_arch = "x86_64"))]
        let _ = is_streamed;
        let total = match self.or_portable() {
            // SAFETY: `or_portable` has just checked that the CPU has these instructions, and both
            // slices have the same length.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::copy(from, to, is_streamed) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::copy(from, to, is_streamed) },
            _ => portable::copy(from, to),
        };
        PartialChecksum::new(total, from.len())
    }

    fn or_portable(self) -> Self {
        if self.is_available() { self } else { Self::Portable }
    }
}

/// Returns the fastest kernel that this CPU supports, which [`PartialChecksum::of`] and [`copy()`]
/// use.
pub fn kernel() -> Implementation {
    static KERNEL: OnceLock<Implementation> = OnceLock::new();
    *KERNEL.get_or_init(|| {
        Implementation::available().last().copied().unwrap_or(Implementation::Portable)
    })
}

/// Combines the sum of the first `len` bytes with the sum of the rest. If `len` is odd, the bytes
/// of the rest's words are swapped.
#[cfg(target_arch = "x86_64")]
fn combine_sums(first: u64, len: usize, rest: u64) -> u64 {
    first + if len % 2 == 1 { u64::from(fold(rest).swap_bytes()) } else { rest }
}

/// Adds the bits above the low 16 to the low 16 until none are left. The result is 0 only for 0.
#[inline]
fn fold(mut total: u64) -> u16 {
    while total > u64::from(u16::MAX) {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reference implementation of RFC 1071: adds one word at a time, with an end-around carry
    /// after each.
    fn reference(bytes: &[u8]) -> PartialChecksum {
        let folded = bytes.chunks(2).fold(0u32, |sum, word| {
            let word = u16::from_ne_bytes([word[0], word.get(1).copied().unwrap_or(0)]);
            let sum = sum + u32::from(word);
            (sum & 0xffff) + (sum >> 16)
        });
        PartialChecksum { folded: folded as u16, is_odd: bytes.len() % 2 == 1 }
    }

    fn test_bytes(seed: u64, len: usize) -> Vec<u8> {
        (0..len as u64)
            .map(|i| ((i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8)
            .collect()
    }

    #[test]
    fn sums_match_the_reference_at_every_length_and_alignment() {
        let bytes = test_bytes(1, 1400);
        for kernel in Implementation::available() {
            for start in 0..68 {
                for len in (0..700).chain([1023, 1024, 1025, 1300]) {
                    let piece = &bytes[start..start + len];
                    assert_eq!(kernel.sum(piece), reference(piece), "{kernel:?} {start}+{len}");
                    assert_eq!(PartialChecksum::of(piece), reference(piece), "{start}+{len}");
                }
            }
        }
    }

    #[test]
    fn copies_match_the_reference_at_every_length_and_alignment() {
        let bytes = test_bytes(2, 1400);
        for kernel in Implementation::available() {
            for start in [0, 1, 2, 31, 32, 33, 63] {
                for to_start in [0, 1, 7, 32, 63] {
                    for len in (0..520).chain([1023, 1024, 1025]) {
                        let from = &bytes[start..start + len];
                        let mut to = vec![0xEE; 1200];
                        for writes in [Writes::Cached, Writes::Streamed] {
                            to.fill(0xEE);
                            let sum = kernel.copy(from, &mut to[to_start..to_start + len], writes);
                            assert_eq!(
                                sum,
                                reference(from),
                                "{kernel:?} {start}+{len} to {to_start}"
                            );
                            assert_eq!(&to[to_start..to_start + len], from);
                            let around = to[..to_start].iter().chain(&to[to_start + len..]);
                            assert!(
                                around.copied().all(|byte| byte == 0xEE),
                                "{kernel:?} wrote beside it"
                            );
                        }
                    }
                }
            }
        }
    }

    /// Tests the accumulators' carries and streaming copies.
    ///
    /// The inputs are longer than one accumulator block, of the largest and the smallest words.
    #[test]
    fn large_inputs_carry_and_copy_correctly() {
        const LEN: usize = 20_000_003;
        for byte in [0xff, 0x80, 0x7f, 0x00] {
            let mut bytes = vec![byte; LEN];
            bytes[LEN - 1] = 0x12;
            let expected = reference(&bytes[1..]);
            let mut to = vec![0; LEN];
            for kernel in Implementation::available() {
                assert_eq!(kernel.sum(&bytes[1..]), expected, "{kernel:?} {byte:#x}");
                for writes in [Writes::Cached, Writes::Streamed] {
                    let sum = kernel.copy(&bytes[1..], &mut to[..LEN - 1], writes);
                    assert_eq!(sum, expected, "{kernel:?} {byte:#x}");
                    assert!(to[..LEN - 1] == bytes[1..], "{kernel:?} {byte:#x}");
                    to.fill(1);
                }
            }
            assert_eq!(copy(&bytes[1..], &mut to[..LEN - 1]), expected, "{byte:#x}");
            assert!(to[..LEN - 1] == bytes[1..], "{byte:#x}");
        }
    }

    #[test]
    fn a_header_that_holds_its_checksum_is_valid() {
        let mut header = test_bytes(3, 40);
        header[10..12].fill(0);
        let checksum = checksum(&header);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        assert!(PartialChecksum::of(&header).is_valid());
        header[20] ^= 1;
        assert!(!PartialChecksum::of(&header).is_valid());
        assert_eq!(PartialChecksum::of(&[]), PartialChecksum::default());
        assert_eq!(super::checksum(&[]), 0xffff);
    }

    proptest! {
        #[test]
        fn the_sums_of_pieces_combine_to_the_sum_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..3000),
            cut in 0usize..3000,
            other in 0usize..3000
        ) {
            let (one, two) = (cut.min(other).min(bytes.len()), cut.max(other).min(bytes.len()));
            let pieces = [&bytes[..one], &bytes[one..two], &bytes[two..]];
            let sums = pieces.into_iter().map(PartialChecksum::of);
            let sum = sums.fold(PartialChecksum::default(), PartialChecksum::followed_by);
            prop_assert_eq!(sum, reference(&bytes));
        }

        #[test]
        fn kernels_match_the_reference(bytes in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let mut to = vec![0; bytes.len()];
            for len in [
                bytes.len(),
                bytes.len().min(SHORT_BYTES_MAX),
                bytes.len() % (SHORT_BYTES_MAX + 2),
            ] {
                prop_assert_eq!(PartialChecksum::of(&bytes[..len]), reference(&bytes[..len]));
            }
            for kernel in Implementation::available() {
                prop_assert_eq!(kernel.sum(&bytes), reference(&bytes));
                prop_assert_eq!(kernel.copy(&bytes, &mut to, Writes::Cached), reference(&bytes));
                prop_assert_eq!(&to, &bytes);
            }
            to.fill(0);
            prop_assert_eq!(copy(&bytes, &mut to), reference(&bytes));
            prop_assert_eq!(&to, &bytes);
        }
    }
}
