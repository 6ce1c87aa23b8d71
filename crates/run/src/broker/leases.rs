//! The leases, and when each may be returned.

use super::connections::{AtPeer, Connection, Connections};
use haul_lab_sys::shared_counters::SharedCounters;
use haul_sys::lease::ReadLease;
use haul_tally::{
    FILES, NotElided, SOCKET_FILES, SOCKETS, file_entry, file_entry_at, header, socket_entry,
    socket_entry_at,
};
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::time::{ClockId, clock_gettime};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// The time without use after which a lease is returned.
const IDLE_MS_MAX: u64 = 2000;
/// The time that a lease is kept after the peer acknowledged everything. A peer on this host
/// acknowledges pages that it did not read yet, and they stay pages of the file until then.
const AFTER_ACKNOWLEDGEMENT: Duration = Duration::from_secs(1);
/// The time for which a file is not leased again after a program waited to write to it.
const AFTER_BREAK: Duration = Duration::from_secs(30);
/// Interval at which the pages in flight are looked at while a writer waits.
const WRITER_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which the pages in flight are looked at otherwise.
const INTERVAL: Duration = Duration::from_millis(250);
/// Interval at which entries of connections that are over are freed.
const TIDY_INTERVAL: Duration = Duration::from_secs(1);
/// The kernel's limit for returning a lease, if `/proc` does not show it.
const BREAK_TIME_DEFAULT: Duration = Duration::from_secs(45);

/// The leases of a run.
pub struct Leases {
    tally: SharedCounters,
    held: HashMap<u16, HeldLease>,
    /// Files that a program waited for, by device and inode.
    broken: HashMap<(u64, u64), Instant>,
    /// Where the search for a free entry begins.
    next: usize,
    /// The time that a peer has before it is reset, while a writer waits.
    reset_after: Duration,
    /// Whether all leases are to be returned.
    is_ending: bool,
    /// Whether the kernel lists connections. Without the list no lease could be returned.
    can_list: bool,
    tidied: Instant,
    /// Sockets of connections that were over when the entries were tidied.
    gone: HashSet<u64>,
    /// When the connections were last looked at.
    looked: Instant,
    /// The bytes that had arrived at each socket then.
    received: HashMap<u64, u64>,
}

/// A read lease on a file, which the broker holds.
struct HeldLease {
    lease: ReadLease,
    /// Device and inode.
    identity: (u64, u64),
    /// State of the file's entry while pages may be sent.
    state: u64,
    draining: Option<Draining>,
}

/// A lease that is returned as soon as no page is in flight.
struct Draining {
    since: Instant,
    /// Whether a writer waits.
    is_break: bool,
    /// What each entry of a socket with pages of the file waits for, by its position.
    goals: HashMap<usize, Goal>,
}

/// What one connection waits for.
#[derive(Clone, Copy, Default)]
struct Goal {
    /// Bytes that the peer has to acknowledge. Unknown until the connection was in a list.
    bytes: Option<u64>,
    /// Whether the connection was missing in the last list. A list can miss one.
    was_gone: bool,
    /// When the acknowledgement of the bytes was first seen.
    reached: Option<Instant>,
}

/// A socket's entry in the tally.
struct SocketEntry {
    index: usize,
    cookie: u64,
    files: u64,
    calls: u64,
    process: u32,
    local_port: u16,
    peer_port: u16,
    /// Whether the kernel's counts of the socket are of a later connection.
    is_connected_again: bool,
}

impl Leases {
    pub fn new(tally: SharedCounters) -> Self {
        let seconds = fs::read_to_string("/proc/sys/fs/lease-break-time")
            .ok()
            .and_then(|text| text.trim().parse().ok());
        Self {
            tally,
            held: HashMap::new(),
            broken: HashMap::new(),
            next: 0,
            reset_after: seconds.map_or(BREAK_TIME_DEFAULT, Duration::from_secs) / 2,
            is_ending: false,
            can_list: Connections::read().is_ok(),
            tidied: Instant::now(),
            gone: HashSet::new(),
            looked: Instant::now(),
            received: HashMap::new(),
        }
    }

