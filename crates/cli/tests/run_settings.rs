//! The settings of `haul run`, and its measurement of the saving.

mod common {
    pub mod processes;
    pub mod program;
}

use common::processes::{children_of, is_running, wait_until};
use common::program::program;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use tempfile::TempDir;

/// Length of the mapped file.
const FILE_BYTES: usize = 4 << 20;

/// A Python script that maps the file `data`, and has a connection `s` to the port.
const PRELUDE: &str = "
import mmap, os, socket, sys
f = os.open('data', os.O_RDONLY)
m = memoryview(mmap.mmap(f, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
";

/// `haul run` of a script that sends to a port, in a folder with the mapped file.
fn haul_run(options: &[&str], script: &str, port: u16, folder: &TempDir) -> Option<Command> {
    let python = program("python3")?;
    fs::write(folder.path().join("data"), vec![b'a'; FILE_BYTES]).unwrap();
    let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
    haul.args(["run", "--json", "report.json"]).args(options).arg("--").arg(python);
    haul.args(["-c", &format!("{PRELUDE}{script}"), &port.to_string()]);
    haul.current_dir(folder.path()).stdin(Stdio::null());
    Some(haul)
}

fn report(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap()
}

#[test]
fn connections_get_the_congestion_control() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // A client connects, and a server listens and accepts.
    let script = "
s.sendall(m)
l = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(l.getsockname())
a, _ = l.accept()
a.sendall(b'hello')
c.recv(5)
";
    let options = ["--congestion", "reno", "--watch"];
    let Some(mut haul) = haul_run(&options, script, port, &folder) else { return };
    let mut child = haul.spawn().unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    io::copy(&mut peer, &mut io::sink()).unwrap();
    assert!(child.wait().unwrap().success());
    let bytes = report(folder.path())["congestion_bytes"].clone();
    assert_eq!(bytes, serde_json::json!({ "reno": FILE_BYTES + 5 }));
}

#[test]
fn an_unknown_congestion_control_is_refused() {
    let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
    let output = haul.args(["run", "--congestion", "nothing", "--", "true"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("available: "), "{text}");
}

#[test]
fn the_allocator_keeps_memory_unless_the_user_decided() {
    let output = |own: Option<&str>| {
        let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
        haul.args(["run", "--keep-memory", "--", "env"]);
        if let Some(own) = own {
            haul.env("MALLOC_TRIM_THRESHOLD_", own);
        }
        String::from_utf8(haul.output().unwrap().stdout).unwrap()
    };
    assert!(output(None).contains("\nMALLOC_TRIM_THRESHOLD_=268435456\n"));
    assert!(output(Some("7")).contains("MALLOC_TRIM_THRESHOLD_=7\n"));
}

#[test]
fn the_saving_is_measured_while_the_command_runs() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = "
try:
    while True:
        s.sendall(m)
except OSError:
    pass
";
    let Some(mut haul) = haul_run(&["--prove"], script, port, &folder) else { return };
    let log = folder.path().join("stderr");
    let mut child = haul.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let connection = peer.try_clone().unwrap();
    let reading = thread::spawn(move || io::copy(&mut peer, &mut io::sink()));
    let process = Pid::from_child(&child);
    // The first pair takes long on a machine that is busy with something else.
    wait_until("a pair of windows was measured", || {
        kill_process(process, Signal::USR1).unwrap();
        thread::sleep(std::time::Duration::from_millis(500));
        fs::read_to_string(&log).unwrap().contains("CPU time of the machine")
    });
    let processes = children_of(child.id());
    connection.shutdown(std::net::Shutdown::Both).unwrap();
    let _ = reading.join();
    assert!(child.wait().unwrap().success());
    let proof = &report(folder.path())["proof"];
    println!("{proof}");
    let is_positive = |name: &str| proof[name].as_f64().is_some_and(|value| value > 0.0);
    assert!(is_positive("elided_us_per_mib") && is_positive("copied_us_per_mib"), "{proof}");
    wait_until("all processes ended", || !processes.iter().copied().any(is_running));
}
