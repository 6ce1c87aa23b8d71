//! A Unix socket at which an operator commands a running service.
//!
//! A command is one line, and so is its answer. Only the user who starts the service may connect,
//! and root.

use crate::address::Address;
use crate::error::Error;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest command, in bytes.
const COMMAND_BYTES_MAX: u64 = 4096;
/// The time for a command to arrive, and for each part of its answer to be taken.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A listening command socket. Dropping it removes its file.
#[derive(Debug)]
pub struct CommandSocket {
    listener: Arc<UnixListener>,
    file: SocketFile,
}

/// The file of a socket, removed when it is dropped, unless another process has replaced it.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (self.device, self.inode))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A thread that carries out commands, until it is dropped.
#[derive(Debug)]
pub struct CommandServer {
    socket: CommandSocket,
    thread: Option<JoinHandle<()>>,
}

impl CommandSocket {
    /// Listens at a path. The file of a process that has ended is replaced; with `replaces_running`
    /// also that of one that runs, which loses its command socket.
    pub fn open(path: &Path, replaces_running: bool) -> Result<Self, Error> {
        let failed = |error| Error::Listen { address: Address::Unix(path.to_owned()), error };
        Self::open_at(path, replaces_running).map_err(failed)
    }

    fn open_at(path: &Path, replaces_running: bool) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                let problem = "a file that is no socket has that name";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
            }
            Ok(_) if !replaces_running && UnixStream::connect(path).is_ok() => {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            _ => {}
        }
        // No other user may connect at any time, and the path always leads to a listening socket.
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let _ = fs::remove_file(&temporary);
        let listener = listen(&temporary)?;
        let placed = fs::symlink_metadata(&temporary)
            .and_then(|metadata| fs::rename(&temporary, path).map(|()| metadata));
        match placed {
            Ok(metadata) => {
                let (device, inode) = (metadata.dev(), metadata.ino());
                let file = SocketFile { path: path.to_owned(), device, inode };
                Ok(Self { listener: Arc::new(listener), file })
            }
            Err(error) => {
                let _ = fs::remove_file(&temporary);
                Err(error)
            }
        }
    }

    /// Carries out commands on a thread, one after another. `answer` gets each command, without its
    /// line end, and the connection; what it returns is sent to the client.
    pub fn serve<F>(self, name: &str, mut answer: F) -> Result<CommandServer, Error>
    where
        F: FnMut(&str, &UnixStream) -> Vec<u8> + Send + 'static,
    {
        let listener = Arc::clone(&self.listener);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            // Accepting fails once the socket is shut down.
            while let Ok((client, _)) = listener.accept() {
                // A client that fails loses its answer.
                let _ = carry_out(&client, &mut answer);
            }
        });
        let thread = thread.map_err(Error::at("starting a thread"))?;
        Ok(CommandServer { socket: self, thread: Some(thread) })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl Drop for CommandServer {
    fn drop(&mut self) {
        let listener = self.socket.listener.as_fd();
        let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens at a path that does not exist, for this user alone.
fn listen(path: &Path) -> io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
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

fn carry_out(
    client: &UnixStream,
    answer: &mut impl FnMut(&str, &UnixStream) -> Vec<u8>,
) -> io::Result<()> {
    client.set_read_timeout(Some(TIMEOUT))?;
    client.set_write_timeout(Some(TIMEOUT))?;
    let mut command = String::new();
    BufReader::new(client.take(COMMAND_BYTES_MAX)).read_line(&mut command)?;
    let answer = answer(command.trim(), client);
    let mut client = client;
    client.write_all(&answer)
}

/// Sends a command to a running service, and returns its answer.
pub fn send_command(path: &Path, command: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.write_all(format!("{command}\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
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
        let server = echo(CommandSocket::open(&path, false).unwrap());
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

    #[test]
    fn a_file_in_use_is_kept_and_an_abandoned_one_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = echo(CommandSocket::open(&path, false).unwrap());
        assert!(CommandSocket::open(&path, false).is_err());
        let second = echo(CommandSocket::open(&path, true).unwrap());
        drop(first);
        assert_eq!(send_command(&path, "a").unwrap(), "<a>", "the file is the second's");
        drop(second);
        drop(listen(&path).unwrap());
        assert!(path.exists(), "left by a process that has ended");
        drop(CommandSocket::open(&path, false).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(CommandSocket::open(&path, true).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
