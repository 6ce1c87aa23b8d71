//! Checks of small programs that send, receive and relay, such as the programs of the cookbook. The
//! arguments of a program follow those that its command already has.

use crate::{LIMIT, pattern, receive_all, wait_until};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

/// More than the buffers of two sockets hold.
const LEN: usize = 20_000_000;

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("haul-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program that is killed at the end, with the programs that it started.
struct Program(Child);

impl Program {
    #[track_caller]
    fn start(command: &mut Command) -> Self {
        match command.process_group(0).spawn() {
            Ok(child) => Self(child),
            Err(error) => panic!("{command:?}: {error}"),
        }
    }

    /// Waits until the program ended without a failure.
    #[track_caller]
    fn finish(mut self) {
        let mut status = None;
        wait_until("the program ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        let status = status.unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
        let _ = self.0.wait();
    }
}

/// Runs `PROGRAM FILE HOST PORT`, which sends the file to the host and ends the connection. Checks
/// what arrived.
#[track_caller]
pub fn check_sending(command: &mut Command) {
    let folder = Folder::new();
    let (path, content) = (folder.file("file"), pattern(1, LEN));
    std::fs::write(&path, &content).unwrap();
    let received = serve_one(command, &path, receive_whole);
    assert!(received == content, "{command:?}: {} bytes arrived", received.len());
}

/// Runs `PROGRAM FILE HOST PORT`, which receives a file from the host until the connection ends.
/// Checks the file.
#[track_caller]
pub fn check_receiving(command: &mut Command) {
    let folder = Folder::new();
    let (path, content) = (folder.file("file"), pattern(2, LEN));
    serve_one(command, &path, |mut socket| {
        socket.write_all(&content).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        // Until the program closed the connection.
        let _ = socket.read(&mut [0]);
    });
    let received = std::fs::read(&path).unwrap();
    assert!(received == content, "{command:?}: {} bytes in the file", received.len());
}

fn receive_whole(mut socket: TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    socket.read_to_end(&mut received).unwrap();
    received
}

/// Runs a program that connects to this process. Returns what `serve` returned.
#[track_caller]
fn serve_one<T>(command: &mut Command, file: &Path, serve: impl FnOnce(TcpStream) -> T) -> T {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let program = Program::start(command.arg(file).args(["127.0.0.1", &port]));
    let served = serve(accept(&listener));
    program.finish();
    served
}

/// Accepts a connection. Panics if there is none within [`LIMIT`].
#[track_caller]
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let mut accepted = None;
    wait_until("the program connects", || {
        accepted = listener.accept().ok();
        accepted.is_some()
    });
    let (socket, _) = accepted.unwrap();
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.set_write_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Runs `PROGRAM 0 HOST PORT`, which relays each client to the host, and whose first line ends with
/// its port. Checks both directions.
#[track_caller]
pub fn check_relaying(command: &mut Command) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    command.args(["0", "127.0.0.1", &port]).stdout(Stdio::piped());
    let mut program = Program::start(command);
    let mut line = String::new();
    // Open to the end, because a program may print more.
    let mut stdout = BufReader::new(program.0.stdout.take().unwrap());
    stdout.read_line(&mut line).unwrap();
    let port = line.trim_end().rsplit([' ', ':']).next().unwrap().parse::<u16>();
    let port = port.unwrap_or_else(|_| panic!("{command:?} printed {line:?}"));
    let (request, response) = (pattern(3, LEN), pattern(4, LEN));
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut server = accept(&listener);
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.set_write_timeout(Some(LIMIT)).unwrap();
    let received = [&client, &server].map(|socket| receive_all(socket.try_clone().unwrap()));
    thread::scope(|scope| {
        for (socket, bytes) in [(&mut client, &request), (&mut server, &response)] {
            scope.spawn(move || {
                socket.write_all(bytes).unwrap();
                socket.shutdown(Shutdown::Write).unwrap();
            });
        }
    });
    let [at_client, at_server] = received.map(|thread| thread.join().unwrap());
    assert!(at_client == response, "{command:?}: {} bytes at the client", at_client.len());
    assert!(at_server == request, "{command:?}: {} bytes at the server", at_server.len());
}
