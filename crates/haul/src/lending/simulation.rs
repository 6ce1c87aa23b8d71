//! Tests of loans with a simulated kernel, which may do anything that a kernel may do, in any
//! order.

use super::{Lending, ZeroCopySocket};
use crate::buffer::Buffer;
use crate::claim::Claim;
use crate::error::Error;
use crate::loan::{LendError, LoanId, LoanLimits, LoanOutcome, Returned};
use haul_sys::error_queue::Completion;
use haul_sys::fork;
use proptest::prelude::*;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::sync::Arc;

/// A simulated socket: the test decides its peer, its limits and its errors.
#[derive(Default)]
struct Kernel {
    /// The results of the next sends.
    script: VecDeque<SendResult>,
    /// The bytes that the peer has received.
    received: Vec<u8>,
    /// The addresses and lengths of each send in flight, by its number counted without wrapping.
    pinned: BTreeMap<u64, Vec<(*const u8, usize)>>,
    /// The number of the next send. Sockets that were used before do not begin at 0.
    next_number: u64,
    completions: VecDeque<Completion>,
    refuses_zerocopy: bool,
    /// Whether bytes of other code are in the socket, whose completions may still come.
    has_foreign_bytes: bool,
    /// As on a datagram socket: a send that fails gets a number and a completion.
    numbers_failures: bool,
}

/// The simulated result of one send.
#[derive(Debug, Clone, Copy)]
enum SendResult {
    Accept(usize),
    Fail(Errno),
}

