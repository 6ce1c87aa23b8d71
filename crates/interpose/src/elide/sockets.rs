//! The sockets to which pages of leased files were sent. The broker reads the entries: it returns a
//! lease only after the peers of these sockets acknowledged the pages.

use crate::descriptors::TRACKED;
use crate::kernel;
use crate::tally;
use haul_tally::{NotElided, SOCKET_FILES, SOCKETS, header, socket_entry, socket_entry_at};
use libc::c_int;
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

use super::files::File;

/// Places that are tried for a new entry.
const TRIES_MAX: usize = 64;
/// Value of an entry's cookie while a process fills the entry.
const FILLING: u64 = 1;

/// The number of each socket (`SO_COOKIE`) whose facts were checked; 0: none.
static COOKIES: [AtomicU64; TRACKED] = [const { AtomicU64::new(0) }; TRACKED];
/// Each socket's entry in the tally, plus 1; 0: none.
static ENTRIES: [AtomicU32; TRACKED] = [const { AtomicU32::new(0) }; TRACKED];
/// Where the search for a free entry begins.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A TCP socket to which pages may be sent.
pub struct Socket {
    fd: c_int,
    cookie: u64,
    peer_port: u16,
}

/// Checks a socket: that it is in the network namespace of the broker and connected, and that the
/// peer is not on this host if that is forbidden.
pub fn socket(fd: c_int) -> Result<Socket, NotElided> {
    let index = usize::try_from(fd).ok().filter(|&index| index < TRACKED);
    let index = index.ok_or(NotElided::Busy)?;
    let cookie = kernel::cookie(fd).ok_or(NotElided::Call)?;
    if COOKIES[index].load(Relaxed) != cookie {
        if !kernel::is_tcp(fd) {
            return Err(NotElided::Call);
        }
        if kernel::network(fd) != Some(tally::header(header::NETWORK)) {
            return Err(NotElided::OtherNamespace);
        }
        ENTRIES[index].store(0, Relaxed);
        COOKIES[index].store(cookie, Relaxed);
    }
    // A program can connect a socket again, so the peer is read for each call.
    let peer = kernel::peer(fd).ok_or(NotElided::Call)?;
    if tally::header(header::IS_STRICT) == 1 && peer.is_local(fd) {
        return Err(NotElided::LocalPeer);
    }
    Ok(Socket { fd, cookie, peer_port: peer.port() })
}

/// Ends the calls of an earlier program of this process, which another thread of the program was in
/// when a thread called `exec`.
pub fn begin() {
    for entry in 0..SOCKETS {
        let Some(owner) = word(entry, socket_entry::PROCESS) else { return };
        if owner.load(Relaxed) & socket_entry::PROCESS_MASK == u64::from(tally::process())
            && let Some(calls) = word(entry, socket_entry::CALLS)
        {
            calls.store(0, SeqCst);
        }
    }
}

/// Marks the entries of a socket that ends its connection, and possibly begins another. The kernel
/// counts the bytes of each connection from 0.
pub fn before_connect(fd: c_int) {
    // Only connected sockets have entries.
    let Some(cookie) = kernel::peer(fd).and_then(|_| kernel::cookie(fd)) else { return };
    for entry in 0..SOCKETS {
        if word(entry, socket_entry::COOKIE).is_some_and(|word| word.load(SeqCst) == cookie + 1)
            && let Some(owner) = word(entry, socket_entry::PROCESS)
        {
            owner.fetch_or(socket_entry::CONNECTED_AGAIN, SeqCst);
        }
    }
}

/// A call that sends pages. The broker waits for its end.
pub struct Sending {
    calls: &'static AtomicU64,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.calls.fetch_sub(1, SeqCst);
    }
}

impl Socket {
    /// Enters that pages of a file are about to be sent. `None` if the lease of the file does not
    /// stand, or if the tables are full.
    pub fn begin(&self, file: &File) -> Option<Sending> {
        let entry = self.entry()?;
        let calls = word(entry, socket_entry::CALLS)?;
        calls.fetch_add(1, SeqCst);
        let sending = Sending { calls };
        // The broker frees an entry only after it found no call, so the entry is still this
        // socket's, or was freed before.
        let is_same = word(entry, socket_entry::COOKIE)?.load(SeqCst) == self.cookie + 1;
        if !is_same || !Self::add_file(entry, file.entry()) {
            return None;
        }
        // The broker marks the file before it looks at the sockets, so either this check fails, or
        // the broker finds the entry.
        file.is_ready().then_some(sending)
    }

    /// The entry of this socket, a new one if there is none.
    fn entry(&self) -> Option<usize> {
        let owner = u64::from(tally::process()) | (u64::from(self.peer_port) << 32);
        let local_port = u64::from(u16::MAX) << socket_entry::LOCAL_PORT_SHIFT;
        let place = ENTRIES.get(usize::try_from(self.fd).ok()?)?;
        // An entry of the parent is not used after `fork`, because the broker checks whether the
        // process of a call runs. An entry of an earlier connection of the socket stays, because
        // the earlier peer possibly did not read all pages.
        if let Some(known) = (place.load(Relaxed) as usize).checked_sub(1)
            && word(known, socket_entry::COOKIE)?.load(SeqCst) == self.cookie + 1
            && word(known, socket_entry::PROCESS)?.load(SeqCst) & !local_port == owner
        {
            return Some(known);
        }
        for _ in 0..TRIES_MAX {
            let entry = NEXT.fetch_add(1, Relaxed) as usize % SOCKETS;
            let cookie = word(entry, socket_entry::COOKIE)?;
            if cookie.compare_exchange(0, FILLING, SeqCst, Relaxed).is_ok() {
                word(entry, socket_entry::FILES)?.store(0, SeqCst);
                let port = u64::from(kernel::local_port(self.fd).unwrap_or(0));
                let ports = owner | port << socket_entry::LOCAL_PORT_SHIFT;
                word(entry, socket_entry::PROCESS)?.store(ports, SeqCst);
                cookie.store(self.cookie + 1, SeqCst);
                place.store(entry as u32 + 1, Relaxed);
                return Some(entry);
            }
        }
        None
    }

    /// Adds a file to an entry. Fails if the entry is full: a peer can have pages that it did
    /// not read, so the broker alone removes files.
    fn add_file(entry: usize, file: u16) -> bool {
        let Some(files) = word(entry, socket_entry::FILES) else { return false };
        let lane = u64::from(file) + 1;
        loop {
            let packed = files.load(SeqCst);
            let lanes = (0..SOCKET_FILES).map(|index| packed >> (16 * index) & 0xFFFF);
            if lanes.clone().any(|known| known == lane) {
                return true;
            }
            let Some(free) = lanes.clone().position(|known| known == 0) else { return false };
            let changed = packed | (lane << (16 * free));
            if files.compare_exchange(packed, changed, SeqCst, SeqCst).is_ok() {
                return true;
            }
        }
    }
}

fn word(entry: usize, position: usize) -> Option<&'static AtomicU64> {
    tally::word(socket_entry_at(entry) + position)
}
