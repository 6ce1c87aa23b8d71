//! `haul bench send` on real traffic: the fields of the report, the proof of copies, the fallbacks,
//! and the cleanup after signals.

mod common {
    pub mod busy;
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod processes;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::busy::{is_measured, json_if_measured};
use common::command::{haul, run};
use common::cpus::{CPUS, lock_cpus};
use common::json::json;
use common::processes::{children_of, wait_until};
use common::report::parse_report;
use common::user::as_unprivileged_user;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{PoisonError, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Waits until no test of this file asserts figures. Tests that measure with `--force` and assert
/// no figure do so at the same time.
fn share_cpus() -> RwLockReadGuard<'static, ()> {
    CPUS.read().unwrap_or_else(PoisonError::into_inner)
}

/// The experiments that `haul bench` runs without an experiment's name.
const EXPERIMENTS: [&str; 8] =
    ["send", "receive", "forward", "profile", "interrupts", "settings", "loan", "checksum"];

/// One round of `haul bench send`, also while other tests measure.
const FORCED_ROUND: [&str; 8] =
    ["bench", "send", "--force", "--quick", "--rounds", "1", "--json", "-"];

/// Whether the report was measured between two hosts. If not, prints a message that begins with
/// `SKIPPED`.
fn has_two_hosts(report: &Value) -> bool {
    if report["lab"]["kind"] == "veth" {
        return true;
    }
    eprintln!(
        "SKIPPED: no two hosts here, so copies and offloads are not checked: {}",
        report["warnings"]
    );
    false
}

fn row<'a>(report: &'a Value, path: &str, offloads: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["path"] == path && row["offloads"] == offloads).unwrap()
}

#[test]
fn the_report_has_every_contract_field_and_proves_copies() {
    let _cpu_lock = lock_cpus();
    let report = json(&mut haul(&[
        "bench",
        "send",
        "--quick",
        "--rounds",
        "1",
        "--offloads",
        "on,off",
        "--json",
        "-",
    ]));
    assert_contract(&report);
    if has_two_hosts(&report) {
        assert_copies(&report);
    }
}

/// Asserts that the fields of the JSON contract are there.
fn assert_contract(report: &Value) {
    assert_eq!(report["schema"], "haul.bench/1");
    assert_eq!(report["experiment"], "send");
    for field in ["started", "haul", "host", "lab", "warnings"] {
        assert!(!report[field].is_null(), "{field}");
    }
    for field in ["kernel", "cpu", "cpus", "steal_percent"] {
        assert!(!report["host"][field].is_null(), "host.{field}");
    }
    for field in ["kind", "mtu", "congestion"] {
        assert!(!report["lab"][field].is_null(), "lab.{field}");
    }
    for row in report["rows"].as_array().unwrap().iter().filter(|row| is_measured(row)) {
        for field in [
            "path",
            "chunk_bytes",
            "workload",
            "cork",
            "offloads",
            "rounds",
            "syscalls_per_mib",
            "copied_percent",
        ] {
            assert!(!row[field].is_null(), "{field} in {row}");
        }
        for figure in [
            "throughput_bits_per_second",
            "sender_load_percent",
            "sender_us_per_mib",
            "rusage_us_per_mib",
            "sender_us_ratio",
        ] {
            // The costs of a disturbed row may be negative, which makes the ratio null.
            if figure == "sender_us_ratio" && !row["disturbed_percent"].is_null() {
                continue;
            }
            assert!(row[figure]["median"].is_number(), "{figure} in {row}");
            // One round does not have an interval, so the coverage is 0.
            assert!(
                row[figure]["low"].is_null() && row[figure]["high"].is_null(),
                "{figure} in {row}"
            );
            assert_eq!(
                (&row[figure]["rounds"], &row[figure]["coverage_percent"]),
                (&1.into(), &0.0.into())
            );
        }
    }
}

/// Asserts what each path copies in the lab.
fn assert_copies(report: &Value) {
    let round_trip_ns = &report["lab"]["cache_line_round_trip_ns"]["median"];
    assert!(round_trip_ns.as_f64().is_none_or(|ns| ns > 0.0), "{round_trip_ns}");
    for path in ["sendfile", "splice", "vmsplice", "floor"] {
        for (offloads, copied_percent) in [("on", 0.0), ("off", 100.0)] {
            let row = row(report, path, offloads);
            let copied = &row["copied_percent"];
            assert!(!is_measured(row) || *copied == copied_percent, "{path}, {offloads}: {copied}");
        }
    }
    for path in ["zerocopy", "uring-zerocopy"] {
        let row = row(report, path, "on");
        if is_measured(row) {
            assert_eq!(row["copied_percent"], 100.0, "{path} on veth");
        } else {
            eprintln!("SKIPPED: {path} was not measured: {}", row["refused"]);
        }
    }
}