impl ZeroCopySocket for Kernel {
    fn send(&mut self, parts: &[IoSlice<'_>], _: Option<u16>, zerocopy: bool) -> io::Result<usize> {
        assert!(!parts.is_empty() && parts.iter().all(|part| !part.is_empty()));
        match self.script.pop_front().unwrap_or(SendResult::Accept(usize::MAX)) {
            // Limits on lent memory do not apply to a plain send.
            SendResult::Fail(errno) if zerocopy || errno != Errno::NOBUFS => {
                if zerocopy && self.numbers_failures && errno != Errno::AGAIN {
                    self.completions.push_back(Completion {
                        first: self.next_number as u32,
                        last: self.next_number as u32,
                        copied: true,
                    });
                    self.next_number += 1;
                }
                Err(errno.into())
            }
            accepted => {
                let limit =
                    if let SendResult::Accept(limit) = accepted { limit } else { usize::MAX };
                let (mut sent, mut pinned) = (0, Vec::new());
                for part in parts {
                    let taken = &part[..part.len().min(limit - sent)];
                    sent += taken.len();
                    self.received.extend(taken);
                    pinned.extend((!taken.is_empty()).then_some((taken.as_ptr(), taken.len())));
                }
                if zerocopy {
                    self.pinned.insert(self.next_number, pinned);
                    self.next_number += 1;
                }
                Ok(sent)
            }
        }
    }

    fn claim(&mut self) -> Option<Claim> {
        Some(Claim::of_simulation())
    }

    fn enable_zerocopy(&mut self) -> Result<bool, Error> {
        if self.refuses_zerocopy {
            Err(Error::Unsupported("not here"))
        } else {
            Ok(!self.has_foreign_bytes)
        }
    }

    fn next_completion(&mut self) -> io::Result<Option<Completion>> {
        Ok(self.completions.pop_front())
    }

    fn wait_for_completion(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    fn numbers_failed_sends(&self) -> bool {
        self.numbers_failures
    }
}

impl Kernel {
    /// Completes up to `count` consecutive sends in flight, from the `pick`th on.
    fn complete(&mut self, pick: usize, count: u64, copied: bool) {
        if self.pinned.is_empty() {
            return;
        }
        let first = *self.pinned.keys().nth(pick % self.pinned.len()).unwrap();
        let last = (first..first + count)
            .take_while(|send| self.pinned.contains_key(send))
            .last()
            .unwrap();
        self.pinned.retain(|send, _| !(first..=last).contains(send));
        self.completions.push_back(Completion { first: first as u32, last: last as u32, copied });
    }

    /// Checks that no send in flight reads from a returned buffer.
    fn assert_not_in_use(&self, returned: &Returned) {
        for buffer in std::iter::once(&returned.buffer).chain(&returned.more) {
            let buffer = buffer.as_ptr_range();
            for (send, parts) in &self.pinned {
                assert!(
                    !parts.iter().any(|(start, _)| buffer.contains(start)),
                    "loan {:?} was returned while send {send} reads it",
                    returned.id
                );
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// The first buffer of a loan, and the others.
    Lend(Vec<u8>, Vec<Vec<u8>>),
    Flush,
    Complete(usize, u64, bool),
    Reclaim,
}

fn any_send_results() -> impl Strategy<Value = SendResult> {
    prop_oneof![
        6 => (1usize..40).prop_map(SendResult::Accept),
        2 => Just(SendResult::Fail(Errno::AGAIN)),
        2 => Just(SendResult::Fail(Errno::NOBUFS)),
        1 => Just(SendResult::Fail(Errno::OPNOTSUPP)),
        1 => Just(SendResult::Fail(Errno::CONNRESET)),
    ]
}

fn arbitrary_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..60)
            .prop_map(|bytes| Step::Lend(bytes, Vec::new())),
        2 => prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 1..5)
            .prop_map(|mut buffers| Step::Lend(buffers.remove(0), buffers)),
        2 => Just(Step::Flush),
        3 => (0usize..8, 1u64..4, any::<bool>())
            .prop_map(|(pick, count, copied)| Step::Complete(pick, count, copied)),
        2 => Just(Step::Reclaim),
    ]
}

proptest! {
    /// No buffer is returned early, each is returned once, bytes keep their order, and the limits
    /// hold.
    #[test]
    fn loans_are_returned_once_and_never_early(
        script in prop::collection::vec(any_send_results(), 0..60),
        steps in prop::collection::vec(arbitrary_step(), 1..60),
        refuses_zerocopy in prop::bool::weighted(0.1),
        numbers_failures in any::<bool>(),
        first_number: u32,
    ) {
        let limits = LoanLimits { loans_max: 4, bytes_max: 50 };
        let mut kernel = Kernel {
            script: script.into(),
            refuses_zerocopy,
            numbers_failures,
            next_number: first_number.into(),
            ..Kernel::default()
        };
        let mut lending = Lending::new(limits, 8, fork::generation());
        let mut lent = BTreeMap::new();
        let mut returned = Vec::new();
        for step in steps {
            match step {
                Step::Lend(first, others) => {
                    let more = others.iter().cloned().map(Buffer::from).collect();
                    let bytes = [first.clone(), others.concat()].concat();
                    match lending.lend(&mut kernel, Buffer::from(first), more, None) {
                        Ok(id) => prop_assert!(lent.insert(id, bytes).is_none()),
                        Err(refused) => check_refused(&refused, &bytes),
                    }
                }
                Step::Flush => drop(lending.flush(&mut kernel)),
                Step::Complete(pick, count, copied) => kernel.complete(pick, count, copied),
                Step::Reclaim => {
                    for loan in reclaim(&mut lending, &mut kernel) {
                        kernel.assert_not_in_use(&loan);
                        returned.push(loan);
                    }
                }
            }
            prop_assert!(lending.lent_bytes <= 50 && lending.loans.len() <= 4);
            let in_flight = kernel.pinned.len() + queued_completions(&kernel);
            prop_assert!(numbers_failures || lending.tracker.in_flight() == in_flight);
        }
        // The peer reads everything, and the kernel releases everything.
        kernel.script.clear();
        let _ = lending.flush(&mut kernel);
        let _ = lending.flush(&mut kernel);
        while !kernel.pinned.is_empty() {
            kernel.complete(0, 3, false);
        }
        returned.extend(reclaim(&mut lending, &mut kernel));
        prop_assert_eq!(lending.outstanding(), 0);
        prop_assert_eq!(lending.lent_bytes, 0);
        returned.sort_by_key(|loan| loan.id);
        prop_assert!(returned.iter().map(|loan| &loan.id).eq(lent.keys()));
        let mut expected: Vec<u8> = Vec::new();
        for loan in &returned {
            let bytes = all_bytes(&loan.buffer, &loan.more);
            prop_assert_eq!(&bytes, &lent[&loan.id]);
            prop_assert!(loan.sent_bytes > 0);
            expected.extend(&bytes[..loan.sent_bytes]);
            let is_large = bytes.len() / (1 + loan.more.len()) >= 8;
            prop_assert!(is_large || loan.outcome == LoanOutcome::Copied);
        }
        prop_assert_eq!(expected, kernel.received);
        prop_assert!(!refuses_zerocopy || kernel.next_number == u64::from(first_number));
    }
}

/// A refused loan is returned unchanged, and refused for its size only if that is wrong.
fn check_refused(refused: &LendError, bytes: &[u8]) {
    assert_eq!(all_bytes(&refused.buffer, &refused.more), bytes);
    assert_eq!(matches!(refused.error, Error::LoanEmpty), bytes.is_empty());
    assert_eq!(matches!(refused.error, Error::LoanTooLarge { .. }), bytes.len() > 50);
}

fn all_bytes(first: &Buffer, more: &[Buffer]) -> Vec<u8> {
    std::iter::once(first).chain(more).flat_map(|buffer| buffer.to_vec()).collect()
}

/// Lends one buffer.
fn lend(
    lending: &mut Lending,
    kernel: &mut Kernel,
    buffer: impl Into<Buffer>,
) -> Result<LoanId, LendError> {
    lending.lend(kernel, buffer.into(), Vec::new(), None)
}

fn reclaim(lending: &mut Lending, kernel: &mut Kernel) -> Vec<Returned> {
    lending.process_completions(kernel).unwrap();
    std::iter::from_fn(|| lending.take_returned()).collect()
}

/// The number of sends whose completion is queued.
fn queued_completions(kernel: &Kernel) -> usize {
    let sends = |completion: &Completion| (completion.last - completion.first + 1) as usize;
    kernel.completions.iter().map(sends).sum()
}

/// Lends once and completes it, so that the numbers of the next sends are known.
fn lend_first(lending: &mut Lending, kernel: &mut Kernel) {
    lend(lending, kernel, vec![0; 100]).unwrap();
    kernel.complete(0, 1, false);
    assert_eq!(reclaim(lending, kernel).len(), 1);
}

/// The kernel's counter does not begin at 0 on a socket that was used before, even if `SO_ZEROCOPY`
/// was cleared in between.
#[test]
fn loans_of_a_socket_that_was_used_before_are_not_returned_early() {
    let mut kernel = Kernel { next_number: 3, ..Kernel::default() };
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend(&mut lending, &mut kernel, vec![0; 100]).unwrap();
    // Its number is unknown until it completes.
    lend(&mut lending, &mut kernel, vec![1; 100]).unwrap();
    assert_eq!((kernel.pinned.len(), reclaim(&mut lending, &mut kernel).len()), (1, 1));
    kernel.complete(0, 1, false);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
    for loan in 2..6 {
        lend(&mut lending, &mut kernel, vec![loan; 100]).unwrap();
    }
    assert_eq!(kernel.pinned.len(), 4);
    while !kernel.pinned.is_empty() {
        kernel.complete(1, 1, false);
        for loan in reclaim(&mut lending, &mut kernel) {
            kernel.assert_not_in_use(&loan);
        }
    }
    assert_eq!(lending.outstanding(), 0);
}

/// Completions of an earlier user's sends, queued before the first loan, are not taken for its own.
#[test]
fn completions_that_are_queued_before_the_first_loan_are_skipped() {
    let mut kernel = Kernel { next_number: 3, ..Kernel::default() };
    kernel.completions.push_back(Completion { first: 0, last: 1, copied: false });
    kernel.completions.push_back(Completion { first: 2, last: 2, copied: true });
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend(&mut lending, &mut kernel, vec![0; 100]).unwrap();
    assert!(reclaim(&mut lending, &mut kernel).is_empty());
    kernel.complete(0, 1, false);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
}

/// Completions of an earlier user's sends that are still to come are not taken for completions of a
/// loan.
#[test]
fn loans_are_copied_while_completions_of_an_earlier_user_may_come() {
    let mut kernel = Kernel { next_number: 3, has_foreign_bytes: true, ..Kernel::default() };
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend(&mut lending, &mut kernel, vec![0; 100]).unwrap();
    kernel.completions.push_back(Completion { first: 0, last: 2, copied: false });
    lend(&mut lending, &mut kernel, vec![1; 100]).unwrap();
    assert_eq!((kernel.pinned.len(), reclaim(&mut lending, &mut kernel).len()), (0, 2));
    kernel.has_foreign_bytes = false;
    lend(&mut lending, &mut kernel, vec![2; 100]).unwrap();
    assert_eq!((kernel.pinned.len(), reclaim(&mut lending, &mut kernel).len()), (1, 0));
    kernel.complete(0, 1, false);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
}

/// The kernel charges all bytes that a call offers, so calls are bounded and then halved.
#[test]
fn a_large_loan_is_offered_in_pieces_that_are_halved_without_memory() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend_first(&mut lending, &mut kernel);
    kernel.script = [SendResult::Fail(Errno::NOBUFS)].into();
    lend(&mut lending, &mut kernel, vec![1; 2 << 20]).unwrap();
    let lens: Vec<usize> = kernel.pinned.values().map(|parts| parts[0].1).collect();
    assert_eq!(lens, [256 << 10; 8]);
    assert_eq!((lending.enobufs_count(), lending.counts().copied_bytes), (1, 0));
}

