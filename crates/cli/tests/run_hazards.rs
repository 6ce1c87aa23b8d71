//! What could make `haul run` send other bytes than the program would: one test for each hazard.
//!
//! The programs are Python scripts, which map a file and send from the mapping as Apache does. The
//! test is the peer, and decides when the pages in flight are read.

mod common {
    pub mod processes;
    pub mod program;
}

use common::processes::{children_of, is_running, wait_until};
use common::program::program;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;

/// Length of the mapped file.
const FILE_BYTES: usize = 4 << 20;
/// The byte of which the file consists before it is changed.
const BEFORE: u8 = b'a';
/// The byte that a writer writes.
const AFTER: u8 = b'b';

/// The beginning of every script: `m` is the mapped file, `s` the connection to the test.
const PRELUDE: &str = "
import mmap, os, signal, socket, sys, ctypes
port = int(sys.argv[1])
def connect():
    return socket.create_connection(('127.0.0.1', port))
def map_file(path='data', length=0):
    f = os.open(path, os.O_RDONLY)
    m = mmap.mmap(f, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return f, memoryview(m)
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.readline()
";

/// A Python script under `haul run`.
struct Script {
    haul: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    peer: TcpStream,
    folder: TempDir,
}

impl Script {
    /// Starts a script, and accepts its connection.
    fn start(script: &str, options: &[&str]) -> Option<Self> {
        Self::start_in(tempfile::tempdir().unwrap(), script, options)
    }

    fn start_in(folder: TempDir, script: &str, options: &[&str]) -> Option<Self> {
        let python = program("python3")?;
        fs::write(folder.path().join("data"), vec![BEFORE; FILE_BYTES]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
        haul.args(["run", "--without=trial", "--json", "report.json"]).args(options).arg("--");
        haul.arg(python).args(["-c", &format!("{PRELUDE}{script}"), &port.to_string()]);
        haul.current_dir(folder.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let log = File::create(folder.path().join("stderr")).unwrap();
        let mut haul = haul.stderr(log).spawn().unwrap();
        let input = haul.stdin.take();
        let output = BufReader::new(haul.stdout.take().unwrap());
        let (peer, _) = listener.accept().unwrap();
        Some(Self { haul, input, output, peer, folder })
    }

    /// The next line that the script prints.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// The number that the script prints.
    fn number(&mut self) -> usize {
        let line = self.line();
        line.parse().unwrap_or_else(|_| panic!("the script printed {line:?}"))
    }

    /// Lets a script go on that waits.
    fn go_on(&mut self) {
        if let Some(input) = &mut self.input {
            // Fails if the script was killed.
            let _ = input.write_all(b"\n");
        }
    }

    /// Receives bytes, and checks that they are the file's before it changed.
    fn receive(&mut self, bytes: usize) {
        let mut received = vec![0; bytes];
        self.peer.read_exact(&mut received).unwrap();
        let changed = received.iter().filter(|&&byte| byte != BEFORE).count();
        assert_eq!(changed, 0, "of {bytes} bytes");
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Lets the script end, and returns the report.
    fn end(mut self) -> Value {
        let processes = children_of(self.haul.id());
        self.go_on();
        self.input = None;
        let status = self.haul.wait().unwrap();
        assert!(status.success(), "{status}");
        let report = fs::read(self.folder.path().join("report.json")).unwrap();
        // The broker waits until nothing is unread.
        let _ = std::io::copy(&mut self.peer, &mut std::io::sink());
        wait_until("the broker ended", || !processes.iter().copied().any(is_running));
        serde_json::from_slice(&report).unwrap()
    }

    /// The process that keeps the leases.
    fn broker(&self) -> u32 {
        let children = children_of(self.haul.id()).into_iter();
        let is_broker = |process: &u32| {
            let words = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
            words.windows(10).any(|window| window == b"run-broker")
        };
        children.into_iter().find(is_broker).expect("a broker")
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // Fails if it ended.
        let _ = self.haul.kill();
        let _ = self.haul.wait();
    }
}

/// A connection whose other end is closed.
fn closed_connection() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    drop(listener.accept().unwrap());
    connection
}

/// Bytes that were sent without a copy.
fn elided(report: &Value) -> u64 {
    let rows = report["sent"].as_array().unwrap();
    let row = rows.iter().find(|row| row["method"] == "elided");
    row.map_or(0, |row| row["bytes"].as_u64().unwrap())
}

/// Bytes that were copied for a reason.
fn copied(report: &Value, reason: &str) -> u64 {
    let rows = report["not_elided"].as_array().unwrap();
    let row = rows.iter().find(|row| row["reason"] == reason);
    row.map_or(0, |row| row["bytes"].as_u64().unwrap())
}

/// A thread that overwrites a file, and notes when it is done.
struct Writer {
    is_done: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(path: PathBuf, change: fn(&Path)) -> Self {
        let is_done = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&is_done);
        let thread = thread::spawn(move || {
            change(&path);
            done.store(true, SeqCst);
        });
        Self { is_done, thread }
    }

    /// Checks that the writer still waits, after a time that is long enough for the change.
    fn assert_waiting(&self) {
        thread::sleep(Duration::from_millis(500));
        assert!(!self.is_done.load(SeqCst), "the file was changed while its pages were in flight");
    }
}

fn overwrite(path: &Path) {
    let mut file = File::options().write(true).open(path).unwrap();
    file.write_all(&vec![AFTER; FILE_BYTES]).unwrap();
}

/// Sends once without waiting, prints the number of bytes, and waits.
const SEND_ONCE: &str = "
f, m = map_file()
s = connect()
s.setblocking(False)
say(s.send(m))
wait()
";

fn assert_writer_waits(change: fn(&Path)) {
    let Some(mut script) = Script::start(SEND_ONCE, &[]) else { return };
    let sent = script.number();
    assert!(sent >= 64 << 10, "{sent} bytes");
    let writer = Writer::start(script.data(), change);
    writer.assert_waiting();
    script.receive(sent);
    writer.thread.join().unwrap();
    let report = script.end();
    assert!(elided(&report) > 0, "{report}");
}

#[test]
fn a_file_in_flight_is_overwritten_only_after_it_was_read() {
    assert_writer_waits(overwrite);
}

#[test]
fn a_file_in_flight_is_truncated_only_after_it_was_read() {
    assert_writer_waits(|path| {
        File::options().write(true).truncate(true).open(path).unwrap();
    });
}

#[test]
fn a_writer_that_does_not_wait_is_refused() {
    let Some(mut script) = Script::start(SEND_ONCE, &[]) else { return };
    let sent = script.number();
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = File::options().write(true).custom_flags(nonblocking).open(script.data());
    assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    script.receive(sent);
    script.end();
}

#[test]
fn a_file_in_flight_is_replaced_without_waiting() {
    let Some(mut script) = Script::start(SEND_ONCE, &[]) else { return };
    let sent = script.number();
    let new = script.folder.path().join("new");
    fs::write(&new, vec![AFTER; FILE_BYTES]).unwrap();
    fs::rename(&new, script.data()).unwrap();
    script.receive(sent);
    assert!(elided(&script.end()) > 0);
}

#[test]
fn a_file_that_is_open_for_writing_is_copied() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let mut writer = File::create(&path).unwrap();
    let Some(mut script) = Script::start_in(folder, SEND_ONCE, &[]) else { return };
    let sent = script.number();
    writer.write_all(&vec![AFTER; FILE_BYTES]).unwrap();
    script.receive(sent);
    drop(writer);
    let report = script.end();
    assert_eq!((elided(&report), copied(&report, "writer")), (0, sent as u64), "{report}");
}

#[test]
fn a_file_is_sent_without_a_copy_again_after_its_writer_closed_it() {
    let script = "
f, m = map_file()
s = connect()
w = os.open('data', os.O_WRONLY)
s.sendall(m)
os.close(w)
import time
# A refusal is remembered for a second.
time.sleep(1.2)
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(2 * FILE_BYTES);
    let report = script.end();
    assert_eq!(copied(&report, "writer"), FILE_BYTES as u64, "{report}");
    assert_eq!(elided(&report), FILE_BYTES as u64, "{report}");
}

#[test]
fn changed_private_pages_are_copied() {
    // The pages are made writable, changed, and made read-only again.
    let script = "
f = os.open('data', os.O_RDONLY)
m = mmap.mmap(f, 0, access=mmap.ACCESS_COPY)
m[100000] = ord('a')
libc = ctypes.CDLL(None)
address = ctypes.addressof(ctypes.c_char.from_buffer(m))
assert libc.mprotect(ctypes.c_void_p(address), len(m), 1) == 0
s = connect()
s.sendall(memoryview(m)[:1 << 20])
s.sendall(memoryview(m)[1 << 20:])
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!(copied(&report, "private-pages"), 1 << 20, "{report}");
    assert_eq!(elided(&report), (FILE_BYTES - (1 << 20)) as u64, "{report}");
}

#[test]
fn a_bad_address_is_refused_as_without_haul() {
    let script = "
f, m = map_file()
s = connect()
libc = ctypes.CDLL(None, use_errno=True)
bad = ctypes.c_void_p(8)
def error(result):
    return ctypes.get_errno() if result < 0 else 0
say(error(libc.writev(s.fileno(), bad, 2)))
say(error(libc.writev(s.fileno(), None, 2)))
say(error(libc.sendmsg(s.fileno(), bad, 0)))
say(error(libc.sendmsg(s.fileno(), None, 0)))
message = (ctypes.c_long * 7)(0, 0, 4096, 3)
say(error(libc.sendmsg(s.fileno(), message, 0)))
wait()
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    for _ in 0..5 {
        assert_eq!(script.number(), 14, "EFAULT");
    }
    script.end();
}

#[test]
fn a_writable_mapping_is_copied() {
    let script = "
f = os.open('data', os.O_RDONLY)
m = mmap.mmap(f, 0, access=mmap.ACCESS_COPY)
s = connect()
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!((elided(&report), copied(&report, "mapping")), (0, FILE_BYTES as u64), "{report}");
}

#[test]
fn another_file_in_the_place_of_a_mapping_is_not_confused() {
    // The other file is mapped by a system call that the interposer does not see.
    let script = "
open('other', 'wb').write(b'a' * len(open('data', 'rb').read()))
open('data', 'wb').write(b'x' * os.path.getsize('other'))
f, m = map_file()
g = os.open('other', os.O_RDONLY)
class View(ctypes.Structure):
    _fields_ = [('buffer', ctypes.c_void_p), ('rest', ctypes.c_byte * 72)]
view = View()
assert ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(m), ctypes.byref(view), 0) == 0
libc = ctypes.CDLL(None)
libc.syscall.restype = ctypes.c_long
MMAP = 9 if os.uname().machine == 'x86_64' else 222
FIXED_SHARED = 0x10 | 1
arguments = [view.buffer, len(m), 1, FIXED_SHARED, g, 0]
mapped = libc.syscall(MMAP, *[ctypes.c_long(a) for a in arguments])
assert mapped == view.buffer
s = connect()
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!((elided(&report), copied(&report, "no-file")), (0, FILE_BYTES as u64), "{report}");
}

