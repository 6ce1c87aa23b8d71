//! `haul doctor`, `haul lab` and `haul plan`.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod user;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::user::as_ordinary_user;
use std::collections::BTreeSet;

#[test]
fn doctor_names_every_path_and_says_how_to_mend_what_is_wrong() {
    let diagnosis = json(&mut haul(&["doctor", "--peer", "127.0.0.1", "--json", "-"]));
    assert_eq!(diagnosis["schema"], "haul.doctor/1");
    assert_eq!(diagnosis["device"]["name"], "lo");
    let paths = diagnosis["paths"].as_array().unwrap();
    assert_eq!(paths.len(), 10);
    let sendfile = paths.iter().find(|path| path["path"] == "sendfile").unwrap();
    assert_eq!((&sendfile["available"], &sendfile["avoids_copy"]), (&true.into(), &true.into()));
    let zerocopy = paths.iter().find(|path| path["path"] == "zerocopy").unwrap();
    assert_eq!(zerocopy["avoids_copy"], false, "on loopback the kernel copies");
    for setting in diagnosis["settings"].as_array().unwrap() {
        assert_eq!(setting["verdict"] == "good", setting["mend"].is_null(), "{setting}");
    }
}

#[test]
fn doctor_and_lab_agree_on_what_an_ordinary_user_may() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = as_ordinary_user(folder.path(), &["doctor", "--json", "-"]) else {
        return;
    };
    let diagnosis = json(&mut command);
    let settings = diagnosis["settings"].as_array().unwrap();
    let namespaces = settings.iter().find(|setting| setting["name"] == "namespaces").unwrap();
    let Some(mut command) = as_ordinary_user(folder.path(), &["lab", "--", "true"]) else { return };
    let (output, words) = run(&mut command);
    assert_eq!(output.status.success(), namespaces["verdict"] == "good", "{words}: {namespaces}");
}

#[test]
fn doctor_sees_a_device_without_scatter_gather() {
    let program = env!("CARGO_BIN_EXE_haul");
    let script = format!(
        "ethtool -K haul0 tx off sg off >&2 && exec {program} doctor --peer $HAUL_PEER --json -"
    );
    let (output, words) = run(&mut haul(&["lab", "--", "sh", "-c", &script]));
    if words.contains("ethtool: not found") {
        return eprintln!("SKIPPED: ethtool is missing");
    }
    assert!(output.status.success(), "{words}");
    let diagnosis: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let paths = diagnosis["paths"].as_array().unwrap();
    let sendfile = paths.iter().find(|path| path["path"] == "sendfile").unwrap();
    assert_eq!(sendfile["avoids_copy"], false, "{sendfile}");
    assert!(sendfile["mend"].as_str().unwrap().contains("ethtool -K haul0"), "{sendfile}");
}

#[test]
fn the_lab_runs_programs_on_both_hosts() {
    let (output, words) =
        run(&mut haul(&["lab", "--", "sh", "-c", "echo peer $HAUL_PEER; exit 5"]));
    assert_eq!(output.status.code(), Some(5), "{words}");
    assert!(words.contains("peer 10.77.0.2"), "{words}");
    let (output, words) = run(&mut haul(&["lab", "--receiver", "sleep 1000", "--", "true"]));
    assert!(output.status.success() && output.stderr.is_empty(), "{words}");
    // The reader of a FIFO sees its end when the writer's process does.
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    let make = format!("mkfifo {}", fifo.display());
    assert!(std::process::Command::new("sh").args(["-c", &make]).status().unwrap().success());
    let (receiver, sender) =
        (format!("exec > {}; exit 7", fifo.display()), format!("cat {}", fifo.display()));
    let (output, words) =
        run(&mut haul(&["lab", "--receiver", &receiver, "--", "sh", "-c", &sender]));
    assert!(output.status.success() && words.contains("exit status: 7"), "{words}");
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let line = format!("{} doctor | head -n 1", env!("CARGO_BIN_EXE_haul"));
    let (output, words) = run(std::process::Command::new("sh").args(["-c", &line]));
    assert!(output.status.success() && output.stderr.is_empty(), "{words}");
}

#[test]
fn a_plan_comes_out_of_a_report_and_names_what_it_chose() {
    let _alone = lock_cpus();
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
    let measured: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    // Of the rows of two sizes each, those that another program of this machine has disturbed are no part of the plan; nor
    // are the floor, which sends nothing, and the choice itself.
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
    let (output, words) = run(&mut haul(&["plan", "--from", report, "--json", plan]));
    if clean.is_empty() {
        eprintln!("SKIPPED: other programs ran in every row: {words}");
        return assert_eq!(output.status.code(), Some(2), "{words}");
    }
    assert!(output.status.success() && words.contains("a file, offloads on, "), "{words}");
    let loaded: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(plan).unwrap()).unwrap();
    assert_eq!(loaded["schema"], "haul.plan/1");
    let costs = loaded["costs"].as_array().unwrap();
    let paths: BTreeSet<&str> = costs.iter().map(|cost| cost["path"].as_str().unwrap()).collect();
    assert_eq!(paths, clean);
    // On standard output the plan stands alone.
    let printed = json(&mut haul(&["plan", "--from", report, "--json", "-"]));
    assert_eq!(printed, loaded);
}

