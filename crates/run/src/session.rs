//! The files and the broker of one run.

use crate::broker;
use crate::counts::Counts;
use crate::error::RunError;
use crate::library::LIBRARY;
use haul_lab_sys::shared_counters::SharedCounters;
use haul_tally::message::TOKEN_BYTES;
use haul_tally::{FILTERS_VARIABLE, MAGIC, SLOTS, SOCKET_VARIABLE, TALLY_WORDS, TOKEN_VARIABLE};
use haul_tally::{header, slot, slot_at};
use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashSet;
use std::env;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::Ordering::Relaxed;
use tempfile::TempDir;

/// Settings of glibc's allocator (mallopt(3)): freed memory stays with the process up to 256 MiB,
/// and blocks up to 32 MiB, the largest value that glibc accepts, are not mapped anew each time.
const KEPT_MEMORY: [(&str, &str); 2] =
    [("MALLOC_TRIM_THRESHOLD_", "268435456"), ("MALLOC_MMAP_THRESHOLD_", "33554432")];
/// Name of the interposer's file.
pub const LIBRARY_NAME: &str = "libhaul_interpose.so";
/// Name of the environment variable by which the dynamic linker loads libraries first.
const PRELOAD: &str = "LD_PRELOAD";

/// The interposer, the counters and the broker of one run. Dropping it lets the broker end;
/// processes that still run keep their mappings.
#[derive(Debug)]
pub struct Session {
    library: PathBuf,
    socket: PathBuf,
    /// Proves to the broker that a process is one of the command's.
    token: String,
    tally: SharedCounters,
    keeps_memory: bool,
    /// The broker ends when this is closed.
    _lifeline: OwnedFd,
    broker: Child,
    /// Removed when this is dropped.
    _directory: TempDir,
}

/// What a session does in addition to counting.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "one for each word of the tally")]
pub struct SessionOptions {
    /// Whether bytes of mapped files are sent by `sendfile`.
    pub is_eliding: bool,
    /// Whether that is not done for peers on this host.
    pub is_strict: bool,
    /// Whether the kernel's confirmation is left out, to show that a test finds the wrong bytes.
    pub is_unconfirmed: bool,
    /// Whether every call is elided that can be, without a comparison of costs.
    pub is_untried: bool,
    /// The congestion control of the command's connections, at most 15 bytes.
    pub congestion: Option<String>,
    /// Whether the C library's allocator keeps memory that the program frees.
    pub keeps_memory: bool,
}

impl Session {
    /// Writes the interposer into a new directory, and starts the broker.
    ///
    /// A service may change its user before it starts a process, so every user may read the library
    /// and connect to the broker. The broker answers only requests with the token of the run, which
    /// is in the environment of the command's processes.
    pub fn create(options: &SessionOptions) -> Result<Self, RunError> {
        let directory = create_directory()?;
        let inner = tempfile::Builder::new().prefix("").rand_bytes(24).tempdir_in(&directory);
        let inner = inner.map_err(failed(directory.path()))?.keep();
        set_mode(&inner, 0o755)?;
        set_mode(directory.path(), 0o711)?;
        let library = inner.join(LIBRARY_NAME);
        fs::write(&library, LIBRARY).map_err(failed(&library))?;
        set_mode(&library, 0o644)?;
        let tally = SharedCounters::create(TALLY_WORDS).map_err(RunError::Tally)?;
        let token = random_token().map_err(RunError::Token)?;
        initialize(&tally, options, &token);
        let socket = inner.join("broker");
        let listener = listen(&socket).map_err(|errno| failed(&socket)(errno.into()))?;
        set_mode(&socket, 0o666)?;
        let (broker, lifeline) =
            start_broker(listener, &tally, directory.path()).map_err(RunError::Broker)?;
        Ok(Self {
            library,
            socket,
            token,
            tally,
            keeps_memory: options.keeps_memory,
            _lifeline: lifeline,
            broker,
            _directory: directory,
        })
    }

    /// Has a command load the interposer, after the libraries that the environment names already.
    pub fn prepare(&self, command: &mut Command) {
        let mut preloads = env::var_os(PRELOAD).filter(|names| !names.is_empty());
        if let Some(names) = &mut preloads {
            names.push(":");
        }
        let mut preloads: OsString = preloads.unwrap_or_default();
        preloads.push(&self.library);
        command.env(PRELOAD, preloads).env(SOCKET_VARIABLE, &self.socket);
        command.env(TOKEN_VARIABLE, &self.token);
        command.env(FILTERS_VARIABLE, seccomp_filters().to_string());
        for (name, bytes) in KEPT_MEMORY.into_iter().filter(|_| self.keeps_memory) {
            // The user's own setting counts more.
            if env::var_os(name).is_none() {
                command.env(name, bytes);
            }
        }
    }

