//! The addresses of Unix sockets: the path of a file, or `@name`, a name in the abstract namespace.
//!
//! An abstract socket lacks a file. So every process of the network namespace may connect to the
//! socket, and the socket disappears with its process. systemd, `ss` and other proxies use
//! the same notation; `./@name` is a file.

use rustix::net::SocketAddrUnix;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The name of an abstract socket; `None` for a file.
pub fn abstract_name(path: &Path) -> Option<&[u8]> {
    path.as_os_str().as_bytes().strip_prefix(b"@")
}

/// The address for the kernel. Fails if the path or the name has more than 107 bytes.
pub fn to_socket_address(path: &Path) -> io::Result<SocketAddrUnix> {
    Ok(match abstract_name(path) {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(path)?,
    })
}
