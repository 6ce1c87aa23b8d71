//! `haul push` and `haul pull`: copy files and trees between hosts. Both start `haul receive` on
//! the other host through ssh.

mod bottleneck;
pub mod console;
pub mod fan_out;
mod file_list;
mod filters;
mod line;
pub mod options;
pub mod receive;
mod report;
pub mod run;
pub mod text;
mod timed_file;
mod watch;

use crate::output::Failure;
use clap::{ArgAction, Args};
use fan_out::FanOut;
use haul_transfer::{AcceptedPaths, RemotePath, Role};
pub use line::TransferLine;
use options::TransferOptions;
pub use receive::{ReceiveArguments, receive};
use run::{Task, run};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

/// The bytes that are read from a pipe at a time.
pub const READ_BUFFER_BYTES: usize = 256 << 10;
/// The exit code after a signal, as rsync's.
const SIGNAL_CODE: u8 = 20;
/// The exit code if single files could not be copied, as rsync's.
const PARTIAL_CODE: u8 = 23;
/// The exit code if single files vanished from the source, as rsync's.
const VANISHED_CODE: u8 = 24;
/// The exit code if something was not deleted, as rsync's.
const DELETE_CODE: u8 = 25;
/// The exit code if some of several hosts do not have the copy.
const SOME_HOSTS_CODE: u8 = 26;
/// The exit code if the destination cannot be used, as rsync's.
const DESTINATION_CODE: u8 = 11;
/// The exit code if the connection or the protocol failed, as rsync's.
pub const STREAM_CODE: u8 = 12;

#[derive(Debug, Args)]
pub struct TransferArguments {
    #[command(flatten)]
    pub options: TransferOptions,
    /// Print help. -h alone does so too
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// Files and directories to copy; a directory with a slash at the end stands for its content
    #[arg(required = true, num_args = 1.., value_name = "SRC")]
    pub sources: Vec<OsString>,
    /// Where to: a directory, or the new name of a single file; for a push also several, each on
    /// another host
    #[arg(required = true, value_name = "DST")]
    pub destination: OsString,
}

/// Runs `haul push`.
pub fn push(arguments: &TransferArguments) -> Result<ExitCode, Failure> {
    let TransferArguments { options: flags, sources, destination, .. } = arguments;
    let (sources, mut destinations) = split_destinations(sources);
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
    run::check_deletion(flags, &sources)?;
    if !destinations.is_empty() {
        destinations.push(destination);
        return FanOut { flags, sources: &sources, destinations }.run();
    }
    let (host, paths) = (&destination.host, &[destination.path]);
    let remote_role = Role::Destination;
    let task = Task { flags, host, remote_role, remote_paths: paths, sources: &sources };
    run(task, |session| session.send(&sources))
}

/// Splits the destinations on other hosts from the end of the sources. Without a source, nothing is
/// split.
fn split_destinations(arguments: &[OsString]) -> (&[OsString], Vec<RemotePath>) {
    let is_local = |argument: &OsString| RemotePath::parse(argument).is_none();
    let Some(last) = arguments.iter().rposition(is_local) else { return (arguments, Vec::new()) };
    let (sources, destinations) = arguments.split_at(last + 1);
    (sources, destinations.iter().filter_map(|one| RemotePath::parse(one)).collect())
}

/// Runs `haul pull`.
pub fn pull(arguments: &TransferArguments) -> Result<ExitCode, Failure> {
    let TransferArguments { options: flags, sources, destination, .. } = arguments;
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
    let remote_role = Role::Source;
    let task = Task { flags, host, remote_role, remote_paths: &paths, sources: &paths };
    run(task, |session| session.receive(destination.as_bytes(), &accepted))
}

/// The path that a source has below the destination.
fn kept_names(flags: &TransferOptions, source: &[u8]) -> Vec<Vec<u8>> {
    let is_relative = flags.relative || flags.list.is_given();
    haul_transfer::kept_names(OsStr::from_bytes(source).as_ref(), is_relative)
}
