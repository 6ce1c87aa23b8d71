//! Fuzzes the answer of a name server, of which the time to live is taken.
//!
//! No input panics, and the time is one that a record can state.
#![cfg_attr(fuzzing, no_main)]

use haul_server::resolve::answer_time_to_live;
use std::time::Duration;

/// The largest number of RFC 2181 section 8.
const SECONDS_MAX: u64 = i32::MAX as u64;

fn target(bytes: &[u8]) {
    let time_to_live = answer_time_to_live(bytes);
    assert!(time_to_live.is_none_or(|time| time <= Duration::from_secs(SECONDS_MAX)));
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_answers_keep_the_invariants() {
    // An alias, and an address of the name that it stands for.
    let valid = b"\x12\x34\x81\x80\0\x01\0\x02\0\0\0\0\x01a\x04test\0\0\x01\0\x01\
        \xc0\x0c\0\x05\0\x01\0\0\0\x3c\0\x04\x01b\xc0\x0e\
        \xc0\x24\0\x01\0\x01\0\0\0\x05\0\x04\x0a\0\0\x01";
    assert_eq!(answer_time_to_live(valid), Some(Duration::from_secs(5)));
    let mut state = 1u64;
    for _ in 0..200_000 {
        let mut bytes = valid.to_vec();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 20) as u8;
        }
        bytes.truncate((state >> 40) as usize % (2 * bytes.len()));
        target(&bytes);
    }
}
