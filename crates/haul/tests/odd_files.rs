//! Every send method and the default sender against files that do not hold what the caller asks
//! for: shorter, empty, growing and truncated files, and files of /proc and /sys, whose
//! length is 0.

use haul::{Error, MethodChoice, SendMethod, SendSettings, Sender, probe};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::thread::{self, JoinHandle};

/// Longer than a page, and not a multiple of one.
const FILE_BYTES: u64 = 10_005;

fn bytes_of(len: u64) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8 + 1).collect()
}

fn file_of(len: u64) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes_of(len)).unwrap();
    file
}

/// A sender, and a thread that returns the bytes that the sender sent.
fn sender(choice: &MethodChoice) -> (Sender<TcpStream>, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut peer = listener.accept().unwrap().0;
    let received = thread::spawn(move || {
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).unwrap();
        bytes
    });
    let settings = SendSettings::default().with_choice(choice.clone());
    (Sender::with_settings(socket, settings).unwrap(), received)
}

/// The default choice, and each method that this kernel supports and that sends the file's bytes.
fn choices() -> Vec<(String, MethodChoice)> {
    let of_method = |method: &SendMethod| {
        let method = *method;
        match probe(method) {
            _ if method == SendMethod::Floor => None,
            Ok(_) => Some((method.to_string(), MethodChoice::Method(method))),
            Err(reason) => {
                eprintln!("SKIPPED: {method}: {reason}");
                None
            }
        }
    };
    let default = ("default".to_owned(), MethodChoice::Builtin);
    std::iter::once(default).chain(SendMethod::ALL.iter().filter_map(of_method)).collect()
}

#[test]
fn a_range_beyond_the_end_of_a_file_sends_the_file_and_reports_where_it_ends() {
    let cases: [(u64, Range<u64>); 9] = [
        (5, 0..10),
        (FILE_BYTES, 0..FILE_BYTES + 1),
        (FILE_BYTES, 10_000..20_000),
        // In the last page, and in a page that does not exist.
        (FILE_BYTES, FILE_BYTES..FILE_BYTES + 10),
        (FILE_BYTES, FILE_BYTES + 1..FILE_BYTES + 10),
        (FILE_BYTES, 1 << 30..(1 << 30) + 1),
        (8192, 4096..8193),
        (8192, 8192..8193),
        (0, 0..1),
    ];
    for (name, choice) in choices() {
        for (len, range) in &cases {
            let file = file_of(*len);
            let (mut sender, received) = sender(&choice);
            let failure = sender.send_file_all(&file, range.clone()).unwrap_err();
            let end = range.start.max(*len);
            let case = format!("{name}: bytes {range:?} of {len}");
            assert!(
                matches!(failure.error, Error::Ended { at, .. } if at == end),
                "{case}: {failure}"
            );
            assert_eq!(failure.sent_bytes, len.saturating_sub(range.start), "{case}");
            drop(sender);
            let sent = bytes_of(*len).split_off((range.start.min(*len)) as usize);
            assert!(received.join().unwrap() == sent, "{case}: other bytes arrived");
        }
    }
}

#[test]
fn a_file_that_grows_or_shrinks_between_two_calls_sends_what_it_holds() {
    for (name, choice) in choices() {
        let mut file = file_of(FILE_BYTES);
        let (mut sender, received) = sender(&choice);
        sender.send_file_all(&file, 0..FILE_BYTES).unwrap();
        file.write_all(b"grown").unwrap();
        sender.send_file_all(&file, FILE_BYTES..FILE_BYTES + 5).unwrap();
        drop(sender);
        let grown = [&bytes_of(FILE_BYTES)[..], b"grown"].concat();
        // The pages of the file are in flight until they were received.
        assert!(received.join().unwrap() == grown, "{name}: other bytes arrived");
        file.set_len(7).unwrap();
        let (mut sender, received) = self::sender(&choice);
        let failure = sender.send_file_all(&file, 0..FILE_BYTES).unwrap_err();
        assert!(matches!(failure.error, Error::Ended { at: 7, .. }), "{name}: {failure}");
        drop(sender);
        assert!(received.join().unwrap() == bytes_of(7), "{name}: other bytes arrived");
    }
}

/// Some of these files can be sent by `sendfile`, some cannot be mapped or spliced from, and none
/// has a length. The content of a few changes between two reads.
#[test]
fn files_of_proc_and_sys_are_sent() {
    let paths = [
        "/proc/cpuinfo",
        "/proc/kallsyms",
        "/proc/net/dev",
        "/proc/net/tcp",
        "/proc/pressure/cpu",
        "/proc/self/status",
        "/proc/version",
        "/sys/kernel/mm/transparent_hugepage/enabled",
    ];
    for (name, choice) in choices() {
        for path in paths {
            // Not every kernel has every file.
            let Ok(content) = fs::read(path) else { continue };
            let file = File::open(path).unwrap();
            let (mut sender, received) = sender(&choice);
            let failure = sender.send_file_all(&file, 0..1 << 30).unwrap_err();
            let case = format!("{name}: {path}");
            assert!(matches!(failure.error, Error::Ended { .. }), "{case}: {failure}");
            drop(sender);
            let received = received.join().unwrap();
            assert_eq!(received.len() as u64, failure.sent_bytes, "{case}");
            let start = content.len().min(8);
            assert!(received.starts_with(&content[..start]), "{case}: other bytes arrived");
            assert!(received.is_empty() == content.is_empty(), "{case}");
        }
    }
}

#[test]
fn what_is_not_a_readable_file_is_an_error_and_sends_nothing() {
    let folder = File::open("/").unwrap();
    let write_only = File::options().write(true).open("/dev/null").unwrap();
    for (name, choice) in choices() {
        for file in [&folder, &write_only] {
            let (mut sender, received) = sender(&choice);
            let failure = sender.send_file_all(file, 0..10).unwrap_err();
            assert!(failure.sent_bytes == 0, "{name}: {failure}");
            drop(sender);
            assert!(received.join().unwrap().is_empty(), "{name}");
        }
    }
}
