//! `haul soak -- COMMAND`: signals, inputs and processes of the command, and the end of the meter's
//! own processes. No other tests are in this program, because the meter would measure their load.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod processes;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::processes::{children_of, is_running, wait_until};
use common::report::parse_report;
use common::user::as_unprivileged_user;
use rustix::fs::XattrFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Waits until the meter of a running `haul soak` has a spinner on each CPU. Returns the process
/// IDs of the launcher and of the spinners.
fn wait_for_meter(soak: &Child) -> Vec<u32> {
    let cpus = rustix::thread::sched_getaffinity(None).unwrap().count() as usize;
    let mut meter = Vec::new();
    wait_until("every CPU has a spinner", || {
        meter = children_of(soak.id());
        let spinners: Vec<u32> = meter.iter().flat_map(|&launcher| children_of(launcher)).collect();
        meter.extend(&spinners);
        spinners.len() == cpus
    });
    meter
}

fn kill(process: &Child, signal: Signal) {
    kill_process(Pid::from_child(process), signal).unwrap();
}

/// The bit of CAP_NET_BIND_SERVICE in a set of capabilities.
const NET_BIND_SERVICE: u32 = 1 << 10;

/// Gives a program a file capability, as `setcap cap_net_bind_service+ep` does (struct vfs_cap_data
/// of linux/capability.h, revision 2).
fn set_capability(program: &Path) -> rustix::io::Result<()> {
    const REVISION_2_EFFECTIVE: u32 = 0x0200_0001;
    let words = [REVISION_2_EFFECTIVE, NET_BIND_SERVICE, 0, 0, 0];
    let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::fs::setxattr(program, "security.capability", &value, XattrFlags::empty())
}

/// The kernel clears the parent-death signal of a program with file capabilities.
#[test]
fn the_spinners_end_with_a_killed_soak_also_with_file_capabilities() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["soak", "--for", "60s"];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    if let Err(error) = set_capability(&folder.path().join("haul")) {
        return eprintln!("SKIPPED: no file capabilities here: {error}");
    }
    let mut soak = command.spawn().unwrap();
    let meter = wait_for_meter(&soak);
    let status = fs::read_to_string(format!("/proc/{}/status", soak.id())).unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let capabilities = u64::from_str_radix(capabilities.trim(), 16).unwrap();
    kill(&soak, Signal::KILL);
    if capabilities & u64::from(NET_BIND_SERVICE) == 0 {
        eprintln!("SKIPPED: {} ignores file capabilities", folder.path().display());
    }
    soak.wait().unwrap();
    wait_until("the meter has ended", || !meter.iter().any(|&process| is_running(process)));
}

/// The spinners of a stopped soak would keep every CPU busy until it continues.
#[test]
fn the_spinners_end_when_soak_is_stopped_and_it_reports_that() {
    let _cpu_lock = lock_cpus();
    let mut command = haul(&["soak", "--for", "60s"]);
    let mut soak = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let meter = wait_for_meter(&soak);
    kill(&soak, Signal::STOP);
    wait_until("the meter has ended", || !meter.iter().any(|&process| is_running(process)));
    kill(&soak, Signal::CONT);
    kill(&soak, Signal::INT);
    let mut message = String::new();
    soak.stderr.take().unwrap().read_to_string(&mut message).unwrap();
    assert_eq!(soak.wait().unwrap().code(), Some(1), "{message}");
    assert!(message.contains("haul was stopped (Ctrl-Z or SIGSTOP)"), "{message}");
}

/// Runs haul with a command whose script prints `ready`, and sends haul a signal then. Returns the
/// exit code and the rest of the output.
fn interrupt(arguments: &[&str], signal: Signal) -> (Option<i32>, String) {
    // A program that `nohup` or a script starts in the background ignores some signals.
    let mut command = Command::new("env");
    command.args(["--default-signal=INT,TERM,HUP,QUIT", env!("CARGO_BIN_EXE_haul")]);
    let mut process = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    kill(&process, signal);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    (process.wait().unwrap().code(), rest)
}

/// A script that cleans up at a signal. Without a signal it ends after a minute.
const SCRIPT: &str = "trap 'echo cleaned; exit 7' INT TERM HUP QUIT; echo ready; \
                      for i in $(seq 1200); do sleep 0.05; done";

#[test]
fn signals_are_passed_on_to_the_command() {
    let _cpu_lock = lock_cpus();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let (code, output) = interrupt(&["soak", "--", "sh", "-c", SCRIPT], signal);
        assert_eq!(code, Some(7), "{signal:?}: {output}");
        assert!(output.starts_with("cleaned\n"), "{signal:?}: {output}");
        assert!(output.contains("getrusage charges the command"), "{signal:?}: {output}");
    }
    if haul_lab::Lab::veth(&haul_lab::Settings::default()).is_err() {
        return eprintln!("SKIPPED: there is no lab here, so haul lab passes no signal on");
    }
    let (code, output) = interrupt(&["lab", "--", "sh", "-c", SCRIPT], Signal::TERM);
    assert_eq!((code, output.as_str()), (Some(7), "cleaned\n"));
}

