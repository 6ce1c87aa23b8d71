//! Makes entries that are neither files nor folders.

use crate::attributes::AttributeSetter;
use crate::destination::partial_file;
use crate::message::{Attributes, Kind};
use rustix::fs::{FileType, Mode, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// Makes something else than a file or a folder, or sets its attributes if it exists. It takes the
/// place of what has the name, unless `replaces` is false.
pub fn make_special(
    setter: &AttributeSetter,
    open: &OwnedFd,
    name: &[u8],
    kind: &Kind,
    attributes: &Attributes,
    old: Option<Stat>,
    replaces: bool,
) -> rustix::io::Result<()> {
    if old.as_ref().is_some_and(|old| is_same_special(open, name, kind, old)) {
        return setter.set_at(open.as_fd(), name, attributes, old.as_ref());
    }
    let make = |temporary_name: &[u8]| {
        let (kind, device) = match kind {
            Kind::Symlink(target) => {
                return rustix::fs::symlinkat(&target[..], open, temporary_name);
            }
            Kind::Fifo => (FileType::Fifo, 0),
            Kind::Socket => (FileType::Socket, 0),
            Kind::CharacterDevice(device) => (FileType::CharacterDevice, *device),
            Kind::BlockDevice(device) => (FileType::BlockDevice, *device),
            Kind::File { .. } | Kind::LeftOut => return Err(Errno::INVAL),
        };
        rustix::fs::mknodat(open, temporary_name, kind, Mode::RUSR | Mode::WUSR, device)
    };
    partial_file::replace(open, name, replaces, make, |temporary_name| {
        setter.set_at(open.as_fd(), temporary_name, attributes, None)
    })
}

/// Whether what has the name is what would be made.
fn is_same_special(open: &OwnedFd, name: &[u8], kind: &Kind, old: &Stat) -> bool {
    match (kind, FileType::from_raw_mode(old.st_mode)) {
        (Kind::Symlink(target), FileType::Symlink) => {
            let now = rustix::fs::readlinkat(open, name, Vec::new());
            now.is_ok_and(|now| now.as_bytes() == target)
        }
        (Kind::Fifo, FileType::Fifo) | (Kind::Socket, FileType::Socket) => true,
        (Kind::CharacterDevice(device), FileType::CharacterDevice)
        | (Kind::BlockDevice(device), FileType::BlockDevice) => *device == old.st_rdev,
        _ => false,
    }
}
