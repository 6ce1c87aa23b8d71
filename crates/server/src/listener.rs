//! Listening sockets: one per address and event loop (`SO_REUSEPORT`), so that loops accept
//! independently, or one per address, from which all loops accept.

use crate::address::Address;
use crate::error::Error;
use crate::proxy_protocol::Fields;
use crate::start_check::{check_socket, not_a_socket};
use crate::unix_address::{abstract_name, to_socket_address};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, ipproto, sockopt,
};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The accept queue's length; `net.core.somaxconn` may limit it further.
const BACKLOG: i32 = 4096;
/// The largest segment of accepted connections, in bytes (`TCP_MAXSEG`): eight of them fill one
/// packet of the kernel's segmentation offload, 64 KiB less its headers (`MAX_TCP_HEADER` + 1: 321
/// bytes, or 385 with cache lines of 128 bytes).
///
/// `sendfile` hands TCP 64 KiB at a time. At an MTU of 9000, seven of the largest segments would
/// make a packet, and the rest would leave every third time in a packet of one segment, at the same
/// cost.
const SEGMENT_BYTES_MAX: u16 = (u16::MAX - 384) / 8;

/// The mode of a Unix socket's file. The folder's permissions decide who may connect.
const SOCKET_MODE: u32 = 0o666;

/// An address to listen on, and its protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    /// The address.
    pub address: Address,
    /// Whether clients speak TLS there.
    pub is_tls: bool,
}

/// The listening sockets that a service asks for.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ListenSettings {
    /// The addresses.
    pub addresses: Vec<ListenAddress>,
    /// The congestion control of accepted connections; `None` for the host's default.
    pub congestion: Option<String>,
    /// Whether all event loops accept from one socket, so that a connection does not wait for a
    /// full or busy loop while another loop is free.
    pub is_shared: bool,
    /// The keep-alive of accepted connections; `None` if they are not probed.
    pub keep_alive: Option<KeepAlive>,
    /// Listening sockets of another process, by the addresses in the configuration of that process.
    /// All event loops share these sockets, which are used in place of new sockets.
    pub inherited: Vec<(Address, Arc<OwnedFd>)>,
    /// The metrics' listening socket of that process.
    pub inherited_metrics: Option<Arc<TcpListener>>,
    /// The mode of the files of Unix sockets; `None`: every user may connect who has access to the
    /// directory (0666).
    pub socket_mode: Option<u32>,
    /// Whether addresses at which another process listens are left out
    /// ([`Listeners::used_addresses`]).
    pub leaves_out_used: bool,
    /// Whether the service is only checked. Then Unix sockets are not made, and the sockets of
    /// systemd may be missing.
    pub only_checks: bool,
}

impl ListenSettings {
    /// Sockets at these addresses, one for each event loop.
    pub fn new(addresses: impl Into<Vec<ListenAddress>>) -> Self {
        Self { addresses: addresses.into(), ..Self::default() }
    }

    /// Sets the congestion control of accepted connections.
    #[must_use]
    pub fn with_congestion(mut self, name: Option<&str>) -> Self {
        self.congestion = name.map(Into::into);
        self
    }

    /// Sets the listening sockets of another process, and its metrics' listening socket.
    #[must_use]
    pub fn with_inherited(
        mut self,
        inherited: Vec<(Address, Arc<OwnedFd>)>,
        metrics: Option<Arc<TcpListener>>,
    ) -> Self {
        self.inherited = inherited;
        self.inherited_metrics = metrics;
        self
    }

    /// Refuses two listening sockets at one address, with the addresses of the service's `others`,
    /// such as the metrics. The kernel also refuses the second socket, but does not report whose
    /// the first socket is.
    pub fn check_distinct(&self, others: impl IntoIterator<Item = Address>) -> Result<(), Error> {
        let all = self.addresses.iter().map(|listen| listen.address.clone()).chain(others);
        let mut earlier: Vec<Address> = Vec::new();
        for address in all {
            if let Some(other) = earlier.iter().find(|other| address.overlaps(other)) {
                let other = other.clone();
                return Err(Error::ListenTwice { address, other });
            }
            earlier.push(address);
        }
        Ok(())
    }

    /// Sets the keep-alive of accepted connections.
    #[must_use]
    pub fn with_keep_alive(mut self, keep_alive: KeepAlive) -> Self {
        self.keep_alive = Some(keep_alive);
        self
    }

    /// Sets the mode of the files of Unix sockets.
    #[must_use]
    pub fn with_socket_mode(mut self, mode: Option<u32>) -> Self {
        self.socket_mode = mode;
        self
    }

