//! `haul compare`: two runs row by row, and two builds in one run.

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
use serde_json::Value;
use std::fs;
use std::sync::LazyLock;

/// A report of `haul bench send` with two rows; also written to the file.
fn report(file: &std::path::Path) -> Value {
    static MEASURED: LazyLock<Value> = LazyLock::new(measure_report);
    fs::write(file, MEASURED.to_string()).unwrap();
    MEASURED.clone()
}

fn measure_report() -> Value {
    let mut report = json(&mut haul(&[
        "bench",
        "send",
        "--quick",
        "--paths",
        "read+write,sendfile",
        "--rounds",
        "9",
        "--json",
        "-",
    ]));
    // On a busy machine too few rounds may be usable for a finding.
    for (row, cost) in report["rows"].as_array_mut().unwrap().iter_mut().zip([500.0, 200.0]) {
        let round = |number: u32| {
            let noise = 1.0 + 0.01 * f64::from(number * 7 % 5);
            serde_json::json!({"round": number, "cost": cost * noise, "other_host_cost": null})
        };
        row["round_costs"] = (0..15).map(round).collect();
        row["disturbed_percent"] = Value::Null;
    }
    report["noise"] = Value::Null;
    report
}

fn row<'a>(comparison: &'a Value, name: &str) -> &'a Value {
    let rows = comparison["rows"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {comparison}"))
}

/// Makes every cost of a row dearer.
fn make_dearer(report: &mut Value, path: &str, factor: f64) {
    for row in report["rows"].as_array_mut().unwrap().iter_mut().filter(|row| row["path"] == path) {
        for round in row["round_costs"].as_array_mut().unwrap() {
            round["cost"] = (round["cost"].as_f64().unwrap() * factor).into();
        }
    }
}

