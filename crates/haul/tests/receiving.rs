//! Receiving over real sockets: any mix of sends and receives delivers each byte once, in order.

mod sockets;

use haul::{
    BufferPool, Error, Mapping, Memory, MethodOptions, ReceiveReport, ReceiveSettings, Receiver,
    SendMethod,
};
use haul_lab::{Lab, LabError, Settings};
use haul_lab_sys::seccomp;
use haul_sys::ktls::Version;
use haul_sys::sockopt;
use haul_testing::tcp_pair;
use rustix::net::SendFlags;
use sockets::encrypted_pair;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

/// Returns the bytes to send on each connection of the mixture test: 48 MiB, or `HAUL_TEST_MIB` MiB
/// for longer runs than CI has time for.
fn mixture_bytes() -> u64 {
    let mib = std::env::var("HAUL_TEST_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(48u64);
    mib << 20
}

/// Returns the byte of the test stream at `position`. The stream has no period that a page, a
/// segment or a buffer could share.
fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Returns `len` bytes of the test stream, starting at `from`.
fn stream_bytes(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(byte_at).collect()
}

/// Checks that `bytes` are the bytes of the test stream at `position`.
fn check(position: u64, bytes: &[u8]) {
    assert!(
        bytes == stream_bytes(position, bytes.len()),
        "the bytes from position {position} on differ from the sent bytes"
    );
}

fn receiver(socket: TcpStream, mapping: Mapping) -> Receiver<TcpStream> {
    Receiver::with_settings(socket, ReceiveSettings::default().with_mapping(mapping)).unwrap()
}

/// Receives the first `total` bytes of the test stream and checks each byte.
fn receive_all(receiver: &mut Receiver<TcpStream>, total: u64) {
    let mut position = 0;
    while position < total {
        let chunk = receiver.receive().unwrap().unwrap();
        check(position, chunk.bytes());
        position += chunk.bytes().len() as u64;
    }
}

fn in_lab(mtu: u32) -> Option<(Lab, TcpStream, TcpStream)> {
    let lab = match Lab::veth(&Settings::default().with_mtu(mtu)) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: receiving is not tested in a lab: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (from, to) = lab.connect().unwrap();
    Some((lab, from, to))
}

/// `MSG_ZEROCOPY`, which rustix does not define.
const ZEROCOPY: SendFlags = SendFlags::from_bits_retain(0x400_0000);

/// Sends the test stream in writes of 1 B to 1 MiB, some of them of whole pages.
///
/// Some writes end with `MSG_EOR`. Some use `MSG_ZEROCOPY`, because on veth only the single pages
/// into which the kernel copies those can be mapped. Returns the memory that may be in flight.
fn send_mixture(from: &TcpStream, total: u64, seed: u64) -> VecDeque<Vec<u8>> {
    /// More than the buffers of both sockets hold. Bytes sent earlier have arrived, so their memory
    /// can be freed.
    const KEPT_BYTES: usize = 64 << 20;
    sockopt::set_zerocopy(from, true).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut kept, mut kept_bytes) = (VecDeque::new(), 0);
    let mut position = 0;
    while position < total {
        let len = match random.u32(0..4) {
            0 => random.usize(1..200),
            1 => random.usize(1..1 << 20),
            2 => 4096 * random.usize(1..256),
            _ => 4096 * random.usize(1..16),
        };
        let bytes = stream_bytes(position, len.min((total - position) as usize));
        let mut flags = SendFlags::NOSIGNAL;
        flags.set(SendFlags::EOR, random.bool());
        flags.set(ZEROCOPY, len % 4096 == 0 && random.u32(0..4) > 0);
        let mut sent = 0;
        while sent < bytes.len() {
            sent += rustix::net::send(from, &bytes[sent..], flags).unwrap_or_else(|errno| {
                assert_eq!(errno, rustix::io::Errno::NOBUFS);
                flags.remove(ZEROCOPY);
                0
            });
        }
        while haul_sys::error_queue::next_completion(from).unwrap().is_some() {}
        position += bytes.len() as u64;
        kept_bytes += bytes.len();
        kept.push_back(bytes);
        while kept_bytes > KEPT_BYTES {
            kept_bytes -= kept.pop_front().map_or(0, |bytes| bytes.len());
        }
    }
    from.shutdown(std::net::Shutdown::Write).unwrap();
    kept
}

