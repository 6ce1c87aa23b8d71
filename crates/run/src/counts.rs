//! The counters of all processes of a run, read from the tally.
//!
//! The processes of the command can write anything into the file, so every number is checked
//! before it is used as a position, and sums saturate.

use haul_tally::{
    CONGESTION_CONTROLS, DescriptorKind, LOG_ENTRIES, NotElided, SLOT_WORDS, SLOTS, SendMethod,
    SizeClass, header, log_entry, log_entry_at, slot, slot_at,
};
use std::collections::HashMap;

/// Calls, and the bytes that they moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of calls.
    pub calls: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Moved {
    /// Adds calls and bytes.
    pub fn add(&mut self, other: Self) {
        self.calls = self.calls.saturating_add(other.calls);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Counters of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessCounts {
    /// ID of the process.
    pub process: u32,
    /// Name of the process, as in `/proc/PID/comm` when the process began.
    pub name: String,
    /// Whether a seccomp filter kept the interposer from asking the kernel.
    pub is_quiet: bool,
    /// Bytes that the process sent to TCP by calls that the interposer saw.
    pub sent_bytes: u64,
}

/// Counters of all processes.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// The processes, in the order of their beginning.
    pub processes: Vec<ProcessCounts>,
    /// Number of processes without counters, because there were too many.
    pub processes_without_slot: u64,
    /// Sum of all counters of a slot.
    sums: Vec<u64>,
    /// Bytes of the connections in the log.
    logged: Logged,
}

/// Bytes of the connections that are in the log.
#[derive(Debug, Clone, Copy, Default)]
struct Logged {
    /// By the kernel's count.
    kernel: u64,
    /// By the kernel's count, and not by the interposer's.
    unseen: u64,
    /// By the interposer's count, and not by the kernel's.
    excess: u64,
}

impl Counts {
    /// Reads the counters. `word` returns a word of the tally.
    pub fn read(word: impl Fn(usize) -> u64) -> Self {
        let words = &word as &dyn Fn(usize) -> u64;
        let slots_taken = words(header::SLOTS_TAKEN);
        let slots = usize::try_from(slots_taken).unwrap_or(usize::MAX).min(SLOTS);
        let mut counts = Self {
            processes_without_slot: slots_taken.saturating_sub(SLOTS as u64),
            sums: vec![0; SLOT_WORDS],
            logged: Logged::read(words),
            processes: Vec::new(),
        };
        for index in 0..slots {
            let at = |position: usize| words(slot_at(index) + position);
            for (position, sum) in counts.sums.iter_mut().enumerate() {
                *sum = sum.saturating_add(at(position));
            }
            let name: Vec<u8> = [at(slot::NAME), at(slot::NAME + 1)]
                .into_iter()
                .flat_map(u64::to_le_bytes)
                .take_while(|&byte| byte != 0)
                .collect();
            let sent = SendMethod::ALL.iter().flat_map(|&method| {
                SizeClass::all().map(move |class| at(slot::sent(method, class) + 1))
            });
            counts.processes.push(ProcessCounts {
                process: at(slot::PROCESS) as u32,
                name: String::from_utf8_lossy(&name).chars().filter(|c| !c.is_control()).collect(),
                is_quiet: at(slot::IS_QUIET) != 0,
                sent_bytes: sent.fold(0, u64::saturating_add),
            });
        }
        counts
    }

    fn sum(&self, position: usize) -> u64 {
        self.sums.get(position).copied().unwrap_or(0)
    }

    fn moved(&self, position: usize) -> Moved {
        Moved { calls: self.sum(position), bytes: self.sum(position + 1) }
    }

    /// Calls that sent to TCP by a method, in a class of size.
    pub fn sent_in(&self, method: SendMethod, class: SizeClass) -> Moved {
        self.moved(slot::sent(method, class))
    }

    /// Calls that sent to TCP by a method.
    pub fn sent(&self, method: SendMethod) -> Moved {
        total(SizeClass::all().map(|class| self.sent_in(method, class)))
    }

    /// Calls that sent to TCP.
    pub fn sent_by_all(&self) -> Moved {
        total(SendMethod::ALL.into_iter().map(|method| self.sent(method)))
    }

    /// Calls whose bytes of mapped files were copied for a reason.
    pub fn not_elided(&self, reason: NotElided) -> Moved {
        self.moved(slot::not_elided(reason))
    }

    /// Leases that were granted.
    pub fn leases(&self) -> u64 {
        self.sum(slot::LEASES)
    }

    /// Calls that read from descriptors of a kind.
    pub fn received(&self, from: DescriptorKind) -> Moved {
        total(SizeClass::all().map(|class| self.moved(slot::received(from, class))))
    }

    /// Calls that wrote to descriptors of a kind, which is not TCP.
    pub fn written(&self, to: DescriptorKind) -> Moved {
        total(SizeClass::all().map(|class| self.moved(slot::written(to, class))))
    }

    /// Bytes that went to TCP by calls that the interposer did not see, by the kernel's count.
    pub fn unseen_bytes(&self) -> u64 {
        // The entries of a process that was killed are missing, and the process's bytes with them.
        self.logged.unseen.saturating_sub(self.uncompared_bytes())
    }

    /// Bytes that the interposer counted on compared connections, and the kernel did not. Not 0 if
    /// a descriptor was mistaken for a TCP socket.
    pub fn excess_bytes(&self) -> u64 {
        self.logged.excess
    }

    /// Bytes that the interposer counted on connections that were not compared with the kernel's
    /// count, because the process was killed or the log was full.
    pub fn uncompared_bytes(&self) -> u64 {
        let uncompared = self.sent_by_all().bytes.saturating_sub(self.sum(slot::COMPARED_BYTES));
        uncompared.saturating_add(self.sum(slot::UNLOGGED_BYTES))
    }

    /// Bytes on compared connections, by the kernel's count.
    pub fn kernel_bytes(&self) -> u64 {
        self.sum(slot::KERNEL_BYTES).saturating_add(self.logged.kernel)
    }

    /// Number of connections that were compared. A connection of several processes counts for each.
    pub fn connections(&self) -> u64 {
        self.sum(slot::CONNECTIONS)
    }

    /// Pieces that were compared with their file, and the number of equal ones.
    pub fn samples(&self) -> (u64, u64) {
        (self.sum(slot::SAMPLES), self.sum(slot::SAMPLES_EQUAL))
    }

    /// Completions of `MSG_ZEROCOPY`, and the number of sends that the kernel copied.
    pub fn zerocopy_completions(&self) -> (u64, u64) {
        (self.sum(slot::ZEROCOPY_COMPLETIONS), self.sum(slot::ZEROCOPY_COPIED))
    }

    /// Bytes that were sent on connections of each congestion control that was used.
    pub fn congestion_controls(&self) -> impl Iterator<Item = (&'static str, u64)> {
        CONGESTION_CONTROLS
            .into_iter()
            .enumerate()
            .map(|(index, name)| (name, self.sum(slot::CONGESTION + index)))
            .filter(|&(_, bytes)| bytes > 0)
    }
}

fn total(moved: impl Iterator<Item = Moved>) -> Moved {
    moved.fold(Moved::default(), |mut sum, moved| {
        sum.add(moved);
        sum
    })
}

impl Logged {
    /// Adds up the log by socket: the entries of a socket come from several processes.
    fn read(words: &dyn Fn(usize) -> u64) -> Self {
        let taken = usize::try_from(words(header::LOG_TAKEN)).unwrap_or(usize::MAX);
        // The bytes at the beginning, at the end, and seen.
        let mut sockets: HashMap<u64, (u64, u64, u64)> = HashMap::new();
        for index in 0..taken.min(LOG_ENTRIES) {
            let at = |position: usize| words(log_entry_at(index) + position);
            let cookie = at(log_entry::COOKIE);
            if cookie == 0 {
                continue;
            }
            let socket = sockets.entry(cookie).or_insert((u64::MAX, 0, 0));
            socket.0 = socket.0.min(at(log_entry::BEGIN_BYTES));
            socket.1 = socket.1.max(at(log_entry::END_BYTES));
            socket.2 = socket.2.saturating_add(at(log_entry::SEEN_BYTES));
        }
        let mut logged = Self::default();
        for (begin, end, seen) in sockets.into_values() {
            let kernel = end.saturating_sub(begin);
            logged.kernel = logged.kernel.saturating_add(kernel);
            logged.unseen = logged.unseen.saturating_add(kernel.saturating_sub(seen));
            logged.excess = logged.excess.saturating_add(seen.saturating_sub(kernel));
        }
        logged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(words: &[(usize, u64)]) -> Counts {
        let words: HashMap<usize, u64> = words.iter().copied().collect();
        Counts::read(|index| words.get(&index).copied().unwrap_or(0))
    }

    #[test]
    fn counters_of_all_processes_are_added_up() {
        let class = SizeClass::of(70_000);
        let sent = slot::sent(SendMethod::MappedFile, class);
        let counts = parse(&[
            (header::SLOTS_TAKEN, 2),
            (slot_at(0) + slot::NAME, u64::from_le_bytes(*b"apache2\0")),
            (slot_at(0) + sent, 2),
            (slot_at(0) + sent + 1, 140_000),
            (slot_at(1) + sent, 1),
            (slot_at(1) + sent + 1, 70_000),
            (slot_at(0) + slot::COMPARED_BYTES, 140_000),
        ]);
        assert_eq!(
            counts.sent_in(SendMethod::MappedFile, class),
            Moved { calls: 3, bytes: 210_000 }
        );
        assert_eq!(counts.sent_by_all().bytes, 210_000);
        assert_eq!(counts.uncompared_bytes(), 70_000);
        assert_eq!(counts.processes[0].name, "apache2");
        assert_eq!(counts.processes[1].sent_bytes, 70_000);
    }

    #[test]
    fn the_entries_of_a_socket_are_compared_together() {
        let entry = |index: usize, cookie: u64, begin: u64, end: u64, seen: u64| {
            let at = log_entry_at(index);
            [
                (at + log_entry::COOKIE, cookie),
                (at + log_entry::BEGIN_BYTES, begin),
                (at + log_entry::END_BYTES, end),
                (at + log_entry::SEEN_BYTES, seen),
            ]
        };
        let entries = [
            // A parent that accepted, and a child of which 900 of 1000 bytes were seen.
            entry(0, 7, 0, 0, 0),
            entry(1, 7, 0, 1000, 900),
            // A child that inherited a socket on which 50 bytes had been sent.
            entry(2, 8, 50, 80, 30),
            // Not complete.
            entry(3, 0, 0, 500, 0),
        ];
        let mut words = vec![(header::LOG_TAKEN, 4)];
        words.extend(entries.into_iter().flatten());
        let counts = parse(&words);
        assert_eq!(counts.unseen_bytes(), 100);
        assert_eq!(counts.excess_bytes(), 0);
        assert_eq!(counts.kernel_bytes(), 1030);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn any_bytes_are_read_without_a_panic(
            words in proptest::collection::vec((0..haul_tally::TALLY_WORDS, any::<u64>()), 0..64),
            taken in any::<u64>(),
        ) {
            let mut words = words;
            words.extend([(header::SLOTS_TAKEN, taken), (header::LOG_TAKEN, taken)]);
            let counts = parse(&words);
            let _ = (counts.unseen_bytes(), counts.uncompared_bytes(), counts.kernel_bytes());
        }
    }
}
