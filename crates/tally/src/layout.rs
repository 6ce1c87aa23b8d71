//! Positions of the counters in the file.

/// Name of the environment variable with the path of the tally.
pub const PATH_VARIABLE: &str = "HAUL_RUN_TALLY";
/// Name of the environment variable that turns the interposer off if its value is `off`.
pub const SWITCH_VARIABLE: &str = "HAUL_RUN";

/// First word of the file: the letters `haulrun`, and the version of the layout.
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
/// Words of the file.
pub const FILE_WORDS: usize = HEADER_WORDS + SLOTS * SLOT_WORDS + LOG_ENTRIES * LOG_ENTRY_WORDS;
/// Length of the file in bytes.
pub const FILE_BYTES: usize = FILE_WORDS * 8;

/// Positions in the header.
pub mod header {
    /// [`super::MAGIC`].
    pub const MAGIC: usize = 0;
    /// Number of slots that processes asked for. May exceed [`super::SLOTS`].
    pub const SLOTS_TAKEN: usize = 1;
    /// Number of log entries that processes asked for. May exceed [`super::LOG_ENTRIES`].
    pub const LOG_TAKEN: usize = 2;
    /// Number of seccomp filters of the process `haul run`, which every program inherits.
    pub const SECCOMP_FILTERS: usize = 3;
}

/// Positions in a slot.
pub mod slot {
    use crate::vocabulary::{DescriptorKind, SendMethod, SizeClass};

    /// ID of the process, as seen in its own PID namespace.
    pub const PROCESS: usize = 0;
    /// The process's name, 16 bytes in two words.
    pub const NAME: usize = 1;
    /// 1 while the process runs, 2 after it called `exit` or `_exit`.
    pub const STATE: usize = 3;
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

    const SENT: usize = 32;
    const RECEIVED: usize = SENT + SendMethod::ALL.len() * SizeClass::COUNT * 2;
    const WRITTEN: usize = RECEIVED + DescriptorKind::ALL.len() * SizeClass::COUNT * 2;
    const END: usize = WRITTEN + DescriptorKind::ALL.len() * SizeClass::COUNT * 2;
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

/// Position of a slot in the file.
pub const fn slot_at(index: usize) -> usize {
    HEADER_WORDS + index * SLOT_WORDS
}

/// Position of a log entry in the file.
pub const fn log_entry_at(index: usize) -> usize {
    HEADER_WORDS + SLOTS * SLOT_WORDS + index * LOG_ENTRY_WORDS
}
