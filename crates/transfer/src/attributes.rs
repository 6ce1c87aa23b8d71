//! Reads the attributes of files at the source, and sets them at the destination.

use crate::message::{Attributes, Time};
use crate::options::Preserve;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The bits of a mode that are copied.
const MODE_BITS: u32 = 0o7777;
/// The bit by which new entries of a folder get the group of the folder.
const SET_GROUP_ID: u32 = 0o2000;
/// The most bytes of the names of a file's extended attributes: the kernel's limit
/// (`XATTR_LIST_MAX`).
const XATTR_NAMES_BYTES_MAX: usize = 64 << 10;
/// The most bytes of the value of an extended attribute: the kernel's limit (`XATTR_SIZE_MAX`).
const XATTR_VALUE_BYTES_MAX: usize = 64 << 10;
/// The most bytes of all values of a file. A file with more is an error of that file.
const XATTR_BYTES_MAX: usize = 256 << 10;
/// The beginning of the names of access control lists.
const ACL_PREFIX: &[u8] = b"system.posix_acl_";

/// The modification time.
pub fn mtime(stat: &Stat) -> Time {
    Time { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 }
}

/// Reads the attributes of an entry of a folder, without following a link.
pub fn read(
    stat: &Stat,
    folder: BorrowedFd<'_>,
    name: &[u8],
    preserve: &Preserve,
) -> rustix::io::Result<Attributes> {
    read_with(stat, folder, name, preserve, false)
}

/// Reads the attributes of what a link leads to, of which `stat` is.
pub fn read_through_link(
    stat: &Stat,
    folder: BorrowedFd<'_>,
    name: &[u8],
    preserve: &Preserve,
) -> rustix::io::Result<Attributes> {
    read_with(stat, folder, name, preserve, true)
}

fn read_with(
    stat: &Stat,
    folder: BorrowedFd<'_>,
    name: &[u8],
    preserve: &Preserve,
    follows: bool,
) -> rustix::io::Result<Attributes> {
    let is_symlink = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
    let reads_xattrs = (preserve.xattrs || preserve.acls) && !is_symlink;
    let path = path_in(folder, name);
    Ok(Attributes {
        mode: stat.st_mode & MODE_BITS,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: mtime(stat),
        xattrs: if reads_xattrs { read_xattrs(&path, preserve, follows)? } else { Vec::new() },
    })
}

/// The path of an entry of an open folder, for calls that take no folder.
fn path_in(folder: BorrowedFd<'_>, name: &[u8]) -> CString {
    let mut path = format!("/proc/self/fd/{}/", folder.as_raw_fd()).into_bytes();
    path.extend_from_slice(name);
    // Names of the kernel and checked names do not contain NUL.
    CString::new(path).unwrap_or_default()
}

fn read_xattrs(
    path: &CStr,
    preserve: &Preserve,
    follows: bool,
) -> rustix::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let list = |names: &mut [u8]| {
        if follows {
            rustix::fs::listxattr(path, names)
        } else {
            rustix::fs::llistxattr(path, names)
        }
    };
    let get = |name: &[u8], value: &mut [u8]| {
        if follows {
            rustix::fs::getxattr(path, name, value)
        } else {
            rustix::fs::lgetxattr(path, name, value)
        }
    };
    let mut names = vec![0; 256];
    let length = loop {
        match list(&mut names[..]) {
            Err(Errno::RANGE) if names.len() < XATTR_NAMES_BYTES_MAX => {
                names.resize(XATTR_NAMES_BYTES_MAX, 0);
            }
            // The file system has none.
            Err(Errno::NOTSUP) => return Ok(Vec::new()),
            listed => break listed?,
        }
    };
    let mut xattrs = Vec::new();
    let mut bytes = 0;
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        if !is_copied(name, preserve) {
            continue;
        }
        let mut value = vec![0; XATTR_VALUE_BYTES_MAX];
        match get(name, &mut value[..]) {
            Ok(length) => value.truncate(length),
            // Another process removed it, or only root may read it.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS) => continue,
            Err(errno) => return Err(errno),
        }
        bytes += name.len() + value.len();
        if bytes > XATTR_BYTES_MAX {
            return Err(Errno::TOOBIG);
        }
        value.shrink_to_fit();
        xattrs.push((name.to_vec(), value));
    }
    Ok(xattrs)
}

/// Whether an extended attribute is copied. Only root copies `security.*` and `trusted.*`. Of
/// `system.*`, which belongs to file systems, only the access control lists are copied.
fn is_copied(name: &[u8], preserve: &Preserve) -> bool {
    if name.starts_with(ACL_PREFIX) {
        return preserve.acls;
    }
    let is_roots = name.starts_with(b"security.") || name.starts_with(b"trusted.");
    preserve.xattrs
        && (name.starts_with(b"user.") || is_roots && rustix::process::geteuid().is_root())
}

