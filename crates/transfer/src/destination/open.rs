//! Opens the destination that the user named.

use crate::destination::folders::check_name;
use crate::error::Error;
use crate::source::split;
use rustix::fs::{CWD, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// The destination as it was found or made.
#[derive(Debug, Default)]
pub struct OpenDestination {
    /// The open folder; `None` if a dry run did not make it.
    pub open: Option<OwnedFd>,
    /// The name of the copy of a single file; `None`: the name of the source.
    pub single_name: Option<Vec<u8>>,
    /// The folder before the transfer; `None` for a new folder.
    pub old: Option<Stat>,
}

/// Opens the folder into which everything is copied, and makes it if it is missing, but not in a
/// dry run.
pub fn open_destination(
    path: &[u8],
    is_single_file: bool,
    is_dry_run: bool,
) -> Result<OpenDestination, Error> {
    let failed = |problem: &str, errno: Errno| Error::Destination {
        path: String::from_utf8_lossy(path).into_owned(),
        problem: format!("{problem}{}", std::io::Error::from(errno)),
    };
    let path = if path.is_empty() { b"." } else { path };
    // The path is the user's, so it may lead through links.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let may_be_file = is_single_file && !path.ends_with(b"/");
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(open) => {
            let old = rustix::fs::fstat(&open).ok();
            return Ok(OpenDestination { open: Some(open), old, ..OpenDestination::default() });
        }
        Err(Errno::NOENT | Errno::NOTDIR) if may_be_file => {}
        Err(Errno::NOENT) if is_dry_run => {
            let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
            let parent = match split(&path[..end]).0 {
                b"" => b".",
                parent => parent,
            };
            rustix::fs::stat(parent)
                .map_err(|errno| failed("the directory that would hold it is missing: ", errno))?;
            return Ok(OpenDestination::default());
        }
        Err(Errno::NOENT) => {
            let made = rustix::fs::mkdirat(CWD, path, Mode::from_raw_mode(0o777));
            let opened = made.and_then(|()| rustix::fs::open(path, flags, Mode::empty()));
            let opened = opened.map_err(|errno| match errno {
                Errno::NOENT => failed("the directory that would hold it is missing: ", errno),
                errno => failed("the directory cannot be made: ", errno),
            });
            return Ok(OpenDestination { open: Some(opened?), ..OpenDestination::default() });
        }
        Err(errno) => return Err(failed("", errno)),
    }
    let (folder, name) = split(path);
    let folder = if folder.is_empty() { b"." } else { folder };
    check_name(name).map_err(|_| failed("not the name of a file: ", Errno::INVAL))?;
    let open = rustix::fs::open(folder, flags, Mode::empty())
        .map_err(|errno| failed("the directory of the copy cannot be opened: ", errno))?;
    let old = rustix::fs::fstat(&open).ok();
    Ok(OpenDestination { open: Some(open), single_name: Some(name.to_vec()), old })
}
