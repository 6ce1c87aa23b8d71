//! Every path over real sockets: what is sent arrives, whole and in order, whatever the chunk, the range and
//! the socket's mode.

use haul::{
    Copying, Error, Memory, MethodChoice, MethodOptions, SendMethod, SendSettings, Sender,
    file_len, probe, prove,
};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

/// Bytes in which every 8-byte word is different, so that no piece can stand for another.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64)
        .flat_map(|i| {
            (i / 8).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[i as usize % 8..][..1]
                .to_vec()
        })
        .collect()
}

fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn connected() -> (TcpStream, TcpStream) {
    connected_over(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

fn connected_over(address: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(address).unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (from, listener.accept().unwrap().0)
}

/// Whether this kernel refuses the path altogether; says so, since what follows is then not tested.
fn refused(path: SendMethod) -> bool {
    match probe(path) {
        Ok(_) => false,
        Err(reason) => {
            eprintln!("SKIPPED: {path} is not tested, this kernel refuses it: {reason}");
            true
        }
    }
}

fn receive_all(mut to: TcpStream) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut received: Vec<u8> = Vec::new();
        to.read_to_end(&mut received).unwrap();
        received
    })
}

fn real_paths() -> impl Iterator<Item = SendMethod> {
    SendMethod::ALL.into_iter().filter(|&path| path != SendMethod::Floor)
}

#[test]
fn a_range_of_a_file_arrives_whole_through_every_path() {
    let bytes = pattern(3_000_001);
    for path in real_paths().filter(|&path| !refused(path)) {
        for chunk_bytes in [4096, 10_000, 65_536, 1 << 20] {
            let (from, to) = connected();
            let received = receive_all(to);
            let source = file_with(&bytes);
            let options = MethodOptions { chunk_bytes, ..MethodOptions::default() };
            let mut sender = path.open(from.as_fd(), &options).unwrap();
            let mut range = 4097..bytes.len() as u64 - 3;
            while !range.is_empty() {
                range.start += sender.send(from.as_fd(), (&source).into(), range.clone()).unwrap();
            }
            assert_eq!(sender.counts().bytes, bytes.len() as u64 - 3 - 4097, "{path}");
            drop((sender, from));
            assert!(
                received.join().unwrap() == bytes[4097..bytes.len() - 3],
                "{path}, chunk {chunk_bytes}"
            );
        }
    }
}

#[test]
fn memory_arrives_whole_through_every_path_that_takes_it() {
    let bytes = pattern(1_234_567);
    for path in real_paths().filter(|&path| path.takes_memory() && !refused(path)) {
        let (from, to) = connected_over(SocketAddr::from((Ipv6Addr::LOCALHOST, 0)));
        let received = receive_all(to);
        let source = Memory::new(bytes.as_slice(), bytes.len()).unwrap();
        let mut sender = path.open(from.as_fd(), &MethodOptions::default()).unwrap();
        let mut range = 0..source.len();
        while !range.is_empty() {
            range.start += sender.send(from.as_fd(), (&source).into(), range.clone()).unwrap();
        }
        drop((sender, from));
        assert!(received.join().unwrap() == bytes, "{path}");
    }
}

#[test]
fn a_non_blocking_socket_takes_what_it_takes_and_nothing_is_lost_or_doubled() {
    let bytes = pattern(8 << 20);
    for path in real_paths().filter(|&path| !refused(path)) {
        let (from, to) = connected();
        from.set_nonblocking(true).unwrap();
        let source = file_with(&bytes);
        let mut sender = path.open(from.as_fd(), &MethodOptions::default()).unwrap();
        let mut range = 0..bytes.len() as u64;
        // Fill the socket before anybody reads, so that it must refuse.
        let refused_at = loop {
            match sender.send(from.as_fd(), (&source).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => break range.start,
                Err(error) => panic!("{path}: {error}"),
            }
        };
        assert!(refused_at > 0 && refused_at < bytes.len() as u64, "{path}");
        let received = receive_all(to);
        while !range.is_empty() {
            match sender.send(from.as_fd(), (&source).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => thread::sleep(Duration::from_micros(200)),
                Err(error) => panic!("{path}: {error}"),
            }
        }
        drop((sender, from));
        assert!(received.join().unwrap() == bytes, "{path}");
    }
}

#[test]
fn a_file_that_was_truncated_ends_and_does_not_hang_or_crash() {
    for path in real_paths().filter(|&path| !refused(path)) {
        let (from, _to) = connected();
        let file = file_with(&pattern(100_000));
        file.set_len(0).unwrap();
        let mut sender = path.open(from.as_fd(), &MethodOptions::default()).unwrap();
        let error = sender.send(from.as_fd(), (&file).into(), 0..100_000).unwrap_err();
        assert!(matches!(error, Error::Ended { at: 0 }), "{path}: {error}");
    }
}

