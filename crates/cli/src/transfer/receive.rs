//! `haul receive`: the other end of `haul push` and `haul pull`.

use super::timed_file::TimedFile;
use super::{READ_BUFFER_BYTES, STREAM_CODE};
use crate::limits;
use crate::output::{self, Failure};
use clap::Args;
use haul_server::sandbox::{self, AccessRights, PortRights};
use haul_transfer::{
    AcceptedPaths, DirectAnswer, Error, Progress, Request, Response, Restriction, Role, SPEAKS,
    Session, SshConnection, VERSION,
};
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The time until the first message of the source of a chain, which waits for the other hosts.
pub const START_SILENCE_MAX: Duration = Duration::from_secs(120);
/// The time without a message after which the source of a chain is lost. The source sends a message
/// each second.
pub const SILENCE_MAX: Duration = Duration::from_secs(12);

#[derive(Debug, Args)]
pub struct ReceiveArguments {
    /// Keep to one directory, for command= in authorized_keys: paths begin there, and no other
    /// directory can be read or written, but for the time zones (Landlock, Linux 5.13)
    #[arg(long, value_name = "DIR")]
    only: Option<PathBuf>,
    /// Refuse to write
    #[arg(long, requires = "only", conflicts_with = "append_only")]
    read_only: bool,
    /// Refuse to read, and to replace, change or delete what exists
    #[arg(long, requires = "only")]
    append_only: bool,
    /// Exit with 0 if this is the version of the protocol, and with 1 otherwise
    #[arg(long, value_name = "VERSION", hide = true)]
    speaks: Option<u32>,
}

impl ReceiveArguments {
    /// What may be asked for, and the only folder; `None`: everything.
    fn restriction(&self) -> Option<(&Path, Restriction)> {
        let restriction = match (self.read_only, self.append_only) {
            (true, _) => Restriction::ReadOnly,
            (_, true) => Restriction::AppendOnly,
            _ => Restriction::ReadWrite,
        };
        self.only.as_deref().map(|folder| (folder, restriction))
    }
}

/// Runs `haul receive`: carries out what the user's end asks for on standard input.
pub fn receive(arguments: &ReceiveArguments) -> Result<ExitCode, Failure> {
    if let Some(version) = arguments.speaks {
        if version != VERSION {
            return Ok(ExitCode::FAILURE);
        }
        // So that no other program called haul passes for this one.
        output::print(&format!("{SPEAKS} {version}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    if io::stdin().is_terminal() {
        let problem = "haul push and haul pull start this command on the other host, and speak to \
                       it by standard input";
        return Err(Failure::bad_input(problem));
    }
    let failed = |error: io::Error| Failure::failed(error);
    let from = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let to = io::stdout().as_fd().try_clone_to_owned().map_err(failed)?;
    // The streams must close when the transfer ends, so no other descriptor of them stays open.
    let null = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|errno| failed(errno.into()))?;
    rustix::stdio::dup2_stdout(&null).map_err(|errno| failed(errno.into()))?;
    limits::raise_descriptor_limit();
    haul_transfer::enlarge_pipe(from.as_fd());
    haul_transfer::enlarge_pipe(to.as_fd());
    let restriction = arguments.restriction();
    // Progress opens a file of sshd, which the process cannot open after the restriction.
    let progress = Progress::default();
    if let Some((folder, restriction)) = restriction {
        confine(folder, restriction)?;
    }
    let mut from = BufReader::with_capacity(READ_BUFFER_BYTES, TimedFile::new(from.into()));
    let mut to = File::from(to);
    let result = haul_transfer::accept(&mut from, &mut to).and_then(|mut request| {
        request.paths.iter_mut().for_each(|path| *path = without_tilde(path));
        let refusal = restriction.map(|(_, restriction)| restriction.apply(&mut request));
        if let Some(Err(reason)) = refusal {
            return haul_transfer::respond(&mut to, &Response::Refuses(reason));
        }
        if request.is_chained {
            from.get_mut().set_silence_max(START_SILENCE_MAX, SILENCE_MAX);
        }
        run(request, from, to, progress, restriction.is_some(), ssh_connection())
    });
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // The user's end reports the other errors.
        Err(error @ (Error::Connection(_) | Error::Protocol(_))) => {
            Err(Failure::with_code(error, STREAM_CODE))
        }
        Err(_) => Ok(ExitCode::from(STREAM_CODE)),
    }
}

