//! What the user asked for. The end that the user started sends the options to the other end.

use serde::{Deserialize, Serialize};

/// The options of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Options {
    /// The attributes of the original that the copy gets.
    pub preserve: Preserve,
    /// Whether a regular file with the size and the modification time of the original is sent
    /// nevertheless.
    pub ignore_times: bool,
    /// Whether nothing is changed: the destination only reports what it would do.
    pub dry_run: bool,
    /// The checksum of content.
    pub verify: Verify,
    /// When content is written to the disk.
    pub durable: Durable,
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
            ignore_times: false,
            dry_run: false,
            verify: Verify::default(),
            durable: Durable::default(),
        }
    }
}
