//! `--link-dest`: a file that an earlier copy has becomes a hard link to the file of the earlier
//! copy.

use crate::attributes::{self, AttributeSetter};
use crate::destination::partial_file;
use crate::message::Attributes;
use crate::options::Replacement;
use crate::source::split;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Earlier copies, the first of which with an equal file counts.
#[derive(Debug, Default)]
pub struct EarlierCopies {
    roots: Vec<OwnedFd>,
    size_only: bool,
}

impl EarlierCopies {
    /// Opens earlier copies, whose paths begin at the destination. Returns the paths that cannot be
    /// opened too, with the reasons.
    pub fn open(
        paths: &[Vec<u8>],
        destination: &OwnedFd,
        replacement: Replacement,
    ) -> (Self, Vec<String>) {
        let Replacement { ignores_times, size_only, .. } = replacement;
        let (mut roots, mut failures) = (Vec::new(), Vec::new());
        // The user asked for all content to be sent.
        for path in paths.iter().filter(|_| !ignores_times) {
            // The paths are the user's, so they may lead through links.
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            match rustix::fs::openat(destination, &path[..], flags, Mode::empty()) {
                Ok(root) => roots.push(root),
                Err(errno) => failures.push(format!(
                    "the earlier copy {} cannot be opened, so nothing is linked to it: {}",
                    String::from_utf8_lossy(path),
                    std::io::Error::from(errno)
                )),
            }
        }
        (Self { roots, size_only }, failures)
    }

    /// An earlier copy that has a file with this size and these attributes at this path below its
    /// root: the folder, whose entry has the last component as its name.
    pub fn find(
        &self,
        path: &[u8],
        size: u64,
        attributes: &Attributes,
        setter: &AttributeSetter,
    ) -> Option<OwnedFd> {
        let (folder, name) = split(path);
        let folder = if folder.is_empty() { b"." } else { folder };
        self.roots.iter().find_map(|root| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let open = rustix::fs::openat2(root, folder, flags, Mode::empty(), resolve).ok()?;
            let stat = rustix::fs::statat(&open, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            let is_equal = self.is_unchanged(&stat, size, attributes)
                && setter.is_set(&stat, open.as_fd(), name, attributes).unwrap_or(false);
            is_equal.then_some(open)
        })
    }

    fn is_unchanged(&self, stat: &Stat, size: u64, attributes: &Attributes) -> bool {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_size as u64 == size
            && (self.size_only || attributes::mtime(stat) == attributes.mtime)
    }
}

/// Makes a hard link to an entry of an earlier copy's folder, in place of what has the name unless
/// `replaces` is false.
pub fn link(
    earlier: &OwnedFd,
    earlier_name: &[u8],
    folder: &OwnedFd,
    name: &[u8],
    replaces: bool,
) -> Result<(), Errno> {
    let make = |temporary_name: &[u8]| {
        rustix::fs::linkat(earlier, earlier_name, folder, temporary_name, AtFlags::empty())
    };
    partial_file::replace(folder, name, replaces, make, |_| Ok(()))
}
