//! The copy while it is made: folders, requested files and hard links. All streams share it.

use crate::destination::earlier_copies::EarlierCopies;
use crate::destination::folders::{self, DestinationFolders, DoneFolder, Place};
use crate::destination::partial_file;
use crate::destination::requested_file::RequestedFile;
use crate::error::Error;
use crate::message::Time;
use crate::options::Replacement;
use crate::summary::{FileError, Summary};
use rustix::fs::AtFlags;
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The most files that are requested and not here. Sockets hold many small files that wait for a
/// sync.
const REQUESTED_MAX: usize = 1 << 20;
/// The most hard links that wait for their files. The source lists far fewer ahead.
const WAITING_LINKS_MAX: usize = 1 << 20;

/// The entries of a folder that the sources lack.
#[derive(Debug)]
pub struct Extras {
    /// The path of the folder below the destination.
    pub folder: Vec<u8>,
    pub names: Vec<Vec<u8>>,
    /// The modification time of the folder, which a deletion changes.
    pub mtime: Time,
}

/// The copy while it is made.
#[derive(Debug)]
pub struct Tree {
    pub folders: DestinationFolders,
    pub summary: Summary,
    /// The open destination; `None` before the first list, or if a dry run did not make it.
    pub destination: Option<Arc<OwnedFd>>,
    /// Earlier copies, whose files new files may be links to.
    pub earlier_copies: Arc<EarlierCopies>,
    /// The number of entries that were listed.
    pub entries: u64,
    /// Entries that the sources lack.
    pub extras: Vec<Extras>,
    /// The entries in the folders whose extras were collected.
    pub present: u64,
    keeps_existing: bool,
    requested: HashMap<u64, Arc<RequestedFile>>,
    /// Files that are here and to which later entries may be links, by their paths below the
    /// destination.
    link_targets: HashMap<u64, Vec<u8>>,
    /// Links that wait for their file.
    waiting_links: HashMap<u64, Vec<Place>>,
    /// The number of links that wait.
    waiting: usize,
    /// For files whose first name has other content here, the name whose content was requested.
    link_aliases: HashMap<u64, u64>,
    /// The paths of entries of several sources, hashed. The first entry of a path counts.
    seen: HashSet<[u8; 16]>,
}

impl Tree {
    /// An empty copy.
    pub fn new(is_dry_run: bool, replacement: Replacement) -> Self {
        Self {
            folders: DestinationFolders::new(is_dry_run, replacement),
            keeps_existing: replacement.keeps_existing,
            summary: Summary::default(),
            destination: None,
            earlier_copies: Arc::default(),
            entries: 0,
            extras: Vec::new(),
            present: 0,
            requested: HashMap::new(),
            link_targets: HashMap::new(),
            waiting_links: HashMap::new(),
            waiting: 0,
            link_aliases: HashMap::new(),
            seen: HashSet::new(),
        }
    }

