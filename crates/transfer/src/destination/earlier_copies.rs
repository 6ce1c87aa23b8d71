//! `--link-dest`: a file that an earlier copy has becomes a hard link to the file of the earlier
//! copy.

use crate::attributes::{self, AttributeSetter};
use crate::destination::partial_file;
use crate::message::Attributes;
use crate::options::{Options, Replacement};
use crate::source::{open_named, split};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Earlier copies, the first of which with an equal file counts.
#[derive(Debug, Default)]
pub struct EarlierCopies {
    roots: Vec<OwnedFd>,
    /// Whether a file of another time differs: a link has the time of the earlier file.
    compares_times: bool,
}

impl EarlierCopies {
    /// Opens earlier copies, whose paths begin at the destination. A dry run may lack the open
    /// destination. Returns the paths that cannot be opened too, with the reasons.
    pub fn open(
        options: &Options,
        destination: Option<&OwnedFd>,
        destination_path: &[u8],
    ) -> (Self, Vec<String>) {
        let Replacement { ignores_times, size_only, .. } = options.replacement;
        let (mut roots, mut failures) = (Vec::new(), Vec::new());
        // The user asked for all content to be sent.
        for path in options.earlier_copies.iter().filter(|_| !ignores_times) {
            // The paths are the user's, so they may lead through links.
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = if options.is_confined {
                let folder = if destination_path.is_empty() { b"." } else { destination_path };
                open_named(&[folder, b"/", path].concat(), OFlags::PATH, true)
            } else if let Some(open) = destination {
                rustix::fs::openat(open, &path[..], flags, Mode::empty())
            } else {
                let path = path_without_folder(destination_path, path);
                rustix::fs::open(&path[..], flags, Mode::empty())
            };
            match opened {
                Ok(root) => roots.push(root),
                Err(errno) => failures.push(format!(
                    "the earlier copy {} cannot be opened, so nothing is linked to it: {}",
                    String::from_utf8_lossy(path),
                    std::io::Error::from(errno)
                )),
            }
        }
        let compares_times = options.preserve.times || !size_only;
        (Self { roots, compares_times }, failures)
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
        let name = split(path).1;
        self.entries(path).find_map(|(open, stat)| {
            let is_equal = self.is_unchanged(&stat, size, attributes)
                && setter.is_set(&stat, open.as_fd(), name, attributes).unwrap_or(false);
            is_equal.then_some(open)
        })
    }

    /// The folder of the first regular file at this path, and what the file is.
    pub fn find_version(&self, path: &[u8]) -> Option<(OwnedFd, Stat)> {
        let is_file = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        self.entries(path).find(|(_, stat)| is_file(stat))
    }

    /// What the copies have at a path below their roots: the folders, and the last components.
    fn entries(&self, path: &[u8]) -> impl Iterator<Item = (OwnedFd, Stat)> {
        let (folder, name) = split(path);
        let folder = if folder.is_empty() { b"." } else { folder };
        self.roots.iter().filter_map(move |root| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
            let open = rustix::fs::openat2(root, folder, flags, Mode::empty(), resolve).ok()?;
            let stat = rustix::fs::statat(&open, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            Some((open, stat))
        })
    }

    fn is_unchanged(&self, stat: &Stat, size: u64, attributes: &Attributes) -> bool {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_size as u64 == size
            && (!self.compares_times || attributes::mtime(stat) == attributes.mtime)
    }
}

/// A path that begins at a folder which does not exist.
fn path_without_folder(folder: &[u8], path: &[u8]) -> Vec<u8> {
    if path.starts_with(b"/") {
        return path.to_vec();
    }
    let Some(above) = path.strip_prefix(b"../").filter(|_| !folder.is_empty()) else {
        return [folder, b"/", path].concat();
    };
    let end = folder.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    match split(&folder[..end]).0 {
        b"" => above.to_vec(),
        parent => [parent, b"/", above].concat(),
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
