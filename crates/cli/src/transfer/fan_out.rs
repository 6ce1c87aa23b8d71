//! `haul push` to several hosts, which pass the content on from host to host.

mod hosts_result;
mod start;

use super::console::Console;
use super::options::{DeltaArgument, TransferOptions};
use super::text::printable;
use super::watch::{self, Observer};
use super::{SIGNAL_CODE, STREAM_CODE};
use crate::daemon::signals::pipe_of;
use crate::limits;
use crate::output::Failure;
use haul_transfer::{
    DataFrom, DirectRequest, Host, HostEnd, HostResult, Progress, RemotePath, Role, StreamCount,
    send_to_all,
};
pub use hosts_result::HostsResult;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use start::StartedHost;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The processes of ssh, to end them.
#[derive(Debug, Clone, Default)]
pub struct Processes(Arc<(Mutex<Vec<Pid>>, AtomicBool)>);

impl Processes {
    fn pids(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process. After [`Processes::stop`], the process ends at once.
    pub fn add(&self, pid: Pid) {
        self.pids().push(pid);
        if self.is_stopped() {
            end(pid);
        }
    }

    /// Removes a process before it is waited for, because another process may get its number.
    pub fn remove(&self, pid: Pid) {
        self.pids().retain(|one| *one != pid);
    }

    /// Ends all processes but these.
    pub fn end_others(&self, kept: &[Pid]) {
        self.pids().iter().filter(|pid| !kept.contains(pid)).copied().for_each(end);
    }

    fn stop(&self) {
        self.0.1.store(true, Relaxed);
        self.end_others(&[]);
    }

    fn is_stopped(&self) -> bool {
        self.0.1.load(Relaxed)
    }
}

fn end(pid: Pid) {
    let _ = rustix::process::kill_process(pid, Signal::TERM);
}

/// Why `--delta=rolling` is refused: each host would read its whole version before the next host.
pub const NO_ROLLING: &str = "--delta=rolling needs one host: several hosts can compare by --delta";

/// What is sent, and where to.
pub struct FanOut<'f> {
    pub flags: &'f TransferOptions,
    pub sources: &'f [Vec<u8>],
    pub destinations: Vec<RemotePath>,
}

