//! How often tasks are woken, and what happens to tasks when their runtime ends.

use haul::{ReceiveSettings, SendSettings};
use haul_testing::tcp_pair;
use haul_tokio::Stream;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;
use tokio::io::AsyncReadExt;

const LOANS_IN_FLIGHT: usize = 4;
const LOAN_BYTES: usize = 32 << 10;
const ROUNDS: usize = 5;
const LIMIT: Duration = Duration::from_secs(120);

/// The waits of futures, and how often they were woken.
#[derive(Default)]
struct Wakes {
    waits: AtomicU64,
    wake_ups: AtomicU64,
}

impl Wakes {
    /// Waits for a future. Each poll that returned `Pending` is followed by one wake-up.
    async fn count<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        let mut pending = 0;
        let output = poll_fn(|context| {
            let polled = future.as_mut().poll(context);
            pending += u64::from(polled.is_pending());
            polled
        })
        .await;
        self.waits.fetch_add(u64::from(pending > 0), Relaxed);
        self.wake_ups.fetch_add(pending, Relaxed);
        output
    }
}

/// Each completion wakes the task of its loan, and not the tasks of the other loans.
///
/// `HAUL_TEST_CONNECTIONS` sets the number of connections, of which each takes three descriptors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_wakes_one_task() {
    let connections =
        std::env::var("HAUL_TEST_CONNECTIONS").map_or(100, |number| number.parse().unwrap());
    let wakes = Arc::new(Wakes::default());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let (from, to) = tcp_pair();
        to.set_nonblocking(true).unwrap();
        let mut to = tokio::net::TcpStream::from_std(to).unwrap();
        tasks.spawn(async move {
            let mut buffer = vec![0; 64 << 10];
            while to.read(&mut buffer).await.unwrap() > 0 {}
        });
        tasks.spawn(lend_in_rounds(from, Arc::clone(&wakes)));
    }
    let all = async { while tasks.join_next().await.transpose().unwrap().is_some() {} };
    tokio::time::timeout(LIMIT, all).await.expect("the test does not end");
    let (waits, wake_ups) = (wakes.waits.load(Relaxed), wakes.wake_ups.load(Relaxed));
    println!("{connections} connections: {waits} waits, {wake_ups} wake-ups");
    assert!(waits > 0, "no loan was waited for");
    assert!(wake_ups as f64 <= 1.2 * waits as f64, "{wake_ups} wake-ups for {waits} waits");
}

/// Lends some buffers at a time, and waits for each buffer in a separate task.
async fn lend_in_rounds(from: std::net::TcpStream, wakes: Arc<Wakes>) {
    let settings = SendSettings::default().with_lend_when_copied(true);
    let stream = Stream::with_settings(from, settings, ReceiveSettings::default()).unwrap();
    let (mut sender, _receiver) = stream.split();
    for _ in 0..ROUNDS {
        let mut tasks = Vec::new();
        for _ in 0..LOANS_IN_FLIGHT {
            let loan = wakes.count(sender.lend(vec![7; LOAN_BYTES])).await.unwrap();
            let wakes = Arc::clone(&wakes);
            tasks.push(tokio::spawn(async move {
                assert_eq!(wakes.count(loan).await.unwrap().sent_bytes, LOAN_BYTES);
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
    sender.shutdown().await.unwrap();
}

/// A stream can outlive its runtime. A wait after that would never end.
#[test]
fn the_end_of_the_runtime_is_an_error() {
    let (from, _to) = tcp_pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&from, 4 << 20).unwrap();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let (mut sender, mut receiver) =
        first.block_on(async { Stream::from_std(from).unwrap() }).split();
    first.block_on(poll_once(sender.lend(vec![7; 8 << 20])));
    drop(first);
    let second = runtime();
    second.block_on(async {
        let received = tokio::time::timeout(LIMIT, receiver.receive_into(&mut [0])).await;
        received.expect("the wait does not end").unwrap_err();
        let settled = tokio::time::timeout(LIMIT, sender.settle()).await;
        settled.expect("the wait does not end").unwrap_err();
    });
}

/// Polls a future once, and drops it.
async fn poll_once(future: impl Future) {
    let mut future = pin!(future);
    poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// The main task of a multi-threaded runtime has a budget like every task, and no scheduler.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn streams_are_made_by_a_task_without_a_budget() {
    let (one, _other) = tcp_pair();
    let mut streams = Vec::new();
    for _ in 0..300 {
        // Uses up the budget of this poll.
        tokio::task::coop::unconstrained(async {}).await;
        while tokio::task::coop::has_budget_remaining() {
            let _ = tokio::task::coop::poll_proceed(&mut std::task::Context::from_waker(
                std::task::Waker::noop(),
            ))
            .map(|coop| coop.made_progress());
        }
        streams.push(Stream::from_std(one.try_clone().unwrap()).unwrap());
    }
}

/// A buffer of a loan without a future may be dropped by the thread that waits for all sockets.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_buffer_that_panics_when_dropped_does_not_end_the_runtime() {
    struct Panics(Vec<u8>);
    impl AsRef<[u8]> for Panics {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("the buffer is dropped");
        }
    }
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let (from, to) = tcp_pair();
        tasks.spawn(async move {
            let settings = SendSettings::default().with_lend_when_copied(true);
            let stream = Stream::with_settings(from, settings, ReceiveSettings::default()).unwrap();
            let (mut sender, _receiver) = stream.split();
            let buffer = haul::Buffer::owned(Panics(vec![7; LOAN_BYTES]));
            drop(sender.lend(buffer).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
            drop(to);
        });
    }
    // A task whose own call drops the buffer panics.
    while tasks.join_next().await.is_some() {}
    let (from, to) = tcp_pair();
    let (mut sender, receiver) = Stream::from_std(from).unwrap().split();
    let received = haul_testing::receive_all(to);
    let content = vec![7; 8 << 20];
    let sent = sender.send_all(&content);
    tokio::time::timeout(LIMIT, sent).await.expect("the runtime ended").unwrap();
    drop((sender, receiver));
    let received = tokio::task::spawn_blocking(|| received.join().unwrap().len());
    assert_eq!(received.await.unwrap(), 8 << 20);
}
