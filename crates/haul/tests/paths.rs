//! Every send method over real sockets: all bytes arrive in order, for any chunk size, any range,
//! and blocking or non-blocking sockets.

use haul::{
    Copying, Error, Memory, MethodChoice, MethodOptions, SendMethod, SendSettings, Sender,
    file_len, probe, prove,
};
use haul_testing::{pattern, receive_all, tcp_pair, tcp_pair_over};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

/// Creates a temporary file with these contents.
fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Returns whether this kernel does not support the method, and prints that its test is skipped.
fn is_unsupported(method: SendMethod) -> bool {
    match probe(method) {
        Ok(_) => false,
        Err(reason) => {
            eprintln!("SKIPPED: {method} is not tested, this kernel does not support it: {reason}");
            true
        }
    }
}

/// Returns all methods that send the given bytes: all but `floor`, which sends other bytes.
fn methods_but_floor() -> impl Iterator<Item = SendMethod> {
    SendMethod::ALL.iter().copied().filter(|&method| method != SendMethod::Floor)
}

#[test]
fn every_method_sends_memory_up_to_its_end_and_reports_it() {
    let bytes = pattern(0, 100_000);
    let memory = Memory::new(&bytes[..], bytes.len()).unwrap();
    for method in methods_but_floor().filter(|method| method.takes_memory()) {
        if is_unsupported(method) {
            continue;
        }
        let (from, to) = tcp_pair();
        let received = receive_all(to);
        let settings = SendSettings::default().with_choice(MethodChoice::Method(method));
        let mut sender = Sender::with_settings(from, settings).unwrap();
        let error = sender.send_file_all(&memory, 10..150_000).unwrap_err();
        assert!(matches!(error.error, Error::Ended { at: 100_000, .. }), "{method}: {error}");
        assert_eq!(error.sent_bytes, 99_990, "{method}");
        let error = sender.send_file(&memory, 1 << 40..(1 << 40) + 1).unwrap_err();
        assert!(matches!(error, Error::Ended { .. }), "{method}: {error}");
        assert!(sender.report().fallbacks.is_empty(), "{method}: {sender:?}");
        drop(sender);
        assert!(received.join().unwrap() == bytes[10..], "{method}");
    }
}

/// A keep-alive connection may be asked for anything. Each refusal may be the file's.
#[test]
fn many_odd_files_in_a_row_take_no_method_from_a_connection_for_good() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let mut sender = Sender::new(from).unwrap();
    let file = file_with(&pattern(0, 100_000));
    let folder = File::open("/").unwrap();
    sender.send_file_all(&file, 0..100_000).unwrap();
    let usual = sender.latest_method();
    for _ in 0..20 {
        sender.send_file(&folder, 0..10).unwrap_err();
    }
    for _ in 0..100 {
        sender.send_file_all(&file, 0..1000).unwrap();
    }
    sender.send_file_all(&file, 0..100_000).unwrap();
    assert_eq!(sender.latest_method(), usual, "{sender:?}");
    drop(sender);
    assert_eq!(received.join().unwrap().len(), 300_000);
}

#[test]
fn every_method_sends_a_range_of_a_file_completely() {
    let bytes = pattern(0, 3_000_001);
    for method in methods_but_floor().filter(|&method| !is_unsupported(method)) {
        for chunk_bytes in [4096, 10_000, 65_536, 1 << 20] {
            let (from, to) = tcp_pair();
            let received = receive_all(to);
            let source = file_with(&bytes);
            let options = MethodOptions::default().with_chunk_bytes(chunk_bytes);
            let mut sender = method.attach(from.as_fd(), &options).unwrap();
            let mut range = 4097..bytes.len() as u64 - 3;
            while !range.is_empty() {
                range.start += sender.send(from.as_fd(), (&source).into(), range.clone()).unwrap();
            }
            assert_eq!(sender.counts().bytes, bytes.len() as u64 - 3 - 4097, "{method}");
            drop((sender, from));
            assert!(
                received.join().unwrap() == bytes[4097..bytes.len() - 3],
                "{method}, chunk {chunk_bytes}"
            );
        }
    }
}

#[test]
fn every_method_for_memory_sends_it_completely() {
    let bytes = pattern(0, 1_234_567);
    for method in
        methods_but_floor().filter(|&method| method.takes_memory() && !is_unsupported(method))
    {
        let (from, to) = tcp_pair_over(SocketAddr::from((Ipv6Addr::LOCALHOST, 0)));
        let received = receive_all(to);
        let source = Memory::new(bytes.as_slice(), bytes.len()).unwrap();
        let mut sender = method.attach(from.as_fd(), &MethodOptions::default()).unwrap();
        let mut range = 0..source.len();
        while !range.is_empty() {
            range.start += sender.send(from.as_fd(), (&source).into(), range.clone()).unwrap();
        }
        drop((sender, from));
        assert!(received.join().unwrap() == bytes, "{method}");
    }
}