/// Receives the test stream with random calls of the receiver's methods and checks each byte.
fn receive_mixture(receiver: &mut Receiver<TcpStream>, total: u64, seed: u64) -> ReceiveReport {
    let mut random = fastrand::Rng::with_seed(!seed);
    let file = tempfile::tempfile().unwrap();
    let mut buffer = vec![0; 300_000];
    let mut position = 0;
    loop {
        let count = match random.u32(0..8) {
            0 => {
                let len = random.usize(1..buffer.len());
                let count = receiver.receive_into(&mut buffer[..len]).unwrap();
                check(position, &buffer[..count]);
                count as u64
            }
            1 => {
                let range = random.u64(0..10_000)..random.u64(10_001..500_000);
                let count = receiver.receive_into_file(&file, range.clone()).unwrap();
                let mut stored = vec![0; count as usize];
                file.read_exact_at(&mut stored, range.start).unwrap();
                check(position, &stored);
                count
            }
            2 => receiver.discard(random.u64(1..100_000)).unwrap(),
            3 => {
                receiver.expect((total - position).min(random.u64(0..1 << 20)));
                continue;
            }
            _ => match receiver.receive().unwrap() {
                Some(chunk) => {
                    check(position, chunk.bytes());
                    chunk.bytes().len() as u64
                }
                None => 0,
            },
        };
        if count == 0 {
            break;
        }
        position += count;
    }
    assert_eq!(position, total, "the stream ended early");
    let report = receiver.report().clone();
    let counts = [report.mapped, report.read, report.into_file, report.discarded];
    assert_eq!(counts.iter().map(|count| count.bytes).sum::<u64>(), total, "{report:?}");
    report
}

#[test]
fn any_mixture_of_sends_and_receives_delivers_every_byte() {
    for (mtu, loss) in [(1500, "0"), (4148, "0"), (4148, "0.1%"), (9000, "0"), (61_496, "0")] {
        let Some((lab, from, to)) = in_lab(mtu) else { return };
        if loss != "0" {
            match lab.set_loss(loss.parse().unwrap()) {
                Ok(()) => {}
                Err(error) => eprintln!("SKIPPED: no loss on this connection: {error}"),
            }
        }
        for mapping in [Mapping::Always, Mapping::Measured] {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            // The second setting uses a new connection.
            let (from, to) =
                if mapping == Mapping::Always { (from, to) } else { lab.connect().unwrap() };
            let total = if loss == "0" { mixture_bytes() } else { mixture_bytes() / 4 };
            let sender = thread::spawn(move || send_mixture(&from, total, u64::from(mtu)));
            let mut receiver = receiver(to, mapping);
            let report = receive_mixture(&mut receiver, total, u64::from(mtu));
            // All bytes have arrived, so the sent memory can be freed.
            drop(sender.join().unwrap());
            let mapped_percent = 100 * report.mapped.bytes / total;
            eprintln!(
                "MTU {mtu}, loss {loss}, {mapping:?}: {mapped_percent} % mapped, {:?}",
                report.fallbacks
            );
            // A short stream may have few writes of whole pages by chance.
            let must_map = (mtu, mapping) == (4148, Mapping::Always) && total >= 16 << 20;
            assert!(mapped_percent > 5 || !must_map, "{report:?}");
        }
    }
}

