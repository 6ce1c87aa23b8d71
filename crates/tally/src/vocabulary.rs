//! What is counted: methods of sending, kinds of descriptors, and sizes of calls.

/// How bytes went to a TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SendMethod {
    /// `sendfile`: the kernel lends pages of the file.
    Sendfile,
    /// `splice` from a pipe: the kernel moves pages.
    Splice,
    /// `send` with `MSG_ZEROCOPY`: the kernel lends the program's memory, or copies after all.
    Zerocopy,
    /// Copied from a mapping of a file.
    MappedFile,
    /// Copied from memory into which a file was read.
    FileRead,
    /// Copied from memory into which a TCP socket was read.
    SocketRead,
    /// Copied from other memory.
    Memory,
    /// Asked to be copied from a mapping of a file, and sent by `sendfile` instead.
    Elided,
}

impl SendMethod {
    /// All methods, in the order of their counters.
    pub const ALL: [Self; 8] = [
        Self::Sendfile,
        Self::Splice,
        Self::Zerocopy,
        Self::MappedFile,
        Self::FileRead,
        Self::SocketRead,
        Self::Memory,
        Self::Elided,
    ];

    /// Whether the system call copies the bytes.
    pub fn is_copy(self) -> bool {
        matches!(self, Self::MappedFile | Self::FileRead | Self::SocketRead | Self::Memory)
    }
}

/// Why bytes of a mapped file were copied although copies are elided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NotElided {
    /// The call sends fewer bytes than are worth it.
    Small,
    /// A flag, an address or control data of the call.
    Call,
    /// The program closed the file after mapping it, and it cannot be opened again.
    NoFile,
    /// The kernel does not confirm the mapping: something else is mapped there, or the mapping is
    /// writable.
    Mapping,
    /// A private mapping with pages that differ from the file's.
    PrivatePages,
    /// Another program has the file open for writing.
    Writer,
    /// The file belongs to another user, and `haul run` may not lease it.
    Permission,
    /// The file system does not have leases, or changes files without the lease.
    NoLeases,
    /// Another program opened the file for writing not long ago, and waited for the lease.
    Broken,
    /// The broker returns the lease, and waits for the pages in flight.
    Draining,
    /// Another thread uses the tables, or the tables are full.
    Busy,
    /// The process of `haul run` that keeps the leases does not answer.
    NoBroker,
    /// Copying was measured to be cheaper.
    Dearer,
    /// The call was copied to measure what copying costs.
    Compared,
    /// The peer is on this host, and `--strict` was given.
    LocalPeer,
    /// The socket is in another network namespace than `haul run`.
    OtherNamespace,
    /// The kernel does not have `PROCMAP_QUERY` (Linux 6.11).
    OldKernel,
    /// What `sendfile` did not take: the socket was full, the file ended, or its lease did.
    Remainder,
}

impl NotElided {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 18] = [
        Self::Small,
        Self::Call,
        Self::NoFile,
        Self::Mapping,
        Self::PrivatePages,
        Self::Writer,
        Self::Permission,
        Self::NoLeases,
        Self::Broken,
        Self::Draining,
        Self::Busy,
        Self::NoBroker,
        Self::Dearer,
        Self::Compared,
        Self::LocalPeer,
        Self::OtherNamespace,
        Self::OldKernel,
        Self::Remainder,
    ];
}

/// What a file descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DescriptorKind {
    /// A TCP socket, IPv4 or IPv6.
    Tcp,
    /// A regular file.
    File,
    /// A Unix socket.
    UnixSocket,
    /// A pipe or a named pipe.
    Pipe,
    /// Anything else, such as a terminal, an eventfd or a UDP socket.
    Other,
}

impl DescriptorKind {
    /// All kinds, in the order of their counters.
    pub const ALL: [Self; 5] = [Self::Tcp, Self::File, Self::UnixSocket, Self::Pipe, Self::Other];
}

/// A range of numbers of bytes that one call moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(usize);

impl SizeClass {
    /// The lowest number of bytes of each class but the first.
    const LIMITS: [u64; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
    /// Number of classes.
    pub const COUNT: usize = Self::LIMITS.len() + 1;

    /// The class of a call that moved `bytes`.
    pub fn of(bytes: u64) -> Self {
        let mut class = 0;
        while class < Self::LIMITS.len() && bytes >= Self::LIMITS[class] {
            class += 1;
        }
        Self(class)
    }

    /// All classes, the smallest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT).map(Self)
    }

    /// The lowest number of bytes of this class.
    pub fn bytes_min(self) -> u64 {
        if self.0 == 0 { 0 } else { Self::LIMITS[self.0 - 1] }
    }

    /// The position of this class among all classes.
    pub const fn index(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_begins_at_its_lowest_number_of_bytes() {
        for class in SizeClass::all() {
            assert_eq!(SizeClass::of(class.bytes_min()), class);
            if class.index() > 0 {
                assert_eq!(SizeClass::of(class.bytes_min() - 1).index(), class.index() - 1);
            }
        }
        assert_eq!(SizeClass::of(u64::MAX).index(), SizeClass::COUNT - 1);
    }
}
