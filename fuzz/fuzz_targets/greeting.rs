//! Fuzzes the TLS greeting by which a connection is routed.
//!
//! No input panics, and a decision does not depend on the bytes after it, nor on how the bytes are
//! cut.
#![cfg_attr(fuzzing, no_main)]

use haul_proxy::greeting::{GreetingReader, parse};

fn target(bytes: &[u8]) {
    let decision = parse(bytes);
    // Pieces of other lengths by the last byte.
    let piece_bytes = bytes.last().map_or(1, |&last| 1 + usize::from(last));
    let mut reader = GreetingReader::default();
    let by_pieces = bytes.chunks(piece_bytes).find_map(|piece| reader.push(piece));
    assert_eq!(by_pieces, decision);
    let Some(greeting) = decision else { return };
    let mut longer = bytes.to_vec();
    longer.extend_from_slice(bytes);
    assert_eq!(parse(&longer), Some(greeting));
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_greetings_keep_the_invariants() {
    // TLS 1.2, one cipher suite, SNI a.b and ALPN h2.
    let valid = b"\x16\x03\x01\0\x45\x01\0\0\x41\x03\x03\
        01234567890123456789012345678901\0\0\x02\xc0\x2b\x01\0\0\x16\
        \0\0\0\x08\0\x06\0\0\x03a.b\0\x10\0\x05\0\x03\x02h2\0\x17\0\0";
    // Of Chromium, with a post-quantum key share.
    let large = include_bytes!("../../crates/proxy/tests/proxy/hello-x25519mlkem768.bin");
    let mut state = 1u64;
    for number in 0..10_000 {
        let mut bytes = if number % 4 > 0 { valid.to_vec() } else { large.to_vec() };
        for _ in 0..2 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 20) as u8;
        }
        target(&bytes);
    }
}
