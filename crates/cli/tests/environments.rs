//! haul on hosts whose settings, networks and permissions differ from the usual ones.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod report;
    pub mod schema;
    pub mod user;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::report::parse_report;
use common::user::as_unprivileged_user;
use haul_lab::{Lab, LabError, Settings};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

/// A lab. Without two hosts, prints a message that begins with `SKIPPED` and returns `None`.
fn open_lab() -> Option<Lab> {
    match Lab::veth(&Settings::default()) {
        Ok(lab) => Some(lab),
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: there are no two hosts here: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs a script in a new network namespace, if this user may create one.
fn in_new_network(script: &str) -> Option<String> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--map-root-user", "sh", "-ec", script]);
    let (output, transcript) = run(command.env("HAUL", env!("CARGO_BIN_EXE_haul")));
    if transcript.contains("unshare failed") {
        eprintln!("SKIPPED: no network namespace can be created here: {transcript}");
        return None;
    }
    assert!(output.status.success(), "{transcript}");
    Some(transcript)
}

fn rows(report: &Value) -> &Vec<Value> {
    report["rows"].as_array().unwrap()
}

#[test]
fn rows_on_loopback_state_the_mtu_of_the_device() {
    let _cpu_lock = lock_cpus();
    let on_one_cpu = |extra: &[&str]| {
        let mut command = Command::new("taskset");
        command.args(["-c", "0", env!("CARGO_BIN_EXE_haul"), "bench", "receive"]);
        command.args(["--rounds", "1", "--paths", "read", "--json", "-"]).args(extra);
        command
    };
    let report = json(&mut on_one_cpu(&[]));
    assert_eq!(report["lab"]["kind"], "loopback");
    assert!(rows(&report).iter().all(|row| row["mtu"] == report["lab"]["mtu"]), "{report}");
    let (output, transcript) = run(&mut on_one_cpu(&["--mtu", "1500"]));
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    assert!(transcript.contains("cannot be set to 1500 on loopback"), "{transcript}");
}

#[test]
fn a_workload_may_have_any_name_but_must_be_a_regular_file() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let send = |workload: &OsStr| {
        let mut command = haul(&["bench", "send", "--rounds", "1", "--paths", "sendfile"]);
        command.args(["--json", "-", "--workload"]).arg(workload);
        run(&mut command)
    };
    let (output, transcript) = send(format!("file:{}", pipe.display()).as_ref());
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("not a regular file"), "{transcript}");
    let name = folder.path().join(OsStr::from_bytes(b"w\xff"));
    fs::write(&name, vec![7; 1 << 20]).unwrap();
    let workload = [b"file:", name.as_os_str().as_bytes()].concat();
    let (output, transcript) = send(OsStr::from_bytes(&workload));
    assert!(output.status.success(), "{transcript}");
}

#[test]
fn doctor_examines_the_device_of_the_ipv6_default_route() {
    let script = "ip link set lo up
        ip link add eth7 type veth peer name px; ip link set eth7 up; ip link set px up
        ip -6 addr add 2001:db8::2/64 dev eth7 nodad
        ip -6 route add default via 2001:db8::1 dev eth7
        $HAUL doctor";
    let Some(transcript) = in_new_network(script) else { return };
    assert!(transcript.contains("through eth7"), "{transcript}");
    let Some(transcript) = in_new_network("ip link set lo up; $HAUL doctor") else { return };
    assert!(transcript.contains("There is no default route"), "{transcript}");
}

#[test]
fn doctor_reports_a_peer_whose_firewall_rejects() {
    let Some(lab) = open_lab() else { return };
    let rules = "add table ip f; add chain ip f i { type filter hook input priority 0; }; \
                 add rule ip f i tcp dport 9 reject with icmp type admin-prohibited";
    let loaded = lab.receiver.run(|| Command::new("nft").arg(rules).status()).unwrap();
    if !loaded.is_ok_and(|status| status.success()) {
        return eprintln!("SKIPPED: no firewall can be set up here (nft)");
    }
    let peer = lab.receiver.address().to_string();
    let (output, transcript) =
        lab.sender.run(|| run(&mut haul(&["doctor", "--peer", &peer]))).unwrap();
    assert!(output.status.success(), "{transcript}");
    assert!(transcript.contains("port 9 was rejected"), "{transcript}");
    assert!(transcript.contains("MTU: 9000"), "{transcript}");
}

