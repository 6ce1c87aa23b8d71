//! The part of a destination that reads the stream of ssh: it makes folders and links, and answers
//! which files it requests.

use crate::attributes;
use crate::block::BLOCK_BYTES;
use crate::destination::earlier_copies::{self, EarlierCopies};
use crate::destination::folders::{Place, check_name};
use crate::destination::journal::{Original, Unusable};
use crate::destination::open::{OpenDestination, open_destination};
use crate::destination::requested_file::RequestedFile;
use crate::destination::special;
use crate::destination::tree::Tree;
use crate::destination::{AcceptedPaths, Shared, deletion};
use crate::error::Error;
use crate::frame::FrameReader;
use crate::message::{
    Attributes, BATCH_MAX, Entry, Folder, Held, Kind, Listed, Time, ToDestination, ToSource,
};
use crate::options::{DeletionMode, Delta, Options, Replacement, Selection};
use crate::source::split;
use crate::summary::Summary;
use crate::times::{Activity, Stopwatch};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The most ranges in an answer, so that the answer fits into a frame. Other ranges are sent again.
const HELD_MAX: usize = 20_000;

/// The open folder of an entry, and what has the name of the entry.
type OpenPlace = (Arc<OwnedFd>, Option<Stat>);

/// The answer for a regular file: `None` if it is not requested.
type Answer = Option<Request>;

/// A file that is requested, and what is here of it.
#[derive(Debug, Default)]
struct Request {
    /// The ranges that are here from an interrupted transfer.
    held: Vec<Range<u64>>,
    /// Whether blocks can be compared with an earlier version.
    is_comparable: bool,
}

/// Where the messages of the source come from, in order.
pub trait Messages {
    /// Waits for the next message, with the bytes of files in its frame; `None` at the end.
    fn next_message(&mut self) -> Result<Option<(ToDestination, &[u8])>, Error>;

    /// The bytes that compression saved so far.
    fn saved_bytes(&self) -> u64;
}

impl<R: Read> Messages for FrameReader<R> {
    fn next_message(&mut self) -> Result<Option<(ToDestination, &[u8])>, Error> {
        self.next()
    }

    fn saved_bytes(&self) -> u64 {
        FrameReader::saved_bytes(self)
    }
}

/// The part of a destination that reads the stream of ssh.
pub struct DestinationSession<'s, 'a, W> {
    shared: &'s Shared<'a, W>,
    accepted: &'a AcceptedPaths,
    /// The name of the single file, if the destination is not a folder.
    single_name: Option<Vec<u8>>,
    is_single_file: Option<bool>,
    /// Whether several sources may have entries with the same path. The first entry counts.
    has_several_sources: bool,
}

impl<'s, 'a, W: Write + Send> DestinationSession<'s, 'a, W> {
    /// A session that accepts these paths.
    pub fn new(shared: &'s Shared<'a, W>, accepted: &'a AcceptedPaths) -> Self {
        Self {
            shared,
            accepted,
            single_name: None,
            is_single_file: None,
            has_several_sources: false,
        }
    }