#[test]
fn a_closed_connection_raises_no_signal_if_the_program_asked_for_that() {
    let script = "
f, m = map_file()
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
s = connect()
say('connected')
wait()
try:
    while True:
        s.send(m, socket.MSG_NOSIGNAL)
except OSError as error:
    say(type(error).__name__)
pending = signal.sigpending()
say(signal.SIGPIPE in pending)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    assert_eq!(script.line(), "connected");
    script.peer.shutdown(std::net::Shutdown::Both).unwrap();
    script.peer = closed_connection();
    script.go_on();
    let error = script.line();
    assert!(["BrokenPipeError", "ConnectionResetError"].contains(&error.as_str()), "{error}");
    assert_eq!(script.line(), "False");
    script.end();
}

#[test]
fn a_closed_connection_raises_the_signal_otherwise() {
    let script = "
f, m = map_file()
signal.signal(signal.SIGPIPE, lambda *_: say('signal'))
s = connect()
say('connected')
wait()
try:
    while True:
        os.write(s.fileno(), m)
except BrokenPipeError:
    pass
except ConnectionResetError:
    try:
        os.write(s.fileno(), m)
    except BrokenPipeError:
        pass
# Python runs its handler at the next call.
wait()
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    assert_eq!(script.line(), "connected");
    script.peer.shutdown(std::net::Shutdown::Both).unwrap();
    script.peer = closed_connection();
    script.go_on();
    assert_eq!(script.line(), "signal");
    script.end();
}

