//! `haul bench forward` on real traffic: whether the forwarder copied, and the latency of messages.

mod common {
    pub mod busy;
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::busy::{is_measured, json_if_measured};
use common::command::haul;
use common::cpus::lock_cpus;
use common::json::json;
use common::quiet::is_quiet;
use common::user::as_unprivileged_user;
use serde_json::Value;

fn row<'a>(report: &'a Value, path: &str, traffic: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["path"] == path && row["traffic"] == traffic).unwrap()
}

#[test]
fn each_method_reports_its_copies_and_the_latency_of_messages() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    let report = json(&mut haul(&["bench", "forward", "--quick", "--rounds", "1", "--json", "-"]));
    assert_eq!(report["schema"], "haul.bench/1");
    assert_eq!(report["experiment"], "forward");
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    for row in report["rows"].as_array().unwrap() {
        if row["path"] == "sockmap" && !row["refused"].is_null() {
            eprintln!("SKIPPED: {}", row["refused"]);
            continue;
        }
        for field in [
            "throughput_bits_per_second",
            "forwarder_us_per_mib",
            "peers_us_per_mib",
            "copied_percent",
        ] {
            assert!(!row[field].is_null(), "{field} of {row}");
        }
        let has_messages = row["traffic"] != "bulk";
        for field in
            ["forwarder_us_per_message", "messages_per_second", "latency_p50_us", "latency_p99_us"]
        {
            assert_eq!(!row[field].is_null(), has_messages, "{field} of {row}");
        }
    }
    let copied = |path, traffic| row(&report, path, traffic)["copied_percent"].as_f64().unwrap();
    assert!(copied("copy", "bulk") > 99.0 && copied("splice", "bulk") < 1.0, "{}", report["rows"]);
    // `auto` copies small messages and splices bulk data.
    assert!(
        copied("auto", "bulk") < 50.0 && copied("auto", "messages:64B") > 99.0,
        "{}",
        report["rows"]
    );
}

#[test]
fn an_unprivileged_user_gets_every_row_except_sockmap() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["bench", "forward", "--quick", "--rounds", "1", "--traffic", "bulk", "--json", "-"];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let (report, _) = json_if_measured(&mut command);
    let splice = row(&report, "splice", "bulk");
    assert!(splice["refused"].is_null() || !is_measured(splice), "{splice}");
    let refused = row(&report, "sockmap", "bulk")["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("root"), "{refused}");
}

#[test]
fn ending_tls_is_measured_with_and_without_the_kernel() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    let arguments = ["bench", "forward", "--traffic", "tls", "--buffer", "64KiB"];
    let report = json(haul(&arguments).args(["--rounds", "1", "--json", "-"]));
    assert_eq!(report["rows"].as_array().unwrap().len(), 3, "{}", report["rows"]);
    for (path, copied_percent) in [("tls-copy", 100.0), ("ktls-copy", 100.0), ("ktls-splice", 0.0)]
    {
        let row = row(&report, path, "tls");
        if let Some(reason) = row["refused"].as_str() {
            assert!(path != "tls-copy" && reason.contains("module tls"), "{reason}");
            eprintln!("SKIPPED: {path}: {reason}");
            continue;
        }
        assert_eq!(row["copied_percent"], copied_percent, "{row}");
        assert!(row["forwarder_us_per_mib"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn traffic_that_no_path_forwards_is_refused() {
    let output =
        haul(&["bench", "forward", "--traffic", "tls", "--paths", "splice"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("tls-copy, ktls-copy, ktls-splice"), "{error}");
}
