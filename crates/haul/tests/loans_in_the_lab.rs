//! Loans over a link that loses packets, and with almost no kernel memory for completions.

use haul::{BufferPool, LoanLimits, LoanOutcome, PooledBuffer, SendSettings, Sender};
use haul_lab::{Lab, LabError};
use haul_lab_sys::seccomp;
use haul_sys::sockopt::bytes_to_read;
use haul_sys::tcp_info::tcp_info;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use std::fs;
use std::io::Read;
use std::net::{TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// So much is lent without a copy.
const LENT_BYTES: usize = 300_000;

fn in_lab() -> Option<(Lab, TcpStream, TcpStream)> {
    let lab = match Lab::veth(&haul_lab::Settings::default()) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: loans are not tested in a lab: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (from, to) = lab.connect().unwrap();
    Some((lab, from, to))
}

/// Returns the byte of the test stream at `position`.
fn byte_at(position: usize) -> u8 {
    ((position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Sends `total` bytes of the test stream from lent buffers of random sizes.
///
/// Each buffer is overwritten as soon as it is returned. If the kernel returned one too early, the
/// peer would receive the overwritten bytes. Returns the numbers of copied and zero-copied loans.
fn lend_and_overwrite(sender: &mut Sender<TcpStream>, total: usize) -> (usize, usize) {
    let pool = BufferPool::new(300_000, 40).unwrap();
    let mut random = fastrand::Rng::with_seed(5);
    let (mut position, mut copied, mut zero_copied) = (0, 0, 0);
    let mut reclaim = |sender: &mut Sender<TcpStream>| {
        for returned in sender.reclaim().unwrap() {
            if let Ok(mut buffer) = returned.buffer.into_owner::<PooledBuffer>() {
                buffer.fill(0xEE);
            }
            match returned.outcome {
                LoanOutcome::ZeroCopied => zero_copied += 1,
                _ => copied += 1,
            }
        }
    };
    while position < total {
        let mut buffer = pool.take().unwrap();
        buffer.resize(random.usize(1..300_000).min(total - position)).unwrap();
        for (offset, byte) in buffer.iter_mut().enumerate() {
            *byte = byte_at(position + offset);
        }
        position += buffer.len();
        sender.lend(buffer).unwrap();
        reclaim(sender);
        if random.u32(0..20) == 0 {
            // Fork and exec between two loans: the child has neither the pages nor the completions.
            assert!(Command::new("true").status().unwrap().success());
        }
    }
    assert_eq!(sender.wait_for_completions(Duration::from_secs(30)).unwrap(), 0);
    reclaim(sender);
    assert_eq!(pool.in_use(), 0);
    (copied, zero_copied)
}

/// Reads the test stream on a new thread, which checks each byte and returns the stream's length.
fn receive_and_check(mut to: TcpStream) -> thread::JoinHandle<usize> {
    thread::spawn(move || {
        let (mut position, mut buffer) = (0, vec![0; 100_000]);
        loop {
            let count = to.read(&mut buffer).unwrap();
            if count == 0 {
                return position;
            }
            for (offset, &byte) in buffer[..count].iter().enumerate() {
                assert_eq!(
                    byte,
                    byte_at(position + offset),
                    "byte {} differs from the lent byte",
                    position + offset
                );
            }
            position += count;
        }
    })
}

#[test]
fn retransmissions_carry_the_lent_bytes() {
    const TOTAL: usize = 24 << 20;
    let Some((lab, from, to)) = in_lab() else { return };
    match lab.set_loss("0.5%".parse().unwrap()) {
        Ok(()) => {}
        Err(error) => eprintln!("SKIPPED: the link cannot drop packets: {error}"),
    }
    let receiver = receive_and_check(to);
    let mut sender = Sender::new(from).unwrap();
    lend_and_overwrite(&mut sender, TOTAL);
    drop(sender);
    assert_eq!(receiver.join().unwrap(), TOTAL);
}

/// The kernel charges each pending completion to `optmem_max`. If not even one fits, it refuses
/// every zero-copy send, and the sender copies.
#[test]
fn loans_are_copied_without_memory_for_completions() {
    const TOTAL: usize = 8 << 20;
    let Some((lab, _, _)) = in_lab() else { return };
    // The setting exists per network namespace since Linux 6.8.
    let file = "/proc/sys/net/core/optmem_max";
    if let Err(error) = lab.sender.run(|| fs::write(file, "1")).unwrap() {
        return eprintln!("SKIPPED: {file} cannot be written here: {error}");
    }
    // A socket takes the limit over when it is created.
    let (from, to) = lab.connect().unwrap();
    let receiver = receive_and_check(to);
    let limits = LoanLimits::default().with_loans_max(39);
    let mut sender =
        Sender::with_settings(from, SendSettings::default().with_limits(limits)).unwrap();
    let (copied, _) = lend_and_overwrite(&mut sender, TOTAL);
    let report = sender.report();
    assert!(copied > 0 && report.enobufs_count > 0, "the limit had no effect: {report:?}");
    drop(sender);
    assert_eq!(receiver.join().unwrap(), TOTAL);
}

fn datagrams_with_mtu_1500() -> Option<(Lab, UdpSocket, UdpSocket)> {
    let lab = match Lab::veth(&haul_lab::Settings::default().with_mtu(1500)) {
        Ok(lab) => lab,
        Err(error @ (LabError::NoNamespaces { .. } | LabError::OneCpu { .. })) => {
            eprintln!("SKIPPED: datagrams larger than the MTU are not tested: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let bind =
        |host: &haul_lab::Host| host.run(|| UdpSocket::bind((host.address(), 0))).unwrap().unwrap();
    let (from, to) = (bind(&lab.sender), bind(&lab.receiver));
    from.connect(to.local_addr().unwrap()).unwrap();
    to.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    Some((lab, from, to))
}

/// Before Linux 6.14 the kernel refuses a segment that does not fit the MTU with `EINVAL`, and a
/// socket or route without segmentation offload with the same. Only the latter is sent without it:
/// otherwise each segment would be sent in fragments.
#[test]
fn segments_larger_than_the_mtu_are_not_sent_one_by_one() {
    let Some((_lab, from, to)) = datagrams_with_mtu_1500() else { return };
    // The filter stays with its thread.
    let sending = thread::spawn(move || {
        seccomp::refuse(libc::SYS_sendmsg, &[], libc::EINVAL).unwrap();
        let mut sender = Sender::new(from).unwrap();
        let error = sender.lend_segments(vec![0; 12_000], 3000).unwrap_err();
        assert_eq!(error.error.raw_os_error(), Some(libc::EINVAL), "{error}");
        let sent = sender.lend_segments(vec![7; 12_000], 1000);
        // The sendmmsg of musl is made of sendmsg calls, which the filter refuses.
        assert_eq!(sent.is_ok(), !cfg!(target_env = "musl"), "{sent:?}");
    });
    sending.join().unwrap();
    if cfg!(target_env = "musl") {
        return;
    }
    for _ in 0..12 {
        assert_eq!(to.recv(&mut [0; 4000]).unwrap(), 1000);
    }
}

/// A datagram that fails after the kernel has built it has a completion. If that stayed in the
/// error queue, every poll would return at once.
#[test]
fn a_failed_datagram_leaves_no_completion_in_the_error_queue() {
    let Some((_lab, from, to)) = datagrams_with_mtu_1500() else { return };
    let mut sender = Sender::new(from).unwrap();
    // No segment of 3000 bytes fits the MTU. Smaller loans than this are copied.
    sender.lend_segments(vec![0; 12_000], 3000).unwrap_err();
    assert_eq!(sender.reclaim().unwrap().count(), 0);
    let mut polled = [PollFd::new(&sender, PollFlags::empty())];
    assert_eq!(rustix::event::poll(&mut polled, Some(&Timespec::default())), Ok(0));
    // Later loans are sent from their own pages, and come back.
    for _ in 0..4 {
        sender.lend_segments(vec![7; 16_000], 1000).unwrap();
        for _ in 0..16 {
            assert_eq!(to.recv(&mut [0; 2000]).unwrap(), 1000);
        }
        assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        assert_eq!(sender.reclaim().unwrap().count(), 1);
    }
    assert!(sender.report().fallbacks.is_empty(), "{:?}", sender.report());
}

/// A device's queue keeps lent pages after the peer has reset the connection. A `lend` that waits
/// for their completions returns the error, and does not wait for the queue.
#[test]
fn a_reset_ends_a_wait_for_room_while_the_device_holds_the_pages() {
    const LOAN_BYTES: usize = 300_000;
    let Some((lab, from, mut to)) = in_lab() else { return };
    let socket = from.try_clone().unwrap();
    // The first 256 KiB pass at once. After them a packet of 64 KiB takes 5 s.
    lab.set_rate(Some(100_000)).unwrap();
    let limits = LoanLimits::default().with_loans_max(1);
    let settings = SendSettings::default().with_limits(limits).with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    // The first loan shows the kernel's numbers.
    sender.lend(vec![1; 50_000]).unwrap();
    assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
    assert_eq!(sender.reclaim().unwrap().count(), 1);
    sender.lend(vec![2; LOAN_BYTES]).unwrap();
    let reset = thread::spawn(move || {
        to.read_exact(&mut vec![0; 200_000]).unwrap();
        // What TCP still has is freed by a reset, and what the device has is not: the device has
        // something once more was sent than arrives.
        let deadline = Instant::now() + Duration::from_secs(120);
        let arrived = || 200_000 + bytes_to_read(&to).unwrap();
        let mut before = 0;
        while before != arrived() || tcp_info(&socket).unwrap().sent_bytes <= arrived() {
            before = arrived();
            assert!(Instant::now() < deadline, "the device holds nothing");
            thread::sleep(Duration::from_millis(300));
        }
        drop(socket);
        set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
        drop(to);
    });
    let refused = sender.lend(vec![3; LOAN_BYTES]).unwrap_err();
    reset.join().unwrap();
    assert_eq!(std::io::Error::from(refused.error).kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(refused.buffer.len(), LOAN_BYTES);
    assert!(sender.wants().completion, "the device has released all pages before the error");
}

/// A missing route is no failure of a connection, which survives it. `SO_ERROR` returns it like
/// one, so it is not read because of completions.
#[test]
fn completions_without_a_route_are_no_failure() {
    let Some((lab, from, mut to)) = in_lab() else { return };
    if ["nft", "ip"].iter().any(|tool| Command::new(tool).arg("-V").output().is_err()) {
        eprintln!("SKIPPED: no link is down: nft (nftables) or ip (iproute2) is missing");
        return;
    }
    let set_link = |state| {
        let mut command = Command::new("ip");
        let command = command.args(["link", "set", lab.sender.device(), state]);
        let status = lab.sender.run_program(command).unwrap();
        assert!(status.is_ok_and(|status| status.success()), "ip link set {state}");
    };
    let wait_for_error_event = || {
        let mut sockets = [PollFd::new(&from, PollFlags::empty())];
        let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut sockets, Some(&timeout)).unwrap(), 1);
    };
    to.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut sender = Sender::new(from.try_clone().unwrap()).unwrap();
    let pool = BufferPool::new(LENT_BYTES, 1).unwrap();
    let mut buffer = pool.take().unwrap();
    buffer.resize(LENT_BYTES).unwrap();
    sender.lend(buffer).unwrap();
    to.read_exact(&mut vec![0; LENT_BYTES]).unwrap();
    wait_for_error_event();
    // These bytes are lost, and have no route when they are sent again.
    lab.set_loss("100%".parse().unwrap()).unwrap();
    sender.send_all(b"late").unwrap();
    set_link("down");
    thread::sleep(Duration::from_secs(2));
    sender.on_error_event().unwrap();
    let pending = rustix::net::sockopt::socket_error(&from).unwrap();
    assert_eq!(pending, Err(Errno::NETUNREACH), "there is no route");
    lab.set_loss("0".parse().unwrap()).unwrap();
    set_link("up");
    let mut received = [0; 4];
    to.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"late");
    // A reset is a failure.
    set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
    drop(to);
    wait_for_error_event();
    sender.on_error_event().unwrap_err();
}
