//! Runs a transfer from the user's end.

use super::console::Console;
use super::line::{FailedLine, TransferLine};
use super::options::TransferOptions;
use super::report::TransferResult;
use super::text::printable;
use super::watch::{self, Observer};
use super::{DESTINATION_CODE, READ_BUFFER_BYTES, SIGNAL_CODE, STREAM_CODE, kept_names};
use crate::daemon::signals::pipe_of;
use crate::limits;
use crate::output::Failure;
use haul_transfer::{
    DeletionMode, DirectOffer, DirectStreams, Error, OwnProgram, Progress, RemoteEnd,
    RemoteProgram, RemoteShell, Request, Role, Session, Summary, cpu_of,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsStr;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::process::{ChildStdin, ChildStdout, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Instant;

/// A transfer through the pipes of ssh.
pub type SshSession = Session<BufReader<ChildStdout>, ChildStdin>;

/// What is copied from where to where.
#[derive(Debug, Clone, Copy)]
pub struct Task<'t> {
    pub flags: &'t TransferOptions,
    /// The other host.
    pub host: &'t OsStr,
    /// Whether the other host is the source or the destination.
    pub remote_role: Role,
    /// The paths on the other host.
    pub remote_paths: &'t [Vec<u8>],
    pub sources: &'t [Vec<u8>],
}

/// Starts the other end, asks for the transfer, runs this end, and reports the result.
pub fn run(
    task: Task<'_>,
    transfer: impl FnOnce(SshSession) -> Result<Summary, Error>,
) -> Result<ExitCode, Failure> {
    let console = Console::new(task.flags.json, task.flags.quiet);
    let result = task.run(&console, transfer);
    console.end_bar();
    match result {
        Ok(result) => {
            result.print(&console);
            Ok(ExitCode::from(result.exit_code()))
        }
        Err(failure) => {
            if console.is_json() {
                let (message, exit_code) = (failure.to_string(), failure.code());
                console.json(&TransferLine::Failed(FailedLine { message, exit_code }));
            }
            Err(failure)
        }
    }
}

impl Task<'_> {
    fn run(
        self,
        console: &Console,
        transfer: impl FnOnce(SshSession) -> Result<Summary, Error>,
    ) -> Result<TransferResult, Failure> {
        let Self { flags, host, remote_role: role, .. } = self;
        let started = Instant::now();
        // A walk keeps the folders of its path open.
        limits::raise_descriptor_limit();
        if host.as_bytes().starts_with(b"-") {
            let problem = format!("{}: ssh would take this host for an option", host.display());
            return Err(Failure::bad_input(problem));
        }
        let options = flags.options()?;
        check_deletion(flags, self.sources)?;
        let offer = flags.direct().map(|settings| DirectOffer::new(&settings)).transpose();
        let offer = offer.map_err(|error| {
            Failure::failed(format!("direct connections cannot be accepted here: {error}"))
        })?;
        let direct = offer.as_ref().map(|offer| offer.request().clone());
        let paths = self.remote_paths.to_vec();
        let request = Request { role, paths, options, direct, is_chained: false };
        let (shell, own) = self.remote_shell(console)?;
        let mut remote = RemoteEnd::start(&shell, host).map_err(|error| self.failed(&error))?;
        let Some((from, mut to)) = remote.take_streams() else {
            return Err(Failure::failed("the other end has no streams"));
        };
        let (is_stopped, pid) = (stop_on_signals(&remote).map_err(Failure::failed)?, remote.pid());
        let mut from = BufReader::with_capacity(READ_BUFFER_BYTES, from);
        let (mut observer, mut watch) = (None, None);
        let is_aborted = Arc::new(AtomicBool::new(false));
        let answer = haul_transfer::ask(&mut from, &mut to, &request, own.as_ref());
        let result = answer.and_then(|answer| {
            let notice = console.clone();
            let notice = Arc::new(move |message: &str| notice.notice(message));
            let direct = offer.zip(answer).map(|(offer, answer)| offer.start(answer, host, notice));
            let observed = observer.insert(self.observe(direct, pid, started));
            watch = self.watch(observed, console);
            let was_aborted = Arc::clone(&is_aborted);
            let session = Session::new(from, to, request.options)
                .with_direct(observed.direct.clone())
                .with_progress(observed.progress.clone())
                .with_abort(move || {
                    was_aborted.store(true, Relaxed);
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                });
            let console = console.clone();
            if !flags.verbose {
                return transfer(session);
            }
            transfer(session.with_on_file(move |path| console.file(path)))
        });
        // So that nothing is printed after the result.
        watch.map(JoinHandle::join);
        match (result, observer) {
            (Ok(summary), Some(observer)) => {
                let result = self.result(summary, &observer);
                let _ = remote.wait();
                Ok(result)
            }
            (Err(error), _) => {
                let (is_stopped, is_aborted) = (is_stopped.load(Relaxed), is_aborted.load(Relaxed));
                Err(self.explain(error, remote, is_stopped, is_aborted))
            }
            (Ok(_), None) => Err(Failure::failed("a transfer without a beginning")),
        }
    }

    fn observe(
        self,
        direct: Option<DirectStreams>,
        ssh: rustix::process::Pid,
        started: Instant,
    ) -> Observer {
        let (progress, role, begun) = (Progress::default(), self.remote_role, Instant::now());
        Observer { progress, direct, role, ssh: Some(ssh), hosts: 1, started, begun }
    }

    /// Begins to show the transfer.
    fn watch(self, observer: &Observer, console: &Console) -> Option<JoinHandle<()>> {
        if self.flags.dry_run {
            return None;
        }
        let (console, host) = (console.clone(), self.host_name());
        watch::start(observer.clone(), console, host, self.flags.shows_progress())
    }

    /// The failure of a transfer that a signal or this process ended, or something else.
    fn explain(
        self,
        error: Error,
        remote: RemoteEnd,
        is_stopped: bool,
        is_aborted: bool,
    ) -> Failure {
        if is_stopped {
            let _ = remote.wait();
            let text = "stopped by a signal; what arrived stays, and the same command goes on";
            return Failure::with_code(text, SIGNAL_CODE);
        }
        if is_aborted {
            // This process ended ssh, so the exit code of ssh explains nothing.
            let _ = remote.wait();
            return self.failed(&error);
        }
        self.failed(&remote.explain(error))
    }

    /// The failure of a transfer.
    fn failed(self, error: &Error) -> Failure {
        if let Error::Destination { path, problem } = error {
            let is_there = self.remote_role == Role::Destination;
            let host = if is_there { format!("{}:", self.host_name()) } else { String::new() };
            let text = format!("{host}{}: {}", printable(path), printable(problem));
            return Failure::with_code(text, DESTINATION_CODE);
        }
        Failure::with_code(printable(&error.to_string()), STREAM_CODE)
    }

    fn host_name(self) -> String {
        printable(&self.host.to_string_lossy())
    }

    fn result(self, summary: Summary, observer: &Observer) -> TransferResult {
        let snapshot = observer.progress.snapshot();
        let ssh_cpu = observer.ssh.and_then(cpu_of).unwrap_or(0.0);
        TransferResult {
            summary,
            direct: observer.direct.as_ref().map(DirectStreams::report),
            host: self.host_name(),
            is_destination_there: self.remote_role == Role::Destination,
            is_dry_run: self.flags.dry_run,
            lists_files: self.flags.verbose,
            seconds: observer.started.elapsed().as_secs_f64(),
            cpu: [
                snapshot.own.process_cpu + ssh_cpu,
                snapshot.peer.process_cpu + snapshot.peer.ssh_cpu,
            ],
            wait: observer.wait(),
        }
    }

    /// The command that starts the other end, and this program if the other host may need a copy.
    fn remote_shell(self, console: &Console) -> Result<(RemoteShell, Option<OwnProgram>), Failure> {
        let flags = self.flags;
        let command = flags.shell()?;
        let named =
            |haul| RemoteShell { command: command.clone(), program: RemoteProgram::Named(haul) };
        if let Some(haul) = flags.remote_program() {
            return Ok((named(haul), None));
        }
        // A program that cannot read its file starts the haul that is installed there.
        let notice = console.clone();
        let notice = Arc::new(move |message: &str| notice.notice(message));
        Ok(match OwnProgram::open(notice) {
            Ok(own) => (RemoteShell { command, program: RemoteProgram::Script }, Some(own)),
            Err(_) => (named("haul".into()), None),
        })
    }
}

