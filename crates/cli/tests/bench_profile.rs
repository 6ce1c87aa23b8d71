//! `haul bench profile`: the groups cover nearly every kernel function, commands can be profiled,
//! and the error for a missing permission names the setting.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::quiet::is_quiet;
use common::user::as_unprivileged_user;
use serde_json::Value;
use std::collections::BTreeSet;

fn rows<'a>(report: &'a Value, host: &str, kind: &str) -> Vec<&'a Value> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["host"].as_str().unwrap().starts_with(host) && row["kind"] == kind)
        .collect()
}

fn ticks(rows: &[&Value]) -> u64 {
    rows.iter().map(|row| row["ticks"].as_u64().unwrap()).sum()
}

/// Whether CPUs may be profiled here. If not, prints a message that begins with `SKIPPED`.
fn can_profile() -> bool {
    let (output, transcript) =
        run(&mut haul(&["bench", "profile", "--for", "100ms", "--", "true"]));
    if !output.status.success() {
        eprintln!("SKIPPED: {transcript}");
    }
    output.status.success()
}

#[test]
fn the_groups_cover_over_95_percent_of_kernel_ticks_on_both_hosts() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    if !can_profile() {
        return;
    }
    let report = json(&mut haul(&["bench", "profile", "--for", "2s", "--json", "-"]));
    assert_eq!(report["experiment"], "profile");
    let hosts: BTreeSet<&str> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["host"].as_str().unwrap())
        .collect();
    for host in hosts {
        let [total] = rows(&report, host, "total")[..] else { panic!("{host}") };
        let (groups, functions) = (rows(&report, host, "group"), rows(&report, host, "function"));
        assert!(ticks(&[total]) > 100 && !total["meter_load_percent"].is_null(), "{total}");
        // Every tick of a busy CPU is in exactly one group, and every kernel tick in one function.
        assert_eq!(ticks(&groups), ticks(&[total]), "{host}");
        let programs: Vec<&Value> =
            groups.iter().copied().filter(|row| row["name"] == "programs").collect();
        assert_eq!(ticks(&functions), ticks(&groups) - ticks(&programs), "{host}");
        let other: Vec<&Value> =
            functions.iter().copied().filter(|row| row["group"] == "other").collect();
        assert!(20 * ticks(&other) < ticks(&functions), "{host}: {other:?}");
        for row in functions {
            assert!(
                !row["normalised_load"].is_null() && !row["bound_us_per_mib"].is_null(),
                "{row}"
            );
        }
    }
}

#[test]
fn a_command_is_profiled_with_a_flame_graph() {
    let _cpu_lock = lock_cpus();
    if !can_profile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let copy = "head -c 300M /dev/zero | cat > /dev/null";
    let arguments = [
        "bench",
        "profile",
        "--html",
        page.to_str().unwrap(),
        "--json",
        "-",
        "--",
        "sh",
        "-c",
        copy,
    ];
    let report = json(&mut haul(&arguments));
    assert!(report["lab"].is_null());
    let names: Vec<&str> = rows(&report, "machine", "function")
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert!(names.iter().any(|name| name.contains("pipe")), "{names:?}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg class=\"flame\"") && page.contains("everything"), "no flame graph");
}

#[test]
fn the_command_keeps_its_exit_code_and_sigint_ends_a_profile() {
    let _cpu_lock = lock_cpus();
    if !can_profile() {
        return;
    }
    let (output, transcript) = run(&mut haul(&["bench", "profile", "--", "sh", "-c", "exit 7"]));
    assert_eq!(output.status.code(), Some(7), "{transcript}");
    // SIGINT arrives after 3 s of a profile of 600 s.
    let program = env!("CARGO_BIN_EXE_haul");
    let mut command = std::process::Command::new("timeout");
    command.args([
        "--foreground",
        "-s",
        "INT",
        "-k",
        "30",
        "3",
        program,
        "bench",
        "profile",
        "--for",
        "600s",
    ]);
    let (output, transcript) = run(&mut command);
    // Another haul may measure on this machine, which is waited for.
    let texts = ["stopped before", "stopped while another measurement ran"];
    assert!(texts.iter().any(|text| transcript.contains(text)), "{transcript}");
    assert!(output.stdout.is_empty(), "{transcript}");
}

#[test]
fn without_permission_the_error_names_perf_event_paranoid() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = as_unprivileged_user(folder.path(), &["bench", "profile"]) else {
        return;
    };
    let paranoid = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap();
    if paranoid.trim().parse::<i32>().unwrap() <= 1 {
        return eprintln!("SKIPPED: every user may profile CPUs here");
    }
    let (output, transcript) = run(&mut command);
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("perf_event_paranoid"), "{transcript}");
}
