//! One sender of a process lends on a socket, because each completion can be read once.

use haul::{MethodChoice, Returned, SendMethod, SendSettings, Sender};
use haul_testing::{pattern, receive_all, tcp_pair, wait_until};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Waits until no send is in flight and returns all reclaimed buffers.
fn reclaim_all<S: AsFd + Send + 'static>(sender: &mut Sender<S>) -> Vec<Returned> {
    assert_eq!(sender.wait_for_completions(haul_testing::LIMIT).unwrap(), 0);
    sender.reclaim().unwrap().collect()
}

/// Each completion can be read once, so the loans of two senders on one socket would never end.
#[test]
fn a_second_sender_of_a_socket_copies_its_loans() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let from = Arc::new(from);
    let settings = || SendSettings::default().with_lend_when_copied(true);
    let mut senders =
        [(); 2].map(|()| Sender::with_settings(Arc::clone(&from), settings()).unwrap());
    for loan in 0..20 {
        for sender in &mut senders {
            sender.lend(pattern(loan, 50_000)).unwrap();
        }
    }
    for sender in &mut senders {
        assert_eq!(reclaim_all(sender).len(), 20);
    }
    let [first, second] = &senders;
    assert!(first.report().fallbacks.is_empty());
    let fallbacks = second.report().fallbacks;
    assert!(fallbacks[0].to_string().contains("another sender"), "{fallbacks:?}");
    drop(senders);
    // The socket is free again.
    let mut third = Sender::with_settings(Arc::clone(&from), settings()).unwrap();
    wait_until("the loans of the first sender ended", || {
        third.lend(pattern(0, 50_000)).unwrap();
        reclaim_all(&mut third);
        let loans = third.report().loans;
        loans.zero_copied_bytes + loans.copied_bytes > 0
    });
    drop((third, from));
    assert!(received.join().unwrap().len() >= 41 * 50_000);
}

/// The completions of a dropped sender are still to come, and a later sender must not take them for
/// the completions of its loans.
#[test]
fn a_sender_copies_after_a_sender_with_sends_in_flight() {
    let (from, mut to) = tcp_pair();
    let from = Arc::new(from);
    let mut later = Sender::new(Arc::clone(&from)).unwrap();
    later.send_all(&pattern(0, 100_000)).unwrap();
    to.read_exact(&mut vec![0; 100_000]).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&pattern(1, 300_000)).unwrap();
    let settings = SendSettings::default().with_choice(MethodChoice::Method(SendMethod::Zerocopy));
    let mut dropped = Sender::with_settings(Arc::clone(&from), settings).unwrap();
    let received = thread::spawn(move || {
        // Until both senders sent.
        thread::sleep(Duration::from_millis(50));
        let mut bytes = Vec::new();
        to.read_to_end(&mut bytes).unwrap();
        bytes
    });
    dropped.send_file_all(&file, 0..300_000).unwrap();
    let in_flight = dropped.wait_for_completions(Duration::ZERO).unwrap();
    drop(dropped);
    later.lend(pattern(2, 50_000)).unwrap();
    assert_eq!(reclaim_all(&mut later).len(), 1);
    if in_flight > 0 {
        let fallbacks = later.report().fallbacks;
        assert!(fallbacks[0].to_string().contains("another sender"), "{fallbacks:?}");
    }
    drop((later, from));
    let expected = [pattern(1, 300_000), pattern(2, 50_000)].concat();
    assert!(received.join().unwrap() == expected);
}

/// A child has the claims of its parent, and does not release them.
#[test]
fn a_forked_child_copies_on_a_socket_on_which_its_parent_lends() {
    let (from, to) = tcp_pair();
    let received = receive_all(to);
    let from = Arc::new(from);
    let settings = || SendSettings::default().with_lend_when_copied(true);
    let mut parents = Sender::with_settings(Arc::clone(&from), settings()).unwrap();
    parents.lend(pattern(0, 50_000)).unwrap();
    let status = haul_lab_sys::child::in_forked_child(|| {
        let mut childs = Sender::with_settings(Arc::clone(&from), settings()).unwrap();
        let is_lent = childs.lend(pattern(1, 50_000)).is_ok();
        let fallbacks = childs.report().fallbacks;
        let is_copied = fallbacks.iter().any(|one| one.to_string().contains("another sender"));
        i32::from(!is_lent || !is_copied)
    });
    assert_eq!(status.unwrap(), Some(0));
    assert_eq!(reclaim_all(&mut parents).len(), 1);
    drop((parents, from));
    assert_eq!(received.join().unwrap().len(), 100_000);
}