#[test]
fn a_non_blocking_socket_neither_loses_nor_repeats_bytes() {
    let bytes = pattern(0, 8 << 20);
    for method in methods_but_floor().filter(|&method| !is_unsupported(method)) {
        let (from, to) = tcp_pair();
        from.set_nonblocking(true).unwrap();
        let source = file_with(&bytes);
        let mut sender = method.attach(from.as_fd(), &MethodOptions::default()).unwrap();
        let mut range = 0..bytes.len() as u64;
        // Fill the send buffer before the peer reads, so that a send must fail.
        let refused_at = loop {
            match sender.send(from.as_fd(), (&source).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => break range.start,
                Err(error) => panic!("{method}: {error}"),
            }
        };
        assert!(refused_at > 0 && refused_at < bytes.len() as u64, "{method}");
        let received = receive_all(to);
        while !range.is_empty() {
            match sender.send(from.as_fd(), (&source).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => thread::sleep(Duration::from_micros(200)),
                Err(error) => panic!("{method}: {error}"),
            }
        }
        drop((sender, from));
        assert!(received.join().unwrap() == bytes, "{method}");
    }
}

#[test]
fn a_truncated_file_gives_the_error_ended() {
    for method in methods_but_floor().filter(|&method| !is_unsupported(method)) {
        let (from, _to) = tcp_pair();
        let file = file_with(&pattern(0, 100_000));
        file.set_len(0).unwrap();
        let mut sender = method.attach(from.as_fd(), &MethodOptions::default()).unwrap();
        let error = sender.send(from.as_fd(), (&file).into(), 0..100_000).unwrap_err();
        assert!(matches!(error, Error::Ended { at: 0, .. }), "{method}: {error}");
    }
}

#[test]
fn a_file_truncated_in_the_middle_ends_at_the_counted_bytes() {
    let bytes = pattern(0, 100_000);
    for method in methods_but_floor().filter(|&method| !is_unsupported(method)) {
        let (from, to) = tcp_pair();
        let received = receive_all(to);
        let file = file_with(&bytes);
        file.set_len(50_000).unwrap();
        let options = MethodOptions::default().with_chunk_bytes(1 << 20);
        let mut sender = method.attach(from.as_fd(), &options).unwrap();
        let mut range = 0..100_000;
        let error = loop {
            match sender.send(from.as_fd(), (&file).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Ended { .. }), "{method}: {error}");
        assert_eq!(sender.counts().bytes, range.start, "{method}");
        drop((sender, from));
        let received = received.join().unwrap();
        assert_eq!(received.len() as u64, range.start, "{method}");
        // Past the new end, the last page of a mapped file reads as zeros.
        let kept = received.len().min(50_000);
        assert!(received[..kept] == bytes[..kept], "{method}");
    }
}

#[test]
fn bytes_left_in_a_pipe_are_not_sent_as_those_of_another_file() {
    let (ones, twos) = (vec![1u8; 8 << 20], vec![2u8; 1 << 20]);
    for method in [SendMethod::Splice, SendMethod::Vmsplice]
        .into_iter()
        .filter(|&method| !is_unsupported(method))
    {
        let (from, to) = tcp_pair();
        from.set_nonblocking(true).unwrap();
        let sources = [&ones, &twos].map(|bytes| file_with(bytes));
        let mut sender = method.attach(from.as_fd(), &MethodOptions::default()).unwrap();
        // Both files are sent from offset 0, so that only their bytes differ.
        let mut sent_ones = 0;
        while let Ok(sent) = sender.send(from.as_fd(), (&sources[0]).into(), 0..ones.len() as u64) {
            sent_ones += sent as usize;
        }
        let received = receive_all(to);
        let mut range = 0..twos.len() as u64;
        while !range.is_empty() {
            match sender.send(from.as_fd(), (&sources[1]).into(), range.clone()) {
                Ok(sent) => range.start += sent,
                Err(Error::WouldBlock) => thread::sleep(Duration::from_micros(200)),
                Err(error) => panic!("{method}: {error}"),
            }
        }
        drop((sender, from));
        let received = received.join().unwrap();
        assert_eq!(received.len(), sent_ones + twos.len(), "{method}");
        assert!(received[sent_ones..] == twos, "{method}");
    }
}

#[test]
fn a_reset_connection_gives_an_error_and_no_signal() {
    for method in methods_but_floor().filter(|&method| !is_unsupported(method)) {
        let (from, to) = tcp_pair();
        let source = file_with(&pattern(0, 1 << 20));
        let mut sender = method.attach(from.as_fd(), &MethodOptions::default()).unwrap();
        drop(to);
        let error = loop {
            match sender.send(from.as_fd(), (&source).into(), 0..1 << 20) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Failed { .. }), "{method}: {error}");
    }
}

#[test]
fn the_proof_distinguishes_pages_from_copies() {
    for method in SendMethod::ALL.iter().copied().filter(|&method| !is_unsupported(method)) {
        let (from, to) = tcp_pair();
        let proof = prove(method, &from, &to).unwrap();
        let expected = match method.copying() {
            Copying::Pages => 0.0,
            // On loopback the kernel copies the data of zero-copy sends.
            _ => 100.0,
        };
        assert!((proof.copied_percent() - expected).abs() < f64::EPSILON, "{method}: {proof:?}");
    }
}