/// On veth `MSG_ZEROCOPY` falls back to copying into single pages, and MTU 4148 gives each segment
/// one page of payload: 4096 bytes after 40 bytes of headers and 12 bytes of timestamps.
///
/// Usually all bytes are mapped. If the receiver does not run until its receive window is full, the
/// sender then splits segments at other positions (98 % mapped was seen).
#[test]
fn nearly_all_bytes_are_mapped_if_segments_are_pages() {
    let Some((_lab, from, to)) = in_lab(4148) else { return };
    let total: u64 = 64 << 20;
    let memory = Memory::new(stream_bytes(0, total as usize).as_slice(), total as usize).unwrap();
    let sender = thread::spawn(move || {
        let options = MethodOptions::default().with_chunk_bytes(15 * 4096);
        let mut method = SendMethod::Zerocopy.attach(from.as_fd(), &options).unwrap();
        let mut range = 0..total;
        while !range.is_empty() {
            range.start += method.send(from.as_fd(), (&memory).into(), range.clone()).unwrap();
        }
        from
    });
    let mut receiver = receiver(to, Mapping::Always);
    receiver.expect(total);
    receive_all(&mut receiver, total);
    drop(sender.join().unwrap());
    assert!(receiver.receive().unwrap().is_none());
    let report = receiver.report();
    let percent = 100.0 * report.mapped.bytes as f64 / total as f64;
    assert!(percent >= 90.0, "only {percent:.1} % was mapped: {report:?}");
}

/// A mapping of such a socket's pages crashes some kernels, so only the check before it is tested.
#[test]
fn a_socket_whose_data_a_bpf_program_receives_is_recognised() {
    let (mut from, to) = tcp_pair();
    let is_nothing = |result: std::io::Result<bool>| {
        result.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    assert!(is_nothing(sockopt::peek_tcp(&to)));
    let intercepted = match haul_lab_sys::sockmap::Sockmap::intercept(&to) {
        Ok(intercepted) => intercepted,
        Err(error) => return eprintln!("SKIPPED: there is no sockmap here: {error}"),
    };
    from.write_all(b"through the program").unwrap();
    let mut byte = [0];
    assert_eq!(to.peek(&mut byte).unwrap(), 1);
    let error = sockopt::peek_tcp(&to).unwrap_err();
    assert_eq!(rustix::io::Errno::from_io_error(&error), Some(rustix::io::Errno::FAULT));
    drop(intercepted);
    let (mut from, mut to) = tcp_pair();
    from.write_all(b"12").unwrap();
    assert_eq!(to.peek(&mut byte).unwrap(), 1);
    assert!(sockopt::peek_tcp(&to).unwrap());
    to.read_exact(&mut [0; 2]).unwrap();
    assert!(is_nothing(sockopt::peek_tcp(&to)));
    drop(from);
    assert_eq!(to.peek(&mut byte).unwrap(), 0);
    assert!(!sockopt::peek_tcp(&to).unwrap());
}

#[test]
fn a_peer_on_the_same_machine_is_not_mapped_unless_that_is_asked_for() {
    for (mapping, expected) in [(None, "could change mapped pages"), (Some(Mapping::Always), "")] {
        let (mut from, to) = tcp_pair();
        let settings = ReceiveSettings::default();
        let settings = mapping.map_or(settings, |mapping| settings.with_mapping(mapping));
        let mut receiver = Receiver::with_settings(to, settings).unwrap();
        from.write_all(&stream_bytes(0, 10_000)).unwrap();
        receive_all(&mut receiver, 10_000);
        let reasons: Vec<_> = receiver.report().fallbacks.iter().map(|it| &it.reason).collect();
        assert!(reasons.iter().all(|reason| reason.contains(expected)), "{reasons:?}");
        assert_eq!(reasons.len(), usize::from(!expected.is_empty()), "{reasons:?}");
    }
}

#[test]
fn pages_that_cannot_be_mapped_are_read_and_the_reason_is_reported() {
    let Some((_lab, from, to)) = in_lab(9000) else { return };
    // A receiver cannot map pages of a file as long as they belong to it, so the file stays open.
    let sender = thread::spawn(move || {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&stream_bytes(0, 16 << 20)).unwrap();
        haul::Sender::new(from).unwrap().send_file_all(&file, 0..16 << 20).unwrap();
        file
    });
    let mut receiver = Receiver::new(to).unwrap();
    let mut position = 0;
    while let Some(chunk) = receiver.receive().unwrap() {
        check(position, chunk.bytes());
        position += chunk.bytes().len() as u64;
    }
    drop(sender.join().unwrap());
    assert_eq!(position, 16 << 20);
    let report = receiver.report();
    assert_eq!((report.fallbacks[0].from, report.fallbacks[0].to), ("mapped", "read"));
    assert!(report.fallbacks[0].reason.contains("only 0 %"), "{report:?}");
}