/// Runs this end of a transfer. An end that is confined to a folder opens no connections.
pub fn run(
    request: Request,
    from: impl Read + Send,
    mut to: impl Write + Send,
    progress: Progress,
    is_confined: bool,
    connection: Option<SshConnection>,
) -> Result<(), Error> {
    if is_confined && request.is_chained {
        let reason =
            "haul receive --only passes nothing on to other hosts: push to this host alone";
        return haul_transfer::respond(&mut to, &Response::Refuses(reason.into()));
    }
    let (answer, direct) = match &request.direct {
        Some(direct) if is_confined && direct.makes_other_connect() => {
            let reason = "haul receive --only opens no connections: leave out --data-from there";
            (Some(DirectAnswer::Refuses(reason.into())), None)
        }
        Some(direct) => {
            let (answer, direct) = haul_transfer::answer(direct, connection);
            (Some(answer), direct)
        }
        None => (None, None),
    };
    haul_transfer::respond(&mut to, &Response::Begins(answer))?;
    let chain = request.direct.filter(|_| request.is_chained);
    let session = Session::new(from, to, request.options).with_direct(direct).with_chain(chain);
    let session = session.with_progress(progress);
    let ended = match (request.role, &request.paths[..]) {
        (Role::Destination, [path]) => session.receive(path, &AcceptedPaths::All),
        (Role::Destination, _) => Err(Error::Protocol("not one destination")),
        (Role::Source, paths) => session.send(paths),
    };
    ended.map(drop)
}

/// Lets this process use one folder, in which it runs from now on.
fn confine(folder: &Path, restriction: Restriction) -> Result<(), Failure> {
    let name = folder.display();
    std::env::set_current_dir(folder)
        .map_err(|error| Failure::bad_input(format!("--only {name}: {error}")))?;
    let rights = match restriction {
        Restriction::ReadOnly => AccessRights::Read,
        _ => AccessRights::Tree,
    };
    // The umask, and the identity of this start of the host, which journals name.
    let status = ("/proc/self/status".into(), AccessRights::ReadFile);
    let boot_id = ("/proc/sys/kernel/random/boot_id".into(), AccessRights::ReadFile);
    let paths = [(PathBuf::from("."), rights), status, boot_id];
    let ports = PortRights { binds_all: true, ..PortRights::default() };
    let caveat = sandbox::restrict(&paths, ports).map_err(Failure::failed)?;
    let is_enforced = caveat.is_none_or(|caveat| caveat != sandbox::NOT_ENFORCED);
    let is_root = std::env::current_dir().is_ok_and(|folder| folder == Path::new("/"));
    if !is_enforced || !is_root && std::fs::read_dir("/").is_ok() {
        return Err(Failure::failed(
            "this kernel does not enforce --only: it needs Landlock (Linux 5.13)",
        ));
    }
    Ok(())
}

/// A path of the user's home directory, which the shell would replace, as a relative path: this
/// process starts there.
pub fn without_tilde(path: &[u8]) -> Vec<u8> {
    match path.strip_prefix(b"~") {
        Some(b"" | b"/") => b"./".to_vec(),
        Some([b'/', rest @ ..]) => rest.to_vec(),
        _ => path.to_vec(),
    }
}

/// The addresses of the connection of ssh, if this process was started through ssh.
fn ssh_connection() -> Option<SshConnection> {
    SshConnection::parse(&std::env::var("SSH_CONNECTION").ok()?)
}