    /// Sets whether addresses at which another process listens are left out.
    #[must_use]
    pub fn with_used_left_out(mut self, leaves_out_used: bool) -> Self {
        self.leaves_out_used = leaves_out_used;
        self
    }

    /// Sets whether the service is only checked.
    #[must_use]
    pub fn with_only_checks(mut self, only_checks: bool) -> Self {
        self.only_checks = only_checks;
        self
    }

    /// Sets whether all event loops accept from one socket.
    #[must_use]
    pub fn with_shared(mut self, is_shared: bool) -> Self {
        self.is_shared = is_shared;
        self
    }
}

/// When a silent connection is probed (TCP keep-alive), and when a connection whose peer does not
/// answer is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// The time without a byte before the first probe.
    pub time: Duration,
    /// The interval of probes that are not answered.
    pub interval: Duration,
    /// The number of unanswered probes after which the connection fails.
    pub probes: u32,
    /// The time for which sent bytes may stay unacknowledged (`TCP_USER_TIMEOUT`), which also
    /// replaces the number of probes; `None` for the host's limit.
    pub unacknowledged: Option<Duration>,
}

impl KeepAlive {
    /// Sets the keep-alive of a TCP socket. Sockets that a listening socket accepts inherit its
    /// keep-alive.
    pub fn apply_to(self, socket: impl AsFd) -> io::Result<()> {
        let socket = socket.as_fd();
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, self.time)?;
        sockopt::set_tcp_keepintvl(socket, self.interval)?;
        sockopt::set_tcp_keepcnt(socket, self.probes)?;
        if let Some(time) = self.unacknowledged {
            let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
            sockopt::set_tcp_user_timeout(socket, time_ms)?;
        }
        Ok(())
    }
}

/// A listening socket of one event loop.
#[derive(Debug, Clone)]
pub struct Listener {
    socket: Arc<OwnedFd>,
    /// Whether other event loops poll the same socket.
    pub is_shared: bool,
    /// Whether clients speak TLS there.
    pub is_tls: bool,
    /// The place of the socket's address in the list of listen addresses.
    pub index: usize,
}

/// An accepted connection.
#[derive(Debug)]
pub struct Accepted {
    /// The socket, non-blocking.
    pub socket: OwnedFd,
    /// The peer's address; `None` for a Unix socket.
    pub peer: Option<SocketAddr>,
    /// Whether the client speaks TLS.
    pub is_tls: bool,
    /// The listen address at which the connection was accepted, by its place in the list.
    pub listener: usize,
    /// The further facts that a trusted proxy sent about the connection; `None` for a connection of
    /// another peer.
    pub named: Option<Box<NamedBy>>,
}

/// The facts that a trusted proxy sent about a connection ([`crate::proxy_protocol`]).
#[derive(Debug, Default)]
pub struct NamedBy {
    /// The address that the client connected to.
    pub destination: Option<SocketAddr>,
    /// The additional fields.
    pub fields: Fields,
}

impl Accepted {
    /// A connection that was accepted elsewhere. `peer` is the client's address.
    pub fn new(socket: OwnedFd, peer: Option<SocketAddr>) -> Self {
        Self { socket, peer, is_tls: false, listener: 0, named: None }
    }
}

/// All listening sockets of a service.
#[derive(Debug)]
pub struct Listeners {
    by_loop: Vec<Vec<Listener>>,
    addresses: Vec<ListenAddress>,
    own_ports: Vec<u16>,
    files: Vec<SocketFile>,
    /// Files of another process, which belong to this process once it runs.
    inherited_files: Vec<PathBuf>,
    used_addresses: Vec<Address>,
}

/// The file of a Unix socket. Dropping it removes the file, unless another process replaced the
/// file.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// The open file, without the right to use it. While the file is open, another file cannot get
    /// its inode.
    file: Option<OwnedFd>,
    is_left: bool,
}

