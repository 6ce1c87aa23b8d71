//! Fuzzes what `haul run` reads from other processes: the shared counters, which every process of
//! the command can write, and the broker's answers. Any words give a report.
#![cfg_attr(fuzzing, no_main)]

use haul_run::{Counts, ReportParts, RunReport};
use haul_tally::TALLY_WORDS;
use haul_tally::message::LeaseAnswer;
use std::collections::HashMap;

/// The counters of a tally with some words that are not 0.
fn counts(bytes: &[u8]) -> Counts {
    let words: HashMap<usize, u64> = bytes
        .chunks_exact(12)
        .map(|chunk| {
            let (position, value) = chunk.split_at(4);
            let position = u32::from_le_bytes(position.try_into().unwrap()) as usize;
            (position % TALLY_WORDS, u64::from_le_bytes(value.try_into().unwrap()))
        })
        .collect();
    Counts::read(|position| words.get(&position).copied().unwrap_or(0))
}

fn target(bytes: &[u8]) {
    read_answer(bytes);
    read_counts(bytes);
}

fn read_answer(bytes: &[u8]) {
    if let Some(answer) = LeaseAnswer::from_bytes(bytes) {
        assert_eq!(LeaseAnswer::from_bytes(&answer.to_bytes()), Some(answer));
    }
}

fn read_counts(bytes: &[u8]) {
    let report = RunReport::new(
        &counts(bytes),
        ReportParts {
            started: String::new(),
            command: Vec::new(),
            exit_code: None,
            seconds: 1.0,
            rusage_cpu_seconds: 1.0,
            not_loaded: Vec::new(),
            expectations: &["sendfile=90%".parse().unwrap()],
            is_eliding: true,
            is_proving: true,
            proof: None,
            plan: None,
        },
    );
    serde_json::to_vec(&report).unwrap();
}

haul_fuzz::fuzz!(target);

#[test]
fn any_words_give_a_report() {
    use haul_tally::header;
    target(&[]);
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 24
    };
    for number in 0..48 {
        let mut bytes = Vec::new();
        // Without slots and entries, the other words are not read.
        for position in [header::SLOTS_TAKEN, header::LOG_TAKEN] {
            bytes.extend_from_slice(&(position as u32).to_le_bytes());
            bytes.extend_from_slice(&(next() % 3000).to_le_bytes());
        }
        for _ in 0..40 {
            bytes.extend_from_slice(&(next() as u32).to_le_bytes());
            let shift = next() % 64;
            bytes.extend_from_slice(&(u64::MAX >> shift).to_le_bytes());
        }
        read_counts(&bytes);
        // As long as an answer, or not, and of a known kind, or not.
        let mut answer = next().to_le_bytes().repeat(2);
        answer.truncate(LeaseAnswer::BYTES - usize::from(number % 8 == 0));
        answer[0] = number as u8 % 3;
        read_answer(&answer);
    }
}
