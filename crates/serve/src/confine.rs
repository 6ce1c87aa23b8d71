//! Least privilege: another user's identity, and no files but those that are served.
//!
//! Both hold for the calling thread and for threads that it starts afterwards, so this comes after everything that needs more
//! (ports below 1024, the certificate's key) and before any other thread is there.

use crate::config::Config;
use crate::error::Error;
use haul_fs::Symlinks;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus,
};
use rustix::process::{Gid, Uid};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The rules that are asked for where the kernel knows them: network rules came with the fourth version (Linux 6.7).
const WANTED: ABI = ABI::V4;

/// A user and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    uid: u32,
    gid: u32,
}

/// Becomes another user for good, with no group but that user's own.
pub fn become_user(name: &str) -> Result<(), Error> {
    let wrong = |problem: String| Error::User { name: name.into(), problem };
    let passwd = fs::read_to_string("/etc/passwd")
        .map_err(|error| wrong(format!("/etc/passwd: {error}")))?;
    let identity = find(&passwd, name).ok_or_else(|| wrong("there is no such user".into()))?;
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    let refused = |errno: rustix::io::Errno| {
        wrong(format!("{}: only root becomes somebody else", io::Error::from(errno)))
    };
    // In this order: who is no longer root cannot change groups.
    rustix::thread::set_thread_groups(&[gid]).map_err(refused)?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(refused)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(refused)
}

fn find(passwd: &str, name: &str) -> Option<Identity> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(name);
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        is_named.then_some(Identity { uid, gid })
    })
}

/// Gives up every file that `config` does not need, and every new connection (Landlock, Linux 5.13). Returns what the kernel
/// did not do of that; `None` where it did all.
pub fn give_up_files(config: &Config) -> Result<Option<String>, Error> {
    if config.content.symlinks == Symlinks::Anywhere {
        return Ok(Some("links may lead anywhere, so every file stays in reach".into()));
    }
    let failed = |error: String| Error::Confine(error);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(WANTED))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(WANTED)))
        .and_then(Ruleset::create)
        .map_err(|error| failed(error.to_string()))?;
    let mut allow = |path: &Path, access: landlock::BitFlags<AccessFs>| -> Result<(), Error> {
        let opened = PathFd::new(path).map_err(|error| failed(error.to_string()))?;
        (&mut ruleset)
            .add_rule(PathBeneath::new(opened, access))
            .map_err(|error| failed(error.to_string()))?;
        Ok(())
    };
    let writes = AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
        | AccessFs::Refer;
    let puts = if config.put_bytes_max.is_some() { writes } else { landlock::BitFlags::empty() };
    allow(&config.root, AccessFs::from_read(WANTED) | puts)?;
    // They are read again by name, after whoever renews them has replaced them: what counts is the folder, and the one that a
    // link leads to.
    for path in read_again(config) {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        for folder in [folder_of(path), folder_of(&real)] {
            // What cannot be opened could not be read again anyway, and is said to be so.
            let _ = allow(folder, AccessFs::ReadFile | AccessFs::ReadDir);
        }
    }
    if let Some(path) = config.access_log.as_ref().and_then(|log| log.path.as_ref()) {
        allow(folder_of(path), AccessFs::WriteFile | AccessFs::MakeReg)?;
    }
    for path in config.unix_sockets() {
        allow(folder_of(path), AccessFs::RemoveFile.into())?;
    }
    // The time zone of the log may be read late.
    if let Ok(zones) = PathFd::new("/usr/share/zoneinfo") {
        (&mut ruleset)
            .add_rule(PathBeneath::new(zones, AccessFs::from_read(WANTED)))
            .map_err(|error| failed(error.to_string()))?;
    }
    let status = ruleset.restrict_self().map_err(|error| failed(error.to_string()))?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => {
            Some("this kernel knows only some of Landlock's rules".into())
        }
        RulesetStatus::NotEnforced => {
            Some("this kernel has no Landlock, so every file stays in reach".into())
        }
    })
}

/// What another user cannot read again when it is told to: said now, and not when the certificate has expired.
pub fn unreadable(config: &Config) -> Option<String> {
    let unreadable = read_again(config).filter(|path| fs::File::open(path).is_err());
    let names: Vec<_> = unreadable.map(|path| path.display().to_string()).collect();
    let names = names.join(" and ");
    (!names.is_empty()).then(|| {
        format!("{names} cannot be read any more: SIGHUP will not renew it, restart instead")
    })
}

/// Files that are read again when the service is told to reload.
fn read_again(config: &Config) -> impl Iterator<Item = &PathBuf> {
    let tls = config.tls.iter().flat_map(|tls| [&tls.certificate, &tls.key]);
    tls.chain(config.basic_auth.iter().map(|auth| &auth.file))
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_is_out_of_reach() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "a").unwrap();
        let outside = tempfile::NamedTempFile::new().unwrap();
        // The rules hold for this thread and for no other.
        let thread = std::thread::spawn(move || {
            if let Some(caveat) = give_up_files(&Config::new(folder.path())).unwrap() {
                return eprintln!("SKIPPED: Landlock is not tested: {caveat}");
            }
            assert_eq!(fs::read(folder.path().join("a")).unwrap(), b"a");
            assert!(fs::write(folder.path().join("a"), "b").is_err(), "it is for reading");
            assert!(fs::read(outside.path()).is_err(), "it is not served");
            let listener = std::net::TcpListener::bind("127.0.0.1:0");
            assert!(listener.is_err(), "nothing more to listen at");
        });
        thread.join().unwrap();
    }

    #[test]
    fn users_are_found_by_their_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nwww:x:33:34::/:/bin/false\nwww-data:x:35:36::/:/x\n";
        assert_eq!(find(passwd, "www"), Some(Identity { uid: 33, gid: 34 }));
        assert_eq!(find(passwd, "www-data"), Some(Identity { uid: 35, gid: 36 }));
        assert_eq!(find(passwd, "ww"), None);
        assert_eq!(find(passwd, "broken"), None);
    }
}
