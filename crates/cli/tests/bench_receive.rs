//! `haul bench receive` on real traffic: the share of mapped pages is reported, and the machine's
//! settings are restored.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod schema;
    pub mod user;
}

use common::command::haul;
use common::cpus::lock_cpus;
use common::json::json;
use common::user::as_unprivileged_user;
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::fs;
use std::process::Stdio;
use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, Instant};

/// A setting of the whole machine. A run that changes it and one that needs it unchanged cannot run
/// at the same time: the rows that cannot have their value are refused, with the reason.
const PAGE_ORDER: &str = "/proc/sys/net/core/high_order_alloc_disable";

/// Takes the lock of tests whose rows depend on [`PAGE_ORDER`].
fn lock_page_order() -> MutexGuard<'static, ()> {
    let guard = lock_cpus();
    // A killed run keeps its file lock until its guard process has restored the setting and ended.
    let setting = fs::File::open(PAGE_ORDER).unwrap();
    flock(&setting, FlockOperation::LockShared).unwrap();
    guard
}

fn row<'a>(report: &'a Value, path: &str, page_order: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["path"] == path && row["page_order"] == page_order).unwrap()
}

#[test]
fn each_method_reports_its_mapped_and_copied_share() {
    let _page_order_lock = lock_page_order();
    let report = json(&mut haul(&[
        "bench",
        "receive",
        "--quick",
        "--rounds",
        "1",
        "--sent-by",
        "zerocopy",
        "--json",
        "-",
    ]));
    assert_eq!(report["schema"], "haul.bench/1");
    assert_eq!(report["experiment"], "receive");
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    for row in report["rows"].as_array().unwrap() {
        if row["path"] == "uring-read" && !row["refused"].is_null() {
            eprintln!("SKIPPED: {}", row["refused"]);
            continue;
        }
        for field in [
            "mtu",
            "buffer_bytes",
            "touched",
            "mib",
            "seconds",
            "mapped_percent",
            "copied_percent",
            "throughput_bits_per_second",
            "receiver_load_percent",
            "receiver_us_per_mib",
            "sender_us_per_mib",
            "user_us_per_mib",
            "system_us_per_mib",
            "context_switches_per_mib",
            "syscalls_per_mib",
        ] {
            assert!(!row[field].is_null(), "{field} of {row}");
        }
        assert!(row["mib"].as_f64().unwrap() > 1.0, "{row}");
    }
    let mapped = |path| row(&report, path, "default")["mapped_percent"].as_f64().unwrap();
    // Pages into which the kernel copies MSG_ZEROCOPY data can be mapped, and only the path
    // `mapped` maps pages.
    assert!(mapped("mapped") > 90.0, "{}", row(&report, "mapped", "default"));
    for path in ["read", "splice-to-file", "discard"] {
        assert!(mapped(path) < 1e-9, "{}", row(&report, path, "default"));
    }
    assert!(row(&report, "discard", "default")["copied_percent"].as_f64().unwrap() < 1e-9);
}

#[test]
fn the_page_order_setting_is_restored_even_after_sigkill() {
    let _page_order_lock = lock_page_order();
    let before = fs::read_to_string(PAGE_ORDER).unwrap();
    if fs::write(PAGE_ORDER, &before).is_err() {
        return eprintln!("SKIPPED: {PAGE_ORDER} may not be written here");
    }
    let arguments =
        ["bench", "receive", "--paths", "mapped", "--page-order", "default,single", "--json", "-"];
    let report = json(&mut haul(&[&arguments[..], &["--rounds", "2"]].concat()));
    assert_eq!(fs::read_to_string(PAGE_ORDER).unwrap(), before);
    if report["lab"]["kind"] == "veth" {
        let mapped = |order| row(&report, "mapped", order)["mapped_percent"].as_f64().unwrap();
        assert!(mapped("single") > 90.0 && mapped("default") < 50.0, "{}", report["rows"]);
    }
    let mut child = haul(&[&arguments[..], &["--rounds", "900"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let wait_for = |value: &str| {
        let deadline = Instant::now() + Duration::from_secs(120);
        while fs::read_to_string(PAGE_ORDER).unwrap().trim() != value {
            assert!(Instant::now() < deadline, "{PAGE_ORDER} does not become {value}");
            thread::sleep(Duration::from_millis(1));
        }
    };
    wait_for("1");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for(before.trim());
}

#[test]
fn an_unprivileged_user_gets_the_rows_that_change_no_setting() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "bench",
        "receive",
        "--rounds",
        "1",
        "--paths",
        "read",
        "--page-order",
        "default,single",
        "--json",
        "-",
    ];
    let _page_order_lock = lock_page_order();
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let report = json(&mut command);
    assert!(row(&report, "read", "default")["refused"].is_null());
    let refused = row(&report, "read", "single")["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("high_order_alloc_disable") && refused.contains("root"), "{refused}");
}
