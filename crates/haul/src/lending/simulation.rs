//! Loans over a kernel that does whatever a kernel may do, in any order.

use super::{Lending, ZeroCopySocket};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::loan::{Limits, Outcome, Returned};
use haul_sys::error_queue::Completion;
use proptest::prelude::*;
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;

/// A socket whose peer, limits and luck the test decides.
#[derive(Default)]
struct Kernel {
    /// What it does with the next sends.
    script: VecDeque<Move>,
    /// What the peer has received.
    wire: Vec<u8>,
    /// Where the pages of each open send lie, by its number counted without wrapping.
    pinned: BTreeMap<u64, (*const u8, usize)>,
    sends: u64,
    notices: VecDeque<Completion>,
    refuses_zerocopy: bool,
    /// A datagram socket's: a send that fails gets a number and a notice.
    numbers_failures: bool,
}

/// What the kernel does with one send.
#[derive(Debug, Clone, Copy)]
enum Move {
    Take(usize),
    Fail(Errno),
}

impl ZeroCopySocket for Kernel {
    fn send(&mut self, bytes: &[u8], _: Option<u16>, zerocopy: bool) -> io::Result<usize> {
        assert!(!bytes.is_empty());
        match self.script.pop_front().unwrap_or(Move::Take(usize::MAX)) {
            // Limits on what is lent do not concern a plain send.
            Move::Fail(errno) if zerocopy || errno != Errno::NOBUFS => {
                if zerocopy && self.numbers_failures && errno != Errno::AGAIN {
                    self.notices.push_back(Completion {
                        first: self.sends as u32,
                        last: self.sends as u32,
                        copied: true,
                    });
                    self.sends += 1;
                }
                Err(errno.into())
            }
            taken => {
                let most = if let Move::Take(most) = taken { most } else { usize::MAX };
                let sent = bytes.len().min(most);
                self.wire.extend(&bytes[..sent]);
                if zerocopy {
                    self.pinned.insert(self.sends, (bytes.as_ptr(), sent));
                    self.sends += 1;
                }
                Ok(sent)
            }
        }
    }

    fn enable_zerocopy(&mut self) -> Result<(), Error> {
        if self.refuses_zerocopy { Err(Error::Unsuited("not here")) } else { Ok(()) }
    }

    fn next_completion(&mut self) -> io::Result<Option<Completion>> {
        Ok(self.notices.pop_front())
    }

    fn wait_for_completion(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    fn numbers_failed_sends(&self) -> bool {
        self.numbers_failures
    }
}

impl Kernel {
    /// Is done with some of what it holds: from the `pick`th open send on, `count` in a row.
    fn finish(&mut self, pick: usize, count: u64, copied: bool) {
        if self.pinned.is_empty() {
            return;
        }
        let first = *self.pinned.keys().nth(pick % self.pinned.len()).unwrap();
        let last = (first..first + count)
            .take_while(|send| self.pinned.contains_key(send))
            .last()
            .unwrap();
        self.pinned.retain(|send, _| !(first..=last).contains(send));
        self.notices.push_back(Completion { first: first as u32, last: last as u32, copied });
    }

    /// Nothing that came back may still be read here.
    fn check(&self, returned: &Returned) {
        let buffer = returned.buffer.as_ptr_range();
        for (send, (start, _)) in &self.pinned {
            assert!(
                !buffer.contains(start),
                "loan {:?} came back while send {send} reads it",
                returned.id
            );
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Lend(Vec<u8>),
    Flush,
    Finish(usize, u64, bool),
    Reclaim,
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        6 => (1usize..40).prop_map(Move::Take),
        2 => Just(Move::Fail(Errno::AGAIN)),
        2 => Just(Move::Fail(Errno::NOBUFS)),
        1 => Just(Move::Fail(Errno::OPNOTSUPP)),
        1 => Just(Move::Fail(Errno::CONNRESET)),
    ]
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Step::Lend),
        2 => Just(Step::Flush),
        3 => (0usize..8, 1u64..4, any::<bool>())
            .prop_map(|(pick, count, copied)| Step::Finish(pick, count, copied)),
        2 => Just(Step::Reclaim),
    ]
}

