//! What around a program could make `haul run` send other bytes than the program would: a firewall
//! that changes ports, a peer with a protocol above TCP, a file system that copies files, and a
//! program that replaces itself.
//!
//! Each test is one Python script, which is the program, the peer and the writer.

mod common {
    pub mod program;
}

use common::program::program;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The beginning of every script. `check` lets a writer open the file while the peer did not read,
/// and prints whether the writer waited and how many bytes were changed.
const PRELUDE: &str = "
import ctypes, mmap, os, socket, subprocess, sys, threading, time
SIZE = 1 << 20
def map_file(path='data'):
    f = os.open(path, os.O_RDONLY)
    return memoryview(mmap.mmap(f, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
def large(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    return s
def receive(s, size):
    received = bytearray()
    while len(received) < size:
        part = s.recv(min(1 << 16, size - len(received)))
        if not part:
            break
        received += part
    return received
def check(sender, peer, m):
    sender.setblocking(False)
    sent = sender.send(m)
    written = threading.Event()
    def write():
        w = os.open('data', os.O_WRONLY)
        os.write(w, b'b' * SIZE)
        os.close(w)
        written.set()
    threading.Thread(target=write, daemon=True).start()
    # Longer than the second that a peer on another host is given.
    time.sleep(3)
    waited = not written.is_set()
    received = receive(peer, sent)
    sender.close()
    peer.close()
    written.wait()
    print('waited' if waited else 'early', len(received) - received.count(b'a'), flush=True)
";

/// The beginning of scripts in the lab, which need a loopback device.
const IN_LAB: &str = "
subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
";

/// Writes a script, and runs the script in a new directory with the file `data`. `wrapper` is a
/// command that runs `haul run`.
fn run(wrapper: &[&str], script: &str, folder: &Path) -> Option<Output> {
    let python = program("python3")?;
    fs::write(folder.join("data"), vec![b'a'; 1 << 20]).unwrap();
    fs::write(folder.join("script"), format!("{PRELUDE}{script}")).unwrap();
    let haul = env!("CARGO_BIN_EXE_haul");
    let run = [haul, "run", "--without=trial", "--json", "report.json", "--"];
    let words = wrapper.iter().copied().chain(run).collect::<Vec<_>>();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(python).arg("script");
    Some(command.current_dir(folder).stdin(Stdio::null()).output().unwrap())
}

/// Runs a script that checks a peer, in the lab. The writer has to wait, and no byte may change.
fn check_peer(script: &str) {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("{IN_LAB}{script}");
    let lab = [env!("CARGO_BIN_EXE_haul"), "lab", "--"];
    let Some(output) = run(&lab, &script, folder.path()) else { return };
    let (text, errors) = (lossy(&output.stdout), lossy(&output.stderr));
    if text.trim() == "skipped" {
        return eprintln!("SKIPPED: this kernel does not support what the test needs");
    }
    assert_eq!(text.trim(), "waited 0", "{errors}");
    let report = fs::read_to_string(folder.path().join("report.json")).unwrap();
    assert!(report.contains("\"elided\""), "{report}");
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_peer_with_mptcp_is_waited_for() {
    check_peer(
        "
try:
    peer = large(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
except OSError:
    print('skipped')
    sys.exit()
listener = socket.create_server(('127.0.0.1', 0))
peer.connect(listener.getsockname())
check(large(listener.accept()[0]), peer, map_file())
",
    );
}

/// A rule that leads connections to port 8081 to port 8080.
const REDIRECT: &str = "
for rule in ['add table ip n',
        'add chain ip n o { type nat hook output priority -100; }',
        'add rule ip n o tcp dport 8081 redirect to :8080']:
    subprocess.run(['nft', rule], check=True)
listener = socket.create_server(('127.0.0.1', 8080))
connected = large(socket.socket())
connected.connect(('127.0.0.1', 8081))
accepted = large(listener.accept()[0])
";

#[test]
fn a_peer_behind_a_redirect_is_waited_for() {
    if program("nft").is_some() {
        check_peer(&format!("{REDIRECT}check(accepted, connected, map_file())"));
    }
}

#[test]
fn a_peer_that_a_redirect_led_to_is_waited_for() {
    if program("nft").is_some() {
        check_peer(&format!("{REDIRECT}check(connected, accepted, map_file())"));
    }
}

/// More and more bytes follow, so that the peer never reads everything that arrived. The writer
/// waits only for the bytes up to the pages of the file.
#[test]
fn a_writer_does_not_wait_for_what_is_sent_later() {
    let folder = tempfile::tempdir().unwrap();
    let script = "
listener = socket.create_server(('127.0.0.1', 0))
peer = socket.create_connection(listener.getsockname())
sender, _ = listener.accept()
sender.setblocking(False)
sent = sender.send(map_file())
sender.setblocking(True)
def send_more():
    while True:
        sender.sendall(b'c' * (1 << 16))
threading.Thread(target=send_more, daemon=True).start()
written = threading.Event()
def write():
    os.close(os.open('data', os.O_WRONLY))
    written.set()
threading.Thread(target=write, daemon=True).start()
received = receive(peer, sent)
began = time.monotonic()
# The kernel ends the lease after 45 s.
while time.monotonic() - began < 40 and not written.wait(0.01):
    peer.recv(1 << 16)
print(written.is_set(), len(received) - received.count(b'a'), flush=True)
";
    let Some(output) = run(&[], script, folder.path()) else { return };
    assert_eq!(lossy(&output.stdout).trim(), "True 0", "{}", lossy(&output.stderr));
    let report = fs::read_to_string(folder.path().join("report.json")).unwrap();
    assert!(report.contains("\"elided\""), "{report}");
}

#[test]
fn the_peer_of_a_socket_that_is_connected_again_is_waited_for() {
    check_peer(
        "
m = map_file()
listener = large(socket.create_server(('127.0.0.1', 0)))
sender = large(socket.socket())
sender.connect(listener.getsockname())
peer, _ = listener.accept()
sender.sendall(m[:65536])
receive(peer, 65536)
# AF_UNSPEC: the end of the connection, but not of the socket.
assert ctypes.CDLL(None).connect(sender.fileno(), bytes(16), 16) == 0
sender.connect(listener.getsockname())
check(sender, listener.accept()[0], m)
",
    );
}

#[test]
fn a_file_that_overlayfs_copies_is_not_sent_by_reference() {
    let script = "
def lower_bytes_arrive():
    m = map_file('merged/data')
    # The file is copied to the upper directory. The mapping still has the lower file.
    with open('merged/data', 'r+b') as f:
        f.write(b'b' * SIZE)
    expected = bytes(m)
    listener = socket.create_server(('127.0.0.1', 0))
    sender = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    received = []
    reader = threading.Thread(target=lambda: received.append(receive(peer, SIZE)))
    reader.start()
    sender.sendall(m)
    reader.join()
    return received[0] == expected
print(lower_bytes_arrive())
";
    let folder = tempfile::tempdir().unwrap();
    // On one file system, the copy has the inode of the original.
    let mount = "mkdir layers merged && mount -t tmpfs t layers && \
                 mkdir layers/lower layers/upper layers/work && cp data layers/lower && \
                 cd layers && mount -t overlay o \
                 -o lowerdir=lower,upperdir=upper,workdir=work ../merged && cd .. || \
                 { echo skipped; exit; }; exec \"$@\"";
    let user = if rustix::process::getuid().is_root() { "--mount" } else { "-Urm" };
    let wrapper = ["unshare", user, "sh", "-c", mount, "sh"];
    let Some(output) = run(&wrapper, script, folder.path()) else { return };
    match lossy(&output.stdout).trim() {
        "skipped" => eprintln!("SKIPPED: overlayfs cannot be mounted: {}", lossy(&output.stderr)),
        arrived => assert_eq!(arrived, "True", "{}", lossy(&output.stderr)),
    }
}

/// The kernel ends a lease after 45 s. The broker returns the lease earlier.
#[test]
fn a_program_that_replaces_itself_during_a_call_leaves_no_lease() {
    let script = "
listener = socket.create_server(('127.0.0.1', 0))
sender = socket.create_connection(listener.getsockname())
peer, _ = listener.accept()
m = map_file()
def send_for_ever():
    while True:
        sender.sendall(m)
threading.Thread(target=send_for_ever, daemon=True).start()
# Until the thread waits in a call, because nothing is read.
last = -1
while True:
    time.sleep(0.2)
    queued = ctypes.c_int()
    ctypes.CDLL(None).ioctl(sender.fileno(), 0x5411, ctypes.byref(queued))
    if queued.value == last:
        break
    last = queued.value
os.execv(sys.executable, [sys.executable, '-c', '''
import os, time
began = time.monotonic()
os.close(os.open(\"data\", os.O_WRONLY))
print(time.monotonic() - began)
'''])
";
    let folder = tempfile::tempdir().unwrap();
    let Some(output) = run(&[], script, folder.path()) else { return };
    let waited: f64 = lossy(&output.stdout).trim().parse().unwrap();
    println!("the writer waited {waited:.1} s");
    let report = fs::read_to_string(folder.path().join("report.json")).unwrap();
    assert!(report.contains("\"elided\""), "{report}");
    assert!(waited < 40.0, "{waited}");
}
