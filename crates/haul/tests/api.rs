//! What a program relies on in the public types: errors, progress, threads and descriptors.

use haul::{
    Buffer, BufferPool, Error, ErrorCode, Forwarder, PooledBuffer, Receiver, SendMethod,
    SendSettings, Sender, Wants, file_len,
};
use haul_lab_sys::mapped_file::MappedFile;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{self, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (from, listener.accept().unwrap().0)
}

#[test]
fn values_can_be_moved_to_and_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Sender<TcpStream>>();
    check::<Receiver<TcpStream>>();
    check::<Forwarder<TcpStream, TcpStream>>();
    check::<BufferPool>();
    check::<Error>();
    check::<haul::LendError>();
    check::<haul::Returned>();
}

#[test]
fn a_socket_may_be_borrowed_where_nothing_is_lent() {
    let (from, mut to) = connection();
    let mut sender = Sender::new(&from).unwrap();
    assert_eq!(sender.as_raw_fd(), from.as_raw_fd());
    sender.send_all(b"borrowed").unwrap();
    drop(sender);
    let mut received = [0; 8];
    to.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"borrowed");
    let receiver = Receiver::new(&to).unwrap();
    assert_eq!(receiver.as_raw_fd(), to.as_fd().as_raw_fd());
}

#[test]
fn an_error_reports_how_many_bytes_were_sent() {
    let (from, mut to) = connection();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let bytes = vec![b'x'; 64 << 20];
    let stopped = sender.send_all(&bytes).unwrap_err();
    assert!(matches!(stopped.error, Error::WouldBlock), "{stopped}");
    assert!((1..bytes.len() as u64).contains(&stopped.sent_bytes), "{stopped}");
    assert_eq!(sender.report().sent.bytes, stopped.sent_bytes);

    let path = tempfile::NamedTempFile::new().unwrap();
    path.as_file().set_len(64 << 20).unwrap();
    let (mut drained, mut more) = (vec![0; stopped.sent_bytes as usize], Vec::new());
    to.read_exact(&mut drained).unwrap();
    let len = file_len(path.as_file()).unwrap();
    let stopped = sender.send_file_all(path.as_file(), 0..len).unwrap_err();
    assert!(matches!(stopped.error, Error::WouldBlock), "{stopped}");
    let sent: u64 = sender.report().files.iter().map(|(_, counts)| counts.bytes).sum();
    assert_eq!(sent, stopped.sent_bytes);
    drop(sender);
    to.read_to_end(&mut more).unwrap();
    assert_eq!(more.len() as u64, stopped.sent_bytes);
}

#[test]
fn an_error_keeps_the_kernels_number() {
    let (from, to) = connection();
    let mut sender = Sender::new(&from).unwrap();
    from.set_nonblocking(true).unwrap();
    sender.send_all(&vec![0; 64 << 20]).unwrap_err();
    let full = io::Error::from(sender.send_all(b"more").unwrap_err());
    assert_eq!((full.raw_os_error(), full.kind()), (Some(11), io::ErrorKind::WouldBlock));
    drop(to);
    // The peer is gone with unread data: the next send reports the reset.
    let reset = loop {
        match sender.send(b"more") {
            Err(Error::WouldBlock) => thread::yield_now(),
            Err(error) => break error,
            Ok(_) => {}
        }
    };
    let number = reset.raw_os_error();
    assert_eq!(reset.code().name(), "failed");
    assert!(number.is_some());
    assert_eq!(io::Error::from(reset).raw_os_error(), number);
}

#[test]
fn invalid_input_is_not_taken_for_a_missing_feature() {
    let (from, _to) = connection();
    let mut sender = Sender::new(&from).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(10).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "the range under test")]
    let error = sender.send_file(&file, 5..2).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidInput);
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::InvalidInput);
    assert!(sender.report().fallbacks.is_empty());
}

/// A loop that waits for what `wants` returns, with the method that sends mapped pages.
#[test]
fn the_completions_of_a_method_end_too() {
    let (from, mut to) = connection();
    let settings = SendSettings::default().with_choice(SendMethod::Zerocopy);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(100_000).unwrap();
    let receiving = thread::spawn(move || {
        to.read_exact(&mut vec![0; 100_000]).unwrap();
        to
    });
    sender.send_file_all(&file, 0..100_000).unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while sender.wants().completion {
        assert!(Instant::now() < deadline, "{sender:?}");
        sender.on_error_event().unwrap();
    }
    drop(receiving.join().unwrap());
}

