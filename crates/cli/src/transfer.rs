//! `haul push` and `haul pull`: copy files and trees between hosts. Both start `haul receive` on
//! the other host through ssh.

mod file_list;
mod filters;
mod options;
mod receive;

use crate::daemon::signals::pipe_of;
use crate::limits;
use crate::output::Failure;
use clap::Args;
use haul_transfer::{
    AcceptedPaths, DeletionMode, DirectOffer, DirectReport, Error, FileError, Notice, Options,
    OwnProgram, RemoteEnd, RemotePath, RemoteProgram, RemoteShell, Request, Role, Session, Summary,
};
use options::TransferOptions;
pub use receive::{ReceiveArguments, receive};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The bytes that are read from a pipe at a time.
const PIPE_BYTES: usize = 256 << 10;
/// The exit code after a signal, as rsync's.
const SIGNAL_CODE: u8 = 20;
/// The exit code if single files could not be copied, as rsync's.
const PARTIAL_CODE: u8 = 23;
/// The exit code if single files vanished from the source, as rsync's.
const VANISHED_CODE: u8 = 24;
/// The exit code if something was not deleted, as rsync's.
const DELETE_CODE: u8 = 25;
/// The exit code if the destination cannot be used, as rsync's.
const DESTINATION_CODE: u8 = 11;
/// The exit code if the connection or the protocol failed, as rsync's.
const STREAM_CODE: u8 = 12;

#[derive(Debug, Args)]
pub struct TransferArguments {
    #[command(flatten)]
    pub options: TransferOptions,
    /// Files and directories to copy; a directory with a slash at the end stands for its content
    #[arg(required = true, num_args = 1.., value_name = "SRC")]
    pub sources: Vec<OsString>,
    /// Where to: a directory, or the new name of a single file
    #[arg(required = true, value_name = "DST")]
    pub destination: OsString,
}

/// Runs `haul push`.
pub fn push(arguments: &TransferArguments) -> Result<ExitCode, Failure> {
    let TransferArguments { options: flags, sources, destination } = arguments;
    let Some(destination) = RemotePath::parse(destination) else {
        let problem = format!(
            "{}: the destination of a push is on another host: write HOST:{0}",
            destination.display()
        );
        return Err(Failure::bad_input(problem));
    };
    if let Some(remote) = sources.iter().find(|source| RemotePath::parse(source).is_some()) {
        let problem = format!(
            "{}: the sources of a push are on this host (haul pull copies from another host; a \
             local name with a colon is written ./{0})",
            remote.display()
        );
        return Err(Failure::bad_input(problem));
    }
    if sources.iter().any(|source| source.is_empty()) {
        let problem = "a source is empty: write . for the current directory";
        return Err(Failure::bad_input(problem));
    }
    let sources = sources.iter().map(|source| source.as_bytes().to_vec()).collect();
    let sources = flags.list.sources(sources)?;
    let paths = vec![destination.path];
    run(flags, &destination.host, Role::Destination, paths, &sources, |session| {
        session.send(&sources)
    })
}

/// Runs `haul pull`.
pub fn pull(arguments: &TransferArguments) -> Result<ExitCode, Failure> {
    let TransferArguments { options: flags, sources, destination } = arguments;
    if RemotePath::parse(destination).is_some() {
        let problem = format!(
            "{}: the destination of a pull is on this host (haul push copies to another host; a \
             local name with a colon is written ./{0})",
            destination.display()
        );
        return Err(Failure::bad_input(problem));
    }
    let parse = |source: &OsString| {
        RemotePath::parse(source).ok_or_else(|| {
            let problem = "the sources of a pull are on another host: write HOST:PATH";
            Failure::bad_input(format!("{}: {problem}", source.display()))
        })
    };
    let sources = sources.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    let host = &sources[0].host;
    if let Some(other) = sources.iter().find(|source| source.host != *host) {
        let (host, other) = (host.display(), other.host.display());
        let problem = format!("{other}: a pull has one host, and {host} was named first");
        return Err(Failure::bad_input(problem));
    }
    let paths = sources.iter().map(|source| receive::without_tilde(&source.path)).collect();
    let paths = flags.list.sources(paths)?;
    let accepted = AcceptedPaths::of(paths.iter().map(|path| kept_names(flags, path)));
    run(flags, host, Role::Source, paths.clone(), &paths, |session| {
        session.receive(destination.as_bytes(), &accepted)
    })
}

