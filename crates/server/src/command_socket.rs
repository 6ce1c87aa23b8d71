//! A Unix socket at which an operator commands a running service.
//!
//! A command is one line, and so is its answer. Only the user who starts the service may connect,
//! and root.

use crate::address::Address;
use crate::error::Error;
use crate::join::join_with_timeout;
use crate::start_check::check_socket;
use crate::unix_address::abstract_name;
use crate::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketAddrUnix;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest command, in bytes.
const COMMAND_BYTES_MAX: usize = 4096;
/// The time for a command to arrive, and for its answer to be taken.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The time that a client waits for an answer: others may be before it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The most clients at a time. The client that waits for the longest time makes room.
const CLIENTS_MAX: usize = 16;
/// The pause after `accept` failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening command socket. Dropping it removes its file, if this process has made it.
#[derive(Debug)]
pub struct CommandSocket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of a socket.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Whether the file is removed when the socket is dropped. A file that another process created
    /// at the path stays.
    is_removed: bool,
}

impl SocketFile {
    fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_removed && self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A thread that carries out commands, until it is dropped.
#[derive(Debug)]
pub struct CommandServer {
    file: SocketFile,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl CommandSocket {
    /// Listens at a path. The file of a process that ended is replaced.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::Listen { address: Address::Unix(path.to_owned()), error };
        Self::open_at(path).map_err(failed)
    }

    /// Checks whether [`CommandSocket::open`] will succeed, without making the socket.
    pub fn check(path: &Path) -> Result<(), Error> {
        let failed = |error| Error::Listen { address: Address::Unix(path.to_owned()), error };
        check_path(path).map_err(failed)
    }

    /// Takes the listening socket of another process, which leaves it the file at this path once
    /// it runs.
    pub fn inherit(path: &Path, listener: OwnedFd) -> Result<Self, Error> {
        let failed = |error| Error::Listen { address: Address::Unix(path.to_owned()), error };
        let metadata = fs::symlink_metadata(path).map_err(failed)?;
        let (device, inode) = (metadata.dev(), metadata.ino());
        let file = SocketFile { path: path.to_owned(), device, inode, is_removed: false };
        Ok(Self { listener: listener.into(), file })
    }

    /// Another descriptor of the listening socket.
    pub fn listener(&self) -> io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    fn open_at(path: &Path) -> io::Result<Self> {
        check_path(path)?;
        // No other user may connect at any time, and the path always leads to a listening socket.
        let temporary = temporary_path(path);
        // An earlier process with this number may leave the file of its socket.
        if fs::symlink_metadata(&temporary).is_ok_and(|file| file.file_type().is_socket()) {
            fs::remove_file(&temporary)?;
        }
        let listener = listen(&temporary)?;
        let placed = fs::symlink_metadata(&temporary)
            .and_then(|metadata| fs::rename(&temporary, path).map(|()| metadata));
        match placed {
            Ok(metadata) => {
                let (device, inode) = (metadata.dev(), metadata.ino());
                let path = path.to_owned();
                let file = SocketFile { path, device, inode, is_removed: true };
                Ok(Self { listener, file })
            }
            Err(error) => {
                let _ = fs::remove_file(&temporary);
                Err(error)
            }
        }
    }

    /// Carries out commands on a thread, one after another. `answer` gets each command, without its
    /// line end, and the connection; what it returns is sent to the client. Clients that send
    /// nothing or do not read their answers do not delay other clients.
    pub fn serve<F>(self, name: &str, mut answer: F) -> Result<CommandServer, Error>
    where
        F: FnMut(&str, &UnixStream) -> Vec<u8> + Send + 'static,
    {
        let Self { listener, mut file } = self;
        let failed = || Error::at("starting a thread");
        let gate = Arc::new(Gate::new().map_err(failed())?);
        // Another process may accept from the same socket during a handover.
        listener.set_nonblocking(true).map_err(failed())?;
        let thread_gate = Arc::clone(&gate);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let mut clients: Vec<Client> = Vec::new();
            while let Some(accepts) = thread_gate.wait(&listener, &clients) {
                if accepts {
                    match listener.accept() {
                        Ok((stream, _)) => clients.extend(Client::new(stream)),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        // Descriptors or memory are short.
                        Err(_) => std::thread::sleep(ACCEPT_PAUSE),
                    }
                }
                if clients.len() > CLIENTS_MAX {
                    // The client that waits for the longest time.
                    clients.remove(0);
                }
                // A client that fails loses its answer.
                clients.retain_mut(|client| client.advance(&mut answer).unwrap_or(false));
            }
        });
        file.is_removed = true;
        Ok(CommandServer { file, gate, thread: Some(thread.map_err(failed())?) })
    }
}

