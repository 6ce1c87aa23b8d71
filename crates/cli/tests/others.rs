//! `haul doctor`, `haul lab` and `haul plan`.

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
use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::quiet::is_quiet;
use common::report::parse_report;
use common::user::as_unprivileged_user;
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn doctor_reports_every_path_and_a_fix_for_each_problem() {
    let diagnosis = json(&mut haul(&["doctor", "--peer", "127.0.0.1", "--json", "-"]));
    assert_eq!(diagnosis["schema"], "haul.doctor/2");
    assert_eq!(diagnosis["device"]["name"], "lo");
    let paths = diagnosis["paths"].as_array().unwrap();
    assert_eq!(paths.len(), 10);
    let sendfile = paths.iter().find(|path| path["path"] == "sendfile").unwrap();
    assert_eq!((&sendfile["available"], &sendfile["avoids_copy"]), (&true.into(), &true.into()));
    let zerocopy = paths.iter().find(|path| path["path"] == "zerocopy").unwrap();
    assert_eq!(zerocopy["avoids_copy"], false, "on loopback the kernel copies");
    for setting in diagnosis["settings"].as_array().unwrap() {
        // A note tells what this kernel lacks. Nothing fixes that.
        let is_note = setting["verdict"] == "note";
        let is_good = setting["verdict"] == "good";
        assert!(is_note || is_good == setting["fix"].is_null(), "{setting}");
    }
}

#[test]
fn doctor_and_lab_agree_whether_an_unprivileged_user_can_make_namespaces() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = as_unprivileged_user(folder.path(), &["doctor", "--json", "-"]) else {
        return;
    };
    let diagnosis = json(&mut command);
    let settings = diagnosis["settings"].as_array().unwrap();
    let namespaces = settings.iter().find(|setting| setting["name"] == "namespaces").unwrap();
    let Some(mut command) = as_unprivileged_user(folder.path(), &["lab", "--", "true"]) else {
        return;
    };
    let (output, transcript) = run(&mut command);
    assert_eq!(
        output.status.success(),
        namespaces["verdict"] == "good",
        "{transcript}: {namespaces}"
    );
}

#[test]
fn doctor_reports_a_device_without_scatter_gather() {
    let program = env!("CARGO_BIN_EXE_haul");
    let script = format!(
        "ethtool -K haul0 tx off sg off >&2 && exec {program} doctor --peer $HAUL_PEER --json -"
    );
    let (output, transcript) = run(&mut haul(&["lab", "--", "sh", "-c", &script]));
    if transcript.contains("ethtool: not found") {
        return eprintln!("SKIPPED: ethtool is missing");
    }
    assert!(output.status.success(), "{transcript}");
    let diagnosis = parse_report(&output.stdout).unwrap();
    let paths = diagnosis["paths"].as_array().unwrap();
    let sendfile = paths.iter().find(|path| path["path"] == "sendfile").unwrap();
    assert_eq!(sendfile["avoids_copy"], false, "{sendfile}");
    assert!(sendfile["fix"].as_str().unwrap().contains("ethtool -K haul0"), "{sendfile}");
}

#[test]
fn the_lab_runs_programs_on_both_hosts() {
    let (output, transcript) =
        run(&mut haul(&["lab", "--", "sh", "-c", "echo peer $HAUL_PEER; exit 5"]));
    assert_eq!(output.status.code(), Some(5), "{transcript}");
    assert!(transcript.contains("peer 10.77.0.2"), "{transcript}");
    let (output, transcript) = run(&mut haul(&["lab", "--receiver", "sleep 1000", "--", "true"]));
    assert!(output.status.success() && output.stderr.is_empty(), "{transcript}");
    // The reader of a FIFO reaches end-of-file when the writer's process ends.
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    let make = format!("mkfifo {}", fifo.display());
    assert!(std::process::Command::new("sh").args(["-c", &make]).status().unwrap().success());
    let (receiver, sender) =
        (format!("exec > {}; exit 7", fifo.display()), format!("cat {}", fifo.display()));
    let (output, transcript) =
        run(&mut haul(&["lab", "--receiver", &receiver, "--", "sh", "-c", &sender]));
    assert!(output.status.success() && transcript.contains("exit status: 7"), "{transcript}");
}

#[test]
fn a_closed_output_pipe_is_not_an_error() {
    let line = format!("{} doctor | head -n 1", env!("CARGO_BIN_EXE_haul"));
    let (output, transcript) = run(std::process::Command::new("sh").args(["-c", &line]));
    assert!(output.status.success() && output.stderr.is_empty(), "{transcript}");
}