#[test]
fn a_listener_accepts_ipv4_also_if_ipv6_sockets_exclude_it() {
    let _cpu_lock = lock_cpus();
    let Some(lab) = open_lab() else { return };
    lab.receiver.set_sysctl("net.ipv6.bindv6only", "1").unwrap();
    let (stderr, stderr_writer) = std::io::pipe().unwrap();
    let mut command = haul(&["bench", "--listen"]);
    command.stdin(Stdio::null()).stderr(stderr_writer);
    let _listener = lab.receiver.start_program(command).unwrap();
    let mut line = String::new();
    BufReader::new(stderr).read_line(&mut line).unwrap();
    assert!(line.contains("listening on [::]:4285"), "{line}");
    let address = (lab.receiver.address(), 4285);
    lab.sender.run(|| TcpStream::connect(address)).unwrap().unwrap();
}

#[test]
fn the_lab_drops_packets_although_nft_is_not_in_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["lab", "--loss", "1%", "--", "true"];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let (output, transcript) = run(command.env("PATH", "/usr/bin:/bin"));
    if transcript.contains("nft is neither in PATH") {
        return eprintln!("SKIPPED: nftables is not installed (ci/install)");
    }
    assert!(output.status.success(), "{transcript}");
}

#[test]
fn programs_of_the_lab_see_the_devices_of_their_host() {
    let line = "ls /sys/class/net; ls -d /sys/fs/cgroup/* | head -n 1";
    let (output, transcript) = run(&mut haul(&["lab", "--", "sh", "-c", line]));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("haul0\nlo\n"), "{transcript}");
    // What is mounted below /sys stays.
    let has_groups = fs::read_dir("/sys/fs/cgroup").is_ok_and(|mut groups| groups.next().is_some());
    assert_eq!(text.contains("/sys/fs/cgroup/"), has_groups, "{transcript}");
}

/// A program that its user may not read is not dumpable, so that its files in /proc are root's.
#[test]
fn a_program_that_cannot_be_read_measures_in_its_namespaces() {
    let _cpu_lock = lock_cpus();
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["bench", "send", "--rounds", "1", "--paths", "sendfile", "--workload", "4x1MB"];
    let Some(mut command) = as_unprivileged_user(folder.path(), &arguments) else { return };
    let program = folder.path().join("haul");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o711)).unwrap();
    let (output, transcript) = run(command.args(["--json", "-"]));
    assert!(output.status.success(), "{transcript}");
    let report = parse_report(&output.stdout).unwrap();
    assert_eq!(report["lab"]["kind"], "veth", "{transcript}");
    assert!(rows(&report)[0]["refused"].is_null(), "{transcript}");
}