    pub fn tally(&self) -> &SharedCounters {
        &self.tally
    }

    /// Shows the processes that the broker is there.
    pub fn give_sign_of_life(&self) {
        self.tally.get(header::HEARTBEAT_MS).store(now_ms(), SeqCst);
    }

    /// Whether no lease is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The time after which the pages in flight are looked at again. `None` if no lease waits for
    /// them.
    pub fn drain_interval(&self) -> Option<Duration> {
        let draining = self.held.values().filter_map(|held| held.draining.as_ref());
        let is_urgent = |draining: &Draining| draining.is_break;
        draining.map(|draining| if is_urgent(draining) { WRITER_INTERVAL } else { INTERVAL }).min()
    }

    /// Whether all leases are to be returned.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// Returns all leases as soon as possible, and grants no more.
    pub fn end(&mut self) {
        self.is_ending = true;
        super::stop_eliding(&self.tally);
        for (&number, held) in &mut self.held {
            begin_draining(&self.tally, number, held, false);
        }
    }

    /// Takes a lease of a file. Returns the number of the file's entry in the tally, and the state
    /// of the entry while the lease stands.
    pub fn grant(&mut self, file: OwnedFd) -> Result<(u16, u64), NotElided> {
        if self.is_ending || !self.can_list {
            return Err(NotElided::NoBroker);
        }
        let found = fstat(&file).map_err(|_| NotElided::NoLeases)?;
        if !FileType::from_raw_mode(found.st_mode).is_file() {
            return Err(NotElided::NoLeases);
        }
        if !has_reliable_leases(&file) {
            return Err(NotElided::NoLeases);
        }
        let identity = (found.st_dev, found.st_ino);
        self.broken.retain(|_, since| since.elapsed() < AFTER_BREAK);
        if self.broken.contains_key(&identity) {
            return Err(NotElided::Broken);
        }
        let number = self.free_entry().ok_or(NotElided::Busy)?;
        let lease = ReadLease::take(file).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => NotElided::Writer,
            io::ErrorKind::PermissionDenied => NotElided::Permission,
            _ => NotElided::NoLeases,
        })?;
        let entry = |position| self.tally.get(file_entry_at(usize::from(number)) + position);
        let generation = entry(file_entry::STATE).load(SeqCst) & !file_entry::STATE_MASK;
        let state = generation.wrapping_add(file_entry::GENERATION) | file_entry::LEASED;
        entry(file_entry::USED_MS).store(now_ms(), SeqCst);
        entry(file_entry::STATE).store(state, SeqCst);
        self.held.insert(number, HeldLease { lease, identity, state, draining: None });
        Ok((number, state))
    }

    fn free_entry(&mut self) -> Option<u16> {
        let found = (0..FILES)
            .map(|step| (self.next + step) % FILES)
            .find(|&index| !self.held.contains_key(&(index as u16)))?;
        self.next = found + 1;
        Some(found as u16)
    }

    /// Looks for waiting writers and idle leases, and returns what can be returned.
    pub fn step(&mut self) {
        let now = now_ms();
        for (&number, held) in &mut self.held {
            let used = self.tally.get(file_entry_at(usize::from(number)) + file_entry::USED_MS);
            let is_idle = now.saturating_sub(used.load(SeqCst)) > IDLE_MS_MAX;
            if held.lease.is_breaking() {
                self.broken.insert(held.identity, Instant::now());
                begin_draining(&self.tally, number, held, true);
            } else if is_idle && held.draining.is_none() {
                begin_draining(&self.tally, number, held, false);
            }
        }
        let must_tidy = self.tidied.elapsed() > TIDY_INTERVAL && !self.held.is_empty();
        let is_draining =
            self.drain_interval().is_some_and(|interval| self.looked.elapsed() >= interval);
        if !(must_tidy || is_draining) {
            return;
        }
        // The calls are counted before the list is read: if no call sends pages, all pages are in
        // the list.
        let sockets = self.sockets();
        // Without the list it is not known what arrived, so every lease is kept.
        let Ok(mut connections) = Connections::read() else { return };
        connections.add_other_namespaces();
        connections.compute_read_bytes(&self.received);
        self.received = connections.received();
        self.looked = Instant::now();
        self.drain(&connections, &sockets);
        if must_tidy {
            self.tidied = Instant::now();
            self.tidy(&connections, &sockets);
        }
    }

    /// Returns the leases of which no page is in flight any more.
    fn drain(&mut self, connections: &Connections, sockets: &[SocketEntry]) {
        let reset_after = self.reset_after;
        let mut returned = Vec::new();
        for (&number, held) in &mut self.held {
            let Some(draining) = &mut held.draining else { continue };
            let is_late = draining.is_break && draining.since.elapsed() > reset_after;
            let mut is_done = true;
            for socket in sockets.iter().filter(|socket| socket.has(number)) {
                let connection = connections.get(socket.cookie);
                if draining.is_done(socket, connection, connections) {
                    continue;
                }
                is_done = false;
                // A peer on this host has the pages in its receive queue, and can read them after a
                // reset.
                let is_remote = socket.at_peer(connections, None) == AtPeer::NotVisible;
                if let (true, true, Some(connection)) = (is_late, is_remote, connection) {
                    // Without the privilege the lease is kept until the kernel ends it.
                    let _ = connection.reset();
                }
            }
            if is_done {
                returned.push(number);
            }
        }
        for number in returned {
            let state = self.tally.get(file_entry_at(usize::from(number)) + file_entry::STATE);
            state.store(state.load(SeqCst) & !file_entry::STATE_MASK, SeqCst);
            for socket in sockets.iter().filter(|socket| socket.has(number)) {
                self.remove_file(socket.index, number);
            }
            self.held.remove(&number);
        }
    }

    /// Frees the entries of connections that are over.
    fn tidy(&mut self, connections: &Connections, sockets: &[SocketEntry]) {
        for socket in sockets {
            let is_gone = connections.get(socket.cookie).is_none();
            // The list is not of one moment, so the peer is looked at after the end was seen.
            let was_gone = !(is_gone && self.gone.insert(socket.cookie));
            let is_over =
                is_gone && was_gone && socket.at_peer(connections, None) != AtPeer::Unread;
            if !is_over || socket.is_sending() {
                continue;
            }
            let word = |position| self.tally.get(socket_entry_at(socket.index) + position);
            let cookie = word(socket_entry::COOKIE);
            if cookie.compare_exchange(socket.cookie + 1, 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            // A call that began before the change is in the count.
            if word(socket_entry::CALLS).load(SeqCst) == socket.calls {
                word(socket_entry::CALLS).fetch_sub(socket.calls, SeqCst);
                word(socket_entry::FILES).store(0, SeqCst);
                cookie.store(0, SeqCst);
                self.gone.remove(&socket.cookie);
            } else {
                cookie.store(socket.cookie + 1, SeqCst);
            }
        }
    }

    /// The entries in use.
    fn sockets(&self) -> Vec<SocketEntry> {
        let entry = |index: usize| {
            let word = |position| self.tally.get(socket_entry_at(index) + position);
            // Not relaxed: on ARM the load could then come before the store that forbids new pages.
            let cookie = word(socket_entry::COOKIE).load(SeqCst);
            if cookie <= 1 {
                return None;
            }
            let process = word(socket_entry::PROCESS).load(SeqCst);
            Some(SocketEntry {
                index,
                cookie: cookie - 1,
                files: word(socket_entry::FILES).load(SeqCst),
                calls: word(socket_entry::CALLS).load(SeqCst),
                process: (process & socket_entry::PROCESS_MASK) as u32,
                local_port: (process >> socket_entry::LOCAL_PORT_SHIFT) as u16,
                peer_port: (process >> 32) as u16,
                is_connected_again: process & socket_entry::CONNECTED_AGAIN != 0,
            })
        };
        (0..SOCKETS).filter_map(entry).collect()
    }

    fn remove_file(&self, socket: usize, number: u16) {
        let files: &AtomicU64 = self.tally.get(socket_entry_at(socket) + socket_entry::FILES);
        let mut packed = files.load(SeqCst);
        loop {
            let mut changed = packed;
            for lane in 0..SOCKET_FILES {
                if (packed >> (16 * lane)) as u16 == number + 1 {
                    changed &= !(0xFFFF << (16 * lane));
                }
            }
            match files.compare_exchange(packed, changed, SeqCst, SeqCst) {
                Ok(_) => return,
                Err(other) => packed = other,
            }
        }
    }
}

