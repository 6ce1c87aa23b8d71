//! A folder as a page for people and as JSON for programs.
//!
//! The page has no scripts: its columns are links that ask for another order. Names are escaped for HTML and for addresses, so
//! that whoever may put a file here cannot put a script into somebody's browser.

use haul_fs::Blocking;
use haul_fs::Root;
use haul_http::target::{Target, encode_path, encode_segment};
use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use serde::Serialize;
use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Entries that a page shows. A folder with more is listed in part, and says so.
const ENTRIES_MAX: usize = 10_000;

const STYLE: &str = include_str!("listing.css");

/// A folder's entries in the order that was asked for.
#[derive(Debug)]
pub struct Listing {
    path: Vec<u8>,
    sort: Sort,
    descends: bool,
    is_json: Option<bool>,
    entries: Vec<Entry>,
    is_cut: bool,
}

/// A listing as it is sent.
#[derive(Debug, Clone)]
pub struct Rendered {
    /// Whether it is JSON, and not a page.
    pub is_json: bool,
    /// The bytes.
    pub content: Arc<[u8]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Name,
    Size,
    Modified,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: Vec<u8>,
    is_folder: bool,
    size_bytes: u64,
    modified_seconds: i64,
}

/// What programs are told of an entry.
#[derive(Serialize)]
struct JsonEntry<'e> {
    name: std::borrow::Cow<'e, str>,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    mtime: String,
}

impl Listing {
    /// Reads a folder. What a symbolic link leads to is asked of `root`, so that a link out of it is not shown.
    pub fn read(
        root: &Root,
        folder: &File,
        target: &Target<'_>,
        shows_hidden: bool,
    ) -> io::Result<Self> {
        let mut entries = Vec::new();
        let mut is_cut = false;
        for found in Dir::read_from(folder)? {
            let found = found?;
            let name = found.file_name().to_bytes();
            if matches!(name, b"." | b"..") || (!shows_hidden && name.starts_with(b".")) {
                continue;
            }
            if entries.len() == ENTRIES_MAX {
                is_cut = true;
                break;
            }
            entries.extend(Entry::of(root, folder, &target.path, name));
        }
        let sort = match target.parameter("sort") {
            Some("size") => Sort::Size,
            Some("modified") => Sort::Modified,
            _ => Sort::Name,
        };
        let descends = target.parameter("order") == Some("desc");
        entries.sort_by(|one, other| {
            let by_name = one.name.cmp(&other.name);
            let order = match sort {
                Sort::Name => by_name,
                Sort::Size => one.size_bytes.cmp(&other.size_bytes).then(by_name),
                Sort::Modified => one.modified_seconds.cmp(&other.modified_seconds).then(by_name),
            };
            // Folders stay in front, whichever way the rest is sorted.
            other.is_folder.cmp(&one.is_folder).then(if descends { order.reverse() } else { order })
        });
        let is_json = target.parameter("format").map(|format| format == "json");
        Ok(Self { path: target.path.clone(), sort, descends, is_json, entries, is_cut })
    }

    /// As it was asked for: by the query (`?format=json`, `?format=html`), or else by what the client accepts.
    pub fn render(&self, accepts_json: bool) -> Rendered {
        let is_json = self.is_json.unwrap_or(accepts_json);
        Rendered { is_json, content: if is_json { self.to_json() } else { self.to_html() }.into() }
    }

    /// As JSON: an array of objects with `name`, `type` (`file` or `folder`), `size` in bytes and `mtime` in RFC 3339. Bytes
    /// of a name that are no UTF-8 become U+FFFD.
    fn to_json(&self) -> Vec<u8> {
        let entries: Vec<_> = self
            .entries
            .iter()
            .map(|entry| JsonEntry {
                name: String::from_utf8_lossy(&entry.name),
                kind: if entry.is_folder { "folder" } else { "file" },
                size: entry.size_bytes,
                mtime: entry.modified().to_string(),
            })
            .collect();
        let mut json = serde_json::to_vec_pretty(&entries).unwrap_or_default();
        json.push(b'\n');
        json
    }

    /// As a page.
    fn to_html(&self) -> Vec<u8> {
        let mut html = String::new();
        // Writing to a String does not fail.
        let _ = self.write_html(&mut html);
        html.into_bytes()
    }