/// How a destination sets attributes.
#[derive(Debug, Clone, Copy)]
pub struct AttributeSetter {
    preserve: Preserve,
    is_root: bool,
    /// The process's mask of permissions, for files whose permissions are not copied.
    umask: u32,
}

impl AttributeSetter {
    /// The setter of this process.
    pub fn new(preserve: Preserve) -> Self {
        Self { preserve, is_root: rustix::process::geteuid().is_root(), umask: umask() }
    }

    /// Sets the attributes of an open file or folder. `old` is what has the name now, whose
    /// permissions a file keeps if permissions are not copied.
    pub fn set(
        &self,
        file: impl AsFd,
        attributes: &Attributes,
        mtime: Time,
        old: Option<&Stat>,
    ) -> rustix::io::Result<()> {
        let file = file.as_fd();
        let now = rustix::fs::fstat(file)?;
        // A change of the owner clears the set-user-ID bit, so the mode comes after it.
        let new_owner = self.new_owner(attributes, &now);
        let owner = match new_owner {
            Some((uid, gid)) => rustix::fs::fchown(file, uid, gid),
            None => Ok(()),
        };
        let xattrs = self.set_xattrs(file, &attributes.xattrs);
        let mut mode = self.new_mode(attributes, old);
        let is_folder = FileType::from_raw_mode(now.st_mode) == FileType::Directory;
        if is_folder && !self.preserve.permissions {
            // The kernel passes the set-group-ID bit of a folder on to new folders in it.
            mode |= now.st_mode & SET_GROUP_ID;
        }
        let mode = safe_mode(mode, attributes, owner.is_ok(), xattrs.is_ok());
        // An owner and an access control list change the mode.
        let is_changed = new_owner.is_some() || !attributes.xattrs.is_empty();
        let now = if is_changed { rustix::fs::fstat(file)? } else { now };
        let permissions = if now.st_mode & MODE_BITS == mode {
            Ok(())
        } else {
            rustix::fs::fchmod(file, Mode::from_raw_mode(mode))
        };
        let times = if !self.preserve.times || self::mtime(&now) == mtime {
            Ok(())
        } else {
            rustix::fs::futimens(file, &timestamps(mtime))
        };
        // What can be set is set, and the first failure is returned.
        owner.and(xattrs).and(permissions).and(times)
    }

