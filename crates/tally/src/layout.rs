//! Positions of the values in the tally.

/// Name of the environment variable with the path of the socket at which `haul run` answers
/// requests ([`crate::message`]).
pub const SOCKET_VARIABLE: &str = "HAUL_RUN_SOCKET";
/// Name of the environment variable with the token of the run, 32 letters and digits.
pub const TOKEN_VARIABLE: &str = "HAUL_RUN_TOKEN";
/// Name of the environment variable with the number of seccomp filters of `haul run`, which each
/// program inherits.
pub const FILTERS_VARIABLE: &str = "HAUL_RUN_FILTERS";
/// Name of the environment variable that turns the interposer off if its value is `off`.
pub const SWITCH_VARIABLE: &str = "HAUL_RUN";

/// First word of the tally: the letters `haulrun`, and the version of the layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"haulrun\x01");

/// Words of the header, a page.
pub const HEADER_WORDS: usize = 512;
/// Words of a slot, a page.
pub const SLOT_WORDS: usize = 512;
/// Number of slots.
pub const SLOTS: usize = 512;
/// Words of a log entry.
pub const LOG_ENTRY_WORDS: usize = 4;
/// Number of log entries.
pub const LOG_ENTRIES: usize = 32_768;
/// Words of a file's entry.
pub const FILE_ENTRY_WORDS: usize = 4;
/// Number of entries for files. Below 65,535, because a socket's entry has their numbers in 16
/// bits.
pub const FILES: usize = 1024;
/// Words of a socket's entry.
pub const SOCKET_ENTRY_WORDS: usize = 4;
/// Number of entries for sockets.
pub const SOCKETS: usize = 16_384;
/// Files of which one socket's entry can have pages.
pub const SOCKET_FILES: usize = 4;

const LOG_AT: usize = HEADER_WORDS + SLOTS * SLOT_WORDS;
const FILES_AT: usize = LOG_AT + LOG_ENTRIES * LOG_ENTRY_WORDS;
const SOCKETS_AT: usize = FILES_AT + FILES * FILE_ENTRY_WORDS;
/// Words of the tally.
pub const TALLY_WORDS: usize = SOCKETS_AT + SOCKETS * SOCKET_ENTRY_WORDS;
/// Length of the tally in bytes.
pub const TALLY_BYTES: usize = TALLY_WORDS * 8;

/// Positions in the header.
pub mod header {
    /// [`super::MAGIC`].
    pub const MAGIC: usize = 0;
    /// Number of slots that processes asked for. May exceed [`super::SLOTS`].
    pub const SLOTS_TAKEN: usize = 1;
    /// Number of log entries that processes asked for. May exceed [`super::LOG_ENTRIES`].
    pub const LOG_TAKEN: usize = 2;
    /// 1 while copies are elided, else 0. `haul run --stop` clears it.
    pub const IS_ELIDING: usize = 4;
    /// The time of the broker's last sign of life, in ms of `CLOCK_MONOTONIC`.
    pub const HEARTBEAT_MS: usize = 5;
    /// Number of the network namespace of `haul run` (`SO_NETNS_COOKIE`, Linux 5.14). 0: unknown.
    pub const NETWORK: usize = 6;
    /// Inode of the PID namespace of `haul run`. 0: unknown.
    pub const PID_NAMESPACE: usize = 10;
    /// Name of the congestion control of new connections, 16 bytes in two words. 0: the program's.
    pub const CONGESTION: usize = 11;
    /// The token of the run ([`crate::message::TOKEN_BYTES`] in four words).
    pub const TOKEN: usize = 16;
    /// 1 if nothing is elided for peers on this host.
    pub const IS_STRICT: usize = 7;
    /// 1 if the kernel's confirmation is not asked for: only for a test of the confirmation.
    pub const IS_UNCONFIRMED: usize = 8;
    /// 1 if every call is elided that can be, without a comparison of costs: only for tests.
    pub const IS_UNTRIED: usize = 9;
}

/// Positions in a slot.
pub mod slot {
    use crate::vocabulary::{DescriptorKind, NotElided, SendMethod, SizeClass};

    /// ID of the process, as seen in its own PID namespace.
    pub const PROCESS: usize = 0;
    /// The process's name, 16 bytes in two words.
    pub const NAME: usize = 1;
    /// [`RUNNING`] or [`ENDED`]. 0: the slot was never used.
    pub const STATE: usize = 3;
    /// The process was not seen to end. A process that was killed stays in this state.
    pub const RUNNING: u64 = 1;
    /// The process called `exit` or `_exit`. Another process of this name may add to the counters.
    pub const ENDED: u64 = 2;
    /// 1 if the process makes no system call of the interposer, because a seccomp filter could kill
    /// the process for an unexpected call.
    pub const IS_QUIET: usize = 4;
    /// Bytes that the kernel counted on connections that this process alone sent on.
    pub const KERNEL_BYTES: usize = 5;
    /// Bytes that the interposer counted on connections that were compared with the kernel's count.
    pub const COMPARED_BYTES: usize = 6;
    /// Connections that were compared with the kernel's count.
    pub const CONNECTIONS: usize = 7;
    /// Bytes that were to be logged when the log was full.
    pub const UNLOGGED_BYTES: usize = 8;
    /// Pieces sent from memory that a file was read into, which were compared with the file.
    pub const SAMPLES: usize = 9;
    /// Pieces of [`SAMPLES`] that equalled the file.
    pub const SAMPLES_EQUAL: usize = 10;
    /// Sends with `MSG_ZEROCOPY` whose completion arrived.
    pub const ZEROCOPY_COMPLETIONS: usize = 11;
    /// Sends of [`ZEROCOPY_COMPLETIONS`] that the kernel copied.
    pub const ZEROCOPY_COPIED: usize = 12;
    /// Bytes sent on connections of each of [`super::CONGESTION_CONTROLS`].
    pub const CONGESTION: usize = 16;

