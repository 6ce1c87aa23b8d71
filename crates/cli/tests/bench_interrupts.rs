//! `haul bench interrupts` on real packets: the counters show the effect of batching.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::command::haul;
use common::cpus::lock_cpus;
use common::json::json;
use common::quiet::is_quiet;
use common::user::as_unprivileged_user;
use serde_json::Value;

fn row<'a>(report: &'a Value, traffic: &str, path: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["traffic"] == traffic && row["path"] == path).unwrap()
}

fn median(row: &Value, field: &str) -> f64 {
    row[field]["median"].as_f64().unwrap_or_else(|| panic!("{field} of {row}"))
}

#[test]
fn batching_lowers_calls_and_interrupts_per_packet() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    let report = json(&mut haul(&["bench", "interrupts", "--rounds", "2", "--json", "-"]));
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    for row in report["rows"].as_array().unwrap() {
        if !row["refused"].is_null() {
            eprintln!("SKIPPED: {row}");
            continue;
        }
        for field in
            ["packets_per_second", "packets_per_poll", "receiver_us_per_1000_packets", "ratio"]
        {
            assert!(median(row, field) > 0.0, "{field} of {row}");
        }
    }
    let transmit = |path| row(&report, "transmit", path);
    // One datagram per call, or a whole group of 44, at a fixed rate that needs no losses.
    assert!((median(transmit("one a call"), "packets_per_call") - 1.0).abs() < 0.2);
    assert!((median(transmit("UDP_SEGMENT"), "packets_per_call") - 44.0).abs() < 5.0);
    assert!(median(transmit("one a call"), "delivered_percent") > 50.0);
    // In `datagrams` the sender busy-waits for the time of each datagram, so its CPU time is not a
    // cost of sending.
    assert!(row(&report, "datagrams", "plain")["sender_us_per_1000_packets"].is_null());
    assert!((median(row(&report, "datagrams", "plain"), "packets_per_call") - 1.0).abs() < 0.2);
    // A packet that is segmented on arrival causes one interrupt for all its datagrams.
    let grouped = median(transmit("UDP_SEGMENT"), "packets_per_interrupt");
    assert!(
        grouped > 2.0 * median(transmit("one a call"), "packets_per_interrupt"),
        "{}",
        report["rows"]
    );
    assert!(!transmit("UDP_SEGMENT, lent")["copied_percent"].is_null());
    for field in ["latency_p50_us", "latency_p99_us"] {
        assert!(median(row(&report, "messages", "plain"), field) > 0.0);
    }
}

#[test]
fn an_unprivileged_user_gets_the_rows_that_change_no_setting() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["bench", "interrupts", "--rounds", "1", "--json", "-"];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let report = json(&mut command);
    assert!(row(&report, "transmit", "sendmmsg")["refused"].is_null());
    let threaded = row(&report, "stream", "gro, threaded");
    assert!(threaded["refused"].as_str().is_some_and(|why| why.contains("root")), "{threaded}");
}
