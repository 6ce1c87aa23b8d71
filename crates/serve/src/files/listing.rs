//! Directory listings, in pages: HTML for browsers, JSON for programs.
//!
//! A page has at most 10,000 entries. The query of the next page names the position of the last
//! entry, not a number, so that files that come and go between two requests neither hide nor repeat
//! another.

mod html;
mod store;

pub(crate) use html::escape;
pub(crate) use store::ListingStore;
pub use store::{ListingContent, RenderedListing};

use haul_fs::Blocking;
use haul_fs::Root;
use haul_http::target::{Target, decode_parameter, encode_segment};
use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// The largest number of entries of a page.
const ENTRIES_MAX: usize = 10_000;

/// What a query requests of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PageRequest {
    sort: Sort,
    is_descending: bool,
    is_json: bool,
    entries_max: usize,
    /// Only entries behind this position.
    after: Option<Position>,
}

/// A page of the entries of a directory, in the requested order.
#[derive(Debug)]
pub struct Listing {
    path: Vec<u8>,
    page: PageRequest,
    entries: Vec<Entry>,
    /// The query of the next page; `None` for the last one.
    next_query: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Sort {
    Name,
    Size,
    Modified,
}

/// The place of an entry in an order. Directories come first in every order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Position {
    is_file: bool,
    /// The size or the time; 0 in the order of names.
    value: i64,
    name: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: Vec<u8>,
    is_directory: bool,
    size_bytes: u64,
    modified_seconds: i64,
}

/// An entry of a JSON listing.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "ListingEntry")]
pub struct JsonEntry<'e> {
    /// The name. Bytes that are not UTF-8 are U+FFFD.
    name: Cow<'e, str>,
    /// The link to it, relative to the listing. It has every byte of the name.
    href: String,
    /// `file` or `folder`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// Size in bytes.
    size: u64,
    /// Time of the last change, RFC 3339.
    mtime: String,
}

impl PageRequest {
    /// Reads the parameters of a query: `format` (`json` or `html`; without it JSON if
    /// `prefers_json`), `sort` (`name`, `size`, `modified`), `order` (`asc`, `desc`), `limit` and
    /// `after`. What has no meaning has the default's.
    pub fn parse(target: &Target<'_>, prefers_json: bool) -> Self {
        let limit = target.parameter("limit").and_then(|limit| limit.parse().ok());
        Self {
            sort: match target.parameter("sort") {
                Some("size") => Sort::Size,
                Some("modified") => Sort::Modified,
                _ => Sort::Name,
            },
            is_descending: target.parameter("order") == Some("desc"),
            is_json: target.parameter("format").map_or(prefers_json, |format| format == "json"),
            entries_max: limit.unwrap_or(ENTRIES_MAX).clamp(1, ENTRIES_MAX),
            after: target.parameter("after").and_then(Position::parse),
        }
    }

    /// The query of the page after the one that ends with `last`.
    fn next_query(&self, last: &Position) -> String {
        let format = if self.is_json { "json" } else { "html" };
        let sort = match self.sort {
            Sort::Name => "name",
            Sort::Size => "size",
            Sort::Modified => "modified",
        };
        let order = if self.is_descending { "desc" } else { "asc" };
        let (limit, after) = (self.entries_max, last.encode());
        format!("format={format}&sort={sort}&order={order}&limit={limit}&after={after}")
    }

    fn compare(&self, one: &Position, other: &Position) -> Ordering {
        let order = one.value.cmp(&other.value).then_with(|| one.name.cmp(&other.name));
        let order = if self.is_descending { order.reverse() } else { order };
        one.is_file.cmp(&other.is_file).then(order)
    }
}

impl Position {
    /// Reads the parameter `after`: `d` or `f` for a directory or a file, the value, `:`, the name.
    fn parse(parameter: &str) -> Option<Self> {
        let decoded = decode_parameter(parameter);
        let (kind, rest) = decoded.split_first()?;
        let end = rest.iter().position(|&byte| byte == b':')?;
        let value = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
        let is_file = match kind {
            b'd' => false,
            b'f' => true,
            _ => return None,
        };
        Some(Self { is_file, value, name: rest[end + 1..].to_vec() })
    }