proptest! {
    /// No buffer comes back early, each comes back once, bytes keep their order, and the bounds hold.
    #[test]
    fn loans_come_back_once_and_never_early(
        script in prop::collection::vec(moves(), 0..60),
        steps in prop::collection::vec(steps(), 1..60),
        refuses_zerocopy in prop::bool::weighted(0.1),
        numbers_failures in any::<bool>(),
    ) {
        let limits = Limits { loans_max: 4, bytes_max: 50 };
        let mut kernel = Kernel { script: script.into(), refuses_zerocopy, numbers_failures, ..Kernel::default() };
        let mut lending = Lending::new(limits, 8, std::process::id());
        let mut lent = BTreeMap::new();
        let mut returned = Vec::new();
        for step in steps {
            match step {
                Step::Lend(bytes) => match lending.lend(&mut kernel, Buffer::from(bytes.clone()), None) {
                    Ok(id) => prop_assert!(lent.insert(id, bytes).is_none()),
                    Err(error) => {
                        prop_assert_eq!(&*error.buffer, bytes.as_slice());
                        prop_assert_eq!(bytes.is_empty(), matches!(error.error, Error::LoanEmpty));
                        prop_assert_eq!(bytes.len() > 50, matches!(error.error, Error::LoanTooLarge { .. }));
                    }
                },
                Step::Flush => drop(lending.flush(&mut kernel)),
                Step::Finish(pick, count, copied) => kernel.finish(pick, count, copied),
                Step::Reclaim => {
                    for back in reclaim(&mut lending, &mut kernel) {
                        kernel.check(&back);
                        returned.push(back);
                    }
                }
            }
            prop_assert!(lending.bytes_out <= 50 && lending.inside.len() <= 4);
            prop_assert!(numbers_failures || lending.book.open() == kernel.pinned.len() + unheard(&kernel));
        }
        // The peer reads everything, the kernel lets go of everything.
        kernel.script.clear();
        let _ = lending.flush(&mut kernel);
        let _ = lending.flush(&mut kernel);
        while !kernel.pinned.is_empty() {
            kernel.finish(0, 3, false);
        }
        returned.extend(reclaim(&mut lending, &mut kernel));
        prop_assert_eq!(lending.out(), 0);
        prop_assert_eq!(lending.bytes_out, 0);
        returned.sort_by_key(|back| back.id);
        prop_assert!(returned.iter().map(|back| &back.id).eq(lent.keys()));
        let mut expected: Vec<u8> = Vec::new();
        for back in &returned {
            prop_assert_eq!(&*back.buffer, lent[&back.id].as_slice());
            prop_assert!(back.sent_bytes > 0);
            expected.extend(&back.buffer[..back.sent_bytes]);
            prop_assert!(back.buffer.len() >= 8 || back.outcome == Outcome::Copied);
        }
        prop_assert_eq!(expected, kernel.wire);
        prop_assert!(!refuses_zerocopy || kernel.sends == 0);
    }
}

fn reclaim(lending: &mut Lending, kernel: &mut Kernel) -> Vec<Returned> {
    lending.hear(kernel).unwrap();
    std::iter::from_fn(|| lending.take_returned()).collect()
}

/// Sends whose notice is on its way.
fn unheard(kernel: &Kernel) -> usize {
    kernel.notices.iter().map(|notice| (notice.last - notice.first + 1) as usize).sum()
}

#[test]
fn lending_is_given_up_where_everything_is_copied_all_the_same() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    lending.lend(&mut kernel, Buffer::from(vec![1; 1 << 20]), None).unwrap();
    kernel.finish(0, 1, true);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
    assert!(lending.fallbacks()[0].reason.contains("copied"), "{:?}", lending.fallbacks());
    lending.lend(&mut kernel, Buffer::from(vec![2; 100]), None).unwrap();
    assert!(kernel.pinned.is_empty());
    assert_eq!(reclaim(&mut lending, &mut kernel)[0].outcome, Outcome::Copied);
}

#[test]
fn an_error_after_a_part_has_gone_is_told_by_the_next_call() {
    let mut kernel =
        Kernel { script: [Move::Take(10), Move::Fail(Errno::PIPE)].into(), ..Kernel::default() };
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    let id = lending.lend(&mut kernel, Buffer::from(vec![1; 100]), None).unwrap();
    assert!(matches!(lending.flush(&mut kernel), Err(Error::Failed { .. })));
    // What came next would follow a hole in the stream.
    assert!(matches!(lending.flush(&mut kernel), Err(Error::StreamTorn)));
    let refused = lending.lend(&mut kernel, Buffer::from(vec![2; 100]), None).unwrap_err();
    assert!(matches!(refused.error, Error::StreamTorn) && kernel.wire.len() == 10);
    assert_eq!(reclaim(&mut lending, &mut kernel).len(), 0);
    kernel.finish(0, 1, false);
    let back = reclaim(&mut lending, &mut kernel);
    assert_eq!((back[0].id, back[0].sent_bytes), (id, 10));
}