    /// Opens the folder of a path below the destination, without following a link. The second part
    /// is the last component.
    pub fn open_parent<'p>(&self, path: &'p [u8]) -> rustix::io::Result<(Arc<OwnedFd>, &'p [u8])> {
        folders::open_parent(self.destination.as_ref().ok_or(Errno::BADF)?, path)
    }

    /// Adds the failure of an entry.
    pub fn fail(&mut self, place: &Place, problem: &impl ToString) {
        let path = self.folders.path_of(place.folder, &place.name);
        let error = FileError::new(&path, problem);
        self.summary.add_error(FileError { is_at_destination: true, ..error });
    }

    /// Adds the failure of an entry.
    pub fn fail_errno(&mut self, place: &Place, errno: Errno) {
        if errno == Errno::ISDIR {
            return self.fail(place, &"a directory with entries is there, and stays");
        }
        self.fail(place, &std::io::Error::from(errno));
    }

    /// Whether requested files are missing.
    pub fn is_complete(&self) -> bool {
        self.requested.is_empty()
    }

    /// Records the path of an entry. False if an earlier source has an entry with the path.
    pub fn is_first(&mut self, place: &Place) -> bool {
        let hash = blake3::hash(&self.folders.path_of(place.folder, &place.name));
        self.seen.insert(hash.as_bytes().first_chunk().copied().unwrap_or_default())
    }

    /// Requests a file.
    pub fn request(&mut self, id: u64, file: RequestedFile) -> Result<(), Error> {
        if self.requested.len() >= REQUESTED_MAX {
            return Err(Error::Protocol("too many files at a time"));
        }
        self.folders.hold(file.place.folder);
        self.requested.insert(id, Arc::new(file));
        Ok(())
    }

    /// Whether the file of this number is requested and not here.
    pub fn is_requested(&self, id: u64) -> bool {
        self.requested.contains_key(&id)
    }

    /// The file that was requested by this number.
    pub fn requested(&self, id: u64) -> Result<Arc<RequestedFile>, Error> {
        self.requested.get(&id).cloned().ok_or(Error::Protocol("a file that is not requested"))
    }

    /// Records that a requested file is here, or failed. Returns the folders that are complete now.
    pub fn complete(&mut self, id: u64, is_here: bool) -> Result<Vec<DoneFolder>, Error> {
        let file = self.requested.remove(&id);
        let file = file.ok_or(Error::Protocol("a file that is not requested"))?;
        let mut done =
            if is_here { self.add_target(id, &file)? } else { self.drop_links(id, &file.place)? };
        done.extend(self.folders.release(file.place.folder)?);
        Ok(done)
    }

    /// Makes a file that is here known as the target of links, and makes the links that wait.
    pub fn add_target(&mut self, id: u64, file: &RequestedFile) -> Result<Vec<DoneFolder>, Error> {
        if !file.is_linked {
            return Ok(Vec::new());
        }
        let path = self.folders.path_of(file.place.folder, &file.place.name);
        let waiting = self.waiting_links.remove(&id).unwrap_or_default();
        self.waiting -= waiting.len();
        let mut done = Vec::new();
        for place in waiting {
            self.link(&path, &place)?;
            done.extend(self.folders.release(place.folder)?);
        }
        self.link_targets.insert(id, path);
        Ok(done)
    }

    /// The entry that a link to a file leads to; `None` if no name of the file has the content
    /// here, because each name stays as it is or is left out.
    pub fn link_target(&self, first: u64) -> Option<u64> {
        let target = self.link_aliases.get(&first).copied().unwrap_or(first);
        let has_content =
            self.link_targets.contains_key(&target) || self.requested.contains_key(&target);
        has_content.then_some(target)
    }

    /// Lets later links to a file lead to another name of the file.
    pub fn set_link_alias(&mut self, first: u64, name: u64) {
        self.link_aliases.insert(first, name);
    }

    /// Counts a file of a dry run as here, so that later entries may be links to it.
    pub fn add_dry_target(&mut self, id: u64) {
        self.link_targets.insert(id, Vec::new());
    }

    /// Makes a hard link to an earlier entry ([`Tree::link_target`]), or lets the link wait for the
    /// file.
    pub fn add_link(&mut self, target: u64, place: Place) -> Result<(), Error> {
        if let Some(existing) = self.link_targets.get(&target).cloned() {
            return self.link(&existing, &place);
        }
        self.waiting += 1;
        if self.waiting > WAITING_LINKS_MAX {
            return Err(Error::Protocol("too many hard links to files that are not here"));
        }
        self.folders.hold(place.folder);
        self.waiting_links.entry(target).or_default().push(place);
        Ok(())
    }

    /// Drops the links to a file that was not copied.
    fn drop_links(&mut self, id: u64, target: &Place) -> Result<Vec<DoneFolder>, Error> {
        let path = self.folders.path_of(target.folder, &target.name);
        let path = String::from_utf8_lossy(&path).into_owned();
        let waiting = self.waiting_links.remove(&id).unwrap_or_default();
        self.waiting -= waiting.len();
        let mut done = Vec::new();
        for place in waiting {
            self.fail(&place, &format!("it is a hard link to {path}, which was not copied"));
            done.extend(self.folders.release(place.folder)?);
        }
        Ok(done)
    }

    /// Makes a link to a file by its path below the destination. The file's folder may be complete
    /// and closed.
    fn link(&mut self, target: &[u8], place: &Place) -> Result<(), Error> {
        let linked = match self.folders.get(place.folder)? {
            Ok(open) => self.open_parent(target).and_then(|(parent, target)| {
                let make = |temporary_name: &[u8]| {
                    let flags = AtFlags::empty();
                    rustix::fs::linkat(&parent, target, &*open, temporary_name, flags)
                };
                partial_file::replace(&open, &place.name, !self.keeps_existing, make, |_| Ok(()))
            }),
            Err(errno) => Err(errno),
        };
        if let Err(errno) = linked {
            self.fail_errno(place, errno);
        }
        Ok(())
    }
}
