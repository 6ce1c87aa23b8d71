//! Fuzzes the text parsers: sizes, rates, workloads and `/proc/stat`.
//!
//! No input panics. Parsed sizes and workloads survive a round trip through their text format.
#![cfg_attr(fuzzing, no_main)]

use haul_bench::workload::Workload;
use haul_units::{Rate, Size};

fn target(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(size) = text.parse::<Size>() {
        assert_eq!(size.to_string().parse(), Ok(size));
    }
    if let Ok(workload) = text.parse::<Workload>() {
        assert_eq!(workload.to_string().parse::<Workload>().unwrap(), workload);
    }
    let _ = text.parse::<Rate>();
    let _ = haul_soak::ProcStat::parse(text);
}

haul_fuzz::fuzz!(target);

#[test]
fn parsed_text_survives_a_round_trip() {
    let parts = [
        "63",
        "x",
        "350",
        "KB",
        "MiB",
        ":",
        "memory",
        "file",
        "gbit",
        "/s",
        " ",
        "cpu0 1 2 3",
        "18446744073709551615",
        ".",
        "-",
    ];
    for first in parts {
        for second in parts {
            for third in parts {
                target(format!("{first}{second}{third}").as_bytes());
            }
        }
    }
}