#[test]
fn without_data_a_non_blocking_socket_and_a_timeout_give_would_block() {
    for mapping in [Mapping::Always, Mapping::Never] {
        let (mut from, to) = tcp_pair();
        to.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut receiver = receiver(to, mapping);
        assert!(matches!(receiver.receive(), Err(Error::WouldBlock)));
        // `expect` raises the low-water mark (SO_RCVLOWAT), and the timeout still applies.
        receiver.expect(100_000);
        assert!(matches!(receiver.receive(), Err(Error::WouldBlock)));
        receiver.socket().set_nonblocking(true).unwrap();
        assert!(matches!(receiver.receive(), Err(Error::WouldBlock)));
        assert!(matches!(receiver.discard(1), Err(Error::WouldBlock)));
        let file = tempfile::tempfile().unwrap();
        assert!(matches!(receiver.receive_into_file(&file, 0..10), Err(Error::WouldBlock)));
        receiver.socket().set_nonblocking(false).unwrap();
        receiver.expect(5);
        from.write_all(b"hello").unwrap();
        assert_eq!(receiver.receive().unwrap().unwrap().bytes(), b"hello");
        drop(from);
        assert!(receiver.receive().unwrap().is_none());
        assert_eq!(receiver.receive_into(&mut [0; 4]).unwrap(), 0);
        assert_eq!(receiver.receive_into_file(&file, 0..10).unwrap(), 0);
        assert_eq!(receiver.discard(10).unwrap(), 0);
    }
}

#[test]
fn expecting_many_bytes_does_not_hang_if_the_peer_sends_single_bytes() {
    let (from, to) = tcp_pair();
    from.set_nodelay(true).unwrap();
    let total = 60_000;
    let sender = thread::spawn(move || {
        for position in 0..total {
            (&from).write_all(&[byte_at(position)]).unwrap();
        }
        from
    });
    let mut receiver = receiver(to, Mapping::Always);
    receiver.expect(total);
    receive_all(&mut receiver, total);
    drop(sender.join().unwrap());
}

#[test]
fn bytes_that_a_file_does_not_accept_are_not_lost() {
    for mapping in [Mapping::Always, Mapping::Never] {
        let (mut from, to) = tcp_pair();
        from.write_all(&stream_bytes(0, 10_000)).unwrap();
        drop(from);
        let mut receiver = receiver(to, mapping);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = receiver.receive_into_file(&full, 0..10_000).unwrap_err();
        assert!(error.to_string().contains("No space"), "{error}");
        let mut all = Vec::new();
        let mut buffer = [0; 100];
        let count = receiver.receive_into(&mut buffer).unwrap();
        all.extend(&buffer[..count]);
        assert!(receiver.discard(50).unwrap() <= 50);
        all.extend(stream_bytes(all.len() as u64, 50));
        while let Some(chunk) = receiver.receive().unwrap() {
            all.extend(chunk.bytes());
        }
        check(0, &all);
        assert_eq!(all.len(), 10_000);
    }
}