/// Whether a server takes commands.
#[derive(Debug)]
struct Gate {
    is_paused: AtomicBool,
    is_stopped: AtomicBool,
    /// Wakes the server when one of them changes.
    waker: Waker,
}

impl Gate {
    fn new() -> io::Result<Self> {
        let (is_paused, is_stopped) = Default::default();
        Ok(Self { is_paused, is_stopped, waker: Waker::new()? })
    }

    fn set(&self, state: &AtomicBool, value: bool) {
        state.store(value, SeqCst);
        self.waker.wake();
    }

    /// Waits until a client can be accepted, which the result says, or one of the accepted clients
    /// is ready or late; `None` once the server is stopped.
    fn wait(&self, listener: &UnixListener, clients: &[Client]) -> Option<bool> {
        let is_paused = self.is_paused.load(SeqCst);
        let accepted = if is_paused { PollFlags::empty() } else { PollFlags::IN };
        let mut waited =
            vec![PollFd::new(&self.waker, PollFlags::IN), PollFd::new(listener, accepted)];
        waited.extend(clients.iter().map(|client| PollFd::new(&client.stream, client.waits_for())));
        let deadline = clients.iter().map(|client| client.deadline).min();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // A signal may interrupt it.
        let _ = poll(&mut waited, left.as_ref());
        if !waited[0].revents().is_empty() {
            self.waker.clear();
        }
        // A pause may begin during the wait, in which a client may arrive.
        let is_paused = self.is_paused.load(SeqCst);
        let accepts = !is_paused && waited[1].revents().contains(PollFlags::IN);
        (!self.is_stopped.load(SeqCst)).then_some(accepts)
    }
}

/// A client of a command server.
#[derive(Debug)]
struct Client {
    stream: UnixStream,
    deadline: Instant,
    state: ClientState,
}

#[derive(Debug)]
enum ClientState {
    /// The bytes of the command so far.
    Receiving(Vec<u8>),
    /// What is left of the answer.
    Answering(Vec<u8>),
}

