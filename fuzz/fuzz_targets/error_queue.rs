//! Fuzzes the parser of the socket error queue's control messages: no input panics, and only a
//! complete message gives a completion.
#![cfg_attr(fuzzing, no_main)]

fn target(bytes: &[u8]) {
    if haul_sys::error_queue::parse(bytes).is_some() {
        // A control message header of 16 bytes and a `sock_extended_err` of 16 bytes.
        assert!(bytes.len() >= 32);
    }
}

haul_fuzz::fuzz!(target);

#[test]
fn only_complete_messages_are_parsed() {
    let mut state = 1u64;
    for len in 0..4096usize {
        let bytes: Vec<u8> = (0..len % 200)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Small values give plausible lengths.
                ((state >> 33) % 40) as u8
            })
            .collect();
        target(&bytes);
    }
}
