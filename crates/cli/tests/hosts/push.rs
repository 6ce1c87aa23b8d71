//! `haul push` to several hosts, through ssh, on hosts with their own networks.

use crate::cluster::Cluster;
use crate::command::{haul, run};
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// A file of random bytes that all hosts share.
fn make_file(cluster: &Cluster, bytes: usize) -> PathBuf {
    let mut content = vec![0; bytes];
    fastrand::fill(&mut content);
    let path = cluster.folder.path().join("original");
    fs::write(&path, content).unwrap();
    path
}

/// A push from head to /srv of hosts 1 to `count`.
fn push(cluster: &Cluster, options: &[&str], source: &Path, count: usize) -> Command {
    let mut command = cluster.command(0, env!("CARGO_BIN_EXE_haul"));
    command.args(["push", "-e", &cluster.ssh(), "--remote-haul", env!("CARGO_BIN_EXE_haul")]);
    command.args(options).arg(source);
    command.args((1..=count).map(|number| format!("{}:/srv/", Cluster::address(number))));
    command
}

fn has_copy(cluster: &Cluster, number: usize, source: &Path) -> bool {
    cluster.has_copy(number, source, "/srv/original")
}

/// Waits until a condition is met.
fn wait_until(what: &str, is_met: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_met() {
        assert!(Instant::now() < deadline, "gave up waiting for {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Starts a push to hosts that have nothing. Host 2 has a part of the file when this returns.
fn start_push(cluster: &Cluster, options: &[&str], source: &Path, count: usize) -> Child {
    for host in 1..=count {
        cluster.sh(host, "rm -f /srv/original /srv/.original*");
    }
    let mut command = push(cluster, options, source, count);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("a part at host 2", || {
        let blocks = cluster.sh(2, "stat -c %b /srv/.original.haul-part");
        let blocks: u64 = String::from_utf8_lossy(&blocks.stdout).trim().parse().unwrap_or(0);
        blocks * 512 > 8 * MIB as u64
    });
    child
}

/// Waits for the end of a push, and returns its exit code and what it printed.
fn end_of(mut child: Child) -> (Option<i32>, String) {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (child.wait().unwrap().code(), text)
}

#[test]
fn sixteen_hosts_get_a_file_at_the_cost_of_one_copy() {
    let Some(cluster) = Cluster::start(16, None) else { return };
    let source = make_file(&cluster, 32 * MIB);
    for options in [&["--plain"][..], &["-I"]] {
        let before = cluster.sent_bytes(0);
        let (output, transcript) = run(&mut push(&cluster, options, &source, 16));
        assert!(output.status.success(), "{transcript}");
        assert!(transcript.contains("1 file (32.0 MiB) sent to all 16 hosts"), "{transcript}");
        for number in 1..=16 {
            assert!(has_copy(&cluster, number, &source), "host {number}: {transcript}");
        }
        // The logins take some KiB each.
        let sent = (cluster.sent_bytes(0) - before) as f64 / (32 * MIB) as f64;
        assert!(sent < 1.1, "{sent} times the file");
    }
    // One block changes, so the source's link carries little more than the logins.
    fs::File::options().write(true).open(&source).unwrap().write_all_at(b"x", 9_999).unwrap();
    let before = cluster.sent_bytes(0);
    let (output, transcript) = run(&mut push(&cluster, &["-I", "--delta"], &source, 16));
    assert!(output.status.success(), "{transcript}");
    assert!(transcript.contains("1 file (64.0 KiB) sent to all 16 hosts"), "{transcript}");
    assert!((1..=16).all(|number| has_copy(&cluster, number, &source)), "{transcript}");
    let sent = (cluster.sent_bytes(0) - before) as f64 / (32 * MIB) as f64;
    assert!(sent < 0.1, "{sent} times the file");
    let (output, transcript) = run(&mut push(&cluster, &[], &source, 16));
    assert!(output.status.success(), "{transcript}");
    assert!(
        transcript.contains("nothing was sent: 1 file up to date at all 16 hosts"),
        "{transcript}"
    );
}

#[test]
fn a_host_that_dies_and_a_host_that_is_cut_off_are_bridged_and_resumed() {
    let Some(mut cluster) = Cluster::start(5, Some("200mbit")) else { return };
    let source = make_file(&cluster, 64 * MIB);
    let child = start_push(&cluster, &["--plain"], &source, 5);
    cluster.kill(2);
    cluster.cut(4);
    let (code, text) = end_of(child);
    assert_eq!(code, Some(26), "{text}");
    assert!(text.contains("haul: 10.77.0.3: its connection ended early"), "{text}");
    assert!(text.contains("haul: 10.77.0.5: no message for 8 s"), "{text}");
    assert!(text.contains("sent to 3 of 5 hosts, not to 10.77.0.3, 10.77.0.5, in"), "{text}");
    for number in [1, 3, 5] {
        assert!(has_copy(&cluster, number, &source), "host {number}: {text}");
    }
    // The host that lost its source ends by itself.
    wait_until("the end of haul on host 4", || !cluster.has_haul(4));
    let left = cluster.sh(4, "ls -A /srv");
    let left = String::from_utf8_lossy(&left.stdout);
    assert_eq!(left, ".original.haul-journal\n.original.haul-part\n");
    // Only the missing part is sent to a host that has the beginning.
    cluster.sh(3, "rm /srv/original");
    cluster.restore(4);
    let mut command = cluster.command(0, env!("CARGO_BIN_EXE_haul"));
    command.args(["push", "-e", &cluster.ssh(), "--remote-haul", env!("CARGO_BIN_EXE_haul")]);
    command.arg("--json").arg(&source);
    command.args([4, 5].map(|number| format!("{}:/srv/", Cluster::address(number))));
    let (output, transcript) = run(&mut command);
    assert!(output.status.success(), "{transcript}");
    let lines = String::from_utf8_lossy(&output.stdout);
    let host: Vec<serde_json::Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &serde_json::Value| line["event"] == "host")
        .collect();
    let held = host[0]["bytes_held"].as_u64().unwrap();
    let sent = host[0]["bytes_sent"].as_u64().unwrap();
    assert!(held > 0 && held + sent == 64 * MIB as u64, "{transcript}");
    assert!(has_copy(&cluster, 4, &source));
}

/// The other hosts wait for the login of one host, and a firewall hides the data port of another.
#[test]
fn a_late_login_and_a_firewall_delay_no_other_host() {
    let Some(cluster) = Cluster::start(5, None) else { return };
    let source = make_file(&cluster, 16 * MIB);
    let shell = cluster.folder.path().join("shell");
    let late = Cluster::address(4);
    let script =
        format!("case \"$*\" in *{late}*) sleep 15;; esac\nexec {} \"$@\"\n", cluster.ssh());
    fs::write(&shell, script).unwrap();
    let rules = "add table inet t; add chain inet t i { type filter hook input priority 0; }; \
                 add rule inet t i tcp dport != 22 tcp flags & (syn | ack) == syn drop";
    let ruled = cluster.sh(2, &format!("nft '{rules}'"));
    assert!(ruled.status.success(), "{}", String::from_utf8_lossy(&ruled.stderr));
    let mut command = cluster.command(0, env!("CARGO_BIN_EXE_haul"));
    command.arg("push").arg("-e").arg(format!("sh {}", shell.display()));
    command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul"), "--plain"]).arg(&source);
    command.args((1..=5).map(|number| format!("{}:/srv/", Cluster::address(number))));
    let (output, transcript) = run(&mut command);
    assert_eq!(output.status.code(), Some(26), "{transcript}");
    assert!(transcript.contains("10.77.0.2 cannot send to it"), "{transcript}");
    assert!(transcript.contains("sent to 4 of 5 hosts, not to 10.77.0.3, in"), "{transcript}");
    for number in [1, 3, 4, 5] {
        assert!(has_copy(&cluster, number, &source), "host {number}: {transcript}");
    }
}

#[test]
fn a_slow_host_goes_last() {
    let Some(cluster) = Cluster::start(4, Some("400mbit")) else { return };
    let source = make_file(&cluster, 256 * MIB);
    let child = start_push(&cluster, &["--plain"], &source, 4);
    cluster.set_rate(2, "40mbit");
    wait_until("the copies of the fast hosts", || {
        [1, 3, 4].iter().all(|&number| has_copy(&cluster, number, &source))
    });
    assert!(!has_copy(&cluster, 2, &source), "the slow host was not slow");
    cluster.set_rate(2, "1gbit");
    let (code, text) = end_of(child);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("10.77.0.3: it received"), "{text}");
    assert!(has_copy(&cluster, 2, &source));
}

#[test]
fn no_process_stays_after_the_source_is_killed() {
    let Some(cluster) = Cluster::start(3, Some("200mbit")) else { return };
    let source = make_file(&cluster, 64 * MIB);
    for signal in ["TERM", "KILL"] {
        let child = start_push(&cluster, &[], &source, 3);
        assert!(cluster.sh(0, &format!("pkill -{signal} -x haul")).status.success());
        let (code, text) = end_of(child);
        let expected = if signal == "TERM" { Some(20) } else { Some(137) };
        assert!(code == expected || code.is_none(), "{signal}: {code:?} {text}");
        wait_until("the end of haul on all hosts", || {
            (1..=3).all(|number| !cluster.has_haul(number))
        });
        for number in 1..=3 {
            let exists = cluster.sh(number, "test -e /srv/original").status.success();
            assert!(!exists || has_copy(&cluster, number, &source));
        }
    }
    let (output, transcript) = run(&mut push(&cluster, &[], &source, 3));
    assert!(output.status.success(), "{transcript}");
    assert!((1..=3).all(|number| has_copy(&cluster, number, &source)));
}

#[test]
fn what_several_hosts_cannot_have_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("file");
    fs::write(&source, "content").unwrap();
    let source = source.to_str().unwrap();
    for (arguments, part) in [
        (&["--streams", "0", source, "a:x", "b:x"][..], "--streams 0: several hosts need"),
        (&["--data-from", "there", source, "a:x", "b:x"], "--data-from there: each of several"),
        (&[source, "a:x", "a:y"], "a is named twice"),
        (&[source, "a:x", "-b:x"], "unexpected argument"),
        (&["a:x", "b:x"], "the sources of a push are on this host"),
        (&["a:x", source, "b:x"], "the sources of a push are on this host"),
    ] {
        let (output, transcript) = run(haul(&["push"]).args(arguments));
        assert_eq!(output.status.code(), Some(2), "{transcript}");
        assert!(transcript.contains(part), "{transcript}");
    }
}
