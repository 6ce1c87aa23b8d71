//! `haul fleet push`: copies from the host of rank 0 to all hosts of a job.

use super::joined::{self, CONNECT_TIME_MAX, Joined, in_rank};
use crate::limits;
use crate::output::Failure;
use crate::transfer::READ_BUFFER_BYTES;
use crate::transfer::console::Console;
use crate::transfer::fan_out::{self, HostsResult};
use crate::transfer::options::{DataFromArgument, DeltaArgument, TransferOptions};
use crate::transfer::receive::{self, SILENCE_MAX, START_SILENCE_MAX};
use crate::transfer::run::check_deletion;
use clap::{ArgAction, Args};
use haul_fleet::Announcement;
use haul_transfer::{
    ControlListener, ControlReader, ControlStreams, DirectRequest, Error, Host, HostEnd,
    HostResult, Progress, Request, Role, SshConnection, StreamCount,
};
use std::ffi::OsString;
use std::io::{BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

/// The time for a reply of a rank.
const REPLY_TIME_MAX: Duration = Duration::from_secs(30);

/// Options of ssh and of a single host, which [`check`] refuses.
pub const REFUSED: [&str; 5] = ["rsh", "remote_haul", "no_bring", "streams", "data_from"];

#[derive(Debug, Args)]
pub struct FleetPushArguments {
    #[command(flatten)]
    options: TransferOptions,
    /// Print help. -h alone does so too
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// Files and directories on the host of rank 0; a directory with a slash at the end stands for
    /// its content
    #[arg(required = true, num_args = 1.., value_name = "SRC")]
    sources: Vec<OsString>,
    /// Where to on each host: a directory, or the new name of a single file
    #[arg(required = true, value_name = "DST")]
    destination: OsString,
}

/// A host, with streams of any kind.
type AnyHost = Host<Box<dyn Read + Send>, Box<dyn Write + Send>>;

/// Runs `haul fleet push`.
pub fn run(arguments: &FleetPushArguments, is_insecure: bool) -> Result<ExitCode, Failure> {
    let flags = &arguments.options;
    check(flags)?;
    // All ranks have the same options, so all ranks fail at once.
    flags.options()?;
    limits::raise_descriptor_limit();
    match joined::join(flags.data_port.clone().unwrap_or(0..=0), is_insecure)? {
        Joined::Zero { ranks, members, listener } => {
            FleetPush { arguments, ranks: &ranks, members: &members }.run(listener)
        }
        Joined::Other { rank, streams } => {
            let received = receive_from_rank_0(streams);
            received.map_err(|error| in_rank(rank, error)).map(|()| ExitCode::SUCCESS)
        }
        Joined::Nothing => Ok(ExitCode::SUCCESS),
    }
}

/// Refuses options of ssh and of a single host.
fn check(flags: &TransferOptions) -> Result<(), Failure> {
    if flags.delta == Some(DeltaArgument::Rolling) {
        return Err(Failure::bad_input(fan_out::NO_ROLLING));
    }
    let option = if flags.rsh.is_some() {
        "--rsh"
    } else if flags.remote_program().is_some() {
        "--remote-haul and --no-bring"
    } else if flags.streams != StreamCount::Auto {
        "--streams"
    } else if flags.data_from == DataFromArgument::There {
        "--data-from"
    } else {
        return Ok(());
    };
    let problem = format!("{option}: the launcher starts haul, and each host sends to the next");
    Err(Failure::bad_input(problem))
}

/// Receives as the first rank of another host.
fn receive_from_rank_0(streams: ControlStreams) -> Result<(), Error> {
    let ControlStreams { mut from, mut to, local, remote, .. } = streams;
    // Rank 0 waits for the other ranks before the request, and again before the first list.
    let limit = |from: &mut ControlReader, later| {
        from.set_silence_max(START_SILENCE_MAX, later).map_err(Error::Connection)
    };
    limit(&mut from, START_SILENCE_MAX)?;
    let mut from = BufReader::with_capacity(READ_BUFFER_BYTES, from);
    let request = haul_transfer::accept(&mut from, &mut to)?;
    limit(from.get_mut(), SILENCE_MAX)?;
    let connection = SshConnection { client: remote, server: local };
    receive::run(request, from, to, Progress::default(), false, Some(connection))
}

/// The part of rank 0.
struct FleetPush<'p> {
    arguments: &'p FleetPushArguments,
    ranks: &'p [Announcement],
    /// The first ranks of the other hosts.
    members: &'p [usize],
}

