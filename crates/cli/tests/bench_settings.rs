//! `haul bench settings` on real traffic: every setting has a command and a risk, and no setting of
//! the machine itself changes.

mod common {
    pub mod busy;
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::busy::{is_measured, json_if_measured};
use common::command::haul;
use common::cpus::lock_cpus;
use common::json::json;
use common::user::as_unprivileged_user;
use serde_json::Value;
use std::fs;

fn rows<'a>(report: &'a Value, role: &'a str) -> impl Iterator<Item = &'a Value> {
    report["rows"].as_array().unwrap().iter().filter(move |row| row["role"] == role)
}

/// Returns the machine's values of settings that rows change in separate labs.
fn machine_settings() -> Vec<String> {
    ["tcp_congestion_control", "tcp_wmem", "tcp_rmem", "tcp_notsent_lowat"]
        .map(|name| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap())
        .into()
}

#[test]
fn each_setting_has_a_command_and_a_risk_and_the_machine_stays_unchanged() {
    let _cpu_lock = lock_cpus();
    let before = machine_settings();
    let arguments = ["bench", "settings", "--paths", "sendfile", "--rounds", "1", "--json", "-"];
    let report = json(&mut haul(&arguments));
    assert_eq!(machine_settings(), before);
    assert_eq!(report["schema"], "haul.bench/1");
    assert_eq!(report["experiment"], "settings");
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    let mut names = Vec::new();
    for row in rows(&report, "setting") {
        if row["refused"].is_null() {
            assert!(row["us_ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
        } else {
            eprintln!("SKIPPED: {}", row["refused"]);
        }
        let own = row["changes"].as_array().unwrap().last().unwrap();
        assert!(
            !own["command"].as_str().unwrap().is_empty()
                && !own["risk"].as_str().unwrap().is_empty()
                && !own["safety"].as_str().unwrap().is_empty()
        );
        names.push(own["name"].as_str().unwrap().to_owned());
    }
    names.dedup();
    let all = "congestion mtu big-tcp send-buffer receive-buffer notsent-lowat socket-buffers \
               rcvlowat read-pause offloads gro busy-poll";
    assert_eq!(names.join(" "), all);
    // One round does not have an interval, so the verdict is withheld.
    assert_eq!(report["answers"][0], "No verdict: it takes 9 rounds (--rounds 9).");
    assert_eq!(report["verdicts"][0]["confidence"], "undecided");
    assert_eq!(rows(&report, "basis").count(), 1);
    assert_eq!(rows(&report, "control").count(), 1);
}

/// SO_RCVLOWAT reduces the receiver's system calls, so its effect shows in more than the cost.
#[test]
fn settings_take_effect() {
    let _cpu_lock = lock_cpus();
    let (report, has_row) = json_if_measured(&mut haul(&[
        "bench",
        "settings",
        "--rounds",
        "1",
        "--paths",
        "sendfile",
        "--settings",
        "rcvlowat",
        "--congestion",
        "reno",
        "--rate",
        "200mbit",
        "--json",
        "-",
    ]));
    if report["lab"]["kind"] != "veth" {
        return eprintln!("SKIPPED: no two hosts here: {}", report["warnings"]);
    }
    let is_undisturbed = |row: &Value| is_measured(row) && row["disturbed_percent"].is_null();
    if !has_row || !report["rows"].as_array().unwrap().iter().all(is_undisturbed) {
        return eprintln!("SKIPPED: other programs ran in every window of a row");
    }
    let calls = |row: &Value| row["receiver_syscalls_per_mib"].as_f64().unwrap();
    let plain = calls(rows(&report, "basis").next().unwrap());
    let with_setting = rows(&report, "setting").last().unwrap();
    // At a paced rate data arrives in small amounts, and a receiver that waits for 256 KiB makes
    // fewer calls.
    assert!(calls(with_setting) < plain / 2.0, "{plain} without, {with_setting}");
}

#[test]
fn an_unprivileged_user_gets_the_rows() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "bench",
        "settings",
        "--quick",
        "--rounds",
        "1",
        "--settings",
        "big-tcp,send-buffer",
        "--json",
        "-",
    ];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let report = json(&mut command);
    for row in rows(&report, "setting") {
        assert!(row["refused"].is_null(), "{row}");
    }
}