#[test]
fn zerocopy_is_disabled_if_the_kernel_copies_everything() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    for _ in 0..3 {
        lend(&mut lending, &mut kernel, vec![1; 512 << 10]).unwrap();
        kernel.complete(0, 1, true);
        assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
    }
    assert!(lending.fallbacks()[0].reason.contains("copied"), "{:?}", lending.fallbacks());
    lend(&mut lending, &mut kernel, vec![2; 100]).unwrap();
    assert!(kernel.pinned.is_empty());
    assert_eq!(reclaim(&mut lending, &mut kernel)[0].outcome, LoanOutcome::Copied);
}

#[test]
fn an_error_after_a_partial_send_is_returned_by_the_next_call() {
    let mut kernel = Kernel {
        script: [SendResult::Accept(10), SendResult::Fail(Errno::PIPE)].into(),
        ..Kernel::default()
    };
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    let id = lend(&mut lending, &mut kernel, vec![1; 100]).unwrap();
    assert!(matches!(lending.flush(&mut kernel), Err(Error::Failed { .. })));
    // Later bytes would follow a gap in the stream.
    assert!(matches!(lending.flush(&mut kernel), Err(Error::StreamTorn)));
    let refused = lend(&mut lending, &mut kernel, vec![2; 100]).unwrap_err();
    assert!(matches!(refused.error, Error::StreamTorn) && kernel.received.len() == 10);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 0);
    kernel.complete(0, 1, false);
    let returned = reclaim(&mut lending, &mut kernel);
    assert_eq!((returned[0].id, returned[0].sent_bytes), (id, 10));
}