    /// Takes all messages, until everything is here.
    pub fn run(mut self, mut frames: impl Messages) -> Result<Summary, Error> {
        let shared = self.shared;
        let mut watch = Stopwatch::new(shared.progress.clocks());
        loop {
            watch.skip();
            let next = frames.next_message()?;
            let (message, data) =
                next.ok_or(Error::Connection(std::io::ErrorKind::UnexpectedEof.into()))?;
            if let Some(failure) = shared.streams().failure.take() {
                return Err(failure);
            }
            match message {
                ToDestination::Begin { is_single_file, has_several_sources, block_key } => {
                    // A second beginning changes nothing.
                    let _ = shared.block_key.set(block_key);
                    self.has_several_sources = has_several_sources;
                    shared.tree().folders.set_remembers_made(has_several_sources);
                    self.is_single_file = Some(is_single_file && self.accepted.may_be_single());
                }
                ToDestination::List(listed) => self.list(listed)?,
                ToDestination::FoldersDone(folders) => {
                    let mut tree = shared.tree();
                    for number in folders {
                        let done = tree.folders.end_list(number)?;
                        shared.end_folders(&mut tree, done);
                    }
                }
                ToDestination::Walked => shared.progress.end_walk(),
                ToDestination::End => {
                    shared.wait_for_files()?;
                    shared.delete_extras();
                    shared.sync_names();
                    let mut tree = shared.tree();
                    let mut summary = std::mem::take(&mut tree.summary);
                    summary.entries = tree.entries + tree.folders.count();
                    summary.bytes_saved = frames.saved_bytes() + shared.saved_bytes.load(Relaxed);
                    return Ok(summary);
                }
                ToDestination::Times(times) => shared.progress.set_peer(times),
                content => {
                    watch.lap(Activity::Stream);
                    shared.take_content(content, data)?;
                    watch.lap(Activity::Storage);
                }
            }
        }
    }

    fn list(&mut self, listed: Vec<Listed>) -> Result<(), Error> {
        if listed.len() > BATCH_MAX {
            return Err(Error::Protocol("a list that is too long"));
        }
        let (mut count, mut bits, mut all_held, mut held_count) = (0, Vec::new(), Vec::new(), 0);
        let mut comparable = Vec::new();
        for item in listed {
            match item {
                Listed::Folder(folder) => self.add_folder(folder)?,
                Listed::Entry(entry) => {
                    let Some(requested) = self.add_entry(entry)? else { continue };
                    if count % 8 == 0 {
                        bits.push(0);
                    }
                    bits[count / 8] |= u8::from(requested.is_some()) << (count % 8);
                    if let Some(Request { held, is_comparable }) = requested {
                        if is_comparable {
                            comparable.push(count as u32);
                        }
                        if !held.is_empty() && held_count + held.len() <= HELD_MAX {
                            held_count += held.len();
                            let ranges = held.into_iter().map(|range| (range.start, range.end));
                            all_held.push(Held { index: count as u32, ranges: ranges.collect() });
                        }
                    }
                    count += 1;
                }
            }
        }
        {
            let tree = self.shared.tree();
            self.shared.progress.set_entries(tree.entries + tree.folders.count());
        }
        if count == 0 {
            return Ok(());
        }
        let (count, held) = (count as u32, all_held);
        self.shared.answer(&ToSource::Requested { count, bits, held, comparable })
    }

    fn add_folder(&mut self, folder: Folder) -> Result<(), Error> {
        let Folder { parent, name, attributes, is_left_out } = folder;
        let options = &self.shared.options;
        let deletes = options.deletion.mode != DeletionMode::No && !is_left_out;
        let mut tree = self.shared.tree();
        if !tree.folders.has_destination() {
            let is_single_file = self.is_single_file.ok_or(Error::Protocol("no beginning"))?;
            let OpenDestination { open, single_name, old } =
                open_destination(self.shared.destination, is_single_file, options.dry_run)?;
            self.single_name = single_name;
            let open = open.map(Arc::new);
            // The folder of a single file is not a copy.
            let attributes = attributes.filter(|_| self.single_name.is_none());
            self.prepare(open.as_ref(), attributes.as_ref());
            let earlier = EarlierCopies::open(options, open.as_deref(), self.shared.destination);
            let (copies, failures) = earlier;
            tree.earlier_copies = Arc::new(copies);
            for failure in failures {
                tree.summary.add_notice(failure);
            }
            tree.destination.clone_from(&open);
            tree.folders.add_destination(open, attributes, old);
            if deletes {
                tree.folders.collect_names(0);
            }
            return Ok(());
        }
        if self.single_name.is_some() {
            return Err(Error::Protocol("a folder in place of a file"));
        }
        self.check_accepted(&tree, parent, &name, true)?;
        if options.replacement.keeps_folders && deletion::is_of_haul(&name) {
            return Err(Error::Protocol("a directory with the name of an interrupted transfer"));
        }
        let place = Place { folder: parent, name: name.clone() };
        tree.folders.record_name(parent, &name);
        match tree.folders.add(parent, name, attributes.clone())? {
            Ok(open) => self.prepare(open.as_ref(), attributes.as_ref()),
            Err(errno) => tree.fail_errno(&place, errno),
        }
        let latest = tree.folders.latest();
        if deletes && !tree.folders.is_new(latest) {
            tree.folders.collect_names(latest);
        }
        Ok(())
    }