#[test]
fn a_file_truncated_in_the_middle_ends_where_the_count_says() {
    let bytes = pattern(100_000);
    for path in real_paths().filter(|&path| !refused(path)) {
        let (from, to) = connected();
        let received = receive_all(to);
        let file = file_with(&bytes);
        file.set_len(50_000).unwrap();
        let options = MethodOptions { chunk_bytes: 1 << 20, ..MethodOptions::default() };
        let mut sender = path.open(from.as_fd(), &options).unwrap();
        let mut range = 0..100_000;
        let error = loop {
            match sender.send(from.as_fd(), (&file).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Ended { .. }), "{path}: {error}");
        assert_eq!(sender.counts().bytes, range.start, "{path}");
        drop((sender, from));
        let received = received.join().unwrap();
        assert_eq!(received.len() as u64, range.start, "{path}");
        // Past its new end the last page of a mapped file reads as zeros.
        let kept = received.len().min(50_000);
        assert!(received[..kept] == bytes[..kept], "{path}");
    }
}

#[test]
fn what_a_pipe_held_of_one_file_is_never_sent_as_another_s() {
    let (one, two) = (vec![1u8; 8 << 20], vec![2u8; 1 << 20]);
    for path in
        [SendMethod::Splice, SendMethod::Vmsplice].into_iter().filter(|&path| !refused(path))
    {
        let (from, to) = connected();
        from.set_nonblocking(true).unwrap();
        let sources = [&one, &two].map(|bytes| file_with(bytes));
        let mut sender = path.open(from.as_fd(), &MethodOptions::default()).unwrap();
        // Always from offset 0, so that only the file tells the two apart.
        let mut sent_of_one = 0;
        while let Ok(sent) = sender.send(from.as_fd(), (&sources[0]).into(), 0..one.len() as u64) {
            sent_of_one += sent as usize;
        }
        let received = receive_all(to);
        let mut range = 0..two.len() as u64;
        while !range.is_empty() {
            match sender.send(from.as_fd(), (&sources[1]).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => thread::sleep(Duration::from_micros(200)),
                Err(error) => panic!("{path}: {error}"),
            }
        }
        drop((sender, from));
        let received = received.join().unwrap();
        assert_eq!(received.len(), sent_of_one + two.len(), "{path}");
        assert!(received[sent_of_one..] == two, "{path}");
    }
}

#[test]
fn a_reset_connection_is_a_failure_and_not_a_signal() {
    for path in real_paths().filter(|&path| !refused(path)) {
        let (from, to) = connected();
        let source = file_with(&pattern(1 << 20));
        let mut sender = path.open(from.as_fd(), &MethodOptions::default()).unwrap();
        drop(to);
        let error = loop {
            match sender.send(from.as_fd(), (&source).into(), 0..1 << 20) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Failed { .. }), "{path}: {error}");
    }
}

#[test]
fn the_proof_tells_pages_from_copies() {
    for path in SendMethod::ALL.into_iter().filter(|&path| !refused(path)) {
        let (from, to) = connected();
        let proved = prove(path, &from, &to).unwrap();
        let expected = match path.copying() {
            Copying::Pages => 0.0,
            // On loopback the kernel copies what was to go without a copy.
            Copying::Always | Copying::KernelTells => 100.0,
        };
        assert!((proved.copied_percent() - expected).abs() < f64::EPSILON, "{path}: {proved:?}");
    }
}

#[test]
fn a_sender_steps_down_from_what_copies_after_all_and_every_byte_arrives() {
    let bytes = pattern(16 << 20);
    let (from, to) = connected();
    let received = receive_all(to);
    let source = Memory::new(bytes.as_slice(), bytes.len()).unwrap();
    let mut sender = Sender::with(
        from,
        SendSettings {
            choice: MethodChoice::Method(SendMethod::Zerocopy),
            ..SendSettings::default()
        },
    )
    .unwrap();
    sender.send_file_all(&source, 0..source.len()).unwrap();
    assert_eq!(sender.settle(Duration::from_secs(10)).unwrap(), 0);
    let report = sender.report();
    assert_eq!(report.fallbacks[0].from, "zerocopy", "{report:?}");
    assert!(report.fallbacks[0].reason.contains("copied"), "{report:?}");
    assert_eq!(report.files.iter().map(|(_, counts)| counts.bytes).sum::<u64>(), source.len());
    drop(sender);
    assert!(received.join().unwrap() == bytes);
}

#[test]
fn a_path_that_does_not_suit_the_source_is_stepped_down_from() {
    let (from, to) = connected();
    let received = receive_all(to);
    let source = Memory::new(&b"hello"[..], 5).unwrap();
    let mut sender = Sender::with(
        from,
        SendSettings {
            choice: MethodChoice::Method(SendMethod::UringChain),
            ..SendSettings::default()
        },
    )
    .unwrap();
    sender.send_file_all(&source, 0..5).unwrap();
    assert_ne!(sender.path_for(&source, 5), SendMethod::UringChain);
    drop(sender);
    assert_eq!(received.join().unwrap(), b"hello");
}

#[test]
fn what_cannot_be_sent_says_so() {
    let directory = File::open("/").unwrap();
    assert!(file_len(&directory).unwrap_err().to_string().contains("not a regular file"));
    assert!(file_len(&tempfile::tempfile().unwrap()).unwrap_err().to_string().contains("empty"));
    let (from, _to) = connected();
    let options = MethodOptions { chunk_bytes: 0, ..MethodOptions::default() };
    assert!(SendMethod::Sendfile.open(from.as_fd(), &options).is_err());
}