#[test]
fn a_forked_child_neither_lends_nor_reclaims_nor_frees() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    let shared: Arc<[u8]> = vec![1; 100].into();
    lend(&mut lending, &mut kernel, Arc::clone(&shared)).unwrap();
    // A child has the same memory and another generation.
    lending.process += 1;
    let error = lend(&mut lending, &mut kernel, vec![2; 100]).unwrap_err();
    assert!(matches!(error.error, Error::Forked) && *error.buffer == [2; 100], "{error}");
    assert!(matches!(lending.process_completions(&mut kernel), Err(Error::Forked)));
    assert!(matches!(lending.flush(&mut kernel), Ok(())));
    lending.hand_to_reaper(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    assert_eq!(Arc::strong_count(&shared), 2, "the child freed the parent's loan");
}

#[test]
fn bytes_that_the_library_copied_do_not_disable_zerocopy() {
    let mut kernel = Kernel::default();
    let mut lending =
        Lending::new(LoanLimits { loans_max: 8, bytes_max: 8 << 20 }, 4096, fork::generation());
    for _ in 0..400 {
        lend(&mut lending, &mut kernel, vec![1; 4000]).unwrap();
        reclaim(&mut lending, &mut kernel);
    }
    assert!(lending.counts().copied_bytes > 1 << 20 && lending.fallbacks().is_empty());
    // Without memory, pieces are halved three times and then copied.
    kernel.script = [SendResult::Fail(Errno::NOBUFS); 4].into();
    lend(&mut lending, &mut kernel, vec![1; 3 << 20]).unwrap();
    assert_eq!((lending.enobufs_count(), lending.fallbacks().len()), (4, 0));
}