    /// Gives a folder its group and its permissions, and for now all rights of the owner: new
    /// entries of a folder with the set-group-ID bit get the group of the folder. A failure shows
    /// when the attributes are set at the end.
    fn prepare(&self, open: Option<&Arc<OwnedFd>>, attributes: Option<&Attributes>) {
        let Shared { options, setter, .. } = self.shared;
        // A folder that exists and keeps its attributes gets none for now either.
        let keeps = options.dry_run || options.replacement.keeps_folders;
        if let (Some(open), Some(attributes), false) = (open, attributes, keeps) {
            let _ = setter.prepare_folder(open, attributes);
        }
    }

    /// Refuses a path that the user did not ask for.
    fn check_accepted(
        &self,
        tree: &Tree,
        folder: u64,
        name: &[u8],
        is_folder: bool,
    ) -> Result<(), Error> {
        let is_accepted = match self.accepted {
            AcceptedPaths::All | AcceptedPaths::Content => true,
            these @ AcceptedPaths::These(_) => {
                these.accepts(&tree.folders.path_of(folder, name), is_folder)
            }
        };
        if is_accepted {
            Ok(())
        } else {
            Err(Error::Protocol("a path that the user did not ask for"))
        }
    }

    /// Adds an entry. For a regular file, the answer to the source.
    fn add_entry(&mut self, entry: Entry) -> Result<Option<Answer>, Error> {
        let Entry { folder, name, kind, attributes } = entry;
        check_name(&name)?;
        let options = &self.shared.options;
        let mut tree = self.shared.tree();
        self.check_accepted(&tree, folder, &name, false)?;
        let id = tree.entries;
        if self.single_name.is_some() && id > 0 {
            return Err(Error::Protocol("a second file in place of one"));
        }
        tree.entries += 1;
        let single = self.single_name.clone().filter(|_| folder == 0);
        let place = Place { folder, name: single.unwrap_or(name) };
        tree.folders.record_name(folder, &place.name);
        if kind == Kind::LeftOut {
            return Ok(None);
        }
        let is_file = matches!(kind, Kind::File { .. });
        // The file of a restricted key could pass for a part of an interrupted transfer.
        let is_refused = options.replacement.keeps_folders && deletion::is_of_haul(&place.name);
        if is_refused {
            tree.fail_errno(&place, Errno::PERM);
        }
        if is_refused || self.has_several_sources && !tree.is_first(&place) {
            return Ok(is_file.then_some(None));
        }
        let (open, old) = match Self::open_place(&mut tree, &place)? {
            Ok(opened) => opened,
            Err(errno) => {
                return Ok(self.answer_without(&mut tree, id, &place, (&kind, &attributes), errno));
            }
        };
        if is_left(options, &kind, &attributes, old.as_ref()) {
            if let Kind::File { is_linked, size, .. } = kind {
                self.leave(
                    &mut tree,
                    id,
                    &RequestedFile::new(place, attributes, old, is_linked),
                    size,
                )?;
            }
            return Ok(is_file.then_some(None));
        }
        let old = match make_way(options, &open, &place.name, old) {
            Ok(old) => old,
            Err(errno) => {
                tree.fail_errno(&place, errno);
                return Ok(is_file.then_some(None));
            }
        };
        self.make_entry(&mut tree, id, (place, kind, attributes), (open, old))
    }