#[test]
fn a_series_that_is_stopped_reports_the_runs_that_were_complete() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let count = folder.path().join("count");
    let script = format!("echo >> {0}; [ $(wc -l < {0}) -lt 4 ] || exec sleep 60", count.display());
    let file = folder.path().join("runs.json");
    let arguments = ["soak", "--runs", "30", "--json", file.to_str().unwrap()];
    let mut series = haul(&[&arguments[..], &["--", "sh", "-c", &script]].concat())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the fourth run", || fs::read_to_string(&count).is_ok_and(|lines| lines.len() == 4));
    kill(&series, Signal::INT);
    let mut text = String::new();
    series.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(series.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains("stopped after 3 of 30 runs"), "{text}");
    let report = parse_report(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["runs"].as_array().unwrap().len(), 3);
    assert_eq!(report["warnings"][0]["kind"], "interrupted");
}

#[test]
fn every_run_of_a_series_has_the_same_input() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let (input, sizes) = (folder.path().join("input"), folder.path().join("sizes"));
    fs::write(&input, [b'x'; 5000]).unwrap();
    let script = format!("wc -c >> {}", sizes.display());
    let arguments = ["soak", "--runs", "3", "--json", "-"];
    let run_with = |extra: &[&str]| {
        let _ = fs::remove_file(&sizes);
        let arguments = [&arguments[..], extra, &["--", "sh", "-c", &script]].concat();
        let report = json(haul(&arguments).stdin(fs::File::open(&input).unwrap()));
        (report, fs::read_to_string(&sizes).unwrap())
    };
    let (report, sizes) = run_with(&[]);
    assert_eq!(sizes, "0\n0\n0\n");
    assert_eq!(report["warnings"][0]["kind"], "input", "{report}");
    let (report, sizes) = run_with(&["--input", input.to_str().unwrap()]);
    assert_eq!(sizes, "5000\n5000\n5000\n");
    assert!(!report["warnings"].to_string().contains("\"input\""), "{report}");
}

/// A script that does not wait for its server leaves the server's CPU time out of the script's.
#[test]
fn processes_that_were_not_waited_for_are_counted_or_named() {
    let _cpu_lock = lock_cpus();
    // The kernel ends the loop after a second of CPU time. `sleep` does not wait for it.
    let script = "sh -c 'ulimit -t 1; while :; do :; done' & exec sleep 3";
    let report = json(&mut haul(&["soak", "--json", "-", "--", "sh", "-c", script]));
    let warnings = report["warnings"].to_string();
    // On a busy machine the loop runs longer than the command.
    let is_named = warnings.contains("outlived");
    let used = report["rusage_cpu_seconds"].as_f64().unwrap();
    assert!(used > 0.9 || is_named, "{report}");
    let script = "sleep 5 & echo";
    let report = json(&mut haul(&["soak", "--json", "-", "--", "sh", "-c", script]));
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("still run") && warnings.contains("sleep (process "), "{warnings}");
}

/// A control group with a CPU quota that the meter uses up also while other programs run; removed
/// at the end.
struct QuotaGroup(PathBuf);

impl QuotaGroup {
    fn create() -> Option<Self> {
        let name = format!("haul-test-quota-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/cpu").join(&name);
        let v2 = Path::new("/sys/fs/cgroup").join(&name);
        if fs::create_dir(&v1).is_ok() {
            fs::write(v1.join("cpu.cfs_quota_us"), "20000").unwrap();
            return Some(Self(v1));
        }
        fs::create_dir(&v2).ok()?;
        let group = Self(v2);
        fs::write(group.0.join("cpu.max"), "20000 100000").ok().map(|()| group)
    }
}

impl Drop for QuotaGroup {
    fn drop(&mut self) {
        // The kernel removes the last process from the group shortly after the process ended.
        wait_until("the group is empty", || fs::remove_dir(&self.0).is_ok());
    }
}

/// The kernel does not run a meter that used up the quota of its group, also while a CPU is idle.
#[test]
fn there_is_no_reading_in_a_control_group_with_a_quota() {
    let _cpu_lock = lock_cpus();
    let Some(group) = QuotaGroup::create() else {
        return eprintln!("SKIPPED: no control group with a CPU quota can be created here");
    };
    let in_group = |arguments: &str| {
        let program = env!("CARGO_BIN_EXE_haul");
        let procs = group.0.join("cgroup.procs");
        let script = format!("echo $$ > {}; exec {program} {arguments}", procs.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    };
    let (output, transcript) = run(&mut in_group("soak --for 1s --json -"));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    let report = parse_report(&output.stdout).unwrap();
    assert!(report["total_load_percent"].is_null() && report["cpu_seconds"].is_null(), "{report}");
    assert_eq!(report["warnings"][0]["kind"], "throttled", "{report}");
    assert!(transcript.contains("may use 0.2 of"), "{transcript}");
    let (output, transcript) = run(&mut in_group("bench send --rounds 1 --paths sendfile"));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    assert!(transcript.contains("may use 0.2 of"), "{transcript}");
}