/// A failed datagram may have a number. It completes no other loan, and the next loan from its
/// pages waits until none is in flight.
#[test]
fn a_failed_datagram_completes_no_other_loan_and_lending_goes_on() {
    let mut kernel = Kernel { numbers_failures: true, ..Kernel::default() };
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend_first(&mut lending, &mut kernel);
    lend(&mut lending, &mut kernel, vec![1; 100]).unwrap();
    kernel.script = [SendResult::Fail(Errno::MSGSIZE), SendResult::Fail(Errno::MSGSIZE)].into();
    let refused = lend(&mut lending, &mut kernel, vec![2; 100]).unwrap_err();
    assert_eq!(refused.buffer.len(), 100);
    lend(&mut lending, &mut kernel, vec![3; 100]).unwrap();
    let returned = reclaim(&mut lending, &mut kernel);
    assert_eq!(
        returned.iter().map(|loan| loan.buffer[0]).collect::<Vec<_>>(),
        [3],
        "only the copied loan is returned"
    );
    kernel.complete(0, 1, false);
    assert_eq!(reclaim(&mut lending, &mut kernel)[0].buffer[0], 1);
    lend_first(&mut lending, &mut kernel);
    assert!(lending.fallbacks().is_empty() && kernel.completions.is_empty());
}

/// Each error of a datagram that an ICMP message causes. The kernel reports the error once.
#[test]
fn the_icmp_error_of_an_earlier_datagram_is_reported_and_lending_goes_on() {
    for errno in [
        Errno::CONNREFUSED,
        Errno::HOSTUNREACH,
        Errno::NETUNREACH,
        Errno::NOPROTOOPT,
        Errno::OPNOTSUPP,
        Errno::ACCESS,
        Errno::PROTO,
    ] {
        let mut kernel = Kernel { numbers_failures: true, ..Kernel::default() };
        let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
        kernel.script = [SendResult::Fail(errno)].into();
        let failed = lend(&mut lending, &mut kernel, vec![2; 100]).unwrap_err();
        assert_eq!(failed.error.raw_os_error(), Some(errno.raw_os_error()));
        assert!(!failed.error.is_refusal(), "{}", failed.error);
        reclaim(&mut lending, &mut kernel);
        lend_first(&mut lending, &mut kernel);
        assert!(lending.fallbacks().is_empty(), "{errno}: {:?}", lending.fallbacks());
    }
}

/// A datagram that fails while nothing is in flight leaves no completion in the error queue, which
/// would wake every poll.
#[test]
fn the_completion_of_a_failed_datagram_is_read() {
    let mut kernel = Kernel { numbers_failures: true, ..Kernel::default() };
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    kernel.script = [SendResult::Fail(Errno::MSGSIZE), SendResult::Fail(Errno::MSGSIZE)].into();
    lend(&mut lending, &mut kernel, vec![2; 100]).unwrap_err();
    assert!(reclaim(&mut lending, &mut kernel).is_empty());
    assert!(kernel.completions.is_empty());
}

#[test]
fn one_zero_copied_loan_keeps_zerocopy_enabled() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    for copied in [false, true, true, true] {
        lend(&mut lending, &mut kernel, vec![1; 512 << 10]).unwrap();
        kernel.complete(0, 1, copied);
        assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
    }
    assert!(lending.fallbacks().is_empty(), "{:?}", lending.fallbacks());
}

/// If draining completions frees memory, the send is also retried from the pages.
#[test]
fn a_completion_frees_memory_for_the_next_loan() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(LoanLimits::default(), 8, fork::generation());
    lend(&mut lending, &mut kernel, vec![1; 100]).unwrap();
    kernel.complete(0, 1, false);
    kernel.script = [SendResult::Fail(Errno::NOBUFS)].into();
    lend(&mut lending, &mut kernel, vec![2; 100]).unwrap();
    assert_eq!((kernel.pinned.len(), lending.counts().copied_bytes), (1, 0));
}
