//! `haul bench settings` on real traffic: every setting with its command and its risk, and nothing of the machine changed.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod user;
}

use common::command::haul;
use common::cpus::lock_cpus;
use common::json::json;
use common::user::as_ordinary_user;
use serde_json::Value;
use std::fs;

fn rows<'a>(report: &'a Value, role: &'a str) -> impl Iterator<Item = &'a Value> {
    report["rows"].as_array().unwrap().iter().filter(move |row| row["role"] == role)
}

/// The settings of the machine that rows change in labs of their own.
fn machine() -> Vec<String> {
    ["tcp_congestion_control", "tcp_wmem", "tcp_rmem", "tcp_notsent_lowat"]
        .map(|name| fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap())
        .into()
}

#[test]
fn each_setting_says_how_to_set_it_and_what_it_risks() {
    let _alone = lock_cpus();
    let before = machine();
    let report = json(&mut haul(&["bench", "settings", "--quick", "--rounds", "1", "--json", "-"]));
    assert_eq!(machine(), before);
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
        );
        names.push(own["name"].as_str().unwrap().to_owned());
    }
    names.dedup();
    let every = "congestion mtu big-tcp send-buffer receive-buffer notsent-lowat socket-buffers rcvlowat read-pause offloads gro busy-poll";
    assert_eq!(names.join(" "), every);
    // One round has no interval, and so no verdict.
    assert_eq!(report["answers"][0], "No verdict: it takes 9 rounds (--rounds 9).");
    assert_eq!(rows(&report, "basis").count(), 1);
    assert_eq!(rows(&report, "control").count(), 1);
}

/// What a setting does can be seen in more than the cost, where it is sure to do something.
#[test]
fn settings_take_effect() {
    let _alone = lock_cpus();
    let report = json(&mut haul(&[
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
    let calls = |row: &Value| row["receiver_syscalls_per_mib"].as_f64().unwrap();
    let plain = calls(rows(&report, "basis").next().unwrap());
    let marked = rows(&report, "setting").last().unwrap();
    // At a held rate data trickles in, and a receiver that waits for 256 KiB calls less often.
    assert!(calls(marked) < plain / 2.0, "{plain} without, {marked}");
}

#[test]
fn an_ordinary_user_gets_the_rows() {
    let _alone = lock_cpus();
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
    let Some(mut command) = as_ordinary_user(folder.path(), &arguments) else { return };
    let report = json(&mut command);
    for row in rows(&report, "setting") {
        assert!(row["refused"].is_null(), "{row}");
    }
}