    /// Sets the group and the permissions of a folder that gets entries next, with all rights of
    /// the owner.
    pub fn prepare_folder(
        &self,
        folder: impl AsFd,
        attributes: &Attributes,
    ) -> rustix::io::Result<()> {
        let now = rustix::fs::fstat(&folder)?;
        if let Some((_, Some(gid))) = self.new_owner(attributes, &now) {
            rustix::fs::fchown(&folder, None, Some(gid))?;
        }
        // The access control list comes at the end.
        let mode = safe_mode(attributes.mode & MODE_BITS, attributes, true, false);
        let mode = mode | Mode::RWXU.as_raw_mode();
        if self.preserve.permissions && now.st_mode & MODE_BITS != mode {
            rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode))?;
        }
        Ok(())
    }

    /// Sets the extended attributes, and removes others of the kinds that are copied. A new file
    /// may have an access control list from the default of its folder.
    fn set_xattrs(
        &self,
        file: BorrowedFd<'_>,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> rustix::io::Result<()> {
        if !self.preserve.acls && !self.preserve.xattrs {
            return Ok(());
        }
        // Also for descriptors without the right to read, of pipes and devices.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut names = vec![0; 256];
        let length = loop {
            match rustix::fs::listxattr(&path, &mut names[..]) {
                Err(Errno::RANGE) if names.len() < XATTR_NAMES_BYTES_MAX => {
                    names.resize(XATTR_NAMES_BYTES_MAX, 0);
                }
                // The file system does not have such attributes.
                Err(Errno::NOTSUP) if xattrs.is_empty() => return Ok(()),
                listed => break listed?,
            }
        };
        let mut result = Ok(());
        let names = names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty());
        for name in names.filter(|name| is_copied(name, &self.preserve)) {
            if !xattrs.iter().any(|(other, _)| other == name) {
                result = result.and(match rustix::fs::removexattr(&path, name) {
                    // Security modules set and keep attributes of new files.
                    Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => Ok(()),
                    removed => removed,
                });
            }
        }
        for (name, value) in xattrs.iter().filter(|(name, _)| is_copied(name, &self.preserve)) {
            let mut now = vec![0; value.len() + 1];
            let length = rustix::fs::getxattr(&path, &name[..], &mut now[..]);
            // A read-only file may already have the attribute.
            if length.is_ok_and(|length| now[..length] == value[..]) {
                continue;
            }
            let set = rustix::fs::setxattr(&path, &name[..], value, XattrFlags::empty());
            result = result.and(set);
        }
        result
    }

    /// The permissions of a new file. `old` is the status of the file that has this name now.
    fn new_mode(&self, attributes: &Attributes, old: Option<&Stat>) -> u32 {
        if self.preserve.permissions {
            attributes.mode & MODE_BITS
        } else if let Some(old) = old {
            old.st_mode & MODE_BITS
        } else {
            attributes.mode & 0o777 & !self.umask
        }
    }

    /// Sets the attributes of a link, device, pipe or socket by its name. `old` is as for
    /// [`AttributeSetter::set`].
    pub fn set_at(
        &self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        attributes: &Attributes,
        old: Option<&Stat>,
    ) -> rustix::io::Result<()> {
        let now = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let owner = match self.new_owner(attributes, &now) {
            Some((uid, gid)) => {
                rustix::fs::chownat(folder, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
            }
            None => Ok(()),
        };
        let is_symlink = FileType::from_raw_mode(now.st_mode) == FileType::Symlink;
        let permissions = if is_symlink {
            Ok(())
        } else {
            self.set_permissions_at(folder, name, attributes, old, owner.is_ok())
        };
        let times = if self.preserve.times && mtime(&now) != attributes.mtime {
            let times = timestamps(attributes.mtime);
            rustix::fs::utimensat(folder, name, &times, AtFlags::SYMLINK_NOFOLLOW)
        } else {
            Ok(())
        };
        owner.and(permissions).and(times)
    }

    /// Sets the extended attributes and the permissions of something that cannot be opened.
    fn set_permissions_at(
        &self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        attributes: &Attributes,
        old: Option<&Stat>,
        has_owner: bool,
    ) -> rustix::io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
        let xattrs = self.set_xattrs(file.as_fd(), &attributes.xattrs);
        let mode = self.new_mode(attributes, old);
        let mode = safe_mode(mode, attributes, has_owner, xattrs.is_ok());
        if rustix::fs::fstat(&file)?.st_mode & MODE_BITS == mode {
            return xattrs;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        xattrs.and(rustix::fs::chmod(path, Mode::from_raw_mode(mode)))
    }

    /// Whether an entry of a folder has these attributes already.
    pub fn is_set(
        &self,
        stat: &Stat,
        folder: BorrowedFd<'_>,
        name: &[u8],
        attributes: &Attributes,
    ) -> rustix::io::Result<bool> {
        if self.new_owner(attributes, stat).is_some()
            || self.preserve.permissions && stat.st_mode & MODE_BITS != attributes.mode & MODE_BITS
        {
            return Ok(false);
        }
        let mut xattrs = read(stat, folder, name, &self.preserve)?.xattrs;
        let mut wanted: Vec<_> = attributes.xattrs.clone();
        wanted.retain(|(name, _)| is_copied(name, &self.preserve));
        xattrs.sort();
        wanted.sort();
        Ok(xattrs == wanted)
    }

    /// The owner and the group to set; `None` if both are right. An ordinary user sets the group if
    /// it is one of the user's own groups.
    fn new_owner(&self, attributes: &Attributes, now: &Stat) -> Option<(Option<Uid>, Option<Gid>)> {
        let sets_user = self.preserve.owner && self.is_root && now.st_uid != attributes.uid;
        let sets_group = self.preserve.group
            && now.st_gid != attributes.gid
            && (self.is_root || is_own_group(attributes.gid));
        let uid = sets_user.then(|| Uid::from_raw(attributes.uid));
        let gid = sets_group.then(|| Gid::from_raw(attributes.gid));
        (uid.is_some() || gid.is_some()).then_some((uid, gid))
    }
}

/// The mask of the process's permissions. umask(2) would change the mask for an instant, in which
/// another thread may create a file (/proc, Linux 4.7).
fn umask() -> u32 {
    const USUAL: u32 = 0o022;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let text = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    text.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(USUAL)
}

/// A mode without rights that would be too many: the set-ID bits if the owner is another, and the
/// rights of the group if they are the mask of an access control list that is missing.
fn safe_mode(mode: u32, attributes: &Attributes, has_owner: bool, has_xattrs: bool) -> u32 {
    let has_acl = attributes.xattrs.iter().any(|(name, _)| name.starts_with(ACL_PREFIX));
    let set_id = if has_owner { 0 } else { 0o6000 };
    let group = if has_acl && !has_xattrs { 0o070 } else { 0 };
    mode & !(set_id | group)
}

fn is_own_group(gid: u32) -> bool {
    let groups = rustix::process::getgroups().unwrap_or_default();
    rustix::process::getegid().as_raw() == gid || groups.iter().any(|own| own.as_raw() == gid)
}

/// The times to set: the access time stays.
fn timestamps(mtime: Time) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: mtime.seconds,
            tv_nsec: mtime.nanoseconds.min(999_999_999).into(),
        },
    }
}