#[test]
fn a_plan_is_made_from_the_undisturbed_rows_of_a_report() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (report, plan) = (folder.path().join("report.json"), folder.path().join("plan.json"));
    let [report, plan] = [&report, &plan].map(|path| path.to_str().unwrap());
    let measured = run(&mut haul(&[
        "bench",
        "send",
        "--quick",
        "--rounds",
        "9",
        "--paths",
        "read+write,sendfile,auto,floor",
        "--chunk",
        "16KiB,256KiB",
        "--json",
        report,
    ]));
    assert!(measured.0.status.success(), "{}", measured.1);
    let measured = parse_report(&std::fs::read(report).unwrap()).unwrap();
    // Each path has rows of two sizes. The plan excludes rows that another program disturbed, the
    // floor, which sends nothing, and `auto`, which is the choice itself.
    let clean: BTreeSet<&str> = measured["rows"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| {
            row["disturbed_percent"].is_null()
                && row["paced"].is_null()
                && !row["sender_us_per_mib"]["low"].is_null()
        })
        .map(|row| row["path"].as_str().unwrap())
        .filter(|path| !["auto", "floor"].contains(path))
        .collect();
    // Whether this run's own noise forbids a plan depends on the machine.
    let arguments = ["plan", "--force", "--from", report, "--json"];
    let (output, transcript) = run(haul(&arguments).arg(plan));
    if clean.is_empty() {
        eprintln!("SKIPPED: other programs ran in every row: {transcript}");
        return assert_eq!(output.status.code(), Some(2), "{transcript}");
    }
    assert!(
        output.status.success() && transcript.contains("a file, offloads on, "),
        "{transcript}"
    );
    let loaded = parse_report(&std::fs::read(plan).unwrap()).unwrap();
    assert_eq!(loaded["schema"], "haul.plan/1");
    let costs = loaded["costs"].as_array().unwrap();
    let paths: BTreeSet<&str> = costs.iter().map(|cost| cost["path"].as_str().unwrap()).collect();
    assert_eq!(paths, clean);
    // On standard output the plan is printed without any other text.
    let printed = json(haul(&arguments).arg("-"));
    assert_eq!(printed, loaded);
    refuse_noisy_report(folder.path(), &measured);
}

/// A run in which the hypervisor took a CPU gives no plan, a quiet run with the same costs does.
fn refuse_noisy_report(folder: &Path, measured: &serde_json::Value) {
    for (steal_percent, code) in [(90.0, 3), (0.0, 0)] {
        let mut report = measured.clone();
        report["noise"] = serde_json::json!({
            "steal_percent": steal_percent, "drift_percent": 0.0, "disturbed_percent": 0.0
        });
        let [from, to] = ["edited.json", "edited-plan.json"].map(|name| folder.join(name));
        std::fs::write(&from, report.to_string()).unwrap();
        let (output, transcript) = run(haul(&["plan", "--from"]).arg(&from).arg("--json").arg(&to));
        assert_eq!(output.status.code(), Some(code), "{transcript}");
        assert_eq!(transcript.contains("90 % of a CPU"), code == 3, "{transcript}");
        assert_eq!(to.exists(), code == 0, "{transcript}");
    }
}

#[test]
fn a_plan_is_measured_tested_written_and_used() {
    let _cpu_lock = lock_cpus();
    if !is_quiet() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(text) = measure_plan(folder.path()) else { return };
    check_and_use_plan(folder.path(), &text);
    distrust_changed_plan(folder.path(), &text);
}

/// Measures a plan; returns its file's text. `None` if other programs were busy all the time.
fn measure_plan(folder: &Path) -> Option<String> {
    let measure = |time: &str| {
        // The files of a workload need more descriptors than the soft limit of most shells.
        let haul = env!("CARGO_BIN_EXE_haul");
        let line = format!("ulimit -Sn 256; exec {haul} plan --force --for {time}");
        run(std::process::Command::new("sh").args(["-c", &line]).current_dir(folder))
    };
    // Programs that became busy after the test began leave too little time for the rounds.
    let is_short = |transcript: &str| transcript.contains("too few rounds fit into the time");
    let (mut output, mut transcript) = measure("120s");
    if is_short(&transcript) {
        (output, transcript) = measure("5m");
    }
    if is_short(&transcript) {
        eprintln!("SKIPPED: the machine is busy, so no plan was measured: {transcript}");
        return None;
    }
    assert!(output.status.success(), "{transcript}");
    for part in ["Put to the test", "haul-plan.json"] {
        assert!(transcript.contains(part), "{part:?} in {transcript}");
    }
    // The costs exclude the test workloads: there are six paths for files and five for memory, with
    // offloads on. A path is missing if other programs disturbed its rows.
    let text = std::fs::read_to_string(folder.join("haul-plan.json")).unwrap();
    let plan = parse_report(text.as_bytes()).unwrap();
    let costs = plan["costs"].as_array().unwrap();
    let has_offloads = |cost: &&serde_json::Value| cost["offloads"] == true;
    let with_offloads = costs.iter().filter(has_offloads).count();
    let warnings = plan["warnings"].to_string();
    let is_disturbed =
        ["disturbed: ", "slipped: ", "steal: "].iter().any(|it| warnings.contains(it));
    assert!(with_offloads == 11 || is_disturbed && with_offloads < 11, "{text}: {transcript}");
    assert!((1..=22).contains(&costs.len()), "{transcript}");
    // Points are absent where other programs disturbed the rows of the other sizes.
    let mut points = costs.iter().map(|cost| cost["points"].as_array().map_or(0, Vec::len));
    assert!(is_disturbed || points.any(|count| count > 1), "{transcript}");
    for source in ["a file, offloads ", "memory, offloads "] {
        assert!(is_disturbed || transcript.contains(&format!("{source}on")), "{transcript}");
    }
    assert_eq!(plan["network"]["mtu"], 9000, "{transcript}");
    let tests = plan["tests"].as_array().unwrap();
    // A test that was not measured undisturbed is left out.
    assert!(tests.len() <= 6 && (is_disturbed || !tests.is_empty()), "{transcript}");
    assert_eq!(transcript.contains("KB: "), !tests.is_empty(), "{transcript}");
    Some(text)
}