    fn write_html(&self, html: &mut String) -> std::fmt::Result {
        let shown = escape(&format!("/{}", String::from_utf8_lossy(&self.path)));
        write!(
            html,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{shown}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>"
        )?;
        self.write_crumbs(html)?;
        write!(html, "</h1>\n<table>\n<thead><tr>")?;
        for (sort, name, parameter) in [
            (Sort::Name, "Name", "name"),
            (Sort::Size, "Size", "size"),
            (Sort::Modified, "Modified", "modified"),
        ] {
            let is_current = sort == self.sort;
            let order = if is_current && !self.descends { "desc" } else { "asc" };
            let (aria, arrow) = match (is_current, self.descends) {
                (false, _) => ("", ""),
                (true, false) => (" aria-sort=\"ascending\"", " \u{2191}"),
                (true, true) => (" aria-sort=\"descending\"", " \u{2193}"),
            };
            write!(
                html,
                "<th{aria}><a href=\"?sort={parameter}&amp;order={order}\">{name}{arrow}</a></th>"
            )?;
        }
        html.push_str("</tr></thead>\n<tbody>\n");
        if !self.path.is_empty() {
            html.push_str("<tr><td><a href=\"../\">../</a></td><td></td><td></td></tr>\n");
        }
        for entry in &self.entries {
            entry.write_row(html)?;
        }
        html.push_str("</tbody>\n</table>\n");
        let count = self.entries.len();
        match (count, self.is_cut) {
            (0, _) => html.push_str("<p>This folder is empty.</p>\n"),
            (_, true) => writeln!(html, "<p>Only {count} entries are shown: there are more.</p>")?,
            (1, _) => html.push_str("<p>1 entry</p>\n"),
            _ => writeln!(html, "<p>{count} entries</p>")?,
        }
        html.push_str("</body>\n</html>\n");
        Ok(())
    }

    /// The way here, each folder of it a link.
    fn write_crumbs(&self, html: &mut String) -> std::fmt::Result {
        html.push_str("<a href=\"/\">/</a>");
        let mut end = 0;
        for segment in self.path.split(|&byte| byte == b'/').filter(|segment| !segment.is_empty()) {
            end += segment.len();
            let link = encode_path(&self.path[..end]);
            write!(html, "<a href=\"{link}/\">{}/</a>", escape(&String::from_utf8_lossy(segment)))?;
            end += 1;
        }
        Ok(())
    }
}

impl Entry {
    fn of(root: &Root, folder: &File, path: &[u8], name: &[u8]) -> Option<Self> {
        let mut stat = rustix::fs::statat(folder.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
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
            is_folder: kind == FileType::Directory,
            size_bytes: if kind == FileType::Directory { 0 } else { stat.st_size as u64 },
            modified_seconds: stat.st_mtime,
        })
    }

    fn modified(&self) -> jiff::Timestamp {
        jiff::Timestamp::from_second(self.modified_seconds).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }

    fn write_row(&self, html: &mut String) -> std::fmt::Result {
        let slash = if self.is_folder { "/" } else { "" };
        // `./` in front, so that a name with a colon is not taken for a scheme.
        let link = encode_segment(&self.name);
        let name = escape(&String::from_utf8_lossy(&self.name));
        let size = if self.is_folder { String::new() } else { human_size(self.size_bytes) };
        let modified = self.modified();
        writeln!(
            html,
            "<tr><td><a href=\"./{link}{slash}\">{name}{slash}</a></td><td title=\"{} bytes\">{size}</td>\
             <td><time datetime=\"{modified}\">{}</time></td></tr>",
            self.size_bytes,
            modified.strftime("%Y-%m-%d %H:%M"),
        )
    }
}

fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

/// Text for HTML, in elements and in attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use haul_fs::Symlinks;
    use std::fs;

    fn listing(folder: &std::path::Path, target: &str) -> Listing {
        let root = Root::open(folder, Symlinks::Inside).unwrap();
        let target = Target::parse(target).unwrap();
        Listing::read(&root, &File::open(folder).unwrap(), &target, false).unwrap()
    }

    fn names(listing: &Listing) -> Vec<String> {
        listing
            .entries
            .iter()
            .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
            .collect()
    }

    #[test]
    fn a_folder_is_sorted_as_asked_with_folders_in_front() {
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
            serde_json::from_slice(&listing(folder.path(), "/").to_json()).unwrap();
        assert_eq!(json[2]["name"], "a");
        assert_eq!(json[2]["size"], 20);
        assert_eq!(json[1]["type"], "folder");
    }

    #[test]
    fn a_name_cannot_break_out_of_the_page() {
        let folder = tempfile::tempdir().unwrap();
        let name = "\"><img src=x onerror='alert(1)'>&";
        fs::write(folder.path().join(name), "").unwrap();
        fs::write(folder.path().join("javascript:alert(1)"), "").unwrap();
        let html = String::from_utf8(listing(folder.path(), "/").to_html()).unwrap();
        assert!(!html.contains("<img") && !html.contains("onerror='"), "{html}");
        assert!(html.contains("href=\"./%22%3E%3Cimg%20src"), "{html}");
        assert!(html.contains("href=\"./javascript%3Aalert"), "{html}");
    }

    #[test]
    fn sizes_are_written_for_people() {
        let shown: Vec<_> = [0, 1023, 1024, 1536, 1 << 20, (1 << 20) - 1, u64::MAX]
            .into_iter()
            .map(human_size)
            .collect();
        assert_eq!(
            shown,
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "16384.0 PiB"]
        );
    }
}
