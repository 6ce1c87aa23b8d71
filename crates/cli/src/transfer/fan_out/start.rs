//! Starts the other ends on several hosts at the same time.

use super::Processes;
use crate::output::Failure;
use crate::transfer::READ_BUFFER_BYTES;
use crate::transfer::console::Console;
use crate::transfer::options::TransferOptions;
use crate::transfer::text::printable;
use haul_transfer::{
    DirectRequest, Host, Options, OwnProgram, RemoteEnd, RemotePath, RemoteProgram, RemoteShell,
    Request, Role,
};
use rustix::process::Signal;
use std::io::{BufRead, BufReader, Read};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The time for the login and the start of haul on all hosts. The hosts that take longer are left
/// out.
const START_TIME_MAX: Duration = Duration::from_secs(60);

/// The longest line of another host that is printed whole.
const LINE_BYTES_MAX: u64 = 4096;

/// A host whose other end is ready.
pub struct StartedHost {
    pub host: Host<BufReader<ChildStdout>, ChildStdin>,
    pub remote: RemoteEnd,
}

/// What every host is asked for.
#[derive(Clone, Copy)]
pub struct Starter<'s> {
    pub flags: &'s TransferOptions,
    pub options: &'s Options,
    pub request: &'s Option<DirectRequest>,
}

impl Starter<'_> {
    /// Starts haul on all hosts. For a host that does not answer, the reason.
    pub fn start_all(
        self,
        destinations: &[RemotePath],
        console: &Console,
        processes: &Processes,
    ) -> Result<Vec<Result<StartedHost, String>>, Failure> {
        let command = self.flags.shell()?;
        let deadline = Instant::now() + START_TIME_MAX;
        let mut started: Vec<Option<Result<StartedHost, String>>> =
            destinations.iter().map(|_| None).collect();
        std::thread::scope(|scope| {
            let (started_tx, started_rx) = mpsc::channel();
            for (at, destination) in destinations.iter().enumerate() {
                let (started_tx, command) = (started_tx.clone(), command.clone());
                scope.spawn(move || {
                    let started = self.start(destination, command, console, processes);
                    let _ = started_tx.send((at, started));
                });
            }
            drop(started_tx);
            let left = || deadline.saturating_duration_since(Instant::now());
            while let Ok((at, result)) = started_rx.recv_timeout(left()) {
                started[at] = Some(result);
            }
            // The threads of the hosts that are too late end with their processes of ssh.
            let ready: Vec<_> =
                started.iter().flatten().flatten().map(|one| one.remote.pid()).collect();
            processes.end_others(&ready);
        });
        let late = || Err(format!("no answer in {} s", START_TIME_MAX.as_secs()));
        Ok(started.into_iter().map(|started| started.unwrap_or_else(late)).collect())
    }

    /// Starts haul on one host.
    fn start(
        self,
        destination: &RemotePath,
        command: Vec<std::ffi::OsString>,
        console: &Console,
        processes: &Processes,
    ) -> Result<StartedHost, String> {
        let name = printable(&destination.host.to_string_lossy());
        // A program that cannot read its file starts the haul that is installed there.
        let named = self.flags.remote_program();
        let own = named.is_none().then(|| {
            let (console, name) = (console.clone(), name.clone());
            let notice = move |message: &str| console.notice(&format!("{name}: {message}"));
            OwnProgram::open(Arc::new(notice)).ok()
        });
        let own = own.flatten();
        let program = match own {
            Some(_) => RemoteProgram::Script,
            None => RemoteProgram::Named(named.unwrap_or_else(|| "haul".into())),
        };
        let shell = RemoteShell { command, program };
        let remote = RemoteEnd::start_with(&shell, &destination.host, Stdio::piped());
        let mut remote = remote.map_err(|error| error.to_string())?;
        if let Some(errors) = remote.take_errors() {
            let (console, name) = (console.clone(), name.clone());
            std::thread::spawn(move || print_errors(errors, &name, &console));
        }
        let pid = remote.pid();
        processes.add(pid);
        let (from, mut to) = remote.take_streams().ok_or("the other end has no streams")?;
        let mut from = BufReader::with_capacity(READ_BUFFER_BYTES, from);
        let request = Request {
            role: Role::Destination,
            paths: vec![destination.path.clone()],
            options: self.options.clone(),
            direct: self.request.clone(),
            is_chained: self.request.is_some(),
        };
        match haul_transfer::ask(&mut from, &mut to, &request, own.as_ref()) {
            Ok(answer) => {
                let abort = Box::new(move || {
                    let _ = rustix::process::kill_process(pid, Signal::TERM);
                });
                Ok(StartedHost {
                    host: Host { name, is_local: false, from, to, answer, abort },
                    remote,
                })
            }
            Err(error) => {
                drop((from, to));
                processes.remove(pid);
                Err(printable(&remote.explain(error).to_string()))
            }
        }
    }
}

/// Prints the lines of ssh and of the other end, each with the name of the host.
fn print_errors(errors: impl Read, name: &str, console: &Console) {
    let mut lines = BufReader::new(errors);
    let mut line = Vec::new();
    while let Ok(1..) = lines.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
        let text = String::from_utf8_lossy(&line);
        console.error_text(&format!("{name}: {}", text.trim_end()));
        line.clear();
    }
}
