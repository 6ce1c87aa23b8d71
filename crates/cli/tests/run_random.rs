//! Random programs under `haul run` send byte for byte what they send without it.
//!
//! `HAUL_TEST_PROGRAMS=10000 cargo test --release -p haul-cli --test run_random` runs 10,000.

use serde_json::Value;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// Programs without `HAUL_TEST_PROGRAMS`.
const PROGRAMS: u64 = 60;

/// The program, which is an example of the interposer's crate.
fn random_program() -> PathBuf {
    let haul = Path::new(env!("CARGO_BIN_EXE_haul"));
    let program = haul.parent().unwrap().join("examples/random_program");
    if !program.exists() {
        // `cargo test --workspace` builds it; a test of this package alone does not.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "haul-interpose", "--example", "random_program"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success());
    }
    program
}

/// What each connection of a program received: a hash, and the number of bytes.
type Received = BTreeMap<u8, (u64, u64)>;

/// Receives everything from a connection, slowly at times, so that pages stay in flight.
fn receive(mut connection: TcpStream, seed: u64) -> (u8, (u64, u64)) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut index = [0];
    connection.read_exact(&mut index).unwrap();
    let (mut hasher, mut bytes) = (DefaultHasher::new(), 0);
    let mut buffer = vec![0; 256 << 10];
    loop {
        if random.u8(..) < 8 {
            thread::sleep(Duration::from_millis(random.u64(..4)));
        }
        match connection.read(&mut buffer).unwrap() {
            0 => return (index[0], (hasher.finish(), bytes)),
            read => {
                // Byte by byte the hash does not depend on where the reads end.
                buffer[..read].iter().for_each(|&byte| hasher.write_u8(byte));
                bytes += read as u64;
            }
        }
    }
}

/// Runs a program, alone or under haul, and returns what arrived. `None` if the program failed.
fn run(seed: u64, program: &Path, haul: Option<&[&str]>) -> Option<Received> {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let is_over = Arc::new(AtomicBool::new(false));
    let received = Arc::new(Mutex::new(Received::new()));
    let accepting = {
        let (is_over, received) = (Arc::clone(&is_over), Arc::clone(&received));
        thread::spawn(move || {
            thread::scope(|scope| {
                for connection in listener.incoming() {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    let received = &received;
                    scope.spawn(move || {
                        let (index, found) = receive(connection.unwrap(), seed);
                        received.lock().unwrap().insert(index, found);
                    });
                }
            });
        })
    };
    let arguments = [seed.to_string(), port.to_string()];
    let mut command = match haul {
        Some(options) => {
            let mut haul = Command::new(env!("CARGO_BIN_EXE_haul"));
            haul.arg("run").args(options).arg("--").arg(program);
            haul
        }
        None => Command::new(program),
    };
    command.args(arguments).arg(folder.path()).stdin(Stdio::null());
    let output = command.output().unwrap();
    is_over.store(true, Relaxed);
    // Wakes the thread that accepts.
    let _ = TcpStream::connect(("127.0.0.1", port));
    accepting.join().unwrap();
    if !output.status.success() {
        eprintln!("seed {seed}: {}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    let received = received.lock().unwrap().clone();
    Some(received)
}

fn programs() -> u64 {
    std::env::var("HAUL_TEST_PROGRAMS").map_or(PROGRAMS, |number| number.parse().unwrap())
}

/// The seeds from `first` on whose programs sent something else under haul.
fn different(options: &[&str], seeds: std::ops::Range<u64>) -> Vec<u64> {
    let program = random_program();
    let next = std::sync::atomic::AtomicU64::new(seeds.start);
    let found = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let alone = run(seed, &program, None);
                    assert!(alone.is_some(), "seed {seed} fails without haul");
                    if alone != run(seed, &program, Some(options)) {
                        found.lock().unwrap().push(seed);
                    }
                }
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn random_programs_send_the_same_bytes() {
    let different = different(&["--without=trial"], 0..programs());
    assert!(different.is_empty(), "other bytes of the seeds {different:?}");
}

/// Runs programs until haul elides bytes, or names the age of the kernel as the reason.
#[test]
fn bytes_are_elided_or_the_kernel_is_too_old() {
    let program = random_program();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let options = ["--without=trial", "--json", file.to_str().unwrap()];
    let has_reason = (0..PROGRAMS).any(|seed| {
        run(seed, &program, Some(&options)).expect("the program succeeds");
        let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let has = |rows: &str, key: &str, name: &str| {
            report[rows].as_array().unwrap().iter().any(|row| row[key] == name)
        };
        has("sent", "method", "elided") || has("not_elided", "reason", "old-kernel")
    });
    assert!(has_reason, "nothing was elided in {PROGRAMS} programs");
}

#[test]
fn without_the_kernels_confirmation_other_bytes_are_sent() {
    let options = ["--without=trial", "--without=confirmation"];
    let different = different(&options, 0..PROGRAMS);
    assert!(different.len() > 5, "of {PROGRAMS} programs only {different:?} differ");
}