impl SocketFile {
    /// The file that has this path now.
    fn at(path: PathBuf) -> Self {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty()).ok();
        Self { path, file, is_left: false }
    }

    /// Whether the path leads to this file.
    fn is_in_place(&self) -> bool {
        let (Some(file), Ok(now)) = (&self.file, std::fs::symlink_metadata(&self.path)) else {
            return false;
        };
        rustix::fs::fstat(file)
            .is_ok_and(|file| (file.st_dev, file.st_ino) == (now.dev(), now.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.is_left && self.is_in_place() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listeners {
    /// Opens the listening sockets of so many event loops.
    ///
    /// The congestion control is set before `listen`, because a socket that inherits BBR stays
    /// paced when it is changed later.
    pub fn open(settings: &ListenSettings, loops: usize) -> Result<Self, Error> {
        if settings.addresses.is_empty() {
            return Err(Error::NoAddress);
        }
        let mut listeners = Self {
            by_loop: vec![Vec::new(); loops],
            addresses: Vec::new(),
            own_ports: Vec::new(),
            files: Vec::new(),
            inherited_files: Vec::new(),
            used_addresses: Vec::new(),
        };
        for (index, listen) in settings.addresses.iter().enumerate() {
            let failed = |error| Error::Listen { address: listen.address.clone(), error };
            if listeners.inherit(settings, listen, index).map_err(failed)? {
                continue;
            }
            let opened = match &listen.address {
                Address::Tcp(address) => {
                    listeners.open_tcp(*address, listen.is_tls, index, settings)
                }
                Address::Unix(path) => {
                    listeners.open_unix(path, listen.is_tls, index, settings).map_err(failed)
                }
                // systemd passes its sockets to the service, and not to a check.
                Address::Systemd if settings.only_checks => {
                    listeners.addresses.push(listen.clone());
                    Ok(())
                }
                Address::Systemd => {
                    listeners.take_from_systemd(listen.is_tls, index).map_err(failed)
                }
            };
            match opened {
                Err(error) if settings.leaves_out_used && error.is_address_in_use() => {
                    listeners.used_addresses.push(listen.address.clone());
                    listeners.addresses.push(listen.clone());
                }
                opened => opened?,
            }
        }
        if let Some(keep_alive) = settings.keep_alive {
            // All sockets of an address, including the sockets of systemd and of another process.
            for listener in listeners.by_loop.iter().flatten() {
                // A Unix socket does not have a congestion control.
                let _ = keep_alive.apply_to(&listener.socket);
            }
        }
        Ok(listeners)
    }

    /// Takes the sockets of another process for an address; false if it has none.
    fn inherit(
        &mut self,
        settings: &ListenSettings,
        listen: &ListenAddress,
        index: usize,
    ) -> io::Result<bool> {
        let of_address = settings.inherited.iter().filter(|(other, _)| *other == listen.address);
        let mut has_any = false;
        for (address, socket) in of_address {
            let bound = rustix::net::getsockname(socket)?;
            let bound = SocketAddr::try_from(bound).map_or(address.clone(), Address::Tcp);
            match (address, &bound) {
                (Address::Unix(path), _) if abstract_name(path).is_none() => {
                    if let Some(mode) = settings.socket_mode {
                        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
                    }
                    self.inherited_files.push(path.clone());
                }
                (_, Address::Tcp(bound)) => self.own_ports.push(bound.port()),
                _ => {}
            }
            self.share(socket, bound, listen.is_tls, index);
            has_any = true;
        }
        Ok(has_any)
    }

    /// The sockets that all event loops share, with the places of their addresses.
    pub fn sockets(&self) -> Vec<(usize, Weak<OwnedFd>)> {
        let first = self.by_loop.first().into_iter().flatten();
        first.map(|listener| (listener.index, Arc::downgrade(&listener.socket))).collect()
    }

    /// Makes the files of inherited Unix sockets this process's own.
    pub fn own_files(&mut self) {
        self.files.extend(self.inherited_files.drain(..).map(SocketFile::at));
    }

    /// Leaves the files of Unix sockets to the process that took them over.
    pub fn leave_files(&mut self, is_left: impl Fn(&Path) -> bool) {
        for file in &mut self.files {
            file.is_left |= is_left(&file.path);
        }
    }

    /// The addresses that are left out: another process listens there.
    pub fn used_addresses(&self) -> &[Address] {
        &self.used_addresses
    }

    /// The addresses that are listened on, and the addresses that are left out. A configured port 0
    /// is replaced by the port that the kernel chose.
    pub fn addresses(&self) -> &[ListenAddress] {
        &self.addresses
    }

    /// The TCP ports of the listening sockets that this process made. Sockets of systemd belong to
    /// another control group.
    pub fn own_ports(&self) -> &[u16] {
        &self.own_ports
    }

    /// Takes the sockets of each event loop. Only the loops hold the sockets then, so that the
    /// sockets close when the loops drain.
    pub fn take(&mut self) -> Vec<Vec<Listener>> {
        std::mem::take(&mut self.by_loop)
    }

    fn open_tcp(
        &mut self,
        mut address: SocketAddr,
        is_tls: bool,
        index: usize,
        settings: &ListenSettings,
    ) -> Result<(), Error> {
        let failed =
            |address, error: io::Error| Error::Listen { address: Address::Tcp(address), error };
        // Another server of this user could share the port by SO_REUSEPORT. A first socket without
        // the option finds out whether the port is taken.
        // The first socket does not listen, because a client that connects would be lost.
        let is_free = |address| {
            let socket = tcp_socket(address, false)?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        };
        let mut checked = is_free(address);
        let is_any = address.ip() == Ipv6Addr::UNSPECIFIED;
        if is_any && checked.as_ref().is_err_and(is_without_ipv6) {
            // The IPv4 equivalent on a host without IPv6.
            address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port());
            checked = is_free(address);
        }
        let free = checked.map_err(|error| failed(address, error))?;
        let set_congestion = |socket: &OwnedFd| match &settings.congestion {
            Some(name) => sockopt::set_tcp_congestion(socket, name)
                .map_err(|errno| Error::Congestion { name: name.clone(), error: errno.into() }),
            None => Ok(()),
        };
        if settings.only_checks {
            set_congestion(&free)?;
            self.own_ports.push(address.port());
            self.addresses.push(ListenAddress { address: Address::Tcp(address), is_tls });
            return Ok(());
        }
        drop(free);
        let is_one_of_many = self.by_loop.len() > 1 && !settings.is_shared;
        let mut open = || {
            let socket =
                tcp_socket(address, is_one_of_many).map_err(|error| failed(address, error))?;
            set_congestion(&socket)?;
            listen(&socket, address).map_err(|error| failed(address, error))?;
            // All sockets have the port that the kernel chose.
            let bound = rustix::net::getsockname(&socket).and_then(SocketAddr::try_from);
            address = bound.map_err(|errno| failed(address, errno.into()))?;
            Ok((socket, Address::Tcp(address)))
        };
        if settings.is_shared {
            let (socket, bound) = open()?;
            self.own_ports.push(address.port());
            self.share(&Arc::new(socket), bound, is_tls, index);
            return Ok(());
        }
        for listeners in &mut self.by_loop {
            let socket = Arc::new(open()?.0);
            listeners.push(Listener { socket, is_shared: false, is_tls, index });
        }
        self.own_ports.push(address.port());
        self.addresses.push(ListenAddress { address: Address::Tcp(address), is_tls });
        Ok(())
    }

    fn open_unix(
        &mut self,
        path: &Path,
        is_tls: bool,
        index: usize,
        settings: &ListenSettings,
    ) -> io::Result<()> {
        let address = to_socket_address(path)?;
        let socket = socket(AddressFamily::UNIX)?;
        if abstract_name(path).is_some() {
            if settings.socket_mode.is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "an abstract socket has no file and so no mode: name a file, or set no mode",
                ));
            }
            rustix::net::bind(&socket, &address)?;
            if settings.only_checks {
                let address = Address::Unix(path.to_owned());
                self.addresses.push(ListenAddress { address, is_tls });
                return Ok(());
            }
            return self.share_unix(socket, path, is_tls, index);
        }
        if settings.only_checks {
            check_socket(path)?;
            self.addresses.push(ListenAddress { address: Address::Unix(path.to_owned()), is_tls });
            return Ok(());
        }
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) if is_abandoned(path, &address) => {
                std::fs::remove_file(path)?;
                rustix::net::bind(&socket, &address)?;
            }
            Err(Errno::ADDRINUSE) if !is_socket(path) => {
                return Err(not_a_socket());
            }
            bound => bound?,
        }
        self.files.push(SocketFile::at(path.to_owned()));
        // Nothing can connect before `listen`.
        let mode = settings.socket_mode.unwrap_or(SOCKET_MODE);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        self.share_unix(socket, path, is_tls, index)
    }

    fn share_unix(
        &mut self,
        socket: OwnedFd,
        path: &Path,
        is_tls: bool,
        index: usize,
    ) -> io::Result<()> {
        rustix::net::listen(&socket, BACKLOG)?;
        self.share(&Arc::new(socket), Address::Unix(path.to_owned()), is_tls, index);
        Ok(())
    }

    /// Takes the sockets that systemd passes on; all event loops share each of them.
    fn take_from_systemd(&mut self, is_tls: bool, index: usize) -> io::Result<()> {
        let mut handed = listenfd::ListenFd::from_env();
        if handed.len() == 0 {
            return Err(io::Error::other(
                "nothing more was handed over (LISTEN_FDS): start it by its .socket unit, and name \
                 systemd once",
            ));
        }
        for at in 0..handed.len() {
            let (socket, address): (OwnedFd, Address) =
                if let Ok(Some(tcp)) = handed.take_tcp_listener(at) {
                    set_inherited(&tcp)?;
                    let address = Address::Tcp(tcp.local_addr()?);
                    (tcp.into(), address)
                } else if let Some(unix) = handed.take_unix_listener(at)? {
                    (unix.into(), Address::Systemd)
                } else {
                    continue;
                };
            rustix::io::ioctl_fionbio(&socket, true)?;
            self.share(&Arc::new(socket), address, is_tls, index);
        }
        Ok(())
    }

    /// Registers a socket that all event loops poll.
    fn share(&mut self, socket: &Arc<OwnedFd>, address: Address, is_tls: bool, index: usize) {
        let is_shared = self.by_loop.len() > 1;
        for listeners in &mut self.by_loop {
            listeners.push(Listener { socket: Arc::clone(socket), is_shared, is_tls, index });
        }
        self.addresses.push(ListenAddress { address, is_tls });
    }
}

