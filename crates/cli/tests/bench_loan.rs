//! `haul bench loan`: loans through a veth pair are reported as copied, and loans to a device that
//! drops packets as not copied.

mod common {
    pub mod command;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
}

use common::command::haul;
use common::json::json;
use common::quiet::is_quiet;
use serde_json::Value;

#[test]
fn each_loan_row_reports_whether_the_kernel_copied() {
    if !is_quiet() {
        return;
    }
    let arguments = ["bench", "loan", "--rounds", "1", "--piece", "8KiB", "--json", "-"];
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
            // The kernel copies a loan that another host receives, but not one that is dropped.
            let expected = if path == "send" || to != "udp to a sink" { 100.0 } else { 0.0 };
            assert!((copied(&row) - expected).abs() < 1.0, "{row}");
            assert_eq!(row["receiver_us_per_mib"].is_null(), to == "udp to a sink", "{row}");
        }
    }
    assert!(row("tcp", "lend")["sendfile_ratio"]["median"].as_f64().unwrap() > 0.0);
}