/// `splice` cannot write to a file that is opened for appending. The receiver falls back to writes.
#[test]
fn a_file_that_does_not_support_splice_is_written() {
    let (mut from, to) = tcp_pair();
    from.write_all(&stream_bytes(0, 200_000)).unwrap();
    drop(from);
    let mut receiver = Receiver::new(to).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("appended");
    let file = File::options().append(true).create(true).open(&path).unwrap();
    let mut position = 0;
    loop {
        match receiver.receive_into_file(&file, position..1 << 20).unwrap() {
            0 => break,
            count => position += count,
        }
    }
    assert_eq!(position, 200_000);
    check(0, &std::fs::read(&path).unwrap());
    let fallbacks = &receiver.report().fallbacks;
    assert_eq!(fallbacks.iter().filter(|f| f.from == "splice-to-file").count(), 1, "{fallbacks:?}");
}

#[test]
fn a_unix_stream_is_read_and_other_sockets_are_refused() {
    let (mut from, to) = UnixStream::pair().unwrap();
    from.write_all(&stream_bytes(0, 50_000)).unwrap();
    drop(from);
    let mut receiver = Receiver::new(to).unwrap();
    assert_eq!(receiver.discard(1000).unwrap(), 1000);
    let file = tempfile::tempfile().unwrap();
    assert_eq!(receiver.receive_into_file(&file, 0..1000).unwrap(), 1000);
    let mut rest = Vec::new();
    receiver.read_to_end(&mut rest).unwrap();
    check(2000, &rest);
    assert_eq!(rest.len(), 48_000);
    assert!(receiver.report().fallbacks.is_empty(), "nothing was to be mapped so far");
    assert!(receiver.receive().unwrap().is_none());
    assert!(receiver.report().fallbacks[0].reason.contains("TCP"), "{:?}", receiver.report());
    let datagram = Receiver::new(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap_err();
    assert!(matches!(datagram, Error::WrongSocket { .. }), "{datagram}");
    assert!(matches!(Receiver::new(tempfile::tempfile().unwrap()), Err(Error::NotASocket)));
}

#[test]
fn a_reset_gives_an_error() {
    for mapping in [Mapping::Always, Mapping::Never] {
        let (from, to) = tcp_pair();
        (&to).write_all(b"never read").unwrap();
        let mut byte = [0];
        from.peek(&mut byte).unwrap();
        // Closing with unread data resets the connection.
        drop(from);
        let mut receiver = receiver(to, mapping);
        let error = receiver.receive().unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{mapping:?}: {error}");
    }
}

#[test]
fn receive_up_to_does_not_receive_bytes_of_the_next_message() {
    for mapping in [Mapping::Always, Mapping::Never] {
        let (mut from, to) = tcp_pair();
        from.write_all(&stream_bytes(0, 200_000)).unwrap();
        let mut receiver = receiver(to, mapping);
        let mut position = 0;
        for message in [5, 100_000, 1, 4096, 95_898] {
            let mut left = message;
            receiver.expect(left as u64);
            while left > 0 {
                let chunk = receiver.receive_up_to(left).unwrap().unwrap();
                assert!(chunk.len() <= left);
                check(position, &chunk);
                position += chunk.len() as u64;
                left -= chunk.len();
            }
        }
        assert_eq!(position, 200_000);
        // All expected bytes have arrived, so the low-water mark is one byte again.
        receiver.socket().set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        from.write_all(b"!").unwrap();
        assert_eq!(&*receiver.receive().unwrap().unwrap(), b"!");
    }
}

/// An urgent byte (`MSG_OOB`) stops mapping and splicing although bytes can be received. The
/// receiver skips it as `recv` does: the stream neither hangs nor ends.
#[test]
fn an_urgent_byte_is_skipped() {
    for mapping in [Mapping::Always, Mapping::Never] {
        for into_file in [false, true] {
            let (mut from, to) = tcp_pair();
            assert_eq!(rustix::net::send(&from, b"!", SendFlags::OOB).unwrap(), 1);
            from.write_all(b"hello").unwrap();
            drop(from);
            let mut receiver = receiver(to, mapping);
            let file = tempfile::tempfile().unwrap();
            let mut received = Vec::new();
            loop {
                if into_file {
                    let count = receiver.receive_into_file(&file, 0..100).unwrap();
                    let mut stored = vec![0; count as usize];
                    file.read_exact_at(&mut stored, 0).unwrap();
                    received.extend(stored);
                    if count == 0 {
                        break;
                    }
                } else if let Some(chunk) = receiver.receive().unwrap() {
                    received.extend(chunk.iter());
                } else {
                    break;
                }
            }
            assert_eq!(received, b"hello", "{mapping:?}, into a file: {into_file}");
        }
    }
}

/// A socket whose bytes are held becomes readable only for new ones, which may never come.
#[test]
fn bytes_that_a_full_disk_did_not_accept_are_held_and_counted() {
    let (mut from, to) = tcp_pair();
    let mut receiver = Receiver::new(to).unwrap();
    from.write_all(&stream_bytes(0, 10_000)).unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let error = receiver.receive_into_file(&full, 0..10_000).unwrap_err();
    assert!(error.to_string().contains("No space"), "{error}");
    let held = receiver.held_bytes();
    assert!(held > 0);
    let mut received = vec![0; 10_000];
    let mut position = receiver.receive_into(&mut received).unwrap();
    assert_eq!((position, receiver.held_bytes()), (held.min(10_000), 0));
    while position < received.len() {
        position += receiver.receive_into(&mut received[position..]).unwrap();
    }
    check(0, &received);
}

/// A reset after some bytes is an error, not the end of the stream.
#[test]
fn a_reset_after_some_bytes_is_not_the_end_of_the_stream() {
    for mapping in [Mapping::Always, Mapping::Never] {
        let (mut from, to) = tcp_pair();
        (&to).write_all(b"never read").unwrap();
        from.peek(&mut [0]).unwrap();
        from.write_all(&[7; 100]).unwrap();
        drop(from);
        let mut receiver = receiver(to, mapping);
        let ended = loop {
            match receiver.receive() {
                Ok(Some(chunk)) => assert!(chunk.iter().all(|&byte| byte == 7)),
                ended => break ended.map(|_| ()),
            }
        };
        assert!(matches!(ended, Err(Error::Failed { .. })), "{mapping:?}: {ended:?}");
    }
}

/// A dropped receiver resets the low-water mark that it has raised.
#[test]
fn dropping_a_receiver_resets_the_low_water_mark() {
    let (mut from, to) = tcp_pair();
    to.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut receiver = Receiver::new(&to).unwrap();
    receiver.expect(50_000);
    drop(receiver);
    from.write_all(b"small").unwrap();
    let mut buffer = [0; 100];
    assert_eq!((&to).read(&mut buffer).unwrap(), 5);
}

/// The program may have set a separate mark.
#[test]
fn dropping_a_receiver_restores_the_programs_low_water_mark() {
    let (_from, to) = tcp_pair();
    sockopt::set_receive_low_water(&to, 700).unwrap();
    let mut receiver = Receiver::new(&to).unwrap();
    receiver.expect(50_000);
    assert!(sockopt::receive_low_water(&to).unwrap() > 700);
    drop(receiver);
    assert_eq!(sockopt::receive_low_water(&to).unwrap(), 700);
}

/// A filter of system calls or a BPF program may refuse the low-water mark, which only saves
/// wake-ups. No byte may be lost by that.
#[test]
fn no_byte_is_lost_where_the_low_water_mark_is_refused() {
    const TOTAL: u64 = 1 << 20;
    let (mut from, to) = tcp_pair();
    let sent = thread::spawn(move || from.write_all(&stream_bytes(0, TOTAL as usize)).unwrap());
    // The filter stays with its thread.
    let received = thread::spawn(move || {
        let option = [(1, libc::SOL_SOCKET), (2, libc::SO_RCVLOWAT)];
        seccomp::refuse(libc::SYS_setsockopt, &option, libc::EPERM).unwrap();
        let mut receiver = receiver(to, Mapping::Measured);
        receiver.expect(TOTAL);
        let file = tempfile::tempfile().unwrap();
        let mut buffer = vec![0; 10_000];
        let mut position = 0;
        for turn in 0.. {
            let count = match turn % 3 {
                0 => {
                    let chunk = receiver.receive().unwrap();
                    chunk.map_or(0, |chunk| {
                        check(position, chunk.bytes());
                        chunk.bytes().len()
                    })
                }
                1 => {
                    let count = receiver.receive_into(&mut buffer).unwrap();
                    check(position, &buffer[..count]);
                    count
                }
                _ => {
                    let count = receiver.receive_into_file(&file, 0..10_000).unwrap() as usize;
                    file.read_exact_at(&mut buffer[..count], 0).unwrap();
                    check(position, &buffer[..count]);
                    count
                }
            };
            position += count as u64;
            if count == 0 {
                break;
            }
        }
        assert_eq!(position, TOTAL);
    });
    received.join().unwrap();
    sent.join().unwrap();
}

/// The end of the stream is also `Ok(0)`.
#[test]
fn a_reversed_range_of_a_file_is_refused() {
    let (_from, to) = tcp_pair();
    let file = tempfile::tempfile().unwrap();
    let (start, end) = (10, 5);
    let received = Receiver::new(to).unwrap().receive_into_file(&file, start..end);
    assert!(matches!(received, Err(Error::InvalidInput(_))), "{received:?}");
}

/// A file that is opened for appending, which `splice` cannot write to, says nothing about the
/// next file of the connection.
#[test]
fn a_file_that_does_not_support_splice_leaves_it_to_the_next_file() {
    const BUFFER_BYTES: usize = 1000;
    let (mut from, to) = tcp_pair();
    from.write_all(&stream_bytes(0, 20_000)).unwrap();
    let settings = ReceiveSettings::default().with_buffer_bytes(BUFFER_BYTES);
    let mut receiver = Receiver::with_settings(to, settings).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = File::options().append(true).create(true).open(folder.path().join("one")).unwrap();
    let mut position = receiver.receive_into_file(&file, 0..20_000).unwrap();
    assert!(position <= BUFFER_BYTES as u64, "{:?}", receiver.report());
    let file = tempfile::tempfile().unwrap();
    while position < 20_000 {
        let count = receiver.receive_into_file(&file, position..20_000).unwrap();
        // A call that reads is limited by the buffer.
        assert!(count > BUFFER_BYTES as u64, "{:?}", receiver.report());
        position += count;
    }
}

/// A forked child has the same pipe as its parent, and the bytes in it are the parent's.
#[test]
fn a_forked_child_takes_no_bytes_from_its_parents_pipe() {
    let (mut from, to) = tcp_pair();
    from.write_all(&stream_bytes(0, 10_000)).unwrap();
    let mut receiver = Receiver::new(to).unwrap();
    // `splice` into a file that is not open for writing fails, and leaves the bytes in the pipe.
    let unwritable = File::open("/dev/null").unwrap();
    receiver.receive_into_file(&unwritable, 0..10_000).unwrap_err();
    receiver.socket().set_nonblocking(true).unwrap();
    let code = haul_lab_sys::child::in_forked_child(|| {
        let file = tempfile::tempfile().unwrap();
        let refused = [
            receiver.receive_into(&mut [0; 100]).map(|_| ()),
            receiver.receive_into_file(&file, 0..100).map(|_| ()),
            receiver.receive().map(|_| ()),
            receiver.discard(100).map(|_| ()),
        ];
        i32::from(!refused.iter().all(|refused| matches!(refused, Err(Error::Forked))))
    });
    assert_eq!(code.unwrap(), Some(0), "the child received bytes");
    receiver.socket().set_nonblocking(false).unwrap();
    drop(from);
    let mut all = Vec::new();
    receiver.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 10_000);
    check(0, &all);
}

