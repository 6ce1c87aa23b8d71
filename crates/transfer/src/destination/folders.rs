//! The folders of a destination, by the numbers that the source gave them.
//!
//! A folder is opened relative to its parent and without following a link, so neither a
//! name of the source nor a link of another process leads out of the destination.

use crate::error::Error;
use crate::message::Attributes;
use crate::options::Replacement;
use haul_fs::NAME_BYTES_MAX;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The most folders at a time whose entries are not all here. The source lists fewer.
const FOLDERS_MAX: usize = 100_000;
/// The most folders that are kept open.
const OPEN_MAX: usize = 200;
const FOLDER_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A place at the destination.
#[derive(Debug, Clone)]
pub struct Place {
    pub folder: u64,
    pub name: Vec<u8>,
}

/// A folder of the destination.
#[derive(Debug)]
struct DestinationFolder {
    parent: u64,
    name: Vec<u8>,
    /// What the folder gets once its entries are here; `None`: the folder keeps its attributes.
    attributes: Option<Attributes>,
    /// The folder before it was added; `None` for a new folder.
    old: Option<Stat>,
    /// Whether this transfer made the folder, for this source or an earlier one.
    is_made: bool,
    /// `None` if the folder was closed to save descriptors.
    open: Option<Arc<OwnedFd>>,
    /// Why the folder does not exist: what lies below it fails too.
    failure: Option<Errno>,
    /// The number of entries that are missing: requested files, links that wait, and subfolders
    /// that are not complete.
    missing: usize,
    /// Whether all entries were listed.
    is_listed: bool,
    /// The names that the sources have; `None` if nothing in the folder is deleted.
    listed: Option<HashSet<Vec<u8>>>,
}

/// A folder whose entries are all here.
#[derive(Debug)]
pub struct DoneFolder {
    /// The path below the destination, for messages.
    pub path: Vec<u8>,
    /// The open folder, or why it cannot be opened.
    pub open: Result<Arc<OwnedFd>, Errno>,
    /// What the folder gets; `None`: the folder keeps its attributes.
    pub attributes: Option<Attributes>,
    /// The folder before the transfer; `None` for a new folder.
    pub old: Option<Stat>,
    /// The names that the sources have; `None` if nothing in the folder is deleted.
    pub listed: Option<HashSet<Vec<u8>>>,
}

/// All folders whose entries are not all here.
#[derive(Debug, Default)]
pub struct DestinationFolders {
    by_number: HashMap<u64, DestinationFolder>,
    /// The number of the next folder.
    next: u64,
    /// How many are open.
    open: usize,
    /// Whether folders are not made. What is missing has the failure `ENOENT`.
    is_dry_run: bool,
    /// Whether a file or a link in the place of a folder stays, and whether a folder keeps its
    /// permissions.
    replacement: Replacement,
    /// The folders that this transfer made, by device and inode, because another source may have a
    /// folder with the same path; `None` if there is one source.
    made: Option<HashSet<(u64, u64)>>,
}

impl DestinationFolders {
    /// No folders yet. A dry run makes none. A file in the place of a folder may have to stay.
    pub fn new(is_dry_run: bool, replacement: Replacement) -> Self {
        Self { is_dry_run, replacement, ..Self::default() }
    }

    /// Sets whether several sources may have folders with the same path.
    pub fn set_remembers_made(&mut self, remembers_made: bool) {
        self.made = remembers_made.then(HashSet::new);
    }

    /// Adds folder 0, which is the destination itself. `folder` is `None` if a dry run did not
    /// create the destination.
    pub fn add_destination(
        &mut self,
        folder: Option<Arc<OwnedFd>>,
        attributes: Option<Attributes>,
        old: Option<Stat>,
    ) {
        let failure = folder.is_none().then_some(Errno::NOENT);
        let folder = DestinationFolder {
            parent: 0,
            name: Vec::new(),
            attributes,
            is_made: old.is_none(),
            old,
            open: folder,
            failure,
            missing: 0,
            is_listed: false,
            listed: None,
        };
        self.by_number.insert(0, folder);
        self.next = 1;
    }

