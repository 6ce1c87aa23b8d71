//! A running `haul serve`.

use super::command::haul;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use tempfile::TempDir;

/// Returns a directory that contains the file `a.txt`.
pub fn folder_with_file() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "content").unwrap();
    folder
}

/// A running server. The process is killed when this is dropped.
pub struct ServerProcess {
    pub process: Child,
    /// The first line of standard error.
    pub first_message: String,
    /// The rest of standard error.
    pub stderr: BufReader<ChildStderr>,
}

impl ServerProcess {
    pub fn start(command: &mut Command) -> Self {
        let mut process = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        let mut first_message = String::new();
        stderr.read_line(&mut first_message).unwrap();
        Self { process, first_message, stderr }
    }

    /// Returns the address in the first message.
    pub fn address(&self) -> &str {
        let message = &self.first_message;
        let start = message.find("http://").unwrap_or_else(|| panic!("{message}")) + 7;
        let rest = &message[start..];
        &rest[..rest.find('/').unwrap()]
    }

    pub fn get(&self, target: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        write!(stream, "GET {target} HTTP/1.0\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), signal)
            .unwrap();
    }

    /// Waits for the process to end. Returns its exit code and the rest of standard error.
    pub fn wait(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        (self.process.wait().unwrap().code(), rest)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command `haul serve` for a directory.
pub fn serve(folder: &Path, options: &[&str]) -> Command {
    let mut command = haul(&["serve"]);
    command.arg(folder).args(options);
    command
}