#[test]
fn a_forked_child_neither_lends_nor_reclaims_nor_frees() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    let shared: Arc<[u8]> = vec![1; 100].into();
    lending.lend(&mut kernel, Buffer::Shared(Arc::clone(&shared)), None).unwrap();
    // What a child sees: the same memory, and a number of its own.
    lending.process += 1;
    let error = lending.lend(&mut kernel, Buffer::from(vec![2; 100]), None).unwrap_err();
    assert!(matches!(error.error, Error::Forked) && *error.buffer == [2; 100], "{error}");
    assert!(matches!(lending.hear(&mut kernel), Err(Error::Forked)));
    assert!(matches!(lending.flush(&mut kernel), Ok(())));
    lending.leave(std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    assert_eq!(Arc::strong_count(&shared), 2, "the child freed what the parent has lent");
}

#[test]
fn what_was_copied_here_is_no_reason_to_give_lending_up() {
    let mut kernel = Kernel::default();
    let mut lending =
        Lending::new(Limits { loans_max: 8, bytes_max: 8 << 20 }, 4096, std::process::id());
    for _ in 0..400 {
        lending.lend(&mut kernel, Buffer::from(vec![1; 4000]), None).unwrap();
        reclaim(&mut lending, &mut kernel);
    }
    assert!(lending.counts().copied_bytes > 1 << 20 && lending.fallbacks().is_empty());
    kernel.script = [Move::Take(1 << 20), Move::Fail(Errno::NOBUFS)].into();
    lending.lend(&mut kernel, Buffer::from(vec![1; 3 << 20]), None).unwrap();
    assert_eq!((lending.no_room(), lending.fallbacks().len()), (1, 0));
}

/// A failed datagram may have a number: nothing is sent from its pages after that, and what is out comes back.
#[test]
fn a_failed_datagram_ends_lending_and_strikes_no_other_loan() {
    let mut kernel = Kernel { numbers_failures: true, ..Kernel::default() };
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    lending.lend(&mut kernel, Buffer::from(vec![1; 100]), None).unwrap();
    kernel.script = [Move::Fail(Errno::MSGSIZE), Move::Fail(Errno::MSGSIZE)].into();
    let refused = lending.lend(&mut kernel, Buffer::from(vec![2; 100]), None).unwrap_err();
    assert_eq!(refused.buffer.len(), 100);
    lending.lend(&mut kernel, Buffer::from(vec![3; 100]), None).unwrap();
    let back = reclaim(&mut lending, &mut kernel);
    assert_eq!(
        back.iter().map(|back| back.buffer[0]).collect::<Vec<_>>(),
        [3],
        "only the copied one is back"
    );
    kernel.finish(0, 1, false);
    assert_eq!(reclaim(&mut lending, &mut kernel)[0].buffer[0], 1);
    assert!(lending.owns_completions());
}

#[test]
fn one_loan_that_went_without_a_copy_keeps_lending_up() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    for copied in [false, true, true, true] {
        lending.lend(&mut kernel, Buffer::from(vec![1; 1 << 20]), None).unwrap();
        kernel.finish(0, 1, copied);
        assert_eq!(reclaim(&mut lending, &mut kernel).len(), 1);
    }
    assert!(lending.fallbacks().is_empty(), "{:?}", lending.fallbacks());
}

/// Where a reap makes room, the next try goes from the pages too.
#[test]
fn what_comes_back_makes_room_for_the_next() {
    let mut kernel = Kernel::default();
    let mut lending = Lending::new(Limits::default(), 8, std::process::id());
    lending.lend(&mut kernel, Buffer::from(vec![1; 100]), None).unwrap();
    kernel.finish(0, 1, false);
    kernel.script = [Move::Fail(Errno::NOBUFS)].into();
    lending.lend(&mut kernel, Buffer::from(vec![2; 100]), None).unwrap();
    assert_eq!((kernel.pinned.len(), lending.counts().copied_bytes), (1, 0));
}
