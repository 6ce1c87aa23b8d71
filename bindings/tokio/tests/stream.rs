//! Streams over loopback: files, loans, cancellation, errors.

use haul::{LoanLimits, ReceiveSettings, SendSettings};
use haul_testing::{pattern, receive_all, tcp_pair};
use haul_tokio::{FilePolicy, SendHalf, Stream};
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Ends a test that would never end.
const LIMIT: Duration = Duration::from_secs(120);

async fn within_limit<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.expect("the test does not end")
}

fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// Limits the buffers, so that a peer that does not read soon blocks the sender.
fn small_buffers(sockets: [&TcpStream; 2]) {
    for socket in sockets {
        rustix::net::sockopt::set_socket_send_buffer_size(socket, 64 << 10).unwrap();
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, 64 << 10).unwrap();
    }
}

#[tokio::test]
async fn a_response_with_a_file_arrives_while_other_tasks_run() {
    let content = pattern(1, 20_000_000);
    let file = file_with(&content);
    for policy in [FilePolicy::Prefetch, FilePolicy::Inline] {
        let (from, to) = tcp_pair();
        small_buffers([&from, &to]);
        let received = receive_all(to);
        let (mut sender, receiver) = Stream::from_std(from).unwrap().split();
        let ticking = tokio::spawn(async {
            let mut ticks = 0;
            loop {
                ticks += 1;
                if ticks > 1_000_000 {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
        let sent = sender.send_response(b"head", &file, 10..19_000_000, b"tail", policy);
        assert_eq!(within_limit(sent).await.unwrap(), 18_999_998);
        let report = sender.report();
        sender.shutdown().await.unwrap();
        ticking.abort();
        drop((sender, receiver));
        let expected = [b"head", &content[10..19_000_000], b"tail"].concat();
        assert!(received.join().unwrap() == expected);
        let methods: Vec<_> = report.files.iter().map(|(method, _)| method.name()).collect();
        assert!(methods.contains(&"sendfile"), "{methods:?}");
    }
}

#[tokio::test]
async fn both_directions_are_a_stream_of_tokio() {
    let (one, other) = tcp_pair();
    let (mut send, mut receive) = Stream::from_std(one).unwrap().split();
    other.set_nonblocking(true).unwrap();
    let mut other = tokio::net::TcpStream::from_std(other).unwrap();
    let content = pattern(2, 3_000_000);
    let echo = tokio::spawn(async move {
        let mut bytes = Vec::new();
        other.read_to_end(&mut bytes).await.unwrap();
        other.write_all(&bytes).await.unwrap();
    });
    within_limit(async {
        send.write_all(&content).await.unwrap();
        AsyncWriteExt::shutdown(&mut send).await.unwrap();
        let mut received = Vec::new();
        receive.read_to_end(&mut received).await.unwrap();
        assert!(received == content);
        echo.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn bytes_are_received_into_files_and_discarded() {
    let (mut from, to) = tcp_pair();
    let content = pattern(3, 2_000_000);
    let bytes = content.clone();
    let sending = std::thread::spawn(move || from.write_all(&bytes).unwrap());
    let (_sender, mut receiver) = Stream::from_std(to).unwrap().split();
    let file = tempfile::tempfile().unwrap();
    within_limit(async {
        let mut discarded = 0;
        while discarded < 1000 {
            discarded += receiver.discard(1000 - discarded).await.unwrap();
        }
        let mut position = 0;
        loop {
            match receiver.receive_into_file(&file, position..u64::MAX >> 1).await.unwrap() {
                0 => break,
                count => position += count,
            }
        }
        assert_eq!(position, 1_999_000);
        assert_eq!(receiver.receive_into(&mut [0]).await.unwrap(), 0);
    })
    .await;
    sending.join().unwrap();
    let mut stored = Vec::new();
    io::Seek::rewind(&mut &file).unwrap();
    (&file).read_to_end(&mut stored).unwrap();
    assert!(stored == content[1000..]);
}

#[tokio::test]
async fn lent_buffers_come_back_in_any_order_of_waiting() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let (mut sender, receiver) = Stream::from_std(from).unwrap().split();
    within_limit(async {
        let mut loans = Vec::new();
        for seed in 0..40 {
            loans.push(sender.lend(pattern(seed, 300_000)).await.unwrap());
        }
        sender.settle().await.unwrap();
        for (seed, loan) in loans.into_iter().enumerate().rev() {
            let returned = loan.await.unwrap();
            assert_eq!(returned.sent_bytes, 300_000);
            let buffer = returned.buffer.into_owner::<Vec<u8>>().unwrap();
            assert!(buffer == pattern(seed as u64, 300_000));
        }
    })
    .await;
    drop((sender, receiver));
    assert_eq!(received.join().unwrap().len(), 40 * 300_000);
}

/// Polls a future so many times, and then drops it; `None` if it was dropped.
async fn poll_times<T>(future: impl Future<Output = T>, times: u32) -> Option<T> {
    let mut future = pin!(future);
    let mut polled = 0;
    poll_fn(|context| {
        if polled == times {
            return Poll::Ready(None);
        }
        polled += 1;
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Some(output));
        }
        // Polls again in any case, so that every await point is reached at random.
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// A record of the stream: the bytes that must arrive if the record arrives at all.
struct Owner {
    bytes: Vec<u8>,
    /// Held as long as the buffer is.
    _alive: Arc<()>,
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Every future is dropped at random: nothing is lost, nothing arrives in part, and no buffer is
/// returned early or kept for ever.
#[tokio::test]
async fn futures_that_are_dropped_at_random_lose_nothing() {
    let rounds = std::env::var("HAUL_TEST_LOANS").map_or(2000, |rounds| rounds.parse().unwrap());
    let mut random = fastrand::Rng::with_seed(rounds);
    let (from, to) = tcp_pair();
    small_buffers([&from, &to]);
    let received = receive_all(to);
    let settings = SendSettings::default().with_limits(LoanLimits::default().with_loans_max(8));
    let stream = Stream::with_settings(from, settings, ReceiveSettings::default()).unwrap();
    let (mut sender, receiver) = stream.split();
    let content = pattern(7, 200_000);
    let file = file_with(&content);
    let alive = Arc::new(());
    let mut expected: Vec<u8> = Vec::new();
    let mut loans = Vec::new();
    within_limit(async {
        for number in 0..rounds {
            let len = [8, 800, 20_000, 60_000][random.usize(..4)];
            let bytes = number.to_le_bytes().repeat(len / 8);
            let polls = [1, 2, 3, 5, u32::MAX][random.usize(..5)];
            match random.u32(..4) {
                0 => {
                    let _ = poll_times(sender.send_all(&bytes), polls).await;
                    expected.extend(&bytes[..sender.position() as usize]);
                }
                1 => {
                    let range = 0..content.len() as u64;
                    let sent = sender.send_file(&file, range, FilePolicy::Prefetch);
                    let _ = poll_times(sent, polls).await;
                    expected.extend(&content[..sender.position() as usize]);
                }
                _ => {
                    let before = sent_bytes(&sender);
                    let owner = Owner { bytes: bytes.clone(), _alive: Arc::clone(&alive) };
                    let buffer = haul::Buffer::owned(owner);
                    let lent = poll_times(sender.lend(buffer), polls).await;
                    // A loan that began arrives whole, with or without its future.
                    within_limit(sender.flush()).await.unwrap();
                    let has_begun = sent_bytes(&sender) > before;
                    assert!(has_begun || lent.is_none());
                    expected.extend(bytes.iter().take(if has_begun { bytes.len() } else { 0 }));
                    if let Some(loan) = lent
                        && random.bool()
                    {
                        loans.push((loan.unwrap(), bytes));
                    }
                }
            }
            if random.u32(..8) == 0
                && let Some((loan, bytes)) = loans.pop()
                && let Some(returned) = poll_times(loan, polls).await
            {
                let owner = returned.unwrap().buffer.into_owner::<Owner>().ok().unwrap();
                assert!(owner.bytes == bytes, "another buffer came back");
            }
        }
        sender.settle().await.unwrap();
        for (loan, bytes) in loans {
            let owner = loan.await.unwrap().buffer.into_owner::<Owner>().ok().unwrap();
            assert!(owner.bytes == bytes, "another buffer came back");
        }
    })
    .await;
    assert_eq!(Arc::strong_count(&alive), 1, "a buffer is kept");
    drop((sender, receiver));
    assert!(received.join().unwrap() == expected);
}

fn sent_bytes(sender: &SendHalf) -> u64 {
    sender.report().loans.bytes
}

#[tokio::test]
async fn a_reset_connection_is_an_error_and_returns_the_loans() {
    let (from, to) = tcp_pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 4 << 20).unwrap();
    rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
    let (mut sender, _receiver) = Stream::from_std(from).unwrap().split();
    within_limit(async {
        let loan = sender.lend(vec![7; 1 << 20]).await.unwrap();
        drop(to);
        let returned = loan.await.unwrap();
        assert_eq!(returned.buffer.len(), 1 << 20);
        let error = loop {
            if let Err(error) = sender.send_all(&vec![0; 100_000]).await {
                break error;
            }
        };
        let kind = error.kind();
        assert!(
            matches!(kind, io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe),
            "{error}"
        );
    })
    .await;
}

#[tokio::test]
async fn bad_input_is_an_error() {
    let (from, _to) = tcp_pair();
    let (mut sender, _receiver) = Stream::from_std(from).unwrap().split();
    within_limit(async {
        let file = file_with(b"abc");
        let ended = sender.send_file(&file, 0..10, FilePolicy::Prefetch).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(sender.position(), 3);
        let empty = sender.lend(Vec::new()).await.unwrap_err();
        assert_eq!(empty.error.kind(), io::ErrorKind::InvalidInput);
        assert!(empty.buffer.is_some());
    })
    .await;
    assert!(Stream::from_std(File::open("/").unwrap()).is_err());
}

/// A loan and a wait for all loans in one task: each takes the completions of the other.
#[tokio::test]
async fn a_loan_and_the_wait_for_all_loans_end_together() {
    for _ in 0..50 {
        let (from, to) = tcp_pair();
        let (mut sender, receiver) = Stream::from_std(from).unwrap().split();
        within_limit(async {
            let loan = sender.lend(vec![7; 200_000]).await.unwrap();
            let receiving = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(2)).await;
                receive_all(to)
            });
            let (returned, settled) = tokio::join!(loan, sender.settle());
            assert_eq!(returned.unwrap().sent_bytes, 200_000);
            settled.unwrap();
            drop((sender, receiver));
            let received = receiving.await.unwrap();
            tokio::task::spawn_blocking(|| received.join().unwrap()).await.unwrap();
        })
        .await;
    }
}

/// Loans that other threads wait for, at the limit of loans.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn loans_of_many_tasks_come_back() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let settings = SendSettings::default().with_limits(LoanLimits::default().with_loans_max(3));
    let stream = Stream::with_settings(from, settings, ReceiveSettings::default()).unwrap();
    let (mut sender, receiver) = stream.split();
    within_limit(async {
        let mut tasks = Vec::new();
        for number in 0..3000_u64 {
            // Small loans are copied, and come back at once.
            let len = if number % 3 == 0 { 100 } else { 20_000 };
            let loan = sender.lend(vec![number.to_le_bytes()[0]; len]).await.unwrap();
            tasks.push(tokio::spawn(async move { loan.await.unwrap().sent_bytes }));
        }
        sender.settle().await.unwrap();
        let mut sent = 0;
        for task in tasks {
            sent += task.await.unwrap();
        }
        assert_eq!(sent, 1000 * 100 + 2000 * 20_000);
    })
    .await;
    drop((sender, receiver));
    assert_eq!(received.join().unwrap().len(), 1000 * 100 + 2000 * 20_000);
}

/// The sending half may take the error of the socket. The receiving half must not take the end of
/// the connection for the end of the stream.
#[tokio::test]
async fn a_reset_is_an_error_for_both_halves() {
    for _ in 0..20 {
        let (from, mut to) = tcp_pair();
        rustix::net::sockopt::set_socket_send_buffer_size(&from, 4 << 20).unwrap();
        let (mut sender, mut receiver) = Stream::from_std(from).unwrap().split();
        within_limit(async {
            to.write_all(b"begin").unwrap();
            let loan = sender.lend(vec![7; 1 << 20]).await.unwrap();
            rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
            drop(to);
            let returned = loan.await.unwrap();
            drop(returned);
            let mut received = Vec::new();
            let error = receiver.read_to_end(&mut received).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            let settled = sender.settle().await.unwrap_err();
            let kind = settled.kind();
            assert!(
                matches!(kind, io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe),
                "{settled}"
            );
        })
        .await;
    }
}

#[tokio::test]
async fn a_future_that_was_never_polled_sent_nothing() {
    let (from, _to) = tcp_pair();
    let (mut sender, _receiver) = Stream::from_std(from).unwrap().split();
    sender.send_all(b"abc").await.unwrap();
    assert_eq!(sender.position(), 3);
    drop(sender.send_all(b"defgh"));
    assert_eq!(sender.position(), 0);
    let file = file_with(b"abc");
    sender.send_all(b"abc").await.unwrap();
    drop(sender.send_file(&file, 0..3, FilePolicy::Inline));
    assert_eq!(sender.position(), 0);
    let reversed_range = Range { start: 3, end: 1 };
    let reversed = sender.send_file(&file, reversed_range, FilePolicy::Inline).await.unwrap_err();
    assert_eq!(reversed.kind(), io::ErrorKind::InvalidInput);
}

/// Every future can be spawned.
#[test]
fn futures_can_move_between_threads() {
    fn is_send<T: Send>(_: T) {}
    fn check(sender: &mut SendHalf, receiver: &mut haul_tokio::RecvHalf, file: &'static File) {
        is_send(sender.send_all(b"x"));
        is_send(sender.send_file(file, 0..1, FilePolicy::Prefetch));
        is_send(sender.lend(b"x"));
        is_send(sender.settle());
        is_send(sender.shutdown());
        is_send(receiver.receive_into(&mut []));
        is_send(receiver.receive_into_file(file, 0..1));
        is_send(receiver.discard(1));
    }
    let _ = check;
}

/// A send took the error of the socket from the kernel, which reports the error once.
#[tokio::test]
async fn a_reset_that_a_send_noticed_is_an_error_for_the_receiver() {
    let (from, to) = tcp_pair();
    rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
    let (mut sender, mut receiver) = Stream::from_std(from).unwrap().split();
    drop(to);
    within_limit(async {
        let sent = loop {
            if let Err(error) = sender.send_all(b"x").await {
                break error;
            }
        };
        assert_eq!(sent.kind(), io::ErrorKind::ConnectionReset);
        let received = receiver.receive_into(&mut [0]).await.unwrap_err();
        assert_eq!(received.kind(), io::ErrorKind::ConnectionReset);
    })
    .await;
}

#[tokio::test]
async fn an_aborted_stream_is_reset() {
    let (from, mut to) = tcp_pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 4 << 20).unwrap();
    let (mut sender, _receiver) = Stream::from_std(from).unwrap().split();
    within_limit(async {
        let loan = sender.lend(vec![7; 1 << 20]).await.unwrap();
        sender.abort().unwrap();
        assert_eq!(loan.await.unwrap().buffer.len(), 1 << 20);
        let error = tokio::task::spawn_blocking(move || {
            loop {
                if let Err(error) = to.read(&mut [0; 4096]) {
                    break error;
                }
            }
        });
        assert_eq!(error.await.unwrap().kind(), io::ErrorKind::ConnectionReset);
    })
    .await;
}

/// The bytes of a response whose future was dropped leave the socket without a delay.
#[tokio::test]
async fn a_dropped_response_with_a_tail_does_not_cork_the_socket() {
    let (from, to) = tcp_pair();
    small_buffers([&from, &to]);
    let (mut sender, _receiver) = Stream::from_std(from).unwrap().split();
    let file = file_with(&pattern(5, 3_000_000));
    let sent = sender.send_response(b"", &file, 0..3_000_000, b"tail", FilePolicy::Inline);
    assert!(within_limit(poll_times(sent, 1)).await.is_none());
    assert!(sender.position() > 0);
    assert!(!rustix::net::sockopt::tcp_cork(&sender).unwrap());
}

/// The loan took the error of the socket from the kernel.
#[tokio::test]
async fn a_reset_that_a_loan_noticed_is_an_error_for_the_receiver() {
    for len in [100, 1 << 20] {
        let (from, to) = tcp_pair();
        rustix::net::sockopt::set_socket_linger(&to, Some(Duration::ZERO)).unwrap();
        let (mut sender, mut receiver) = Stream::from_std(from).unwrap().split();
        drop(to);
        within_limit(async {
            // Until the reset arrived.
            while sender.lend(vec![7; len]).await.is_ok() {}
            let received = receiver.receive_into(&mut [0]).await.unwrap_err();
            assert_eq!(received.kind(), io::ErrorKind::ConnectionReset);
        })
        .await;
    }
}

/// Completions that are not of loans end the wait too.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn files_sent_by_zerocopy_settle() {
    let file = Arc::new(file_with(&pattern(3, 300_000)));
    let mut tasks = Vec::new();
    for _ in 0..50 {
        let (from, to) = tcp_pair();
        let received = receive_all(to);
        let file = Arc::clone(&file);
        tasks.push(tokio::spawn(async move {
            let settings = SendSettings::default()
                .with_choice(haul::MethodChoice::Method(haul::SendMethod::Zerocopy));
            let stream = Stream::with_settings(from, settings, ReceiveSettings::default());
            let (mut sender, receiver) = stream.unwrap().split();
            for _ in 0..40 {
                within_limit(sender.send_file(&file, 0..300_000, FilePolicy::Inline))
                    .await
                    .unwrap();
                within_limit(sender.settle()).await.unwrap();
            }
            sender.shutdown().await.unwrap();
            drop((sender, receiver));
            tokio::task::spawn_blocking(|| received.join().unwrap().len()).await.unwrap()
        }));
    }
    for task in tasks {
        assert_eq!(task.await.unwrap(), 40 * 300_000);
    }
}
