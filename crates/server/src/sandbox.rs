//! Restricts the process to the files and ports that it needs (Landlock, Linux 5.13).
//!
//! The rules hold for the calling thread and for threads that it starts afterwards. So the call
//! belongs after everything that needs more and before the first thread.

use crate::error::Error;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath,
    PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus,
};
use std::path::{Path, PathBuf};

/// The rules asked for, as far as the kernel knows them: network rules came with version 4 (Linux
/// 6.7).
const RULES: ABI = ABI::V4;

/// The limitation of a kernel without Landlock.
pub const NOT_ENFORCED: &str = "this kernel has no Landlock, so every file stays in reach";

/// The access that the sandbox leaves below a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessRights {
    /// Read files and directories, execute files.
    Read,
    /// Read this file, which is not a directory.
    ReadFile,
    /// Read, and create, replace and remove files.
    ReadWrite,
    /// Everything in a tree: also folders, links, pipes, sockets and devices.
    Tree,
    /// Permits reading a file again that may be replaced by `rename`: grants reading its directory
    /// and, for a symbolic link, the directory of its target. A path that does not exist is
    /// ignored.
    ReadAgain,
    /// Append to a log at this path, and create the log again after a rotation renamed it. The
    /// right covers the directory of the path and, for a symbolic link, the directory of its
    /// target.
    Append,
    /// Remove this file.
    Remove,
}

/// The TCP ports that the sandbox leaves; by default none.
#[derive(Debug, Clone, Copy, Default)]
pub struct PortRights<'p> {
    /// The ports of peers.
    pub connect: &'p [u16],
    /// Whether sockets may be bound to a port that the kernel chooses, as those are that connect
    /// from a certain address.
    pub binds_free_port: bool,
    /// Whether sockets may listen at all ports.
    pub binds_all: bool,
}

/// Restricts the calling thread to these paths, and to these ports for TCP sockets.
///
/// Returns a limitation of this kernel and its consequence as one line, or `None` if every rule is
/// enforced.
pub fn restrict(
    paths: &[(PathBuf, AccessRights)],
    ports: PortRights<'_>,
) -> Result<Option<String>, Error> {
    let failed = |error: &dyn std::fmt::Display| Error::Sandbox(error.to_string());
    let handled_ports =
        if ports.binds_all { AccessNet::ConnectTcp.into() } else { AccessNet::from_all(RULES) };
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(RULES))
        .and_then(|ruleset| ruleset.handle_access(handled_ports))
        .and_then(Ruleset::create)
        .map_err(|error| failed(&error))?;
    for (path, allowed) in paths {
        add(&mut ruleset, path, *allowed).map_err(|error| failed(&error))?;
    }
    let connect = ports.connect.iter().map(|&port| NetPort::new(port, AccessNet::ConnectTcp));
    let bind = ports.binds_free_port.then(|| NetPort::new(0, AccessNet::BindTcp));
    for rule in connect.chain(bind) {
        ruleset = ruleset.add_rule(rule).map_err(|error| failed(&error))?;
    }
    // The log's time zone may be read late; a host may do not have zones.
    let _ = rule(&mut ruleset, Path::new("/usr/share/zoneinfo"), AccessFs::from_read(RULES));
    let status = ruleset.restrict_self().map_err(|error| failed(&error))?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => {
            Some("this kernel knows only some of Landlock's rules".into())
        }
        RulesetStatus::NotEnforced => Some(NOT_ENFORCED.into()),
    })
}

fn add(ruleset: &mut RulesetCreated, path: &Path, allowed: AccessRights) -> Result<(), String> {
    let writes = AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
        | AccessFs::Refer;
    match allowed {
        AccessRights::Read => rule(ruleset, path, AccessFs::from_read(RULES)),
        AccessRights::ReadFile => rule(ruleset, path, AccessFs::ReadFile.into()),
        AccessRights::ReadWrite => rule(ruleset, path, AccessFs::from_read(RULES) | writes),
        AccessRights::Tree => rule(ruleset, path, AccessFs::from_all(RULES) & !AccessFs::Execute),
        AccessRights::ReadAgain => {
            let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            for directory in [directory_of(path), directory_of(&target)] {
                // A directory that cannot be opened now could not be read later either.
                let _ = rule(ruleset, directory, AccessFs::ReadFile | AccessFs::ReadDir);
            }
            Ok(())
        }
        AccessRights::Append => {
            let access = AccessFs::WriteFile | AccessFs::MakeReg;
            // The log may be a symbolic link.
            let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            let _ = rule(ruleset, directory_of(&target), access);
            rule(ruleset, directory_of(path), access)
        }
        AccessRights::Remove => rule(ruleset, directory_of(path), AccessFs::RemoveFile.into()),
    }
}

fn rule(
    ruleset: &mut RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<(), String> {
    // The directory that the process is in may not be open to its new user, by the name `.`.
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    let opened = PathFd::new(path).map_err(|error| error.to_string())?;
    ruleset.add_rule(PathBeneath::new(opened, access)).map_err(|error| error.to_string())?;
    Ok(())
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_restricted_thread_reaches_only_its_paths() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let path = move |name: &str| root.join(name);
        for name in ["read", "write", "again"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("a"), "a").unwrap();
        }
        let outside = tempfile::NamedTempFile::new().unwrap();
        // The rules hold for this thread and for no other.
        let thread = std::thread::spawn(move || {
            let paths = [
                (path("read"), AccessRights::Read),
                (path("write"), AccessRights::ReadWrite),
                (path("again/a"), AccessRights::ReadAgain),
            ];
            let accepts = || TcpListener::bind("127.0.0.1:0").unwrap();
            let (reached, other) = (accepts(), accepts());
            let port = |listener: &TcpListener| listener.local_addr().unwrap();
            let ports = PortRights { connect: &[port(&reached).port()], ..PortRights::default() };
            if let Some(caveat) = restrict(&paths, ports).unwrap() {
                return eprintln!("SKIPPED: Landlock is not tested: {caveat}");
            }
            assert_eq!(fs::read(path("read/a")).unwrap(), b"a");
            assert!(fs::write(path("read/a"), "b").is_err());
            fs::write(path("write/b"), "b").unwrap();
            fs::rename(path("write/b"), path("write/a")).unwrap();
            assert_eq!(fs::read(path("again/a")).unwrap(), b"a");
            assert!(fs::write(path("again/a"), "b").is_err());
            assert!(fs::read(outside.path()).is_err());
            assert!(TcpListener::bind("127.0.0.1:0").is_err());
            TcpStream::connect(port(&reached)).unwrap();
            let refused = TcpStream::connect(port(&other)).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        });
        thread.join().unwrap();
    }
}