#[test]
fn an_unsuited_path_is_a_refused_row_with_the_reason() {
    let _cpu_lock = share_cpus();
    let workload = ["--workload", "memory:1MiB", "--paths", "read+send,uring-chain"];
    let (report, _) = json_if_measured(haul(&FORCED_ROUND).args(workload));
    let refused = row(&report, "uring-chain", "on");
    assert!(refused["refused"].as_str().unwrap().contains("memory"), "{refused}");
    assert!(refused["sender_us_per_mib"].is_null());
    let other = row(&report, "read+send", "on");
    assert!(other["refused"].is_null() || !is_measured(other), "{other}");
}

#[test]
fn a_requested_rate_is_not_exceeded() {
    let _cpu_lock = lock_cpus();
    let measure = || {
        json_if_measured(&mut haul(&[
            "bench", "send", "--quick", "--rounds", "1", "--paths", "sendfile", "--rate",
            "500mbit", "--json", "-",
        ]))
    };
    let measured = (0..5).map(|_| measure()).find(|(_, has_row)| *has_row);
    let Some((report, _)) = measured else {
        return eprintln!("SKIPPED: other programs ran in every window");
    };
    assert_eq!(report["lab"]["rate_bits_per_second"], 500_000_000);
    let throughput =
        row(&report, "sendfile", "on")["throughput_bits_per_second"]["median"].as_f64().unwrap();
    // The test has only an upper bound, because the machine decides how much slower the row is.
    // Without the rate the throughput is several times as much.
    assert!(throughput < 1e9, "{throughput}");
}

#[test]
fn every_format_of_the_report_is_written_completely() {
    let _cpu_lock = share_cpus();
    let folder = tempfile::tempdir().unwrap();
    let (output, transcript) =
        run(haul(&["bench", "--force", "--verbose", "--rounds", "1"]).current_dir(folder.path()));
    assert!(output.status.success(), "{transcript}");
    // One round supports no verdict.
    let summary_text = &transcript[transcript.rfind("\nsend files").unwrap()..];
    for question in ["send files", "receive", "forward", "settings", "CPU time"] {
        assert!(summary_text.contains(question), "{question}: {transcript}");
    }
    assert!(summary_text.contains("No verdict: "), "{transcript}");
    let latest = folder.path().join("haul-report/latest");
    let read = |name: &str| fs::read_to_string(latest.join(name)).unwrap();
    for experiment in EXPERIMENTS {
        let report = parse_report(read(&format!("{experiment}.json")).as_bytes()).unwrap();
        assert_eq!(report["experiment"], experiment);
        assert!(transcript.contains(&format!("== haul bench {experiment} ==")), "{transcript}");
        for field in ["command", "commit"] {
            assert!(!report[field].is_null(), "{field} of {experiment}");
        }
        assert!(!report["host"]["name"].as_str().unwrap().is_empty());
    }
    let summary = parse_report(read("summary.json").as_bytes()).unwrap();
    assert_eq!(summary["schema"], "haul.summary/1");
    assert_eq!(summary["left_out"].as_array().unwrap().len(), 0, "{summary}");
    for verdict in summary["verdicts"].as_array().unwrap() {
        let is_undecided = verdict["confidence"] == "undecided";
        assert_eq!(verdict["statement"].as_str().unwrap().contains("No verdict"), is_undecided);
    }
    // The name of a row has a mark if other programs have disturbed its only round.
    let markdown = read("report.md");
    let is_row = |line: &str| {
        line.strip_prefix("| sendfile").is_some_and(|rest| rest.starts_with([' ', ',']))
    };
    assert!(markdown.lines().any(is_row), "{markdown}");
    let page = read("index.html");
    assert!(page.ends_with("</html>\n"));
    for outside in ["http:", "https:", "<script", "src="] {
        assert!(!page.contains(outside), "the page is not self-contained: {outside}");
    }
    let files: Vec<_> = fs::read_dir(&latest).unwrap().collect();
    assert_eq!(files.len(), 3 + EXPERIMENTS.len(), "{files:?}");
    // The folder of the run, and the link to it.
    assert_eq!(fs::read_dir(folder.path().join("haul-report")).unwrap().count(), 2);
}

