//! Tests of the methods that use io_uring, over loopback.

use super::*;
use haul_testing::{pattern, receive_all, tcp_pair, wait_until};
use std::io::{Read, Seek, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

/// `None` if the kernel refuses the method.
fn sender(method: RingMethod, socket: &TcpStream, chunk_bytes: usize) -> Option<RingSender> {
    match RingSender::new(method, socket.as_fd(), chunk_bytes) {
        Ok(sender) => Some(sender),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            eprintln!("SKIPPED: {}: {error}", method.name());
            None
        }
        Err(error) => panic!("{}: {error}", method.name()),
    }
}

fn file_with(bytes: &[u8]) -> File {
    let mut file =
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).map(File::from).unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

/// More bytes than the buffers of `uring-zerocopy` hold, so that buffers are used again.
#[test]
fn every_method_sends_the_bytes_of_files_and_memory() {
    let bytes = pattern(0, 6 << 20);
    let file = file_with(&bytes);
    for method in RingMethod::ALL {
        let sources = [RingSource::File(&file), RingSource::Memory(&file)];
        for source in &sources[..=usize::from(method.takes_memory())] {
            let (from, mut to) = tcp_pair();
            let Some(mut sender) = sender(method, &from, 48 << 10) else { continue };
            let receiving = thread::spawn(move || {
                let mut received = Vec::new();
                to.read_to_end(&mut received).unwrap();
                received
            });
            let mut range = 0..bytes.len() as u64;
            while !range.is_empty() {
                range.start += sender.send(from.as_fd(), *source, &range).unwrap();
            }
            assert_eq!(sender.counts().bytes, bytes.len() as u64, "{}", method.name());
            drop(from);
            assert!(receiving.join().unwrap() == bytes, "{} {source:?}", method.name());
        }
    }
}

#[test]
fn a_source_that_ends_early_is_an_error_and_a_chain_refuses_memory() {
    let file = file_with(&pattern(0, 1000));
    let (from, mut to) = tcp_pair();
    for method in RingMethod::ALL {
        let Some(mut sender) = sender(method, &from, 4096) else { continue };
        let mut sources = vec![RingSource::File(&file)];
        if method.takes_memory() {
            sources.push(RingSource::Memory(&file));
        } else {
            let refused = sender.send(from.as_fd(), RingSource::Memory(&file), &(0..10));
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::Unsupported);
        }
        for source in sources {
            // The file has fewer bytes than the range.
            assert_eq!(sender.send(from.as_fd(), source, &(10..5000)).unwrap(), 990);
            to.read_exact(&mut [0; 990]).unwrap();
            let ended = sender.send(from.as_fd(), source, &(1000..5000));
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}

/// The socket is full again and again, and every byte arrives once.
#[test]
fn a_full_non_blocking_socket_would_block_and_the_send_continues() {
    let bytes = pattern(0, 16 << 20);
    let file = file_with(&bytes);
    for method in RingMethod::ALL {
        let (from, to) = tcp_pair();
        from.set_nonblocking(true).unwrap();
        let Some(mut sender) = sender(method, &from, 64 << 10) else { continue };
        let (mut sent, mut blocked) = (0, 0);
        let mut receiving = Some(to);
        let mut received = None;
        while sent < bytes.len() as u64 {
            let range = sent..bytes.len() as u64;
            match sender.send(from.as_fd(), RingSource::File(&file), &range) {
                Ok(count) => sent += count,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                    blocked += 1;
                    // Nothing was received until the socket was full.
                    received = received.or_else(|| receiving.take().map(receive_all));
                    thread::sleep(Duration::from_micros(100));
                }
            }
        }
        assert!(blocked > 0, "{}: the socket was never full", method.name());
        drop(from);
        assert!(received.unwrap().join().unwrap() == bytes, "{}", method.name());
    }
}

/// A reset is an error of the connection, so other rounds of the row may succeed.
#[test]
fn a_reset_connection_is_not_a_refusal() {
    let file = file_with(&pattern(0, 4 << 20));
    for method in RingMethod::ALL {
        let (from, to) = tcp_pair();
        let Some(mut sender) = sender(method, &from, 64 << 10) else { continue };
        rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
        drop(to);
        let error = loop {
            match sender.send(from.as_fd(), RingSource::File(&file), &(0..4 << 20)) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_ne!(error.kind(), io::ErrorKind::Unsupported, "{}: {error}", method.name());
        assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "{}: {error}", method.name());
    }
}

/// A forked child has the queues of its parent's ring in its memory, and must not use them.
#[test]
fn a_forked_child_takes_no_completions_from_its_parents_ring() {
    let file = file_with(&pattern(0, 200_000));
    let (from, mut to) = tcp_pair();
    let Some(mut sender) = sender(RingMethod::Zerocopy, &from, 64 << 10) else { return };
    let mut range = 0..200_000;
    while !range.is_empty() {
        range.start += sender.send(from.as_fd(), RingSource::Memory(&file), &range).unwrap();
    }
    to.read_exact(&mut vec![0; 200_000]).unwrap();
    let sender = std::sync::Mutex::new(Some(sender));
    let code = haul_lab_sys::child::in_forked_child(|| {
        drop(sender.lock().unwrap().take());
        0
    });
    assert_eq!(code.unwrap(), Some(0));
    let mut sender = sender.lock().unwrap().take().unwrap();
    wait_until("the completions arrived", || sender.process_completions() == 0);
    let counts = sender.counts();
    assert_eq!(counts.copied_bytes + counts.zero_copied_bytes, 200_000);
}