    /// Makes an entry, or requests the content of a file. `old` has the name now.
    fn make_entry(
        &self,
        tree: &mut Tree,
        id: u64,
        (place, kind, attributes): (Place, Kind, Attributes),
        (open, old): OpenPlace,
    ) -> Result<Option<Answer>, Error> {
        let options = &self.shared.options;
        match kind {
            Kind::File { size, is_linked, version, link_to } => {
                if let Some(first) = link_to {
                    if first >= id {
                        return Err(Error::Protocol("a link to a later entry"));
                    }
                    if let Some(target) = tree.link_target(first) {
                        if !options.dry_run {
                            tree.add_link(target, place)?;
                        }
                        return Ok(Some(None));
                    }
                    tree.set_link_alias(first, id);
                }
                // The permissions of a link or of something else do not apply to a file.
                let old = old.filter(is_regular);
                let file = RequestedFile::new(place, attributes, old, is_linked);
                self.add_file(tree, id, file, Original { version, size }, &open).map(Some)
            }
            kind => {
                let made = self.make_special(&open, &place.name, &kind, &attributes, old);
                if let Err(errno) = made {
                    tree.fail_errno(&place, errno);
                }
                Ok(None)
            }
        }
    }

    /// The answer for an entry whose folder is not open, or whose name cannot be read.
    fn answer_without(
        &self,
        tree: &mut Tree,
        id: u64,
        place: &Place,
        (kind, attributes): (&Kind, &Attributes),
        errno: Errno,
    ) -> Option<Answer> {
        let options = &self.shared.options;
        let Kind::File { size, is_linked, link_to, .. } = *kind else {
            if errno != Errno::NOENT || !(options.replacement.only_existing || options.dry_run) {
                tree.fail_errno(place, errno);
            }
            return None;
        };
        match errno {
            // The folder was not made, so its entries are new.
            Errno::NOENT if options.replacement.only_existing => {}
            Errno::NOENT if options.dry_run => {
                if link_to.is_some_and(|first| tree.link_target(first).is_some()) {
                    return Some(None);
                }
                if is_linked {
                    tree.set_link_alias(link_to.unwrap_or(id), id);
                    tree.add_dry_target(id);
                }
                if !self.is_in_earlier(tree, place, size, attributes) {
                    self.count_sent(tree, place, size);
                    return Some(Some(Request::default()));
                }
                tree.summary.files_linked += 1;
            }
            errno => tree.fail_errno(place, errno),
        }
        Some(None)
    }

    /// The open folder of an entry, and what has the name of the entry. The inner error is one of
    /// the entry.
    fn open_place(tree: &mut Tree, place: &Place) -> Result<rustix::io::Result<OpenPlace>, Error> {
        let open = tree.folders.get(place.folder)?;
        let is_new = tree.folders.is_new(place.folder);
        Ok(open.and_then(|open| {
            let old = if is_new { None } else { look(&open, &place.name)? };
            Ok((open, old))
        }))
    }

    /// Makes something else than a file or a folder.
    fn make_special(
        &self,
        open: &OwnedFd,
        name: &[u8],
        kind: &Kind,
        attributes: &Attributes,
        old: Option<Stat>,
    ) -> rustix::io::Result<()> {
        let Shared { options, setter, .. } = self.shared;
        if options.dry_run {
            return Ok(());
        }
        let replaces = !options.replacement.keeps_existing;
        special::make_special(setter, open, name, kind, attributes, old, replaces)
    }

    /// Counts a file that stays as the options ask. If the file may differ from the original, other
    /// names of the original do not become links to it.
    fn leave(
        &self,
        tree: &mut Tree,
        id: u64,
        file: &RequestedFile,
        size: u64,
    ) -> Result<(), Error> {
        let Some(old) = &file.old else { return Ok(()) };
        let is_up_to_date = is_regular(old)
            && old.st_size as u64 == size
            && attributes::mtime(old) == file.attributes.mtime;
        if is_up_to_date {
            return self.keep(tree, id, file);
        }
        if self.shared.options.replacement.keeps_folders {
            // Otherwise a backup would silently lack the file.
            tree.fail(&file.place, &"it differs, and this key may only add files");
        }
        tree.summary.files_kept += 1;
        Ok(())
    }

