//! `haul bench --to` and `--listen` between two hosts of a lab, which know nothing of each other but an address; and strangers on
//! either side.

mod common {
    pub mod command;
    pub mod cpus;
    pub mod json;
}

use common::command::{haul, run};
use common::cpus::lock_cpus;
use common::json::json;
use haul_lab::{Lab, LabError, Running, Settings};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 4285;

/// The listener's process, and the turn that lasts as long.
struct Listener {
    running: Running,
    _turn: MutexGuard<'static, ()>,
}

/// Two hosts, on the second of which `haul bench --listen` runs; `None`, and a loud word, where there is no lab.
fn listening() -> Option<(Lab, Listener, BufReader<io::PipeReader>)> {
    let turn = lock_cpus();
    let lab = match Lab::veth(&Settings::default()) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: there are no two hosts here: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (words, to_words) = io::pipe().unwrap();
    let mut command = haul(&["bench", "--listen"]);
    command.stdin(Stdio::null()).stderr(to_words);
    let running = lab.receiver.start_program(command).unwrap();
    let mut words = BufReader::new(words);
    assert_says(&mut words, "listening on [::]:4285");
    Some((lab, Listener { running, _turn: turn }, words))
}

/// Waits for the next line and checks it.
fn assert_says(words: &mut impl BufRead, expected: &str) {
    let mut line = String::new();
    words.read_line(&mut line).unwrap();
    assert!(line.contains(expected), "{expected:?} in {line:?}");
}

/// The command on the first host.
fn towards(lab: &Lab, arguments: &[&str]) -> Command {
    let mut command = haul(arguments);
    command.args(["--to", &lab.receiver.address().to_string()]);
    command
}

#[test]
fn two_machines_measure_together_and_each_its_own_load() {
    let Some((lab, _listener, mut words)) = listening() else { return };
    for (experiment, host) in [
        ("send", "sender_us_per_mib"),
        ("receive", "receiver_us_per_mib"),
        ("forward", "forwarder_us_per_mib"),
    ] {
        let arguments = ["bench", experiment, "--quick", "--rounds", "1", "--json", "-"];
        let report = lab.sender.run(|| json(&mut towards(&lab, &arguments))).unwrap();
        assert_eq!(report["schema"], "haul.bench/1");
        assert_eq!(report["lab"]["kind"], "remote");
        assert_eq!(report["lab"]["mtu"], 9000);
        assert_eq!(report["lab"]["peer"]["address"], "10.77.0.2:4285");
        assert!(report["lab"]["peer"]["host"]["kernel"].is_string());
        let rows = report["rows"].as_array().unwrap();
        assert!(rows.len() > 3, "{report}");
        for row in rows.iter().filter(|row| row["refused"].is_null()) {
            assert!(row[host]["median"].as_f64().unwrap() > 0.0, "{row}");
        }
        for path in ["sendfile", "read", "splice"] {
            let measured = rows.iter().find(|row| row["path"] == path);
            assert!(measured.is_none_or(|row| row["refused"].is_null()), "{measured:?}");
        }
        if experiment == "send" {
            let row = rows.iter().find(|row| row["path"] == "sendfile").unwrap();
            // Each host has one CPU here, so neither load can be the other's as well.
            for load in ["sender_load_percent", "receiver_load_percent"] {
                let load = row[load]["median"].as_f64().unwrap();
                assert!(load > 5.0 && load < 101.0, "{row}");
            }
            assert!(
                row["copied_percent"].is_null(),
                "what leaves through a wire cannot be proved: {row}"
            );
        }
        assert_says(&mut words, "has come");
        assert_says(&mut words, "has gone");
    }
}

/// Work that is surely most of one host's: each machine's load is its own, also where the other one is in the middle.
#[test]
fn no_machines_load_is_taken_for_the_others() {
    let Some((lab, _listener, _words)) = listening() else { return };
    let row = |arguments: &[&str]| {
        let arguments = [&["bench"], arguments, &["--rounds", "2", "--json", "-"]].concat();
        let report = lab.sender.run(|| json(&mut towards(&lab, &arguments))).unwrap();
        report["rows"][0].clone()
    };
    let cost = |row: &Value, of: &str| {
        row[of]["median"].as_f64().unwrap_or_else(|| panic!("{of} of {row}"))
    };
    let sent = row(&["send", "--paths", "read+write", "--chunk", "4KiB"]);
    assert!(cost(&sent, "sender_us_per_mib") > cost(&sent, "receiver_us_per_mib"), "{sent}");
    let forwarded = row(&["forward", "--paths", "copy", "--buffer", "4KiB", "--traffic", "bulk"]);
    assert!(
        cost(&forwarded, "forwarder_us_per_mib") > cost(&forwarded, "peers_us_per_mib"),
        "{forwarded}"
    );
}