    /// Leases that were granted.
    pub const LEASES: usize = 13;

    const SENT: usize = 32;
    const RECEIVED: usize = SENT + SendMethod::ALL.len() * SizeClass::COUNT * 2;
    const WRITTEN: usize = RECEIVED + DescriptorKind::ALL.len() * SizeClass::COUNT * 2;
    const NOT_ELIDED: usize = WRITTEN + DescriptorKind::ALL.len() * SizeClass::COUNT * 2;
    const END: usize = NOT_ELIDED + NotElided::ALL.len() * 2;
    const _: () = assert!(END <= super::SLOT_WORDS);

    /// Position of the number of calls that sent to TCP by `method`. The next word has their bytes.
    pub const fn sent(method: SendMethod, class: SizeClass) -> usize {
        SENT + (method as usize * SizeClass::COUNT + class.index()) * 2
    }

    /// Position of the number of calls that read from a descriptor of this kind. The next word has
    /// their bytes.
    pub const fn received(from: DescriptorKind, class: SizeClass) -> usize {
        RECEIVED + (from as usize * SizeClass::COUNT + class.index()) * 2
    }

    /// Position of the number of calls whose bytes of a mapped file were copied for a reason. The
    /// next word has their bytes.
    pub const fn not_elided(reason: NotElided) -> usize {
        NOT_ELIDED + reason as usize * 2
    }

    /// Position of the number of calls that wrote to a descriptor of this kind, which is not TCP.
    /// The next word has their bytes.
    pub const fn written(to: DescriptorKind, class: SizeClass) -> usize {
        WRITTEN + (to as usize * SizeClass::COUNT + class.index()) * 2
    }
}

/// Positions in a log entry.
///
/// The bytes of a connection are the largest kernel count of its entries, less the smallest count
/// at the beginning.
pub mod log_entry {
    /// Number of the socket (`SO_COOKIE`), plus 1. 0 if the entry is not complete.
    pub const COOKIE: usize = 0;
    /// Bytes that the kernel had counted when the process first used the socket.
    pub const BEGIN_BYTES: usize = 1;
    /// Bytes that the kernel had counted when the process closed the socket.
    pub const END_BYTES: usize = 2;
    /// Bytes that the interposer counted in this process.
    pub const SEEN_BYTES: usize = 3;
}

/// The names of congestion controls that are counted. Others are counted as the last.
pub const CONGESTION_CONTROLS: [&str; 6] = ["bbr", "cubic", "reno", "dctcp", "htcp", "other"];

/// Position of a slot in the tally.
pub const fn slot_at(index: usize) -> usize {
    HEADER_WORDS + index * SLOT_WORDS
}

/// Position of a log entry in the tally.
pub const fn log_entry_at(index: usize) -> usize {
    LOG_AT + index * LOG_ENTRY_WORDS
}

/// Positions in a file's entry.
pub mod file_entry {
    /// State of the entry in the lowest 8 bits: 0 free, 1 leased, 2 draining (no new pages may be
    /// sent). The other bits are the generation, which changes with each file in the entry.
    pub const STATE: usize = 0;
    /// Time of the last use, in ms of `CLOCK_MONOTONIC`.
    pub const USED_MS: usize = 1;

    /// The entry is free.
    pub const FREE: u64 = 0;
    /// Pages of the file may be sent.
    pub const LEASED: u64 = 1;
    /// Pages of the file are in flight, and no new ones may be sent.
    pub const DRAINING: u64 = 2;
    /// The bits of the state.
    pub const STATE_MASK: u64 = 0xFF;
    /// What is added for the next generation.
    pub const GENERATION: u64 = 0x100;
}

/// Positions in a socket's entry.
pub mod socket_entry {
    /// Number of the socket (`SO_COOKIE`), plus 1. 0: the entry is free. 1: an entry that a process
    /// is about to fill.
    pub const COOKIE: usize = 0;
    /// The files whose pages were sent: four numbers of 16 bits in one word. Each is the number of
    /// a file's entry plus 1, or 0 for no file.
    pub const FILES: usize = 1;
    /// Number of calls that send pages at this moment.
    pub const CALLS: usize = 2;
    /// In the lowest 31 bits the ID of the process that sends, then [`CONNECTED_AGAIN`], 16 bits of
    /// the port of the peer, and 16 bits of the port of the socket.
    pub const PROCESS: usize = 3;
    /// The bits of [`PROCESS`] with the ID. The highest ID of the kernel is 4,194,304.
    pub const PROCESS_MASK: u64 = (1 << 31) - 1;
    /// Bit of [`PROCESS`]: the kernel's counts of the socket are of a later connection.
    pub const CONNECTED_AGAIN: u64 = 1 << 31;
    /// The bits of [`PROCESS`] with the port of the socket begin here.
    pub const LOCAL_PORT_SHIFT: u32 = 48;
}

/// Position of a file's entry in the tally.
pub const fn file_entry_at(index: usize) -> usize {
    FILES_AT + index * FILE_ENTRY_WORDS
}

/// Position of a socket's entry in the tally.
pub const fn socket_entry_at(index: usize) -> usize {
    SOCKETS_AT + index * SOCKET_ENTRY_WORDS
}