    /// Counts a file that is up to date, and makes the file known as the target of links.
    fn keep(&self, tree: &mut Tree, id: u64, file: &RequestedFile) -> Result<(), Error> {
        tree.summary.files_up_to_date += 1;
        let done = tree.add_target(id, file)?;
        self.shared.end_folders(tree, done);
        Ok(())
    }

    /// Decides whether a file is requested. A file that is up to date gets its attributes.
    fn add_file(
        &self,
        tree: &mut Tree,
        id: u64,
        mut file: RequestedFile,
        original: Original,
        open: &Arc<OwnedFd>,
    ) -> Result<Answer, Error> {
        let size = original.size;
        let options = &self.shared.options;
        let Replacement { ignores_times, size_only, .. } = options.replacement;
        let is_up_to_date = file.old.as_ref().is_some_and(|old| {
            old.st_size as u64 == size
                && (size_only || attributes::mtime(old) == file.attributes.mtime)
        });
        if is_up_to_date && !ignores_times {
            if !options.dry_run
                && let Err(errno) = self.set_up_to_date(open, &file)
            {
                tree.fail_errno(&file.place, errno);
            }
            self.keep(tree, id, &file)?;
            return Ok(None);
        }
        if self.link_to_earlier(tree, &file, size, open) {
            tree.summary.files_linked += 1;
            let done = tree.add_target(id, &file)?;
            self.shared.end_folders(tree, done);
            return Ok(None);
        }
        if options.dry_run {
            self.count_sent(tree, &file.place, size);
            if file.is_linked {
                tree.add_dry_target(id);
            }
            return Ok(Some(Request::default()));
        }
        let held = file.resume(open, original).unwrap_or_else(|unusable| {
            let reason = match unusable {
                Unusable::Torn => "is torn",
                Unusable::Foreign => "is of another version",
            };
            let path = tree.folders.path_of(file.place.folder, &file.place.name);
            tree.summary.add_notice(format!(
                "{}: the journal of an interrupted transfer {reason}, so the file is sent from \
                 its beginning",
                String::from_utf8_lossy(&path)
            ));
            Vec::new()
        });
        let held_bytes = held.iter().map(|range| range.end - range.start).sum();
        self.shared.progress.request(size.saturating_sub(held_bytes));
        tree.summary.bytes_held += held_bytes;
        let is_comparable = is_comparable(options, tree, &file, original);
        file.is_comparable = is_comparable;
        tree.request(id, file)?;
        Ok(Some(Request { held, is_comparable }))
    }

    /// Makes a file a hard link to an equal file of an earlier copy. False if the earlier copies
    /// lack the file, or if the link cannot be made.
    fn link_to_earlier(
        &self,
        tree: &Tree,
        file: &RequestedFile,
        size: u64,
        open: &OwnedFd,
    ) -> bool {
        let Shared { options, setter, .. } = self.shared;
        if options.earlier_copies.is_empty() {
            return false;
        }
        if options.dry_run {
            return self.is_in_earlier(tree, &file.place, size, &file.attributes);
        }
        let path = tree.folders.path_of(file.place.folder, &file.place.name);
        let earlier = tree.earlier_copies.find(&path, size, &file.attributes, setter);
        earlier.is_some_and(|earlier| {
            let name = split(&path).1;
            let replaces = !options.replacement.keeps_existing;
            let to = &file.place.name;
            earlier_copies::link(&earlier, name, open, to, replaces).is_ok()
        })
    }