/// Refuses to delete if two sources may share a directory of the destination: what the sources lack
/// is known for each source alone.
pub fn check_deletion(flags: &TransferOptions, sources: &[Vec<u8>]) -> Result<(), Failure> {
    let mut paths: Vec<_> = sources.iter().map(|source| kept_names(flags, source)).collect();
    // A path comes right before the paths below it.
    paths.sort_unstable();
    let are_distinct = paths.windows(2).all(|pair| !pair[1].starts_with(&pair[0]));
    if flags.options()?.deletion.mode == DeletionMode::No || are_distinct {
        return Ok(());
    }
    let problem = "--delete with several sources needs different names, and no slash at their ends";
    Err(Failure::bad_input(problem))
}

/// Ends the connection at the first signal that would end this process, so that this end removes
/// its partial files. The result tells whether a signal came.
fn stop_on_signals(remote: &RemoteEnd) -> io::Result<Arc<AtomicBool>> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let (mut signals_rx, was_stopped) = (pipe_of(&[SIGINT, SIGTERM, SIGHUP])?, is_stopped.clone());
    let pid = remote.pid();
    std::thread::Builder::new().name("haul-signals".into()).spawn(move || {
        if signals_rx.read_exact(&mut [0]).is_ok() {
            was_stopped.store(true, Relaxed);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if signals_rx.read_exact(&mut [0]).is_ok() {
            std::process::exit(SIGNAL_CODE.into());
        }
    })?;
    Ok(is_stopped)
}