/// If a file accepts only a part of the bytes in the pipe, the next call begins with the others,
/// also for a smaller range.
#[test]
fn bytes_left_in_the_pipe_by_a_full_file_stay_in_order() {
    let (mut from, to) = tcp_pair();
    from.write_all(&stream_bytes(0, 60_000)).unwrap();
    drop(from);
    let mut receiver = Receiver::new(to).unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert!(receiver.receive_into_file(&full, 0..60_000).is_err());
    let file = tempfile::tempfile().unwrap();
    let mut position = 0;
    // The ranges are smaller than the bytes in the pipe. Nothing may be written beyond them.
    for range in [0..1000, 1000..1001, 1001..30_000] {
        while position < range.end {
            position += receiver.receive_into_file(&file, position..range.end).unwrap();
        }
        assert_eq!(file.metadata().unwrap().len(), range.end);
    }
    assert!(receiver.receive_into_file(&full, 30_000..60_000).is_err());
    let mut all = vec![0; 30_000];
    file.read_exact_at(&mut all, 0).unwrap();
    receiver.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 60_000);
    check(0, &all);
}

/// `MSG_TRUNC` and mapped pages would give a receiver the encrypted bytes, or end the connection.
#[test]
fn bytes_that_the_kernel_decrypts_are_received_and_discarded() {
    for version in [Version::V1_2, Version::V1_3] {
        for mapping in [Mapping::Measured, Mapping::Always] {
            let Some((mut from, to)) = encrypted_pair(version) else { return };
            let mut receiver = receiver(to, mapping);
            let sending = thread::spawn(move || {
                // The receiver has to wait for the first bytes.
                thread::sleep(Duration::from_millis(50));
                from.write_all(&stream_bytes(0, 300_000)).unwrap();
            });
            let mut position = 0;
            while position < 300_000 {
                if position % 2 == 0 {
                    let chunk = receiver.receive_up_to(7001).unwrap().unwrap();
                    check(position, chunk.bytes());
                    position += chunk.bytes().len() as u64;
                } else {
                    position += receiver.discard(3).unwrap();
                }
            }
            sending.join().unwrap();
            assert!(receiver.receive().unwrap().is_none());
            assert_eq!(receiver.report().mapped.bytes, 0);
        }
    }
}

