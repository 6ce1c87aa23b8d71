//! Drops privileges: switches to another user's identity.

use crate::error::Error;
use rustix::process::{Gid, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::{fs, io};

/// A user's ID and its group's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    uid: u32,
    gid: u32,
}

/// Switches the calling thread to a user of `/etc/passwd` for good, with that user's group only.
/// The thread keeps the capabilities of `kept` that it has.
///
/// Threads started afterwards inherit the identity. So the call belongs after everything that needs
/// privileges (ports below 1024, keys) and before the first thread.
pub fn switch_user(name: &str, kept: CapabilitySet) -> Result<(), Error> {
    let refused = |errno: rustix::io::Errno| Error::User {
        name: name.into(),
        problem: format!("{}: only root can switch to another user", io::Error::from(errno)),
    };
    become_identity(identity_of(name)?, kept).map_err(refused)
}

/// Makes a user of `/etc/passwd` the owner of a file.
pub(crate) fn give_file(file: &fs::File, name: &str) -> Result<(), Error> {
    let Identity { uid, gid } = identity_of(name)?;
    std::os::unix::fs::fchown(file, Some(uid), Some(gid)).map_err(|error| Error::User {
        name: name.into(),
        problem: format!("{error}: only root can give a file to another user"),
    })
}

fn identity_of(name: &str) -> Result<Identity, Error> {
    let wrong = |problem: String| Error::User { name: name.into(), problem };
    let passwd = fs::read_to_string("/etc/passwd")
        .map_err(|error| wrong(format!("/etc/passwd: {error}")))?;
    find(&passwd, name).ok_or_else(|| wrong("there is no such user".into()))
}

fn become_identity(identity: Identity, kept: CapabilitySet) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    // The user comes last: without root's identity the groups cannot be changed.
    rustix::thread::set_thread_groups(&[gid])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    let kept = kept & rustix::thread::capabilities(None)?.permitted;
    // Without this flag the kernel clears the capabilities when the process stops being root.
    rustix::thread::set_keep_capabilities(!kept.is_empty())?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    rustix::thread::set_keep_capabilities(false)?;
    let inheritable = CapabilitySet::empty();
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable };
    rustix::thread::set_capabilities(None, sets)
}

fn find(passwd: &str, name: &str) -> Option<Identity> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let is_named = fields.next() == Some(name);
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        is_named.then_some(Identity { uid, gid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_the_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nwww:x:33:34::/:/bin/false\n\
                      www-data:x:35:36::/:/x\n";
        assert_eq!(find(passwd, "www"), Some(Identity { uid: 33, gid: 34 }));
        assert_eq!(find(passwd, "www-data"), Some(Identity { uid: 35, gid: 36 }));
        assert_eq!(find(passwd, "ww"), None);
        assert_eq!(find(passwd, "broken"), None);
    }
}