#[test]
fn a_sender_falls_back_from_a_method_that_copies_and_loses_no_byte() {
    let bytes = pattern(0, 16 << 20);
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let source = Memory::new(bytes.as_slice(), bytes.len()).unwrap();
    let mut sender = Sender::with_settings(
        from,
        SendSettings::default().with_choice(MethodChoice::Method(SendMethod::Zerocopy)),
    )
    .unwrap();
    sender.send_file_all(&source, 0..source.len()).unwrap();
    assert_eq!(sender.wait_for_completions(Duration::from_secs(10)).unwrap(), 0);
    let report = sender.report();
    assert_eq!(report.fallbacks[0].from, "zerocopy", "{report:?}");
    assert!(report.fallbacks[0].reason.contains("copied"), "{report:?}");
    assert_eq!(report.files.iter().map(|(_, counts)| counts.bytes).sum::<u64>(), source.len());
    drop(sender);
    assert!(received.join().unwrap() == bytes);
}

#[test]
fn a_sender_falls_back_from_a_method_that_does_not_support_the_source() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let source = Memory::new(&b"hello"[..], 5).unwrap();
    let mut sender = Sender::with_settings(
        from,
        SendSettings::default().with_choice(MethodChoice::Method(SendMethod::MmapSend)),
    )
    .unwrap();
    sender.send_file_all(&source, 0..5).unwrap();
    assert_ne!(sender.method_for(&source, 5), SendMethod::MmapSend);
    drop(sender);
    assert_eq!(received.join().unwrap(), b"hello");
}

#[test]
fn unsendable_sources_give_errors() {
    let directory = File::open("/").unwrap();
    assert!(file_len(&directory).unwrap_err().to_string().contains("not a regular file"));
    assert_eq!(file_len(&tempfile::tempfile().unwrap()).unwrap(), 0);
    let (from, _to) = tcp_pair();
    let options = MethodOptions::default().with_chunk_bytes(0);
    assert!(SendMethod::Sendfile.attach(from.as_fd(), &options).is_err());
}

/// A directory and an empty file of the kernel cannot be sent, which says nothing about the
/// socket's next file.
#[test]
fn a_file_that_cannot_be_sent_leaves_the_methods_to_the_next_one() {
    let (from, to) = tcp_pair();
    let mut sender = Sender::new(from).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; 1 << 20]).unwrap();
    let first = sender.method_for(&file, 1 << 20);
    let directory = File::open("/").unwrap();
    for _ in 0..3 {
        let error = sender.send_file(&directory, 0..10).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error}");
    }
    assert_eq!(sender.method_for(&file, 1 << 20), first);
    let received = thread::spawn(move || {
        let (mut to, mut bytes) = (to, Vec::new());
        to.read_to_end(&mut bytes).unwrap();
        bytes
    });
    sender.send_file_all(&file, 0..1 << 20).unwrap();
    assert_eq!(sender.latest_method(), Some(first));
    // Each refusal is reported once.
    assert!(sender.report().fallbacks.len() <= SendMethod::ALL.len(), "{:?}", sender.report());
    drop(sender);
    assert!(received.join().unwrap() == vec![7; 1 << 20]);
}

/// A forked child has the same pipe as its parent. The bytes that the parent's call has left in it
/// are still to be sent by the parent.
#[test]
fn a_forked_child_takes_no_bytes_from_the_pipe_of_its_parents_sender() {
    let bytes = pattern(0, 16 << 20);
    let file = file_with(&bytes);
    for method in [SendMethod::Splice, SendMethod::Vmsplice] {
        let (from, mut to) = tcp_pair();
        from.set_nonblocking(true).unwrap();
        let settings = SendSettings::default().with_choice(method);
        let mut sender = Sender::with_settings(from, settings).unwrap();
        let stopped = sender.send_file_all(&file, 0..bytes.len() as u64).unwrap_err();
        assert!(matches!(stopped.error, Error::WouldBlock), "{method}: {stopped}");
        let rest = stopped.sent_bytes..bytes.len() as u64;
        let mut received = vec![0; rest.start as usize];
        to.read_exact(&mut received).unwrap();
        // The child sends the same bytes as the parent afterwards.
        let code = haul_lab_sys::child::in_forked_child(|| {
            i32::from(!matches!(sender.send_file(&file, rest.clone()), Ok(1..)))
        });
        assert_eq!(code.unwrap(), Some(0), "{method}: the child did not send");
        let receiving = receive_all(to);
        sender.socket().set_nonblocking(false).unwrap();
        sender.send_file_all(&file, rest.clone()).unwrap();
        drop(sender);
        received.extend(receiving.join().unwrap());
        assert!(received.starts_with(&bytes[..rest.start as usize]), "{method}");
        assert!(received.ends_with(&bytes[rest.start as usize..]), "{method}");
    }
}
