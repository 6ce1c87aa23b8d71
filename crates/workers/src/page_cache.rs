//! Files that exist only in the page cache (tmpfs), with small or with huge folios.
//!
//! A folio is the unit in which the kernel keeps cached pages. A file of 4 KiB folios costs more to
//! send than a file of huge folios, so the size of the folios is a condition of a measurement.

use haul_lab_sys::namespace::unshare_mounts;
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use std::fs::File;
use std::io;
use std::thread;

/// The size of the folios of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Folios {
    /// Pages of the smallest size: 4 KiB on x86-64.
    Small,
    /// Huge pages, 2 MiB on x86-64, where the file is large enough.
    Huge,
}

impl Folios {
    /// The beginning of a workload's name.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Small => "tmpfs",
            Self::Huge => "tmpfs-huge",
        }
    }
}

/// Makes an empty file without a name.
///
/// Huge folios need a separate tmpfs, for which the caller needs `CAP_SYS_ADMIN`. The tmpfs does
/// not appear in any directory, and ends with the file (Linux 5.2).
pub fn file(folios: Folios) -> io::Result<File> {
    match folios {
        Folios::Small => Ok(memfd_create("haul-page-cache", MemfdFlags::CLOEXEC)?.into()),
        // A thread, because a user namespace allows mounts only in a mount namespace made there.
        Folios::Huge => {
            thread::spawn(huge_file).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        }
    }
}

fn huge_file() -> io::Result<File> {
    unshare_mounts()?;
    let settings = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&settings, "huge", "always")?;
    fsconfig_create(&settings)?;
    let root = fsmount(&settings, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(openat(&root, ".", flags, Mode::RUSR | Mode::WUSR)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn folios_have_the_requested_size() {
        let mut small = file(Folios::Small).unwrap();
        small.write_all(&[1; 8192]).unwrap();
        assert_eq!(small.metadata().unwrap().len(), 8192);
        match file(Folios::Huge) {
            // tmpfs reports the size of its folios as the preferred size of writes.
            Ok(huge) => assert!(huge.metadata().unwrap().blksize() >= 1 << 20),
            Err(error) => eprintln!("SKIPPED: tmpfs with huge folios: {error}"),
        }
    }
}
