//! Checks whether a start can create its files, and creates no file. The user who checks a
//! configuration may differ from the user of the service, who could not open files of a check.

use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Checks whether the present user may create a file at this path.
pub fn check_creation(path: &Path) -> rustix::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    rustix::fs::accessat(CWD, folder, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
}

/// Checks whether a Unix socket can be made at this path. The error is
/// [`io::ErrorKind::AddrInUse`] if another process listens there.
pub fn check_socket(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => Err(not_a_socket()),
        Ok(_) => match probe(path) {
            // The process ended, or removed the file a moment ago.
            Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(check_creation(path)?),
            Ok(()) | Err(Errno::PROTOTYPE) => Err(io::ErrorKind::AddrInUse.into()),
            Err(errno) => Err(errno.into()),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(check_creation(path)?),
        Err(error) => Err(error),
    }
}

/// Connects a datagram socket to a path. The kernel answers `EPROTOTYPE` if a stream socket of
/// another process has the path (unix_find_other in net/unix/af_unix.c). Unlike a connection, that
/// process does not notice.
fn probe(path: &Path) -> rustix::io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// The error of a path at which something else than a socket lies.
pub fn not_a_socket() -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, "a file that is no socket has that name")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_is_checked_and_not_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        check_socket(&path).unwrap();
        assert!(!path.exists());
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(check_socket(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "the check connected to the service");
        drop(listener);
        check_socket(&path).unwrap();
        assert!(path.exists(), "the abandoned file is left to the service");
        let other = folder.path().join("other");
        std::fs::write(&other, "data").unwrap();
        assert_eq!(check_socket(&other).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let missing = folder.path().join("missing/socket");
        assert_eq!(check_socket(&missing).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