#[test]
fn a_plan_is_measured_put_to_the_test_and_kept() {
    let _alone = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let in_folder = |arguments: &[&str]| run(haul(arguments).current_dir(folder.path()));
    let (output, words) = in_folder(&["plan", "--force"]);
    assert!(output.status.success(), "{words}");
    for part in
        ["a file, offloads on", "memory, offloads on", "Put to the test", "KB: ", "haul-plan.json"]
    {
        assert!(words.contains(part), "{part:?} in {words}");
    }
    // What it was put to the test with is no part of it: six paths for files, five for memory, with offloads on and, unless
    // other programs have disturbed their two rows each, off.
    let text = std::fs::read_to_string(folder.path().join("haul-plan.json")).unwrap();
    let plan: serde_json::Value = serde_json::from_str(&text).unwrap();
    let costs = plan["costs"].as_array().unwrap();
    let has_offloads = |cost: &&serde_json::Value| cost["offloads"] == true;
    assert!(costs.iter().filter(has_offloads).count() == 11 && costs.len() <= 22, "{words}");
    let first = costs.iter().find(has_offloads).unwrap();
    assert!(first["points"].as_array().unwrap().len() > 1, "{words}");
    assert_eq!(plan["network"]["mtu"], 9000, "{words}");
    let tests = plan["tests"].as_array().unwrap();
    assert!((1..=6).contains(&tests.len()), "{words}");
    let default = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
    let (output, words) = in_folder(&["plan", "--check"]);
    assert!(output.status.success(), "{words}");
    assert_eq!(words.contains("which does not pace"), default.starts_with("bbr"), "{words}");
    let (output, words) = in_folder(&["plan", "--rounds", "8"]);
    assert!(output.status.code() == Some(2) && words.contains("9 rounds or more"), "{words}");
    // By the plan that is there, without measuring.
    let started = std::time::Instant::now();
    let (output, words) = in_folder(&["plan", "--rate", "100gbit"]);
    assert!(output.status.success() && words.contains("files, sendfile: "), "{words}");
    assert!(words.contains("cores (") && started.elapsed().as_secs() < 10, "{words}");
    // The library's choice by this plan stands beside its own.
    let arguments = [
        "bench",
        "send",
        "--quick",
        "--rounds",
        // Of one alone nothing would be left where its windows slipped.
        "3",
        "--paths",
        "auto",
        "--plan",
        "haul-plan.json",
        "--json",
        "-",
    ];
    let report = json(haul(&arguments).current_dir(folder.path()));
    let paths: Vec<&str> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["path"].as_str().unwrap())
        .collect();
    assert_eq!(paths, ["auto", "planned"]);
    // Which path was taken is said, and it is one that the plan knows.
    let taken = &report["rows"][1]["taken"];
    assert!(plan["costs"].as_array().unwrap().iter().any(|cost| cost["path"] == *taken), "{taken}");
    let other = text.replace(plan["kernel"].as_str().unwrap(), "2.4.2");
    std::fs::write(folder.path().join("haul-plan.json"), other).unwrap();
    let (output, words) = in_folder(&["plan", "--check"]);
    assert_eq!(output.status.code(), Some(1), "{words}");
    assert!(words.contains("kernel: 2.4.2 when it was measured"), "{words}");
    // A plan of another machine is used, and says so.
    let (output, words) = in_folder(&["plan", "--rate", "1gbit"]);
    assert!(
        output.status.success() && words.contains("was made before this machine changed"),
        "{words}"
    );
    std::fs::write(folder.path().join("haul-plan.json"), &text[..text.len() / 2]).unwrap();
    for arguments in [&["plan", "--check"][..], &["plan", "--rate", "1gbit"], &arguments] {
        let (output, words) = in_folder(arguments);
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        assert_eq!((output.status.code(), lines), (Some(2), 1), "{words}");
        assert!(words.contains("haul-plan.json is not one"), "{words}");
    }
}

#[test]
fn what_no_plan_can_be_made_of_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let says = |content: Option<&str>| {
        let path = folder.path().join("report.json");
        match content {
            Some(content) => std::fs::write(&path, content).unwrap(),
            None => drop(std::fs::remove_file(&path)),
        }
        let (output, words) = run(&mut haul(&["plan", "--from", path.to_str().unwrap()]));
        let lines = String::from_utf8_lossy(&output.stderr).lines().count();
        assert_eq!((output.status.code(), lines), (Some(2), 1), "{words}");
        words
    };
    assert!(says(None).contains("haul bench"));
    assert!(says(Some("")).contains("no report"));
    assert!(says(Some("{\"schema\":\"haul.soak/1\"}")).contains("no report"));
}
