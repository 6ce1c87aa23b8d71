//! Fuzzes what the ranks of a fleet read of their launcher and of each other.
//!
//! No input panics. A list of hosts has names without brackets, and the message of a rank without
//! the token is refused.
#![cfg_attr(fuzzing, no_main)]

use haul_fleet::{Announcement, Fleet, Hello, Vouch, expand, pmi};

fn target(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(names) = expand(&text) {
        assert!(names.iter().all(|name| !name.is_empty() && !name.contains(['[', ']', ','])));
    }
    let _ = Announcement::decode(0, &text);
    let _ = pmi::parse(&text);
    // Each line is a variable.
    let variables = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('='));
        lines.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    let _ = Fleet::from_variables(&variables);
    let fleet = Fleet::from_variables(&|name| match name {
        "HAUL_RANK" => Some("0".to_owned()),
        "HAUL_SIZE" => Some("2".to_owned()),
        _ => None,
    });
    let vouch = Vouch::by_token("0123456789abcdef").unwrap();
    assert!(Hello::check(bytes, &fleet.unwrap(), &[0; 32], &vouch).is_err());
}

haul_fuzz::fuzz!(target);

#[test]
fn mutated_inputs_keep_the_invariants() {
    let announcement = Announcement::new(4287, vec![7; 91]).encode().unwrap();
    let variables = "SLURM_PROCID=1\nSLURM_STEP_ID=0\nSLURM_STEP_NUM_TASKS=4\nSLURM_JOB_ID=3\n\
        SLURM_STEP_NODELIST=node[1-2]\nSLURM_STEP_RESV_PORTS=30004-30005\nHAUL_RENDEZVOUS=a:1";
    let valid = ["rack[0-1]n[01-02],n[08-11]", variables, &announcement];
    let mut state = 1u64;
    for number in 0..20_000 {
        let mut bytes = valid[number % valid.len()].as_bytes().to_vec();
        for _ in 0..2 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (state >> 33) as usize % bytes.len();
            bytes[at] = (state >> 20) as u8;
        }
        target(&bytes);
    }
}