    /// The number of folders so far, without the destination itself.
    pub fn count(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// Whether folder 0 was added.
    pub fn has_destination(&self) -> bool {
        self.next > 0
    }

    /// Adds the next folder, makes it unless it exists, and returns it open, or `None` if a dry run
    /// did not make it. The inner error is one of the folder.
    pub fn add(
        &mut self,
        parent: u64,
        name: Vec<u8>,
        attributes: Option<Attributes>,
    ) -> Result<Result<Option<Arc<OwnedFd>>, Errno>, Error> {
        check_name(&name)?;
        if self.by_number.len() >= FOLDERS_MAX {
            return Err(Error::Protocol("too many folders at a time"));
        }
        let (is_dry_run, replacement) = (self.is_dry_run, self.replacement);
        let made = self.get(parent)?.and_then(|parent| {
            if is_dry_run {
                open_existing(&parent, &name)
            } else {
                make(&parent, &name, replacement)
            }
        });
        let failure = made.as_ref().err().copied();
        if made.is_ok() {
            self.make_room(parent);
            self.open += 1;
        }
        let is_made = made.as_ref().is_ok_and(|made| self.was_made(made));
        let (open, old) = made.map_or((None, None), |(open, old)| (Some(Arc::new(open)), old));
        let folder = DestinationFolder {
            parent,
            name,
            attributes,
            old,
            is_made,
            open: open.clone(),
            failure,
            missing: 0,
            is_listed: false,
            listed: None,
        };
        self.hold(parent);
        self.by_number.insert(self.next, folder);
        self.next += 1;
        let is_absent = self.is_dry_run && failure == Some(Errno::NOENT);
        Ok(failure.filter(|_| !is_absent).map_or(Ok(open), Err))
    }

    /// Whether this transfer made a folder, for this source or an earlier one.
    fn was_made(&mut self, (open, old): &Made) -> bool {
        let (Some(made), false) = (&mut self.made, self.is_dry_run) else { return old.is_none() };
        if let Some(old) = old {
            return made.contains(&(old.st_dev, old.st_ino));
        }
        made.extend(rustix::fs::fstat(open).map(|stat| (stat.st_dev, stat.st_ino)));
        true
    }

    /// The open folder with this number. The inner error is one of the folder.
    pub fn get(&mut self, number: u64) -> Result<Result<Arc<OwnedFd>, Errno>, Error> {
        let folder = self.by_number.get(&number).ok_or(UNKNOWN)?;
        if let Some(failure) = folder.failure {
            return Ok(Err(failure));
        }
        if let Some(open) = &folder.open {
            return Ok(Ok(Arc::clone(open)));
        }
        // Opened from the destination on, because the parents may be closed too.
        let mut names = Vec::new();
        let mut at = number;
        let mut open = loop {
            let folder = self.by_number.get(&at).ok_or(UNKNOWN)?;
            match &folder.open {
                Some(open) => break Arc::clone(open),
                None => names.push(folder.name.clone()),
            }
            at = folder.parent;
        };
        for name in names.iter().rev() {
            match rustix::fs::openat(&*open, &name[..], FOLDER_FLAGS, Mode::empty()) {
                Ok(opened) => open = Arc::new(opened),
                Err(errno) => return Ok(Err(errno)),
            }
        }
        self.make_room(number);
        self.open += 1;
        if let Some(folder) = self.by_number.get_mut(&number) {
            folder.open = Some(Arc::clone(&open));
        }
        Ok(Ok(open))
    }

    /// Closes folders if many are open, but for the destination and one more.
    fn make_room(&mut self, kept: u64) {
        if self.open < OPEN_MAX {
            return;
        }
        for (&number, folder) in &mut self.by_number {
            if number != 0 && number != kept {
                folder.open = None;
            }
        }
        self.open = 1;
    }

    /// The number of the latest folder.
    pub fn latest(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// Collects the names that the sources have in a folder, so that others can be deleted.
    pub fn collect_names(&mut self, number: u64) {
        if let Some(folder) = self.by_number.get_mut(&number) {
            folder.listed.get_or_insert_default();
        }
    }

    /// Records a name that the sources have.
    pub fn record_name(&mut self, number: u64, name: &[u8]) {
        let folder = self.by_number.get_mut(&number);
        if let Some(listed) = folder.and_then(|folder| folder.listed.as_mut()) {
            listed.insert(name.to_vec());
        }
    }

    /// Counts an entry that is missing in a folder.
    pub fn hold(&mut self, number: u64) {
        if let Some(folder) = self.by_number.get_mut(&number) {
            folder.missing += 1;
        }
    }

    /// Counts an entry that arrived or failed. Returns the folders that are complete now, each
    /// after its subfolders.
    pub fn release(&mut self, number: u64) -> Result<Vec<DoneFolder>, Error> {
        let folder = self.by_number.get_mut(&number).ok_or(UNKNOWN)?;
        folder.missing = folder.missing.saturating_sub(1);
        self.take_complete(number)
    }

    /// Records that all entries of a folder were listed. Returns the folders that are complete now.
    pub fn end_list(&mut self, number: u64) -> Result<Vec<DoneFolder>, Error> {
        let folder = self.by_number.get_mut(&number).ok_or(UNKNOWN)?;
        folder.is_listed = true;
        self.take_complete(number)
    }

    /// Removes a folder that is complete, and then its parents that are.
    fn take_complete(&mut self, mut number: u64) -> Result<Vec<DoneFolder>, Error> {
        let mut done = Vec::new();
        loop {
            let folder = self.by_number.get(&number).ok_or(UNKNOWN)?;
            if !folder.is_listed || folder.missing > 0 {
                return Ok(done);
            }
            let path = self.path_of(number, b"");
            let open = self.get(number)?;
            let folder = self.by_number.remove(&number).ok_or(UNKNOWN)?;
            if folder.open.is_some() {
                self.open = self.open.saturating_sub(1);
            }
            let DestinationFolder { parent, attributes, listed, failure, .. } = folder;
            let old = folder.old.filter(|_| !folder.is_made);
            // The failure of a folder was reported when the folder was added.
            if failure.is_none() {
                done.push(DoneFolder { path, open, attributes, old, listed });
            }
            if number == 0 {
                return Ok(done);
            }
            if let Some(parent) = self.by_number.get_mut(&parent) {
                parent.missing = parent.missing.saturating_sub(1);
            }
            number = parent;
        }
    }

    /// Whether this transfer made a folder, so that nothing has the names of its entries.
    pub fn is_new(&self, number: u64) -> bool {
        number != 0
            && !self.is_dry_run
            && self.by_number.get(&number).is_some_and(|folder| folder.old.is_none())
    }

    /// The path of an entry below the destination, for messages.
    pub fn path_of(&self, number: u64, name: &[u8]) -> Vec<u8> {
        let mut parts = vec![name.to_vec()];
        let mut at = number;
        while let Some(folder) = self.by_number.get(&at).filter(|_| at != 0) {
            parts.push(folder.name.clone());
            at = folder.parent;
        }
        parts.reverse();
        parts.join(&b'/')
    }
}

/// Opens the folder of a path below the destination, without following a link. The second part is
/// the last component.
pub fn open_parent<'p>(
    destination: &Arc<OwnedFd>,
    path: &'p [u8],
) -> rustix::io::Result<(Arc<OwnedFd>, &'p [u8])> {
    let mut open = Arc::clone(destination);
    let mut names = path.split(|&byte| byte == b'/');
    let last = names.next_back().unwrap_or_default();
    for name in names {
        let opened = rustix::fs::openat(&*open, name, FOLDER_FLAGS, Mode::empty())?;
        open = Arc::new(opened);
    }
    Ok((open, last))
}

const UNKNOWN: Error = Error::Protocol("a folder that is not open");

/// Refuses names that are not a single component.
pub fn check_name(name: &[u8]) -> Result<(), Error> {
    let is_component = !name.is_empty()
        && name != b"."
        && name != b".."
        && name.len() <= NAME_BYTES_MAX
        && !name.contains(&b'/')
        && !name.contains(&0);
    if is_component { Ok(()) } else { Err(Error::Protocol("a name that is not one component")) }
}

/// An open folder, and the folder before the transfer unless it is new.
type Made = (OwnedFd, Option<Stat>);

/// Opens a folder that exists. A file or a link in its place counts as nothing.
fn open_existing(parent: &OwnedFd, name: &[u8]) -> rustix::io::Result<Made> {
    match rustix::fs::openat(parent, name, FOLDER_FLAGS, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => Err(Errno::NOENT),
        opened => {
            let opened = opened?;
            let old = rustix::fs::fstat(&opened)?;
            Ok((opened, Some(old)))
        }
    }
}

/// Makes a folder unless it exists, and opens it.
fn make(parent: &OwnedFd, name: &[u8], replacement: Replacement) -> rustix::io::Result<Made> {
    let Replacement { keeps_existing, keeps_folders, .. } = replacement;
    // The attributes are set when all entries are here.
    let mode = Mode::RWXU;
    let open = || rustix::fs::openat(parent, name, FOLDER_FLAGS, Mode::empty());
    match rustix::fs::mkdirat(parent, name, mode) {
        Err(Errno::EXIST) => {}
        made => return made.and_then(|()| open()).map(|open| (open, None)),
    }
    let old = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(old.st_mode) != FileType::Directory {
        if keeps_existing {
            return Err(Errno::EXIST);
        }
        // A file or a link has the name of the folder, which replaces it as rsync does.
        rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
        rustix::fs::mkdirat(parent, name, mode)?;
        return Ok((open()?, None));
    }
    let opened = match open() {
        // The owner may not read the folder.
        Err(Errno::ACCESS) if !keeps_folders => {
            // Not by the name, which may lead to a link now.
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let found = rustix::fs::openat(parent, name, flags, Mode::empty())?;
            rustix::fs::chmod(format!("/proc/self/fd/{}", found.as_raw_fd()), mode)?;
            open()?
        }
        opened => opened?,
    };
    if old.st_mode & 0o300 != 0o300 && !keeps_folders {
        // The owner may not write to the folder, or not search it.
        let _ = rustix::fs::fchmod(&opened, Mode::from_raw_mode(old.st_mode & 0o7777) | mode);
    }
    Ok((opened, Some(old)))
}