    fn encode(&self) -> String {
        let kind = if self.is_file { 'f' } else { 'd' };
        encode_segment(&[format!("{kind}{}:", self.value).as_bytes(), &self.name].concat())
    }
}

impl Listing {
    /// Reads a page of a directory. Symbolic links are resolved below `root`, so a link that leads
    /// out of it is not listed.
    ///
    /// It reads the whole directory, but keeps at most two pages in memory.
    pub fn read(
        root: &Root,
        directory: &File,
        path: &[u8],
        page: PageRequest,
        shows_hidden: bool,
    ) -> io::Result<Self> {
        let wanted = page.entries_max + 1;
        let mut found: Vec<(Position, Option<Entry>)> = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || (!shows_hidden && name.starts_with(b".")) {
                continue;
            }
            let read = || Entry::read(root, directory, path, name);
            // The order of names needs no more of most entries than the directory has.
            let (is_file, entry) = match (page.sort, entry.file_type()) {
                (Sort::Name, FileType::Directory) => (false, None),
                (Sort::Name, FileType::RegularFile) => (true, None),
                _ => match read() {
                    Some(entry) => (!entry.is_directory, Some(entry)),
                    None => continue,
                },
            };
            let value = entry.as_ref().map_or(0, |entry| entry.value(page.sort));
            let position = Position { is_file, value, name: name.to_vec() };
            if page.after.as_ref().is_some_and(|after| page.compare(&position, after).is_le()) {
                continue;
            }
            found.push((position, entry));
            if found.len() == 2 * wanted {
                found.select_nth_unstable_by(wanted - 1, |one, other| {
                    page.compare(&one.0, &other.0)
                });
                found.truncate(wanted);
            }
        }
        found.sort_unstable_by(|one, other| page.compare(&one.0, &other.0));
        let has_more = found.len() > page.entries_max;
        found.truncate(page.entries_max);
        let last = found.last().filter(|_| has_more);
        let next_query = last.map(|(position, _)| page.next_query(position));
        let entries = found.into_iter().filter_map(|(position, entry)| {
            entry.or_else(|| Entry::read(root, directory, path, &position.name))
        });
        Ok(Self { path: path.to_vec(), entries: entries.collect(), page, next_query })
    }

    /// Renders the listing in the requested format.
    pub fn render(&self) -> Vec<u8> {
        if self.page.is_json { self.to_json() } else { html::render(self).into_bytes() }
    }

    /// Renders an array of [`JsonEntry`].
    fn to_json(&self) -> Vec<u8> {
        let entries: Vec<_> = self
            .entries
            .iter()
            .map(|entry| JsonEntry {
                name: String::from_utf8_lossy(&entry.name),
                href: entry.href(),
                kind: if entry.is_directory { "folder" } else { "file" },
                size: entry.size_bytes,
                mtime: entry.modified().to_string(),
            })
            .collect();
        let mut json = serde_json::to_vec_pretty(&entries).unwrap_or_default();
        json.push(b'\n');
        json
    }
}