/// The peer would take the truncated stream for a whole one.
#[test]
fn a_sender_dropped_with_part_of_a_loan_unsent_resets_the_connection() {
    let (from, mut to) = connection();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    sender.lend(vec![7; 12 << 20]).unwrap();
    assert!(sender.unsent_bytes() > 0 && sender.wants().write);
    drop(sender);
    let error = to.read_to_end(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

/// `on_error_event` and `flush` return the error of a loan that `lend` had accepted before.
#[test]
fn the_error_of_an_accepted_loan_is_returned_by_the_next_event() {
    let (from, to) = connection();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    sender.lend(vec![7; 12 << 20]).unwrap();
    assert!(sender.unsent_bytes() > 0);
    // Closing with unread data resets the connection.
    drop(to);
    let deadline = Instant::now() + Duration::from_secs(120);
    let error = loop {
        assert!(Instant::now() < deadline);
        if let Err(error) = sender.flush().and_then(|()| sender.on_error_event())
            && !matches!(error, Error::WouldBlock)
        {
            break error;
        }
    };
    assert!(matches!(error.raw_os_error(), Some(32 | 104)), "{error}");
    assert!(matches!(sender.on_error_event(), Err(Error::StreamTorn)));
    // The socket of a stream with a gap would end it as if it were whole.
    assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
    assert_eq!(sender.reclaim().unwrap().count(), 1);
    assert!(sender.into_inner().is_err());
}

/// `Buffer::owned` and its sub-ranges over a real socket, and a buffer that is filled again.
#[test]
fn lent_sub_ranges_and_refilled_buffers_arrive() {
    let (from, mut to) = connection();
    let mut sender = Sender::new(from).unwrap();
    let all: Vec<u8> = (0..40_000u32).map(|number| (number % 251) as u8).collect();
    let shared = Arc::new(all.clone());
    sender.lend(Buffer::shared(Arc::clone(&shared)).slice(100..20_000).unwrap()).unwrap();
    sender.lend(Buffer::owned(all.clone().into_boxed_slice()).slice(20_000..).unwrap()).unwrap();
    let mut received = vec![0; 39_900];
    to.read_exact(&mut received).unwrap();
    assert!(received == all[100..]);
    assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
    for returned in sender.reclaim().unwrap() {
        match returned.buffer.into_owner::<Arc<Vec<u8>>>() {
            Ok(owner) => assert!(Arc::ptr_eq(&owner, &shared)),
            Err(other) => assert!(*other.into_owner::<Box<[u8]>>().unwrap() == all),
        }
    }
    let pool = BufferPool::new(20_000, 1).unwrap();
    for len in [100, 20_000] {
        let mut buffer = pool.take_timeout(Duration::from_secs(20)).unwrap();
        buffer.extend_from_slice(&all[..len]).unwrap();
        sender.lend(buffer).unwrap();
        received.resize(len, 0);
        to.read_exact(&mut received).unwrap();
        assert!(received == all[..len]);
        assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        let returned = sender.reclaim().unwrap().next().unwrap();
        let mut buffer = returned.buffer.into_owner::<PooledBuffer>().unwrap();
        buffer.clear();
    }
}

/// A mapped file is lent to two connections at once, without a separate copy for either.
#[test]
fn a_mapped_file_is_lent_whole_and_in_part() {
    let content: Vec<u8> = (0..300_000u32).map(|i| (i / 7) as u8).collect();
    let file = Arc::new(MappedFile::new(&content).unwrap());
    let connections = [connection(), connection()];
    for (number, (from, mut to)) in connections.into_iter().enumerate() {
        let mut sender = Sender::new(from).unwrap();
        let receiver = thread::spawn(move || {
            let mut received = Vec::new();
            to.read_to_end(&mut received).unwrap();
            received
        });
        sender.lend(Buffer::shared(Arc::clone(&file))).unwrap();
        let part = Buffer::shared(Arc::clone(&file)).slice(100_000..250_000 + number).unwrap();
        sender.lend(part).unwrap();
        assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        for returned in sender.reclaim().unwrap() {
            let owner: Arc<MappedFile> = returned.buffer.into_owner().unwrap();
            assert!(Arc::ptr_eq(&owner, &file));
        }
        drop(sender);
        let expected = [&content[..], &content[100_000..250_000 + number]].concat();
        assert!(receiver.join().unwrap() == expected);
    }
    let file = Arc::try_unwrap(file).unwrap();
    assert_eq!(Buffer::owned(file).len(), content.len());
}

/// The buffers of one loan arrive in order, however the socket divides them, and return together.
#[test]
fn a_loan_of_several_buffers_arrives_in_order() {
    let (from, to) = connection();
    from.set_nonblocking(true).unwrap();
    let mut sender = Sender::new(from).unwrap();
    let receiving = thread::spawn(move || {
        let mut received = Vec::new();
        (&to).read_to_end(&mut received).unwrap();
        received
    });
    let mut expected = Vec::new();
    for number in 0..40u32 {
        let count = [1, 3, 40, 2000][number as usize % 4];
        let parts: Vec<Vec<u8>> = (0..count)
            .map(|part| vec![(number + part) as u8; [0, 7, 5000, 70_000][part as usize % 4] / 8])
            .collect();
        let mut buffers: Vec<Buffer> = parts.iter().cloned().map(Buffer::from).collect();
        let is_empty = parts.concat().is_empty();
        let id = loop {
            match sender.lend_vectored(buffers) {
                Ok(id) => break id,
                Err(refused) if is_empty => {
                    assert!(matches!(refused.error, Error::LoanEmpty), "{refused}");
                    break sender.lend(b"instead").unwrap();
                }
                Err(refused) => {
                    let code = refused.error.code();
                    assert!(
                        matches!(code, ErrorCode::WouldBlock | ErrorCode::LoanLimit),
                        "{refused}"
                    );
                    buffers = std::iter::once(refused.buffer).chain(refused.more).collect();
                    sender.reclaim().unwrap().for_each(drop);
                    thread::sleep(Duration::from_micros(200));
                }
            }
        };
        expected.extend(if is_empty { b"instead".to_vec() } else { parts.concat() });
        while sender.flush().is_err() {
            thread::yield_now();
        }
        assert_eq!(sender.wait_for_completions(Duration::from_secs(120)).unwrap(), 0);
        let returned = sender.reclaim().unwrap().find(|returned| returned.id == id).unwrap();
        assert!(is_empty || returned.more.len() + 1 == count as usize);
    }
    assert_eq!(
        sender.lend_vectored(Vec::<Buffer>::new()).unwrap_err().error.code(),
        ErrorCode::LoanEmpty
    );
    drop(sender);
    assert!(receiving.join().unwrap() == expected);
}

/// An event loop waits for what `wants` returns, and `on_error_event` ends each `POLLERR`.
#[test]
fn an_error_event_is_a_completion_or_the_end_of_the_connection() {
    let (from, to) = connection();
    from.set_nonblocking(true).unwrap();
    let settings = SendSettings::default().with_lend_when_copied(true);
    let mut sender = Sender::with_settings(from, settings).unwrap();
    assert_eq!(sender.wants(), Wants::default());
    let error_events = |sender: &Sender<TcpStream>| {
        let mut descriptors = [PollFd::new(sender, PollFlags::empty())];
        rustix::event::poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        descriptors[0].revents()
    };
    sender.lend(vec![7; 100_000]).unwrap();
    while sender.wants().write {
        let _ = sender.flush();
    }
    assert!(sender.wants().completion);
    let received = thread::spawn(move || {
        let mut received = vec![0; 100_000];
        (&to).read_exact(&mut received).unwrap();
        to
    });
    let to = received.join().unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while sender.wants().completion {
        assert!(Instant::now() < deadline, "{sender:?}");
        if error_events(&sender).contains(PollFlags::ERR) {
            sender.on_error_event().unwrap();
            assert!(!error_events(&sender).contains(PollFlags::ERR), "the event is over");
        }
    }
    assert_eq!(sender.reclaim().unwrap().count(), 1);
    assert_eq!(sender.wants(), Wants::default());

    // Closing with unread data resets the connection.
    sender.send_all(b"unread").unwrap();
    drop(to);
    while !error_events(&sender).contains(PollFlags::ERR) {
        assert!(Instant::now() < deadline);
    }
    let error = sender.on_error_event().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(104), "{error}");
    assert!(!error_events(&sender).contains(PollFlags::ERR), "the kernel reports it only once");
}
