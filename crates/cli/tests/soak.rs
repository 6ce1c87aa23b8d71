//! `haul soak`. These tests are a program of their own, because the meter would measure the load of
//! other tests.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod report;
    pub mod schema;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::report::parse_report;

#[test]
fn soak_measures_for_a_given_duration() {
    let _cpu_lock = lock_cpus();
    let report = json(&mut haul(&["soak", "--for", "300ms", "--json", "-"]));
    assert_eq!(report["schema"], "haul.soak/2");
    assert!(report["seconds"].as_f64().unwrap() >= 0.3);
    assert!(report["rusage_cpu_seconds"].is_null());
    for cpu in report["cpus"].as_array().unwrap() {
        let load = cpu["load_percent"].as_f64().unwrap();
        assert!((0.0..=100.0).contains(&load), "{cpu}");
        for field in ["cpu", "steal_percent"] {
            assert!(!cpu[field].is_null(), "{field}");
        }
    }
}

#[test]
fn soak_keeps_the_exit_code_and_the_output_of_the_command() {
    let _cpu_lock = lock_cpus();
    let (output, transcript) = run(&mut haul(&["soak", "--", "sh", "-c", "echo hello; exit 3"]));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    assert!(
        transcript.contains("hello") && transcript.contains("getrusage charges the command"),
        "{transcript}"
    );
    let (output, transcript) = run(&mut haul(&["soak", "--", "sh", "-c", "kill -TERM $$"]));
    assert_eq!(output.status.code(), Some(128 + 15), "{transcript}");
}

#[test]
fn soak_measures_the_load_of_another_session() {
    let _cpu_lock = lock_cpus();
    let mut spinner = std::process::Command::new("setsid")
        .args(["taskset", "-c", "0", "timeout", "6", "sh", "-c", "while :; do :; done"])
        .spawn()
        .unwrap();
    let report = json(&mut haul(&["soak", "--for", "1s", "--json", "-"]));
    // `timeout` ends by itself: killing it would leave its loop running.
    spinner.wait().unwrap();
    let cpu = report["cpus"].as_array().unwrap().iter().find(|cpu| cpu["cpu"] == 0).unwrap();
    if report["warnings"].to_string().contains("control-group") {
        return eprintln!("SKIPPED: the meter competes by a control group's weight here: {cpu}");
    }
    assert!(cpu["load_percent"].as_f64().unwrap() > 90.0, "{cpu}");
}

/// On a fully loaded machine, a reader of minimum CPU weight would be woken only after the load has
/// ended, and a killed spinner takes long to end. Neither may delay the report, which this test
/// reads through a pipe.
#[test]
fn soak_reads_on_time_on_a_fully_loaded_machine() {
    let _cpu_lock = lock_cpus();
    let start_loop_in_new_session = |_| {
        std::process::Command::new("setsid")
            .args(["timeout", "20", "sh", "-c", "while :; do :; done"])
            .spawn()
            .unwrap()
    };
    let mut loops: Vec<_> = (0..8).map(start_loop_in_new_session).collect();
    let report = json(&mut haul(&["soak", "--for", "2s", "--json", "-"]));
    // A late reading would be of a machine without this load.
    let are_running = loops.iter_mut().all(|child| child.try_wait().unwrap().is_none());
    for mut child in loops {
        // The session has the ID of its first process, and contains the loop.
        let _ = std::process::Command::new("pkill").args(["-s", &child.id().to_string()]).status();
        child.wait().unwrap();
    }
    assert!(are_running, "it took the whole 20 seconds");
    if report["warnings"].to_string().contains("control-group") {
        return eprintln!("SKIPPED: the meter competes by a control group's weight here: {report}");
    }
    for cpu in report["cpus"].as_array().unwrap() {
        // On a busy machine some loops begin a little later than the measurement.
        assert!(cpu["load_percent"].as_f64().unwrap() >= 80.0, "{cpu}");
    }
}

#[test]
fn proc_stat_percent_includes_niced_programs() {
    let _cpu_lock = lock_cpus();
    let mut niced = std::process::Command::new("setsid")
        .args([
            "nice",
            "-n",
            "19",
            "taskset",
            "-c",
            "0",
            "timeout",
            "6",
            "sh",
            "-c",
            "while :; do :; done",
        ])
        .spawn()
        .unwrap();
    let report = json(&mut haul(&["soak", "--for", "2s", "--json", "-"]));
    niced.wait().unwrap();
    let cpu = report["cpus"].as_array().unwrap().iter().find(|cpu| cpu["cpu"] == 0).unwrap();
    assert!(
        cpu["proc_stat_percent"].as_f64().unwrap() > 80.0,
        "/proc/stat counts it under nice: {cpu}"
    );
}