#[test]
fn a_call_that_must_not_wait_on_a_waiting_socket_is_copied() {
    let script = "
f, m = map_file()
s = connect()
say(s.send(m, socket.MSG_DONTWAIT))
wait()
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    let sent = script.number();
    script.receive(sent);
    let report = script.end();
    assert_eq!((elided(&report), copied(&report, "call")), (0, sent as u64), "{report}");
}

#[test]
fn zeros_after_the_end_of_a_file_are_sent() {
    // The last page of a mapping has zeros after the file's end.
    let script = "
os.truncate('data', 300000)
f = os.open('data', os.O_RDONLY)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
pages = 74 * 4096
address = libc.mmap(None, ctypes.c_long(pages), 1, 1, f, ctypes.c_long(0))
memory = (ctypes.c_char * pages).from_address(address)
s = connect()
s.sendall(memory)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(300_000);
    let mut zeros = Vec::new();
    script.peer.read_to_end(&mut zeros).unwrap();
    assert!(zeros.len() == 74 * 4096 - 300_000 && zeros.iter().all(|&byte| byte == 0));
    assert_eq!(elided(&script.end()), 300_000);
}

#[test]
fn a_file_that_the_program_closed_after_mapping_is_sent() {
    let script = "
s = connect()
for _ in range(3):
    f, m = map_file()
    os.close(f)
    libc = ctypes.CDLL(None)
    s.sendall(m)
    del m
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(3 * FILE_BYTES);
    let report = script.end();
    // Python's mmap keeps a duplicate, which is not the mapped descriptor. The first mapping is
    // copied, and then descriptors are kept.
    assert_eq!(copied(&report, "no-file"), FILE_BYTES as u64, "{report}");
    assert_eq!(elided(&report), 2 * FILE_BYTES as u64, "{report}");
}

