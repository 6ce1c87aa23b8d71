//! Plain code, for CPUs without anything better.
//!
//! A 32-bit word counts as its two halves, because 65536 is 1 in ones' complement; sums of such words in 64 bits need no
//! carry until 2³² of them.

/// The sum of `bytes` in the machine's byte order, not yet folded.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<16>();
    let mut lanes = [0u64; 4];
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
            *lane += u64::from(u32::from_ne_bytes(*word));
        }
    }
    folded(lanes) + tail(rest)
}

/// The same for a few words, to be put in line where it is called: both halves of each word in a sum of their own, so that
/// neither waits for a carry.
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

/// The same while copying; both have one length.
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
    folded(lanes) + tail(rest)
}

/// Lanes together, each folded once so that they cannot overflow.
fn folded(lanes: [u64; 4]) -> u64 {
    lanes.iter().map(|lane| (lane & 0xffff_ffff) + (lane >> 32)).sum()
}

/// The last bytes; an odd one counts as if a zero followed.
#[inline]
fn tail(bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks::<2>();
    let last = odd.first().map_or(0, |&byte| u16::from_ne_bytes([byte, 0]).into());
    words.iter().map(|word| u64::from(u16::from_ne_bytes(*word))).sum::<u64>() + last
}
