//! Listening sockets: one of each address for each event loop, so that no loop waits for another to accept.

use crate::config::{Address, Config};
use crate::error::Error;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, ipproto, sockopt,
};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Connections that may wait to be accepted (`net.core.somaxconn` may allow fewer).
const BACKLOG: i32 = 4096;
/// Eight of these fill a packet as the kernel makes them for the device to cut: of 64 KiB less what it keeps for headers
/// (`MAX_TCP_HEADER` + 1: 321 bytes, or 385 where cache lines have 128).
///
/// `sendfile` gives TCP 64 KiB at a time. At an MTU of 9000 seven of the largest segments would be a packet, and every third time
/// what is left over a packet of one segment, which costs as much as another.
const SEGMENT_BYTES_MAX: u16 = (u16::MAX - 384) / 8;

/// A listening socket of one event loop.
#[derive(Debug, Clone)]
pub struct Listener {
    socket: Arc<OwnedFd>,
    /// Whether other loops wait at the same socket.
    pub is_shared: bool,
    /// Whether what is said there is encrypted.
    pub is_tls: bool,
}

/// A connection that has been accepted.
#[derive(Debug)]
pub struct Accepted {
    /// Its socket, non-blocking.
    pub socket: OwnedFd,
    /// Who is at the other end; `None` behind a Unix socket.
    pub peer: Option<SocketAddr>,
    /// Whether what is said is encrypted.
    pub is_tls: bool,
}

/// All listening sockets of a server.
#[derive(Debug)]
pub struct Listeners {
    /// One list for each event loop.
    pub by_worker: Vec<Vec<Listener>>,
    /// Where they really listen, and whether for TLS: port 0 has become one.
    pub addresses: Vec<(Address, bool)>,
    files: Vec<SocketFile>,
}

/// The file of a Unix socket, gone when the server is.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listeners {
    /// Listens everywhere that `config` says, for so many event loops.
    pub fn open(config: &Config, workers: usize) -> Result<Self, Error> {
        let plain = config.listen.iter().map(|address| (address, false));
        let tls = config.tls.iter().flat_map(|tls| &tls.listen).map(|address| (address, true));
        let all: Vec<_> = plain.chain(tls).collect();
        if all.is_empty() {
            return Err(Error::NoAddress);
        }
        let mut listeners =
            Self { by_worker: vec![Vec::new(); workers], addresses: Vec::new(), files: Vec::new() };
        for (address, is_tls) in all {
            let failed = |source| Error::Listen { address: address.clone(), source };
            match address {
                Address::Tcp(address) => listeners.open_tcp(*address, is_tls, config)?,
                Address::Unix(path) => listeners.open_unix(path, is_tls).map_err(failed)?,
                Address::Systemd => listeners.take_from_systemd(is_tls).map_err(failed)?,
            }
        }
        Ok(listeners)
    }

    fn open_tcp(
        &mut self,
        address: SocketAddr,
        is_tls: bool,
        config: &Config,
    ) -> Result<(), Error> {
        let failed = |source: io::Error| Error::Listen { address: Address::Tcp(address), source };
        let mut address = address;
        // Another server of the same user would share the port unasked; a socket that does not share finds it taken.
        let mut first = listen_tcp(address, false);
        if first.as_ref().is_err_and(is_without_ipv6) && address.ip() == Ipv6Addr::UNSPECIFIED {
            // Every address of a machine without IPv6.
            address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port());
            first = listen_tcp(address, false);
        }
        drop(first.map_err(failed)?);
        for index in 0..self.by_worker.len() {
            let socket = listen_tcp(address, self.by_worker.len() > 1).map_err(failed)?;
            if let Some(name) = &config.congestion {
                sockopt::set_tcp_congestion(&socket, name).map_err(|errno| Error::Congestion {
                    name: name.clone(),
                    source: errno.into(),
                })?;
            }
            let bound = rustix::net::getsockname(&socket).map_err(|errno| failed(errno.into()))?;
            address = SocketAddr::try_from(bound).map_err(|errno| failed(errno.into()))?;
            self.by_worker[index].push(Listener {
                socket: Arc::new(socket),
                is_shared: false,
                is_tls,
            });
        }
        self.addresses.push((Address::Tcp(address), is_tls));
        Ok(())
    }

    fn open_unix(&mut self, path: &Path, is_tls: bool) -> io::Result<()> {
        let address = SocketAddrUnix::new(path)?;
        let socket = socket(AddressFamily::UNIX)?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) if is_abandoned(path, &address) => {
                std::fs::remove_file(path)?;
                rustix::net::bind(&socket, &address)?;
            }
            Err(Errno::ADDRINUSE) if !is_socket(path) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "a file that is no socket has that name",
                ));
            }
            bound => bound?,
        }
        self.files.push(SocketFile(path.to_owned()));
        // Who may reach it is its folder's to say.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
        rustix::net::listen(&socket, BACKLOG)?;
        self.share(socket, Address::Unix(path.to_owned()), is_tls);
        Ok(())
    }

    /// The sockets that the service manager has opened: one of each for all loops.
    fn take_from_systemd(&mut self, is_tls: bool) -> io::Result<()> {
        let mut handed = listenfd::ListenFd::from_env();
        if handed.len() == 0 {
            return Err(io::Error::other(
                "nothing more was handed over (LISTEN_FDS): start it by its .socket unit, and take its sockets once, for HTTP or for TLS",
            ));
        }
        for index in 0..handed.len() {
            let (socket, address): (OwnedFd, Address) =
                if let Ok(Some(tcp)) = handed.take_tcp_listener(index) {
                    set_inherited(&tcp)?;
                    let address = Address::Tcp(tcp.local_addr()?);
                    (tcp.into(), address)
                } else if let Some(unix) = handed.take_unix_listener(index)? {
                    (unix.into(), Address::Systemd)
                } else {
                    continue;
                };
            rustix::io::ioctl_fionbio(&socket, true)?;
            self.share(socket, address, is_tls);
        }
        Ok(())
    }

    /// One socket for all loops.
    fn share(&mut self, socket: OwnedFd, address: Address, is_tls: bool) {
        let socket = Arc::new(socket);
        let is_shared = self.by_worker.len() > 1;
        for listeners in &mut self.by_worker {
            listeners.push(Listener { socket: Arc::clone(&socket), is_shared, is_tls });
        }
        self.addresses.push((address, is_tls));
    }
}

