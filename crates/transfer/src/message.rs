//! The messages of the protocol.
//!
//! The source numbers folders and entries in the order in which it lists them, each from 0. Folder
//! 0 is the destination directory itself.
//!
//! Lists and answers go through the stream of ssh, in order. The content of files goes through any
//! stream, so content may overtake other content.

use crate::block::BlockKey;
use crate::checksum::Checksum;
use crate::direct::Successor;
use crate::summary::{FileError, Summary};
use crate::times::Times;
use serde::{Deserialize, Serialize};

/// The most folders and entries in one message.
pub const BATCH_MAX: usize = 512;
/// The most files that the source lists before the destination answers.
pub const UNANSWERED_MAX: usize = 16 * BATCH_MAX;

/// A message of the source.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToDestination {
    /// The first message.
    Begin {
        /// Whether the only source is not a directory, so that the destination's last component may
        /// be the name of the copy.
        is_single_file: bool,
        /// Whether there are several sources, which may have entries with the same path.
        has_several_sources: bool,
        /// The key of all hashes of blocks.
        block_key: BlockKey,
    },
    /// The next folders and entries, at most [`BATCH_MAX`]. If regular files are among them, the
    /// answer is [`ToSource::Requested`].
    List(Vec<Listed>),
    /// Every entry of these folders was listed, at most [`BATCH_MAX`] folders.
    FoldersDone(Vec<u64>),
    /// The content of requested small files, one after another in the data.
    Pack(Vec<Packed>),
    /// A part of a large file: the data.
    Chunk {
        /// The entry.
        id: u64,
        /// The number of the attempt to read the file, from 1. The destination discards the chunks
        /// of earlier attempts. Attempt 1 reads the version that was listed.
        attempt: u32,
        /// The place in the file, in bytes.
        offset: u64,
        /// The checksum of the data.
        checksum: Checksum,
    },
    /// The data is the hashes of blocks of a large file, one after another. The destination copies
    /// blocks that it has, and answers by [`ToSource::Differing`].
    Blocks {
        /// The place of the blocks.
        place: BlocksPlace,
        /// The bytes of each block.
        lengths: Vec<u32>,
    },
    /// All chunks of a large file were sent. Bytes between chunks are holes. Chunks in other
    /// streams may arrive later.
    FileDone {
        /// The entry.
        id: u64,
        /// The attempt that read the file.
        attempt: u32,
        /// The bytes of all chunks of the file, of all attempts.
        bytes: u64,
        /// The size of the file.
        size: u64,
        /// The modification time of the file.
        mtime: Time,
    },
    /// A file that was requested cannot be read.
    Unreadable {
        /// The entry.
        id: u64,
        /// The bytes of all chunks of the file, which may arrive later.
        bytes: u64,
        /// The failure.
        error: FileError,
    },
    /// Something without an entry cannot be read at the source, or a file changed while it was
    /// read.
    Failed(FileError),
    /// The walk through the sources ended, and the destination knows all files. Content may follow.
    Walked,
    /// Where the time of the source went so far. The message is sent each second.
    Times(Times),
    /// Everything was sent, through all streams.
    End,
    /// Nothing follows in this direct stream, because its keys encrypted as much as they may.
    StreamDone,
    /// In a chain: the next host, to which content is passed on; `None`: this host is the last.
    Successor {
        /// The number of the order, which grows.
        order: u64,
        /// The next host.
        successor: Option<Successor>,
    },
    /// In a chain: all hosts have the frames before this number.
    Released(u64),
}

/// A message of the destination.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToSource {
    /// Which of the next regular files the destination requests: one bit for each, from the lowest
    /// bit of the first byte.
    Requested {
        /// The number of regular files.
        count: u32,
        /// The bits.
        bits: Vec<u8>,
        /// What the destination has of requested files from an interrupted transfer.
        held: Vec<Held>,
        /// The requested files whose blocks the destination can compare, as places among the bits,
        /// in order.
        comparable: Vec<u32>,
    },
    /// The answer to [`ToDestination::Blocks`].
    Differing {
        /// The place of the blocks.
        place: BlocksPlace,
        /// The ranges of the file that the destination lacks, in order.
        ranges: Vec<(u64, u64)>,
    },
    /// Where the time of the destination went so far. The message is sent each second.
    Times(Times),
    /// The result. Nothing follows.
    Done(Summary),
    /// The destination cannot be used. Nothing follows.
    BadDestination {
        /// The path as the user gave it.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// The destination cannot go on, for this reason. Nothing follows.
    GaveUp(String),
    /// In a chain: how far this host is. The report is sent at least each second.
    Chain(ChainReport),
}

/// The place of consecutive blocks in a large file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlocksPlace {
    /// The entry.
    pub id: u64,
    /// The attempt to read the file.
    pub attempt: u32,
    /// The place of the first block, in bytes.
    pub offset: u64,
}

/// How far a host of a chain is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainReport {
    /// The number of frames that the host took.
    pub frames: u64,
    /// The bytes of data in these frames. Hashes count as the blocks that they stand for.
    pub bytes: u64,
    /// Whether a frame waits for memory, because the next host is slower.
    pub is_full: bool,
    /// The number of an order, and why the host cannot reach the next host of this order.
    pub failure: Option<(u64, String)>,
}

/// The ranges that the destination has of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// The file, as its place among the bits.
    pub index: u32,
    /// The ranges, in order and without overlap.
    pub ranges: Vec<(u64, u64)>,
}

/// A folder or an entry.
#[derive(Debug, Serialize, Deserialize)]
pub enum Listed {
    /// The next folder, which is created.
    Folder(Folder),
    /// The next entry.
    Entry(Entry),
}

/// A folder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Folder {
    /// The number of the folder that holds this one. Folder 0 holds itself.
    pub parent: u64,
    /// The name; empty for folder 0.
    pub name: Vec<u8>,
    /// The attributes; `None` for folder 0 if no source has its place, so that its attributes stay.
    pub attributes: Option<Attributes>,
    /// Whether the content of the folder is left out, so that nothing in it is deleted.
    pub is_left_out: bool,
}

/// An entry of a folder that is not a folder.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The number of the folder that holds the entry.
    pub folder: u64,
    /// The name: one component.
    pub name: Vec<u8>,
    /// What the entry is.
    pub kind: Kind,
    /// Its attributes.
    pub attributes: Attributes,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    File {
        /// The size, in bytes.
        size: u64,
        /// Whether later entries may be hard links to the file.
        is_linked: bool,
        /// A number that changes with the content of a large file, so that an interrupted transfer
        /// of the same version can go on; 0 for a small file.
        version: u64,
        /// The earlier entry that is another name of the same file, by its number. The destination
        /// makes a hard link, unless it lacks the content of that entry.
        link_to: Option<u64>,
    },
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device, by its number.
    CharacterDevice(u64),
    /// A block device, by its number.
    BlockDevice(u64),
    /// Something that is not copied, and that the destination does not delete.
    LeftOut,
}

/// Attributes of an entry or a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// The permissions, with the set-user-ID, set-group-ID and sticky bits.
    pub mode: u32,
    /// The number of the user.
    pub uid: u32,
    /// The number of the group.
    pub gid: u32,
    /// The modification time.
    pub mtime: Time,
    /// Extended attributes and access control lists: names and values.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A time since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds of the second.
    pub nanoseconds: u32,
}

/// A small file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Packed {
    /// The entry.
    pub id: u64,
    /// The bytes of the content.
    pub bytes: u32,
    /// The checksum of the content.
    pub checksum: Checksum,
    /// The modification time when the content was read.
    pub mtime: Time,
}