#[test]
fn a_machine_is_no_pair_with_itself() {
    let Some((lab, _listener, _words)) = listening() else { return };
    // On the host that listens: the same CPUs.
    let (output, words) =
        lab.receiver.run(|| run(&mut towards(&lab, &["bench", "send", "--quick"]))).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("10.77.0.2:4285 is this machine"), "{words}");
}

/// Whoever else finds the port that bytes come to is hung up on, and the one who was asked for is not.
#[test]
fn bytes_are_taken_from_nobody_else() {
    let Some((lab, _listener, _words)) = listening() else { return };
    let receive = json!({"Receive": {"way": "Read", "buffer_bytes": 65536, "touch": false, "low_water_bytes": 1, "busy_poll_us": 0, "read_bytes_per_second": null, "read_pause_us": 0}});
    let start = json!({"Start": {"task": receive, "socket": {"congestion": null, "buffer_bytes": null}, "peer": null}}).to_string();
    let mut asking =
        lab.sender.run(|| TcpStream::connect((lab.receiver.address(), PORT)).unwrap()).unwrap();
    asking.write_all(format!("{}\n{start}\n", hello()).as_bytes()).unwrap();
    let mut answers = BufReader::new(asking.try_clone().unwrap());
    assert_says(&mut answers, "Hello");
    assert_says(&mut answers, "Listening");
    let connect = || TcpStream::connect((lab.receiver.address(), PORT + 1)).unwrap();
    let mut stranger = lab.receiver.run(connect).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "a stranger is served");
    let mut peer = lab.sender.run(connect).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert_eq!(
        peer.read(&mut [0]).unwrap_err().kind(),
        io::ErrorKind::WouldBlock,
        "the peer is hung up on"
    );
}

/// `haul bench --listen 2>&1 | head -1` serves on though nobody hears it any more.
#[test]
fn nobody_has_to_hear_the_one_that_listens() {
    let Some((lab, _listener, words)) = listening() else { return };
    drop(words);
    for _ in 0..2 {
        let arguments = ["bench", "send", "--paths", "sendfile", "--rounds", "1", "--json", "-"];
        let report = lab.sender.run(|| json(&mut towards(&lab, &arguments))).unwrap();
        assert!(report["rows"][0]["refused"].is_null(), "{report}");
    }
}

/// Sends lines to the host that listens, and returns the answers up to `count` of them, or to the end.
fn conversation(lab: &Lab, lines: &[String], count: usize) -> Vec<Value> {
    lab.sender
        .run(|| {
            let mut stream = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            for line in lines {
                stream.write_all(format!("{line}\n").as_bytes()).unwrap();
            }
            let answers = BufReader::new(stream).lines().take(count);
            answers.map_while(Result::ok).map(|line| serde_json::from_str(&line).unwrap()).collect()
        })
        .unwrap()
}

fn hello() -> String {
    json!({"Hello": {"schema": "haul.pair/2", "haul": "0"}}).to_string()
}

#[test]
fn whoever_asks_for_more_than_measuring_is_refused() {
    let Some((lab, _listener, _words)) = listening() else { return };
    let receive = |buffer_bytes: u64| json!({"Receive": {"way": "Read", "buffer_bytes": buffer_bytes, "touch": false, "low_water_bytes": 1, "busy_poll_us": 0, "read_bytes_per_second": null, "read_pause_us": 0}});
    let forward = || json!({"Forward": {"by": "Copy", "buffer_bytes": null}});
    let give = json!({"Give": {"is_tcp": false, "by": "Send", "piece_bytes": 1, "datagram_bytes": 1, "to": "10.77.0.9:9", "beat": "Free"}});
    let answer = json!({"Answer": {}});
    let plain = || json!({"congestion": "reno", "buffer_bytes": null});
    let large = json!({"congestion": "reno", "buffer_bytes": 1u64 << 30});
    let strange = json!({"congestion": "no-such-module", "buffer_bytes": null});
    for (task, socket, peer, why) in [
        (receive((1 << 30) + 1), plain(), Value::Null, "is more than"),
        (receive(1), large, Value::Null, "socket buffers of more than"),
        (forward(), plain(), json!("10.77.0.9:8080"), "10.77.0.1 alone"),
        (forward(), plain(), json!("10.77.0.1:22"), "port 22 is a service's"),
        (forward(), strange, json!("10.77.0.1:8080"), "cannot be set here"),
        (give, plain(), Value::Null, "only receives and forwards"),
        (answer, plain(), Value::Null, "only receives and forwards"),
    ] {
        let start = json!({"Start": {"task": task, "socket": socket, "peer": peer}}).to_string();
        let answers = conversation(&lab, &[hello(), start], 3);
        let refusal =
            answers.get(1).and_then(|answer| answer["Refused"].as_str()).unwrap_or_default();
        assert!(refusal.contains(why) && answers[2] == "Ended", "{why:?} in {answers:?}");
    }
    // Whoever does not speak the protocol hears which one it is, and nothing more.
    for strange in [
        "GET / HTTP/1.1".to_owned(),
        r#"{"Hello":{"schema":"haul.pair/0","haul":"0"}}"#.into(),
        "[".repeat(100_000),
    ] {
        let answers = conversation(&lab, &[strange], 2);
        assert!(
            answers.len() == 1 && answers[0]["Refused"].as_str().unwrap().contains("haul.pair/2"),
            "{answers:?}"
        );
    }
}

