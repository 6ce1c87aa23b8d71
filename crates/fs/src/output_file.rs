//! Writes a result to the path that a user names.
//!
//! A regular file is replaced atomically, and so is the regular file that a symbolic link leads to.
//! Everything else is opened and written to: a device, a terminal, a named pipe, or a descriptor of
//! this process (`/dev/fd/63`, `/dev/stdout`). Replacing `/dev/null` would break the whole machine.

use crate::atomic_file::AtomicFile;
use rustix::fs::{Access, Mode, OFlags, PROC_SUPER_MAGIC, access, fcntl_setfl, open, statfs};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// How a path is written.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    /// A new file takes this path, whose last component is not a symbolic link.
    Replace(PathBuf),
    /// The path is opened and written to.
    Open(PathBuf),
}

impl Target {
    fn of(path: &Path) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.file_type().is_socket() => Err(Errno::NXIO.into()),
            Ok(found) if found.is_file() && !is_descriptor(path) => {
                fs::canonicalize(path).map(Self::Replace)
            }
            Ok(_) => Ok(Self::Open(path.into())),
            // A symbolic link that leads to no file is an error here, because its target may be on
            // a file system that is not mounted.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {
                Ok(Self::Replace(path.into()))
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether a path leads through `/proc` to a descriptor, as `/dev/stdout` and `/dev/fd/1` do. Such
/// a descriptor may be a regular file, to which the caller's shell still writes.
fn is_descriptor(path: &Path) -> bool {
    let mut path = path.to_owned();
    // As many links as the kernel follows (path_resolution(7)).
    for _ in 0..40 {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new(".")).to_owned();
        let Ok(link) = fs::read_link(&path) else { return false };
        if statfs(&parent).is_ok_and(|found| found.f_type == PROC_SUPER_MAGIC) {
            return true;
        }
        path = parent.join(link);
    }
    false
}

/// Writes the bytes to a path: a regular file is replaced by one with this mode (less the umask),
/// of which readers see the old content or the new one. Anything else is opened and written to.
///
/// `IsADirectory` for a directory, `ENXIO` for a socket. `NotFound` if the directory, or the target
/// of a symbolic link, does not exist. `ENXIO` also for a named pipe that no program reads.
pub fn write_output(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    match Target::of(path)? {
        Target::Replace(path) => {
            let file = AtomicFile::create(&path, mode)?;
            file.file().write_all(bytes)?;
            match file.commit(false) {
                // A file that is a mount point, as in a container, cannot be replaced.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => {
                    fs::write(path, bytes)
                }
                committed => committed.map(drop),
            }
        }
        Target::Open(path) => {
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let mut file = File::from(open(&path, flags, Mode::empty())?);
            // Without a reader the call above would wait for one.
            fcntl_setfl(&file, OFlags::APPEND)?;
            file.write_all(bytes)
        }
    }
}

/// Checks that [`write_output`] can write to a path, without a change to it. An error names what
/// would fail; a full disk is not noticed.
///
/// For a named pipe, waits for its reader and returns the open pipe. The caller keeps the pipe open
/// until [`write_output`], so that the reader waits.
pub fn check_output(path: &Path) -> io::Result<Option<File>> {
    match Target::of(path)? {
        Target::Replace(path) => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            check_directory(parent.unwrap_or(Path::new("."))).map(|()| None)
        }
        Target::Open(path)
            if fs::metadata(&path)?.file_type().is_fifo() && !is_descriptor(&path) =>
        {
            File::options().write(true).open(path).map(Some)
        }
        Target::Open(path) => Ok(access(path, Access::WRITE_OK).map(|()| None)?),
    }
}

/// Checks that files can be created in a directory.
pub fn check_directory(directory: &Path) -> io::Result<()> {
    if !fs::metadata(directory)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(access(directory, Access::WRITE_OK | Access::EXEC_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FileType, mknodat};
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
        let _pipe = check_output(path)?;
        write_output(path, bytes, 0o600)
    }

    #[test]
    fn a_regular_file_is_replaced_also_behind_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        write(&file, b"one").unwrap();
        let mut old = File::open(&file).unwrap();
        symlink("file", &link).unwrap();
        write(&link, b"two").unwrap();
        let mut text = String::new();
        old.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), fs::read(&file).unwrap()), ("one", b"two".to_vec()));
        assert!(link.is_symlink());
    }

    #[test]
    fn a_named_pipe_is_written_to_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = Mode::from_raw_mode(0o600);
        mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, mode, 0).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        write(&pipe, b"report").unwrap();
        assert_eq!(reader.join().unwrap(), b"report");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        // A reader that ended is an error. Waiting for another one could last forever.
        let error = write_output(&pipe, b"report", 0o600).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NXIO));
    }

    #[test]
    fn a_device_is_written_to_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let null = folder.path().join("null");
        let device = rustix::fs::makedev(1, 3);
        let mode = Mode::from_raw_mode(0o666);
        if mknodat(rustix::fs::CWD, &null, FileType::CharacterDevice, mode, device).is_err() {
            eprintln!("SKIPPED: only root can make device nodes");
            return;
        }
        write(&null, b"report").unwrap();
        assert!(fs::symlink_metadata(&null).unwrap().file_type().is_char_device());
        let link = folder.path().join("link");
        symlink("null", &link).unwrap();
        write(&link, b"report").unwrap();
        assert!(fs::symlink_metadata(&null).unwrap().file_type().is_char_device());
    }

    #[test]
    fn a_descriptor_is_written_to() {
        let (mut rx, tx) = io::pipe().unwrap();
        write(Path::new(&format!("/dev/fd/{}", tx.as_raw_fd())), b"report").unwrap();
        drop(tx);
        let mut text = String::new();
        rx.read_to_string(&mut text).unwrap();
        assert_eq!(text, "report");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "output\n").unwrap();
        let (file, before) = (File::open(&path).unwrap(), fs::metadata(&path).unwrap());
        write(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), b"report\n").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"output\nreport\n");
        assert_eq!(fs::metadata(&path).unwrap().ino(), before.ino(), "the file was replaced");
    }

    #[test]
    fn what_cannot_be_written_is_an_error_of_both_calls() {
        let folder = tempfile::tempdir().unwrap();
        symlink("nothing", folder.path().join("dangling")).unwrap();
        for (name, kind) in [
            (".", io::ErrorKind::IsADirectory),
            ("none/a", io::ErrorKind::NotFound),
            ("dangling", io::ErrorKind::NotFound),
        ] {
            let path = folder.path().join(name);
            assert_eq!(check_output(&path).unwrap_err().kind(), kind, "{name}");
            assert_eq!(write_output(&path, b"x", 0o600).unwrap_err().kind(), kind, "{name}");
        }
        assert!(folder.path().join("dangling").is_symlink());
    }
}
