//! Portable checksum kernel, for CPUs without the vector instructions.
//!
//! A 32-bit word counts as the sum of its two halves, because 65536 is 1 in ones' complement. Sums
//! of such words in 64 bits need no carry for up to 2³² words.

/// Sums `bytes` in native byte order; the result is not folded.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<16>();
    let mut lanes = [0u64; 4];
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
            *lane += u64::from(u32::from_ne_bytes(*word));
        }
    }
    fold_lanes(lanes) + tail(rest)
}

/// Sums a few words, inlined at the call; the result is not folded.
///
/// The two halves of each 64-bit word have a sum each, so neither waits for a carry.
#[inline]
pub(crate) fn sum_of_short(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let (mut low, mut high) = (0u64, 0u64);
    for word in words {
        let word = u64::from_ne_bytes(*word);
        low += word & 0xffff_ffff;
        high += word >> 32;
    }
    low + high + tail(rest)
}

/// Copies `from` to `to`, of the same length, and sums the bytes; the result is not folded.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> u64 {
    let (blocks, rest) = from.as_chunks::<16>();
    let (to_blocks, to_rest) = to.as_chunks_mut::<16>();
    let mut lanes = [0u64; 4];
    for (block, to) in blocks.iter().zip(to_blocks) {
        *to = *block;
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
            *lane += u64::from(u32::from_ne_bytes(*word));
        }
    }
    to_rest.copy_from_slice(rest);
    fold_lanes(lanes) + tail(rest)
}

/// Adds the lanes, each folded once so that the total cannot overflow.
fn fold_lanes(lanes: [u64; 4]) -> u64 {
    lanes.iter().map(|lane| (lane & 0xffff_ffff) + (lane >> 32)).sum()
}

/// Sums the last bytes; an odd byte counts as if a zero followed.
#[inline]
fn tail(bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks::<2>();
    let last = odd.first().map_or(0, |&byte| u16::from_ne_bytes([byte, 0]).into());
    words.iter().map(|word| u64::from(u16::from_ne_bytes(*word))).sum::<u64>() + last
}