/// Ten connections share one buffer: an idle one holds none.
#[test]
fn receivers_share_a_pool_and_hold_a_buffer_only_while_it_has_bytes() {
    let pool = BufferPool::new(16 << 10, 1).unwrap();
    let settings = ReceiveSettings::default().with_mapping(Mapping::Never);
    let connections: Vec<_> = (0..10).map(|_| tcp_pair()).collect();
    let mut receivers: Vec<_> = connections
        .iter()
        .map(|(_, to)| {
            to.set_nonblocking(true).unwrap();
            Receiver::with_pool(to, settings, pool.clone()).unwrap()
        })
        .collect();
    for (number, (mut from, _)) in connections.iter().map(|(from, to)| (from, to)).enumerate() {
        from.write_all(&[number as u8; 100]).unwrap();
        let receiver = &mut receivers[number];
        let received = loop {
            match receiver.receive() {
                Ok(chunk) => break chunk.unwrap().bytes().to_vec(),
                Err(Error::WouldBlock) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(received, [number as u8; 100]);
        assert_eq!(pool.in_use(), 0, "its chunk was dropped");
        assert!(matches!(receiver.receive(), Err(Error::WouldBlock)));
        assert_eq!(pool.in_use(), 0);
    }
    let held = pool.take().unwrap();
    assert!(matches!(receivers[0].receive(), Err(Error::PoolEmpty { .. })));
    drop(held);
    // Taken out of the chunk, a buffer can be kept and lent.
    (&connections[0].0).write_all(b"last").unwrap();
    let kept = loop {
        if let Ok(chunk) = receivers[0].receive() {
            break chunk.unwrap().into_buffer().unwrap();
        }
    };
    assert_eq!((&kept[..], pool.in_use()), (&b"last"[..], 1));
}