/// Whether a lease keeps every change from the pages of a file. On overlayfs, opening a file for
/// writing copies the file, so the name leads to other pages than an earlier mapping has. FUSE and
/// network file systems change pages without opening the file here.
fn has_reliable_leases(file: &OwnedFd) -> bool {
    /// ext2 to ext4, XFS, tmpfs, F2FS and bcachefs, by their numbers in `<linux/magic.h>` and in
    /// the sources of bcachefs.
    const RELIABLE: [u32; 5] = [0xEF53, 0x5846_5342, 0x0102_1994, 0xF2F5_2010, 0xCA45_1A4E];
    fstatfs(file).is_ok_and(|found| RELIABLE.contains(&(found.f_type as u32)))
}

/// Forbids new pages of a file, and begins to wait for those in flight.
fn begin_draining(tally: &SharedCounters, number: u16, held: &mut HeldLease, is_break: bool) {
    if let Some(draining) = &mut held.draining {
        if is_break && !draining.is_break {
            (draining.is_break, draining.since) = (true, Instant::now());
        }
        return;
    }
    let state = tally.get(file_entry_at(usize::from(number)) + file_entry::STATE);
    state.store(held.state & !file_entry::STATE_MASK | file_entry::DRAINING, SeqCst);
    let since = Instant::now();
    held.draining = Some(Draining { since, is_break, goals: HashMap::new() });
}

