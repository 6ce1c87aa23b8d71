//! `haul bench --to` and `--listen` between two hosts of a lab, which share nothing but an address,
//! and the behaviour towards peers with another protocol.

mod common {
    pub mod busy;
    pub mod command;
    pub mod cpus;
    pub mod json;
    pub mod quiet;
    pub mod report;
    pub mod schema;
}

use common::busy::{is_measured, json_if_measured};
use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use common::quiet::is_quiet;
use haul_lab::{Lab, LabError, Running, Settings};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::RwLockWriteGuard;
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 4285;

/// The process of `haul bench --listen`, and the CPU lock for as long as it runs.
struct Listener {
    process: Running,
    _cpu_lock: RwLockWriteGuard<'static, ()>,
}

/// Starts `haul bench --listen` on the receiving host of a lab, and returns its standard error too.
///
/// If there is no lab, prints a message that begins with `SKIPPED` and returns `None`.
fn start_listener() -> Option<(Lab, Listener, BufReader<io::PipeReader>)> {
    let cpu_lock = lock_cpus();
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: there are no two hosts here: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (stderr, stderr_writer) = io::pipe().unwrap();
    let mut command = haul(&["bench", "--listen"]);
    command.stdin(Stdio::null()).stderr(stderr_writer);
    let process = lab.receiver.start_program(command).unwrap();
    let mut stderr = BufReader::new(stderr);
    assert_next_line(&mut stderr, "listening on [::]:4285");
    Some((lab, Listener { process, _cpu_lock: cpu_lock }, stderr))
}

/// Waits for the next line and asserts that it contains `expected`.
fn assert_next_line(reader: &mut impl BufRead, expected: &str) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.contains(expected), "{expected:?} in {line:?}");
}

/// Returns a command for the sending host that measures with the receiving host.
fn haul_to_receiver(lab: &Lab, arguments: &[&str]) -> Command {
    let mut command = haul(arguments);
    command.args(["--to", &lab.receiver.address().to_string()]);
    command
}

#[test]
fn each_of_two_machines_measures_its_own_load() {
    let Some((lab, _listener, mut stderr)) = start_listener() else { return };
    if !is_quiet() {
        return;
    }
    for (experiment, cost) in [
        ("send", "sender_us_per_mib"),
        ("receive", "receiver_us_per_mib"),
        ("forward", "forwarder_us_per_mib"),
    ] {
        let arguments = ["bench", experiment, "--quick", "--rounds", "1", "--json", "-"];
        let measure = || json_if_measured(&mut haul_to_receiver(&lab, &arguments));
        // Other tests run at the same time, and can take the CPU in the only round of many rows. A
        // cost with the wrong sign or of the wrong host would be wrong in every attempt.
        let mut costs = Vec::new();
        for _ in 0..3 {
            let (report, has_figures) = lab.sender.run(measure).unwrap();
            assert_next_line(&mut stderr, "has come");
            assert_next_line(&mut stderr, "has gone");
            check_report_of_two_machines(&report, experiment, has_figures);
            if !has_figures {
                eprintln!("SKIPPED: other programs ran during {experiment}, so there is no load");
                costs.clear();
                break;
            }
            let rows = report["rows"].as_array().unwrap();
            let measured = rows.iter().filter(|row| row["refused"].is_null());
            costs = measured.map(|row| row[cost]["median"].as_f64().unwrap()).collect();
            if is_mostly_positive(&costs) {
                break;
            }
        }
        assert!(costs.is_empty() || is_mostly_positive(&costs), "{experiment}: {costs:?}");
    }
}

fn is_mostly_positive(costs: &[f64]) -> bool {
    costs.iter().filter(|cost| **cost > 0.0).count() * 2 > costs.len()
}

fn check_report_of_two_machines(report: &Value, experiment: &str, has_figures: bool) {
    assert_eq!(report["schema"], "haul.bench/1");
    assert_eq!(report["lab"]["kind"], "remote");
    assert_eq!(report["lab"]["mtu"], 9000);
    assert_eq!(report["lab"]["peer"]["address"], "10.77.0.2:4285");
    assert!(report["lab"]["peer"]["host"]["kernel"].is_string());
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.len() > 3, "{report}");
    if !has_figures {
        return;
    }
    for path in ["sendfile", "read", "splice"] {
        let measured = rows.iter().find(|row| row["path"] == path);
        assert!(measured.is_none_or(|row| row["refused"].is_null()), "{measured:?}");
    }
    if experiment == "send" {
        let row = rows.iter().find(|row| row["path"] == "sendfile").unwrap();
        // Each host has one CPU here, so a load above 101 % would include the other host's.
        for load in ["sender_load_percent", "receiver_load_percent"] {
            let load = row[load]["median"].as_f64().unwrap();
            assert!(load > 5.0 && load < 101.0, "{row}");
        }
        assert!(
            row["copied_percent"].is_null(),
            "copies cannot be proved between two machines: {row}"
        );
    }
}