#[test]
fn a_child_sends_after_fork() {
    let script = "
f, m = map_file()
s = connect()
s.sendall(m[:1 << 20])
if os.fork() == 0:
    s.sendall(m[1 << 20:2 << 20])
    os._exit(0)
os.wait()
s.sendall(m[2 << 20:])
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!(elided(&report), FILE_BYTES as u64, "{report}");
    assert_eq!(report["tcp"]["unseen_bytes"], 0, "{report}");
}

#[test]
fn few_descriptors_mean_copies() {
    let script = "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
f, m = map_file()
s = connect()
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!(elided(&report), 0, "{report}");
}

#[test]
fn a_changed_root_directory_means_copies() {
    if !rustix::process::getuid().is_root() {
        return eprintln!("SKIPPED: only root may change the root directory");
    }
    let script = "
f, m = map_file()
s = connect()
os.chroot('.')
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    script.receive(FILE_BYTES);
    assert_eq!(elided(&script.end()), 0);
}

#[test]
fn strict_copies_to_peers_on_this_host() {
    let script = "
f, m = map_file()
s = connect()
s.sendall(m)
";
    let Some(mut script) = Script::start(script, &["--strict"]) else { return };
    script.receive(FILE_BYTES);
    let report = script.end();
    assert_eq!(copied(&report, "local-peer"), FILE_BYTES as u64, "{report}");
}

#[test]
fn everything_is_copied_after_the_switch() {
    let script = "
f, m = map_file()
s = connect()
s.sendall(m[:1 << 20])
say('sent')
wait()
s.sendall(m[1 << 20:])
";
    let Some(mut script) = Script::start(script, &[]) else { return };
    assert_eq!(script.line(), "sent");
    script.receive(1 << 20);
    let process = script.haul.id().to_string();
    let mut stop = Command::new(env!("CARGO_BIN_EXE_haul"));
    assert!(stop.args(["run", "--stop", &process]).status().unwrap().success());
    // The switch is a signal to haul run.
    let log = script.folder.path().join("stderr");
    wait_until("the switch took effect", || fs::read_to_string(&log).unwrap().contains("--stop"));
    script.go_on();
    script.receive(FILE_BYTES - (1 << 20));
    let report = script.end();
    assert_eq!(elided(&report), 1 << 20, "{report}");
}

#[test]
fn a_program_can_switch_haul_off_for_its_children() {
    let Some(python) = program("python3") else { return };
    let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
    haul.args(["run", "--json", "-", "--", "env", "HAUL_RUN=off"]).arg(python).args(["-c", ""]);
    let output = haul.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = report["programs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|program| program["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["env"], "{report}");
}