/// The path that a source has below the destination.
fn kept_names(flags: &TransferOptions, source: &[u8]) -> Vec<Vec<u8>> {
    let is_relative = flags.relative || flags.list.is_given();
    haul_transfer::kept_names(OsStr::from_bytes(source).as_ref(), is_relative)
}

/// A transfer through the pipes of ssh.
type SshSession = Session<BufReader<std::process::ChildStdout>, std::process::ChildStdin>;

/// Starts the other end, asks for the transfer, runs this end, and reports the result.
fn run(
    flags: &TransferOptions,
    host: &OsStr,
    role: Role,
    paths: Vec<Vec<u8>>,
    sources: &[Vec<u8>],
    transfer: impl FnOnce(SshSession) -> Result<Summary, Error>,
) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    // A walk keeps the folders of its path open.
    limits::raise_descriptor_limit();
    let failed = |error: Error| {
        let is_destination = matches!(error, Error::Destination { .. });
        let code = if is_destination { DESTINATION_CODE } else { STREAM_CODE };
        Failure::with_code(printable(&error.to_string()), code)
    };
    if host.as_bytes().starts_with(b"-") {
        let problem = format!("{}: ssh would take this host for an option", host.display());
        return Err(Failure::bad_input(problem));
    }
    let options = flags.options()?;
    check_deletion(flags, &options, sources)?;
    let offer = flags.direct().map(|settings| DirectOffer::new(&settings)).transpose();
    let offer = offer.map_err(|error| {
        Failure::failed(format!("direct connections cannot be accepted here: {error}"))
    })?;
    let direct = offer.as_ref().map(|offer| offer.request().clone());
    let request = Request { role, paths, options, direct };
    let (shell, own) = remote_shell(flags)?;
    let mut remote = RemoteEnd::start(&shell, host).map_err(failed)?;
    let Some((from, mut to)) = remote.take_streams() else {
        return Err(Failure::failed("the other end has no streams"));
    };
    let (is_stopped, pid) = (stop_on_signals(&remote).map_err(Failure::failed)?, remote.pid());
    let mut from = BufReader::with_capacity(PIPE_BYTES, from);
    let (mut direct, is_aborted) = (None, Arc::new(AtomicBool::new(false)));
    let result =
        haul_transfer::ask(&mut from, &mut to, &request, own.as_ref()).and_then(|answer| {
            let notice = notice(flags.quiet);
            direct = offer.zip(answer).map(|(offer, answer)| offer.start(answer, host, notice));
            let mut session = Session::new(from, to, request.options).with_direct(direct.clone());
            if flags.verbose {
                session = session.with_on_file(|path| {
                    let _ = writeln!(io::stdout(), "{}", printable(&String::from_utf8_lossy(path)));
                });
            }
            let was_aborted = Arc::clone(&is_aborted);
            transfer(session.with_abort(move || {
                was_aborted.store(true, Relaxed);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }))
        });
    match result {
        Ok(summary) => {
            let _ = remote.wait();
            let direct = direct.map(|direct| direct.report());
            Ok(report(&summary, flags, direct, started.elapsed()))
        }
        Err(_) if is_stopped.load(Relaxed) => {
            let _ = remote.wait();
            Err(Failure::with_code("stopped by a signal; what is complete stays", SIGNAL_CODE))
        }
        // This process ended ssh, so the exit code of ssh explains nothing.
        Err(error) if is_aborted.load(Relaxed) => {
            let _ = remote.wait();
            Err(failed(error))
        }
        Err(error) => Err(failed(remote.explain(error))),
    }
}

/// How the other end is started, and this program if the other host may need it.
fn remote_shell(flags: &TransferOptions) -> Result<(RemoteShell, Option<OwnProgram>), Failure> {
    let command = flags.shell()?;
    let named =
        |haul| RemoteShell { command: command.clone(), program: RemoteProgram::Named(haul) };
    if let Some(haul) = flags.remote_program() {
        return Ok((named(haul), None));
    }
    // A program that cannot read its file starts the haul that is installed there.
    Ok(match OwnProgram::open(notice(flags.quiet)) {
        Ok(own) => (RemoteShell { command, program: RemoteProgram::Script }, Some(own)),
        Err(_) => (named("haul".into()), None),
    })
}

/// Refuses to delete if two sources may share a directory of the destination: what the sources lack
/// is known for each source alone.
fn check_deletion(
    flags: &TransferOptions,
    options: &Options,
    sources: &[Vec<u8>],
) -> Result<(), Failure> {
    let mut paths: Vec<_> = sources.iter().map(|source| kept_names(flags, source)).collect();
    // A path comes right before the paths below it.
    paths.sort_unstable();
    let are_distinct = paths.windows(2).all(|pair| !pair[1].starts_with(&pair[0]));
    if options.deletion.mode == DeletionMode::No || are_distinct {
        return Ok(());
    }
    let problem = "delete with several sources needs different names, and no slash at their ends";
    Err(Failure::bad_input(problem))
}

