//! Fuzzes the protocol parser of `haul bench --listen`: no input panics, and a line holds at most
//! one message.
#![cfg_attr(fuzzing, no_main)]

fn target(bytes: &[u8]) {
    let (requests, replies) = haul_bench::pair::words_in(bytes);
    let lines = bytes.iter().filter(|&&byte| byte == b'\n').count() + 1;
    assert!(requests + replies <= lines);
}

haul_fuzz::fuzz!(target);

#[test]
fn a_line_holds_at_most_one_message() {
    const PIECES: [&[u8]; 12] = [
        b"{\"Window\":{\"start_in_ns\":",
        b"1",
        b",\"length_ns\":",
        b"18446744073709551615",
        b"}}\n",
        b"\"End\"\n",
        b"\"Stop\"\n",
        b"{\"Calibrate\":{\"length_ms\":",
        b"{\"Start\":{\"task\":{\"Receive\":{\"way\":\"Read\"}},\"peer\":null}}\n",
        b"\"Ended\"\n",
        b"-1",
        b"\n",
    ];
    let mut state = 1u64;
    for len in 0..4096usize {
        let bytes: Vec<u8> = (0..len % 20)
            .flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                PIECES[(state >> 33) as usize % PIECES.len()].iter().copied()
            })
            .collect();
        target(&bytes);
    }
    assert_eq!(haul_bench::pair::words_in(b"\"End\"\n\"Ended\"\nnothing\n"), (1, 1));
}
