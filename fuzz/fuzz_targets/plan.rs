//! Fuzzes the parser of plan files (cost models): any input gives an error, or a plan that chooses
//! methods and survives a round trip through its file format.
#![cfg_attr(fuzzing, no_main)]

use haul::plan::{Condition, Plan, SourceKind};

fn target(bytes: &[u8]) {
    let Ok(plan) = Plan::parse(bytes) else { return };
    for source in [SourceKind::File, SourceKind::Memory] {
        for bytes in [0, 1, 65_536, u64::MAX] {
            let _ = plan.choose(Condition::new(source, true), bytes, |_| true);
        }
    }
    let written = serde_json::to_vec(&plan).unwrap();
    assert_eq!(Plan::parse(&written).as_ref(), Ok(&plan));
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_plans_are_rejected_or_survive_a_round_trip() {
    let builtin = serde_json::to_vec(Plan::builtin()).unwrap();
    target(&builtin);
    let mut state = 1u64;
    for _ in 0..2000 {
        let mut bytes = builtin.clone();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 20) as u8 % 95 + 32;
        }
        target(&bytes);
    }
}