#[test]
fn doctor_tells_which_profiles_a_capability_allows() {
    let folder = tempfile::tempdir().unwrap();
    if as_unprivileged_user(folder.path(), &[]).is_none() {
        return;
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.args(["--inh-caps=+perfmon,+syslog", "--ambient-caps=+perfmon,+syslog", "--"]);
    let (output, transcript) = run(command.arg(folder.path().join("haul")).arg("doctor"));
    if !output.status.success() {
        return eprintln!("SKIPPED: no capability can be given away here: {transcript}");
    }
    let profile = transcript.lines().find(|line| line.contains("profile:")).unwrap();
    // A host may allow every user to sample its CPUs.
    assert!(profile.contains("a command only") || profile.contains("available"), "{transcript}");
}

/// Containers may drop the capabilities of root and leave the files of /proc/sys writable by mode.
#[test]
fn rows_that_need_a_setting_are_refused_and_the_others_are_measured() {
    let _cpu_lock = lock_cpus();
    if !rustix::process::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can give up capabilities of root");
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_admin,-sys_admin", "--inh-caps=-all"]);
    command.args([env!("CARGO_BIN_EXE_haul"), "bench", "receive", "--rounds", "1", "--paths"]);
    command.args(["read", "--page-order", "default,single", "--json", "-"]);
    let report = json(&mut command);
    let refusal = |order: &str| {
        let row = rows(&report).iter().find(|row| row["page_order"] == order).unwrap();
        row["refused"].as_str().map(str::to_owned)
    };
    assert_eq!(refusal("default"), None);
    assert!(refusal("single").unwrap().contains("high_order_alloc_disable"), "{report}");
}

/// Whatever a row uses of a machine whose CPUs are all in use, the difference of two loads does not
/// show it.
#[test]
fn a_row_between_two_busy_machines_has_no_cost() {
    let _cpu_lock = lock_cpus();
    let Some(lab) = open_lab() else { return };
    let (stderr, stderr_writer) = std::io::pipe().unwrap();
    let mut command = haul(&["bench", "--listen"]);
    command.stdin(Stdio::null()).stderr(stderr_writer);
    let _listener = lab.receiver.start_program(command).unwrap();
    let mut stderr = BufReader::new(stderr);
    stderr.read_line(&mut String::new()).unwrap();
    let mut busy = Command::new("timeout");
    busy.args(["60", "sh", "-c", "while :; do :; done"]);
    let _busy = lab.sender.start_program(busy).unwrap();
    let peer = lab.receiver.address().to_string();
    let arguments = ["bench", "send", "--rounds", "3", "--paths", "sendfile", "--to", &peer];
    let (output, transcript) =
        lab.sender.run(|| run(haul(&arguments).args(["--json", "-"]))).unwrap();
    assert_eq!(output.status.code(), Some(3), "{transcript}");
    let report = parse_report(&output.stdout).unwrap();
    let row = &rows(&report)[0];
    assert!(row["sender_us_per_mib"].is_null(), "{row}");
    assert!(row["disturbed_percent"].as_f64().unwrap() > 50.0, "{row}");
    assert!(row["refused"].as_str().unwrap().contains("other programs used"), "{row}");
}

#[test]
fn a_width_of_0_is_an_unknown_width_and_a_full_disk_an_error() {
    for arguments in [&["doctor"][..], &["--help"], &["bench", "--help"]] {
        let (output, transcript) = run(haul(arguments).env("COLUMNS", "0"));
        assert!(output.status.success(), "{transcript}");
        let lines = String::from_utf8_lossy(&output.stdout).lines().count();
        assert!(lines < 200, "{lines} lines: {transcript}");
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let status = haul(arguments).stdout(full).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(1), "{arguments:?}");
    }
}

/// A second measurement waits for the first, or both learn that they disturb each other.
#[test]
fn two_measurements_notice_each_other() {
    let _cpu_lock = lock_cpus();
    let mut first = haul(&["soak", "--for", "3s"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Both tell their standard error what they notice.
    let mut second = haul(&["soak", "--for", "100ms"]);
    let waiting = loop {
        let (output, transcript) = run(&mut second);
        assert!(output.status.success(), "{transcript}");
        if transcript.contains("waiting until process") || first.try_wait().unwrap().is_some() {
            break transcript;
        }
    };
    if !waiting.contains("soak --for 3s)") && waiting.contains("waiting until") {
        return eprintln!("SKIPPED: another haul measures on this machine: {waiting}");
    }
    assert!(waiting.contains("soak --for 3s) ends its measurement"), "{waiting}");
    assert!(first.wait().unwrap().success());
    let (output, transcript) =
        run(&mut haul(&["soak", "--", env!("CARGO_BIN_EXE_haul"), "soak", "--for", "100ms"]));
    assert!(output.status.success(), "{transcript}");
    assert!(transcript.contains("the figures of both are wrong"), "{transcript}");
    assert!(transcript.contains("another haul measured at the same time"), "{transcript}");
}

/// In a new process namespace, the inner measurement does not see which process waits for it.
#[test]
fn a_measured_container_that_measures_does_not_wait_for_its_own_end() {
    let _cpu_lock = lock_cpus();
    let program = env!("CARGO_BIN_EXE_haul");
    let container = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
    let inner = [program, "soak", "--for", "100ms"];
    let (output, transcript) = run(&mut haul(&[&["soak", "--"][..], &container, &inner].concat()));
    if transcript.contains("unshare failed") {
        return eprintln!("SKIPPED: no process namespace can be created here: {transcript}");
    }
    assert!(output.status.success(), "{transcript}");
    assert!(transcript.contains("the figures of both are wrong"), "{transcript}");
}
