//! Fuzzes the header of the PROXY protocol.
//!
//! No input panics, a header's end does not depend on the bytes after it, and no shorter beginning
//! of a header is a whole one.
#![cfg_attr(fuzzing, no_main)]

use haul_server::proxy_protocol::parse;

fn target(bytes: &[u8]) {
    if let Ok(Some((header, len))) = parse(bytes) {
        assert!(len <= bytes.len());
        assert_eq!(parse(&bytes[..len]).unwrap(), Some((header, len)));
        assert!((0..len).all(|shorter| !matches!(parse(&bytes[..shorter]), Ok(Some(_)))));
    }
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_headers_keep_the_invariants() {
    let version_1 = b"PROXY TCP4 192.0.2.7 10.0.0.1 51234 443\r\nGET /";
    let version_2 = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x13\xc0\0\x02\x07\x0a\0\0\x01\xc8\x22\x01\xbb\
        \x04\0\x04\0\0\0\0GET /";
    let mut state = 1u64;
    for valid in [&version_1[..], version_2] {
        target(valid);
        for _ in 0..20_000 {
            let mut bytes = valid.to_vec();
            for _ in 0..2 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 20) as u8;
            }
            target(&bytes);
        }
    }
}
