//! Fuzzes the interpretation of `TCP_ZEROCOPY_RECEIVE` results: no result maps more bytes than
//! requested.
#![cfg_attr(fuzzing, no_main)]

use haul_sys::receive_window::{ReceiveOutcome, interpret};

fn target(bytes: &[u8]) {
    let Some(fields) = bytes.first_chunk::<12>() else { return };
    let mut words = fields.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap()));
    let mut next = || words.next().unwrap();
    let wanted = next() as usize;
    match interpret(wanted, next(), next()) {
        ReceiveOutcome::Mapped(mapped) => assert!(mapped <= wanted),
        ReceiveOutcome::MustRead(count) => assert!(count > 0),
        ReceiveOutcome::Nothing | ReceiveOutcome::Ended => {}
    }
}

haul_fuzz::fuzz!(target);

#[test]
fn no_result_maps_more_than_requested() {
    let mut state = 1u64;
    for _ in 0..10_000 {
        let bytes: Vec<u8> = (0..12)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // The cases depend on which fields are zero.
                if state >> 63 == 0 { 0 } else { (state >> 33) as u8 }
            })
            .collect();
        target(&bytes);
    }
}