/// Prints why a direct connection is missing.
fn notice(is_quiet: bool) -> Notice {
    Arc::new(move |message| {
        if !is_quiet {
            let _ = writeln!(io::stderr(), "haul: {}", printable(message));
        }
    })
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

/// A size with two or three digits, such as `5.0 MiB`.
fn size_text(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let exponent = (bytes.max(1).ilog2() / 10) as usize;
    let scaled = bytes as f64 / 1024_f64.powi(exponent as i32);
    let digits = usize::from(exponent > 0 && scaled < 99.95);
    format!("{scaled:.digits$} {}", units[exponent])
}

/// A text of the other host, whose control characters must not reach the terminal.
fn printable(text: &str) -> String {
    let escape = |letter: char| {
        // Marks and overrides of the direction of text.
        let is_direction = matches!(
            letter,
            '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        if letter.is_control() || is_direction {
            letter.escape_default().to_string()
        } else {
            letter.to_string()
        }
    };
    text.chars().map(escape).collect()
}

/// The way that the content took.
fn way(summary: &Summary, direct: DirectReport) -> String {
    let DirectReport { streams, bytes, is_plain, is_in_kernel, .. } = direct;
    if summary.bytes_sent == 0 {
        return String::new();
    }
    if bytes == 0 {
        return " through ssh".into();
    }
    let cipher = match (is_plain, is_in_kernel) {
        (true, _) => "not encrypted",
        (false, true) => "TLS 1.3 in the kernel",
        (false, false) => "TLS 1.3",
    };
    let plural = if streams == 1 { "" } else { "s" };
    let percent = (100 * bytes).div_ceil(summary.bytes_sent).min(100);
    format!(" through {streams} direct stream{plural} ({percent} % of the bytes, {cipher})")
}

/// Prints the errors of single files and the summary.
fn report(
    summary: &Summary,
    options: &TransferOptions,
    direct: Option<DirectReport>,
    time: Duration,
) -> ExitCode {
    for FileError { path, problem, .. } in &summary.errors {
        let (path, problem) = (printable(path), printable(problem));
        let _ = writeln!(io::stderr(), "haul: {path}: {problem}");
    }
    if summary.errors_left_out > 0 {
        let _ = writeln!(io::stderr(), "haul: {} more errors", summary.errors_left_out);
    }
    for notice in summary.notices.iter().filter(|_| !options.quiet) {
        let _ = writeln!(io::stderr(), "haul: {}", printable(notice));
    }
    if !options.quiet {
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let size = size_text(summary.bytes_sent);
        let deleted = match (summary.entries_deleted, options.dry_run) {
            (0, _) => String::new(),
            (count, false) => format!(", {count} deleted"),
            (count, true) => format!(", {count} would be deleted"),
        };
        let held = match summary.bytes_held {
            0 => String::new(),
            bytes => format!(", {} were there from an interrupted transfer", size_text(bytes)),
        };
        let saved = match (summary.bytes_saved * 100).checked_div(summary.bytes_sent) {
            None | Some(0) => String::new(),
            Some(percent) => format!(", {percent} % less by compression"),
        };
        let linked = match summary.files_linked {
            0 => String::new(),
            count => format!(", {count} linked to an earlier copy"),
        };
        let _ = writeln!(
            io::stdout(),
            "{} file{} ({size}{saved}) {}{held}{linked}{deleted}, {} up to date, {} entr{} in all, \
             in {:.2} s{}",
            summary.files_sent,
            plural(summary.files_sent),
            if options.dry_run { "would be sent" } else { "sent" },
            summary.files_up_to_date,
            summary.entries,
            if summary.entries == 1 { "y" } else { "ies" },
            time.as_secs_f64(),
            direct.map_or_else(String::new, |direct| way(summary, direct)),
        );
    }
    let errors = summary.errors.len() as u64 + summary.errors_left_out;
    if errors == 0 && summary.deletions_refused > 0 {
        ExitCode::from(DELETE_CODE)
    } else if errors == 0 {
        ExitCode::SUCCESS
    } else if errors == summary.files_vanished {
        ExitCode::from(VANISHED_CODE)
    } else {
        ExitCode::from(PARTIAL_CODE)
    }
}