impl Entry {
    /// Reads an entry; `None` if it is gone, or neither a file nor a directory.
    fn read(root: &Root, directory: &File, path: &[u8], name: &[u8]) -> Option<Self> {
        let mut stat =
            rustix::fs::statat(directory.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            let below = if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() };
            let flags = OFlags::PATH;
            let file =
                root.open_below(&below, flags, rustix::fs::Mode::empty(), Blocking::Disk).ok()?;
            stat = rustix::fs::fstat(&file).ok()?;
        }
        let kind = FileType::from_raw_mode(stat.st_mode);
        matches!(kind, FileType::RegularFile | FileType::Directory).then(|| Self {
            name: name.to_vec(),
            is_directory: kind == FileType::Directory,
            size_bytes: if kind == FileType::Directory { 0 } else { stat.st_size as u64 },
            modified_seconds: stat.st_mtime,
        })
    }

    fn value(&self, sort: Sort) -> i64 {
        match sort {
            Sort::Name => 0,
            Sort::Size => i64::try_from(self.size_bytes).unwrap_or(i64::MAX),
            Sort::Modified => self.modified_seconds,
        }
    }

    /// The link to the entry. With `./` in front, a name with a colon is not parsed as a scheme.
    fn href(&self) -> String {
        format!("./{}{}", encode_segment(&self.name), if self.is_directory { "/" } else { "" })
    }

    fn modified(&self) -> jiff::Timestamp {
        jiff::Timestamp::from_second(self.modified_seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_fs::Symlinks;
    use std::fs;

    fn listing(folder: &std::path::Path, target: &str) -> Listing {
        let root = Root::open(folder, Symlinks::Inside).unwrap();
        let target = Target::parse(target).unwrap();
        let page = PageRequest::parse(&target, false);
        Listing::read(&root, &File::open(folder).unwrap(), &target.path, page, false).unwrap()
    }

    fn names(listing: &Listing) -> Vec<String> {
        listing
            .entries
            .iter()
            .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
            .collect()
    }

    #[test]
    fn a_listing_has_the_requested_order_with_directories_first() {
        let folder = tempfile::tempdir().unwrap();
        for (name, size) in [("b", 3), ("a", 20), ("c", 1), (".hidden", 1)] {
            fs::write(folder.path().join(name), vec![0; size]).unwrap();
        }
        fs::create_dir(folder.path().join("z")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("out")).unwrap();
        std::os::unix::fs::symlink("z", folder.path().join("in")).unwrap();
        let sorted = |target| names(&listing(folder.path(), target));
        assert_eq!(sorted("/"), ["in", "z", "a", "b", "c"]);
        assert_eq!(sorted("/?sort=name&order=desc"), ["z", "in", "c", "b", "a"]);
        assert_eq!(sorted("/?sort=size"), ["in", "z", "c", "b", "a"]);
        assert_eq!(sorted("/?sort=nonsense&order=<script>"), ["in", "z", "a", "b", "c"]);
        let json: serde_json::Value =
            serde_json::from_slice(&listing(folder.path(), "/?format=json").render()).unwrap();
        assert_eq!(json[2]["name"], "a");
        assert_eq!(json[2]["size"], 20);
        assert_eq!(json[1]["type"], "folder");
        assert_eq!(json[1]["href"], "./z/");
    }

    #[test]
    fn pages_in_every_order_have_each_entry_once() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..25 {
            let name = format!("{number}:%\u{FC}&");
            fs::write(folder.path().join(name), vec![0; number % 4]).unwrap();
        }
        for number in 0..5 {
            fs::create_dir(folder.path().join(format!("folder {number}"))).unwrap();
        }
        for order in ["sort=name", "sort=size", "sort=modified", "sort=size&order=desc", ""] {
            let whole = names(&listing(folder.path(), &format!("/?{order}")));
            assert_eq!(whole.len(), 30);
            for limit in [1, 4, 7, 29, 30, 31] {
                let mut paged = Vec::new();
                let mut query = Some(format!("limit={limit}&{order}"));
                while let Some(next) = query {
                    let page = listing(folder.path(), &format!("/?{next}"));
                    assert!(!page.entries.is_empty() && page.entries.len() <= limit);
                    paged.extend(names(&page));
                    query = page.next_query;
                }
                assert_eq!(paged, whole, "{order}, {limit} a page");
            }
        }
    }

    #[test]
    fn the_next_page_begins_behind_an_entry_that_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c", "d"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let next = listing(folder.path(), "/?limit=2").next_query.unwrap();
        fs::remove_file(folder.path().join("b")).unwrap();
        assert_eq!(names(&listing(folder.path(), &format!("/?{next}"))), ["c", "d"]);
        // What is not a position is ignored.
        for after in ["", "x0:a", "f:a", "f0", "f99999999999999999999:a", "%"] {
            let target = format!("/?after={after}");
            assert_eq!(names(&listing(folder.path(), &target)), ["a", "c", "d"], "{after}");
        }
    }

    #[test]
    fn a_file_name_cannot_inject_html() {
        let folder = tempfile::tempdir().unwrap();
        let name = "\"><img src=x onerror='alert(1)'>&";
        fs::write(folder.path().join(name), "").unwrap();
        fs::write(folder.path().join("javascript:alert(1)"), "").unwrap();
        let html = String::from_utf8(listing(folder.path(), "/").render()).unwrap();
        assert!(!html.contains("<img") && !html.contains("onerror='"), "{html}");
        assert!(html.contains("href=\"./%22%3E%3Cimg%20src"), "{html}");
        assert!(html.contains("href=\"./javascript%3Aalert"), "{html}");
    }
}
