//! Runs a command until the last of its processes ends.

use super::prove;
use crate::output::Failure;
use crate::user_command::PassedSignals;
use haul_run::{Descendants, NotLoaded, Proof, Session};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use std::io;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which the processes of the command are listed.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// Interval at which flags are read.
const FLAG_INTERVAL: Duration = Duration::from_millis(25);
/// The time that the processes have to end after SIGTERM. Then they are killed.
const END_MAX: Duration = Duration::from_secs(10);

/// A command whose processes are watched.
pub struct Supervised<'a> {
    session: &'a Session,
    /// Time of the start, to the second.
    pub started: jiff::Timestamp,
    /// Time of the start.
    pub began: Instant,
    descendants: Mutex<Descendants>,
    /// Whether `--stop` asked for copies.
    is_stopped: AtomicBool,
    proof: Mutex<Option<Proof>>,
}

impl<'a> Supervised<'a> {
    /// Prepares to run a command.
    pub fn new(session: &'a Session) -> Self {
        Self {
            session,
            started: jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default(),
            began: Instant::now(),
            descendants: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            proof: Mutex::default(),
        }
    }

    /// The processes that did not load the library.
    pub fn not_loaded(&self) -> Vec<NotLoaded> {
        self.descendants.lock().unwrap_or_else(PoisonError::into_inner).not_loaded()
    }

    /// The measured saving.
    pub fn proof(&self) -> Option<Proof> {
        *self.proof.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the command and waits until all of its processes ended, also the ones in the
    /// background. At SIGUSR1, calls `interim`. With `is_proving`, measures while the command runs.
    pub fn run(
        &self,
        command: &mut Command,
        is_proving: bool,
        interim: impl Fn(&Self) + Sync,
    ) -> Result<io::Result<ExitStatus>, Failure> {
        let signals = PassedSignals::catch()?;
        let is_asked = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR1, Arc::clone(&is_asked)).map_err(Failure::failed)?;
        let must_copy = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR2, Arc::clone(&must_copy)).map_err(Failure::failed)?;
        let child = match haul_run::spawn(command) {
            Ok(child) => child,
            Err(error) => return Ok(Err(error)),
        };
        let name = command.get_program().to_string_lossy().into_owned();
        let is_done = AtomicBool::new(false);
        let has_ended = AtomicBool::new(false);
        Ok(thread::scope(|scope| {
            let proving = scope.spawn(|| {
                let report = |proof| {
                    *self.proof.lock().unwrap_or_else(PoisonError::into_inner) = Some(proof);
                };
                if is_proving {
                    prove::measure_pairs(self.session, &has_ended, &self.is_stopped, report);
                }
            });
            scope.spawn(|| self.look_until(&is_done));
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    if is_asked.swap(false, Relaxed) {
                        interim(self);
                    }
                    if must_copy.swap(false, Relaxed) {
                        self.is_stopped.store(true, Relaxed);
                        self.session.set_eliding(false);
                        eprintln!("haul: the command copies everything from now on (--stop)");
                    }
                    thread::sleep(FLAG_INTERVAL);
                }
            });
            // The broker is a child of this process too, and outlives the command.
            let broker = self.session.broker();
            let status =
                signals.wait_until_ended(child, |child| haul_run::reap_others_until(child, broker));
            has_ended.store(true, Relaxed);
            // The meter's processes are children also, until the measurement ended.
            let _ = proving.join();
            wait_for_background(&signals, &name, broker);
            is_done.store(true, Relaxed);
            status
        }))
    }

    fn look_until(&self, is_done: &AtomicBool) {
        let mut next = Instant::now();
        while !is_done.load(Relaxed) {
            if Instant::now() >= next {
                let counted = self.session.processes();
                self.descendants
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .look(&counted, self.session.broker());
                next = Instant::now() + LOOK_INTERVAL;
            }
            thread::sleep(FLAG_INTERVAL);
        }
    }
}

/// Lets another `haul run` copy everything from now on.
pub fn stop_eliding(process: i32) -> Result<ExitCode, Failure> {
    // The signal ends a process that does not handle it.
    let read = |name: &str| std::fs::read(format!("/proc/{process}/{name}")).unwrap_or_default();
    let command_line = read("cmdline");
    let is_run = command_line.split(|&byte| byte == 0).nth(1).is_some_and(|word| word == b"run");
    let program = |process: &str| std::fs::read_link(format!("/proc/{process}/exe")).ok();
    let is_same = program("self").is_some_and(|own| program(&process.to_string()) == Some(own));
    let is_haul = is_same || read("comm").trim_ascii_end() == b"haul";
    let named = Pid::from_raw(process).filter(|_| is_run && is_haul);
    let named = named.ok_or_else(|| {
        Failure::bad_input(format!(
            "process {process} is not a running haul run (find it with: pgrep -x haul)"
        ))
    })?;
    kill_process(named, Signal::USR2)
        .map_err(|errno| Failure::failed(format!("cannot signal process {process}: {errno}")))?;
    eprintln!("haul: the command of process {process} copies everything from now on");
    Ok(ExitCode::SUCCESS)
}

/// Waits for the processes that the command left behind. A signal ends them.
fn wait_for_background(signals: &PassedSignals, name: &str, broker: u32) {
    let mut is_said = false;
    let began = Instant::now();
    let mut kill_at: Option<Instant> = None;
    while haul_run::reap_remaining(broker) {
        if !is_said && began.elapsed() > LOOK_INTERVAL {
            is_said = true;
            eprintln!(
                "haul: {name} ended, but {} of its processes still run: the report follows when \
                 they end (Ctrl-C ends them)",
                haul_run::running(broker).len()
            );
        }
        if let Some(signal) = signals.take_pending() {
            kill_all(signal, broker);
            kill_at = kill_at.or(Some(Instant::now() + END_MAX));
        }
        if kill_at.is_some_and(|at| Instant::now() >= at) {
            kill_all(Signal::KILL, broker);
        }
        thread::sleep(FLAG_INTERVAL);
    }
}

fn kill_all(signal: Signal, broker: u32) {
    for process in haul_run::running(broker) {
        if let Some(process) = Pid::from_raw(process.cast_signed()) {
            // Fails if the process ended.
            let _ = kill_process(process, signal);
        }
    }
}