impl Draining {
    /// Whether no page that went to a socket is needed any more.
    fn is_done(
        &mut self,
        socket: &SocketEntry,
        connection: Option<&Connection>,
        connections: &Connections,
    ) -> bool {
        // A call that began before new pages were forbidden may still add pages.
        if socket.is_sending() {
            return false;
        }
        let goal = self.goals.entry(socket.index).or_default();
        if let Some(connection) = connection {
            goal.bytes.get_or_insert(connection.given_bytes);
        }
        let at_peer =
            socket.at_peer(connections, goal.bytes.filter(|_| !socket.is_connected_again));
        if at_peer == AtPeer::Unread {
            return false;
        }
        let is_acknowledged = match connection {
            None => std::mem::replace(&mut goal.was_gone, true),
            Some(connection) => {
                goal.was_gone = false;
                let bytes = goal.bytes.unwrap_or(u64::MAX);
                // The count of acknowledged bytes may have one more, for the beginning of the
                // stream.
                connection.unacknowledged_bytes == 0 || connection.acknowledged_bytes > bytes
            }
        };
        if !is_acknowledged {
            return false;
        }
        let Some(reached) = goal.reached else {
            // The list is not of one moment: what was unread at the peer is looked at again, after
            // the acknowledgement was seen.
            goal.reached = Some(Instant::now());
            return false;
        };
        at_peer == AtPeer::Read || reached.elapsed() >= AFTER_ACKNOWLEDGEMENT
    }
}

impl SocketEntry {
    /// Whether pages of a file went to the socket.
    fn has(&self, number: u16) -> bool {
        (0..SOCKET_FILES).any(|lane| (self.files >> (16 * lane)) as u16 == number + 1)
    }

    /// Whether a process sends pages at this moment.
    fn is_sending(&self) -> bool {
        self.calls > 0 && Path::new("/proc").join(self.process.to_string()).exists()
    }

    /// What is unread at the peer of the first `goal` bytes, or of all.
    fn at_peer(&self, connections: &Connections, goal: Option<u64>) -> AtPeer {
        connections.at_peer(self.local_port, self.peer_port, goal)
    }
}

/// The time in ms (`CLOCK_MONOTONIC`).
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
