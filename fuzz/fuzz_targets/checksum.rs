//! Fuzzes the Internet checksum: each implementation matches RFC 1071, over one slice or two, and
//! while copying.
#![cfg_attr(fuzzing, no_main)]

use haul::checksum::{Implementation, PartialChecksum, Writes, copy};

/// Reference implementation: adds 16-bit words one by one and folds the carry after each.
fn reference(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).fold(0u32, |sum, word| {
        let sum = sum + u32::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]));
        (sum & 0xffff) + (sum >> 16)
    });
    !(sum as u16)
}

fn target(bytes: &[u8]) {
    // The first byte selects where the data is split, the second the copy's misalignment.
    let Some((&[cut, offset], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let (expected, offset) = (reference(bytes), usize::from(offset % 64));
    let (first, second) = bytes.split_at(usize::from(cut).min(bytes.len()));
    let (first, second) = (PartialChecksum::of(first), PartialChecksum::of(second));
    assert_eq!(first.followed_by(second).finish(), expected);
    let mut destination = vec![0; bytes.len() + offset];
    for kernel in Implementation::available() {
        assert_eq!(kernel.sum(bytes).finish(), expected);
        for writes in [Writes::Cached, Writes::Streamed] {
            destination.fill(0);
            let copied = kernel.copy(bytes, &mut destination[offset..], writes);
            assert_eq!(copied.finish(), expected);
            assert!(&destination[offset..] == bytes);
        }
    }
    assert_eq!(copy(bytes, &mut destination[offset..]).finish(), expected);
}

haul_fuzz::fuzz!(target);

#[test]
fn every_implementation_matches_the_reference() {
    let mut state = 1u64;
    for len in 0..2048usize {
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        target(&bytes);
    }
}