impl Listener {
    /// The next connection; `None` when nobody waits.
    pub fn accept(&self) -> io::Result<Option<Accepted>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            match rustix::net::acceptfrom_with(&self.socket, flags) {
                Ok((socket, peer)) => {
                    return Ok(Some(Accepted {
                        socket,
                        peer: peer.and_then(inet),
                        is_tls: self.is_tls,
                    }));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // It was gone before it was accepted: the next one.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// An address as people write it: IPv4 on an IPv6 socket as IPv4.
fn inet(address: SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(address).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = if family == AddressFamily::UNIX { None } else { Some(ipproto::TCP) };
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, protocol)?)
}

fn listen_tcp(address: SocketAddr, is_one_of_many: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket(family)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, is_one_of_many)?;
    if address.is_ipv6() {
        // An unspecified address means IPv4 too, whatever net.ipv6.bindv6only says.
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    set_inherited(&socket)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Sets what accepted sockets shall have from a socket that listens.
fn set_inherited(socket: impl AsFd) -> io::Result<()> {
    // The last, partial packet of a response must not wait for the peer's acknowledgement.
    sockopt::set_tcp_nodelay(&socket, true)?;
    // Nor does one byte of urgent data make what comes behind it invisible.
    sockopt::set_socket_oobinline(&socket, true)?;
    // It spares work and no more: a kernel that refuses it for sockets of another kind (MPTCP, by systemd) serves all the same.
    let _ = haul_sys::sockopt::set_max_segment(&socket, SEGMENT_BYTES_MAX);
    Ok(())
}

fn is_without_ipv6(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

/// Whether a socket's file is left over from a server that is gone.
fn is_abandoned(path: &Path, address: &SocketAddrUnix) -> bool {
    is_socket(path)
        && socket(AddressFamily::UNIX)
            .is_ok_and(|socket| rustix::net::connect(&socket, address) == Err(Errno::CONNREFUSED))
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_sys::sockopt::max_segment;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn segments_of_accepted_connections_fill_a_packet() {
        let socket = listen_tcp("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        let listener = Listener { socket: Arc::new(socket), is_shared: false, is_tls: false };
        let client = TcpStream::connect(address).unwrap();
        let accepted = listener.accept().unwrap().unwrap();
        // TCP's options are part of it: at most 40 bytes.
        let expected = u32::from(SEGMENT_BYTES_MAX) - 40..=u32::from(SEGMENT_BYTES_MAX);
        for socket in [accepted.socket.as_fd(), client.as_fd()] {
            let segment = max_segment(socket).unwrap();
            assert!(expected.contains(&segment), "{segment}");
        }
        let usual = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(usual.local_addr().unwrap()).unwrap();
        assert!(max_segment(&client).unwrap() > *expected.end(), "loopback carries more");
    }
}