/// A time limit that is too short for a verdict says which one is enough.
#[test]
fn a_time_limit_that_is_too_short_withholds_the_verdict() {
    let _cpu_lock = lock_cpus();
    let arguments = ["bench", "send", "--quick", "--for", "1s", "--json", "-"];
    let (report, has_row) = json_if_measured(&mut haul(&arguments));
    let verdict = &report["verdicts"][0];
    assert_eq!(verdict["question"], "send-files");
    assert_eq!(verdict["confidence"], "undecided", "{verdict}");
    assert!(verdict["choice"].is_null() && verdict["saving_percent"].is_null(), "{verdict}");
    if !has_row {
        // Other programs ran in every window, so the remedy is another one.
        return;
    }
    assert!(verdict["how"].as_str().unwrap().contains("--for"), "{verdict}");
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("too-few-rounds") && warnings.contains("--for"), "{warnings}");
}

/// Every round of every row is in the report, so that reports can be pooled and compared.
#[test]
fn reports_keep_the_cost_of_each_round() {
    let _cpu_lock = lock_cpus();
    let arguments = [
        "bench",
        "send",
        "--quick",
        "--paths",
        "read+write,sendfile",
        "--rounds",
        "3",
        "--json",
        "-",
    ];
    let (report, _) = json_if_measured(&mut haul(&arguments));
    for path in ["read+write", "sendfile"] {
        let row = row(&report, path, "on");
        let rounds = row["round_costs"].as_array().unwrap();
        assert!(!rounds.is_empty() || !is_measured(row), "{row}");
        assert!(rounds.iter().all(|round| round["cost"].as_f64().unwrap() > 0.0), "{row}");
    }
}

#[test]
fn an_unprivileged_user_gets_every_row() {
    let _cpu_lock = share_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments = [&FORCED_ROUND[..], &["--offloads", "on,off"]].concat();
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let report = json(&mut command);
    if has_two_hosts(&report) {
        // Every path, and the library's choice, with offloads on and off.
        assert_eq!(
            report["rows"].as_array().unwrap().len(),
            2 * haul_bench::tested_method::TestedMethod::all().len()
        );
        let row = row(&report, "sendfile", "off");
        assert!(!is_measured(row) || row["copied_percent"] == 100.0, "{row}");
    }
}

#[test]
fn with_one_cpu_it_falls_back_to_loopback_with_a_warning() {
    let _cpu_lock = share_cpus();
    let mut command = Command::new("taskset");
    command.args([
        "-c",
        "0",
        env!("CARGO_BIN_EXE_haul"),
        "bench",
        "send",
        "--force",
        "--quick",
        "--rounds",
        "1",
    ]);
    command.args(["--paths", "read+write,sendfile", "--json", "-"]);
    let report = json(&mut command);
    assert_eq!(report["lab"]["kind"], "loopback");
    let warnings = report["warnings"].to_string();
    assert!(
        warnings.contains("only CPU 0 is allowed") && warnings.contains("share CPU 0"),
        "{warnings}"
    );
    assert!(row(&report, "sendfile", "on")["receiver_us_per_mib"].is_null());
}

#[test]
fn without_namespaces_it_falls_back_to_loopback_with_a_warning() {
    let _cpu_lock = share_cpus();
    let folder = tempfile::tempdir().unwrap();
    let Some(inner) = as_unprivileged_user(folder.path(), &[]) else { return };
    let program = inner.get_args().last().unwrap().to_str().unwrap();
    // A user namespace in which no further namespace may be created, entered without capabilities.
    let script = format!(
        "echo 0 > /proc/sys/user/max_user_namespaces && \
         echo 0 > /proc/sys/user/max_net_namespaces && \
         exec setpriv --bounding-set=-all --inh-caps=-all -- {program} \
         bench send --force --quick --rounds 1 --paths read+write,sendfile --offloads on,off \
         --json -"
    );
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--",
        "unshare",
        "-U",
        "-r",
        "sh",
        "-c",
        &script,
    ]);
    command.current_dir(folder.path()).env("TMPDIR", folder.path());
    let report = json(&mut command);
    assert_eq!(report["lab"]["kind"], "loopback");
    assert!(report["warnings"].to_string().contains("no two hosts here"), "{}", report["warnings"]);
    let off = row(&report, "sendfile", "off");
    assert!(off["refused"].as_str().unwrap().contains("loopback"), "{off}");
}

