//! The files of one run: the interposer and the counters, in a temporary directory.

use crate::counts::Counts;
use crate::error::RunError;
use crate::library::LIBRARY;
use haul_tally::{FILE_BYTES, MAGIC, PATH_VARIABLE, SLOTS, header, slot, slot_at};
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::collections::HashSet;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Name of the interposer's file.
pub const LIBRARY_NAME: &str = "libhaul_interpose.so";
/// Name of the environment variable by which the dynamic linker loads libraries first.
const PRELOAD: &str = "LD_PRELOAD";

/// The interposer and the counters of one run. Dropping it removes the files; processes that still
/// run keep their mappings.
#[derive(Debug)]
pub struct Session {
    library: PathBuf,
    tally: PathBuf,
    counters: File,
    /// Removed when this is dropped.
    _directory: TempDir,
}

impl Session {
    /// Writes the interposer and empty counters into a new directory.
    ///
    /// A service may change its user before it starts a process, so every user may read the library
    /// and write the counters. Only the processes of the command know where they are: other users
    /// cannot list the outer directory, and the inner one has a random name.
    pub fn create() -> Result<Self, RunError> {
        let directory = create_directory()?;
        let inner = tempfile::Builder::new().prefix("").rand_bytes(24).tempdir_in(&directory);
        let inner = inner.map_err(failed(directory.path()))?.keep();
        set_mode(&inner, 0o755)?;
        set_mode(directory.path(), 0o711)?;
        let library = inner.join(LIBRARY_NAME);
        fs::write(&library, LIBRARY).map_err(failed(&library))?;
        set_mode(&library, 0o644)?;
        let tally = inner.join("tally");
        let counters = File::options().read(true).write(true).create_new(true).open(&tally);
        let counters = counters.map_err(failed(&tally))?;
        counters.set_len(FILE_BYTES as u64).map_err(failed(&tally))?;
        let words = [(header::MAGIC, MAGIC), (header::SECCOMP_FILTERS, seccomp_filters())];
        for (position, word) in words {
            let written = counters.write_all_at(&word.to_ne_bytes(), position as u64 * 8);
            written.map_err(failed(&tally))?;
        }
        set_mode(&tally, 0o666)?;
        Ok(Self { library, tally, counters, _directory: directory })
    }

    /// Has a command load the interposer, after the libraries that the environment names already.
    pub fn prepare(&self, command: &mut Command) {
        let mut preloads = env::var_os(PRELOAD).filter(|names| !names.is_empty());
        if let Some(names) = &mut preloads {
            names.push(":");
        }
        let mut preloads: OsString = preloads.unwrap_or_default();
        preloads.push(&self.library);
        command.env(PRELOAD, preloads).env(PATH_VARIABLE, &self.tally);
    }

    /// The processes that count, by their IDs.
    pub fn processes(&self) -> HashSet<u32> {
        let word = |position: usize| {
            let mut bytes = [0; 8];
            let read = self.counters.read_exact_at(&mut bytes, position as u64 * 8);
            read.map_or(0, |()| u64::from_ne_bytes(bytes))
        };
        let taken = usize::try_from(word(header::SLOTS_TAKEN)).unwrap_or(SLOTS).min(SLOTS);
        (0..taken).map(|index| word(slot_at(index) + slot::PROCESS) as u32).collect()
    }

    /// Reads the counters.
    pub fn counts(&self) -> Result<Counts, RunError> {
        let mut bytes = vec![0; FILE_BYTES];
        let read = self.counters.read_exact_at(&mut bytes, 0);
        read.map_err(|source| RunError::Counters { path: self.tally.clone(), source })?;
        Ok(Counts::parse(&bytes))
    }
}

fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> RunError {
    let path = path.to_owned();
    move |source| RunError::Write { path, source }
}

fn set_mode(path: &Path, mode: u32) -> Result<(), RunError> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed(path))
}

/// Creates a directory on a file system from which libraries can be loaded.
fn create_directory() -> Result<TempDir, RunError> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let candidates = [Some(env::temp_dir()), Some("/tmp".into()), Some("/dev/shm".into()), runtime];
    let mut reasons: Vec<String> = Vec::new();
    for candidate in candidates.into_iter().flatten() {
        // The dynamic linker separates the names in its variable by colons and spaces.
        let is_name = !candidate.as_os_str().as_encoded_bytes().iter().any(|b| b" :".contains(b));
        let reason = match statvfs(&candidate) {
            Ok(_) if !is_name => "a space or colon in the name".to_owned(),
            Ok(found) if found.f_flag.contains(StatVfsMountFlags::NOEXEC) => {
                "mounted noexec".to_owned()
            }
            Ok(_) => match tempfile::Builder::new().prefix("haul-run-").tempdir_in(&candidate) {
                Ok(directory) => return Ok(directory),
                Err(error) => error.to_string(),
            },
            Err(errno) => errno.to_string(),
        };
        reasons.push(format!("{}: {reason}", candidate.display()));
    }
    Err(RunError::NoDirectory { directories: reasons.join(", ") })
}

/// The number of seccomp filters of this process, which each program inherits (Linux 5.9). 0 if
/// `/proc` does not show it: then the interposer makes no system calls in a process with a filter.
fn seccomp_filters() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_that_know_the_name_find_the_files() {
        let session = Session::create().unwrap();
        let inner = session.tally.parent().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(inner.parent().unwrap()), 0o711);
        assert!(inner.file_name().unwrap().len() >= 24);
        assert_eq!((mode(&session.tally), mode(&session.library)), (0o666, 0o644));
        let outer = inner.parent().unwrap().to_owned();
        drop(session);
        assert!(!outer.exists());
    }

    #[test]
    fn a_new_session_has_counted_nothing() {
        let counts = Session::create().unwrap().counts().unwrap();
        assert!(counts.processes.is_empty());
        assert_eq!(counts.unseen_bytes(), 0);
    }
}
