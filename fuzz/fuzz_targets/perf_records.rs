//! Fuzzes the parser of the perf ring buffer's records: no input panics, and the samples fit into
//! the bytes of the input.
#![cfg_attr(fuzzing, no_main)]

fn target(bytes: &[u8]) {
    let (ticks, _) = haul_lab_sys::perf::parse(bytes);
    // A sample has a header of 8 bytes, an address, process and thread IDs, and the stack's depth,
    // 32 bytes in all. Each stack frame adds an address of 8 bytes.
    let frames: usize = ticks.iter().map(|tick| tick.kernel_stack.len()).sum();
    assert!(ticks.len() * 32 + frames * 8 <= bytes.len());
}

haul_fuzz::fuzz!(target);

#[test]
fn samples_fit_into_the_input() {
    let mut state = 1u64;
    for len in 0..4096usize {
        let bytes: Vec<u8> = (0..len % 300)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Small values give plausible record types, sizes and depths.
                [0, 0, 9, 2, 1, 8, 40, 255][(state >> 61) as usize]
            })
            .collect();
        target(&bytes);
    }
}
