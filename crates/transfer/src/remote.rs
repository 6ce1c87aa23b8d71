//! The other host: how users name its files, and how haul is started there through ssh.

use crate::error::Error;
use rustix::process::Pid;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// The capacity of a pipe: the most that an ordinary user may have (`fs.pipe-max-size`).
const PIPE_CAPACITY_BYTES: usize = 1 << 20;

/// A path on another host, such as `user@host:path`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePath {
    /// The host as ssh takes it, with the user if there is one.
    pub host: OsString,
    /// The path. A relative path begins in the user's home directory.
    pub path: Vec<u8>,
}

impl RemotePath {
    /// Splits an argument of the command line; `None` for a path of this host. As for rsync and
    /// scp, a colon after a slash is part of a local path, and an IPv6 address has brackets.
    pub fn parse(argument: &OsStr) -> Option<Self> {
        let bytes = argument.as_bytes();
        let (host, rest) = match bytes.iter().position(|&byte| byte == b'[') {
            Some(open) if open == 0 || bytes[open - 1] == b'@' => {
                let close = open + bytes[open..].iter().position(|&byte| byte == b']')?;
                let host = [&bytes[..open], &bytes[open + 1..close]].concat();
                (host, &bytes[close + 1..])
            }
            _ => {
                let end = bytes.iter().position(|&byte| byte == b':' || byte == b'/')?;
                (bytes[..end].to_vec(), &bytes[end..])
            }
        };
        let path = rest.strip_prefix(b":")?;
        let is_host = !host.is_empty() && !host.contains(&b'/');
        is_host.then(|| Self { host: OsStr::from_bytes(&host).into(), path: path.to_vec() })
    }
}

/// How the other end is started.
#[derive(Debug, Clone)]
pub struct RemoteShell {
    /// The command that runs a command on another host, with its arguments.
    pub command: Vec<OsString>,
    /// What is started there.
    pub program: RemoteProgram,
}

/// What is started on the other host.
#[derive(Debug, Clone)]
pub enum RemoteProgram {
    /// A command that starts haul. The shell of the other host reads the command.
    Named(OsString),
    /// A shell, which gets a script that starts haul ([`crate::OwnProgram`]).
    Script,
}

impl Default for RemoteShell {
    /// The system's `ssh`, and the `haul` that the shell of the other host finds.
    fn default() -> Self {
        Self { command: vec!["ssh".into()], program: RemoteProgram::Named("haul".into()) }
    }
}

/// The other end, as a process of ssh.
#[derive(Debug)]
pub struct RemoteEnd {
    child: Child,
    name: String,
}

impl RemoteEnd {
    /// Starts `haul receive` on a host. ssh asks for passwords on the terminal, and prints its
    /// messages and the messages of the other end on standard error.
    pub fn start(shell: &RemoteShell, host: &OsStr) -> Result<Self, Error> {
        Self::start_with(shell, host, Stdio::inherit())
    }

    /// Like [`RemoteEnd::start`], with another standard error.
    pub fn start_with(shell: &RemoteShell, host: &OsStr, errors: Stdio) -> Result<Self, Error> {
        if host.as_bytes().starts_with(b"-") {
            // ssh would take the name for an option.
            return Err(Error::Protocol("a host that begins with a hyphen"));
        }
        let (program, arguments) = shell.command.split_first().ok_or_else(|| {
            Error::Connection(io::Error::other("the command for other hosts is empty"))
        })?;
        let mut command = Command::new(program);
        command.args(arguments).arg(host);
        match &shell.program {
            RemoteProgram::Named(haul) => command.arg(haul).arg("receive"),
            RemoteProgram::Script => command.arg("sh"),
        };
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let name = program.to_string_lossy().into_owned();
        let child = command.spawn().map_err(|error| {
            Error::Connection(io::Error::new(error.kind(), format!("{name}: {error}")))
        })?;
        for pipe in [child.stdin.as_ref().map(AsFd::as_fd), child.stdout.as_ref().map(AsFd::as_fd)]
        {
            pipe.map(enlarge_pipe);
        }
        Ok(Self { child, name })
    }

    /// The process of ssh.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The streams from and to the other end, once.
    pub fn take_streams(&mut self) -> Option<(ChildStdout, ChildStdin)> {
        self.child.stdout.take().zip(self.child.stdin.take())
    }

    /// The standard error of the process, once, if it is a pipe.
    pub fn take_errors(&mut self) -> Option<ChildStderr> {
        self.child.stderr.take()
    }

    /// Waits for the end of the process, whose streams are closed.
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    /// Explains a failed transfer by the end of the process, if that is the reason.
    pub fn explain(mut self, error: Error) -> Error {
        let Error::Connection(failure) = error else {
            // The other end reported its reason, or goes on until its streams are closed.
            let _ = self.child.wait();
            return error;
        };
        let Ok(status) = self.child.wait() else { return Error::Connection(failure) };
        let name = &self.name;
        let reason = match status.code() {
            Some(127) => {
                "haul is not installed there, or not found by the login shell: install it, \
                          or give its path by --remote-haul"
                    .to_owned()
            }
            Some(126) => "haul cannot be started there (the reason is above)".to_owned(),
            Some(255) => format!("{name} failed (its message is above)"),
            Some(0) | None => return Error::Connection(failure),
            Some(code) => format!("the command there ended with exit code {code}"),
        };
        Error::Connection(io::Error::new(failure.kind(), reason))
    }
}

/// Makes a pipe hold a whole frame, so that its ends wait for each other less often. Something else
/// than a pipe, or a pipe that may not grow, stays as it is.
pub fn enlarge_pipe(pipe: BorrowedFd<'_>) {
    let _ = rustix::pipe::fcntl_setpipe_size(pipe, PIPE_CAPACITY_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_path_has_a_colon_before_the_first_slash() {
        let parse = |text: &str| {
            RemotePath::parse(OsStr::new(text)).map(|remote| {
                (remote.host.into_string().unwrap(), String::from_utf8(remote.path).unwrap())
            })
        };
        let remote = |host: &str, path: &str| Some((host.to_owned(), path.to_owned()));
        assert_eq!(parse("host:path"), remote("host", "path"));
        assert_eq!(parse("host:"), remote("host", ""));
        assert_eq!(parse("user@host:/a:b"), remote("user@host", "/a:b"));
        assert_eq!(parse("[::1]:path"), remote("::1", "path"));
        assert_eq!(parse("user@[fe80::1%eth0]:/a"), remote("user@fe80::1%eth0", "/a"));
        for local in ["path", "/a:b", "./a:b", "a/b:c", ":a", "", "[x", "[x]", "a[b]/c"] {
            assert_eq!(parse(local), None, "{local}");
        }
    }
}