#[test]
fn a_listener_refuses_peers_while_another_haul_measures_there() {
    let Some((lab, _listener, mut stderr)) = start_listener() else { return };
    let mut command = haul(&["soak", "--for", "600s"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let _soak = lab.receiver.start_program(command).unwrap();
    // The peer is served until the meter of the other haul starts.
    let limit = Instant::now() + Duration::from_secs(120);
    let refused = loop {
        let arguments =
            ["bench", "send", "--quick", "--rounds", "1", "--paths", "sendfile", "--json", "-"];
        let (output, transcript) =
            lab.sender.run(|| run(&mut haul_to_receiver(&lab, &arguments))).unwrap();
        if transcript.contains("measures there") {
            break transcript;
        }
        // Exit code 3: this machine was too busy to measure.
        assert!(matches!(output.status.code(), Some(0 | 3)), "{transcript}");
        assert!(Instant::now() < limit, "{transcript}");
        assert_next_line(&mut stderr, "has come");
        assert_next_line(&mut stderr, "has gone");
    };
    assert!(refused.contains("soak --for 600s) measures there"), "{refused}");
    assert_next_line(&mut stderr, "has come");
    assert_next_line(&mut stderr, "measures there");
}

/// An expensive method raises the cost of the machine that runs it far more than that of the other,
/// so the costs show whether each is attributed to the right machine, also if the other forwards.
/// The costs of one row do not: on a busy host either machine may be the more expensive one. All
/// rows are sent at one low rate: a rate found by measuring cannot be held by a host that its
/// neighbours slow down in the meantime, and such rounds are not counted.
#[test]
fn the_costs_of_two_machines_are_not_exchanged() {
    let Some((lab, _listener, _stderr)) = start_listener() else { return };
    if !is_quiet() {
        return;
    }
    let measure = |arguments: &[&str]| {
        let arguments = [&["bench"], arguments, &["--rounds", "3", "--json", "-"]].concat();
        lab.sender.run(|| json(&mut haul_to_receiver(&lab, &arguments))).unwrap()
    };
    let cost = |report: &Value, (path, size, bytes): (&str, &str, u64), field: &str| {
        let mut rows = report["rows"].as_array().unwrap().iter();
        let row = rows.find(|row| row["path"] == path && row[size] == bytes);
        row.and_then(|row| row[field]["median"].as_f64())
            .unwrap_or_else(|| panic!("{field} of {path}: {report}"))
    };

    let rises = |report: &Value, [dear, cheap]: [(&str, &str, u64); 2], fields: [&str; 2]| {
        fields.map(|field| cost(report, dear, field) / cost(report, cheap, field))
    };
    for (arguments, rows, fields) in [
        (
            ["send", "--rate", "100mbit", "--paths", "read+write,sendfile", "--chunk", "256,1MiB"],
            [("read+write", "chunk_bytes", 256), ("sendfile", "chunk_bytes", 1 << 20)],
            ["sender_us_per_mib", "receiver_us_per_mib"],
        ),
        (
            ["forward", "--traffic", "bulk", "--paths", "copy,splice", "--buffer", "4KiB,1MiB"],
            [("copy", "buffer_bytes", 4 << 10), ("splice", "buffer_bytes", 1 << 20)],
            ["forwarder_us_per_mib", "peers_us_per_mib"],
        ),
    ] {
        // Another program can take the CPU in all three rounds of a row. Exchanged costs would be
        // exchanged in every attempt.
        let is_right = |[own, other]: &[f64; 2]| own > other;
        let mut attempts = Vec::new();
        while attempts.len() < 3 && !attempts.last().is_some_and(is_right) {
            attempts.push(rises(&measure(&arguments), rows, fields));
        }
        assert!(attempts.last().is_some_and(is_right), "{fields:?}: {attempts:?}");
    }
}

#[test]
fn a_machine_cannot_measure_with_itself() {
    let Some((lab, _listener, _stderr)) = start_listener() else { return };
    // The command runs on the host that listens, so both have the same CPUs.
    let (output, transcript) = lab
        .receiver
        .run(|| run(&mut haul_to_receiver(&lab, &["bench", "send", "--quick"])))
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert!(transcript.contains("10.77.0.2:4285 is this machine"), "{transcript}");
}

/// A data connection from another address is closed, and that from the peer is kept.
#[test]
fn data_connections_are_accepted_only_from_the_peer() {
    let Some((lab, _listener, _stderr)) = start_listener() else { return };
    let start = start_receiver(65536).to_string();
    let mut control =
        lab.sender.run(|| TcpStream::connect((lab.receiver.address(), PORT)).unwrap()).unwrap();
    control.write_all(format!("{}\n{start}\n", hello()).as_bytes()).unwrap();
    let mut replies = BufReader::new(control.try_clone().unwrap());
    assert_next_line(&mut replies, "Hello");
    assert_next_line(&mut replies, "Listening");
    let connect = || TcpStream::connect((lab.receiver.address(), PORT + 1)).unwrap();
    let mut stranger = lab.receiver.run(connect).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "a stranger's connection is kept");
    let mut peer = lab.sender.run(connect).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert_eq!(
        peer.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::WouldBlock,
        "the peer's connection is closed"
    );
}

/// `haul bench --listen 2>&1 | head -1` continues to serve after `head` has ended.
#[test]
fn the_listener_serves_on_after_its_standard_error_is_closed() {
    let Some((lab, _listener, stderr)) = start_listener() else { return };
    drop(stderr);
    for _ in 0..2 {
        assert_serves(&lab);
    }
}

/// Asserts that the listener takes part in a measurement.
fn assert_serves(lab: &Lab) {
    let arguments = ["bench", "send", "--paths", "sendfile", "--rounds", "1", "--json", "-"];
    let measure = || json_if_measured(&mut haul_to_receiver(lab, &arguments)).0;
    let row = lab.sender.run(|| measure()["rows"][0].clone()).unwrap();
    assert!(row["refused"].is_null() || !is_measured(&row), "{row}");
}

/// Sends lines to the listener. Returns its first `count` replies, or those until it closes the
/// connection.
fn exchange(lab: &Lab, lines: &[String], count: usize) -> Vec<Value> {
    lab.sender
        .run(|| {
            let mut stream = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            for line in lines {
                stream.write_all(format!("{line}\n").as_bytes()).unwrap();
            }
            let replies = BufReader::new(stream).lines().take(count);
            replies.map_while(Result::ok).map(|line| serde_json::from_str(&line).unwrap()).collect()
        })
        .unwrap()
}

fn hello() -> String {
    json!({"Hello": {"schema": "haul.pair/2", "haul": "0"}}).to_string()
}

/// A task that receives into a buffer of this size.
fn receive(buffer_bytes: u64) -> Value {
    json!({"Receive": {
        "way": "Read",
        "buffer_bytes": buffer_bytes,
        "touch": false,
        "low_water_bytes": 1,
        "busy_poll_us": 0,
        "read_bytes_per_second": null,
        "read_pause_us": 0,
    }})
}

/// The request that starts it.
fn start_receiver(buffer_bytes: u64) -> Value {
    let socket = json!({"congestion": null, "buffer_bytes": null});
    json!({"Start": {"task": receive(buffer_bytes), "socket": socket, "peer": null}})
}

#[test]
fn requests_for_more_than_measuring_are_refused() {
    let Some((lab, _listener, _stderr)) = start_listener() else { return };
    let forward = || json!({"Forward": {"by": "Copy", "buffer_bytes": null}});
    let give = json!({"Give": {
        "is_tcp": false,
        "by": "Send",
        "piece_bytes": 1,
        "datagram_bytes": 1,
        "to": "10.77.0.9:9",
        "beat": "Free",
    }});
    let answer = json!({"Answer": {}});
    let plain = || json!({"congestion": "reno", "buffer_bytes": null});
    let large = json!({"congestion": "reno", "buffer_bytes": 1u64 << 30});
    let unknown = json!({"congestion": "no-such-module", "buffer_bytes": null});
    for (task, socket, peer, why) in [
        (receive((1 << 30) + 1), plain(), Value::Null, "is more than"),
        (receive(1), large, Value::Null, "socket buffers of more than"),
        (forward(), plain(), json!("10.77.0.9:8080"), "10.77.0.1 alone"),
        (forward(), plain(), json!("10.77.0.1:22"), "port 22 is a service's"),
        (forward(), unknown, json!("10.77.0.1:8080"), "cannot be set here"),
        (give, plain(), Value::Null, "only receives and forwards"),
        (answer, plain(), Value::Null, "only receives and forwards"),
    ] {
        let start = json!({"Start": {"task": task, "socket": socket, "peer": peer}}).to_string();
        let replies = exchange(&lab, &[hello(), start], 3);
        let refusal =
            replies.get(1).and_then(|reply| reply["Refused"].as_str()).unwrap_or_default();
        assert!(refusal.contains(why) && replies[2] == "Ended", "{why:?} in {replies:?}");
    }
    // A client of another protocol receives only a refusal that names the expected protocol.
    for line in [
        "GET / HTTP/1.1".to_owned(),
        r#"{"Hello":{"schema":"haul.pair/0","haul":"0"}}"#.into(),
        "[".repeat(100_000),
    ] {
        let replies = exchange(&lab, &[line], 2);
        assert!(
            replies.len() == 1 && replies[0]["Refused"].as_str().unwrap().contains("haul.pair/2"),
            "{replies:?}"
        );
    }
}

#[test]
fn one_peer_is_served_at_a_time_and_the_next_after_an_abrupt_end() {
    let Some((lab, _listener, mut stderr)) = start_listener() else { return };
    let start = start_receiver(65536).to_string();
    lab.sender
        .run(|| {
            let mut first = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            first.write_all(format!("{}\n{start}\n", hello()).as_bytes()).unwrap();
            let mut replies = BufReader::new(first.try_clone().unwrap());
            assert_next_line(&mut replies, "Hello");
            // When this peer closes its connection, its worker still waits for a data connection.
            assert_next_line(&mut replies, "Listening");
            let mut second = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            let mut busy = String::new();
            second.read_to_string(&mut busy).unwrap();
            assert!(busy.contains("another machine"), "{busy}");
        })
        .unwrap();
    assert_next_line(&mut stderr, "has come");
    assert_next_line(&mut stderr, "was refused: another is served");
    assert_next_line(&mut stderr, "has gone");
    assert_serves(&lab);
}

/// Waits until there have been `count` data connections. Closed ones stay visible for a minute.
fn wait_for_data_connections(lab: &Lab, count: usize) {
    // The data port follows the control port; the kernel lists ports in hexadecimal.
    let port = format!(":{:04X} ", PORT + 1);
    let visible = || {
        [&lab.sender, &lab.receiver]
            .map(|host| {
                let sockets =
                    host.run(|| fs::read_to_string("/proc/thread-self/net/tcp").unwrap()).unwrap();
                sockets.matches(port.as_str()).count()
            })
            .into_iter()
            .max()
    };
    let deadline = Instant::now() + Duration::from_secs(300);
    while visible() < Some(count) {
        assert!(Instant::now() < deadline, "too few data connections between the machines");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn rows_measured_before_the_peer_was_lost_are_kept() {
    // Each of the two rows makes three connections at full speed, then one per round and one more
    // for each window that slipped, as most windows do on a busy machine.
    for connections in [20, 60, 180] {
        if lose_peer_after(connections).is_none_or(|has_rounds| has_rounds) {
            return;
        }
    }
    panic!("no window of 180 was measured");
}

/// Kills the listener after so many data connections. Returns whether the report has rounds; `None`
/// if the lab has only one host.
fn lose_peer_after(connections: usize) -> Option<bool> {
    let (lab, mut listener, _stderr) = start_listener()?;
    let mut command = haul_to_receiver(
        &lab,
        &["bench", "send", "--paths", "sendfile,splice", "--rounds", "1000", "--json", "-"],
    );
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = thread::scope(|scope| {
        let measurement = scope.spawn(|| lab.sender.run(|| command.output().unwrap()).unwrap());
        wait_for_data_connections(&lab, connections);
        listener.process.kill();
        measurement.join().unwrap()
    });
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    if output.stdout.is_empty() {
        assert!(stderr.contains("10.77.0.2:4285 was lost"), "{stderr}");
        return Some(false);
    }
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("10.77.0.2:4285 was lost"), "{warnings}");
    Some(report["rows"][0]["rounds"].as_u64().unwrap() > 0)
}

/// Runs `haul bench send --to` against a listener on this machine that sends `greeting` and reads
/// nothing. Returns the error message and the time that it took.
fn run_against(greeting: &'static [u8]) -> (String, Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(greeting).unwrap();
        thread::sleep(Duration::from_secs(20));
    });
    let start = Instant::now();
    let (output, transcript) = run(&mut haul(&["bench", "send", "--to", &peer]));
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{transcript}");
    assert_eq!(line.lines().count(), 1, "{transcript}");
    assert!(line.contains(&peer) && line.contains("haul bench --listen"), "{line}");
    (line, start.elapsed())
}

#[test]
fn a_peer_with_another_protocol_is_a_one_line_error() {
    let (line, _) = run_against(b"SSH-2.0-OpenSSH_9.2p1\r\n");
    assert!(line.contains("it said \"SSH-2.0-OpenSSH_9.2p1\""), "{line}");
    let (line, _) = run_against(b"\x16\x03\x01\x00\xff\n");
    assert!(line.contains("it said"), "{line}");
    let (line, _) = run_against(
        b"{\"Hello\":{\"schema\":\"haul.pair/9\",\"host\":{\"kernel\":\"\",\"cpu\":\"\",\"cpus\":1,\
        \"steal_percent\":0},\"congestion\":[]}}\n",
    );
    assert!(line.contains("it speaks haul.pair/9"), "{line}");
    let (line, elapsed) = run_against(b"");
    assert!(
        line.contains("it said nothing for 5 s") && elapsed < Duration::from_secs(15),
        "{line}"
    );
}
