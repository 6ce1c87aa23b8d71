//! What the user asked for. The end that the user started sends the options to the other end.

use crate::error::Error;
use crate::filter::{Filter, PATTERN_BYTES_MAX, RULES_MAX};
use serde::{Deserialize, Serialize};

/// The most earlier copies of a transfer, as rsync's.
pub const EARLIER_COPIES_MAX: usize = 20;

/// The options of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Options {
    /// The attributes of the original that the copy gets.
    pub preserve: Preserve,
    /// Which entries of the sources are left out.
    pub selection: Selection,
    /// Which files of the destination are replaced.
    pub replacement: Replacement,
    /// What happens to entries of the destination that the sources lack.
    pub deletion: Deletion,
    /// Earlier copies, by their paths from the destination on. A new file that is equal to a file
    /// of an earlier copy becomes a hard link to that file.
    pub earlier_copies: Vec<Vec<u8>>,
    /// Whether content is compressed while that makes the transfer faster.
    pub compress: bool,
    /// The bytes of content per second that the source sends; 0 for no limit.
    pub rate_max: u64,
    /// Whether nothing is changed: the destination only reports what it would do.
    pub dry_run: bool,
    /// Whether a large file that changed is sent by the blocks that differ.
    pub delta: Delta,
    /// The checksum of content.
    pub verify: Verify,
    /// When content is written to the disk.
    pub durable: Durable,
    /// Whether this end may use nothing outside of the present folder. The other end does not
    /// decide it.
    #[serde(skip)]
    pub(crate) is_confined: bool,
}

/// Which entries of the sources are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// Rules for paths. The destination keeps excluded entries.
    pub filter: Filter,
    /// The smallest size of a regular file, in bytes.
    pub size_min: u64,
    /// The largest size of a regular file, in bytes; `None` for no limit.
    pub size_max: Option<u64>,
    /// Whether folders of other file systems than the source's are not read.
    pub one_file_system: bool,
    /// Whether the copy of a source keeps the source's whole path, or the part after `/./`.
    pub relative: bool,
    /// Whether what symbolic links lead to is copied in their places.
    pub follow_links: bool,
}

/// Which files of the destination are replaced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct Replacement {
    /// A regular file with the size and the modification time of the original is sent nevertheless.
    pub ignores_times: bool,
    /// A regular file with the size of the original is up to date.
    pub size_only: bool,
    /// A regular file that is newer than the original stays.
    pub keeps_newer: bool,
    /// Entries that exist stay.
    pub keeps_existing: bool,
    /// Folders that exist keep their attributes.
    pub keeps_folders: bool,
    /// Entries that do not exist are not made.
    pub only_existing: bool,
}

/// What happens to entries of the destination that the sources lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deletion {
    /// Whether they are deleted.
    pub mode: DeletionMode,
    /// Whether excluded entries are deleted, which otherwise stay.
    pub deletes_excluded: bool,
}

/// Whether entries are deleted that the sources lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeletionMode {
    /// They stay.
    #[default]
    No,
    /// They are deleted at the end of a transfer without errors, unless they are more than a
    /// quarter of the destination, or the source is empty.
    Brake,
    /// They are deleted at the end of a transfer without errors, however many they are.
    All,
}

/// Whether a large file that changed is sent by the blocks that differ from the version at the
/// destination, or from the file of an earlier copy. Both ends read the whole file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delta {
    /// The whole file is sent.
    #[default]
    No,
    /// Blocks are compared with the blocks at the same place.
    Fixed,
    /// Blocks are found at any place, so that content may move.
    Rolling,
}

/// The checksum of each chunk and each small file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verify {
    /// CRC-64/NVMe, against faults of memory and programs.
    #[default]
    Crc64,
    /// BLAKE3, whose collisions cannot be made on purpose.
    Blake3,
}

/// When content is written to the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Durable {
    /// A batch of files gets its names and times after one sync.
    #[default]
    Batch,
    /// Each file gets its name and its time after its sync.
    Each,
    /// When the kernel writes it.
    No,
}

/// Attributes that are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct Preserve {
    /// The content of directories, at any depth.
    pub recursive: bool,
    /// Symbolic links as links; without, they are left out.
    pub links: bool,
    /// Permissions. Without them, new files have the original's permissions less the umask.
    pub permissions: bool,
    /// Modification times.
    pub times: bool,
    /// The owner, where the destination's user is root.
    pub owner: bool,
    /// The group, where the destination's user may set it.
    pub group: bool,
    /// Devices, sockets and named pipes, where the destination's user may make them.
    pub specials: bool,
    /// Hard links among the copied files.
    pub hard_links: bool,
    /// POSIX access control lists.
    pub acls: bool,
    /// Extended attributes of the namespace `user`, and for root of all namespaces.
    pub xattrs: bool,
}

impl Options {
    /// Refuses options that no user's end sends.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let rules = &self.selection.filter.0;
        let is_short = rules.iter().all(|rule| rule.pattern.len() <= PATTERN_BYTES_MAX);
        let is_allowed =
            rules.len() <= RULES_MAX && is_short && self.earlier_copies.len() <= EARLIER_COPIES_MAX;
        if is_allowed { Ok(()) } else { Err(Error::Protocol("too many rules")) }
    }
}

impl Preserve {
    /// Everything.
    pub const ALL: Self = Self {
        recursive: true,
        links: true,
        permissions: true,
        times: true,
        owner: true,
        group: true,
        specials: true,
        hard_links: true,
        acls: true,
        xattrs: true,
    };

    /// Nothing but the content of files.
    pub const NOTHING: Self = Self {
        recursive: false,
        links: false,
        permissions: false,
        times: false,
        owner: false,
        group: false,
        specials: false,
        hard_links: false,
        acls: false,
        xattrs: false,
    };
}

impl Default for Options {
    /// A whole copy: everything is preserved, and files that look unchanged are not sent.
    fn default() -> Self {
        Self {
            preserve: Preserve::ALL,
            selection: Selection::default(),
            replacement: Replacement::default(),
            deletion: Deletion::default(),
            earlier_copies: Vec::new(),
            compress: false,
            rate_max: 0,
            dry_run: false,
            delta: Delta::No,
            verify: Verify::default(),
            durable: Durable::default(),
            is_confined: false,
        }
    }
}