    /// Whether an earlier copy has an equal file.
    fn is_in_earlier(
        &self,
        tree: &Tree,
        place: &Place,
        size: u64,
        attributes: &Attributes,
    ) -> bool {
        let path = tree.folders.path_of(place.folder, &place.name);
        tree.earlier_copies.find(&path, size, attributes, &self.shared.setter).is_some()
    }

    /// Counts a file that a dry run does not send.
    fn count_sent(&self, tree: &mut Tree, place: &Place, size: u64) {
        tree.summary.files_sent += 1;
        tree.summary.bytes_sent += size;
        (self.shared.on_file)(&tree.folders.path_of(place.folder, &place.name));
    }

    /// Sets the attributes of a file that is up to date.
    fn set_up_to_date(&self, open: &OwnedFd, file: &RequestedFile) -> rustix::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let (name, setter) = (&file.place.name[..], &self.shared.setter);
        let (attributes, old) = (&file.attributes, file.old.as_ref());
        let opened = match rustix::fs::openat(open, name, flags, Mode::empty()) {
            // The owner may not read the file, so it gets what can be set by its name.
            Err(Errno::ACCESS) => return setter.set_at(open.as_fd(), name, attributes, old),
            opened => opened?,
        };
        setter.set(&opened, attributes, attributes.mtime, old)
    }
}

/// Whether the blocks of a file are compared with the file that has the name now, or with an
/// earlier copy. Small files are packed, and are not compared.
fn is_comparable(options: &Options, tree: &Tree, file: &RequestedFile, original: Original) -> bool {
    let is_small = original.version == 0 || original.size < BLOCK_BYTES as u64;
    if options.delta == Delta::No || is_small {
        return false;
    }
    let is_large = |old: &Stat| old.st_size as u64 >= BLOCK_BYTES as u64;
    file.old.as_ref().map_or_else(
        || {
            let path = tree.folders.path_of(file.place.folder, &file.place.name);
            tree.earlier_copies.find_version(&path).is_some_and(|(_, old)| is_large(&old))
        },
        is_large,
    )
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// What has a name now; `None` if the name is free.
fn look(open: &OwnedFd, name: &[u8]) -> rustix::io::Result<Option<Stat>> {
    match rustix::fs::statat(open, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        stat => stat.map(Some),
    }
}

/// Removes an empty folder that has the name of an entry, as rsync does. Returns what has the name
/// then.
fn make_way(
    options: &Options,
    open: &OwnedFd,
    name: &[u8],
    old: Option<Stat>,
) -> rustix::io::Result<Option<Stat>> {
    let is_folder = |old: &Stat| FileType::from_raw_mode(old.st_mode) == FileType::Directory;
    if !old.as_ref().is_some_and(is_folder) {
        return Ok(old);
    }
    if !options.dry_run {
        let removed = rustix::fs::unlinkat(open, name, AtFlags::REMOVEDIR);
        removed.map_err(|errno| match errno {
            Errno::NOTEMPTY | Errno::EXIST => Errno::ISDIR,
            errno => errno,
        })?;
    }
    Ok(None)
}

/// Whether the user wants the destination to stay as it is at the place of an entry. `old` is what
/// is there.
fn is_left(options: &Options, kind: &Kind, attributes: &Attributes, old: Option<&Stat>) -> bool {
    let Replacement { keeps_newer, keeps_existing, only_existing, .. } = options.replacement;
    let Selection { size_min, size_max, .. } = options.selection;
    let is_newer = |old: &Stat| {
        let now = attributes::mtime(old);
        let of = |time: Time| (time.seconds, time.nanoseconds);
        of(now) > of(attributes.mtime) && is_regular(old)
    };
    match (kind, old) {
        (Kind::File { size, .. }, _)
            if *size < size_min || size_max.is_some_and(|most| *size > most) =>
        {
            true
        }
        (_, None) => only_existing,
        (_, Some(_)) if keeps_existing => true,
        (Kind::File { .. }, Some(old)) => keeps_newer && is_newer(old),
        (_, Some(_)) => false,
    }
}