/// A control group of low weight loses a part of its CPU to the spinner, so its load reads low.
#[test]
fn a_control_group_that_the_meter_starves_is_named_in_a_warning() {
    let _cpu_lock = lock_cpus();
    let group = std::path::Path::new("/sys/fs/cgroup/cpu")
        .join(format!("haul-test-{}", std::process::id()));
    let usage = std::path::Path::new("/sys/fs/cgroup/cpuacct").join(group.file_name().unwrap());
    let created = [&group, &usage].map(|folder| {
        std::fs::create_dir(folder).or_else(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(error),
        })
    });
    if let Some(error) = created.into_iter().find_map(Result::err) {
        return eprintln!("SKIPPED: no control group of version 1 can be created here: {error}");
    }
    std::fs::write(group.join("cpu.shares"), "2").unwrap();
    let script = format!(
        "echo $$ > {}/cgroup.procs; echo $$ > {}/cgroup.procs; \
         exec timeout 4 taskset -c 1 sh -c 'while :; do :; done'",
        group.display(),
        usage.display()
    );
    let mut starved =
        std::process::Command::new("setsid").args(["sh", "-c", &script]).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let report = json(&mut haul(&["soak", "--for", "2s", "--json", "-"]));
    starved.wait().unwrap();
    // The kernel removes the last process from the group shortly after it has ended.
    for folder in [group, usage] {
        while folder.exists() && std::fs::remove_dir(&folder).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    let warning = report["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|warning| warning["kind"] == "starved-control-group");
    assert!(
        warning.is_some_and(|warning| warning["detail"].as_str().unwrap().contains("haul-test-")),
        "{report}"
    );
}

#[test]
fn the_self_check_measures_seven_known_loads_and_interrupt_load() {
    let _cpu_lock = lock_cpus();
    let check = json(&mut haul(&["soak", "--self-check", "--json", "-"]));
    let duties = check["duties"].as_array().unwrap();
    assert_eq!(duties.len(), 7);
    let read = |duty: &serde_json::Value| duty["read_percent"].as_f64().unwrap();
    // Other tests and other virtual machines share these CPUs, so only large differences are
    // checked, and none of the two smallest loads: `.ci/run` has read 4.7 % as 0.0 and 19.7 % as
    // 15.3, and the other five within 0.8 points (2026-11-28).
    assert!(read(&duties[6]) > 80.0 && read(&duties[6]) <= 100.0, "{check}");
    let is_read = |duty: &_| read(duty) > 0.5 * duty["made_percent"].as_f64().unwrap();
    assert!(duties[2..].iter().all(is_read), "{check}");
    for packets in check["packets"].as_array().unwrap() {
        // Processes on that CPU sleep, so the load is interrupt work, which the scheduler does not
        // account. Its amount depends on the machine.
        assert!(packets["read"]["interrupted_percent"].is_number(), "{packets}");
        assert!(packets["per_second"].as_f64().unwrap() > 0.0, "{packets}");
    }
}

#[test]
fn an_interrupted_soak_reports_a_warning() {
    let _cpu_lock = lock_cpus();
    let mut child = haul(&["soak", "--for", "60s", "--json", "-"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_secs(2));
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let status = child.wait().unwrap();
    let report: serde_json::Value = serde_json::from_reader(child.stdout.take().unwrap()).unwrap();
    assert_eq!(status.code(), Some(130));
    assert_eq!(report["warnings"][0]["kind"], "interrupted", "{report}");
}

#[test]
fn a_short_command_is_too_short_and_keeps_its_exit_code() {
    let _cpu_lock = lock_cpus();
    for (command, code) in [("true", 0), ("false", 1)] {
        let (output, transcript) = run(&mut haul(&["soak", "--", command]));
        assert_eq!(output.status.code(), Some(code), "{transcript}");
        assert!(transcript.contains("too short"), "{transcript}");
    }
    // The exit codes of a shell, of env and of timeout.
    let (output, transcript) = run(&mut haul(&["soak", "--", "/no/such/program"]));
    assert_eq!(output.status.code(), Some(127), "{transcript}");
    let (output, transcript) = run(&mut haul(&["soak", "--", "/etc/passwd"]));
    assert_eq!(output.status.code(), Some(126), "{transcript}");
}

#[test]
fn the_report_names_the_command_and_the_sources_of_the_load() {
    let _cpu_lock = lock_cpus();
    // The command's own output must not mix with the report.
    let script = "echo output; sleep 0.6";
    let report = json(&mut haul(&["soak", "--json", "-", "--", "sh", "-c", script]));
    assert_eq!(report["command"], serde_json::json!(["sh", "-c", script]));
    assert_eq!(report["exit_code"], 0);
    for field in ["started", "haul", "host", "kernel"] {
        assert!(!report[field].as_str().unwrap().is_empty(), "{field}");
    }
    let sources = report["sources"].as_array().unwrap();
    assert_eq!(sources.len(), report["cpus"].as_array().unwrap().len());
    assert!(!sources[0]["interrupts"].as_array().unwrap().is_empty(), "{sources:?}");
}

/// A command that does three times the work of another is found to cost more, and both orders of
/// the comparison agree. A series compared with itself shows no difference.
#[test]
fn a_series_is_compared_with_another_command_and_with_a_baseline() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let [base, report] = ["base.json", "report.json"].map(|name| folder.path().join(name));
    let [base, report] = [&base, &report].map(|path| path.to_str().unwrap());
    let work = |loops: u32| format!("i=0; while [ $i -lt {loops} ]; do i=$((i+1)); done");
    let (short, long) = (work(60_000), work(180_000));
    let (output, transcript) =
        run(&mut haul(&["soak", "--runs", "9", "--json", base, "--", "sh", "-c", &short]));
    assert!(output.status.success(), "{transcript}");
    let (output, transcript) = run(&mut haul(&[
        "soak",
        "--runs",
        "9",
        "--versus",
        &short,
        "--baseline",
        base,
        "--fail-above",
        "30%",
        "--json",
        report,
        "--",
        "sh",
        "-c",
        &long,
    ]));
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(transcript.contains("cost ÷ baseline") && transcript.contains("costs more"));
    let series = parse_report(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(series["schema"], "haul.soak-series/2");
    for ratio in [&series["versus"]["ratio"], &series["baseline"]["ratio"]] {
        assert!(ratio["low"].as_f64().unwrap() > 1.5, "{transcript}");
    }
    let (output, transcript) =
        run(&mut haul(&["soak", "--runs", "9", "--versus", "true", "--", "sh", "-c", "exit 3"]));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
}