#[test]
fn ctrl_c_prints_the_rows_measured_so_far() {
    let _cpu_lock = share_cpus();
    // The time at which the signal arrives varies.
    for pause_ms in [3000, 3100, 3230] {
        let mut pause = Duration::from_millis(pause_ms);
        let is_row = |line: &str| {
            let row = line.trim_start().strip_prefix("sendfile");
            row.is_some_and(|row| row.starts_with([' ', ',']))
        };
        let mut text = interrupt_after(pause);
        // A busy machine takes longer to measure the first round.
        while !text.lines().any(is_row) && pause < Duration::from_secs(100) {
            pause *= 2;
            text = interrupt_after(pause);
        }
        assert!(
            text.contains("stopped before it was complete") && text.lines().any(is_row),
            "{text}"
        );
    }
}

/// Interrupts a measurement after a pause, as Ctrl-C on a terminal does: the signal goes to the
/// whole process group. Returns the output.
fn interrupt_after(pause: Duration) -> String {
    let paths = "read+write,sendfile";
    let mut command = haul(&["bench", "send", "--force", "--paths", paths, "--rounds", "900"]);
    let mut child = command.process_group(0).stdout(Stdio::piped()).spawn().unwrap();
    wait_for_worker(child.id());
    thread::sleep(pause);
    rustix::process::kill_process_group(Pid::from_child(&child), Signal::INT).unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    text
}

#[test]
fn kill_9_leaves_no_process_namespace_or_file() {
    let _cpu_lock = share_cpus();
    let folder = tempfile::tempdir().unwrap();
    let mut child = haul(&["bench", "send", "--force", "--rounds", "900", "--json", "report.json"])
        .current_dir(folder.path())
        .env("TMPDIR", folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_worker(child.id());
    let own = network_namespaces(&[child.id()]);
    let host = fs::read_link("/proc/self/ns/net").unwrap();
    if own.iter().all(|namespace| *namespace == host) {
        eprintln!(
            "SKIPPED: there is no lab here, so only processes and files are checked for leftovers"
        );
    }
    // A worker runs for a quarter of a second. The kill happens while a new one runs.
    let first = wait_for_worker(child.id());
    let worker = loop {
        let next = wait_for_worker(child.id());
        if next != first {
            break next;
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let wait_until_gone = |is_gone: &dyn Fn() -> bool, name: &str| {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !is_gone() {
            assert!(Instant::now() < deadline, "{name} is left after kill -9");
            thread::sleep(Duration::from_millis(50));
        }
    };
    let is_worker_gone = || !PathBuf::from(format!("/proc/{worker}")).exists();
    wait_until_gone(&is_worker_gone, "the sending process");
    let is_open = |namespace: &PathBuf| network_namespaces(&processes()).contains(namespace);
    let are_namespaces_gone =
        || !own.iter().any(|namespace| *namespace != host && is_open(namespace));
    wait_until_gone(&are_namespaces_gone, "a namespace");
    let files: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert!(files.is_empty(), "{files:?}");
}

/// The workers of a stopped run would keep their CPUs busy until the run continues.
#[test]
fn workers_end_when_the_run_is_stopped() {
    let _cpu_lock = share_cpus();
    let arguments =
        ["bench", "send", "--force", "--rounds", "900", "--paths", "sendfile", "--json", "-"];
    let mut run = haul(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let workers = || children_of(run.id());
    wait_until("a worker runs", || !workers().is_empty());
    let process = Pid::from_child(&run);
    kill_process(process, Signal::STOP).unwrap();
    wait_until("the workers ended", || workers().is_empty());
    kill_process(process, Signal::KILL).unwrap();
    run.wait().unwrap();
}

/// Waits until `parent` has started a sending process, and returns its process ID.
fn wait_for_worker(parent: u32) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        for process in processes() {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let after_name =
                stat.rsplit_once(')').map(|(_, rest)| rest.to_owned()).unwrap_or_default();
            if after_name.split_ascii_whitespace().nth(1) == Some(&parent.to_string()) {
                return process;
            }
        }
        assert!(Instant::now() < deadline, "no sending process");
        thread::sleep(Duration::from_millis(5));
    }
}

fn processes() -> Vec<u32> {
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.to_str()?.parse().ok()).collect()
}

/// Returns the network namespaces of all threads of these processes, and those that they hold open.
fn network_namespaces(processes: &[u32]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for process in processes {
        for folder in [format!("/proc/{process}/task"), format!("/proc/{process}/fd")] {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for entry in entries.flatten() {
                let path = if folder.ends_with("task") {
                    entry.path().join("ns/net")
                } else {
                    entry.path()
                };
                let target = fs::read_link(path).ok();
                found.extend(target.filter(|target| target.to_string_lossy().starts_with("net:[")));
            }
        }
    }
    found
}
