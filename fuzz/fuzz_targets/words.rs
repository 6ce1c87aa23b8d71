//! What people and the kernel write: sizes, rates, workloads, `/proc/stat`. Whatever the text, no panic; what
//! is understood prints and reads back.
#![cfg_attr(not(test), no_main)]

use haul_bench::quantity::{Rate, Size};
use haul_bench::workload::Workload;

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

#[cfg(not(test))]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| target(bytes));

#[test]
fn plausible_words() {
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
    for one in parts {
        for two in parts {
            for three in parts {
                target(format!("{one}{two}{three}").as_bytes());
            }
        }
    }
}
