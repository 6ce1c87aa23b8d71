//! The Internet checksum: every kernel gives what RFC 1071 says, in one piece, in two, and while copying.
#![cfg_attr(not(test), no_main)]

use haul::checksum::{Kernel, Sum, Writes, copy};

/// Words one by one, the carry around at once.
fn reference(bytes: &[u8]) -> u16 {
    let sum = bytes.chunks(2).fold(0u32, |sum, word| {
        let sum = sum + u32::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]));
        (sum & 0xffff) + (sum >> 16)
    });
    !(sum as u16)
}

fn target(bytes: &[u8]) {
    // The first bytes say where to cut and how far the copy is out of step.
    let Some((&[cut, step], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let (expected, step) = (reference(bytes), usize::from(step % 64));
    let (one, two) = bytes.split_at(usize::from(cut).min(bytes.len()));
    assert_eq!(Sum::of(one).then(Sum::of(two)).checksum(), expected);
    let mut room = vec![0; bytes.len() + step];
    for kernel in Kernel::available() {
        assert_eq!(kernel.sum(bytes).checksum(), expected);
        for writes in [Writes::Cached, Writes::Streamed] {
            room.fill(0);
            assert_eq!(kernel.copy(bytes, &mut room[step..], writes).checksum(), expected);
            assert!(&room[step..] == bytes);
        }
    }
    assert_eq!(copy(bytes, &mut room[step..]).checksum(), expected);
}

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| target(bytes));

#[test]
fn arbitrary_bytes() {
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