impl FanOut<'_> {
    /// Runs the transfer and reports the result.
    pub fn run(&self) -> Result<ExitCode, Failure> {
        self.check()?;
        let console = Console::new(self.flags.json, self.flags.quiet);
        let started = Instant::now();
        limits::raise_descriptor_limit();
        let processes = Processes::default();
        stop_on_signals(&processes).map_err(Failure::failed)?;
        let mut results = self.round(&self.destinations, &console, &processes)?;
        // The hosts that were too slow for the others go on where they were, after the others.
        let is_slow = |result: &HostResult| matches!(result.end, HostEnd::Slow(_));
        let slow: Vec<_> = (0..results.len()).filter(|&at| is_slow(&results[at])).collect();
        if !slow.is_empty() && !processes.is_stopped() {
            for &at in &slow {
                if let HostResult { name, end: HostEnd::Slow(reason) } = &results[at] {
                    console.notice(&format!("{name}: {reason}, so {name} gets the rest now"));
                }
            }
            let again: Vec<_> = slow.iter().map(|&at| self.destinations[at].clone()).collect();
            let late = self.round(&again, &console, &processes)?;
            for (at, result) in slow.into_iter().zip(late) {
                results[at] = result;
            }
        }
        console.end_bar();
        if processes.is_stopped() {
            let text = "stopped by a signal; what arrived stays, and the same command goes on";
            return Err(Failure::with_code(text, SIGNAL_CODE));
        }
        let result = HostsResult {
            results,
            is_dry_run: self.flags.dry_run,
            is_plain: self.flags.plain,
            seconds: started.elapsed().as_secs_f64(),
        };
        result.print(&console);
        Ok(ExitCode::from(result.exit_code()))
    }

    /// Refuses what does not work with several hosts.
    fn check(&self) -> Result<(), Failure> {
        let flags = self.flags;
        if flags.streams == StreamCount::Exactly(0) {
            let problem = "--streams 0: several hosts need connections between the hosts";
            return Err(Failure::bad_input(problem));
        }
        if flags.direct().is_some_and(|direct| direct.from == DataFrom::There) {
            let problem = "--data-from there: each of several hosts waits for the host before";
            return Err(Failure::bad_input(problem));
        }
        if flags.delta == Some(DeltaArgument::Rolling) {
            return Err(Failure::bad_input(NO_ROLLING));
        }
        for (at, destination) in self.destinations.iter().enumerate() {
            let name = destination.host.display();
            if destination.host.as_bytes().starts_with(b"-") {
                let problem = format!("{name}: ssh would take this host for an option");
                return Err(Failure::bad_input(problem));
            }
            let host = |path: &RemotePath| {
                let host = path.host.as_bytes();
                host.rsplit(|&byte| byte == b'@').next().unwrap_or(host).to_vec()
            };
            if self.destinations[..at].iter().any(|other| host(other) == host(destination)) {
                let problem = format!("{name} is named twice: name each host once");
                return Err(Failure::bad_input(problem));
            }
        }
        Ok(())
    }

    /// Sends to these hosts. The results are in the order of the hosts.
    fn round(
        &self,
        destinations: &[RemotePath],
        console: &Console,
        processes: &Processes,
    ) -> Result<Vec<HostResult>, Failure> {
        let options = self.flags.options()?;
        let direct = self.flags.direct();
        let request = direct.map(|direct| DirectRequest::for_chain(direct.is_plain, direct.ports));
        let request = request.transpose().map_err(Failure::failed)?;
        let starter = start::Starter { flags: self.flags, options: &options, request: &request };
        let started = starter.start_all(destinations, console, processes)?;
        let mut results: Vec<_> = destinations.iter().map(|_| None).collect();
        let (mut hosts, mut places, mut remotes) = (Vec::new(), Vec::new(), Vec::new());
        for (at, started) in started.into_iter().enumerate() {
            match started {
                Ok(StartedHost { host, remote }) => {
                    hosts.push(host);
                    places.push(at);
                    remotes.push(remote);
                }
                Err(reason) => {
                    let name = printable(&destinations[at].host.to_string_lossy());
                    results[at] = Some(HostResult { name, end: HostEnd::Failed(reason) });
                }
            }
        }
        if !hosts.is_empty() {
            let sent = send(self.flags, self.sources, hosts, request.as_ref(), console);
            for remote in remotes {
                processes.remove(remote.pid());
                let _ = remote.wait();
            }
            for (at, result) in places.into_iter().zip(sent?) {
                results[at] = Some(result);
            }
        }
        Ok(results.into_iter().flatten().collect())
    }
}

/// Sends to hosts that are ready, and shows the progress.
pub fn send<R: Read + Send, W: Write + Send>(
    flags: &TransferOptions,
    sources: &[Vec<u8>],
    hosts: Vec<Host<R, W>>,
    request: Option<&DirectRequest>,
    console: &Console,
) -> Result<Vec<HostResult>, Failure> {
    let progress = Progress::default();
    let observer = Observer {
        progress: progress.clone(),
        direct: None,
        role: Role::Destination,
        ssh: None,
        hosts: hosts.len(),
        started: Instant::now(),
        begun: Instant::now(),
    };
    let watch = (!flags.dry_run)
        .then(|| watch::start(observer, console.clone(), String::new(), flags.shows_progress()));
    let (verbose, notices, lists_files) = (console.clone(), console.clone(), flags.verbose);
    let on_file = Box::new(move |path: &[u8]| {
        if lists_files {
            verbose.file(path);
        }
    });
    let notice = Arc::new(move |message: &str| notices.notice(message));
    let options = flags.options()?;
    let sent = send_to_all(hosts, request, sources, options, &progress, on_file, notice);
    // So that nothing is printed after the result.
    watch.flatten().map(std::thread::JoinHandle::join);
    sent.map_err(|error| Failure::with_code(error, STREAM_CODE))
}

/// Ends all connections at the first signal that would end this process.
fn stop_on_signals(processes: &Processes) -> io::Result<()> {
    let (mut signals_rx, processes) = (pipe_of(&[SIGINT, SIGTERM, SIGHUP])?, processes.clone());
    std::thread::Builder::new().name("haul-signals".into()).spawn(move || {
        if signals_rx.read_exact(&mut [0]).is_ok() {
            processes.stop();
        }
        if signals_rx.read_exact(&mut [0]).is_ok() {
            std::process::exit(SIGNAL_CODE.into());
        }
    })?;
    Ok(())
}