#[test]
fn a_run_equals_itself_and_a_dearer_row_is_found() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.json"), folder.path().join("b.json"));
    let mut changed = report(&a);
    let compare = |extra: &[&str]| {
        let files = [a.to_str().unwrap(), b.to_str().unwrap()];
        json(&mut haul(&[&["compare", files[0], files[1], "--json", "-"], extra].concat()))
    };
    fs::copy(&a, &b).unwrap();
    let same = compare(&["--fail-above", "1%"]);
    assert_eq!(same["schema"], "haul.compare/1");
    for name in ["read+write", "sendfile"] {
        let row = row(&same, name);
        assert_eq!(row["finding"]["difference"], "not-shown", "{row}");
        assert!((row["ratio"]["median"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");
    }
    make_dearer(&mut changed, "sendfile", 3.0);
    changed["host"]["kernel"] = "9.9".into();
    changed["lab"]["mtu"] = 1500.into();
    fs::write(&b, changed.to_string()).unwrap();
    let other = compare(&[]);
    assert_eq!(row(&other, "sendfile")["finding"]["difference"], "more", "{other}");
    assert_eq!(row(&other, "read+write")["finding"]["difference"], "not-shown", "{other}");
    let differences = other["differences"].to_string();
    assert!(differences.contains("kernel") && differences.contains("MTU"), "{differences}");
    let files = [a.to_str().unwrap(), b.to_str().unwrap()];
    let (output, transcript) =
        run(&mut haul(&["compare", files[0], files[1], "--fail-above", "50%"]));
    assert_eq!(output.status.code(), Some(1), "{transcript}");
    assert!(transcript.contains("B costs more in 1 of 2 rows: send sendfile"), "{transcript}");
}

/// Nine rounds support a certain finding of up to 12 rows. Of more rows a check must not pass
/// because no finding is certain.
#[test]
fn a_check_does_not_pass_if_a_row_is_only_likely_dearer() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.json"), folder.path().join("b.json"));
    let mut many = report(&a);
    let rows = many["rows"].as_array_mut().unwrap();
    let row = rows[1].clone();
    rows.extend((1..15).map(|number| {
        let mut row = row.clone();
        row["chunk_bytes"] = (4096 * number).into();
        row
    }));
    for row in rows {
        row["round_costs"].as_array_mut().unwrap().truncate(9);
    }
    fs::write(&a, many.to_string()).unwrap();
    make_dearer(&mut many, "sendfile", 1.5);
    fs::write(&b, many.to_string()).unwrap();
    let check = |limit: &str| {
        let files = [a.to_str().unwrap(), b.to_str().unwrap()];
        run(&mut haul(&["compare", files[0], files[1], "--fail-above", limit]))
    };
    let (output, transcript) = check("15%");
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    assert!(transcript.contains("likely dearer"), "{transcript}");
    let (output, transcript) = check("90%");
    assert!(output.status.success(), "{transcript}");
}

#[test]
fn runs_without_a_common_row_or_of_a_noisy_machine_give_no_finding() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.json"), folder.path().join("b.json"));
    let mut changed = report(&a);
    let files = [a.to_str().unwrap(), b.to_str().unwrap()];
    make_dearer(&mut changed, "sendfile", 3.0);
    changed["noise"] = serde_json::json!(
        {"steal_percent": 40.0, "drift_percent": 0.0, "disturbed_percent": 0.0}
    );
    changed["lab"]["reading"] = "free".into();
    // A list of reports is what a run of all experiments writes.
    fs::write(&b, serde_json::json!([changed]).to_string()).unwrap();
    let (output, transcript) = run(&mut haul(&["compare", files[0], files[1], "--json", "-"]));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    let comparison = parse_report(&output.stdout).unwrap();
    assert_eq!(row(&comparison, "sendfile")["finding"]["difference"], "not-shown");
    let text = comparison["warnings"].to_string() + &comparison["differences"].to_string();
    assert!(text.contains("took 40 % of a CPU") && text.contains("reading: held"), "{text}");
    for row in changed["rows"].as_array_mut().unwrap() {
        row["chunk_bytes"] = 512.into();
    }
    fs::write(&b, changed.to_string()).unwrap();
    let (output, transcript) = run(&mut haul(&["compare", files[0], files[1]]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("no row in common"), "{transcript}");
    let (output, transcript) = run(&mut haul(&["compare", files[0], files[0], "--for", "5s"]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
}

#[test]
fn two_builds_are_measured_in_the_same_rounds() {
    let _cpu_lock = lock_cpus();
    let build = env!("CARGO_BIN_EXE_haul");
    let (output, transcript) = run(&mut haul(&[
        "compare", build, build, "--paths", "sendfile", "--for", "2s", "--json", "-",
    ]));
    // In so short a time there may be too few rounds for an answer.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{transcript}");
    let comparison = parse_report(&output.stdout).unwrap();
    assert_eq!(comparison["is_interleaved"], true);
    let row = row(&comparison, "sendfile");
    // A busy machine may leave one of the builds without a round.
    let is_compared = output.status.success() || !row["ratio"].is_null();
    assert!(!is_compared || row["ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
    assert!(row["compared_with"].is_null(), "{row}");
}

#[test]
fn a_file_that_is_no_report_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.json");
    fs::write(&file, "{\"schema\":\"haul.soak/1\",\"experiment\":\"send\"}").unwrap();
    let name = file.to_str().unwrap();
    let (output, transcript) = run(&mut haul(&["compare", name, name]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("haul.soak/1"), "{transcript}");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let name = empty.to_str().unwrap();
    let (output, transcript) = run(&mut haul(&["compare", name, name]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("does not contain a report"), "{transcript}");
}

/// A check in a script must not pass because the new build does not start.
#[test]
fn a_build_that_measures_nothing_passes_no_check() {
    let _cpu_lock = lock_cpus();
    let build = env!("CARGO_BIN_EXE_haul");
    // As the first build, it also has to be the one that the rows are named by.
    for builds in [[build, "/bin/true"], ["/bin/true", build]] {
        let arguments = ["compare", builds[0], builds[1], "--paths", "sendfile", "--for", "2s"];
        let (output, transcript) = run(haul(&arguments).args(["--fail-above", "5%"]));
        assert_eq!(output.status.code(), Some(3), "{transcript}");
        assert!(transcript.contains("no row could be compared"), "{transcript}");
        // On a busy machine, a round may be unusable before the process that failed is noticed.
        let reasons = ["a process of the run failed", "other programs", "other processes took"];
        assert!(reasons.iter().any(|reason| transcript.contains(reason)), "{transcript}");
    }
}

/// `haul bench interrupts` measures no row on loopback, and states why.
#[test]
fn experiments_without_a_measured_row_are_named_and_the_others_compared() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let mut measured = report(&folder.path().join("send.json"));
    for row in measured["rows"].as_array_mut().unwrap() {
        row["round_costs"] = serde_json::json!([]);
        row["refused"] = "no two hosts here".into();
    }
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("send.json"), measured.to_string()).unwrap();
    let folder = folder.path().to_str().unwrap();
    let other = other.to_str().unwrap();
    let (output, transcript) = run(&mut haul(&["compare", folder, other]));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    assert!(transcript.contains("send: no two hosts here"), "{transcript}");
    let (output, transcript) = run(&mut haul(&["compare", folder, folder, "--fail-above", "5%"]));
    assert!(output.status.success(), "{transcript}");
}

/// A shell gives a process substitution as a path that can be read once.
#[test]
fn reports_are_compared_from_pipes() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("send.json");
    report(&file);
    let program = env!("CARGO_BIN_EXE_haul");
    let line = format!("{program} compare <(cat {0}) <(cat {0})", file.display());
    let (output, transcript) = run(std::process::Command::new("bash").args(["-c", &line]));
    assert!(output.status.success(), "{transcript}");
}

/// The reports of real programs: iperf3 over loopback, and `haul soak`.
#[test]
fn reports_of_iperf3_and_soak_are_compared() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let measure = "haul soak --json - -- sh -c 'head -c 200M /dev/zero > /dev/null; sleep 0.6'";
    let measure = measure.replace("haul", env!("CARGO_BIN_EXE_haul"));
    let soak = path("soak.json");
    let line = format!("for i in 1 2 3 4 5 6 7 8 9; do {measure} || exit 1; done > {soak}");
    let (output, transcript) = run(std::process::Command::new("sh").args(["-c", &line]));
    assert!(output.status.success(), "{transcript}");
    // On a busy machine the runs may support no finding, and the exit code is 3.
    let compare = |file: &str| -> Value {
        let (output, transcript) = run(&mut haul(&["compare", file, file, "--json", "-"]));
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{transcript}"))
    };
    let comparison = compare(&soak);
    assert_eq!(comparison["rows"][0]["a"]["rounds"], 9, "{comparison}");

    let Some(report) = iperf3() else {
        eprintln!("SKIPPED: iperf3 is not installed (sudo ci/install installs it)");
        return;
    };
    let test = path("iperf3.json");
    fs::write(&test, report.repeat(9)).unwrap();
    let comparison = compare(&test);
    for name in ["sender", "receiver"] {
        assert_eq!(row(&comparison, name)["a"]["rounds"], 9, "{comparison}");
        assert!(row(&comparison, name)["a"]["median"].as_f64() > Some(0.0), "{comparison}");
    }
    let (output, transcript) = run(&mut haul(&["compare", &test, &soak]));
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("no row in common"), "{transcript}");
}

/// The report of a short test; `None` without iperf3.
fn iperf3() -> Option<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let mut server = std::process::Command::new("iperf3")
        .args(["--server", "--one-off", "--port", &port])
        .stdout(std::process::Stdio::null())
        .spawn()
        .ok()?;
    let client = || {
        let arguments = ["--client", "127.0.0.1", "--port", &port, "--time", "1", "--json"];
        std::process::Command::new("iperf3").args(arguments).output().unwrap()
    };
    // The server listens a moment after it was started.
    let outputs = std::iter::repeat_with(|| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        client()
    });
    let output = outputs.take(600).find(|output| output.status.success());
    let _ = server.kill();
    server.wait().unwrap();
    Some(String::from_utf8(output.expect("iperf3 measures").stdout).unwrap())
}