    /// The processes that count, by their IDs.
    pub fn processes(&self) -> HashSet<u32> {
        let word = |position: usize| self.tally.get(position).load(Relaxed);
        let taken = usize::try_from(word(header::SLOTS_TAKEN)).unwrap_or(SLOTS).min(SLOTS);
        (0..taken).map(|index| word(slot_at(index) + slot::PROCESS) as u32).collect()
    }

    /// The process of the broker.
    pub fn broker(&self) -> u32 {
        self.broker.id()
    }

    /// Elides copies in all processes of the command from now on, or copies everything.
    pub fn set_eliding(&self, is_eliding: bool) {
        self.tally.get(header::IS_ELIDING).store(is_eliding.into(), Relaxed);
    }

    /// Reads the counters.
    pub fn counts(&self) -> Counts {
        Counts::read(|position| self.tally.get(position).load(Relaxed))
    }
}

fn initialize(tally: &SharedCounters, options: &SessionOptions, token: &str) {
    let inode = fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino());
    let mut congestion = [0; 16];
    for (byte, place) in
        options.congestion.iter().flat_map(|name| name.bytes()).zip(&mut congestion)
    {
        *place = byte;
    }
    let half =
        |at: usize| u64::from_le_bytes(congestion[at..at + 8].try_into().unwrap_or_default());
    let words = [
        (header::CONGESTION, half(0)),
        (header::CONGESTION + 1, half(8)),
        (header::IS_ELIDING, options.is_eliding.into()),
        (header::IS_STRICT, options.is_strict.into()),
        (header::IS_UNCONFIRMED, options.is_unconfirmed.into()),
        (header::IS_UNTRIED, options.is_untried.into()),
        (header::NETWORK, haul_sys::sockopt::network_namespace().unwrap_or(0)),
        (header::PID_NAMESPACE, inode),
        (header::MAGIC, MAGIC),
    ];
    for (position, word) in words {
        tally.get(position).store(word, Relaxed);
    }
    for (index, part) in token.as_bytes().chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(part.try_into().unwrap_or_default());
        tally.get(header::TOKEN + index).store(word, Relaxed);
    }
}

/// Random hexadecimal digits.
fn random_token() -> io::Result<String> {
    let mut bytes = [0u8; TOKEN_BYTES / 2];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(hexadecimal).collect())
}

fn hexadecimal(digit: u8) -> char {
    char::from_digit(digit.into(), 16).unwrap_or('0')
}

/// Listens at a Unix socket that keeps messages apart.
fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    /// Processes that connect at the same moment.
    const BACKLOG: i32 = 1024;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Starts the broker. Returns it, and the descriptor whose end ends the broker.
fn start_broker(
    listener: OwnedFd,
    tally: &SharedCounters,
    directory: &Path,
) -> io::Result<(Child, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let tally = tally.as_fd().try_clone_to_owned()?;
    Ok((broker::start(listener, tally, reader, directory)?, writer))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> RunError {
    let path = path.to_owned();
    move |source| RunError::Write { path, source }
}

fn set_mode(path: &Path, mode: u32) -> Result<(), RunError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed(path))
}

/// Creates a directory on a file system from which libraries can be loaded.
fn create_directory() -> Result<TempDir, RunError> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let candidates = [Some(env::temp_dir()), Some("/tmp".into()), Some("/dev/shm".into()), runtime];
    let mut reasons: Vec<String> = Vec::new();
    for candidate in candidates.into_iter().flatten() {
        // The dynamic linker separates the names in its variable by colons and spaces.
        let is_name = !candidate.as_os_str().as_encoded_bytes().iter().any(|b| b" :".contains(b));
        let reason = match statvfs(&candidate) {
            Ok(_) if !is_name => "a space or colon in the name".to_owned(),
            Ok(found) if found.f_flag.contains(StatVfsMountFlags::NOEXEC) => {
                "mounted noexec".to_owned()
            }
            Ok(_) => match tempfile::Builder::new()
                .prefix(broker::DIRECTORY_PREFIX)
                .tempdir_in(&candidate)
            {
                Ok(directory) => return Ok(directory),
                Err(error) => error.to_string(),
            },
            Err(errno) => errno.to_string(),
        };
        reasons.push(format!("{}: {reason}", candidate.display()));
    }
    Err(RunError::NoDirectory { directories: reasons.join(", ") })
}

/// The number of seccomp filters of this process, which each program inherits (Linux 5.9). 0 if
/// `/proc` does not show it: then the interposer makes no system calls in a process with a filter.
fn seccomp_filters() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_that_know_the_name_find_the_files() {
        let directory = create_directory().unwrap();
        let socket = directory.path().join("socket");
        drop(listen(&socket).unwrap());
        assert!(socket.exists());
    }
}