impl FleetPush<'_> {
    fn run(self, listener: ControlListener) -> Result<ExitCode, Failure> {
        let FleetPushArguments { options: flags, sources, .. } = self.arguments;
        let keys: Vec<_> = self.members.iter().map(|&rank| self.ranks[rank].key.clone()).collect();
        let sources = sources.iter().map(|source| source.as_bytes().to_vec()).collect();
        let sources = flags.list.sources(sources);
        match sources.and_then(|sources| check_deletion(flags, &sources).map(|()| sources)) {
            Ok(sources) => self.send(listener, &keys, &sources),
            Err(failure) => {
                // The other ranks end when their connections do.
                drop(listener.accept_all(&keys, REPLY_TIME_MAX));
                Err(failure)
            }
        }
    }

    fn send(
        &self,
        listener: ControlListener,
        keys: &[Vec<u8>],
        sources: &[Vec<u8>],
    ) -> Result<ExitCode, Failure> {
        let flags = &self.arguments.options;
        let started = Instant::now();
        let console = Console::new(flags.json, flags.quiet);
        let ports = flags.data_port.clone().unwrap_or(0..=0);
        let direct = (!flags.dry_run).then(|| DirectRequest::for_chain(flags.plain, ports));
        let direct = direct.transpose().map_err(Failure::failed)?;
        let request = Request {
            role: Role::Destination,
            paths: vec![self.arguments.destination.as_bytes().to_vec()],
            options: flags.options()?,
            is_chained: direct.is_some(),
            direct: direct.clone(),
        };
        let streams = listener.accept_all(keys, CONNECT_TIME_MAX).map_err(Failure::failed)?;
        let mut results = Vec::new();
        let sent = thread::scope(|scope| {
            let mut hosts = Vec::new();
            let (own, streams_of_own) = UnixStream::pair().map_err(Failure::failed)?;
            scope.spawn(move || receive_here(&streams_of_own));
            let own = own_streams(own, self.ranks[0].host_name.clone());
            let others = self.members.iter().zip(streams).map(|(&rank, streams)| {
                let name = self.ranks[rank].host_name.clone();
                match streams {
                    Some(streams) => host_of(streams, name).map_err(|error| error.to_string()),
                    None => Err(format!("no connection in {} s", CONNECT_TIME_MAX.as_secs())),
                }
            });
            let own = own.map_err(|error| error.to_string());
            let mut candidates = vec![(0, own)];
            candidates.extend(self.members.iter().copied().zip(others));
            let ask = |(rank, candidate): (usize, Result<AnyHost, String>)| {
                let request = &request;
                scope.spawn(move || (rank, candidate.and_then(|host| ready(host, request))))
            };
            let asked: Vec<_> = candidates.into_iter().map(ask).collect();
            // A panic shows in the scope.
            for (rank, ready) in asked.into_iter().filter_map(|asked| asked.join().ok()) {
                match ready {
                    Ok(host) => hosts.push(host),
                    Err(reason) => results.push(HostResult {
                        name: self.ranks[rank].host_name.clone(),
                        end: HostEnd::Failed(reason),
                    }),
                }
            }
            fan_out::send(flags, sources, hosts, direct.as_ref(), &console)
        });
        console.end_bar();
        results.extend(sent?);
        let result = HostsResult {
            results,
            is_dry_run: flags.dry_run,
            is_plain: flags.plain,
            seconds: started.elapsed().as_secs_f64(),
        };
        result.print(&console);
        Ok(ExitCode::from(result.exit_code()))
    }
}

/// Receives on the host of rank 0, as a thread of rank 0.
fn receive_here(stream: &UnixStream) {
    let Ok(mut from) = stream.try_clone() else { return };
    let mut to = stream;
    let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let connection = SshConnection { client: localhost, server: localhost };
    // The source gets the reason of a failure.
    let _ = haul_transfer::accept(&mut from, &mut to).and_then(|request| {
        receive::run(request, from, to, Progress::default(), false, Some(connection))
    });
    let _ = stream.shutdown(Shutdown::Both);
}

/// Asks a host for its part, which answers at once.
fn ready(mut host: AnyHost, request: &Request) -> Result<AnyHost, String> {
    let answer = haul_transfer::ask(&mut host.from, &mut host.to, request, None);
    host.answer = answer.map_err(|error| error.to_string())?;
    Ok(host)
}

fn own_streams(stream: UnixStream, name: String) -> std::io::Result<AnyHost> {
    let (from, aborted) = (stream.try_clone()?, stream.try_clone()?);
    Ok(Host {
        name,
        is_local: true,
        from: Box::new(from),
        to: Box::new(ClosingStream(stream)),
        answer: None,
        abort: Box::new(move || drop(aborted.shutdown(Shutdown::Both))),
    })
}

fn host_of(streams: ControlStreams, name: String) -> std::io::Result<AnyHost> {
    let abort = Box::new(streams.abort()?);
    let ControlStreams { mut from, to, .. } = streams;
    // A host sends a message at least each second.
    from.set_silence_max(REPLY_TIME_MAX, REPLY_TIME_MAX)?;
    Ok(Host { name, is_local: false, from: Box::new(from), to, answer: None, abort })
}

/// Ends the stream when it is dropped, although there are other descriptors of the socket.
struct ClosingStream(UnixStream);

impl Write for ClosingStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for ClosingStream {
    fn drop(&mut self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }
}