impl Listener {
    /// A listening socket of one event loop alone, for clients without TLS.
    pub fn from_tcp(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let socket = Arc::new(OwnedFd::from(listener));
        Ok(Self { socket, is_shared: false, is_tls: false, index: 0 })
    }

    /// Accepts a connection; `None` if the queue is empty.
    pub fn accept(&self) -> io::Result<Option<Accepted>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            match rustix::net::acceptfrom_with(&self.socket, flags) {
                Ok((socket, peer)) => {
                    return Ok(Some(Accepted {
                        is_tls: self.is_tls,
                        listener: self.index,
                        ..Accepted::new(socket, peer.and_then(inet))
                    }));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // The peer closed it before it was accepted.
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

/// The peer's address; an IPv4-mapped IPv6 address as IPv4.
fn inet(address: SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(address).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = if family == AddressFamily::UNIX { None } else { Some(ipproto::TCP) };
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, protocol)?)
}

/// A TCP socket with the options that apply before `bind`.
fn tcp_socket(address: SocketAddr, is_one_of_many: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket(family)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, is_one_of_many)?;
    if address.is_ipv6() {
        // An unspecified address includes IPv4, independent of net.ipv6.bindv6only.
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    set_inherited(&socket)?;
    Ok(socket)
}

fn listen(socket: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    rustix::net::bind(socket, &address)?;
    Ok(rustix::net::listen(socket, BACKLOG)?)
}

/// Sets the options that accepted sockets inherit.
fn set_inherited(socket: impl AsFd) -> io::Result<()> {
    // The last, partial packet of a response must not wait for the peer's acknowledgement.
    sockopt::set_tcp_nodelay(&socket, true)?;
    // A byte of urgent data is read like any other byte, so that it does not end a read early.
    sockopt::set_socket_oobinline(&socket, true)?;
    // An optimisation: sockets of other protocols from systemd (MPTCP) may refuse it.
    let _ = haul_sys::sockopt::set_max_segment(&socket, SEGMENT_BYTES_MAX);
    Ok(())
}

fn is_without_ipv6(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

/// Whether a socket file is left over from a process that ended.
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
    fn an_accepted_connection_inherits_the_keep_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let keep_alive = KeepAlive {
            time: Duration::from_secs(70),
            interval: Duration::from_secs(11),
            probes: 7,
            unacknowledged: Some(Duration::from_millis(12_345)),
        };
        keep_alive.apply_to(&listener).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert!(sockopt::socket_keepalive(&accepted).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&accepted).unwrap(), keep_alive.time);
        assert_eq!(sockopt::tcp_keepintvl(&accepted).unwrap(), keep_alive.interval);
        assert_eq!(sockopt::tcp_keepcnt(&accepted).unwrap(), 7);
        assert_eq!(sockopt::tcp_user_timeout(&accepted).unwrap(), 12_345);
    }

    #[test]
    fn eight_segments_of_an_accepted_connection_fill_a_packet() {
        let address = "127.0.0.1:0".parse().unwrap();
        let socket = tcp_socket(address, false).unwrap();
        listen(&socket, address).unwrap();
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        let listener = Listener::from_tcp(TcpListener::from(socket)).unwrap();
        let client = TcpStream::connect(address).unwrap();
        let accepted = listener.accept().unwrap().unwrap();
        // The segment includes TCP options of at most 40 bytes.
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