/// Checks what a killed program, broker or `haul run` leaves behind while pages are in flight.
fn assert_safe_after_kill(victim: fn(&Script) -> u32) {
    let Some(mut script) = Script::start(SEND_ONCE, &[]) else { return };
    let sent = script.number();
    let processes = children_of(script.haul.id());
    let victim = victim(&script);
    kill_process(Pid::from_raw(victim.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let writer = Writer::start(script.data(), overwrite);
    writer.assert_waiting();
    script.receive(sent);
    script.go_on();
    script.input = None;
    // No hang, and no lease is left: the writer goes on.
    writer.thread.join().unwrap();
    let _ = script.haul.wait();
    wait_until("all processes ended", || !processes.iter().copied().any(is_running));
    overwrite(&script.data());
}

#[test]
fn pages_in_flight_stay_after_the_program_was_killed() {
    assert_safe_after_kill(|script| {
        let broker = script.broker();
        let children = children_of(script.haul.id());
        children.into_iter().find(|&child| child != broker).unwrap()
    });
}

#[test]
fn pages_in_flight_stay_after_haul_was_killed() {
    assert_safe_after_kill(|script| script.haul.id());
}

#[test]
fn pages_in_flight_stay_after_the_broker_was_killed() {
    assert_safe_after_kill(Script::broker);
}

/// A peer that reads late, in the lab.
const RECEIVER: &str = "
import socket, time
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
l.bind(('0.0.0.0', 7000))
l.listen()
open('listening', 'w').close()
c, _ = l.accept()
time.sleep(4)
changed = total = 0
try:
    while True:
        received = c.recv(1 << 20)
        if not received:
            break
        total += len(received)
        changed += len(received) - received.count(b'a')
except ConnectionResetError:
    pass
import os
with open('counted', 'w') as counted:
    counted.write(f'{total} {changed}')
os.rename('counted', 'received')
";

/// A program that sends once, and then writes to the file.
const SENDER: &str = "
import mmap, os, socket, time, threading
while not os.path.exists('listening'):
    time.sleep(0.01)
f = os.open('data', os.O_RDONLY)
m = mmap.mmap(f, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
s = socket.create_connection((os.environ['HAUL_PEER'], 7000))
s.setblocking(False)
sent = s.send(m)
began = time.monotonic()
# Waits for the lease.
w = os.open('data', os.O_WRONLY)
waited = time.monotonic() - began
os.write(w, b'b' * os.path.getsize('data'))
print(sent, waited)
s.close()
while not os.path.exists('received'):
    time.sleep(0.01)
";

/// In two network namespaces: the peer acknowledges pages that it did not read yet.
#[test]
fn a_peer_in_another_namespace_is_waited_for() {
    let Some(python) = program("python3") else { return };
    if !rustix::process::getuid().is_root() {
        return eprintln!("SKIPPED: only root may look into other network namespaces");
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("data"), vec![BEFORE; FILE_BYTES]).unwrap();
    fs::write(folder.path().join("receiver"), RECEIVER).unwrap();
    fs::write(folder.path().join("sender"), SENDER).unwrap();
    let haul = env!("CARGO_BIN_EXE_haul");
    let mut lab = Command::new(haul);
    lab.args(["lab", "--receiver", &format!("{} receiver", python.display()), "--", haul, "run"]);
    lab.args(["--without=trial", "--json", "report.json", "--"]).arg(&python).arg("sender");
    let output = lab.current_dir(folder.path()).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers = |text: &str| -> Vec<f64> {
        text.split_whitespace().map(|word| word.parse().unwrap()).collect()
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    let [sent, waited] = numbers(&text)[..] else { panic!("{text} {errors}") };
    let received = fs::read_to_string(folder.path().join("received")).unwrap();
    let [total, changed] = numbers(&received)[..] else { panic!("{received}") };
    println!("of {sent} bytes {total} arrived, {changed} changed; the writer waited {waited:.1} s");
    let report: Value =
        serde_json::from_slice(&fs::read(folder.path().join("report.json")).unwrap()).unwrap();
    assert!(elided(&report) > 0, "{report}");
    assert!(total >= sent && waited > 1.0, "{total} of {sent} bytes in {waited} s");
    assert!(changed < 0.5, "{changed} bytes changed");
}