/// The row `planned` of `haul bench send`, and the library's own choice in the row `auto`.
const PLANNED: [&str; 11] = [
    "bench",
    "send",
    "--quick",
    "--rounds",
    // If there were only one round and its window slipped, no round would be left.
    "3",
    "--paths",
    "auto",
    "--plan",
    "haul-plan.json",
    "--json",
    "-",
];

fn check_and_use_plan(folder: &Path, text: &str) {
    let in_folder = |arguments: &[&str]| run(haul(arguments).current_dir(folder));
    let plan: serde_json::Value = serde_json::from_str(text).unwrap();
    let default = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
    let (output, transcript) = in_folder(&["plan", "--check"]);
    assert!(output.status.success(), "{transcript}");
    assert_eq!(
        transcript.contains("which does not pace"),
        default.starts_with("bbr"),
        "{transcript}"
    );
    let (output, transcript) = in_folder(&["plan", "--rounds", "8"]);
    assert!(
        output.status.code() == Some(2) && transcript.contains("9 rounds or more"),
        "{transcript}"
    );
    // The existing plan is used, without a measurement.
    let started = std::time::Instant::now();
    let (output, transcript) = in_folder(&["plan", "--rate", "100gbit"]);
    assert!(output.status.success(), "{transcript}");
    assert!(transcript.contains("cores (") && started.elapsed().as_secs() < 10, "{transcript}");
    let (report, _) = json_if_measured(haul(&PLANNED).current_dir(folder));
    let paths: Vec<&str> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, ["auto", "planned"]);
    // The report names the path that was taken, and the plan has costs for it.
    let taken = &report["rows"][1]["taken"];
    let is_planned = plan["costs"].as_array().unwrap().iter().any(|cost| cost["path"] == *taken);
    // On a busy machine every window slips.
    assert!(is_planned || !is_measured(&report["rows"][1]), "{taken}");
}

fn distrust_changed_plan(folder: &Path, text: &str) {
    let in_folder = |arguments: &[&str]| run(haul(arguments).current_dir(folder));
    let plan: serde_json::Value = serde_json::from_str(text).unwrap();
    let other = text.replace(plan["kernel"].as_str().unwrap(), "2.4.2");
    std::fs::write(folder.join("haul-plan.json"), other).unwrap();
    let (output, transcript) = in_folder(&["plan", "--check"]);
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(transcript.contains("kernel: 2.4.2 when it was measured"), "{transcript}");
    // A plan that was measured on another kernel is used, with a warning.
    let (output, transcript) = in_folder(&["plan", "--rate", "1gbit"]);
    assert!(
        output.status.success() && transcript.contains("was made before this machine changed"),
        "{transcript}"
    );
    std::fs::write(folder.join("haul-plan.json"), &text[..text.len() / 2]).unwrap();
    for arguments in [&["plan", "--check"][..], &["plan", "--rate", "1gbit"], &PLANNED] {
        let (output, transcript) = in_folder(arguments);
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        assert_eq!((output.status.code(), lines), (Some(2), 1), "{transcript}");
        assert!(transcript.contains("haul-plan.json is not a valid plan"), "{transcript}");
    }
}

#[test]
fn an_unusable_report_is_a_one_line_error() {
    let folder = tempfile::tempdir().unwrap();
    let error_for = |content: Option<&str>| {
        let path = folder.path().join("report.json");
        match content {
            Some(content) => std::fs::write(&path, content).unwrap(),
            None => drop(std::fs::remove_file(&path)),
        }
        let (output, transcript) = run(&mut haul(&["plan", "--from", path.to_str().unwrap()]));
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        assert_eq!((output.status.code(), lines), (Some(2), 1), "{transcript}");
        transcript
    };
    assert!(error_for(None).contains("haul bench"));
    assert!(error_for(Some("")).contains("not a report"));
    assert!(error_for(Some("{\"schema\":\"haul.soak/1\"}")).contains("not a report"));
}