#[test]
fn one_is_served_at_a_time_and_the_next_one_after_whatever_end() {
    let Some((lab, _listener, mut words)) = listening() else { return };
    let receive = json!({"Receive": {"way": "Read", "buffer_bytes": 65536, "touch": false, "low_water_bytes": 1, "busy_poll_us": 0, "read_bytes_per_second": null, "read_pause_us": 0}});
    let start = json!({"Start": {"task": receive, "socket": {"congestion": null, "buffer_bytes": null}, "peer": null}}).to_string();
    lab.sender
        .run(|| {
            let mut first = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            first.write_all(format!("{}\n{start}\n", hello()).as_bytes()).unwrap();
            let mut answers = BufReader::new(first.try_clone().unwrap());
            assert_says(&mut answers, "Hello");
            // Its worker waits for a connection that will never come when it goes away.
            assert_says(&mut answers, "Listening");
            let mut second = TcpStream::connect((lab.receiver.address(), PORT)).unwrap();
            let mut busy = String::new();
            second.read_to_string(&mut busy).unwrap();
            assert!(busy.contains("another machine"), "{busy}");
        })
        .unwrap();
    assert_says(&mut words, "has come");
    assert_says(&mut words, "was refused: another is served");
    assert_says(&mut words, "has gone");
    let report = lab
        .sender
        .run(|| {
            json(&mut towards(
                &lab,
                &["bench", "send", "--paths", "sendfile", "--rounds", "1", "--json", "-"],
            ))
        })
        .unwrap();
    assert!(report["rows"][0]["refused"].is_null(), "{report}");
}

/// Waits until so many connections have carried bytes: ended ones stay visible for a minute.
fn wait_for_flows(lab: &Lab, count: usize) {
    // In hexadecimal, as the kernel lists it: the port after the conversation's.
    let port = format!(":{:04X} ", PORT + 1);
    let seen = || {
        [&lab.sender, &lab.receiver]
            .map(|host| {
                let sockets =
                    host.run(|| fs::read_to_string("/proc/thread-self/net/tcp").unwrap()).unwrap();
                sockets.matches(port.as_str()).count()
            })
            .into_iter()
            .max()
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while seen() < Some(count) {
        assert!(Instant::now() < deadline, "no bytes go between the machines");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn what_was_measured_before_the_other_machine_was_lost_is_kept() {
    let Some((lab, mut listener, _words)) = listening() else { return };
    let mut command = towards(
        &lab,
        &["bench", "send", "--paths", "sendfile,splice", "--rounds", "1000", "--json", "-"],
    );
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = thread::scope(|scope| {
        let measuring = scope.spawn(|| lab.sender.run(|| command.output().unwrap()).unwrap());
        // Each of the two rows takes three at full speed, then one a round and one for each window that slipped.
        wait_for_flows(&lab, 20);
        listener.running.kill();
        measuring.join().unwrap()
    });
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{words}");
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"));
    assert!(report["rows"][0]["rounds"].as_u64().unwrap() > 0, "{report}");
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("10.77.0.2:4285 was lost"), "{warnings}");
}

/// Runs against somebody on this machine who says `words` and hears nothing.
fn against(words: &'static [u8]) -> (String, Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(words).unwrap();
        thread::sleep(Duration::from_secs(20));
    });
    let start = Instant::now();
    let (output, words) = run(&mut haul(&["bench", "send", "--to", &peer]));
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert_eq!(line.lines().count(), 1, "{words}");
    assert!(line.contains(&peer) && line.contains("haul bench --listen"), "{line}");
    (line, start.elapsed())
}

#[test]
fn a_host_that_speaks_something_else_gets_one_line() {
    let (line, _) = against(b"SSH-2.0-OpenSSH_9.2p1\r\n");
    assert!(line.contains("it said \"SSH-2.0-OpenSSH_9.2p1\""), "{line}");
    let (line, _) = against(b"\x16\x03\x01\x00\xff\n");
    assert!(line.contains("it said"), "{line}");
    let (line, _) = against(b"{\"Hello\":{\"schema\":\"haul.pair/9\",\"host\":{\"kernel\":\"\",\"cpu\":\"\",\"cpus\":1,\"steal_percent\":0},\"congestion\":[]}}\n");
    assert!(line.contains("it speaks haul.pair/9"), "{line}");
    let (line, took) = against(b"");
    assert!(line.contains("it said nothing for 5 s") && took < Duration::from_secs(15), "{line}");
}
