//! `haul bench receive` on real traffic: the share of mapped pages is reported, and the machine's
//! settings are restored.

mod common {
    pub mod busy;
    pub mod command;
    pub mod cpus;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::busy::{is_measured, json_if_measured};
use common::command::haul;
use common::cpus::lock_cpus;
use common::user::as_unprivileged_user;
use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::fs;
use std::process::Stdio;
use std::sync::RwLockWriteGuard;
use std::thread;
use std::time::{Duration, Instant};

/// A setting of the whole machine. A run that changes it and one that needs it unchanged cannot run
/// at the same time: the rows that cannot have their value are refused, with the reason.
const PAGE_ORDER: &str = "/proc/sys/net/core/high_order_alloc_disable";

/// Takes the lock of tests whose rows depend on [`PAGE_ORDER`].
fn lock_page_order() -> RwLockWriteGuard<'static, ()> {
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
    let (report, has_row) = json_if_measured(&mut haul(&[
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
    if !has_row {
        return eprintln!("SKIPPED: other programs ran in every window");
    }
    for row in report["rows"].as_array().unwrap() {
        if !is_measured(row) {
            assert!(!row["refused"].is_null() || !row["disturbed_percent"].is_null(), "{row}");
            eprintln!("SKIPPED: {} was not measured: {}", row["path"], row["refused"]);
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
    let measured = |path| Some(row(&report, path, "default")).filter(|row| is_measured(row));
    // Pages into which the kernel copies MSG_ZEROCOPY data can be mapped, and only the path
    // `mapped` maps pages.
    for (path, range) in [
        ("mapped", 90.0..101.0),
        ("read", 0.0..1e-9),
        ("splice-to-file", 0.0..1e-9),
        ("discard", 0.0..1e-9),
    ] {
        let Some(row) = measured(path) else { continue };
        assert!(range.contains(&row["mapped_percent"].as_f64().unwrap()), "{row}");
    }
    if let Some(row) = measured("discard") {
        assert!(row["copied_percent"].as_f64().unwrap() < 1e-9, "{row}");
    }
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
    let two_rounds = [&arguments[..], &["--rounds", "2"]].concat();
    let (report, _) = json_if_measured(&mut haul(&two_rounds));
    assert_eq!(fs::read_to_string(PAGE_ORDER).unwrap(), before);
    if report["lab"]["kind"] == "veth" {
        for (order, range) in [("single", 90.0..101.0), ("default", 0.0..50.0)] {
            let row = row(&report, "mapped", order);
            let mapped = row["mapped_percent"].as_f64();
            assert!(mapped.is_none_or(|mapped| range.contains(&mapped)), "{row}");
        }
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
    let (report, _) = json_if_measured(&mut command);
    let default = row(&report, "read", "default");
    assert!(default["refused"].is_null() || !is_measured(default), "{default}");
    let refused = row(&report, "read", "single")["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("high_order_alloc_disable") && refused.contains("root"), "{refused}");
}