impl Client {
    /// An accepted client; `None` if it failed.
    fn new(stream: UnixStream) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        let (deadline, state) = (Instant::now() + TIMEOUT, ClientState::Receiving(Vec::new()));
        Some(Self { stream, deadline, state })
    }

    fn waits_for(&self) -> PollFlags {
        match self.state {
            ClientState::Receiving(_) => PollFlags::IN,
            ClientState::Answering(_) => PollFlags::OUT,
        }
    }

    /// Receives the command, carries it out and sends the answer, as far as that is possible now;
    /// false once the client is done or late.
    fn advance(
        &mut self,
        answer: &mut impl FnMut(&str, &UnixStream) -> Vec<u8>,
    ) -> io::Result<bool> {
        let mut stream = &self.stream;
        if let ClientState::Receiving(command) = &mut self.state {
            let mut part = [0; 512];
            let has_ended = match stream.read(&mut part) {
                Ok(count) => {
                    command.extend_from_slice(&part[..count]);
                    count == 0 || command.contains(&b'\n')
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
                Err(error) => return Err(error),
            };
            if command.len() > COMMAND_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if !has_ended {
                return Ok(Instant::now() < self.deadline);
            }
            let command = String::from_utf8_lossy(command);
            self.state = ClientState::Answering(answer(command.trim(), stream));
            self.deadline = Instant::now() + TIMEOUT;
        }
        let ClientState::Answering(rest) = &mut self.state else { return Ok(false) };
        while !rest.is_empty() {
            match stream.write(rest) {
                Ok(count) => drop(rest.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Instant::now() < self.deadline);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

/// Pauses a server of commands from another thread.
#[derive(Debug, Clone)]
pub struct CommandPause(Arc<Gate>);

impl CommandPause {
    /// Stops taking commands after the running command. Clients that connect then wait, for this
    /// process or for another process that has the same listening socket.
    pub fn pause(&self) {
        self.0.set(&self.0.is_paused, true);
    }

    /// Takes commands again.
    pub fn resume(&self) {
        self.0.set(&self.0.is_paused, false);
    }
}

impl CommandServer {
    /// What pauses it from another thread.
    pub fn pause(&self) -> CommandPause {
        CommandPause(Arc::clone(&self.gate))
    }

    /// Leaves the file to another process, which takes commands from now on.
    pub fn leave(mut self) {
        self.file.is_removed = false;
    }
}

impl Drop for CommandServer {
    fn drop(&mut self) {
        self.gate.set(&self.gate.is_stopped, true);
        if let Some(thread) = self.thread.take() {
            // A command may wait for a file on a disk that hangs.
            join_with_timeout(thread);
        }
    }
}

/// Checks whether a command socket can be made at a path.
fn check_path(path: &Path) -> io::Result<()> {
    if abstract_name(path).is_some() {
        let problem = "an abstract socket is open to every user, and a control socket must not be: \
                       name a file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    }
    // The socket is made under this name first.
    SocketAddrUnix::new(temporary_path(path))?;
    check_socket(path)
}

/// The path at which a command socket is made before it gets its name.
fn temporary_path(path: &Path) -> PathBuf {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    temporary.into()
}

/// Listens at a path that does not exist, for this user alone.
fn listen(path: &Path) -> io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // bind(2) gives the file the mode of the socket (net/unix/af_unix.c), less the umask.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 16)?;
    Ok(socket.into())
}

/// Sends a command to a running service, and returns its answer.
pub fn send_command(path: &Path, command: &str) -> io::Result<String> {
    let mut stream = connect(path)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("{command}\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Connects with a time limit, because the queue of a process that hangs may be full.
fn connect(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIMEOUT))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn echo(socket: CommandSocket) -> CommandServer {
        let answer = |command: &str, _: &UnixStream| format!("<{command}>").into_bytes();
        socket.serve("test", answer).unwrap()
    }

    #[test]
    fn a_command_is_answered_and_the_file_removed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let server = echo(CommandSocket::open(&path).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // A client that sends nothing is given up, and one without a line end is answered.
        let _silent = UnixStream::connect(&path).unwrap();
        assert_eq!(send_command(&path, "one two").unwrap(), "<one two>");
        // The rest of a command that is too long is not read: its client may get an error.
        let _ = send_command(&path, &"x".repeat(10_000));
        assert_eq!(send_command(&path, "three").unwrap(), "<three>");
        drop(server);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// A monitoring script that hangs must not keep the operator out.
    #[test]
    fn silent_clients_do_not_delay_a_command() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // An answer that does not fit into the socket.
        let answer = |command: &str, _: &UnixStream| match command {
            "long" => vec![b'x'; 4 << 20],
            _ => b"answer".to_vec(),
        };
        let _server = CommandSocket::open(&path).unwrap().serve("test", answer).unwrap();
        let clients: Vec<_> = (0..3 * CLIENTS_MAX)
            .map(|number| {
                let mut client = UnixStream::connect(&path).unwrap();
                client.write_all(if number % 2 == 0 { b"sta" } else { b"long\n" }).unwrap();
                client
            })
            .collect();
        // One client after another would take two seconds each, and the answer comes within 30 s.
        assert_eq!(send_command(&path, "status").unwrap(), "answer");
        drop(clients);
    }

    #[test]
    fn a_file_in_use_is_kept_and_an_abandoned_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = CommandSocket::open(&path).unwrap();
        assert!(CommandSocket::open(&path).is_err());
        // One process after another takes commands from the same socket.
        let second = CommandSocket::inherit(&path, first.listener().unwrap()).unwrap();
        let first = echo(first);
        drop(CommandSocket::inherit(&path, second.listener().unwrap()).unwrap());
        assert_eq!(send_command(&path, "a").unwrap(), "<a>", "the file is the first's");
        let second = echo(second);
        first.leave();
        assert_eq!(send_command(&path, "b").unwrap(), "<b>", "the file is the second's");
        drop(second);
        assert!(!path.exists());
        drop(listen(&path).unwrap());
        assert!(path.exists(), "left by a process that has ended");
        drop(CommandSocket::open(&path).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(CommandSocket::open(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
