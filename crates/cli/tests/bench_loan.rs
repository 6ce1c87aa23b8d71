//! `haul bench loan`: what is lent to a veth is copied and says so, what is lent to a device that drops it is not.

mod common {
    pub mod command;
    pub mod json;
}

use common::command::haul;
use common::json::json;
use serde_json::Value;

#[test]
fn a_loan_says_whether_it_was_copied() {
    let arguments = ["bench", "loan", "--quick", "--rounds", "1", "--piece", "8KiB", "--json", "-"];
    let report = json(&mut haul(&arguments));
    assert_eq!(report["experiment"], "loan");
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    let row = |to: &str, path: &str| {
        let rows = report["rows"].as_array().unwrap();
        rows.iter().find(|row| row["to"] == to && row["path"] == path).unwrap().clone()
    };
    let copied = |row: &Value| row["copied_percent"].as_f64().unwrap_or_else(|| panic!("{row}"));
    for to in ["tcp", "udp", "udp to a sink"] {
        for path in ["send", "lend", "lend, waiting for each"] {
            let row = row(to, path);
            if to == "udp to a sink" && !row["refused"].is_null() {
                eprintln!("SKIPPED: {}", row["refused"]);
                continue;
            }
            assert!(row["send_ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
            // What is lent to the other host is copied for its sake, what is dropped is not.
            let expected = if path == "send" || to != "udp to a sink" { 100.0 } else { 0.0 };
            assert!((copied(&row) - expected).abs() < 1.0, "{row}");
            assert_eq!(row["receiver_us_per_mib"].is_null(), to == "udp to a sink", "{row}");
        }
    }
    assert!(row("tcp", "lend")["sendfile_ratio"]["median"].as_f64().unwrap() > 0.0);
}
